"""Plans and exchanges of random parameters on random grids, in one process: hypothesis looks for a grid that breaks them.

Ranks take turns. A collective notes what each of them gives, and is done when somebody waits for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_emopt.distributed import exchange as exchange_module
from hf_emopt.distributed.assignment import BucketSizes, make_plan
from hf_emopt.distributed.exchange import Arrival, Exchange
from hf_emopt.distributed.layout import Grid, Region, Storage, slices
from hf_emopt.distributed.plan import Bucket, Plan, PlannedParameter
from hf_emopt.routing.matrix_view import MatrixView


@dataclass
class Group:
    """Some ranks; what each has given, call by call."""

    given: dict[int, list[tuple[Tensor, list[int]]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """A rank of a group, in the place of a process group."""

    group: Group
    index: int

    def call(self, buffer: Tensor, sizes: list[int], fill: Callable[[list[tuple[Tensor, list[int]]]], None]) -> Work:
        calls = self.group.given.setdefault(self.index, [])
        calls.append((buffer, sizes))
        return Work(self.group, len(calls) - 1, fill)


@dataclass
class Work:
    group: Group
    number: int
    fill: Callable[[list[tuple[Tensor, list[int]]]], None]

    def wait(self) -> None:
        self.fill([self.group.given[index][self.number] for index in sorted(self.group.given)])


class Collectives:
    """What the exchange calls of ``torch.distributed``."""

    @staticmethod
    def get_backend(group: Member) -> str:
        return "nccl"

    @staticmethod
    def all_to_all_single(
        out: Tensor, buffer: Tensor, wanted: list[int], sizes: list[int], group: Member, async_op: bool
    ) -> Work:
        def fill(calls: list[tuple[Tensor, list[int]]]) -> None:
            for part, (sent, lengths) in zip(out.split(wanted), calls):
                part.copy_(sent.split(lengths)[group.index])

        return group.call(buffer, sizes, fill)

    @staticmethod
    def all_gather_into_tensor(out: Tensor, mine: Tensor, group: Member, async_op: bool) -> Work:
        return group.call(mine, [], lambda calls: out.copy_(torch.cat([sent for sent, _ in calls])))

    @staticmethod
    def all_gather(parts: list[Tensor], mine: Tensor, group: Member, async_op: bool) -> Work:
        def fill(calls: list[tuple[Tensor, list[int]]]) -> None:
            for part, (sent, _) in zip(parts, calls):
                part.copy_(sent)

        return group.call(mine, [], fill)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@st.composite
def cut_at_random(draw: st.DrawFn, shape: tuple[int, ...], shards: int, ranks: tuple[tuple[int, ...], ...]) -> Storage:
    """As FSDP2 cuts along a dimension; or at any places, also twice, so that a shard has two regions."""
    dim = draw(st.integers(0, len(shape) - 1))
    if draw(st.booleans()):
        return Storage(shape, Storage.sharded(shape, shards, dim=dim).regions, ranks)
    twice = draw(st.booleans())
    count = shards * (2 if twice else 1)
    ends = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1)))
    spans = list(zip([0, *ends], [*ends, shape[dim]]))
    regions = [tuple(span if d == dim else (0, size) for d, size in enumerate(shape)) for span in spans]
    return Storage(shape, tuple(tuple(regions[shard::shards]) for shard in range(shards)), ranks)


@st.composite
def models(draw: st.DrawFn) -> list[PlannedParameter]:
    """Matrices and stacks on a grid of up to three replicas of up to four shards."""
    replicas, shards = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = tuple(tuple(replica * shards + shard for shard in range(shards)) for replica in range(replicas))
    shapes = st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple)
    found = []
    for number, shape in enumerate(draw(st.lists(shapes, min_size=1, max_size=6))):
        cost = draw(st.integers(1, 1000))
        may_share = len(shape) == 2 and draw(st.booleans())
        found.append(
            PlannedParameter(
                f"p{number}", 0, number, (MatrixView.whole(shape),), (cost,), "f32",
                draw(cut_at_random(shape, shards, ranks)),
                shard_cost=(lambda k, cost=cost: -(-cost // k)) if may_share else None,
            )
        )  # fmt: skip
    return found


SIZES = st.builds(BucketSizes, st.sampled_from([1, 60, 2**20]), st.sampled_from([1, 60, 2**20]))


# --- plans ------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(members=models(), sizes=SIZES, seed=st.integers(0, 2**16))
def test_a_plan_has_every_element_once_whatever_the_order(
    members: list[PlannedParameter], sizes: BucketSizes, seed: int
) -> None:
    plan = make_plan(members, sizes)
    assert sorted(p.name for bucket in plan.buckets for p in bucket.parameters) == [p.name for p in members]
    assert len(plan.loads()) == plan.world_size
    for bucket in plan.buckets:
        covered = [torch.zeros(p.storage.shape) for p in bucket.parameters]
        for owned_region in bucket.owned_regions:
            assert 0 <= owned_region.owner < bucket.storage.world_size
            covered[owned_region.parameter][slices(owned_region.region)] += 1
        assert all(bool((count == 1).all()) for count in covered)
    random.Random(seed).shuffle(members)
    assert make_plan(members, sizes).digest() == plan.digest()


# --- exchanges --------------------------------------------------------------------------------------------------------


def grids(bucket: Bucket) -> list[Grid]:
    """The bucket's grid as each rank sees it."""
    storage = bucket.storage
    among_shards, among_replicas = [Group() for _ in range(storage.replicas)], [Group() for _ in range(storage.shards)]
    return [
        Grid(storage.ranks, q, s, Member(among_shards[q], s), Member(among_replicas[s], q))
        for q in range(storage.replicas)
        for s in range(storage.shards)
    ]


