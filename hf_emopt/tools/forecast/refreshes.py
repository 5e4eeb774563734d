"""When the ranks refresh factors, and how unevenly: the slots that the optimizer would assign, counted by step and rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hf_emopt.distributed.refresh_slots import Batches, Matrix, assign_slots, matrix_of, plan_slots
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.rules.base import Group
from hf_emopt.rules.kronecker import KroneckerRule
from hf_emopt.tools.forecast.amounts import Array
from hf_emopt.tools.forecast.layouts import Placed

__all__ = ["SIDE", "Refreshes", "refreshes"]

SIDE = 2048
"""Refreshes are counted in those of a side of this length; others go with the cube."""

_MOST_PIECES = 20000
"""Beyond, pieces are dealt out to steps in turn, which evens out as well as the optimizer's own assignment does."""


@dataclass(frozen=True)
class Refreshes:
    """Of each step of a period, on each rank: ``(period, ranks)``.

    Attributes:
        sides: refreshed, in those of :data:`SIDE`.
        calls: in which they are: sides of one length in one batch.
    """

    sides: Array
    calls: Array


def refreshes(optimizer: MatrixOptimizer, placed: Placed) -> Refreshes | None:
    """The schedule of a rule that has one, on the ranks of a layout; ``None`` for others."""
    rule, world = optimizer.rule, placed.layout.world_size
    if not isinstance(rule, KroneckerRule):
        return None
    group = next(g for g in optimizer.param_groups if g["kind"] == "matrix")
    period = rule.period(group)
    together = group["refresh"] == "synchronous"
    slots = {} if together else _slots(optimizer, placed)
    sides, calls = np.zeros((period, world)), np.zeros((period, world))
    for bucket in placed.plan.buckets:
        found: dict[tuple[int, tuple[int, int]], Counter[tuple[int, int]]] = defaultdict(Counter)
        for s in bucket.owned_regions:
            for u, matrix_view in enumerate(s.matrix_views):
                lengths = _lengths(rule, matrix_view.shape[1:], optimizer.param_groups[bucket.group])
                for b in range(matrix_view.shape[0]):
                    due = (0,) * len(lengths) if together else slots[matrix_of(bucket, s, u, b)]
                    found[s.owner, matrix_view.shape[1:]].update(zip(due, lengths))
        for (owner, _), counts in found.items():
            rank = bucket.storage.rank(owner)
            for (slot, length), count in counts.items():
                sides[slot, rank] += count * (length / SIDE) ** 3
                calls[slot, rank] += 1
    return Refreshes(sides, calls)


def _lengths(rule: KroneckerRule, shape: tuple[int, int], group: Group) -> tuple[int, ...]:
    """Of each piece of a matrix, in the order of ``periodic_costs``."""
    return tuple(
        s for c in rule.grid(shape, group).classes for _ in range(c.count) for s in c.sizes if rule.has_factor(s, group)
    )


def _slots(optimizer: MatrixOptimizer, placed: Placed) -> dict[Matrix, tuple[int, ...]]:
    """As the optimizer assigns them on a GPU."""
    device: Any = [SimpleNamespace(device=torch.device("cuda"))]  # which is all that costs depend on
    groups = [{**group, "params": device} for group in optimizer.param_groups]
    return plan_slots(placed.plan, groups, optimizer.rule, _assign)


def _assign(batches: Batches, period: int) -> dict[Matrix, tuple[int, ...]]:
    if sum(len(matrices) * len(costs) for matrices, costs in batches) <= _MOST_PIECES:
        return assign_slots(batches, period)
    slots: dict[Matrix, tuple[int, ...]] = {}
    turn = 0
    for matrices, costs in batches:
        for matrix in matrices:
            slots[matrix] = tuple((turn + i) % period for i in range(len(costs)))
            turn += len(costs)
    return slots
