"""The modes of tensor parallelism: the same weights as one process for all but blockwise, and blockwise as it is defined."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from harness import Worlds
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


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("case", PLACEMENTS)
def test_weights_are_those_of_one_process(worlds: Worlds, case: str, rule: str, mode: str) -> None:
    kind, sizes, placements = PLACEMENTS[case]
    size = sizes[0] if len(sizes) == 1 else 4
    results = worlds[size].run(trained, rule=rule, kind=kind, sizes=sizes, placements=placements, tensor_parallel=mode)
    for result in results:
        assert_close(result["weights"], alone(rule), 1e-5)
        if case != "copies" and mode in ("duplicated", "layerwise"):
            assert result["modes"] == [mode] * len(SHAPES)
    assert sum(result["transforms"] for result in results) == len(SHAPES) * STEPS
