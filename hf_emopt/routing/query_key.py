"""The rows of weights that compute the query and key of every attention head, where a factor on its logits acts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_emopt.routing.architectures import family_rule
from hf_emopt.routing.attention import is_latent_attention
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.overrides import Patterns
from hf_emopt.routing.parameter import ParameterInfo, class_names, head_size, iter_parameters, setting

_ATTENTION = re.compile(r"Attention|Attn")
# Products of q and k without a softmax: no logit that could grow.
_NO_SOFTMAX = re.compile(r"Lightning|Linear|Delta|Mamba|Performer|Fourier")
_QUERY = frozenset({"q_proj", "q", "query", "q_lin", "query_proj", "to_q", "wq", "q_attn"})
_KEY = frozenset({"k_proj", "k", "key", "k_lin", "key_proj", "to_k", "wk"})
_QUERY_NORMS = frozenset({"q_norm", "query_norm", "q_layernorm", "query_layernorm", "q_ln", "norm_q", "q_layer_norm"})
_KEY_NORMS = frozenset({"k_norm", "key_norm", "k_layernorm", "key_layernorm", "k_ln", "norm_k", "k_layer_norm"})
_BOTH_NORMS = frozenset({"qk_norm"})
# Norms of values, of the output and of the projections' inputs.
_OTHER_NORMS = frozenset({"v_norm", "value_norm", "o_norm", "out_norm", "sub_norm", "attn_sub_norm", "inner_attn_ln"})
_OTHER_NORMS |= {"q_a_layernorm", "kv_a_layernorm", "q_a_norm", "kv_a_norm"}


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Elements of one parameter, along one of its dimensions, that make up heads of a query or a key.

    Attributes:
        name: in ``model.named_parameters()``.
        dim: dimension of the heads; each head has all of the other dimensions.
        rows: ``(heads, n)`` int64 indices along ``dim``, on the CPU; ``(1, n)`` where all heads share them.
        zero_centered: the module multiplies by ``1 + weight``.
    """

    name: str
    parameter: Tensor
    dim: int
    rows: Tensor
    zero_centered: bool = False


@dataclass(frozen=True, eq=False)
class QueryKey:
    """What a clip of one attention module's logits can act on. Parts that do not train are left out.

    Attributes:
        name: the module's name without the components of wrappers.
        heads, kv_heads, head_dim: of the logits' query and key.
        query: rows of each query head that meet the key of their own group alone, which shares the factor with them.
        key: key heads, one for each group of ``heads // kv_heads`` query heads.
        query_alone: parts of the query whose key all heads share (the rotary part of latent attention): they take the
            whole factor.
        shared: a norm's weight stands for all heads at once, so that the worst head's factor is everybody's.
        adapted: LoRA or another adapter computes the query or the key together with a weight that does not train.
    """

    name: str
    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    query: tuple[HeadRows, ...]
    key: tuple[HeadRows, ...]
    query_alone: tuple[HeadRows, ...] = ()
    shared: bool = False
    adapted: bool = False

    @property
    def trains(self) -> bool:
        """Whether anything is there to act on."""
        return bool(self.query or self.key or self.query_alone)


def find_query_key(model: nn.Module, modules: str | Sequence[str] | None = None) -> dict[str, QueryKey]:
    """The queries and keys of a model's softmax attention, by the name of the attention module.

    Where a norm stands behind a projection, it cancels every factor on the projection's rows, and the factor acts on the
    norm's own weight. A module whose query and key do not train has an entry without rows; a module without a query and key
    of a known name has none.

    Args:
        modules: regular expressions for whole components of attention modules' names; the others are left out.

    Raises:
        ValueError: a weight is flattened (FSDP1, ZeRO), an attention module norms its query or key in an unknown way, or
            the rows of a projection are not whole heads.
    """
    patterns = Patterns(modules, "modules")
    found: dict[int, tuple[nn.Module, str, list[ParameterInfo]]] = {}
    for info in iter_parameters(model):
        place = _attention_of(info)
        if place is not None:
            relative, module = place
            name = info.canonical.removesuffix(relative).rstrip(".") if info.canonical.endswith(relative) else ""
            # An adapter's own components may stand between the module's name and the parameter's.
            name = name or ".".join(info.path[: -(relative.count(".") + 1)])
            found.setdefault(id(module), (module, name, []))[2].append(info)
    kept, left = {}, []
    for module, name, infos in found.values():
        if modules is not None and patterns.find([name]) is None:
            left.append(name)
            continue
        located = _Search(module, name, infos).locate()
        if located is not None:
            kept[name] = located
    if left and not kept:
        raise ValueError(
            f"QK-clip: modules={modules!r} matches no attention module with a query and a key; there are "
            f"{', '.join(left[:4])} ..., and patterns match whole dotted components"
        )
    return kept


def _attention_of(info: ParameterInfo) -> tuple[str, nn.Module] | None:
    """The nearest attention module around a parameter, with the parameter's name in it."""
    for relative, module in info.chain[1:]:
        names = class_names(module)
        if any(_ATTENTION.search(name) for name in names):
            return None if any(_NO_SOFTMAX.search(name) for name in names) else (relative, module)
    return None


