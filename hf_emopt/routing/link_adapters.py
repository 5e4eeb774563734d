"""Which two parameters are the factors of one LoRA adapter, and how they are one matrix together.

LoRA (E. Hu et al., arXiv:2106.09685) adds ``scaling B A`` to a frozen weight. Each factor may be a matrix of its own
(``lora="separate"``), or the optimizer steps their product as one matrix (``lora="joint"``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from hf_emopt.routing.lora import Adapter
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.parameter import ParameterInfo
from hf_emopt.routing.table import ParameterRoute

_SIDES = {"lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B"}
_OTHER = {side: side[:-1] + ("B" if side.endswith("A") else "A") for side in _SIDES}


def adapter_side(info: ParameterInfo) -> tuple[str, nn.Module | None] | None:
    """The component of the name that says which factor a parameter is, and the layer that has it; ``None`` for others."""
    side = next((name for name in _SIDES if name in info.path), None)
    if side is None or len(info.shape) < 2 or info.leaf == "bias":
        return None
    return side, next((module for _, module in info.chain if side in module._modules or hasattr(module, side)), None)


def link_adapters(routes: Sequence[ParameterRoute], infos: dict[str, ParameterInfo], lora: str) -> list[ParameterRoute]:
    """The routes, each LoRA factor with an :class:`Adapter`.

    Args:
        infos: by the name of the route.
        lora: ``"joint"`` makes both factors matrices with ``rank`` columns (A transposed) that are stepped as one.

    Raises:
        ValueError: ``lora="joint"``, and a factor cannot be stepped together with its partner.
    """
    by_name = {route.name: route for route in routes}
    linked = []
    for route in routes:
        found = adapter_side(infos[route.name]) if route.name in infos else None
        if found is None or found[1] is None:
            linked.append(route)
            continue
        side, layer = found
        partner = by_name.get(_partner_name(route.name, side))
        matrix_views, factors = _factors(route, partner, side)
        adapter = Adapter(
            side=_SIDES[side],
            partner="" if partner is None else partner.name,
            scaling=_scaling(layer, infos[route.name], side),
            outputs=factors["B"].shape[1] if factors else 0,
            inputs=factors["A"].shape[1] if factors else 0,
            rank=factors["B"].shape[2] if factors else min(route.shape[:2]),
            zero_init=side in ("lora_B", "lora_embedding_A"),
        )
        if lora == "joint" and route.role != "override":
            _check_pair(route, partner, factors, layer)
            reason = "LoRA adapter: one matrix with its partner"
            adapter = replace(adapter, joint=True)
            route = replace(route, kind="matrix", matrix_views=(matrix_views,), reason=reason, role="adapter")
        linked.append(replace(route, adapter=adapter))
    return linked


def _partner_name(name: str, side: str) -> str:
    parts = name.split(".")
    last = len(parts) - 1 - parts[::-1].index(side)
    return ".".join([*parts[:last], _OTHER[side], *parts[last + 1 :]])


def _scaling(layer: nn.Module | None, info: ParameterInfo, side: str) -> float:
    """The layer's factor for the adapter of this name; 1 where it keeps none."""
    path = info.path
    adapter = path[path.index(side) + 1] if path.index(side) + 1 < len(path) else ""
    scaling = getattr(layer, "scaling", None)
    value = scaling.get(adapter, 1.0) if isinstance(scaling, dict) else 1.0
    return float(value) if isinstance(value, (int, float)) and value > 0 else 1.0


def _factors(
    route: ParameterRoute, partner: ParameterRoute | None, side: str
) -> tuple[MatrixView, dict[str, MatrixView]]:
    """This factor with ``rank`` columns, and both by side; the latter empty where they do not fit together."""
    own = _tall(route, side)
    if partner is None:
        return own, {}
    other = _tall(partner, _OTHER[side])
    a, b = (own, other) if _SIDES[side] == "A" else (other, own)
    if a.shape[0] == 1 and b.shape[0] > 1 and a.shape[2] == b.shape[0] * b.shape[2]:
        a = _by_groups(a, b.shape[0])  # B of a grouped convolution reads its own run of A's outputs
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[2]:
        return own, {}
    return (a if _SIDES[side] == "A" else b), {"A": a, "B": b}


def _tall(route: ParameterRoute, side: str) -> MatrixView:
    """A factor as ``(B, outputs or inputs, rank)``."""
    flat = MatrixView("", route.shape, (0,), tuple(range(1, len(route.shape))))
    matrix_view = route.matrix_views[0] if len(route.matrix_views) == 1 else flat
    return replace(matrix_view, rows=matrix_view.cols, cols=matrix_view.rows) if _SIDES[side] == "A" else matrix_view


def _by_groups(matrix_view: MatrixView, groups: int) -> MatrixView:
    rank, *rest = matrix_view.view
    view = (groups, rank // groups, *rest)
    return MatrixView("", view, rows=tuple(range(2, len(view))), cols=(1,), batch=(0,))


def _check_pair(
    route: ParameterRoute, partner: ParameterRoute | None, factors: dict[str, MatrixView], layer: nn.Module | None
) -> None:
    instead = "use lora='separate', or name it in aux_modules"
    if partner is None:
        raise ValueError(
            f"lora='joint' steps both factors of an adapter, and {route.name} is trained without its partner: train both, "
            f"or {instead}"
        )
    if partner.role == "override":
        raise ValueError(
            f"lora='joint' steps both factors of an adapter, and aux_modules or matrix_modules names {partner.name} but not "
            f"{route.name}: name both or none"
        )
    if getattr(layer, "lora_E", None) is not None:
        raise ValueError(f"{route.name} belongs to AdaLoRA, whose product is B diag(E) A and not B A: {instead}")
    if not factors:
        shapes = f"{route.name} {route.shape} and {partner.name} {partner.shape}"
        raise ValueError(f"{shapes} have no common rank: {instead}")
