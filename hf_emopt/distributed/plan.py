"""Plans: which rank transforms which matrix, and together with which others.

A plan is a value made from names, shapes, costs and storage alone, so every rank computes the same one. It consists of
*owned regions*, the parts of parameters that one rank transforms: whole parameters, some matrices of a stack (experts), or a
slice of a matrix that exceeds a rank's fair share and that a *compute group* of ranks transforms together.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from hf_emopt.distributed.layout import Region, Storage, full_region
from hf_emopt.linalg.cost import Method
from hf_emopt.routing.matrix_view import MatrixView

TensorParallel = Literal["auto", "layerwise", "duplicated", "distributed", "blockwise"]
MODES: tuple[str, ...] = get_args(TensorParallel)

MIN_DIVIDED_NUMEL = 2**16
"""Elements from which an elementwise parameter is divided among ranks."""


@dataclass(frozen=True)
class TensorSlices:
    """The slices into which tensor parallelism cuts one parameter.

    Attributes:
        of_shard: for each shard of the storage, the slice that contains it; under FSDP a slice has several shards.
        regions: the regions of each slice, in coordinates of the whole parameter.
        whole_job: whether all ranks of the job share the parameter, so that compute groups can be made.
    """

    of_shard: tuple[int, ...]
    regions: tuple[tuple[Region, ...], ...]
    whole_job: bool = True

    @property
    def size(self) -> int:
        return len(self.regions)

    def replicas(self, storage: Storage) -> list[tuple[int, ...]]:
        """Sets of rank indices that together hold every slice: one set for every replica and every FSDP rank."""
        by_slice = [[s for s, t in enumerate(self.of_shard) if t == slice_] for slice_ in range(self.size)]
        return [
            tuple(replica * storage.shards + shard for shard in shards)
            for replica in range(storage.replicas)
            for shards in zip(*by_slice, strict=True)
        ]


@dataclass(frozen=True)
class TensorParallelMode:
    """How the matrices of one parameter are transformed under tensor parallelism.

    Attributes:
        mode: ``"duplicated"``, ``"distributed"`` or ``"blockwise"``. A ``"layerwise"`` parameter has no such value.
        costs: operations of each matrix view on each rank.
        methods: the method of each matrix view's distributed iteration.
        recut: whether the slices run along the short side and are first exchanged for slices along the long side.
    """

    mode: str
    slices: TensorSlices
    costs: tuple[int, ...]
    methods: tuple[Method, ...] = ()
    recut: bool = False

    def is_local(self, storage: Storage) -> bool:
        """Whether every rank has all of its slice, so that no weight-sized message is sent."""
        return self.mode != "duplicated" and not self.recut and self.slices.size == storage.shards

    def keeps(self, storage: Storage) -> bool:
        """Whether each rank alone needs the update that it computes."""
        return self.mode == "duplicated" and self.slices.size == storage.shards


@dataclass(frozen=True)
class Slicing:
    """How whole matrices are sliced, of which a rank transforms a slice.

    Attributes:
        full_shape: ``(m, n)`` of the whole matrices.
        dim: the dimension that is sliced, -2 or -1.
        spans: the span of that dimension that each rank has; empty where slices are matrices of their own.
        compute_group: rank indices of the ranks that transform the matrices together; empty where there are none.
    """

    full_shape: tuple[int, int]
    dim: int
    spans: tuple[tuple[int, int], ...]
    compute_group: tuple[int, ...]
    method: Method = "standard"


@dataclass(frozen=True)
class OwnedRegion:
    """The part of one parameter that one rank transforms.

    Attributes:
        parameter: index into the bucket's parameters.
        region: in coordinates of the parameter.
        owner: rank index ``replica * shards + shard``.
        matrix_views: the matrices inside the region, in coordinates of the region.
        cost: operations of the owner.
        dim: dimension along which the region differs from the whole parameter.
        indices: the numbers that the matrix views have in the parameter; empty for all of them in order.
        slicings: how the matrices of each matrix view are sliced, ``None`` for whole matrices; empty where all are whole.
        copy: whether another rank computes the same update for its own use.
        gives: the part of the update that the owner passes on; ``None`` for all of it.
    """

    parameter: int
    region: Region
    owner: int
    matrix_views: tuple[MatrixView, ...]
    cost: int
    dim: int = 0
    indices: tuple[int, ...] = ()
    slicings: tuple[Slicing | None, ...] = ()
    copy: bool = False
    gives: tuple[Region, ...] | None = None

    def index(self, local: int) -> int:
        """Number in the parameter of ``matrix_views[local]``."""
        return self.indices[local] if self.indices else local

    def local_index(self, index: int) -> int | None:
        """Index into ``matrix_views`` of the parameter's matrix view of this number, ``None`` where the region has none."""
        if not self.indices:
            return index
        return self.indices.index(index) if index in self.indices else None

    def slicing(self, local: int) -> Slicing | None:
        """How the matrices of ``matrix_views[local]`` are sliced."""
        return self.slicings[local] if self.slicings else None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def results(self) -> tuple[Region, ...]:
        """The regions of the update that the owner passes on."""
        return (self.region,) if self.gives is None else self.gives


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that one rank transforms in one call.

    Attributes:
        shape: ``(m, n)`` of each matrix, of the slice where matrices are sliced.
        jobs: ``(index among the rank's owned regions, index of the matrix view)`` of each matrix view.
        sizes: matrices in each job.
        slicing: ``None`` for whole matrices.
        copy: whether another rank transforms the same matrices.
    """

    shape: tuple[int, int]
    jobs: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    slicing: Slicing | None = None
    copy: bool = False

    @property
    def count(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class PlannedParameter:
    """What planning needs to know of a parameter.

    Attributes:
        name: unique, the key of every decision.
        group, position: index of its parameter group, and its index inside the group.
        matrix_views: empty for a parameter that is stepped elementwise.
        costs: floating-point operations of transforming each matrix view, by the rule.
        tag: dtype and device; parameters of one bucket share it.
        shard_cost: operations of one of ``k`` ranks that transform the parameter's only matrix together, or ``None``
            where the rule or the parameter does not allow it.
        tensor_parallel: ``None`` where there are no slices, or where whole matrices are brought to their owners.
        whole_shapes: ``(m, n)`` of the matrix that each matrix view is part of, where matrix views are parts.
        pair: name that the two factors of one matrix have in common, empty for others. Both go to one owner in one bucket.
        scale: factor on the update that the rule computes.
    """

    name: str
    group: int
    position: int
    matrix_views: tuple[MatrixView, ...]
    costs: tuple[int, ...]
    tag: str
    storage: Storage
    shard_cost: Callable[[int], int] | None = None
    tensor_parallel: TensorParallelMode | None = None
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
        if not self.matrix_views:  # stepped elementwise
            return len(shape) > 0 and self.numel >= MIN_DIVIDED_NUMEL
        # A parameter of one dimension was flattened before it was sharded.
        rows = self.matrix_views[0].view[0] if len(shape) == 1 else shape[0]
        return all(0 in u.batch and u.dim != 0 and u.view[0] == rows for u in self.matrix_views)

    @property
    def row_numel(self) -> int:
        """Stored elements of dimension 0 for each row: more than 1 where a stack was flattened."""
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
        if self.tensor_parallel is not None:
            return self.tensor_parallel.is_local(self.storage)
        rest, row = full_region(self.storage.shape)[1:], self.row_numel
        regions = [region for regions in self.storage.regions for region in regions]
        return self.is_stack and all(
            region[1:] == rest and not (region[0][0] % row or region[0][1] % row) for region in regions
        )

    def owned_rows(self, start: int, stop: int, owner: int, cost: int) -> OwnedRegion:
        """Rows ``start:stop`` of a stack, or the whole of any other parameter, as a region of one owner."""
        shape = self.storage.shape
        if not shape:
            return OwnedRegion(0, (), owner, self.matrix_views, cost)
        region = ((start * self.row_numel, stop * self.row_numel), *full_region(shape)[1:])
        matrix_views = self.matrix_views
        if (start, stop) != (0, self.rows):
            matrix_views = tuple(replace(u, view=(stop - start, *u.view[1:])) for u in matrix_views)
        return OwnedRegion(0, region, owner, matrix_views, cost)

    def owned_slices(self, compute_group: tuple[int, ...], cost: int, method: Method = "standard") -> list[OwnedRegion]:
        """The parameter's only matrix sliced along its long side, one slice for each member of a compute group."""
        shape, (matrix_view,) = self.storage.shape, self.matrix_views
        dim, side = long_side(matrix_view)
        spans = tuple(even_spans(0, shape[dim], len(compute_group)))
        slicing = Slicing((matrix_view.shape[1], matrix_view.shape[2]), side, spans, compute_group, method)
        owned_regions = []
        for owner, span in zip(compute_group, spans, strict=True):
            region = (*full_region(shape[:dim]), span, *full_region(shape[dim + 1 :]))
            part = replace(matrix_view, view=(*shape[:dim], span[1] - span[0], *shape[dim + 1 :]))
            owned_regions.append(OwnedRegion(0, region, owner, (part,), cost, dim, slicings=(slicing,)))
        return owned_regions


def even_spans(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """At most ``parts`` spans of near-equal length that make up ``start:stop``."""
    size = stop - start
    count = min(parts, size)
    return [(start + size * i // count, start + size * (i + 1) // count) for i in range(count)]


def long_side(matrix_view: MatrixView) -> tuple[int, int]:
    """The longer dimension of a parameter that is one matrix, the first of equal ones: as stored, and as -2 or -1."""
    dim = 0 if matrix_view.view[0] >= matrix_view.view[1] else 1
    return dim, -2 if dim in matrix_view.rows else -1


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together, laid out over the same ranks.

    Attributes:
        parameters: costliest first.
        owned_regions: by parameter, then by offset.
        local: whether every shard holds the region that its rank transforms, so that shards exchange nothing before.
        keeps: whether each rank alone needs the update that it computes, so that shards exchange nothing after.
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
        """Whether a step sends nothing at all, so that ranks need not agree on which parameters take part."""
        return self.local and self.storage.replicas == 1 and not self.compute_groups

    @property
    def compute_groups(self) -> list[tuple[int, ...]]:
        """The sets of rank indices that transform matrices together, each set once."""
        slicings = (slicing for s in self.owned_regions for slicing in s.slicings if slicing is not None)
        return sorted({slicing.compute_group for slicing in slicings if slicing.compute_group})

    def owned(self, rank_index: int) -> tuple[OwnedRegion, ...]:
        """The owned regions of one rank index."""
        return tuple(s for s in self.owned_regions if s.owner == rank_index)

    def batches(self, rank_index: int) -> tuple[Batch, ...]:
        """The batches of one rank index: matrices of one shape and one compute group are one call."""
        alike: dict[Batch, list[tuple[int, int]]] = {}
        owned = self.owned(rank_index)
        for index, owned_region in enumerate(owned):
            for u, matrix_view in enumerate(owned_region.matrix_views):
                kind = Batch(matrix_view.shape[1:], (), (), owned_region.slicing(u), owned_region.copy)
                alike.setdefault(kind, []).append((index, u))
        for jobs in alike.values():  # the matrices of one matrix view follow each other, so that its state is one span
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
        """Operations of all whole transforms; a sliced matrix may cost its compute group a little more."""
        return sum(bucket.cost for bucket in self.buckets)

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Global ranks of the owners of each parameter."""
        owners: dict[str, set[int]] = {}
        for _, s, parameter in self._owned():
            owners.setdefault(parameter.name, set()).add(parameter.storage.rank(s.owner))
        return {name: tuple(sorted(ranks)) for name, ranks in owners.items()}

    def _owned(self) -> Iterator[tuple[Bucket, OwnedRegion, PlannedParameter]]:
        for bucket in self.buckets:
            yield from ((bucket, s, bucket.parameters[s.parameter]) for s in bucket.owned_regions)

    def loads(self) -> list[int]:
        """Floating-point operations of each rank."""
        return self._by_rank(lambda s: s.cost)

    def numels(self) -> list[int]:
        """Elements of the matrices of each rank."""
        return self._by_rank(lambda s: s.numel)

    def received(self) -> list[int]:
        """Elements that each rank receives in a step: shards of matrices that it owns, its shards of updates, and updates
        of other replicas. A rank's own part of an all-to-all is counted, as in its buffers."""
        totals = dict.fromkeys(self.ranks, 0)
        for bucket, s, parameter in self._owned():
            storage = parameter.storage
            if bucket.sends:
                totals[storage.rank(s.owner)] += s.numel
            for shard, regions in enumerate(storage.regions):
                numel = sum(overlap(region, part) for region in regions for part in s.results)
                for replica, row in enumerate(storage.ranks):
                    if bucket.returns or replica != s.owner // storage.shards:
                        totals[row[shard]] += numel
        return list(totals.values())

    def _by_rank(self, amount: Callable[[OwnedRegion], int]) -> list[int]:
        totals = dict.fromkeys(self.ranks, 0)
        for _, s, parameter in self._owned():
            totals[parameter.storage.rank(s.owner)] += amount(s)
        return list(totals.values())

    @property
    def imbalance(self) -> float:
        """The largest load over an equal share of the whole cost; 1.0 is perfect."""
        return max(self.loads()) * self.world_size / self.cost if self.cost else 1.0

    def digest(self) -> str:
        """Equal on two ranks exactly when their plans are."""
        buckets = [
            (b.group, b.local, b.keeps, b.owned_regions, [(p.name, p.storage.regions) for p in b.parameters])
            for b in self.buckets
        ]
        return hashlib.sha256(repr((self.world_size, buckets)).encode()).hexdigest()

    def __str__(self) -> str:
        lines = ["batches (matrices x outputs x inputs):"]
        for bucket in self.buckets:
            counts: Counter[tuple[int, int]] = Counter()
            for batch, *shape in (view.shape for p in bucket.parameters for view in p.matrix_views):
                counts[shape[0], shape[1]] += batch
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
            # A sliced matrix is counted at the first rank of its compute group.
            sliced = ((s.owner, slicing) for _, s, _ in self._owned() for slicing in s.slicings if slicing)
            count = sum(slicing.compute_group[:1] == (owner,) for owner, slicing in sliced)
            if count:
                lines.append(f"  {count} matrices are each transformed by several ranks together")
        return "\n".join(lines)


def overlap(a: Region, b: Region) -> int:
    """Elements that two regions of one tensor share."""
    return math.prod(max(0, min(u, v) - max(s, t)) for (s, u), (t, v) in zip(a, b))
