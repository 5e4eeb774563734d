"""Models that transformers shards while it loads them: tensor parallelism, alone and under FSDP2, and expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Worlds
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from zoo import assert_close, weights

import hf_emopt

STEPS = 3
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {"ns_dtype": "float32"}),
    "normuon": (hf_emopt.NorMuon, {"ns_dtype": "float32"}),
}


def fresh(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON))  # type: ignore[arg-type]
    return MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=4))  # type: ignore[arg-type]


def train(model: nn.Module, rule: str) -> dict[str, Any]:
    cls, options = RULES[rule]
    optimizer = cls(model, lr=0.02, weight_decay=0.1, transport_dtype="float32", **options)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 64, (4, 16), generator=generator)  # the same on all ranks
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "transforms": optimizer.transform_count}


def sharded(folder: str, rule: str, sizes: dict[str, int]) -> dict[str, Any]:
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    found = train(model, rule)
    cut = {tuple(map(str, p.placements)) for p in model.parameters() if isinstance(p, DTensor)}
    return {**found, "placements": sorted(cut)}


CASES = {
    "tp2": ("llama", {"tp_size": 2}),
    "tp2-fsdp2": ("llama", {"tp_size": 2, "fsdp_size": 2}),
    "moe-tp2": ("mixtral", {"tp_size": 2}),
    "moe-fsdp4-ep2": ("mixtral", {"fsdp_size": 4, "ep_size": 2}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_one_process(worlds: Worlds, tmp_path: Path, case: str, rule: str) -> None:
    kind, sizes = CASES[case]
    model = fresh(kind)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    alone = train(model, rule)
    wanted: dict[str, Tensor] = alone["weights"]
    size = max(sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1), 2)
    results = worlds[size].run(sharded, folder=str(tmp_path), rule=rule, sizes=sizes)
    for result in results:
        assert result["placements"]
        assert_close(result["weights"], wanted, 1e-5)
    assert sum(result["transforms"] for result in results) == alone["transforms"]
