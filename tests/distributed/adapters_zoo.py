"""A model with a LoRA adapter of every kind, in blocks that the zoo's layouts and gradients know how to treat."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn
from transformers import GPT2Config, MixtralConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from zoo import Block, Zoo, linear

import hf_emopt

PAIRS = 2 + 2 + 1 + 1 + 3
"""Linear, Conv1D, Conv2d, Embedding, and one for each of three experts."""

JOINT: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "float32", "lora": "joint"}
MODES: dict[str, Any] = {
    "muon": (hf_emopt.Muon, JOINT),
    "normuon": (hf_emopt.NorMuon, JOINT),
    "separate": (hf_emopt.Muon, {**JOINT, "lora": "separate", "lora_lr_ratio": 4.0}),
}


def adapters_zoo(start: bool = False, dtype: torch.dtype = torch.float32) -> Zoo:
    """Adapters of rank 3; drawn at random, or with ``start`` as PEFT makes them, half of the factors zero."""
    torch.manual_seed(0)
    gpt2 = GPT2Config(n_embd=12, n_head=2, n_layer=1)
    model = Zoo(
        linears=Block(a=linear(33, 17), b=linear(7, 40)),
        gpt2=Block(attn=GPT2Attention(gpt2, layer_idx=0)),
        conv=Block(c=nn.Conv2d(5, 8, 3)),
        moe=Block(
            experts=MixtralExperts(MixtralConfig(hidden_size=10, intermediate_size=6, num_local_experts=3)),
            embedding=nn.Embedding(23, 6),
        ),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    plain = ["a", "b", "c_attn", "c_proj", "c", "embedding"]
    for targets in ({"target_modules": [], "target_parameters": ["experts.down_proj"]}, {"target_modules": plain}):
        peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=6, **targets), model)
    if not start:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.5)
    return model.to(dtype)
