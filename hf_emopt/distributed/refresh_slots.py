"""When, within its period, each piece of a rule's periodic work is done."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hf_emopt.distributed.load_balance import assign_owners
from hf_emopt.distributed.owned_regions import OwnedRegion
from hf_emopt.distributed.plan import Bucket, Plan
from hf_emopt.rules.refresh_schedule import CALL_COST

__all__ = ["Matrix", "assign_slots", "matrix_of", "plan_slots"]

Matrix = tuple[str, int, int]
"""A parameter's name, the number of a matrix view in it, and of a matrix in the matrix view."""

Piece = tuple[Matrix, int]

Batches = Sequence[tuple[Sequence[Matrix], Sequence[int]]]
"""Matrices of one shape, and the costs of the pieces that each of them has."""

# Ways to cut that are tried; beyond, neighbours differ by little.
_MOST_LIMITS = 64


def matrix_of(bucket: Bucket, owned_region: OwnedRegion, matrix_view: int, b: int) -> Matrix:
    """The ``b``-th matrix of a matrix view of an owned region, as the schedule names it."""
    parameter = bucket.parameters[owned_region.parameter]
    row = parameter.row_numel
    rows = max(1, owned_region.shape[0] // row)
    per_row = (
        owned_region.matrix_views[matrix_view].shape[0] // rows
        if 0 in owned_region.matrix_views[matrix_view].batch
        else 0
    )
    return (parameter.name, owned_region.index(matrix_view), owned_region.region[0][0] // row * per_row + b)


def plan_slots(
    plan: Plan,
    groups: Sequence[dict[str, Any]],
    rule: Any,
    assign: Callable[..., dict[Matrix, tuple[int, ...]]] | None = None,
) -> dict[Matrix, tuple[int, ...]]:
    """Slots of every piece of a rule's periodic work.

    From the matrices of all ranks, so that the schedule, and with it every weight, does not depend on their number.

    Args:
        rule: whose ``periodic_costs`` and ``period`` count.
        assign: in place of :func:`assign_slots`.
    """
    slots: dict[Matrix, tuple[int, ...]] = {}
    for index, group in enumerate(groups):
        alike: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        planned = [p for bucket in plan.buckets if bucket.group == index for p in bucket.parameters]
        for p in sorted(planned, key=lambda p: (-p.cost, p.name)):  # as buckets are filled in one process
            for u, matrix_view in enumerate(p.matrix_views):
                alike[matrix_view.shape[1:]].extend((p.name, u, b) for b in range(matrix_view.shape[0]))
        work = [(matrices, rule.periodic_costs(*shape, group)) for shape, matrices in alike.items()]
        slots |= (assign or assign_slots)(work, rule.period(group)) if work else {}
    return slots


def assign_slots(batches: Batches, period: int, call_cost: int = CALL_COST) -> dict[Matrix, tuple[int, ...]]:
    """The step within a period at which each piece of periodic work is due.

    Pieces of one batch and one cost that are due on the same step are done in one call, and a call has a price of its own
    (launches, checks). So pieces are parted into chunks, which go to the least loaded steps, longest first; and how far
    they are parted is what makes the sum of the longest and the mean step least.

    Args:
        batches: for each batch, its matrices, and the costs of the pieces that each of them has.
        period: steps in a period.
        call_cost: price of a call, in the units of the costs.

    Returns:
        Slots from 0 to ``period - 1`` for the pieces of each matrix.
    """
    alike = _alike(batches)
    best: tuple[int, list[list[Piece]], dict[str, int]] | None = None
    for limit in _limits(alike, call_cost):
        chunks, prices = _cut(alike, limit, call_cost)
        slots = assign_owners(prices, period)
        loads = [0] * period
        for key, slot in slots.items():
            loads[slot] += prices[key]
        badness = period * max(loads) + sum(loads)
        if best is None or badness < best[0]:
            best = badness, chunks, slots
    found: dict[Matrix, list[int]] = {m: [0] * len(costs) for matrices, costs in batches for m in matrices}
    if best is not None:
        for number, chunk in enumerate(best[1]):
            for matrix, piece in chunk:
                found[matrix][piece] = best[2][_key(number)]
    return {matrix: tuple(pieces) for matrix, pieces in found.items()}


def _alike(batches: Batches) -> list[tuple[int, list[Piece]]]:
    """Pieces that can be done in one call, with the cost of each."""
    return [
        (cost, [(matrix, piece) for piece, c in enumerate(costs) if c == cost for matrix in matrices])
        for matrices, costs in batches
        for cost in sorted(set(costs), reverse=True)
    ]


def _limits(alike: Sequence[tuple[int, list[Piece]]], call_cost: int) -> list[int]:
    """Prices of a chunk to try as the highest, falling: whole runs of like pieces first, single pieces last."""
    prices = {
        call_cost + cost * math.ceil(len(pieces) / parts)
        for cost, pieces in alike
        for parts in range(1, len(pieces) + 1)
    }
    falling = sorted(prices, reverse=True)
    step = max(1, math.ceil(len(falling) / _MOST_LIMITS))
    return falling[::step] + falling[-1:]


def _cut(
    alike: Sequence[tuple[int, list[Piece]]], limit: int, call_cost: int
) -> tuple[list[list[Piece]], dict[str, int]]:
    """Equal chunks of each run, no dearer than the limit unless a single piece is; and their prices by key."""
    chunks: list[list[Piece]] = []
    prices: dict[str, int] = {}
    for cost, pieces in alike:
        most = max(1, (limit - call_cost) // cost) if cost else len(pieces)
        parts = math.ceil(len(pieces) / most)
        for part in range(parts):
            chunk = pieces[part * len(pieces) // parts : (part + 1) * len(pieces) // parts]
            prices[_key(len(chunks))] = call_cost + cost * len(chunk)
            chunks.append(chunk)
    return chunks, prices


def _key(number: int) -> str:
    return f"{number:06}"
