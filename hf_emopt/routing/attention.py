"""Rules for the projections of attention layers: fused, interleaved, grouped, gated, latent."""

from __future__ import annotations

from torch import nn

from hf_emopt.routing.layouts import Parts, grouped_rows, rows
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.parameter import (
    ArchitectureRule,
    Decision,
    ParameterInfo,
    class_names,
    head_size,
    matrix,
    setting,
)


def _fused(text: str, per_head: bool) -> str:
    return f"fused {text}, one matrix per head" if per_head else f"fused {text}, split"


def _attention_parts(module: nn.Module, total: int, head: int | None) -> Parts | None:
    """Rows of q, k and v in ``total``: by the head counts where the module has both (GQA, MQA), else equal thirds."""
    query_heads = setting(module, "num_attention_heads", "num_heads", "n_heads", "n_head")
    kv_heads = setting(module, "num_key_value_heads", "num_kv_heads")
    if head and query_heads and kv_heads and (query_heads + 2 * kv_heads) * head == total:
        return (("q", query_heads * head), ("k", kv_heads * head), ("v", kv_heads * head))
    return None if total % 3 else (("q", total // 3), ("k", total // 3), ("v", total // 3))


# --- attention: parts stored one after the other ----------------------------------------------------------------------


def concatenated_qkv(name: str) -> ArchitectureRule:
    """``[q; k; v]`` along the outputs, k and v possibly with fewer heads."""

    def rule(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
        if relative != f"{name}.weight" or len(parameter.shape) != 2:
            return None
        head = head_size(module)
        parts = _attention_parts(module, parameter.shape[0], head)
        if parts is None:
            return None
        by_head = parameter.per_head and head is not None and all(size % head == 0 for _, size in parts)
        return _concatenated(parameter, parts, head, by_head)

    return rule


def _concatenated(parameter: ParameterInfo, parts: Parts, head: int | None, by_head: bool) -> Decision:
    views = rows(parameter.shape, parts, head_dim=head if by_head else None)
    return matrix(views, _fused("q, k, v", by_head), "attention")


def gpt2(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """GPT-2: ``c_attn`` is a ``Conv1D`` ``(in, 3 in)`` of q, k, v along dimension 1; cross-attention has k, v only."""
    if relative not in ("c_attn.weight", "q_attn.weight"):
        return None
    inp, out = parameter.shape
    names = ("q",) if relative == "q_attn.weight" else ("q", "k", "v") if out == 3 * inp else ("k", "v")
    head = head_size(module) if parameter.per_head else None
    parts = tuple((name, out // len(names)) for name in names)
    if len(names) == 1 and head is None:
        return None
    reason = _fused(", ".join(names), parameter.per_head) + "; stored (in, out)"
    return matrix(rows(parameter.shape, parts, transposed=True, head_dim=head), reason, "attention")


def has_conv1d_attention(module: nn.Module) -> bool:
    projection = module._modules.get("c_attn")
    return projection is not None and "Conv1D" in class_names(projection)


# --- attention: parts interleaved head by head ------------------------------------------------------------------------


def per_head_qkv(name: str) -> ArchitectureRule:
    """``[q, k, v]`` of head 0, then of head 1 ... (GPT-NeoX, BLOOM, Persimmon)."""

    def rule(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
        if relative != f"{name}.weight":
            return None
        head = head_size(module)
        if head is None or parameter.shape[0] % (3 * head):
            raise ValueError(f"{parameter.name}: {parameter.shape[0]} rows are not [q, k, v] heads of {head} rows")
        return _grouped_qkv(parameter, parameter.shape[0] // (3 * head), 1, head)

    return rule


def _grouped_qkv(parameter: ParameterInfo, groups: int, queries: int, head: int) -> Decision:
    """Groups of ``queries`` query heads, one key head and one value head."""
    parts = (("q", queries * head), ("k", head), ("v", head))
    views = grouped_rows(parameter.shape, groups, parts, head_dim=head if parameter.per_head else None)
    return matrix(views, _fused("q, k, v head by head", parameter.per_head), "attention")


def falcon(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """Falcon: groups of query heads with their k and v, or all query heads and one k and v, or [q, k, v] per head."""
    if relative != "query_key_value.weight":
        return None
    query_heads, head = setting(module, "num_heads", "num_attention_heads"), head_size(module)
    if query_heads is None or head is None:
        return None
    kv_heads = setting(module, "num_kv_heads") or query_heads
    if getattr(module, "new_decoder_architecture", False):
        return _grouped_qkv(parameter, kv_heads, query_heads // kv_heads, head)
    if not getattr(module, "multi_query", False):
        return _grouped_qkv(parameter, query_heads, 1, head)
    return _concatenated(parameter, (("q", query_heads * head), ("k", head), ("v", head)), head, parameter.per_head)


def gpt_bigcode(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """GPTBigCode: ``[q; k; v]`` with one k and v head, or [q, k, v] per head; cross-attention stays whole."""
    head = head_size(module)
    if relative != "c_attn.weight" or head is None or getattr(module, "is_cross_attention", False):
        return None
    if not getattr(module, "multi_query", False):
        return _grouped_qkv(parameter, parameter.shape[0] // (3 * head), 1, head)
    parts = (("q", parameter.shape[0] - 2 * head), ("k", head), ("v", head))
    return _concatenated(parameter, parts, head, parameter.per_head)


def codegen(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """CodeGen: ``mp_num`` shards, each ``[q, v, k]``."""
    shards = setting(module, "mp_num") or 4
    if relative != "qkv_proj.weight" or parameter.shape[0] % (3 * shards):
        return None
    local = parameter.shape[0] // (3 * shards)
    head = head_size(module) if parameter.per_head else None
    parts = (("q", local), ("v", local), ("k", local))
    views = grouped_rows(parameter.shape, shards, parts, head_dim=head)
    return matrix(views, _fused("q, v, k shard by shard", parameter.per_head), "attention")


def gated_query(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """Qwen3-Next: ``q_proj`` holds [query, output gate] for every head."""
    if relative != "q_proj.weight":
        return None
    head = head_size(module)
    if head is None or parameter.shape[0] % (2 * head):
        return None
    parts = (("q", head), ("gate", head))
    width = {"q": head} if parameter.per_head else None  # the gate is an elementwise factor: it has no heads of its own
    views = grouped_rows(parameter.shape, parameter.shape[0] // (2 * head), parts, head_dim=width)
    return matrix(views, _fused("q and output gate head by head", parameter.per_head), "attention")


# --- linear attention and state space models --------------------------------------------------------------------------


def qwen3_next_delta(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """Qwen3-Next's gated delta net: ``in_proj_qkvz`` [q, k, v, z] and ``in_proj_ba`` [b, a] for every key head."""
    if relative not in ("in_proj_qkvz.weight", "in_proj_ba.weight"):
        return None
    key_heads, value_heads = setting(module, "num_k_heads"), setting(module, "num_v_heads")
    key, value = setting(module, "head_k_dim"), setting(module, "head_v_dim")
    if not (key_heads and value_heads and key and value):
        return None
    ratio = value_heads // key_heads
    if relative == "in_proj_ba.weight":
        views = grouped_rows(parameter.shape, key_heads, (("b", ratio), ("a", ratio)))
        return matrix(views, "fused b, a key head by key head, split", "attention")
    parts = (("q", key), ("k", key), ("v", ratio * value), ("z", ratio * value))
    width = {"q": key, "k": key} if parameter.per_head else None
    if parameter.per_head and (2 * key) % value == 0:
        width = {"q": key, "k": key, "v": value}
    block = 2 * key + 2 * ratio * value
    if width is not None and any(block % size for size in width.values()):
        width = None
        reason = "fused q, k, v, z key head by key head, split; heads of unequal size stay together"
    else:
        reason = _fused("q, k, v, z key head by key head", parameter.per_head)
    return matrix(grouped_rows(parameter.shape, key_heads, parts, head_dim=width), reason, "attention")


# --- multi-head latent attention --------------------------------------------------------------------------------------


def is_latent_attention(module: nn.Module) -> bool:
    return "kv_a_proj_with_mqa" in module._modules and setting(module, "kv_lora_rank") is not None


def latent_attention(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
    """DeepSeek's MLA.

    ``kv_a_proj_with_mqa`` is split into the latent and the rotary key, two linear maps of different use. ``kv_b_proj``
    holds [k without position, v] per head; it stays whole, as one map from the latent, unless ``per_head``.
    """
    rank, rope = setting(module, "kv_lora_rank"), setting(module, "qk_rope_head_dim")
    nope, value = setting(module, "qk_nope_head_dim"), setting(module, "v_head_dim")
    count = setting(module, "num_heads", "num_attention_heads")
    if not (rank and rope and nope and value and count):
        return None
    out = parameter.shape[0]
    if relative == "kv_a_proj_with_mqa.weight" and out == rank + rope:
        views = rows(parameter.shape, (("kv_latent", rank), ("k_rope", rope)))
        return matrix(views, "fused latent and rotary key, split", "attention")
    if relative == "kv_b_proj.weight":
        if out != count * (nope + value):
            return None
        if not parameter.per_head:
            reason = "whole: k and v of all heads as one map from the latent"
            return matrix((MatrixView.whole(parameter.shape),), reason, "attention")
        view = (count, nope + value, parameter.shape[1])
        cuts = (("k", 0, nope), ("v", nope, nope + value))
        views = tuple(MatrixView(n, view, (1,), (2,), (0,), dim=1, start=start, stop=stop) for n, start, stop in cuts)
        return matrix(views, _fused("k, v head by head", True), "attention")
    if relative in ("q_proj.weight", "q_b_proj.weight") and parameter.per_head and out == count * (nope + rope):
        views = rows(parameter.shape, (("q", out),), head_dim=nope + rope)
        return matrix(views, "one matrix per head", "attention")
    return None
