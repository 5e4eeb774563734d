"""Decides which parts of which parameter are matrices, once, before the model is sharded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from torch import Tensor, nn

from hf_emopt.routing.embeddings import special_parameters
from hf_emopt.routing.layouts import conv
from hf_emopt.routing.link_adapters import link_adapters
from hf_emopt.routing.lora import LORA_MODES
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.module_types import decide
from hf_emopt.routing.overrides import Overrides
from hf_emopt.routing.parameter import Decision, ParameterInfo, aux, class_names, global_shape, iter_parameters, matrix
from hf_emopt.routing.table import ParameterRoute, RouteTable, coverage_warning

__all__ = [
    "ParameterRoute",
    "RouteTable",
    "coverage_warning",
    "route_named_parameters",
    "route_parameters",
    "route_parameters_list",
]


# transformers' rule (Trainer.get_decay_parameter_names): these names, in lower case, and anything inside nn.LayerNorm.
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

_EMBEDDING_COMPONENT = re.compile(r"(\w+_)?embed(ding)?s?(_(in|tokens|positions))?|wte|wpe|shared")
_HEAD_COMPONENT = re.compile(r"(\w+_)?lm_head|embed_out|classifier|score|qa_outputs|head|proj_out")
_ROUTER_COMPONENT = re.compile(r"router|gate|shared_expert_gate")


def route_parameters(
    model: nn.Module,
    *,
    matrix_modules: str | Sequence[str] | None = None,
    aux_modules: str | Sequence[str] | None = None,
    per_head: bool = False,
    trainable_only: bool = True,
    lora: str = "separate",
) -> RouteTable:
    """Routes every parameter of a model, by the types and attributes of the modules that use it.

    Linear maps, convolutions, stacks of experts and adapters are matrices: each is cut into the matrices that the
    forward pass multiplies by (fused projections split, transposed storage swapped, expert stacks as batches, a
    convolution as ``(out, in * kernel)``). Embeddings, output heads, routers, norms, biases, gains, depthwise
    convolutions, convolutions of raw input and bare parameters of unknown use are updated elementwise. A tied weight is
    one route; it is an embedding or a head if any of its uses is. Shapes are global: ``ds_shape`` under ZeRO-3, a
    DTensor's own shape otherwise.

    Args:
        model: any module, wrapped (DDP, ``torch.compile``, PEFT ...) or not, also on ``meta``.
        matrix_modules: regular expressions for parameters that shall be matrices whatever the rules say. They match
            whole components of the dotted name without the prefixes that wrappers add (``module.``, ``_orig_mod.``,
            ``_checkpoint_wrapped_module.``, ``base_model.model.``): ``"lm_head"``, ``r"layers\\.0\\.mlp"``; ``gate``
            does not match ``gate_proj``. Biases and other vectors below a named module stay elementwise.
        aux_modules: the same for parameters that shall be updated elementwise.
        per_head: split query, key and value projections into one matrix ``(head_dim, in)`` per attention head. The
            output projection stays whole.
        trainable_only: leave out parameters with ``requires_grad=False``.
        lora: ``"joint"`` makes the two factors of a LoRA adapter, of embeddings too, one matrix that is stepped as a whole;
            ``"separate"`` leaves each a matrix of its own.

    Returns:
        A :class:`RouteTable` in the order and with the names of ``model.named_parameters()``.

    Raises:
        ValueError: a pattern matches nothing, two patterns claim one parameter, ``matrix_modules`` names only vectors,
            or two uses of a tied weight need different matrices; or ``lora="joint"`` meets a factor without its partner.
    """
    if lora not in LORA_MODES:
        raise ValueError(f"lora={lora!r} is not one of {', '.join(LORA_MODES)}")
    overrides = Overrides(matrix_modules, aux_modules)
    infos = list(iter_parameters(model, per_head=per_head))
    special = special_parameters(model, infos)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = model.named_modules(remove_duplicate=False)
    layer_norms = {f"{name}." for name, module in modules if name and isinstance(module, nn.LayerNorm)}

    uses: dict[int, list[ParameterInfo]] = {}
    for info in infos:
        uses.setdefault(id(info.parameter), []).append(info)
    kept = {key: group for key, group in uses.items() if group[0].parameter.requires_grad or not trainable_only}
    canonical = [info.canonical for group in kept.values() for info in group]
    frozen = [info.canonical for key, group in uses.items() if key not in kept for info in group]
    overrides.check_matched(canonical, frozen)

    routes = []
    for key, group in kept.items():
        name = names.get(key, group[0].name)
        wanted = [info.canonical for info in group]
        decision = overrides.decide(wanted, name, group[0].shape, partial(_forced_views, group, special))
        if decision is None:
            decision = _agree(group, [decide(info, special) for info in group])
        owner = class_names(group[0].owner)
        routes.append(
            ParameterRoute(
                name=name,
                shape=group[0].shape,
                kind=decision.kind,
                matrix_views=decision.matrix_views,
                decay=all(_decays(info, decision, layer_norms) for info in group),
                reason=decision.reason,
                module_type=owner[0] if owner else type(group[0].owner).__name__,
                aliases=tuple(info.name for info in group if info.name != name),
                role=decision.role,
            )
        )
    overrides.check_used()
    routes = link_adapters(routes, {names.get(key, group[0].name): group[0] for key, group in kept.items()}, lora)
    return RouteTable(routes)


def _agree(group: list[ParameterInfo], decisions: list[Decision]) -> Decision:
    """One decision for all uses of a parameter, whatever their order."""
    elementwise = [d for d in decisions if d.kind == "aux"]
    if elementwise:
        rank = ("head", "embedding")  # a tied input embedding and head counts as an embedding
        return max(elementwise, key=lambda d: (rank.index(d.role) if d.role in rank else -1, d.reason))
    if len({d.matrix_views for d in decisions}) > 1:
        raise ValueError(
            f"{group[0].name} is tied to {', '.join(info.name for info in group[1:])}, and these uses need different "
            "matrices; name it in aux_modules"
        )
    return min(decisions, key=lambda d: d.reason)


def _forced_views(group: list[ParameterInfo], special: dict[int, tuple[str, str]]) -> tuple[MatrixView, ...]:
    """The matrices that the rules see; where they see none, a convolution is flattened, others are taken as stored."""
    for decision in [decide(use, special) for use in group]:
        if decision.kind == "matrix":
            return decision.matrix_views
    info = group[0]
    if "Conv1D" in class_names(info.owner):
        return (MatrixView.whole(info.shape, transposed=True),)
    if isinstance(info.owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return conv(info.shape, 1)
    return _as_stored(info.shape)


def _as_stored(shape: tuple[int, ...]) -> tuple[MatrixView, ...]:
    return (MatrixView.whole(shape),)


def _decays(info: ParameterInfo, decision: Decision, layer_norms: set[str]) -> bool:
    """transformers' rule by name and ``nn.LayerNorm``; nor do vectors and bare gains such as ``(C, 1, 1)`` decay."""
    if NO_DECAY.search(info.canonical.lower()) or any(info.name.startswith(prefix) for prefix in layer_norms):
        return False
    if decision.kind == "matrix":
        return True
    flat = sum(size > 1 for size in info.shape) < 2
    return not (len(info.shape) < 2 or (flat and info.leaf != "weight"))


