"""The modes of tensor parallelism: the same weights as one process for all but blockwise, and blockwise as it is defined."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import World, Worlds
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from zoo import assert_close, build, distribute, give_gradients, local, matrices, weights

SHAPES = [(33, 17), (7, 40), (24, 24), (24, 24), (5, 9), (2, 6), (12, 32), (32, 12)]
STEPS = 3
EXACT = ("layerwise", "duplicated", "distributed", "auto")
NAMES = {"tp": ("tp",), "2d": ("fsdp", "tp"), "hsdp": ("dp_replicate", "tp")}

PLACEMENTS: dict[str, tuple[str, tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ("tp", (2,), (Shard(0),)),
    "columns": ("tp", (2,), (Shard(1),)),
    "copies": ("tp", (2,), (Replicate(),)),
    "rows-of-4": ("tp", (4,), (Shard(0),)),
    "columns-of-4": ("tp", (4,), (Shard(1),)),
    "both-sides": ("2d", (2, 2), (Shard(0), Shard(1))),
    "strided": ("2d", (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "copies-of-columns": ("hsdp", (2, 2), (Replicate(), Shard(1))),
    "copies-of-rows": ("hsdp", (2, 2), (Replicate(), Shard(0))),
}


def trained(
    rule: str,
    kind: str,
    sizes: tuple[int, ...],
    placements: tuple[Any, ...],
    plain: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Every matrix a DTensor with these placements, except ``plain``; the gradients are given."""
    model = matrices(SHAPES)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[kind])
    distribute(model, mesh, lambda name: None if name in plain else placements)
    optimizer = build(model, rule, **options)
    for step in range(STEPS):
        give_gradients(model, step, placements if step % 2 else (Replicate(),) * len(sizes))
        optimizer.step()
    return {
        "weights": weights(model), "transforms": optimizer.transform_count, "explained": optimizer.explain(),
        "modes": [choice.mode for choice in optimizer._choices],
    }  # fmt: skip


@functools.cache
def alone(rule: str) -> dict[str, Tensor]:
    model = matrices(SHAPES)
    optimizer = build(model, rule)
    for step in range(STEPS):
        give_gradients(model, step)
        optimizer.step()
    return weights(model)


def cases() -> list[Any]:
    """Two ranks: everything. Four: each mode under FSDP2; the rest are ``products``."""
    found = []
    for case, (_, sizes, _) in PLACEMENTS.items():
        for rule in ("muon", "normuon"):
            for mode in EXACT:
                chosen = sizes == (2,) or (case == "strided" and rule == "normuon" and mode != "layerwise")
                marks = () if chosen else (pytest.mark.products,)
                found.append(pytest.param(case, rule, mode, marks=marks, id=f"{case}-{rule}-{mode}"))
    return found


@pytest.mark.parametrize(("case", "rule", "mode"), cases())
def test_weights_are_those_of_one_process(worlds: Worlds, case: str, rule: str, mode: str) -> None:
    kind, sizes, placements = PLACEMENTS[case]
    size = sizes[0] if len(sizes) == 1 else 4
    results = worlds[size].run(trained, rule=rule, kind=kind, sizes=sizes, placements=placements, tensor_parallel=mode)
    for result in results:
        assert_close(result["weights"], alone(rule), 1e-5)
        if mode != "auto":
            assert result["modes"] == ([] if case == "copies" else [mode] * len(SHAPES))
    assert sum(result["transforms"] for result in results) == len(SHAPES) * STEPS


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
def test_plain_parameters_beside_cut_ones(two: World, mode: str) -> None:
    plain = ("blocks.only.m0.weight", "blocks.only.m2.weight")
    kind, sizes, placements = PLACEMENTS["columns"]
    options = {"kind": kind, "sizes": sizes, "placements": placements, "plain": plain, "tensor_parallel": mode}
    results = two.run(trained, rule="normuon", **options)
    for result in results:
        assert_close(result["weights"], alone("normuon"), 1e-5)
        assert result["modes"] == [mode] * (len(SHAPES) - len(plain))
    assert sum(result["transforms"] for result in results) == len(SHAPES) * STEPS


# ---------------------------------------------------------------------- missing and bad gradients, 16-bit weights


def with_gaps(mode: str, dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Five steps: in the second the third matrix has no gradient, in the fourth one rank's slice of the first has a NaN."""
    model = matrices(SHAPES, dtype)
    alone = not torch.distributed.is_initialized()
    if not alone:
        distribute(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), lambda name: [Shard(dim)])
    optimizer = build(model, "normuon", **({} if alone else {"tensor_parallel": mode}))
    parameters = list(model.parameters())
    for step in range(5):
        give_gradients(model, step)
        if step == 1:
            parameters[2].grad = None
        if step == 3 and (alone or torch.distributed.get_rank() == 1):
            local(parameters[0].grad)[-1, -1] = float("nan")
        optimizer.step()
    return {"weights": weights(model), "skipped": optimizer.skipped_steps, "count": optimizer.transform_count}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("mode", EXACT)
def test_missing_and_bad_gradients_are_those_of_one_process(two: World, mode: str, dim: int) -> None:
    wanted = with_gaps(mode, dim)
    assert wanted["skipped"] == 1
    results = two.run(with_gaps, mode=mode, dim=dim)
    for result in results:
        assert_close(result["weights"], wanted["weights"], 1e-5)
        assert result["skipped"] == 1
    assert sum(result["count"] for result in results) == wanted["count"]


@pytest.mark.parametrize("mode", EXACT)
def test_sixteen_bit_weights(two: World, mode: str) -> None:
    """Within a rounding of bfloat16, whose low bits are kept beside it."""
    wanted = with_gaps(mode, 1, torch.bfloat16)
    for result in two.run(with_gaps, mode=mode, dim=1, dtype=torch.bfloat16):
        assert_close(result["weights"], wanted["weights"], 2.0**-8)