class _Search:
    """What one attention module computes its query and key with."""

    def __init__(self, module: nn.Module, name: str, infos: list[ParameterInfo]) -> None:
        self.module, self.name, self.where = module, name, f"{name} ({type(module).__name__})"
        self.infos: dict[str, ParameterInfo] = {}
        self.adapted = False
        for info in infos:
            relative = next(relative for relative, m in info.chain if m is module)
            part = relative.split(".")[0]
            holds = part in _QUERY | _KEY or part in ("q_b_proj", "kv_b_proj") or self._is_fused(info)
            self.adapted |= holds and ("lora_" in info.name or ".base_layer." in f".{info.name}")
            self.infos.setdefault(relative, info)

    def locate(self) -> QueryKey | None:
        if is_latent_attention(self.module):
            return self._latent()
        parts = self._projections()
        if parts is None:
            return None
        query, key, head = parts
        heads = sum(r.rows.numel() for r in query if len(r.parameter.shape) > 1) // head
        kv_heads = sum(r.rows.numel() for r in key if len(r.parameter.shape) > 1) // head or heads
        children = self.module.named_children()
        norms = [child for child, module in children if any("Norm" in name for name in class_names(module))]
        self._check_norms(norms)
        shared = False
        if any(child in _QUERY_NORMS | _KEY_NORMS | _BOTH_NORMS for child in norms):
            query = [r for child in norms if child in _QUERY_NORMS for r in self._norm(child, heads, head)]
            key = [r for child in norms if child in _KEY_NORMS for r in self._norm(child, kv_heads, head)]
            shared = any(r.rows.shape[0] == 1 for r in query + key) and heads > 1
        if getattr(self.module, "is_kv_shared_layer", False):  # the key is another layer's
            key = []
        rows = _training(query), _training(key), ()
        return QueryKey(self.name, self.module, heads, kv_heads, head, *rows, shared, self.adapted)

    # --- projections --------------------------------------------------------------------------------------------------

    def _projections(self) -> tuple[list[HeadRows], list[HeadRows], int] | None:
        head = head_size(self.module)
        sides: dict[str, list[HeadRows]] = {"q": [], "k": []}
        for relative, info in self.infos.items():
            part, _, leaf = relative.rpartition(".")
            if leaf != "weight" or "." in part:
                continue
            for side, rows, dim in self._sides(info, part):
                self._check_whole(info)
                if head is None or rows.numel() % head:
                    raise ValueError(
                        f"QK-clip: {self.where}: {rows.numel()} rows of {info.name} are not heads of {head} rows; leave the "
                        "module out with modules=..."
                    )
                sides[side] += self._with_bias(info, f"{part}.bias", dim, rows.view(-1, head))
        if head is None or not sides["q"]:
            return None
        return sides["q"], sides["k"], head

    def _sides(self, info: ParameterInfo, part: str) -> list[tuple[str, Tensor, int]]:
        """``(q or k, rows, dimension)`` for the query and key in a weight."""
        transposed = "Conv1D" in class_names(info.owner)
        decision = family_rule(info)
        if decision is not None and decision.kind == "matrix":
            named = [view for view in decision.matrix_views if view.name in ("q", "k")]
            if named or decision.matrix_views[0].name:
                return [(view.name, _rows_of(view), int(transposed)) for view in named]
        side = "q" if part in _QUERY else "k" if part in _KEY else None
        if side is None or len(info.shape) != 2:
            if side is not None:
                self._check_whole(info)
            return []
        return [(side, torch.arange(info.shape[int(transposed)], device="cpu"), int(transposed))]

    def _is_fused(self, info: ParameterInfo) -> bool:
        decision = family_rule(info) if len(info.shape) == 2 else None
        return decision is not None and any(view.name in ("q", "k") for view in decision.matrix_views)

    def _check_whole(self, info: ParameterInfo) -> None:
        if len(info.shape) != 2 or tuple(info.parameter.shape) != info.shape:
            raise ValueError(
                f"QK-clip: {info.name} has shape {tuple(info.parameter.shape)}: a wrapper (FSDP1, DeepSpeed ZeRO) has "
                "flattened or partitioned it, so rows of heads cannot be scaled. Train under FSDP2, DDP or on one process"
            )

    def _with_bias(self, info: ParameterInfo, bias: str, dim: int, rows: Tensor) -> list[HeadRows]:
        found = [HeadRows(info.name, info.parameter, dim, rows)]
        if bias in self.infos:
            found.append(HeadRows(self.infos[bias].name, self.infos[bias].parameter, 0, rows))
        return found

    # --- norms behind the projections ---------------------------------------------------------------------------------

    def _check_norms(self, norms: list[str]) -> None:
        unknown = set(norms) - _QUERY_NORMS - _KEY_NORMS - _BOTH_NORMS - _OTHER_NORMS
        if unknown:
            raise ValueError(
                f"QK-clip: {self.where} has a norm {sorted(unknown)[0]!r}, and it is not known whether it stands behind the "
                "query or the key, where it would cancel the clip; leave the module out with modules=..."
            )

    def _norm(self, child: str, heads: int, head: int) -> list[HeadRows]:
        """The weight and bias of a norm of the query or the key."""
        found = []
        for leaf in ("weight", "bias"):
            info = self.infos.get(f"{child}.{leaf}")
            if info is None:
                continue
            numel = math.prod(info.shape)
            if numel == head:
                rows = torch.arange(head, device="cpu").view(1, -1)
            elif info.shape == (heads, head):
                rows = torch.arange(heads, device="cpu").view(-1, 1)
            elif numel == heads * head:
                rows = torch.arange(numel, device="cpu").view(heads, head)
            else:
                raise ValueError(
                    f"QK-clip: {self.where}: {info.name} of shape {info.shape} is neither one weight for {heads} heads of "
                    f"{head} nor one for each; leave the module out with modules=..."
                )
            centered = leaf == "weight" and _is_zero_centered(info.owner, info.shape)
            found.append(HeadRows(info.name, info.parameter, 0, rows, centered))
        if not found and any(relative.startswith(f"{child}.") for relative in self.infos):
            raise ValueError(
                f"QK-clip: {self.where}: the norm {child!r} keeps its weights in modules of its own, whose layout is not "
                "known; leave the module out with modules=..."
            )
        return found

    # --- latent attention ---------------------------------------------------------------------------------------------

    def _latent(self) -> QueryKey:
        """DeepSeek's latent attention: heads are ``[without position, rotary]`` in q and ``[k, v]`` in ``kv_b_proj``."""
        nope, rope = setting(self.module, "qk_nope_head_dim"), setting(self.module, "qk_rope_head_dim")
        value, heads = setting(self.module, "v_head_dim"), setting(self.module, "num_heads", "num_attention_heads")
        query = self.infos.get("q_b_proj.weight") or self.infos.get("q_proj.weight")
        key = self.infos.get("kv_b_proj.weight")
        if not (nope and rope and value and heads) or query is None or key is None:
            raise ValueError(
                f"QK-clip: {self.where} looks like latent attention, but has not its sizes or projections; leave it out with "
                "modules=..."
            )
        for info, width in ((query, nope + rope), (key, nope + value)):
            self._check_whole(info)
            if info.shape[0] != heads * width:
                raise ValueError(f"QK-clip: {info.name} has {info.shape[0]} rows, not {heads} heads of {width}")
        rows = torch.arange(heads * (nope + rope), device="cpu").view(heads, -1)
        key_rows = torch.arange(heads * (nope + value), device="cpu").view(heads, -1)[:, :nope]
        q_bias, k_bias = (next(r for r, i in self.infos.items() if i is info)[:-6] + "bias" for info in (query, key))
        q = _training(self._with_bias(query, q_bias, 0, rows[:, :nope]))
        k = _training(self._with_bias(key, k_bias, 0, key_rows))
        rotary = _training(self._with_bias(query, q_bias, 0, rows[:, nope:]))
        return QueryKey(self.name, self.module, heads, heads, nope + rope, q, k, rotary, False, self.adapted)


