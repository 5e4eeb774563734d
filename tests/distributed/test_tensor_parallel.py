"""The modes of tensor parallelism: the same weights as one process for all but blockwise, and blockwise as it is defined."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import World, Worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from zoo import SAMPLES, assert_close, build, coefficients, matrices, weights

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
    rule: str, kind: str, sizes: tuple[int, ...], placements: tuple[Any, ...], **options: Any
) -> dict[str, Any]:
    """Every matrix a DTensor with these placements; the gradients are given."""
    model = matrices(SHAPES)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[kind])
    for name, parameter in list(model.named_parameters()):
        owner, leaf = name.rsplit(".", 1)
        value = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(value))
    optimizer = build(model, rule, **options)
    for step in range(STEPS):
        wanted = coefficients(model, step, range(SAMPLES), 1 / 32)
        for name, parameter in model.named_parameters():
            where = placements if step % 2 else (Replicate(),) * len(sizes)
            parameter.grad = distribute_tensor(wanted[name], mesh, where, src_data_rank=None)
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
        for name, parameter in model.named_parameters():
            parameter.grad = coefficients(model, step, range(SAMPLES), 1 / 32)[name]
        optimizer.step()
    return weights(model)


def cases() -> list[Any]:
    """Two ranks: everything. Four: each mode under FSDP2 by default, the rest on request."""
    found = []
    for case, (_, sizes, _) in PLACEMENTS.items():
        for rule in ("muon", "normuon"):
            for mode in EXACT:
                chosen = sizes == (2,) or (case == "strided" and rule == "normuon" and mode != "layerwise")
                marks = () if chosen else (pytest.mark.ranks34,)
                found.append(pytest.param(case, rule, mode, marks=marks, id=f"{case}-{rule}-{mode}"))
    return found


@pytest.mark.parametrize(("case", "rule", "mode"), cases())
def test_weights_are_those_of_one_process(worlds: Worlds, case: str, rule: str, mode: str) -> None:
    kind, sizes, placements = PLACEMENTS[case]
    size = sizes[0] if len(sizes) == 1 else 4
    results = worlds[size].run(trained, rule=rule, kind=kind, sizes=sizes, placements=placements, tensor_parallel=mode)
    for result in results:
        assert_close(result["weights"], alone(rule), 1e-5)
        if case != "copies" and mode in ("duplicated", "layerwise"):
            assert result["modes"] == [mode] * len(SHAPES)
    assert sum(result["transforms"] for result in results) == len(SHAPES) * STEPS


# ---------------------------------------------------------------------- missing and bad gradients, 16-bit weights


def with_gaps(mode: str, dim: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Five steps: in the second the third matrix has no gradient, in the fourth one rank's slice of the first has a NaN."""
    model = matrices(SHAPES, dtype)
    alone = not torch.distributed.is_initialized()
    if not alone:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for name, parameter in list(model.named_parameters()):
            owner, leaf = name.rsplit(".", 1)
            value = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value))
    optimizer = build(model, "normuon", **({} if alone else {"tensor_parallel": mode}))
    names = [name for name, _ in model.named_parameters()]
    for step in range(5):
        wanted = coefficients(model, step, range(SAMPLES), 1 / 32)
        for name, parameter in model.named_parameters():
            grad = wanted[name].to(dtype)
            if step == 3 and name == names[0]:
                grad[-1, -1] = float("nan")
            parameter.grad = grad if alone else distribute_tensor(grad, mesh, [Shard(dim)], src_data_rank=None)
            if step == 1 and name == names[2]:
                parameter.grad = None
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
