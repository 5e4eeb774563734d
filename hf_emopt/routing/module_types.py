"""Routing by the type of the module that owns a parameter. Names matter only where the type says nothing."""

from __future__ import annotations

import math
import re

from torch import nn

from hf_emopt.routing.architectures import family_rule
from hf_emopt.routing.embeddings import is_embedding, is_linear
from hf_emopt.routing.layouts import conv, expert_stack, heads, transposed_conv
from hf_emopt.routing.link_adapters import adapter_side
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.parameter import Decision, ParameterInfo, aux, class_names, head_size, matrix

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RAW_CHANNELS = 4  # grey, RGB, RGBA, stereo: a convolution that reads these embeds the input

_ROUTER_CLASS = re.compile(r"Router|Gating$|M[oO]E\w*Gate$")
_ROUTER_NAMES = frozenset({"gate", "router", "wg", "router_proj", "gating"})
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts")

_QUERY = frozenset({"q_proj", "q", "query", "q_lin", "query_proj", "to_q", "wq"})
_KEY = frozenset({"k_proj", "k", "key", "k_lin", "key_proj", "to_k", "wk"})
_VALUE = frozenset({"v_proj", "v", "value", "v_lin", "value_proj", "to_v", "wv"})
_ATTENTION_OUTPUT = frozenset({"o_proj", "out_proj", "o", "wo", "Wo", "c_proj", "dense", "out_lin", "to_out"})
_FUSED_NAMES = re.compile(r"(?i)^(w_?qkv|qkv|qkv_proj|c_attn|query_key_value|in_proj_qkv|w_pack|att_proj|to_qkv)$")


def decide(info: ParameterInfo, special: dict[int, tuple[str, str]]) -> Decision:
    """The route of one use of one parameter; ``special`` are embeddings and heads, see :func:`special_parameters`.

    Raises:
        ValueError: a rule's matrix views do not cover the parameter exactly.
    """
    if not info.parameter.is_floating_point():
        return aux("quantized storage", "quantized")
    decision = _adapter(info)
    if decision is None and id(info.parameter) in special:
        role, reason = special[id(info.parameter)]
        return aux(reason, role)
    if len(info.shape) > 1:  # no family knows a flattened parameter
        decision = decision or family_rule(info)
    for rule in (_no_matrix, _router, _convolution, _conv1d, _linear, _experts, _embedding_table):
        decision = decision or rule(info)
    if decision is None and isinstance(info.owner, nn.utils.parametrize.ParametrizationList):
        decision = aux("factor of a reparametrized weight (weight norm and the like)", "bare")
    if decision is None:
        owner = next(iter(class_names(info.owner)), type(info.owner).__name__)
        decision = aux(f"bare parameter of {owner}: its use is unknown (matrix_modules forces it)", "bare")
    _check_cover(info, decision)
    return decision


def _check_cover(info: ParameterInfo, decision: Decision) -> None:
    if decision.kind != "matrix":
        return
    covered = sum(view.numel for view in decision.matrix_views)
    if covered != info.numel or any(math.prod(view.view) != info.numel for view in decision.matrix_views):
        shapes = [view.shape for view in decision.matrix_views]
        raise ValueError(
            f"{info.name}: matrix views {shapes} cover {covered} elements of shape {info.shape} ({info.numel}); the "
            f"rule that says {decision.reason!r} does not fit this module, register_architecture one that does"
        )


def _no_matrix(info: ParameterInfo) -> Decision | None:
    """Biases, norms, gains: by type or by having one dimension only, sizes of 1 left out."""
    names = class_names(info.owner)
    if info.leaf == "bias" or info.leaf.endswith("_bias"):
        return aux("bias", "bias")
    if any("Norm" in name for name in names):
        return aux("norm", "norm")
    if any("LayerScale" in name for name in names):
        return aux("layer scale", "gain")
    if sum(size > 1 for size in info.shape) < 2:
        if len(info.shape) == 2 and is_linear(info.owner):
            return aux("one row or column: nothing to orthogonalize", "gain")
        return aux("vector or gain: at most one dimension larger than 1", "gain")
    return None


