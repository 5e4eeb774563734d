"""Placements that tensor parallelism makes, alone and under FSDP2: the same weights as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import World, Worlds
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from zoo import assert_close, build, distribute, give_gradients, matrices, weights

SHAPES = [(33, 17), (7, 40), (24, 24), (24, 24), (24, 24), (5, 9), (12, 32)]
STEPS = 4

PLACEMENTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "columns": ((2,), (Shard(1),)),
    "rows": ((2,), (Shard(0),)),
    "copies": ((2,), (Replicate(),)),
    "both-sides": ((2, 2), (Shard(0), Shard(1))),
    "rows-twice": ((2, 2), (Shard(0), Shard(0))),
    "strided": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "strided-columns": ((2, 2), (Shard(0), _StridedShard(1, split_factor=2))),
    "copies-of-columns": ((2, 2), (Replicate(), Shard(1))),
    "columns-of-copies": ((2, 2), (Shard(1), Replicate())),
}


def trained(rule: str, sizes: tuple[int, ...], placements: tuple[Any, ...], plain: str = "") -> dict[str, Any]:
    """Every matrix a DTensor with these placements, except ``plain``; the gradients are given."""
    model = matrices(SHAPES)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])
    distribute(model, mesh, lambda name: None if name == plain else placements)
    optimizer = build(model, rule)
    for step in range(STEPS):
        # Tensor parallelism leaves some gradients whole where their parameter is cut.
        give_gradients(model, step, placements if step % 2 else (Replicate(),) * len(sizes))
        optimizer.step()
    return {"weights": weights(model), "transforms": optimizer.transform_count}


def alone(rule: str) -> dict[str, Tensor]:
    model = matrices(SHAPES)
    optimizer = build(model, rule)
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap-staggered", "shampoo"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_weights_are_those_of_one_process(worlds: Worlds, case: str, rule: str) -> None:
    sizes, placements = PLACEMENTS[case]
    results = worlds[2 * len(sizes)].run(trained, rule=rule, sizes=sizes, placements=placements)
    for result in results:
        assert_close(result["weights"], alone(rule), 1e-5)
    assert sum(result["transforms"] for result in results) == len(SHAPES) * STEPS


def test_a_plain_parameter_beside_cut_ones(two: World) -> None:
    name = "blocks.only.m2.weight"
    for result in two.run(trained, rule="muon", sizes=(2,), placements=(Shard(1),), plain=name):
        assert_close(result["weights"], alone("muon"), 1e-5)


def with_some_on_part_of_the_ranks(rule: str, some: tuple[str, ...]) -> dict[str, Any]:
    """FSDP2 with tensor parallelism whose plan leaves some layers out: they are cut over one dimension of the mesh alone, so
    that half of the ranks share one copy, and the other half another."""
    model = matrices(SHAPES)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    distribute(model, mesh, lambda name: None if name.split(".")[-2] in some else (Shard(0), Shard(1)))
    distribute(model, mesh["dp"], lambda name: (Shard(0),) if name.split(".")[-2] in some else None)
    optimizer = build(model, rule)
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.step()
    return {"weights": weights(model), "transforms": optimizer.transform_count}


@pytest.mark.parametrize("rule", ["muon", "soap-staggered", "shampoo"])
@pytest.mark.parametrize("some", [("m1",), ("m2", "m6")])
def test_layers_that_tensor_parallelism_leaves_out(worlds: Worlds, some: tuple[str, ...], rule: str) -> None:
    results = worlds[4].run(with_some_on_part_of_the_ranks, rule=rule, some=some)
    for result in results:
        assert_close(result["weights"], alone(rule), 1e-5)
    assert sum(result["transforms"] for result in results) == (len(SHAPES) + len(some)) * STEPS


def planned_anew(kind: str) -> bool:
    model = matrices(SHAPES)
    mesh = init_device_mesh("cpu", (2,))
    distribute(model, mesh, lambda name: (Shard(0),))
    optimizer = build(model, "muon")
    give_gradients(model, 0, (Shard(0),))
    optimizer.step()
    before = optimizer._identity()
    if kind == "device":
        model.to("meta")
    elif kind == "dtype":
        model.to(torch.bfloat16)
    else:
        give_gradients(model, 1, (Shard(0),))
        optimizer.step()
    return before != optimizer._identity()


@pytest.mark.parametrize(("kind", "anew"), [("device", True), ("dtype", True), ("step", False)])
def test_parameters_that_moved_are_planned_anew(two: World, kind: str, anew: bool) -> None:
    assert two.run(planned_anew, kind=kind) == [anew] * 2