def _by_name(name: str, shape: tuple[int, ...]) -> Decision:
    """Decision for a parameter by its name and shape alone."""
    if sum(size > 1 for size in shape) < 2:
        return aux("by name: vector or gain", "gain")
    *path, leaf = name.split(".")
    if leaf == "bias" or leaf.endswith("_bias"):
        return aux("by name: bias", "bias")
    if len(shape) > 2:
        raise ValueError(
            f"{name} has shape {shape}: without its module nobody knows which dimensions are a matrix. Pass the model "
            "instead of its parameters, or name it in aux_modules"
        )
    for role, component in (
        ("embedding", _EMBEDDING_COMPONENT), ("head", _HEAD_COMPONENT), ("router", _ROUTER_COMPONENT)
    ):  # fmt: skip
        if any(component.fullmatch(part) for part in (*path, leaf)):
            return aux(f"by name: {role}", role)
    return matrix(_as_stored(shape), "by name: two dimensions, taken as stored (out, in)")


def route_named_parameters(
    named: Iterable[tuple[str, Tensor]],
    *,
    matrix_modules: str | Sequence[str] | None = None,
    aux_modules: str | Sequence[str] | None = None,
) -> RouteTable:
    """Routes parameters by name and shape, when the modules are not at hand.

    Two dimensions are a matrix ``(out, in)``, unless a component of the name is one of an embedding (``embed_tokens``,
    ``wte``), a head (``lm_head``, ``classifier``) or a router. Fused and transposed projections cannot be recognised:
    prefer :func:`route_parameters`.

    Args:
        matrix_modules, aux_modules: as in :func:`route_parameters`.

    Raises:
        ValueError: a parameter has three or more dimensions larger than the rules can read, a name occurs twice for two
            parameters, or a pattern is at fault.
    """
    pairs: dict[str, Tensor] = {}
    for name, parameter in named:
        if pairs.setdefault(name, parameter) is not parameter:
            raise ValueError(f"two parameters are named {name!r}")
    overrides = Overrides(matrix_modules, aux_modules)
    overrides.check_matched(list(pairs))
    aliases: dict[int, list[str]] = {}
    for name, parameter in pairs.items():
        aliases.setdefault(id(parameter), []).append(name)
    routes = []
    for names in aliases.values():
        parameter = pairs[names[0]]
        shape = global_shape(parameter)
        decision = overrides.decide(names, names[0], shape, partial(_as_stored, shape))
        if decision is None:
            decisions = [_by_name(name, shape) for name in names]
            decision = next((d for d in decisions if d.kind == "aux"), decisions[0])
        decay = not any(NO_DECAY.search(name.lower()) for name in names) and len(shape) > 1
        routes.append(
            ParameterRoute(
                names[0], shape, decision.kind, decision.matrix_views, decay, decision.reason, "", tuple(names[1:]),
                decision.role,
            )
        )  # fmt: skip
    overrides.check_used()
    return RouteTable(routes)


def route_parameters_list(params: Iterable[Tensor]) -> RouteTable:
    """Routes parameters that have no names: two dimensions are a matrix ``(out, in)``, fewer are updated elementwise.

    The caller selects the parameters, since embeddings and heads cannot be told from matrices here. Names in the table are
    ``param.0``, ``param.1`` ...; a parameter that occurs twice is one route.

    Raises:
        ValueError: a parameter has three or more dimensions, not counting sizes of 1.
    """
    return route_named_parameters((f"param.{index}", parameter) for index, parameter in enumerate(params))
