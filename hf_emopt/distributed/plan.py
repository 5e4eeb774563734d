"""Who transforms which matrix, and together with which others.

A plan is a value made from shapes and names alone: every rank computes the same one, it can be printed, hashed and
compared. Parameters of one group and one layout of units form buckets of bounded size; the matrices of one shape inside
a bucket are one batch.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hf_emopt.routing.unit import Unit

__all__ = ["Batch", "Bucket", "Plan", "PlannedParameter", "assign_owners", "make_plan"]

MAX_BUCKET_NUMEL = 2**26
"""Elements of a bucket (256 MiB in float32): enough to fill a GPU, small beside the parameters."""


@dataclass(frozen=True)
class PlannedParameter:
    """What planning needs to know of a parameter.

    Attributes:
        name: unique name, the key of every decision.
        group: index of its parameter group.
        position: index inside the group.
        units: its matrices.
        costs: floating-point operations of transforming each unit, by the rule.
        tag: dtype and device; parameters of one bucket share it.
    """

    name: str
    group: int
    position: int
    units: tuple[Unit, ...]
    costs: tuple[int, ...]
    tag: str

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that are transformed in one call.

    Attributes:
        shape: ``(m, n)`` of each matrix.
        jobs: ``(index into the bucket's parameters, index of the unit)`` of each unit.
        sizes: matrices in each job.
    """

    shape: tuple[int, int]
    jobs: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together."""

    group: int
    parameters: tuple[PlannedParameter, ...]
    batches: tuple[Batch, ...]

    @property
    def cost(self) -> int:
        return sum(sum(p.costs) for p in self.parameters)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True)
class Plan:
    """Buckets in the order they are stepped, costliest first inside each group, and the owner of every parameter."""

    buckets: tuple[Bucket, ...]
    owners: dict[str, int]
    world_size: int

    @property
    def cost(self) -> int:
        return sum(bucket.cost for bucket in self.buckets)

    def loads(self) -> list[int]:
        """Floating-point operations of each rank."""
        loads = [0] * self.world_size
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                loads[self.owners[parameter.name]] += sum(parameter.costs)
        return loads

    @property
    def imbalance(self) -> float:
        """Largest load over the mean: 1.0 is perfect."""
        loads = self.loads()
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    def digest(self) -> str:
        """Equal on two ranks exactly when their plans are."""
        text = repr(
            (
                self.world_size,
                sorted(self.owners.items()),
                [(b.group, b.batches, [p.name for p in b.parameters]) for b in self.buckets],
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        lines = ["batches (matrices x outputs x inputs):"]
        for bucket in self.buckets:
            shapes = ", ".join(f"{b.count}x{b.shape[0]}x{b.shape[1]}" for b in bucket.batches)
            lines.append(f"  group {bucket.group}: {shapes}  {bucket.cost / 1e9:.4g} GFLOP")
        lines.append(
            f"total {self.cost / 1e9:.4g} GFLOP a step on {self.world_size} rank(s), imbalance {self.imbalance:.3f}"
        )
        return "\n".join(lines)


def assign_owners(costs: dict[str, int], world_size: int) -> dict[str, int]:
    """Longest-processing-time-first: the costliest item goes to the least loaded rank, ties by name and rank.

    Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the optimal makespan.

    Raises:
        ValueError: when ``world_size`` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    heap = [(0, rank) for rank in range(world_size)]
    owners: dict[str, int] = {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        load, rank = heapq.heappop(heap)
        owners[name] = rank
        heapq.heappush(heap, (load + costs[name], rank))
    return owners


def make_plan(
    parameters: Sequence[PlannedParameter], world_size: int = 1, max_bucket_numel: int = MAX_BUCKET_NUMEL
) -> Plan:
    """The plan for these parameters; depends on names, shapes and costs only.

    Args:
        parameters: matrix parameters.
        world_size: ranks to share the work.
        max_bucket_numel: a bucket is closed before it exceeds this; a larger parameter gets one of its own.
    """
    buckets: list[Bucket] = []
    alike: dict[tuple[object, ...], list[PlannedParameter]] = {}
    for parameter in sorted(parameters, key=lambda p: (p.group, -sum(p.costs), p.name)):
        shapes = tuple(unit.shape for unit in parameter.units)
        alike.setdefault((parameter.group, parameter.tag, shapes), []).append(parameter)
    for members in alike.values():
        chunk: list[PlannedParameter] = []
        for parameter in members:
            if chunk and sum(p.numel for p in chunk) + parameter.numel > max_bucket_numel:
                buckets.append(_bucket(chunk))
                chunk = []
            chunk.append(parameter)
        buckets.append(_bucket(chunk))
    owners = assign_owners({p.name: sum(p.costs) for p in parameters}, world_size)
    return Plan(tuple(buckets), owners, world_size)


def _bucket(members: Sequence[PlannedParameter]) -> Bucket:
    jobs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, parameter in enumerate(members):
        for unit_index, unit in enumerate(parameter.units):
            jobs.setdefault(unit.shape[1:], []).append((index, unit_index))
    batches = tuple(
        Batch(shape, tuple(entries), tuple(members[i].units[u].shape[0] for i, u in entries))
        for shape, entries in jobs.items()
    )
    return Bucket(members[0].group, tuple(members), batches)
