"""Models of many families on the meta device, and their golden routes.

``python tests/routing/families.py`` writes ``golden.json`` anew; read the difference before committing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn

from hf_emopt.routing import RouteTable, route_parameters

GOLDEN = Path(__file__).with_name("golden.json")

_MOE = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
_DENSE = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 688, "vocab_size": 1024}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


def _mamba2() -> nn.Module:
    config = tf.Mamba2Config(
        num_hidden_layers=2, hidden_size=256, num_heads=8, head_dim=64, state_size=16, n_groups=2, vocab_size=1024
    )
    return tf.Mamba2ForCausalLM(config)


def _qwen3_next() -> nn.Module:
    config = tf.Qwen3NextConfig(
        **_MOE, **_HEADS, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        shared_expert_intermediate_size=96, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=48, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return tf.Qwen3NextForCausalLM(config)


def _deepseek_v3() -> nn.Module:
    config = tf.DeepseekV3Config(
        **_MOE, num_attention_heads=8, num_key_value_heads=8, q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=24,
        qk_rope_head_dim=16, v_head_dim=32, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=64, first_k_dense_replace=1,
    )  # fmt: skip
    return tf.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> nn.Module:
    config = tf.GptOssConfig(**{**_MOE, "intermediate_size": 192}, **_HEADS, head_dim=32, num_local_experts=4)
    return tf.GptOssForCausalLM(config)


def _llama4() -> nn.Module:
    config = tf.Llama4TextConfig(
        **_MOE, **_HEADS, head_dim=32, intermediate_size_mlp=384, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    )  # fmt: skip
    return tf.Llama4ForCausalLM(config)


def _resnet18() -> nn.Module:
    config = tf.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000
    )
    return tf.ResNetForImageClassification(config)


def _gemma3() -> nn.Module:
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_DENSE, **_HEADS, head_dim=32))


def _whisper() -> nn.Module:
    config = tf.WhisperConfig(
        d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=256, decoder_ffn_dim=256, vocab_size=1024, max_source_positions=100, pad_token_id=0,
    )  # fmt: skip
    return tf.WhisperForConditionalGeneration(config)


def _dbrx() -> nn.Module:
    config = tf.DbrxConfig(
        d_model=128, n_heads=8, n_layers=2, vocab_size=1024, attn_config={"kv_n_heads": 2, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "hidden_size": 128},
    )  # fmt: skip
    return tf.DbrxForCausalLM(config)


def _falcon() -> nn.Module:
    config = tf.FalconConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_kv_heads=2, vocab_size=1024,
        new_decoder_architecture=True,
    )  # fmt: skip
    return tf.FalconForCausalLM(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE, **_HEADS)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DENSE, **_HEADS, head_dim=32)),
    "gemma3": _gemma3,
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**_MOE, **_HEADS, head_dim=32, num_experts=4, moe_intermediate_size=64)
    ),
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**_MOE, **_HEADS, num_local_experts=4)),
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=2, add_cross_attention=True)),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_DENSE, num_attention_heads=8)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**_DENSE, **_HEADS, pad_token_id=0)),
    "modernbert": lambda: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(**{**_DENSE, "intermediate_size": 384}, num_attention_heads=8, pad_token_id=0)
    ),
    "bert": lambda: tf.BertForPreTraining(tf.BertConfig(num_hidden_layers=2)),
    "bert_classifier": lambda: tf.BertForSequenceClassification(tf.BertConfig(num_hidden_layers=1, num_labels=5)),
    "roberta_classifier": lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(num_hidden_layers=1)),
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(num_hidden_layers=2, num_labels=10)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(num_layers=2, num_decoder_layers=2)),
    "whisper": _whisper,
    "mamba2": _mamba2,
    "qwen3_next": _qwen3_next,
    "bloom": lambda: tf.BloomForCausalLM(tf.BloomConfig(hidden_size=256, n_layer=2, n_head=8, vocab_size=1024)),
    "falcon": _falcon,
    "resnet18": _resnet18,
    "mobilenet_v2": lambda: tf.MobileNetV2ForImageClassification(tf.MobileNetV2Config(num_labels=10)),
    "convnext": lambda: tf.ConvNextForImageClassification(tf.ConvNextConfig(depths=[1, 1, 2, 1], num_labels=10)),
    "swin": lambda: tf.SwinForImageClassification(tf.SwinConfig(depths=[1, 2], num_heads=[3, 6], num_labels=10)),
    "resnet50": lambda: tf.ResNetForImageClassification(tf.ResNetConfig(depths=[1, 2, 1, 1], num_labels=10)),
    "mobilenet_v1": lambda: tf.MobileNetV1ForImageClassification(tf.MobileNetV1Config(num_labels=10)),
    "efficientnet": lambda: tf.EfficientNetForImageClassification(
        tf.EfficientNetConfig(width_coefficient=0.5, depth_coefficient=0.5, num_labels=10)
    ),
    "dbrx": _dbrx,
}


def build(family: str, *, device: str = "meta") -> nn.Module:
    """The family's model on ``device``."""
    with torch.device(device):
        return FAMILIES[family]()


def summary(table: RouteTable) -> dict[str, Any]:
    """The printed table as data, without the reasons, which may be reworded; elementwise vectors are only counted."""
    lines = [
        f"{row['name']} x{row['count']} {'x'.join(map(str, row['shape']))} {row['kind']}"
        f"{' [' + row['units'] + ']' if row['units'] else ''}{'' if row['decay'] else ' no-decay'}"
        for row in table.collapsed()
        if row["kind"] == "matrix" or len(row["shape"]) > 1
    ]
    vectors = [route for route in table if route.kind == "aux" and len(route.shape) < 2]
    return {
        "routes": lines,
        "vectors": len(vectors),
        "vectors_with_decay": sum(route.decay for route in vectors),
        "matrices": table.matrix_count,
        "matrix_numel": table.matrix_numel,
        "aux_numel": table.aux_numel,
    }


if __name__ == "__main__":
    golden = {family: summary(route_parameters(build(family))) for family in FAMILIES}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
