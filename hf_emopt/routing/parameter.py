"""The facts that a routing rule decides on, and its decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_emopt.routing.matrix_view import MatrixView

# Components that a wrapper adds to a name.
_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# PEFT keeps the module that it adapts or copies under these; the module one level up tells its use.
_ADAPTED_COMPONENTS = frozenset({"base_layer", "original_module"})


@dataclass(frozen=True)
class Decision:
    """Answer of a routing rule.

    Attributes:
        kind: ``"matrix"`` or ``"aux"``.
        matrix_views: the matrices inside the parameter, which cover each element once; empty for ``"aux"``.
        reason: why, for a human; the same text for the same parameter of every layer.
        role: ``"embedding"``, ``"head"``, ``"router"``, ``"norm"``, ``"bias"`` ...; used for counting.
    """

    kind: str
    matrix_views: tuple[MatrixView, ...]
    reason: str
    role: str


def matrix(matrix_views: tuple[MatrixView, ...], reason: str, role: str = "linear") -> Decision:
    """The parameter holds matrices."""
    return Decision("matrix", matrix_views, reason, role)


def aux(reason: str, role: str) -> Decision:
    """The parameter goes to the elementwise optimizer."""
    return Decision("aux", (), reason, role)


@dataclass(frozen=True)
class ParameterInfo:
    """One place where a parameter is used.

    Attributes:
        name: name in ``model.named_parameters(remove_duplicate=False)``.
        canonical: ``name`` without the components of wrappers (``module.``, ``_orig_mod.``, ``base_model.model.`` ...).
        leaf: name inside the module that owns it, ``owner`` (``"weight"``).
        shape: global shape, before any sharding.
        parameter: the tensor; only its identity and dtype are used, so it may be on ``meta``.
        chain: modules from the owner up to the model, nearest first, each with the parameter's name relative to it;
            these names leave out the components of wrappers, so ``("c_attn.weight", GPT2Attention)`` holds under PEFT too.
        per_head: the user asked for one matrix per attention head.
    """

    name: str
    canonical: str
    leaf: str
    shape: tuple[int, ...]
    parameter: Tensor
    owner: nn.Module
    chain: tuple[tuple[str, nn.Module], ...]
    per_head: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def path(self) -> tuple[str, ...]:
        """Components of the name relative to the model, wrappers' left out, the leaf included."""
        return tuple(self.chain[-1][0].split("."))

    @property
    def component(self) -> str:
        """Name of the owner in its parent (``"q_proj"``); empty for a parameter of the model itself."""
        return self.path[-2] if len(self.path) > 1 else ""

    @property
    def parent(self) -> nn.Module | None:
        """Nearest module above the owner that is neither a wrapper nor the copy that a wrapper holds."""
        own = self.chain[0][0].count(".")
        return next((module for relative, module in self.chain if relative.count(".") > own), None)

    def setting(self, *names: str) -> int | None:
        """First of ``names`` found as an integer on a module of the chain or its ``config``, nearest module first."""
        found = (setting(module, *names) for _, module in self.chain)
        return next((value for value in found if value is not None), None)


ArchitectureRule = Callable[[ParameterInfo, nn.Module, str], "Decision | None"]
"""``rule(parameter, module, relative)``: ``module`` is the one that matched, ``relative`` the parameter's name inside
it (``"query_key_value.weight"``); returns None for a parameter that it says nothing of."""


def setting(module: nn.Module, *names: str) -> int | None:
    """First of ``names`` that is a positive integer attribute of ``module`` or of its ``config``."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def head_size(module: nn.Module) -> int | None:
    """Outputs per attention head of an attention module, from its attributes or its config."""
    size = setting(module, "head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "dim_per_head", "d_kv")
    if size is not None:
        return size
    hidden = setting(module, "embed_dim", "hidden_size", "d_model", "n_embd", "dim")
    count = setting(module, "num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads")
    return hidden // count if hidden and count and hidden % count == 0 else None


def class_names(module: nn.Module) -> list[str]:
    """Names of the module's classes, most derived first (``fully_shard`` and quantizers derive classes on the fly)."""
    return [cls.__name__ for cls in type(module).__mro__ if cls not in (nn.Module, object)]


def global_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter: ``ds_shape`` under ZeRO-3, where ``shape`` is ``(0,)``; a DTensor's is global."""
    shape: Any = getattr(parameter, "ds_shape", parameter.shape)
    return tuple(int(size) for size in shape)


def _is_wrapper_component(component: str, parent: nn.Module, grandparent: nn.Module | None) -> bool:
    """Whether ``parent.component`` is a level that a wrapper added."""
    if component in _WRAPPER_COMPONENTS:
        return True
    if component == "module":
        return any("DataParallel" in name or "DeepSpeedEngine" in name for name in class_names(parent))
    if component == "base_model":
        return hasattr(parent, "peft_config") and hasattr(parent, "active_adapter")
    if component == "model":
        # LoraModel and its kin hold the adapted model as `.model`, and are held by a PeftModel as `.base_model`.
        # The adapted model has a `peft_config` too, so that does not tell them apart.
        return (
            grandparent is not None
            and hasattr(grandparent, "peft_config")
            and grandparent._modules.get("base_model") is parent
        )
    return False


def _walk(
    module: nn.Module, full: tuple[str, ...], names: tuple[tuple[str, bool, bool], ...], above: tuple[nn.Module, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[tuple[str, bool, bool], ...], tuple[nn.Module, ...]]]:
    """Every module with its components ``(name, is wrapper, is adapted)`` and the modules down to it, in order."""
    yield full, names, above + (module,)
    grandparent = above[-1] if above else None
    for component, child in module._modules.items():
        if child is None:
            continue
        wrapper = _is_wrapper_component(component, module, grandparent)
        # `modules_to_save.<adapter>` is one level in two components.
        saved = component == "modules_to_save" and hasattr(module, "original_module")
        inside_saved = bool(names) and names[-1][0] == "modules_to_save" and names[-1][2]
        adapted = component in _ADAPTED_COMPONENTS or saved or inside_saved
        yield from _walk(child, full + (component,), names + ((component, wrapper, adapted),), above + (module,))


def iter_parameters(model: nn.Module, *, per_head: bool = False) -> Iterator[ParameterInfo]:
    """Every use of every parameter, in the order of ``model.named_parameters(remove_duplicate=False)``."""
    for full, names, modules in _walk(model, (), (), ()):
        owner = modules[-1]
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            # modules[i] is the parent of names[i]; the name relative to it keeps the meaningful components below.
            below = [
                ".".join([name for name, wrapper, adapted in names[i:] if not (wrapper or adapted)] + [leaf])
                for i in range(len(modules))
            ]
            chain = tuple(zip(reversed(below), reversed(modules)))
            yield ParameterInfo(
                name=".".join(full + (leaf,)),
                canonical=".".join([name for name, wrapper, _ in names if not wrapper] + [leaf]),
                leaf=leaf,
                shape=global_shape(parameter),
                parameter=parameter,
                owner=owner,
                chain=chain,
                per_head=per_head,
            )
