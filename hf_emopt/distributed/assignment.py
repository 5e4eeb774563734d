"""How a plan is made: ranks get owned regions by cost, longest first, and buckets of bounded size collect parameters."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hf_emopt.distributed.layout import Storage
from hf_emopt.distributed.load_balance import assign
from hf_emopt.distributed.plan import Bucket, OwnedRegion, Plan, PlannedParameter, even_spans
from hf_emopt.distributed.tensor_parallel import owned_regions_of

MAX_BUCKET_NUMEL = 2**26
"""Elements for each rank of a bucket of several shapes (256 MiB in float32): enough to fill a GPU, few among all."""

BUCKET_VARIABLE = "HF_EMOPT_MAX_BUCKET_NUMEL"
"""Environment variable with another number, the same on all ranks (``hf-emopt bench step`` measures which is faster)."""


class BucketSizes(NamedTuple):
    """Most elements of a bucket, for each rank; a larger parameter gets one of its own.

    Attributes:
        together: matrices of several shapes share a bucket up to here.
        alike: matrices of one shape that are more than ``together`` are divided into as few even parts as stay below this,
            since a product of the few matrices that are left over leaves most of a GPU idle.
    """

    together: int = MAX_BUCKET_NUMEL
    alike: int = MAX_BUCKET_NUMEL


def bucket_sizes(together: int = MAX_BUCKET_NUMEL, alike: int = MAX_BUCKET_NUMEL) -> BucketSizes:
    """These sizes, or both from the environment's :data:`BUCKET_VARIABLE`.

    Raises:
        ValueError: when the variable is not a number above 0.
    """
    given = os.environ.get(BUCKET_VARIABLE, "")
    if not given:
        return BucketSizes(together, alike)
    if not given.isdigit() or int(given) == 0:
        raise ValueError(f"{BUCKET_VARIABLE}={given!r} must be a whole number above 0, or unset for the usual one")
    return BucketSizes(int(given), int(given))


def planned_sizes(scheduled: bool, groups: Sequence[Mapping[str, Any]], offloads: bool, world_size: int) -> BucketSizes:
    """How large an optimizer's buckets are.

    Large buckets fill a GPU better and take the host less time; small ones hide exchanges. In one process nothing travels,
    and a bucket of a rule with factors (``scheduled``) takes the host longer than its exchange takes. Elsewhere only buckets
    of one shape are large, for even batches. State that is copied to be used takes memory in proportion to its bucket.
    """
    kinds = {group.get(key, "float32") for group in groups for key in ("state_dtype", "factor_storage")}
    if offloads or kinds != {"float32"}:
        return bucket_sizes()
    large = 2 * MAX_BUCKET_NUMEL
    return bucket_sizes(large if world_size == 1 or scheduled else MAX_BUCKET_NUMEL, large)


def make_plan(
    parameters: Sequence[PlannedParameter], sizes: BucketSizes | None = None, forward_order: bool = False
) -> Plan:
    """The plan for these parameters.

    Args:
        parameters: matrix parameters, or elementwise ones without matrix views, whose cost is their size.
        sizes: of buckets; ``None`` for :func:`bucket_sizes`.
        forward_order: whether buckets follow the order of ``parameters`` (the model's) instead of falling cost, so that
            the weights that the next forward needs first are ready first.
    """
    ordered = sorted(parameters, key=_order)
    ranks = sorted({rank for p in parameters for row in p.storage.ranks for rank in row})
    owned = _owned(ordered)
    alike: dict[tuple[Any, ...], list[PlannedParameter]] = {}
    for parameter in parameters if forward_order else ordered:
        storage, tensor_parallel = parameter.storage, parameter.tensor_parallel
        keeps = tensor_parallel is not None and tensor_parallel.keeps(storage)
        mode = tensor_parallel and tensor_parallel.mode
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

    Loads are carried among parameters of the same ranks alone. A parameter on some of the ranks has copies on the others
    (under FSDP without tensor parallelism), and the ranks' plans would disagree on where its load falls.
    """
    together: dict[frozenset[int], list[PlannedParameter]] = {}
    for parameter in ordered:
        together.setdefault(frozenset(itertools.chain(*parameter.storage.ranks)), []).append(parameter)
    owned: dict[str, list[OwnedRegion]] = defaultdict(list)
    for ranks, members in together.items():
        owned.update(_Assignment(sorted(ranks)).of(members))
    return owned


def _order(parameter: PlannedParameter) -> tuple[Any, ...]:
    """Falling cost, then shape: matrices of one cost can have two shapes (projections up and down), a batch has one."""
    return parameter.group, -parameter.cost, parameter.storage.shape, parameter.name


def _chunks(
    members: Sequence[PlannedParameter], sizes: BucketSizes, by_shape: bool = True
) -> list[list[PlannedParameter]]:
    """Members of each bucket, in their order; both factors of a pair in one.

    ``by_shape`` keeps matrices of one shape, which follow each other, together and divides them evenly.
    """
    pairs: dict[str, list[PlannedParameter]] = {}
    for parameter in members:
        pairs.setdefault(parameter.pair or parameter.name, []).append(parameter)
    runs = [[item] for item in pairs.values()]
    if by_shape:
        alike = itertools.groupby(pairs.values(), lambda item: [p.storage.shape for p in item])
        runs = [list(run) for _, run in alike]
    chunks: list[list[PlannedParameter]] = [[]]
    size = 0
    for run in runs:
        numel = sum(map(_share, run))
        for part in [run] if numel <= sizes.together else _even_parts(run, sizes.alike):
            numel = sum(map(_share, part))
            if chunks[-1] and size + numel > sizes.together:
                chunks.append([])
                size = 0
            chunks[-1].extend(p for item in part for p in item)
            size += numel
    return chunks


def _share(item: Sequence[PlannedParameter]) -> int:
    """Elements for each rank. Of copies a rank transforms its share and gathers the rest, up to four shares at once."""
    return sum(-(-p.numel // (p.storage.shards * min(p.storage.replicas, 4))) for p in item)


def _even_parts(run: list[list[PlannedParameter]], limit: int) -> list[list[list[PlannedParameter]]]:
    """A run of one shape in as few parts as stay below the limit."""
    most = max(1, limit // _share(run[0]))
    return [run[a:b] for a, b in even_spans(0, len(run), -(-len(run) // most))]


class _Assignment:
    """Gives owned regions to ranks. Loads are carried from the parameters of one layout to those of the next."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.loads: dict[int, int] = dict.fromkeys(ranks, 0)
        self.owned: dict[str, list[OwnedRegion]] = defaultdict(list)

    def of(self, parameters: Sequence[PlannedParameter]) -> dict[str, list[OwnedRegion]]:
        """Owned regions by name: pairs first, then parameters whose shards decide on the owners, then all others at once."""
        self._assign_pairs([p for p in parameters if p.pair])
        by_ranks: dict[tuple[tuple[int, ...], ...], list[PlannedParameter]] = {}
        for parameter in (p for p in parameters if not p.pair):
            if parameter.tensor_parallel is not None:
                replicas = parameter.tensor_parallel.slices.replicas(parameter.storage)
                self._give(parameter, *owned_regions_of(parameter, self._least_loaded(parameter.storage, replicas)))
            elif parameter.is_local:
                self._assign_local(parameter)
            else:
                by_ranks.setdefault(parameter.storage.ranks, []).append(parameter)
        for members in by_ranks.values():
            self._assign_shared(members)
        return self.owned

    def _least_loaded(self, storage: Storage, candidates: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """The set of rank indices whose largest load is least, the first of equal ones."""
        return min(candidates, key=lambda c: (max(self.loads[storage.rank(index)] for index in c), c))

    def _give(self, parameter: PlannedParameter, *owned_regions: OwnedRegion) -> None:
        self.owned[parameter.name].extend(owned_regions)
        for owned_region in owned_regions:
            self.loads[parameter.storage.rank(owned_region.owner)] += owned_region.cost

    def _assign_pairs(self, parameters: Sequence[PlannedParameter]) -> None:
        """Both factors of a pair, whole, to the least loaded rank: the costliest pair first."""
        pairs: dict[str, list[PlannedParameter]] = {}
        for parameter in parameters:
            pairs.setdefault(parameter.pair, []).append(parameter)
        for name in sorted(pairs, key=lambda name: (-sum(p.cost for p in pairs[name]), name)):
            storage = pairs[name][0].storage
            (owner,) = self._least_loaded(storage, ((index,) for index in range(storage.world_size)))
            for parameter in pairs[name]:
                self._give(parameter, parameter.owned_rows(0, parameter.rows, owner, parameter.cost))

    def _assign_local(self, parameter: PlannedParameter) -> None:
        """Rows stay with their shard, whose replicas share them."""
        storage, row = parameter.storage, parameter.row_numel
        for shard, regions in enumerate(storage.regions):
            replicas = [(replica * storage.shards + shard,) for replica in range(storage.replicas)]
            for region in regions:
                for start, stop in even_spans(region[0][0] // row, region[0][1] // row, storage.replicas):
                    cost = parameter.cost * (stop - start) // parameter.rows
                    (owner,) = self._least_loaded(storage, replicas)
                    self._give(parameter, parameter.owned_rows(start, stop, owner, cost))

    def _assign_shared(self, members: Sequence[PlannedParameter]) -> None:
        """Longest first to the least loaded of the ranks, with a compute group for a matrix that is too much for one."""
        storage = members[0].storage
        world = storage.world_size
        parts: dict[str, tuple[PlannedParameter, int, int]] = {}
        for p in members:
            for start, stop in even_spans(0, p.rows, world) if p.is_stack and p.rows > 1 else [(0, p.rows)]:
                parts[f"{p.name}|{start:08}"] = (p, start, stop)
        costs = {key: p.cost * (stop - start) // max(1, p.rows) for key, (p, start, stop) in parts.items()}
        one_axis = storage.shards == 1 or storage.replicas == 1
        shareable = {key: p.shard_cost for key, (p, _, _) in parts.items() if p.shard_cost is not None and one_axis}
        if max(costs.values(), default=0) * world <= sum(costs.values()):
            shareable = {}  # every matrix fits into a rank's fair share, and a compute group pays for its all-reduces

        def shard_cost(key: str, k: int) -> int:
            price = shareable.get(key)
            # A slice has at least one row, so a matrix with fewer rows than there are ranks stays with fewer.
            return costs[key] if price is None or k > max(parts[key][0].storage.shape) else price(k)

        carried = [self.loads[storage.rank(index)] for index in range(world)]
        owners = assign(costs, world, shard_cost, carried)
        for key, (p, start, stop) in sorted(parts.items()):
            if len(owners[key]) == 1:
                self._give(p, p.owned_rows(start, stop, owners[key][0], costs[key]))
            else:
                self._give(p, *p.owned_slices(owners[key], shard_cost(key, len(owners[key]))))
