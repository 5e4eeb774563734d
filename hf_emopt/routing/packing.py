"""Routes as the plain values that ``param_groups`` keep, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from hf_emopt.routing.lora import Adapter, unpack_adapter
from hf_emopt.routing.matrix_view import MatrixView

STRUCTURAL_KEYS = (
    "params", "param_names", "kind", "name", "units", "adapters", "lora", "tensor_parallel", "state_dtype",
)  # fmt: skip
"""Group keys that describe the live model and how it is laid out; a loaded checkpoint never overrides them."""


def pack_matrix_views(matrix_views: Sequence[MatrixView]) -> list[tuple[Any, ...]]:
    """Matrix views as plain tuples, the form kept in ``param_groups``."""
    return [astuple(matrix_view) for matrix_view in matrix_views]


def unpack_matrix_views(packed: Sequence[Sequence[Any]]) -> tuple[MatrixView, ...]:
    """The inverse of :func:`pack_matrix_views`."""
    return tuple(
        MatrixView(name, tuple(view), tuple(rows), tuple(cols), tuple(batch), *cut)
        for name, view, rows, cols, batch, *cut in packed
    )


def adapter_at(group: dict[str, Any], position: int) -> Adapter | None:
    """The adapter role of the parameter at a position of a group; ``None`` outside adapters."""
    return unpack_adapter(group["adapters"][position]) if "adapters" in group else None
