"""Who transforms which matrix, and together with which others.

A plan is a value made from names, shapes, costs and storage alone: every rank computes the same one, it can be printed,
hashed and compared. It is made of *owned regions*: an owned region is the part of a parameter that one rank transforms.
Most are a whole parameter. A stack of matrices (experts) is cut between matrices, so that its work is shared; and a
matrix whose transform alone would exceed a rank's fair share is cut across a *compute group* of ranks that transform it
together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from hf_emopt.distributed.layout import Region, Storage, full_region
from hf_emopt.distributed.owned_regions import Batch, Cut, OwnedRegion
from hf_emopt.routing.matrix_view import MatrixView

if TYPE_CHECKING:
    from hf_emopt.distributed.arrangement import Arrangement

__all__ = [
    "Batch",
    "Bucket",
    "Cut",
    "OwnedRegion",
    "Plan",
    "PlannedParameter",
    "overlap",
]

MIN_CUT_NUMEL = 2**16
"""Elements from which an elementwise parameter is cut among ranks."""


@dataclass(frozen=True)
class PlannedParameter:
    """What planning needs to know of a parameter.

    Attributes:
        name: unique name, the key of every decision.
        group: index of its parameter group.
        position: index inside the group.
        matrix_views: its matrices.
        costs: floating-point operations of transforming each matrix view, by the rule.
        tag: dtype and device; parameters of one bucket share it.
        storage: where its elements lie.
        shard_cost: operations of one of ``k`` ranks that transform the parameter's only matrix together, or ``None``
            where the rule or the parameter does not allow it.
        arrangement: how slices of tensor parallelism are transformed, or ``None`` where that cuts nothing or whole matrices
            are brought to their owners.
        whole_shapes: ``(m, n)`` of the matrix that each matrix view is part of, where matrix views are parts.
        pair: name that the two factors of one matrix have in common: they go to one owner, in one bucket. Empty for others.
        scale: factor on the update, beside what the rule makes of it.
    """

    name: str
    group: int
    position: int
    matrix_views: tuple[MatrixView, ...]
    costs: tuple[int, ...]
    tag: str
    storage: Storage
    shard_cost: Callable[[int], int] | None = None
    arrangement: Arrangement | None = None
    whole_shapes: tuple[tuple[int, int], ...] = ()
    pair: str = ""
    scale: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.storage.shape)

    @property
    def cost(self) -> int:
        return sum(self.costs)

    @property
    def is_stack(self) -> bool:
        """Whether every row of dimension 0 holds whole matrices, independent of the other rows."""
        shape = self.storage.shape
        if not self.matrix_views:  # stepped element by element
            return len(shape) > 0 and self.numel >= MIN_CUT_NUMEL
        rows = (
            self.matrix_views[0].view[0] if len(shape) == 1 else shape[0]
        )  # one dimension: flattened before it was cut
        return all(0 in u.batch and u.dim != 0 and u.view[0] == rows for u in self.matrix_views)

    @property
    def row_numel(self) -> int:
        """Elements of dimension 0, as it is stored, for each row: more than 1 where a stack was flattened."""
        flat_stack = self.matrix_views and len(self.storage.shape) == 1 and self.is_stack
        return self.storage.shape[0] // self.matrix_views[0].view[0] if flat_stack else 1

    @property
    def rows(self) -> int:
        """Length of dimension 0 before it was flattened."""
        return self.storage.shape[0] // self.row_numel if self.storage.shape else 1

    @property
    def is_local(self) -> bool:
        """Whether no shard has to send anything to another before matrices are transformed."""
        if self.storage.shards == 1 or self.pair:
            return False
        if self.arrangement is not None:
            return self.arrangement.is_local(self.storage)
        rest, row = full_region(self.storage.shape)[1:], self.row_numel
        regions = [region for regions in self.storage.regions for region in regions]
        return self.is_stack and all(
            region[1:] == rest and not (region[0][0] % row or region[0][1] % row) for region in regions
        )


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together, laid out over the same ranks.

    Attributes:
        group: index of their parameter group.
        parameters: costliest first.
        owned_regions: by parameter, then by place.
        local: every shard holds what its rank transforms, so nothing has to travel between shards before.
        keeps: what a rank computes is for itself, so nothing has to travel after.
    """

    group: int
    parameters: tuple[PlannedParameter, ...]
    owned_regions: tuple[OwnedRegion, ...]
    local: bool = False
    keeps: bool = False

    @property
    def cost(self) -> int:
        return sum(p.cost for p in self.parameters)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def storage(self) -> Storage:
        return self.parameters[0].storage

    @cached_property
    def paired(self) -> bool:
        """Whether the parameters are the factors of pairs."""
        return bool(self.parameters[0].pair)

    @property
    def sends(self) -> bool:
        """Whether shards go to owners."""
        return self.storage.shards > 1 and not self.local

    @property
    def returns(self) -> bool:
        """Whether updates go back to shards."""
        return self.sends and not self.keeps

    @cached_property
    def communication_free(self) -> bool:
        """Whether nothing of its step travels at all, so that ranks need not agree on who takes part."""
        return self.local and self.storage.replicas == 1 and not self.compute_groups

    @property
    def compute_groups(self) -> list[tuple[int, ...]]:
        """Positions of ranks that share matrices, each set once."""
        cuts = (cut for s in self.owned_regions for cut in s.cuts if cut is not None and cut.compute_group)
        return sorted({cut.compute_group for cut in cuts})

    def owned(self, position: int) -> tuple[OwnedRegion, ...]:
        """Owned regions that the rank at a position transforms."""
        return tuple(s for s in self.owned_regions if s.owner == position)

    def batches(self, position: int) -> tuple[Batch, ...]:
        """How that rank batches them: matrices of one shape and one compute group are one call."""
        alike: dict[Batch, list[tuple[int, int]]] = {}
        owned = self.owned(position)
        for index, owned_region in enumerate(owned):
            for matrix_view_index, matrix_view in enumerate(owned_region.matrix_views):
                kind = Batch(matrix_view.shape[1:], (), (), owned_region.cut(matrix_view_index), owned_region.copy)
                alike.setdefault(kind, []).append((index, matrix_view_index))
        for jobs in alike.values():  # the matrices of one matrix view side by side, so that its state is one run
            jobs.sort(key=lambda job: (owned[job[0]].parameter, owned[job[0]].index(job[1]), job[0]))
        return tuple(
            replace(kind, jobs=tuple(jobs), sizes=tuple(owned[i].matrix_views[u].shape[0] for i, u in jobs))
            for kind, jobs in alike.items()
        )


