"""Making a plan: segments are given to ranks by cost, longest first, and gathered into buckets of bounded size."""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from hf_emopt.distributed.layout import full_box
from hf_emopt.distributed.plan import Bucket, Plan, PlannedParameter
from hf_emopt.distributed.segments import Cut, Segment

__all__ = ["assign_owners", "bucket_numel", "make_plan", "recut"]

MAX_BUCKET_NUMEL = 2**26
"""Elements of a bucket for each rank (256 MiB in float32): enough to fill a GPU, small beside the parameters."""

BUCKET_VARIABLE = "HF_EMOPT_MAX_BUCKET_NUMEL"
"""Environment variable with another number, the same on all ranks (``hf-emopt bench step`` measures which is faster)."""


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


def bucket_numel(large: bool = False) -> int:
    """Elements of a bucket for each rank: the environment's :data:`BUCKET_VARIABLE`, else :data:`MAX_BUCKET_NUMEL`.

    Args:
        large: twice :data:`MAX_BUCKET_NUMEL`.

    Raises:
        ValueError: when the variable is not a number above 0.
    """
    given = os.environ.get(BUCKET_VARIABLE, "")
    if not given:
        return MAX_BUCKET_NUMEL * (2 if large else 1)
    if not given.isdigit() or int(given) == 0:
        raise ValueError(f"{BUCKET_VARIABLE}={given!r} must be a whole number above 0, or unset for the usual one")
    return int(given)


def make_plan(
    parameters: Sequence[PlannedParameter],
    max_bucket_numel: int | None = None,
    forward_order: bool = False,
    large: bool = False,
) -> Plan:
    """The plan for these parameters.

    Args:
        parameters: matrix parameters; or others, without units, whose cost is their size.
        max_bucket_numel: a bucket is closed before a rank's part exceeds this; a larger parameter gets one of its own.
            ``None`` for :func:`bucket_numel`.
        forward_order: buckets follow the order of ``parameters`` (the model's) instead of falling cost, so that what the
            next forward needs first is ready first.
        large: see :func:`bucket_numel`.
    """
    ordered = sorted(parameters, key=_place)
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
    limit = bucket_numel(large) if max_bucket_numel is None else max_bucket_numel
    for (*_, local, keeps, _), members in alike.items():
        for chunk in _chunks(members, limit):
            segments = tuple(replace(s, parameter=i) for i, p in enumerate(chunk) for s in owned[p.name])
            buckets.append(Bucket(chunk[0].group, tuple(chunk), segments, bool(local), bool(keeps)))
    return Plan(tuple(buckets), tuple(ranks) or (0,))


def _place(parameter: PlannedParameter) -> tuple[Any, ...]:
    """Falling cost. Matrices of one cost can be of two shapes (projections up and down); a batch is of one."""
    return parameter.group, -parameter.cost, parameter.storage.shape, parameter.name


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
