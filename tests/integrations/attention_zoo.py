"""Tiny models with one layer, of families that store and treat query and key in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

_TINY: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TINY, "num_key_value_heads": 2}
_MLA: dict[str, Any] = {
    **_TINY, "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
_ENCODER_DECODER = {
    "vocab_size": 48, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

CONFIGS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "llama": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**_GROUPED, attention_bias=True)),
    "llama-two-layers": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**{**_GROUPED, "num_hidden_layers": 2})),
    "mistral-window": (tf.MistralForCausalLM, lambda: tf.MistralConfig(**_GROUPED, head_dim=8, sliding_window=4)),
    "gpt2": (tf.GPT2LMHeadModel, lambda: tf.GPT2Config(n_embd=32, n_head=4, n_layer=1, n_positions=64, vocab_size=48,
             bos_token_id=1, eos_token_id=2)),
    "gpt_neox": (tf.GPTNeoXForCausalLM, lambda: tf.GPTNeoXConfig(**_TINY)),
    "phi3": (tf.Phi3ForCausalLM, lambda: tf.Phi3Config(**_GROUPED)),
    "gemma2": (tf.Gemma2ForCausalLM, lambda: tf.Gemma2Config(**_GROUPED, head_dim=8, attn_logit_softcapping=30.0)),
    "gemma3": (tf.Gemma3ForCausalLM, lambda: tf.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=4)),
    "qwen3": (tf.Qwen3ForCausalLM, lambda: tf.Qwen3Config(**_GROUPED, head_dim=8)),
    "qwen3_next": (tf.Qwen3NextForCausalLM, lambda: tf.Qwen3NextConfig(
        **_GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["full_attention"])),
    "olmo2": (tf.Olmo2ForCausalLM, lambda: tf.Olmo2Config(**_GROUPED)),
    "cohere": (tf.CohereForCausalLM, lambda: tf.CohereConfig(**_GROUPED, use_qk_norm=True)),
    "deepseek_v3": (tf.DeepseekV3ForCausalLM, lambda: tf.DeepseekV3Config(**_MLA, q_lora_rank=16)),
    "deepseek_v2": (tf.DeepseekV2ForCausalLM, lambda: tf.DeepseekV2Config(**_MLA, q_lora_rank=None)),
    "gpt_bigcode": (tf.GPTBigCodeForCausalLM, lambda: tf.GPTBigCodeConfig(n_embd=32, n_head=4, n_layer=1, n_positions=64,
                    vocab_size=48, bos_token_id=1, eos_token_id=2)),
    "codegen": (tf.CodeGenForCausalLM, lambda: tf.CodeGenConfig(n_embd=32, n_head=4, n_layer=1, n_positions=64, n_ctx=64,
                vocab_size=48, rotary_dim=4, bos_token_id=1, eos_token_id=2)),
    "persimmon": (tf.PersimmonForCausalLM, lambda: tf.PersimmonConfig(**_TINY, qk_layernorm=True)),
    "bert": (tf.BertForMaskedLM, lambda: tf.BertConfig(**_TINY)),
    "modernbert": (tf.ModernBertForMaskedLM, lambda: tf.ModernBertConfig(
        **_TINY, cls_token_id=3, sep_token_id=4, local_attention=6, global_attn_every_n_layers=2)),
    "bart": (tf.BartForConditionalGeneration, lambda: tf.BartConfig(**_ENCODER_DECODER, max_position_embeddings=64)),
}  # fmt: skip


def build(family: str, implementation: str = "eager") -> nn.Module:
    """The family's model with every weight nudged, none of which is zero then, in ``eval`` mode."""
    kind, config = CONFIGS[family]
    torch.manual_seed(0)
    model = kind._from_config(config(), attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.eval()


def batch(padding: str = "none") -> dict[str, Tensor]:
    """Four sequences of up to 13 tokens."""
    tokens = torch.randint(5, 48, (4, 13), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    for row, count in enumerate((0, 3, 7, 1)):
        if padding == "left":
            mask[row, :count] = 0
        elif padding == "right" and count:
            mask[row, -count:] = 0
    if padding == "none":
        return {"input_ids": tokens}
    return {"input_ids": tokens, "attention_mask": mask}
