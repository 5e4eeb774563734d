"""Gradients that are missing or not finite on some ranks: nobody hangs, and every rank does the same."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, Worlds
from torch import Tensor, nn
from zoo import assert_close, backward, bare, build, local, matrices, steps_of, train, weights, wrap, zoo

from hf_emopt.optimizers.base import MatrixOptimizer

LAYOUTS = ("ddp", "fsdp2", "hsdp")


def snapshot(model: nn.Module, optimizer: MatrixOptimizer) -> dict[str, Tensor]:
    """This rank's part of every weight and of all state."""
    optimizer.synchronize()
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[bare(name)] = local(parameter).detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{bare(name)}/{key}"] = local(value).detach().clone()
    return tensors


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert set(before) <= set(after)  # a first step makes state, also where it then counts for nothing
    return {key for key in before if not torch.equal(before[key], after[key])}


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def one_odd_step(
    model: nn.Module, optimizer: MatrixOptimizer, steps: int, odd: int, disturb: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Trains, with the gradients of one step disturbed; tells what that step changed."""
    handler = Warnings()
    logging.getLogger("hf_emopt").addHandler(handler)
    changes: set[str] = set()
    for step in range(steps):
        backward(model, step)
        if step == odd:
            disturb({bare(name): parameter for name, parameter in model.named_parameters()})
        before = snapshot(model, optimizer) if step == odd else {}
        optimizer.step()
        if step == odd:
            changes = changed(before, snapshot(model, optimizer))
        optimizer.zero_grad()
    logging.getLogger("hf_emopt").removeHandler(handler)
    optimizer.synchronize()
    return {
        "changed": changes,
        "weights": weights(model),
        "skipped": optimizer.skipped_steps,
        "warnings": handler.messages,
    }


def assert_skipped(result: dict[str, Any]) -> None:
    """Nothing changed but the host's count of rounds, by which periodic work is due."""
    assert {key for key in result["changed"] if not key.endswith("/rounds")} == set()
    assert result["skipped"] == 1


@functools.cache
def reference(
    rule: str,
    steps: int,
    odd: int,
    lost: tuple[str, ...] = (),
    skipped: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """One process, where the odd step lacks the gradients of ``lost`` and may be skipped for a bad number."""
    model = zoo(dtype)
    optimizer = build(model, rule)
    for step in range(steps):
        backward(model, step)
        if step == odd:
            drop(lost, dict(model.named_parameters()))
            if skipped:
                spoil("blocks.square.a.weight", math.nan, 0, dict(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def drop(names: tuple[str, ...], parameters: dict[str, nn.Parameter]) -> None:
    for name in names:
        parameters[name].grad = None


# One of three of a shape, a fused weight, a stack, one with empty shards, and two that are not matrices.
LOST = (
    "blocks.square.b.weight", "blocks.gpt2.attn.c_attn.weight", "blocks.moe.experts.down_proj",
    "blocks.short.rows2.weight", "blocks.short.rows1.weight", "blocks.gpt2.norm.bias",
)  # fmt: skip


def missing_everywhere(rule: str, layout: str, steps: int, odd: int) -> dict[str, Any]:
    model = wrap(zoo(), layout)
    return one_odd_step(model, build(model, rule), steps, odd, functools.partial(drop, LOST))


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "soap-staggered", "shampoo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_missing_on_all_ranks(two: World, rule: str, layout: str) -> None:
    """These parameters keep weight and state, the others go on, all as on one process."""
    steps = steps_of(rule) + 1
    for odd in (0, 2):
        wanted = reference(rule, steps, odd, LOST)
        for result in two.run(missing_everywhere, rule=rule, layout=layout, steps=steps, odd=odd):
            assert result["skipped"] == 0
            assert result["warnings"] == []
            touched = {key.partition("/")[0] for key in result["changed"]}
            assert not touched & set(LOST)
            assert odd == 0 or "blocks.square.a.weight" in touched
            assert_close(result["weights"], wanted, 1e-5)


def freeze(parameters: dict[str, nn.Parameter]) -> None:
    for name in LOST:
        parameters[name].requires_grad_(False)
        assert parameters[name].grad is not None
        parameters[name].grad.zero_()


def frozen(rule: str, layout: str, steps: int) -> dict[str, Any]:
    model = wrap(zoo(), layout)
    return one_odd_step(model, build(model, rule), steps, steps - 1, freeze)


@pytest.mark.parametrize("rule", ["muon", "soap", "shampoo-staggered"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parameters_rest_although_their_gradients_are_zeros(two: World, rule: str, layout: str) -> None:
    """``zero_grad(set_to_none=False)`` leaves zeros, which would be a step of decay and of what momentum there is."""
    steps = steps_of(rule)
    for result in two.run(frozen, rule=rule, layout=layout, steps=steps):
        touched = {key.partition("/")[0] for key in result["changed"]}
        assert not touched & set(LOST)
        assert "blocks.square.a.weight" in touched
        assert_close(result["weights"], reference(rule, steps, steps - 1, LOST), 1e-5)


def missing_somewhere(rule: str, layout: str, steps: int, odd: int, lost: list[tuple[str, ...]]) -> dict[str, Any]:
    model = wrap(zoo(), layout)
    mine = lost[torch.distributed.get_rank()]
    return one_odd_step(model, build(model, rule), steps, odd, functools.partial(drop, mine))


@pytest.mark.parametrize("rule", ["muon", "soap", "shampoo-staggered"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("odd", [0, 2])
def test_missing_on_some_ranks(two: World, rule: str, layout: str, odd: int) -> None:
    """Different sets on the two ranks: no hang, the step is skipped everywhere, counted, and said by name."""
    steps = steps_of(rule) + 1
    lost = [LOST[:2], (LOST[1], LOST[4])]  # c_attn is missing on both
    results = two.run(missing_somewhere, rule=rule, layout=layout, steps=steps, odd=odd, lost=lost)
    wanted = reference(rule, steps, odd, LOST[1:2], skipped=True)
    for result, (name,) in zip(results, [LOST[:1], LOST[4:5]]):
        assert_skipped(result)
        assert len(result["warnings"]) == 1
        assert name in result["warnings"][0]
        assert_close(result["weights"], wanted, 1e-5)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("size", [3, 4])
def test_missing_on_one_rank_of_many(worlds: Worlds, layout: str, size: int) -> None:
    lost = [()] * (size - 1) + [LOST]
    results = worlds[size].run(missing_somewhere, rule="normuon", layout=layout, steps=4, odd=1, lost=lost)
    for result in results:
        assert_skipped(result)
        assert_close(result["weights"], reference("normuon", 4, 1, skipped=True), 1e-5)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_everything_missing_on_one_rank(two: World, layout: str) -> None:
    names = tuple(name for name, _ in zoo().named_parameters())
    results = two.run(missing_somewhere, rule="muon", layout=layout, steps=4, odd=2, lost=[(), names])
    for result in results:
        assert_skipped(result)
        assert_close(result["weights"], reference("muon", 4, 2, skipped=True), 1e-5)


def experts_without_tokens(layout: str) -> dict[str, Any]:
    """Rank 0 alone misses the gradient of stacked experts, of which every rank has some."""
    model = wrap(zoo(), layout)
    optimizer = build(model, "normuon")
    lost = ("blocks.moe.experts.gate_up_proj", "blocks.moe.experts.down_proj")
    mine = lost if torch.distributed.get_rank() == 0 else ()
    return one_odd_step(model, optimizer, 4, 1, functools.partial(drop, mine))


@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)])
def test_experts_without_tokens_on_one_rank(worlds: Worlds, layout: str, size: int) -> None:
    """Replicas stay equal whatever is decided: all skip the step, or, where no other rank needs them, only their owner."""
    results = worlds[size].run(experts_without_tokens, layout=layout)
    for result in results[1:]:
        assert_close(result["weights"], results[0]["weights"], 0.0)
    skipped = {result["skipped"] for result in results}
    if skipped == {1}:
        assert_close(results[0]["weights"], reference("normuon", 4, 1, skipped=True), 1e-5)
        return
    assert (layout, skipped) == ("fsdp2", {0})
    others = reference("normuon", 4, 1)
    named = {name: value for name, value in results[0]["weights"].items() if "experts" not in name}
    assert_close(named, {name: others[name] for name in named}, 1e-5)
    assert not any("experts" in key for key in results[0]["changed"])
    assert any("experts" in key for key in results[1]["changed"])


def spoil(name: str, value: float, rank: int, parameters: dict[str, nn.Parameter]) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank:
        local(parameters[name].grad).view(-1)[0] = value  # type: ignore[arg-type]


def not_finite(
    rule: str, layout: str, name: str, value: float, rank: int, steps: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    model = wrap(zoo(dtype), layout)
    optimizer = build(model, rule, transport_dtype=str(dtype).removeprefix("torch."))
    return one_odd_step(model, optimizer, steps, 2, functools.partial(spoil, name, value, rank))


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo", "klshampoo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bad_number_on_one_rank_skips_the_step_on_all(two: World, rule: str, layout: str) -> None:
    """KL-Shampoo in float64: it whitens ``7 x 40`` by the root of a factor of rank 35, which makes rounding 4e-5."""
    steps, dtype = steps_of(rule) + 1, torch.float64 if rule == "klshampoo" else torch.float32
    spoiled = [
        ("blocks.square.b.weight", math.nan, 0),
        ("blocks.short.rows2.weight", math.inf, 1),
        ("blocks.moe.embedding.weight", -math.inf, 1),
    ]
    for name, value, rank in spoiled:
        arguments = {"rule": rule, "layout": layout, "name": name, "value": value, "rank": rank, "steps": steps}
        for result in two.run(not_finite, dtype=dtype, **arguments):
            assert_skipped(result)
            assert_close(result["weights"], reference(rule, steps, 2, skipped=True, dtype=dtype), 1e-5)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
def test_a_bad_number_among_four_ranks(worlds: Worlds, layout: str) -> None:
    """Also where the other ranks' shards of that weight are empty."""
    arguments = {"rule": "muon", "layout": layout, "value": math.nan, "steps": 4, "rank": 0}
    for result in worlds[4].run(not_finite, name="blocks.short.rows1.weight", **arguments):
        assert_skipped(result)
        assert_close(result["weights"], reference("muon", 4, 2, skipped=True), 1e-5)


def refresh_with_holes(layout: str, frequency: int) -> dict[str, Any]:
    """Each rank misses other gradients at the very step at which bases are due, twice."""
    rank = torch.distributed.get_rank()
    model = wrap(zoo(), layout)
    optimizer = build(model, "soap", precondition_frequency=frequency)
    for step in range(frequency + 3):
        backward(model, step)
        if step in (frequency - 1, frequency):
            drop(LOST[rank :: torch.distributed.get_world_size()], dict(_bare(model)))
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "skipped": optimizer.skipped_steps}


def _bare(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(bare(name), parameter) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("size", [2, 4])
def test_missing_gradients_when_bases_are_due(worlds: Worlds, layout: str, size: int) -> None:
    results = worlds[size].run(refresh_with_holes, layout=layout, frequency=10)
    assert [result["skipped"] for result in results] == [2] * size
    for result in results[1:]:
        assert_close(result["weights"], results[0]["weights"], 0.0)
    model = zoo()
    optimizer = build(model, "soap", precondition_frequency=10)
    for step in range(13):
        backward(model, step)
        if step in (9, 10):
            spoil("blocks.square.a.weight", math.nan, 0, dict(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad()
    assert_close(results[0]["weights"], weights(model), 1e-5)


def planned_anew() -> None:
    """A group is added in mid-run, and one rank alone looks at the optimizer before the next step."""
    model = matrices([(6, 4), (5, 7)])
    optimizer = build(model, "normuon")
    wrapped = wrap(model, "ddp")
    train(wrapped, optimizer, 1)
    optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(4, 4)))], "kind": "matrix"})
    if dist.get_rank() == 0:
        assert "late" in optimizer.explain()
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    dist.barrier()
    backward(wrapped, 1)
    optimizer.step()
    assert not optimizer.state[optimizer.param_groups[-1]["params"][0]].get("step")  # it has had no gradient


def test_one_rank_may_look_while_a_new_plan_is_due(two: World) -> None:
    two.run(planned_anew)
