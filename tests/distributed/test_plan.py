"""The planner: equal everywhere, balanced, complete."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_emopt import SOAP, Muon
from hf_emopt.distributed.assignment import BucketSizes, make_plan, planned_sizes
from hf_emopt.distributed.layout import Storage
from hf_emopt.distributed.load_balance import assign
from hf_emopt.distributed.plan import Plan, PlannedParameter
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.routing.matrix_view import MatrixView


def parameters(count: int = 20, world_size: int = 1) -> list[PlannedParameter]:
    made = []
    for i in range(count):
        shape = ((64, 32), (32, 64), (96, 32))[i % 3]
        matrix_views = (MatrixView.whole(shape),)
        storage = Storage.whole(shape, world_size)
        made.append(
            PlannedParameter(f"layer.{i}", 0, i, matrix_views, (shape[0] * shape[1] * min(shape),), "f32", storage)
        )
    return made


def test_the_plan_depends_on_names_shapes_and_costs_only() -> None:
    members = parameters(world_size=4)
    shuffled = members[:]
    random.Random(0).shuffle(shuffled)
    assert make_plan(members).digest() == make_plan(shuffled).digest()
    assert make_plan(members).digest() != make_plan(members[:-1]).digest()
    assert make_plan(members).digest() != make_plan(parameters(world_size=3)).digest()


@pytest.mark.parametrize("local", range(3))
def test_ranks_plan_alike_what_each_has_with_other_ranks(local: int) -> None:
    """One of the parameters lies on ranks 0 and 2, and on ranks 1 and 3 in a copy of their own."""

    def plan(mine: tuple[tuple[int, ...], ...]) -> Plan:
        members = parameters(9, world_size=4)
        storage = Storage(members[local].storage.shape, members[local].storage.regions, mine)
        members[local] = replace(members[local], storage=storage, costs=(10**6,))
        return make_plan(members)

    even, odd = plan(((0,), (2,))), plan(((1,), (3,)))
    assert even.digest() == odd.digest()
    assert sum(even.loads()) == even.cost


def test_every_matrix_view_is_planned_exactly_once() -> None:
    members = parameters()
    plan = make_plan(members, BucketSizes(5000, 5000))
    planned = [p.name for b in plan.buckets for p in b.parameters]
    assert sorted(planned) == sorted(p.name for p in members)
    assert all(b.numel <= 5000 for b in plan.buckets)
    assert sum(batch.count for b in plan.buckets for batch in b.batches(0)) == len(members)


def test_a_parameter_larger_than_a_bucket_gets_one_of_its_own() -> None:
    plan = make_plan(parameters(4), BucketSizes(10, 10))
    assert [len(b.parameters) for b in plan.buckets] == [1] * 4


def test_matrix_views_of_one_shape_in_one_parameter_are_one_batch() -> None:
    view = (3, 8, 8)
    matrix_views = tuple(MatrixView(n, view, (0, 1), (2,), dim=0, start=i, stop=i + 1) for i, n in enumerate("qkv"))
    (bucket,) = make_plan(
        [PlannedParameter("qkv", 0, 0, matrix_views, (1, 1, 1), "f32", Storage.whole((24, 8)))]
    ).buckets
    assert [(b.shape, b.count) for b in bucket.batches(0)] == [((8, 8), 3)]


def test_longest_processing_time_first() -> None:
    """Graham's example: items 5 5 4 4 3 3 3 on three ranks end at 11 where 9 is possible; never above 4/3 - 1/9."""
    costs = dict(zip("abcdefg", (5, 5, 4, 4, 3, 3, 3)))
    owners = assign(costs, 3)
    loads = [sum(c for n, c in costs.items() if owners[n] == (r,)) for r in range(3)]
    assert max(loads) == 11
    rng = random.Random(1)
    for _ in range(50):
        world = rng.randint(1, 9)
        many = {str(i): rng.randint(1, 1000) for i in range(rng.randint(1, 60))}
        owners = assign(many, world)
        loads = [sum(c for n, c in many.items() if owners[n] == (r,)) for r in range(world)]
        lower = max(max(many.values()), sum(many.values()) / world)
        assert max(loads) <= (4 / 3) * lower + max(many.values()) / 3


def test_received_elements() -> None:
    """2P/W on shards, P(W-1)/W between replicas, both under HSDP, nothing for experts that are whole where they lie."""
    shape, matrix_view = (8, 12), (MatrixView.whole((8, 12)),)
    numel = 8 * 12

    def received(storage: Storage, count: int = 4) -> list[int]:
        return make_plan(
            [PlannedParameter(f"w{i}", 0, i, matrix_view, (1,), "f32", storage) for i in range(count)]
        ).received()

    assert received(Storage.sharded(shape, 4)) == [2 * numel] * 4
    assert received(Storage.whole(shape, 4)) == [3 * numel] * 4
    assert received(Storage.sharded(shape, 2, 2)) == [2 * numel + numel] * 4
    experts = Storage.sharded((4, 8, 12), 4)
    assert (
        make_plan([PlannedParameter("e", 0, 0, (MatrixView.whole((4, 8, 12)),), (4,), "f32", experts)]).received()
        == [0] * 4
    )


