"""Refreshes of factors by step and rank, from the refresh steps that the optimizer would assign."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hf_emopt.distributed.refresh_steps import Batches, Matrix, assign_refresh_steps, matrix_of, plan_refresh_steps
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.rules.base import Group
from hf_emopt.rules.kronecker import KroneckerRule
from hf_emopt.tools.forecast.amounts import Array
from hf_emopt.tools.forecast.layouts import Placed

SIDE = 2048
"""The side of the factor that is the unit; others count with the cube of their side."""

_MOST_TASKS = 20000
"""More tasks than this are assigned to steps in turn, which is as even as the optimizer's own assignment."""


@dataclass(frozen=True)
class Refreshes:
    """The refreshes of each step of a period on each rank, ``(period, ranks)``.

    ``sides`` are factors in units of one of :data:`SIDE`; a call refreshes factors of one side in one batch.
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
    # Refreshes are assigned as on a GPU: costs depend on the device alone.
    device: Any = [SimpleNamespace(device=torch.device("cuda"))]
    groups = [{**g, "params": device} for g in optimizer.param_groups]
    steps = {} if together else plan_refresh_steps(placed.plan, groups, rule, _assign)
    sides, calls = np.zeros((period, world)), np.zeros((period, world))
    for bucket in placed.plan.buckets:
        found: dict[tuple[int, tuple[int, int]], Counter[tuple[int, int]]] = defaultdict(Counter)
        for s in bucket.owned_regions:
            for u, matrix_view in enumerate(s.matrix_views):
                lengths = _lengths(rule, matrix_view.shape[1:], optimizer.param_groups[bucket.group])
                for b in range(matrix_view.shape[0]):
                    due = (0,) * len(lengths) if together else steps[matrix_of(bucket, s, u, b)]
                    found[s.owner, matrix_view.shape[1:]].update(zip(due, lengths))
        for (owner, _), counts in found.items():
            rank = bucket.storage.rank(owner)
            for (step, length), count in counts.items():
                sides[step, rank] += count * (length / SIDE) ** 3
                calls[step, rank] += 1
    return Refreshes(sides, calls)


def _lengths(rule: KroneckerRule, shape: tuple[int, int], group: Group) -> tuple[int, ...]:
    """The side of each factor of a matrix, in the order of ``periodic_costs``."""
    return tuple(
        s for c in rule.grid(shape, group).classes for _ in range(c.count) for s in c.sizes if rule.has_factor(s, group)
    )


def _assign(batches: Batches, period: int) -> dict[Matrix, tuple[int, ...]]:
    if sum(len(matrices) * len(costs) for matrices, costs in batches) <= _MOST_TASKS:
        return assign_refresh_steps(batches, period)
    steps: dict[Matrix, tuple[int, ...]] = {}
    turn = 0
    for matrices, costs in batches:
        for matrix in matrices:
            steps[matrix] = tuple((turn + i) % period for i in range(len(costs)))
            turn += len(costs)
    return steps