def _training(found: Iterable[HeadRows]) -> tuple[HeadRows, ...]:
    """What trains; nothing where the weight itself does not, since a bias alone cannot scale a logit."""
    kept = tuple(r for r in found if r.parameter.requires_grad)
    return kept if any(r.name.endswith("weight") for r in kept) else ()


def _rows_of(matrix_view: MatrixView) -> Tensor:
    """The outputs of a matrix view in the order of its rows, as indices along the parameter's outputs."""
    view = tuple(1 if d in matrix_view.cols else size for d, size in enumerate(matrix_view.view))
    return replace(matrix_view, view=view).extract(torch.arange(math.prod(view), device="cpu")).flatten()


def _is_zero_centered(norm: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a norm multiplies by ``1 + weight`` (Gemma, Qwen3-Next) and not by ``weight``: asked of the norm itself."""
    probe = norm.__class__.__new__(norm.__class__)
    probe.__dict__ = dict(norm.__dict__)
    x = torch.arange(1.0, math.prod(shape) + 1, device="cpu").view(1, *shape)
    outputs = []
    for value in (0.0, 1.0):
        probe._parameters = {
            name: None if p is None else nn.Parameter(x.new_full(shape, value if name == "weight" else 0.0))
            for name, p in norm._parameters.items()
        }
        with torch.no_grad():
            outputs.append(type(norm).forward(probe, x))
    at_zero, at_one = outputs
    if not at_zero.any() and at_one.any():
        return False
    if torch.allclose(at_one, 2 * at_zero, rtol=1e-5, atol=0):
        return True
    raise ValueError(
        f"QK-clip: {type(norm).__name__} multiplies neither by its weight nor by 1 + weight; leave its attention modules out "
        "with modules=..."
    )