def test_buckets_of_another_size_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    members = parameters(4)
    whole = make_plan(members)
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", "1")
    assert (len(whole.buckets), len(make_plan(members).buckets)) == (1, 4)
    for wrong in ("0", "-3", "many"):
        monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", wrong)
        with pytest.raises(ValueError, match="whole number above 0"):
            make_plan(members)


def test_matrices_of_one_shape_lie_together() -> None:
    """Projections up and down cost the same. In the order of names a bucket of three had both shapes."""
    members = []
    for i in range(6):
        shape = (8, 24) if i % 2 else (24, 8)
        members.append(
            PlannedParameter(f"{i}", 0, i, (MatrixView.whole(shape),), (8 * 8 * 24,), "f32", Storage.whole(shape, 1))
        )
    plan = make_plan(members, BucketSizes(*2 * (3 * 8 * 24,)))
    assert [[p.storage.shape for p in b.parameters] for b in plan.buckets] == [[(8, 24)] * 3, [(24, 8)] * 3]


LARGE, SMALL = 2**27, 2**26
DOWN, UP, SQUARE, KEY = (2048, 5632), (5632, 2048), (2048, 2048), (256, 2048)


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (1, (LARGE, LARGE), [{DOWN: 11}, {DOWN: 11}, *4 * [{UP: 11}], {SQUARE: 22}, {SQUARE: 22, KEY: 44}]),
        (2, (SMALL, LARGE), [{DOWN: 22}, {UP: 22}, {UP: 22}, {SQUARE: 44}, {KEY: 44}]),
        (2, (SMALL, SMALL), [{DOWN: 11}, {DOWN: 11}, *4 * [{UP: 11}], {SQUARE: 22}, {SQUARE: 22, KEY: 44}]),
        (4, (SMALL, LARGE), [{DOWN: 22}, {UP: 44}, {SQUARE: 44, KEY: 44}]),
        (8, (SMALL, LARGE), [{DOWN: 22}, {UP: 44}, {SQUARE: 44, KEY: 44}]),
        (16, (SMALL, LARGE), [{DOWN: 22, UP: 44, SQUARE: 44, KEY: 44}]),
    ],
)
def test_matrices_of_one_shape_are_cut_evenly(
    world: int, sizes: tuple[int, int], expected: list[dict[tuple[int, int], int]]
) -> None:
    """Those of a Llama of 1.1 B. No bucket ends with a few of another shape, which would leave most of a GPU idle."""
    members = [
        PlannedParameter(
            f"{shape}.{i}",
            0,
            i,
            (MatrixView.whole(shape),),
            (math.prod(shape) * min(shape),),
            "f32",
            Storage.sharded(shape, world),
        )
        for shape, count in ((UP, 44), (DOWN, 22), (KEY, 44), (SQUARE, 44))
        for i in range(count)
    ]
    plan = make_plan(members, BucketSizes(*sizes))
    assert [Counter(p.storage.shape for p in bucket.parameters) for bucket in plan.buckets] == expected
    assert all(bucket.numel <= world * sizes[1] for bucket in plan.buckets)


def test_in_the_order_of_the_model_shapes_alternate() -> None:
    members = [
        PlannedParameter(f"{i}", 0, i, (MatrixView.whole(shape),), (1,), "f32", Storage.whole(shape, 1))
        for i, shape in enumerate([(8, 24), (24, 8), (8, 8)] * 4)
    ]
    plan = make_plan(members, BucketSizes(448, 896), forward_order=True)
    assert [[p.name for p in b.parameters] for b in plan.buckets] == [
        [str(i) for i in range(k, k + 3)] for k in range(0, 12, 3)
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_large_buckets_have_twice_the_elements(world: int) -> None:
    side = 4096
    members = [
        PlannedParameter(
            f"{i}", 0, i, (MatrixView.whole((side, side)),), (1,), "f32", Storage.sharded((side, side), world)
        )
        for i in range(16 * world)
    ]
    sizes = (BucketSizes(), BucketSizes(SMALL, LARGE), BucketSizes(LARGE, LARGE))
    assert [len(make_plan(members, size).buckets) for size in sizes] == [4, 2, 2]


def test_how_large_the_buckets_of_an_optimizer_are() -> None:
    """Copies of narrow state and the room of what is offloaded grow with the bucket."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))

    def sizes(cls: type[MatrixOptimizer] = Muon, world: int = 1, **options: Any) -> tuple[int, int]:
        optimizer = cls(model, **options)
        return planned_sizes(
            optimizer.rule.scheduled, optimizer.param_groups, optimizer.offload_state is not None, world
        )

    assert sizes() == (LARGE, LARGE)
    assert sizes(world=2) == (SMALL, LARGE)
    assert sizes(SOAP) == sizes(SOAP, world=2) == (LARGE, LARGE)
    for optimizer, options in ((Muon, {"state_dtype": "bfloat16"}), (Muon, {"offload_state": "cpu"})):
        assert sizes(optimizer, **options) == (SMALL, SMALL)
    assert sizes(SOAP, factor_storage="packed") == (SMALL, SMALL)


def test_the_environment_decides_for_every_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", "300")
    assert planned_sizes(False, [{}], False, 2) == planned_sizes(True, [{}], True, 1) == (300, 300)
