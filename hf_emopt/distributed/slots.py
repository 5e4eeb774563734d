"""When, within its period, each piece of a rule's periodic work is done."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_emopt.distributed.plan import assign_owners

__all__ = ["Matrix", "assign_slots"]

Matrix = tuple[str, int, int]
"""A parameter's name, the number of a unit in it, and of a matrix in the unit."""


def assign_slots(
    batches: Sequence[tuple[Sequence[Matrix], Sequence[int]]], period: int
) -> dict[Matrix, tuple[int, ...]]:
    """The step within a period at which each piece of periodic work is due, so that every step has about the same.

    Pieces of one batch and one cost are done in one call, and a call has a price of its own (launches, checks), so they
    are parted no further than balance asks for: into chunks of at most a step's fair share, which then go to the least
    loaded steps, longest first.

    Args:
        batches: for each batch, its matrices, and the costs of the pieces that each of them has.
        period: steps in a period.

    Returns:
        Slots from 0 to ``period - 1`` for the pieces of each matrix.
    """
    share = sum(len(matrices) * sum(costs) for matrices, costs in batches) / period
    chunks: dict[str, list[tuple[Matrix, int]]] = {}
    prices: dict[str, int] = {}
    for number, (matrices, costs) in enumerate(batches):
        for cost in sorted(set(costs), reverse=True):
            alike = [(matrix, piece) for piece, c in enumerate(costs) if c == cost for matrix in matrices]
            parts = min(len(alike), max(1, math.ceil(len(alike) * cost / share))) if share else 1
            for part in range(parts):
                chunk = alike[part * len(alike) // parts : (part + 1) * len(alike) // parts]
                chunks[f"{number:06}|{cost}|{part}"] = chunk
                prices[f"{number:06}|{cost}|{part}"] = cost * len(chunk)
    slots: dict[Matrix, list[int]] = {m: [0] * len(costs) for matrices, costs in batches for m in matrices}
    for key, slot in assign_owners(prices, period).items():
        for matrix, piece in chunks[key]:
            slots[matrix][piece] = slot
    return {matrix: tuple(pieces) for matrix, pieces in slots.items()}
