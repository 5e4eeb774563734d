"""Who transforms which matrix, and together with which others.

A plan is a value made from names, shapes, costs and storage alone: every rank computes the same one, it can be printed,
hashed and compared. It is made of *segments*: a segment is the part of a parameter that one rank transforms. Most are a
whole parameter. A stack of matrices (experts) is cut between matrices, so that its work is shared; and a matrix whose
transform alone would exceed a rank's fair share is cut across a *team* of ranks that transform it together.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from hf_emopt.distributed.layout import Box, Storage, full_box
from hf_emopt.distributed.segments import Batch, Cut, Segment
from hf_emopt.routing.unit import Unit

if TYPE_CHECKING:
    from hf_emopt.distributed.tensor_parallel import Arrangement

__all__ = [
    "Batch",
    "Bucket",
    "Cut",
    "Plan",
    "PlannedParameter",
    "Segment",
    "assign_owners",
    "bucket_numel",
    "make_plan",
    "recut",
]

MAX_BUCKET_NUMEL = 2**26
"""Elements of a bucket for each rank (256 MiB in float32): enough to fill a GPU, small beside the parameters."""

BUCKET_VARIABLE = "HF_EMOPT_MAX_BUCKET_NUMEL"
"""Environment variable with another number, the same on all ranks (``hf-emopt bench step`` measures which is faster)."""

MIN_CUT_NUMEL = 2**16
"""Elements from which an elementwise parameter is cut among ranks."""


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
        storage: where its elements lie.
        shard_cost: operations of one of ``k`` ranks that transform the parameter's only matrix together, or ``None``
            where the rule or the parameter does not allow it.
        arrangement: how slices of tensor parallelism are transformed, or ``None`` where that cuts nothing or whole matrices
            are brought to their owners.
        whole_shapes: ``(m, n)`` of the matrix that each unit is part of, where units are parts.
        pair: name that the two factors of one matrix have in common: they go to one owner, in one bucket. Empty for others.
        scale: factor on the update, beside what the rule makes of it.
    """

    name: str
    group: int
    position: int
    units: tuple[Unit, ...]
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
        if not self.units:  # stepped element by element
            return len(shape) > 0 and self.numel >= MIN_CUT_NUMEL
        rows = self.units[0].view[0] if len(shape) == 1 else shape[0]  # one dimension: flattened before it was cut
        return all(0 in u.batch and u.dim != 0 and u.view[0] == rows for u in self.units)

    @property
    def row_numel(self) -> int:
        """Elements of dimension 0, as it is stored, for each row: more than 1 where a stack was flattened."""
        flat_stack = self.units and len(self.storage.shape) == 1 and self.is_stack
        return self.storage.shape[0] // self.units[0].view[0] if flat_stack else 1

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
        rest, row = full_box(self.storage.shape)[1:], self.row_numel
        boxes = [box for boxes in self.storage.boxes for box in boxes]
        return self.is_stack and all(box[1:] == rest and not (box[0][0] % row or box[0][1] % row) for box in boxes)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together, laid out over the same ranks.

    Attributes:
        group: index of their parameter group.
        parameters: costliest first.
        segments: by parameter, then by place.
        local: every shard holds what its rank transforms, so nothing has to travel between shards before.
        keeps: what a rank computes is for itself, so nothing has to travel after.
    """

    group: int
    parameters: tuple[PlannedParameter, ...]
    segments: tuple[Segment, ...]
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

    @property
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

    @property
    def teams(self) -> list[tuple[int, ...]]:
        """Positions of ranks that share matrices, each set once."""
        cuts = (cut for s in self.segments for cut in s.cuts if cut is not None and cut.team)
        return sorted({cut.team for cut in cuts})

    def owned(self, position: int) -> tuple[Segment, ...]:
        """Segments that the rank at a position transforms."""
        return tuple(s for s in self.segments if s.owner == position)

    def batches(self, position: int) -> tuple[Batch, ...]:
        """How that rank batches them: matrices of one shape and one team are one call."""
        alike: dict[Batch, list[tuple[int, int]]] = {}
        owned = self.owned(position)
        for index, segment in enumerate(owned):
            for unit_index, unit in enumerate(segment.units):
                kind = Batch(unit.shape[1:], (), (), segment.cut(unit_index), segment.copy)
                alike.setdefault(kind, []).append((index, unit_index))
        for jobs in alike.values():  # the matrices of one unit side by side, so that its state is one run
            jobs.sort(key=lambda job: (owned[job[0]].parameter, owned[job[0]].index(job[1]), job[0]))
        return tuple(
            replace(kind, jobs=tuple(jobs), sizes=tuple(owned[i].units[u].shape[0] for i, u in jobs))
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
        """Operations of all whole transforms; a matrix that is cut may cost its team a little more."""
        return sum(bucket.cost for bucket in self.buckets)

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """Global ranks of the owners of each parameter."""
        owners: dict[str, set[int]] = {}
        for bucket in self.buckets:
            for s in bucket.segments:
                parameter = bucket.parameters[s.parameter]
                owners.setdefault(parameter.name, set()).add(parameter.storage.rank(s.owner))
        return {name: tuple(sorted(ranks)) for name, ranks in owners.items()}

    def loads(self) -> list[int]:
        """Floating-point operations of each rank."""
        return self._by_rank(lambda segment: segment.cost)

    def numels(self) -> list[int]:
        """Elements of the matrices of each rank."""
        return self._by_rank(lambda segment: segment.numel)

    def received(self) -> list[int]:
        """Elements that each rank receives in a step: shards of what it owns, its shards of updates, other replicas' updates.

        A rank's own part of an all-to-all is counted, as the buffers count it.
        """
        totals = dict.fromkeys(self.ranks, 0)
        for bucket in self.buckets:
            for s in bucket.segments:
                storage = bucket.parameters[s.parameter].storage
                if bucket.sends:
                    totals[storage.rank(s.owner)] += s.numel
                given = (s.box,) if s.gives is None else s.gives
                for shard, boxes in enumerate(storage.boxes):
                    numel = sum(overlap(box, part) for box in boxes for part in given)
                    for replica, row in enumerate(storage.ranks):
                        if bucket.returns or replica != s.owner // storage.shards:
                            totals[row[shard]] += numel
        return list(totals.values())

    def _by_rank(self, amount: Callable[[Segment], int]) -> list[int]:
        totals = dict.fromkeys(self.ranks, 0)
        for bucket in self.buckets:
            for s in bucket.segments:
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
                    (b.group, b.local, b.keeps, b.segments, [(p.name, p.storage.boxes) for p in b.parameters])
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
                for unit in parameter.units:
                    counts[unit.shape[1:]] = counts.get(unit.shape[1:], 0) + unit.shape[0]
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
                cut for b in self.buckets for s in b.segments for cut in s.cuts if cut and cut.team[:1] == (s.owner,)
            ]
            if firsts:
                lines.append(f"  {len(firsts)} matrices are each transformed by several ranks together")
        return "\n".join(lines)


def overlap(a: Box, b: Box) -> int:
    """Elements that two boxes of one tensor share."""
    return math.prod(max(0, min(u, v) - max(s, t)) for (s, u), (t, v) in zip(a, b))


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


def bucket_numel() -> int:
    """Elements of a bucket for each rank: the environment's :data:`BUCKET_VARIABLE`, else :data:`MAX_BUCKET_NUMEL`.

    Raises:
        ValueError: when the variable is not a number above 0.
    """
    given = os.environ.get(BUCKET_VARIABLE, "")
    if not given:
        return MAX_BUCKET_NUMEL
    if not given.isdigit() or int(given) == 0:
        raise ValueError(f"{BUCKET_VARIABLE}={given!r} must be a whole number above 0, or unset for {MAX_BUCKET_NUMEL}")
    return int(given)


def make_plan(
    parameters: Sequence[PlannedParameter],
    max_bucket_numel: int | None = None,
    forward_order: bool = False,
) -> Plan:
    """The plan for these parameters.

    Args:
        parameters: matrix parameters; or others, without units, whose cost is their size.
        max_bucket_numel: a bucket is closed before a rank's part exceeds this; a larger parameter gets one of its own.
            ``None`` for :func:`bucket_numel`.
        forward_order: buckets follow the order of ``parameters`` (the model's) instead of falling cost, so that what the
            next forward needs first is ready first.
    """
    ordered = sorted(parameters, key=lambda p: (p.group, -p.cost, p.name))
    ranks = sorted({rank for p in parameters for row in p.storage.ranks for rank in row})
    owned = _Assignment(ranks).segments_of(ordered)
    alike: dict[tuple[Any, ...], list[PlannedParameter]] = {}
    for parameter in parameters if forward_order else ordered:
        storage, arrangement = parameter.storage, parameter.arrangement
        keeps = arrangement is not None and arrangement.keeps(storage)
        mode = arrangement and arrangement.mode
        paired = bool(parameter.pair)
        key = (parameter.group, parameter.tag, storage.ranks, storage.shards, paired, parameter.is_local, keeps, mode)
        alike.setdefault(key, []).append(parameter)
    buckets = []
    limit = bucket_numel() if max_bucket_numel is None else max_bucket_numel
    for (*_, local, keeps, _), members in alike.items():
        for chunk in _chunks(members, limit):
            segments = tuple(replace(s, parameter=i) for i, p in enumerate(chunk) for s in owned[p.name])
            buckets.append(Bucket(chunk[0].group, tuple(chunk), segments, bool(local), bool(keeps)))
    return Plan(tuple(buckets), tuple(ranks) or (0,))


def _chunks(members: Sequence[PlannedParameter], limit: int) -> list[list[PlannedParameter]]:
    together: dict[str, list[PlannedParameter]] = {}
    for parameter in members:
        together.setdefault(parameter.pair or parameter.name, []).append(parameter)
    chunks: list[list[PlannedParameter]] = [[]]
    size = 0
    for parameters in together.values():
        # Of copies a rank transforms its share, and gathers all of it: up to four shares at once.
        numel = sum(-(-p.numel // (p.storage.shards * min(p.storage.replicas, 4))) for p in parameters)
        if chunks[-1] and size + numel > limit:
            chunks.append([])
            size = 0
        chunks[-1].extend(parameters)
        size += numel
    return chunks


class _Assignment:
    """Gives segments to ranks; loads are carried from one set of ranks to the next."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.loads: dict[int, int] = dict.fromkeys(ranks, 0)

    def segments_of(self, parameters: Sequence[PlannedParameter]) -> dict[str, list[Segment]]:
        """Segments by parameter name: first those whose shard is given, then the others, all over the same ranks at once."""
        from hf_emopt.distributed.tensor_parallel import segments_of

        segments = self._paired(parameters)
        for parameter in parameters:
            if parameter.pair:
                continue
            if parameter.arrangement is not None:
                segments[parameter.name] = segments_of(parameter, self.loads)
                for segment in segments[parameter.name]:
                    self._add(parameter.storage.rank(segment.owner), segment.cost)
            elif parameter.is_local:
                segments[parameter.name] = self._local(parameter)
        by_ranks: dict[tuple[tuple[int, ...], ...], list[PlannedParameter]] = {}
        for parameter in parameters:
            if parameter.name not in segments:
                by_ranks.setdefault(parameter.storage.ranks, []).append(parameter)
        for members in by_ranks.values():
            segments |= self._shared(members)
        return segments

    def _paired(self, parameters: Sequence[PlannedParameter]) -> dict[str, list[Segment]]:
        """Both factors of a pair, whole, to the least loaded rank: the costliest pair first."""
        pairs: dict[str, list[PlannedParameter]] = {}
        for parameter in parameters:
            if parameter.pair:
                pairs.setdefault(parameter.pair, []).append(parameter)
        segments: dict[str, list[Segment]] = {}
        for name in sorted(pairs, key=lambda name: (-sum(p.cost for p in pairs[name]), name)):
            storage = pairs[name][0].storage
            owner = min(range(storage.world_size), key=lambda position: (self.loads[storage.rank(position)], position))
            for parameter in pairs[name]:
                segments[parameter.name] = [_rows(parameter, 0, parameter.rows, owner, parameter.cost)]
                self._add(storage.rank(owner), parameter.cost)
        return segments

    def _local(self, parameter: PlannedParameter) -> list[Segment]:
        """Rows stay with their shard; its replicas share them."""
        storage, result = parameter.storage, []
        for shard, boxes in enumerate(storage.boxes):
            runs = [(box[0][0] // parameter.row_numel, box[0][1] // parameter.row_numel) for box in boxes]
            for start, stop in (cut for run in runs for cut in _even_cuts(*run, storage.replicas)):
                cost = parameter.cost * (stop - start) // parameter.rows
                replica = min(range(storage.replicas), key=lambda r: (self.loads[storage.ranks[r][shard]], r))
                result.append(_rows(parameter, start, stop, replica * storage.shards + shard, cost))
                self._add(storage.ranks[replica][shard], cost)
        return result

    def _shared(self, members: Sequence[PlannedParameter]) -> dict[str, list[Segment]]:
        """Longest first to the least loaded of the ranks, with a team for a matrix that is too much for one."""
        from hf_emopt.distributed.teams import assign

        storage = members[0].storage
        world = storage.world_size
        pieces: dict[str, tuple[PlannedParameter, int, int]] = {}
        for p in members:
            cuts = _even_cuts(0, p.rows, world) if p.is_stack and p.rows > 1 else [(0, p.rows)]
            for start, stop in cuts:
                pieces[f"{p.name}|{start:08}"] = (p, start, stop)
        costs = {key: p.cost * (b - a) // max(1, p.rows) for key, (p, a, b) in pieces.items()}
        one_axis = storage.shards == 1 or storage.replicas == 1
        shareable = {key: p.shard_cost for key, (p, _, _) in pieces.items() if p.shard_cost is not None and one_axis}
        if max(costs.values(), default=0) * world <= sum(costs.values()):
            shareable = {}  # every matrix fits into a rank's fair share, and a team pays for its all-reduces

        def shard_cost(key: str, k: int) -> int:
            price = shareable.get(key)
            p = pieces[key][0]
            # A slice has at least one row, so a matrix with fewer rows than there are ranks stays with fewer.
            return costs[key] if price is None or k > max(p.storage.shape) else price(k)

        carried = [self.loads[storage.rank(position)] for position in range(world)]
        owners = assign(costs, world, shard_cost, carried)
        segments: dict[str, list[Segment]] = {p.name: [] for p in members}
        for key in sorted(pieces):
            p, start, stop = pieces[key]
            team = owners[key]
            made = (
                [_rows(p, start, stop, team[0], costs[key])]
                if len(team) == 1
                else recut(p, team, shard_cost(key, len(team)))
            )
            segments[p.name].extend(made)
            for segment in made:
                self._add(storage.rank(segment.owner), segment.cost)
        return segments

    def _add(self, rank: int, cost: int) -> None:
        self.loads[rank] += cost


def _even_cuts(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """At most ``parts`` runs of near-equal length."""
    count = min(parts, stop - start)
    size = stop - start
    return [(start + size * i // count, start + size * (i + 1) // count) for i in range(count)]


def _rows(parameter: PlannedParameter, start: int, stop: int, owner: int, cost: int) -> Segment:
    """Rows ``start:stop`` of a stack, or the whole of anything else."""
    shape = parameter.storage.shape
    if not shape:
        return Segment(0, (), owner, parameter.units, cost)
    row = parameter.row_numel
    box = ((start * row, stop * row), *full_box(shape)[1:])
    units = parameter.units
    if (start, stop) != (0, parameter.rows):
        units = tuple(replace(u, view=(stop - start, *u.view[1:])) for u in units)
    return Segment(0, box, owner, units, cost)


def recut(
    parameter: PlannedParameter, team: tuple[int, ...], cost: int, method: Literal["standard", "gram"] = "standard"
) -> list[Segment]:
    """One matrix cut along its long side, a slice for each member of the team."""
    shape, unit = parameter.storage.shape, parameter.units[0]
    dim = 0 if shape[0] >= shape[1] else 1
    spans = tuple(_even_cuts(0, shape[dim], len(team)))
    cut = Cut((unit.shape[1], unit.shape[2]), -2 if dim in unit.rows else -1, spans, team, method)
    segments = []
    for owner, (start, stop) in zip(team, spans, strict=True):
        box = list(full_box(shape))
        box[dim] = (start, stop)
        view = list(shape)
        view[dim] = stop - start
        part = replace(unit, view=tuple(view))
        segments.append(Segment(0, tuple(box), owner, (part,), cost, team, dim, cuts=(cut,)))
    return segments
