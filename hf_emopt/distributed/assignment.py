"""Making a plan: owned regions are given to ranks by cost, longest first, and gathered into buckets of bounded size."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hf_emopt.distributed.cutting import _even_cuts, _rows, recut
from hf_emopt.distributed.owned_regions import OwnedRegion
from hf_emopt.distributed.plan import Bucket, Plan, PlannedParameter

__all__ = ["BucketSizes", "bucket_sizes", "make_plan"]


MAX_BUCKET_NUMEL = 2**26
"""Elements for each rank of a bucket of several shapes (256 MiB in float32): enough to fill a GPU, small beside the
parameters. One of a single shape may have twice as many, see :class:`BucketSizes`."""

BUCKET_VARIABLE = "HF_EMOPT_MAX_BUCKET_NUMEL"
"""Environment variable with another number, the same on all ranks (``hf-emopt bench step`` measures which is faster)."""


class BucketSizes(NamedTuple):
    """Most elements of a bucket, for each rank; a larger parameter gets one of its own.

    Attributes:
        together: matrices of several shapes share a bucket up to here.
        alike: matrices of one shape that are more than ``together`` are cut into as few even parts as stay below this. A
            product of many matrices leaves less of a GPU idle than two products of half as many, and one of the few that a
            bucket has over, beside others, leaves most of it idle.
    """

    together: int = MAX_BUCKET_NUMEL
    alike: int = MAX_BUCKET_NUMEL


def bucket_sizes(together: int = MAX_BUCKET_NUMEL, alike: int = MAX_BUCKET_NUMEL) -> BucketSizes:
    """These, or both as the environment's :data:`BUCKET_VARIABLE` says.

    Raises:
        ValueError: when the variable is not a number above 0.
    """
    given = os.environ.get(BUCKET_VARIABLE, "")
    if not given:
        return BucketSizes(together, alike)
    if not given.isdigit() or int(given) == 0:
        raise ValueError(f"{BUCKET_VARIABLE}={given!r} must be a whole number above 0, or unset for the usual one")
    return BucketSizes(int(given), int(given))


def make_plan(
    parameters: Sequence[PlannedParameter],
    sizes: BucketSizes | None = None,
    forward_order: bool = False,
) -> Plan:
    """The plan for these parameters.

    Args:
        parameters: matrix parameters; or others, without matrix views, whose cost is their size.
        sizes: of buckets; ``None`` for :func:`bucket_sizes`.
        forward_order: buckets follow the order of ``parameters`` (the model's) instead of falling cost, so that what the
            next forward needs first is ready first.
    """
    ordered = sorted(parameters, key=_place)
    ranks = sorted({rank for p in parameters for row in p.storage.ranks for rank in row})
    owned = _owned(ordered)
    alike: dict[tuple[Any, ...], list[PlannedParameter]] = {}
    for parameter in parameters if forward_order else ordered:
        storage, arrangement = parameter.storage, parameter.arrangement
        keeps = arrangement is not None and arrangement.keeps(storage)
        mode = arrangement and arrangement.mode
        paired = bool(parameter.pair)
        key = (parameter.group, parameter.tag, storage.ranks, storage.shards, paired, parameter.is_local, keeps, mode)
        alike.setdefault(key, []).append(parameter)
    buckets = []
    sizes = bucket_sizes() if sizes is None else sizes
    for (*_, local, keeps, _), members in alike.items():
        for chunk in _chunks(members, sizes, by_shape=not forward_order):
            owned_regions = tuple(replace(s, parameter=i) for i, p in enumerate(chunk) for s in owned[p.name])
            buckets.append(Bucket(chunk[0].group, tuple(chunk), owned_regions, bool(local), bool(keeps)))
    return Plan(tuple(buckets), tuple(ranks) or (0,))


def _owned(ordered: Sequence[PlannedParameter]) -> dict[str, list[OwnedRegion]]:
    """Owned regions by parameter name.

    Loads are carried among parameters of the same ranks alone. Of a parameter that lies on some of the ranks, others have
    their own copy on other ranks (a layer that FSDP cuts and tensor parallelism does not): loads that came of it would be of
    other ranks in the plan of each, and so would the owners of what all share.
    """
    together: dict[frozenset[int], list[PlannedParameter]] = {}
    for parameter in ordered:
        together.setdefault(frozenset(itertools.chain(*parameter.storage.ranks)), []).append(parameter)
    owned: dict[str, list[OwnedRegion]] = {}
    for ranks, members in together.items():
        owned |= _Assignment(sorted(ranks)).owned_regions_of(members)
    return owned


def _place(parameter: PlannedParameter) -> tuple[Any, ...]:
    """Falling cost. Matrices of one cost can be of two shapes (projections up and down); a batch is of one."""
    return parameter.group, -parameter.cost, parameter.storage.shape, parameter.name


def _chunks(
    members: Sequence[PlannedParameter], sizes: BucketSizes, by_shape: bool = True
) -> list[list[PlannedParameter]]:
    """Members of each bucket, in their order; both factors of a pair in one.

    Args:
        by_shape: matrices of one shape, which follow each other, are kept together and cut evenly.
    """
    pairs: dict[str, list[PlannedParameter]] = {}
    for parameter in members:
        pairs.setdefault(parameter.pair or parameter.name, []).append(parameter)
    chunks: list[list[PlannedParameter]] = [[]]
    size = 0
    for run in _runs_of_one_shape(list(pairs.values())) if by_shape else [[item] for item in pairs.values()]:
        numel = sum(map(_share, run))
        parts = [run] if numel <= sizes.together else _even_parts(run, sizes.alike)
        for part in parts:
            numel = sum(map(_share, part))
            if chunks[-1] and size + numel > sizes.together:
                chunks.append([])
                size = 0
            chunks[-1].extend(p for item in part for p in item)
            size += numel
    return chunks


def _runs_of_one_shape(items: Sequence[list[PlannedParameter]]) -> list[list[list[PlannedParameter]]]:
    return [list(run) for _, run in itertools.groupby(items, lambda item: [p.storage.shape for p in item])]


def _share(item: Sequence[PlannedParameter]) -> int:
    """Elements for each rank. Of copies a rank transforms its share, and gathers all of it: up to four shares at once."""
    return sum(-(-p.numel // (p.storage.shards * min(p.storage.replicas, 4))) for p in item)


def _even_parts(run: list[list[PlannedParameter]], limit: int) -> list[list[list[PlannedParameter]]]:
    """A run of one shape in as few parts as stay below the limit."""
    most = max(1, limit // _share(run[0]))
    return [run[a:b] for a, b in _even_cuts(0, len(run), -(-len(run) // most))]


class _Assignment:
    """Gives owned regions to ranks; loads are carried from one layout over them to the next."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.loads: dict[int, int] = dict.fromkeys(ranks, 0)

    def owned_regions_of(self, parameters: Sequence[PlannedParameter]) -> dict[str, list[OwnedRegion]]:
        """Owned regions by parameter name: first those whose shard is given, then the others, all over the same ranks at
        once."""
        from hf_emopt.distributed.tensor_parallel import owned_regions_of

        owned_regions = self._paired(parameters)
        for parameter in parameters:
            if parameter.pair:
                continue
            if parameter.arrangement is not None:
                owned_regions[parameter.name] = owned_regions_of(parameter, self.loads)
                for owned_region in owned_regions[parameter.name]:
                    self._add(parameter.storage.rank(owned_region.owner), owned_region.cost)
            elif parameter.is_local:
                owned_regions[parameter.name] = self._local(parameter)
        by_ranks: dict[tuple[tuple[int, ...], ...], list[PlannedParameter]] = {}
        for parameter in parameters:
            if parameter.name not in owned_regions:
                by_ranks.setdefault(parameter.storage.ranks, []).append(parameter)
        for members in by_ranks.values():
            owned_regions |= self._shared(members)
        return owned_regions

    def _paired(self, parameters: Sequence[PlannedParameter]) -> dict[str, list[OwnedRegion]]:
        """Both factors of a pair, whole, to the least loaded rank: the costliest pair first."""
        pairs: dict[str, list[PlannedParameter]] = {}
        for parameter in parameters:
            if parameter.pair:
                pairs.setdefault(parameter.pair, []).append(parameter)
        owned_regions: dict[str, list[OwnedRegion]] = {}
        for name in sorted(pairs, key=lambda name: (-sum(p.cost for p in pairs[name]), name)):
            storage = pairs[name][0].storage
            owner = min(range(storage.world_size), key=lambda position: (self.loads[storage.rank(position)], position))
            for parameter in pairs[name]:
                owned_regions[parameter.name] = [_rows(parameter, 0, parameter.rows, owner, parameter.cost)]
                self._add(storage.rank(owner), parameter.cost)
        return owned_regions

    def _local(self, parameter: PlannedParameter) -> list[OwnedRegion]:
        """Rows stay with their shard; its replicas share them."""
        storage, result = parameter.storage, []
        for shard, regions in enumerate(storage.regions):
            runs = [(region[0][0] // parameter.row_numel, region[0][1] // parameter.row_numel) for region in regions]
            for start, stop in (cut for run in runs for cut in _even_cuts(*run, storage.replicas)):
                cost = parameter.cost * (stop - start) // parameter.rows
                replica = min(range(storage.replicas), key=lambda r: (self.loads[storage.ranks[r][shard]], r))
                result.append(_rows(parameter, start, stop, replica * storage.shards + shard, cost))
                self._add(storage.ranks[replica][shard], cost)
        return result

    def _shared(self, members: Sequence[PlannedParameter]) -> dict[str, list[OwnedRegion]]:
        """Longest first to the least loaded of the ranks, with a compute group for a matrix that is too much for one."""
        from hf_emopt.distributed.compute_group_assignment import assign

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
            shareable = {}  # every matrix fits into a rank's fair share, and a compute group pays for its all-reduces

        def shard_cost(key: str, k: int) -> int:
            price = shareable.get(key)
            p = pieces[key][0]
            # A slice has at least one row, so a matrix with fewer rows than there are ranks stays with fewer.
            return costs[key] if price is None or k > max(p.storage.shape) else price(k)

        carried = [self.loads[storage.rank(position)] for position in range(world)]
        owners = assign(costs, world, shard_cost, carried)
        owned_regions: dict[str, list[OwnedRegion]] = {p.name: [] for p in members}
        for key in sorted(pieces):
            p, start, stop = pieces[key]
            compute_group = owners[key]
            made = (
                [_rows(p, start, stop, compute_group[0], costs[key])]
                if len(compute_group) == 1
                else recut(p, compute_group, shard_cost(key, len(compute_group)))
            )
            owned_regions[p.name].extend(made)
            for owned_region in made:
                self._add(storage.rank(owned_region.owner), owned_region.cost)
        return owned_regions

    def _add(self, rank: int, cost: int) -> None:
        self.loads[rank] += cost