@dataclass(frozen=True)
class Plan:
    """Buckets in the order in which they are stepped, and the global ranks that take part."""

    buckets: tuple[Bucket, ...]
    ranks: tuple[int, ...] = (0,)

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def cost(self) -> int:
        """Operations of all whole transforms; a matrix that is cut may cost its compute group a little more."""
        return sum(bucket.cost for bucket in self.buckets)

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Global ranks of the owners of each parameter."""
        owners: dict[str, set[int]] = {}
        for bucket in self.buckets:
            for s in bucket.owned_regions:
                parameter = bucket.parameters[s.parameter]
                owners.setdefault(parameter.name, set()).add(parameter.storage.rank(s.owner))
        return {name: tuple(sorted(ranks)) for name, ranks in owners.items()}

    def loads(self) -> list[int]:
        """Floating-point operations of each rank."""
        return self._by_rank(lambda owned_region: owned_region.cost)

    def numels(self) -> list[int]:
        """Elements of the matrices of each rank."""
        return self._by_rank(lambda owned_region: owned_region.numel)

    def received(self) -> list[int]:
        """Elements that each rank receives in a step: shards of what it owns, its shards of updates, other replicas' updates.

        A rank's own part of an all-to-all is counted, as the buffers count it.
        """
        totals = dict.fromkeys(self.ranks, 0)
        for bucket in self.buckets:
            for s in bucket.owned_regions:
                storage = bucket.parameters[s.parameter].storage
                if bucket.sends:
                    totals[storage.rank(s.owner)] += s.numel
                given = (s.region,) if s.gives is None else s.gives
                for shard, regions in enumerate(storage.regions):
                    numel = sum(overlap(region, part) for region in regions for part in given)
                    for replica, row in enumerate(storage.ranks):
                        if bucket.returns or replica != s.owner // storage.shards:
                            totals[row[shard]] += numel
        return list(totals.values())

    def _by_rank(self, amount: Callable[[OwnedRegion], int]) -> list[int]:
        totals = dict.fromkeys(self.ranks, 0)
        for bucket in self.buckets:
            for s in bucket.owned_regions:
                rank = bucket.parameters[s.parameter].storage.rank(s.owner)
                totals[rank] += amount(s)
        return list(totals.values())

    @property
    def imbalance(self) -> float:
        """Makespan over ideal: the largest load over an equal share of the whole cost; 1.0 is perfect."""
        return max(self.loads()) * self.world_size / self.cost if self.cost else 1.0

    def digest(self) -> str:
        """Equal on two ranks exactly when their plans are."""
        text = repr(
            (
                self.world_size,
                [
                    (b.group, b.local, b.keeps, b.owned_regions, [(p.name, p.storage.regions) for p in b.parameters])
                    for b in self.buckets
                ],
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        lines = ["batches (matrices x outputs x inputs):"]
        for bucket in self.buckets:
            counts: dict[tuple[int, int], int] = {}
            for parameter in bucket.parameters:
                for matrix_view in parameter.matrix_views:
                    counts[matrix_view.shape[1:]] = counts.get(matrix_view.shape[1:], 0) + matrix_view.shape[0]
            shapes = ", ".join(f"{count}x{m}x{n}" for (m, n), count in counts.items())
            place = " local" if bucket.local else ""
            lines.append(f"  group {bucket.group}{place}: {shapes}  {bucket.cost / 1e9:.4g} GFLOP")
        lines.append(
            f"total {self.cost / 1e9:.4g} GFLOP a step on {self.world_size} rank(s), imbalance {self.imbalance:.3f}"
        )
        if self.world_size > 1:
            for rank, load, numel, received in zip(self.ranks, self.loads(), self.numels(), self.received()):
                lines.append(
                    f"  rank {rank}: {load / 1e9:.4g} GFLOP, owns {numel:,} elements, receives {received:,} a step"
                )
            firsts = [
                cut
                for b in self.buckets
                for s in b.owned_regions
                for cut in s.cuts
                if cut and cut.compute_group[:1] == (s.owner,)
            ]
            if firsts:
                lines.append(f"  {len(firsts)} matrices are each transformed by several ranks together")
        return "\n".join(lines)


def overlap(a: Region, b: Region) -> int:
    """Elements that two regions of one tensor share."""
    return math.prod(max(0, min(u, v) - max(s, t)) for (s, u), (t, v) in zip(a, b))
