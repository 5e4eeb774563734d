"""The role of a parameter in its LoRA adapter, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

LoraMode = Literal["separate", "joint"]
LORA_MODES: tuple[str, ...] = get_args(LoraMode)


@dataclass(frozen=True)
class Adapter:
    """The role of a parameter in its LoRA adapter.

    Attributes:
        side: ``"A"`` (rank x inputs) or ``"B"`` (outputs x rank).
        partner: name of the other factor; empty where it is not trained or not a LoRA factor.
        scaling: factor of ``B A`` in the model.
        outputs, inputs: shape of the product; 0 where the partner is unknown.
        rank: columns of B that belong to one product.
        zero_init: whether the factor starts at zero: B, or an embedding's A.
        joint: whether it is stepped together with its partner.
    """

    side: str
    partner: str
    scaling: float
    outputs: int
    inputs: int
    rank: int
    zero_init: bool
    joint: bool = False


def pack_adapter(adapter: Adapter | None) -> tuple[Any, ...]:
    """Plain values, the form kept in ``param_groups``; empty for ``None``."""
    return () if adapter is None else astuple(adapter)


def unpack_adapter(packed: Sequence[Any]) -> Adapter | None:
    """The inverse of :func:`pack_adapter`."""
    return Adapter(*packed) if len(packed) else None