def whole(number: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-64, 64, shape, generator=torch.Generator().manual_seed(number)).float()


def cut_out(tensor: Tensor, region: Region) -> Tensor:
    return tensor[slices(region)].clone()


def check(bucket: Bucket, present: list[int], factor: float) -> None:
    """Owners get what they own; every rank then has its part of what owners made of it, and nothing else."""
    wholes = {index: whole(index, bucket.parameters[index].storage.shape) for index in present}
    storages = {index: bucket.parameters[index].storage for index in present}
    ranks = [Exchange(bucket, grid, present, torch.float32, torch.device("cpu")) for grid in grids(bucket)]

    def local(tensors: dict[int, Tensor], rank: Exchange) -> list[Tensor]:
        return [storages[index].local_part(tensors[index], rank.grid.shard) for index in present]

    owned = [[cut_out(wholes[o.parameter], o.region) for o in rank.owned] for rank in ranks]
    if bucket.sends:
        arrivals = [rank.storage_to_compute(local(wholes, rank)) for rank in ranks]
        for rank, arrival, wanted in zip(ranks, arrivals, owned):
            found = [torch.full_like(tensor, torch.nan) for tensor in wanted]
            rank.unpack("received", arrival, found)
            assert all(map(torch.equal, found, wanted))

    def each(call: Callable[[Exchange, Any], Arrival], values: list[Any]) -> list[Arrival]:
        return [call(rank, value) for rank, value in zip(ranks, values)]

    made = [[tensor + 1 for tensor in tensors] for tensors in owned]
    given = each(lambda rank, outputs: rank.compute_to_storage(outputs, [factor] * len(outputs)), made)
    for rank, arrival in zip(ranks, each(Exchange.all_gather_replicas, given)):
        wanted = local({index: (tensor + 1) * factor for index, tensor in wholes.items()}, rank)
        found = [torch.full_like(tensor, torch.nan) for tensor in wanted]
        rank.unpack("unpacked", arrival, found)
        for index, a, b in zip(present, found, wanted):
            held = torch.zeros_like(b, dtype=torch.bool)
            for _, place in storages[index].held(rank.grid.shard):
                held[slices(place)] = True
            assert torch.equal(a[held], b[held])
            assert bool(a[~held].isnan().all())


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(members=models(), sizes=SIZES, factor=st.sampled_from([1.0, 0.5]), data=st.data())
def test_what_travels_arrives(members: list[PlannedParameter], sizes: BucketSizes, factor: float, data: Any) -> None:
    """With any parameters present, also none."""
    plan: Plan = make_plan(members, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "dist", Collectives)
        for bucket in plan.buckets:
            present = data.draw(st.sets(st.integers(0, len(bucket.parameters) - 1)))
            check(bucket, sorted(present), factor)
