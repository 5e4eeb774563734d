"""What each mode sends, message by message, by the formulas in docs/tensor-parallel.md; and blockwise as it is defined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from counter import CollectiveCounter
from harness import World, Worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from zoo import (
    RULES,
    SAMPLES,
    assert_close,
    build,
    coefficients,
    distribute,
    give_gradients,
    matrices,
    steps_of,
    weights,
)

import hf_emopt
from hf_emopt.linalg import newton_schulz
from hf_emopt.linalg.coefficients import resolve_coefficients
from hf_emopt.linalg.gram_newton_schulz import find_restart_steps

SHAPE = (24, 36)
COUNT = 4
RESTARTS = len(find_restart_steps(resolve_coefficients("jordan", 5).steps))


def cut_model(shapes: list[tuple[int, int]], dim: int, world: int) -> nn.Module:
    return distribute(
        matrices(shapes), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), lambda name: [Shard(dim)]
    )


def messages(rule: str, mode: str, dim: int, world: int, **options: Any) -> list[tuple[str, int, int]]:
    """``(collective, elements received, bytes each)`` of the second step, without the one that ranks agree by."""
    model = cut_model([SHAPE] * COUNT, dim, world)
    optimizer = build(model, rule, tensor_parallel=mode, **options)
    for step in range(2):
        give_gradients(model, step)
        with CollectiveCounter() as counter:
            optimizer.step()
    assert {choice.mode for choice in optimizer._choices} == {mode}
    return [(t.name, t.received, t.dtype.itemsize) for t in counter.traffic if t.dtype.is_floating_point]


def formula(rule: str, mode: str, dim: int, k: int, wire: int = 4) -> list[tuple[str, int, int]]:
    """As the documentation has it."""
    numel, (m, n) = math.prod(SHAPE) * COUNT, SHAPE
    short, long_dim = min(m, n), (1 if n > m else 0)
    there_and_back = [("alltoall_base_", numel // k, wire)]
    if mode == "layerwise":
        return there_and_back * 2
    if mode == "duplicated":
        return [("_allgather_base_", numel * (k - 1) // k, wire)]
    if mode == "blockwise":
        return []
    gram = [("allreduce_", COUNT * short * (short + 1) // 2, 4)]
    sums = [("allreduce_", COUNT * 2 * k, 4), *gram * (RESTARTS + 1)]
    if rule == "normuon":
        sums += [("allreduce_", COUNT * m, 4)] if long_dim == 1 else []
        sums += [("allreduce_", COUNT * 2, 4)]
    return sums if dim == long_dim else [*there_and_back, *sums, *there_and_back]


@pytest.mark.parametrize("dim", [0, 1], ids=["short", "long"])
@pytest.mark.parametrize("mode", ["layerwise", "duplicated", "distributed", "blockwise"])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.second_tier)])
def test_messages_and_bytes_are_those_of_the_formula(worlds: Worlds, size: int, rule: str, mode: str, dim: int) -> None:
    for found in worlds[size].run(messages, rule=rule, mode=mode, dim=dim, world=size):
        assert found == formula(rule, mode, dim, size)


def test_two_gram_matrices_a_step_instead_of_five(two: World) -> None:
    """Two with the Gram form, and five where its dtype excludes it, after a norm and a peak."""
    gram = ("allreduce_", COUNT * 24 * 25 // 2, 4)
    for dtype, wanted in (
        ("float32", [("allreduce_", COUNT * 4, 4), gram, gram]),
        ("bfloat16", [("allreduce_", COUNT, 4)] * 2 + [gram] * 5),
    ):
        for found in two.run(messages, rule="muon", mode="distributed", dim=1, world=2, ns_dtype=dtype):
            assert found == wanted


@pytest.mark.parametrize("mode", ["layerwise", "duplicated"])
def test_the_wire_is_as_wide_as_asked_for(two: World, mode: str) -> None:
    for found in two.run(messages, rule="muon", mode=mode, dim=1, world=2, transport_dtype="bfloat16"):
        assert found == formula("muon", mode, 1, 2, wire=2)


def expert_traffic() -> tuple[int, int]:
    """Elements received in the second step, and matrices transformed in two: eight experts, two on a rank."""
    torch.manual_seed(0)
    model = MixtralExperts(MixtralConfig(hidden_size=10, intermediate_size=6, num_local_experts=8))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.25)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    distribute(model, mesh, lambda name: [_StridedShard(0, split_factor=2), Shard(0)])
    optimizer = build(model, "muon")
    for step in range(2):  # groups are opened in the first
        give_gradients(model, step)
        with CollectiveCounter() as counter:
            optimizer.step()
    return sum(t.received for t in counter.traffic if t.dtype.is_floating_point), optimizer.transform_count


def test_nothing_travels_for_experts_that_a_rank_has(worlds: Worlds) -> None:
    for found in worlds[4].run(expert_traffic):
        assert found == (0, 2 * 2 * 3)  # two steps of two experts; gate, up and down of each


# ---------------------------------------------------------------------- blockwise

SHAPES = [(33, 17), (8, 40), (24, 24), (24, 24), (12, 33)]


def blockwise(rule: str, dim: int, world: int, **options: Any) -> dict[str, Any]:
    model = cut_model(SHAPES, dim, world)
    optimizer = build(model, rule, tensor_parallel="blockwise", **options)
    with pytest.warns(UserWarning, match="blockwise.*not those of one process"):
        optimizer.explain()
    for step in range(steps_of(rule)):
        give_gradients(model, step)
        with CollectiveCounter() as counter:
            optimizer.step()
        assert step == 0 or not [t for t in counter.traffic if t.dtype.is_floating_point]
    return {"weights": weights(model), "explained": optimizer.explain(), "transforms": optimizer.transform_count}


def of_slices(rule: str, dim: int, world: int, **options: Any) -> dict[str, Tensor]:
    """One process that has each slice as a parameter of its own."""
    whole = matrices(SHAPES)
    names = [name for name, _ in whole.named_parameters()]
    parts = {
        name: [nn.Parameter(t.clone()) for t in p.detach().chunk(world, dim)] for name, p in whole.named_parameters()
    }
    flat = [(f"{name.replace('.', '_')}.{i}", part) for name in names for i, part in enumerate(parts[name])]
    cls, defaults = RULES[rule]
    optimizer = cls([{"params": flat, "kind": "matrix"}], **{**defaults, "transport_dtype": "float32", **options})
    for step in range(steps_of(rule)):
        wanted = coefficients(whole, step, range(SAMPLES), 1 / 32)
        for name in names:
            for part, grad in zip(parts[name], wanted[name].chunk(world, dim)):
                part.grad = grad.clone()
        optimizer.step()
    return {name: torch.cat([p.detach() for p in parts[name]], dim) for name in names}


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo", "klshampoo"])
@pytest.mark.parametrize(("size", "dim"), [(2, 0), (2, 1), pytest.param(4, 1, marks=pytest.mark.second_tier)])
def test_blockwise_is_the_rule_on_slices(worlds: Worlds, size: int, rule: str, dim: int) -> None:
    """Apart from the scale, which is that of the whole shape: so there is none here."""
    options: dict[str, Any] = {"adjust_lr_fn": "unscaled"} if "muon" in rule else {}
    wanted = of_slices(rule, dim, size, **options)
    results = worlds[size].run(blockwise, rule=rule, dim=dim, world=size, **options)
    for result in results:
        assert_close(result["weights"], wanted, 1e-5)
        assert "blockwise" in result["explained"]
    assert sum(result["transforms"] for result in results) == len(SHAPES) * size * steps_of(rule)


@pytest.mark.parametrize("dim", [0, 1])
def test_blockwise_has_the_scale_of_the_whole(two: World, dim: int) -> None:
    """The first of Muon's steps, written out."""
    model = matrices(SHAPES)
    cls, defaults = RULES["muon"]
    assert cls is hf_emopt.Muon
    lr, decay, momentum = defaults["lr"], defaults["weight_decay"], 0.95
    wanted = {}
    given = [coefficients(model, step, range(SAMPLES), 1 / 32) for step in range(steps_of("muon"))]
    for name, p in model.named_parameters():
        w, buffer = p.detach().clone(), torch.zeros_like(p)
        for grads in given:
            g = grads[name]
            buffer = buffer + (1 - momentum) * (g - buffer)
            u = g + momentum * (buffer - g)
            ortho = torch.cat([newton_schulz(part, dtype=torch.float32) for part in u.chunk(2, dim)], dim)
            w = (1 - lr * decay) * w - lr * 0.2 * math.sqrt(max(w.shape)) * ortho
        wanted[name] = w
    for result in two.run(blockwise, rule="muon", dim=dim, world=2):
        assert_close(result["weights"], wanted, 1e-5)