def _adapter(info: ParameterInfo) -> Decision | None:
    """LoRA and its kin: ``lora_A`` and ``lora_B`` are matrices; a batch of experts where they adapt a stack."""
    if len(info.shape) == 2 and any(name.startswith("lora_embedding_") for name in info.path):
        return aux("LoRA adapter of an embedding", "embedding")
    found = adapter_side(info)
    if found is None:
        return None
    if isinstance(info.owner, _CONVOLUTIONS):
        groups = info.owner.groups
        return matrix(conv(info.shape, groups), "LoRA adapter of a convolution (out, in * kernel)", "adapter")
    if len(info.shape) != 2:
        return None
    side, layer = found
    experts = getattr(layer, "num_experts", 1) if hasattr(layer, "parameter_name") else 1
    if isinstance(experts, int) and experts > 1:
        out, inp = info.shape
        if side == "lora_A":  # rows: expert, rank
            view = MatrixView("", (experts, out // experts, inp), rows=(1,), cols=(2,), batch=(0,))
        else:  # columns: rank, expert
            view = MatrixView("", (out, inp // experts, experts), rows=(0,), cols=(1,), batch=(2,))
        return matrix((view,), "LoRA adapter of an expert stack, batch of experts", "adapter")
    return matrix((MatrixView.whole(info.shape),), "LoRA adapter", "adapter")


def _router(info: ParameterInfo) -> Decision | None:
    """Scores of experts: a router class, or a linear map to one output per expert."""
    if any(_ROUTER_CLASS.search(name) for name in class_names(info.owner)):
        return aux("router", "router")
    if not is_linear(info.owner) or info.parent is None:
        return None
    maps = [module for module in info.parent.modules() if is_linear(module)]
    in_router = any(_ROUTER_CLASS.search(name) for name in class_names(info.parent))
    experts = getattr(info.parent, "experts", None)
    counts = {info.setting(name) for name in _EXPERT_COUNTS}
    if isinstance(experts, nn.ModuleList):
        counts.add(len(experts))
    elif isinstance(experts, nn.Module):
        counts |= {p.shape[0] for p in experts._parameters.values() if p is not None and p.dim() == 3}
    scores_experts = info.shape[0] in counts
    if (in_router and (scores_experts or len(maps) == 1)) or (info.component in _ROUTER_NAMES and scores_experts):
        return aux("router: one output per expert", "router")
    return None


def _convolution(info: ParameterInfo) -> Decision | None:
    owner = info.owner
    if isinstance(owner, _TRANSPOSED_CONVOLUTIONS) and info.leaf == "weight":
        if info.shape[0] == owner.groups:
            return aux("depthwise convolution", "depthwise")
        return matrix(transposed_conv(info.shape, owner.groups), "transposed convolution (out * kernel, in)", "conv")
    if not (isinstance(owner, _CONVOLUTIONS) and info.leaf == "weight"):
        return None
    if owner.groups > 1 and info.shape[1] == 1:
        return aux("depthwise convolution", "depthwise")
    if info.shape[0] == owner.groups:
        return aux("convolution to one channel: one row, nothing to orthogonalize", "gain")
    if info.shape[1] * owner.groups <= _RAW_CHANNELS and _reads_input(info):
        return aux(f"convolution of raw input ({info.shape[1] * owner.groups} channels): embeds it", "embedding")
    grouped = ", batch of groups" if owner.groups > 1 else ""
    return matrix(conv(info.shape, owner.groups), f"convolution (out, in * kernel){grouped}", "conv")


def _reads_input(info: ParameterInfo) -> bool:
    """Whether a convolution of few channels is of the input. Kernels of one pixel are where they are the model's first;
    others widen a bottleneck, as in a squeeze-and-excite block."""
    if math.prod(info.shape[2:]) > 1:
        return True
    modules = info.chain[-1][1].modules()
    return next((module for module in modules if isinstance(module, _CONVOLUTIONS)), None) is info.owner


def _conv1d(info: ParameterInfo) -> Decision | None:
    """transformers' ``Conv1D``: a linear map stored ``(in, out)``."""
    if "Conv1D" not in class_names(info.owner) or len(info.shape) != 2 or info.leaf != "weight":
        return None
    return matrix((MatrixView.whole(info.shape, transposed=True),), "Conv1D: linear map stored (in, out)")


def _linear(info: ParameterInfo) -> Decision | None:
    if not is_linear(info.owner) or len(info.shape) != 2 or info.leaf != "weight":
        return None
    whole = (MatrixView.whole(info.shape),)
    if _FUSED_NAMES.match(info.component):
        note = "linear map; its name says fused, its layout is unknown: kept whole (register_architecture splits it)"
        return matrix(whole, note)
    if not info.per_head or info.parent is None:
        return matrix(whole, "linear map")
    attention = any(re.search(r"Attention|Attn", name) for name in class_names(info.parent))
    if info.component in _QUERY | _KEY | _VALUE:
        size = head_size(info.parent)
        if size is None or info.shape[0] % size:
            return matrix(whole, "linear map; per_head: head size unknown, kept whole")
        return matrix(heads(info.shape, size), "one matrix per head", "attention")
    if info.component in _ATTENTION_OUTPUT and attention:
        return matrix(whole, "linear map; per_head: heads lie along its inputs, kept whole")
    return matrix(whole, "linear map")


def _experts(info: ParameterInfo) -> Decision | None:
    """Bare stacks ``(E, ., .)`` of a class that says it holds experts."""
    named = any("Expert" in name for name in class_names(info.owner))
    count = next((getattr(info.owner, name, None) for name in _EXPERT_COUNTS if hasattr(info.owner, name)), None)
    if len(info.shape) == 2 and named:
        return aux("one vector per expert", "gain")
    if len(info.shape) != 3 or not (named or count == info.shape[0]):
        return None
    width = getattr(info.owner, "hidden_size", None) or getattr(info.owner, "hidden_dim", None)
    into = not re.match(r"(?i)(down|w2|wo|out)", info.leaf)
    transposed = info.shape[1 if into else 2] == width and info.shape[2 if into else 1] != width
    note = "; its name says fused, its layout is unknown: kept whole" if "gate_up" in info.leaf else ""
    stored = "(in, out)" if transposed else "(out, in)"
    views = expert_stack(info.shape, transposed=transposed)
    return matrix(views, f"expert stack, batch of experts; taken as {stored}{note}", "expert")


def _embedding_table(info: ParameterInfo) -> Decision | None:
    return aux(class_names(info.owner)[0], "embedding") if is_embedding(info.owner) else None
