"""The refresh step of each part of a rule's periodic work: the step within a period at which it is done."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hf_emopt.distributed.load_balance import assign
from hf_emopt.distributed.plan import Bucket, OwnedRegion, Plan
from hf_emopt.rules.base import MatrixRule
from hf_emopt.rules.refresh_schedule import CALL_COST

Matrix = tuple[str, int, int]
"""A parameter's name, the number of a matrix view in the parameter, and the number of a matrix in the matrix view."""

Task = tuple[Matrix, int]
"""A matrix, and the number of a part of its periodic work."""

Batches = Sequence[tuple[Sequence[Matrix], Sequence[int]]]
"""Matrices of one shape, and the costs of the parts of work that each of them has."""

_MOST_LIMITS = 64
"""Limits that are tried; of more, neighbours differ by little."""


def matrix_of(bucket: Bucket, owned_region: OwnedRegion, matrix_view: int, b: int) -> Matrix:
    """The ``b``-th matrix of a matrix view of an owned region, as the schedule names it."""
    row = bucket.parameters[owned_region.parameter].row_numel
    rows = max(1, owned_region.shape[0] // row)
    view = owned_region.matrix_views[matrix_view]
    per_row = view.shape[0] // rows if 0 in view.batch else 0
    first = owned_region.region[0][0] // row * per_row
    return (bucket.parameters[owned_region.parameter].name, owned_region.index(matrix_view), first + b)


def plan_refresh_steps(
    plan: Plan,
    groups: Sequence[dict[str, Any]],
    rule: MatrixRule,
    assign_steps: Callable[[Batches, int], dict[Matrix, tuple[int, ...]]] | None = None,
) -> dict[Matrix, tuple[int, ...]]:
    """Refresh steps of every part of a rule's periodic work.

    They are planned from the matrices of all ranks, so that the schedule, and with it every weight, does not depend on
    the number of ranks. ``assign_steps`` replaces :func:`assign_refresh_steps`.
    """
    steps: dict[Matrix, tuple[int, ...]] = {}
    for index, group in enumerate(groups):
        alike: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        planned = [p for bucket in plan.buckets if bucket.group == index for p in bucket.parameters]
        for p in sorted(planned, key=lambda p: (-p.cost, p.name)):  # as buckets are filled in one process
            for u, matrix_view in enumerate(p.matrix_views):
                alike[matrix_view.shape[1:]].extend((p.name, u, b) for b in range(matrix_view.shape[0]))
        work = [(matrices, rule.periodic_costs(*shape, group)) for shape, matrices in alike.items()]
        steps |= (assign_steps or assign_refresh_steps)(work, rule.period(group)) if work else {}
    return steps


def assign_refresh_steps(batches: Batches, period: int, call_cost: int = CALL_COST) -> dict[Matrix, tuple[int, ...]]:
    """The step within a period at which each part of periodic work is due.

    Parts of one batch and one cost that are due on the same step are done in one call, and each call has a price of its
    own (launches, checks). So like parts are divided into chunks, which go to the least loaded steps, longest first. The
    size of chunks is chosen to minimize the sum of the longest and the mean step.

    Returns:
        Steps from 0 to ``period - 1`` for the parts of each matrix.
    """
    # Tasks that can be done in one call, with the cost of each.
    alike = [
        (cost, [(matrix, part) for part, c in enumerate(costs) if c == cost for matrix in matrices])
        for matrices, costs in batches
        for cost in sorted(set(costs), reverse=True)
    ]
    best: tuple[int, list[list[Task]], dict[str, tuple[int, ...]]] | None = None
    for limit in _limits(alike, call_cost):
        chunks, prices = _divided(alike, limit, call_cost)
        chosen = assign(prices, period)
        loads = [0] * period
        for key, (step,) in chosen.items():
            loads[step] += prices[key]
        badness = period * max(loads) + sum(loads)
        if best is None or badness < best[0]:
            best = badness, chunks, chosen
    found: dict[Matrix, list[int]] = {m: [0] * len(costs) for matrices, costs in batches for m in matrices}
    if best is not None:
        for number, chunk in enumerate(best[1]):
            for matrix, part in chunk:
                (found[matrix][part],) = best[2][_key(number)]
    return {matrix: tuple(steps) for matrix, steps in found.items()}


def _limits(alike: Sequence[tuple[int, list[Task]]], call_cost: int) -> list[int]:
    """Highest prices of a chunk to try, falling: from all like tasks together to single tasks."""
    sizes = ((cost, math.ceil(len(tasks) / chunks)) for cost, tasks in alike for chunks in range(1, len(tasks) + 1))
    falling = sorted({call_cost + cost * size for cost, size in sizes}, reverse=True)
    return falling[:: max(1, math.ceil(len(falling) / _MOST_LIMITS))] + falling[-1:]


def _divided(
    alike: Sequence[tuple[int, list[Task]]], limit: int, call_cost: int
) -> tuple[list[list[Task]], dict[str, int]]:
    """Equal chunks of like tasks, no dearer than the limit unless a single task is, and their prices by key."""
    chunks: list[list[Task]] = []
    prices: dict[str, int] = {}
    for cost, tasks in alike:
        most = max(1, (limit - call_cost) // cost) if cost else len(tasks)
        count = math.ceil(len(tasks) / most)
        for i in range(count):
            chunk = tasks[i * len(tasks) // count : (i + 1) * len(tasks) // count]
            prices[_key(len(chunks))] = call_cost + cost * len(chunk)
            chunks.append(chunk)
    return chunks, prices


def _key(number: int) -> str:
    return f"{number:06}"
