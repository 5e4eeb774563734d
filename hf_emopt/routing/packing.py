"""Routes as the plain values that ``param_groups`` keep, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_emopt.routing.lora import Adapter, unpack_adapter
from hf_emopt.routing.unit import Unit

__all__ = ["STRUCTURAL_KEYS", "adapter_at", "pack_units", "unpack_units"]


STRUCTURAL_KEYS = (
    "params", "param_names", "kind", "name", "units", "adapters", "lora", "tensor_parallel", "state_dtype",
)  # fmt: skip
"""Group keys that describe the live model and how it is laid out; a loaded checkpoint never overrides them."""


def pack_units(units: Sequence[Unit]) -> list[tuple[Any, ...]]:
    """Units as plain tuples, the form kept in ``param_groups``."""
    return [(u.name, u.view, u.rows, u.cols, u.batch, u.dim, u.start, u.stop, u.step) for u in units]


def unpack_units(packed: Sequence[Sequence[Any]]) -> tuple[Unit, ...]:
    """The inverse of :func:`pack_units`."""
    units = []
    for name, view, rows, cols, batch, dim, start, stop, step in packed:
        units.append(Unit(name, tuple(view), tuple(rows), tuple(cols), tuple(batch), dim, start, stop, step))
    return tuple(units)


def adapter_at(group: dict[str, Any], position: int) -> Adapter | None:
    """What the parameter at a position of a group is in its LoRA adapter."""
    return unpack_adapter(group["adapters"][position]) if "adapters" in group else None
