"""Moments in fewer bits and state on the host, under every layout."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters_zoo import MODES, adapters_zoo
from harness import World, Worlds
from late_copies import two_streams
from test_parity import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from zoo import RULES, assert_close, backward, build, distribute, local, matrices, single, steps_of, weights, wrap, zoo

from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.formats import moments
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.state.offload import budget_in_buckets

LAYOUTS = ("ddp", "fsdp2", "hsdp")
NO_LIBRARY = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def train(model: nn.Module, optimizer: MatrixOptimizer, steps: int) -> None:
    """The last but one step leaves some parameters without a gradient."""
    for step in range(steps):
        backward(model, step)
        for name, parameter in model.named_parameters():
            if step == steps - 2 and name.endswith(("b.weight", "a.weight")):
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def trained(rule: str, layout: str, steps: int, every_size: bool = False, **options: Any) -> dict[str, Any]:
    """Weights, and how the state lies, after training; ``every_size``: small matrices have 8-bit state too."""
    least = moments._MIN_NUMEL, moments._MIN_ROW
    if every_size:
        moments._MIN_NUMEL, moments._MIN_ROW = 1, 1
    try:
        dtype = options.pop("dtype", torch.float32)
        model = zoo(dtype)
        model = model if layout == "single" else wrap(model, layout)
        optimizer = build(model, rule, **options)
        train(model, optimizer, steps)
        offload = optimizer.current_context().store.offload
        left = None if offload is None else offload.resident_bytes
        return {
            "weights": weights(model),
            "codes": sum(v.dtype is torch.uint8 for s in optimizer.state.values() for v in s.values()),
            "offload": None if offload is None else {k: v for k, v in vars(offload).items() if k[0] != "_"},
            "left": left,
        }
    finally:
        moments._MIN_NUMEL, moments._MIN_ROW = least


@NO_LIBRARY
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_eight_bits_are_those_of_one_process(two: World, rule: str, layout: str) -> None:
    """Blocks lie inside rows, so that no layout cuts one."""
    options = {"steps": 4, "every_size": True, "state_dtype": "int8"}
    wanted = trained(rule, "single", **options)
    for result in two.run(trained, rule=rule, layout=layout, **options):
        assert result["codes"] > 4
        assert_close(result["weights"], wanted["weights"], 1e-5)
    exact = single(rule, 4)
    assert any(not torch.equal(exact[name], value) for name, value in wanted["weights"].items())


def copies(layout: str, state_dtype: str) -> tuple[int, str]:
    """Coordinate of this rank's shard and a hash of its weights and moments after twenty steps."""
    model = wrap(matrices([(64, 64), (80, 96), (33, 130)], torch.bfloat16), layout)
    optimizer = build(model, "muon", state_dtype=state_dtype, low_precision_weights="stochastic")
    for step in range(20):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    held = [local(p) for p in model.parameters()]
    first = next(model.parameters())
    shard = first.device_mesh.get_coordinate()[-1] if isinstance(first, DTensor) else 0
    if isinstance(first, DTensor):  # state is copied with the shard; under DDP one rank alone has it
        held += [local(v) for p in model.parameters() for _, v in sorted(optimizer.state[p].items()) if v.ndim]
    return shard, digest(held)


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
@pytest.mark.parametrize("state_dtype", ["bfloat16", pytest.param("int8", marks=NO_LIBRARY)])
def test_copies_stay_equal(two: World, layout: str, state_dtype: str) -> None:
    results = two.run(copies, layout=layout, state_dtype=state_dtype)
    by_shard: dict[int, set[str]] = {}
    for shard, sha in results:
        by_shard.setdefault(shard, set()).add(sha)
    assert {len(hashes) for hashes in by_shard.values()} == {1}


def offload_cases() -> list[Any]:
    cases = [
        (rule, layout, "float32") for index, rule in enumerate(RULES) for layout in (LAYOUTS * 3)[index : index + 2]
    ]
    return cases + [("muon", layout, "bfloat16") for layout in LAYOUTS] + [("soap-staggered", "fsdp2", "bfloat16")]


def with_and_without(rule: str, layout: str, dtype: str, **options: Any) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    steps = steps_of(rule) + 1
    plain = trained(rule, layout, steps, dtype=kind, **options)
    with two_streams(early=layout == "hsdp"):
        moved = trained(rule, layout, steps, dtype=kind, offload_state="cpu", **options)
    same = [name for name, value in plain["weights"].items() if torch.equal(value, moved["weights"][name])]
    return {**moved["offload"], "different": sorted(set(plain["weights"]) - set(same)), "left": moved["left"]}


@pytest.mark.parametrize(("rule", "layout", "dtype"), offload_cases())
def test_offload_changes_no_bit_and_keeps_to_its_room(two: World, rule: str, layout: str, dtype: str) -> None:
    for result in two.run(with_and_without, rule=rule, layout=layout, dtype=dtype):
        assert result["different"] == []
        assert 0 < result["left"] <= result["left_bytes"] <= result["largest_bytes"]
        assert result["resident_bytes"] == 0  # state was asked for
        assert 0 < result["largest_bytes"] <= result["peak_bytes"] <= budget_in_buckets() * result["largest_bytes"]
        assert result["fetched_ahead"] > 0


def brought_in_backward(layout: str, rule: str, synchronized: bool) -> list[tuple[int, ...]]:
    """Bytes on the device before, between and after two backward passes, and when the step begins, of each step."""
    model = wrap(zoo(), layout)
    optimizer = build(model, rule, offload_state="cpu")
    held = []
    for step in range(5):
        offload = optimizer.current_context().store.offload
        assert offload is not None
        held.append([offload.resident_bytes])
        for last in (False, True):
            if layout == "ddp":
                with nullcontext() if last or synchronized else model.no_sync():
                    backward(model, step)
            else:
                model.set_requires_gradient_sync(last or synchronized)
                backward(model, step)
            held[-1].append(offload.resident_bytes)
        optimizer.step()
        optimizer.zero_grad()
        held[-1] += [offload.ready_bytes, offload.resident_bytes, offload.largest_bytes]
    return [tuple(each) for each in held]


@pytest.mark.parametrize(("layout", "rule"), [("ddp", "muon"), ("fsdp2", "soap"), ("hsdp", "muon")])
@pytest.mark.parametrize("synchronized", [False, True], ids=["no sync", "sync"])
def test_the_last_backward_pass_brings_state(two: World, layout: str, rule: str, synchronized: bool) -> None:
    """Under FSDP2 the hook is called when gradients have been scattered, which passes without synchronization do not."""
    for steps in two.run(brought_in_backward, layout=layout, rule=rule, synchronized=synchronized):
        for before, between, after, ready, left, bucket in steps[2:]:
            assert 0 < before == between == left <= bucket
            assert before < after == ready <= budget_in_buckets() * bucket


@NO_LIBRARY
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_of_eight_bits(two: World, layout: str) -> None:
    for result in two.run(with_and_without, rule="muon", layout=layout, dtype="float32", state_dtype="int8"):
        assert result["different"] == []


def adapters_with_and_without(layout: str, **options: Any) -> list[str]:
    """Weights that differ after five steps with joint LoRA factors, whose state is of pairs."""
    ends = []
    for offload in ({}, {"offload_state": "cpu"}):
        model = wrap(adapters_zoo(start=True), layout)
        optimizer = build(model, MODES["normuon"], **options, **offload)
        for step in range(5):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_offload_of_adapters(two: World, layout: str) -> None:
    assert two.run(adapters_with_and_without, layout=layout) == [[], []]


def cut_by_columns() -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = distribute(matrices([(64, 128)]), mesh, lambda name: [Shard(1)])
    optimizer = build(model, "muon", state_dtype="int8")
    try:
        optimizer.current_context()
    except UnsupportedLayoutError as error:
        return str(error)
    return "no error"


@NO_LIBRARY
def test_columns_are_refused(two: World) -> None:
    for message in two.run(cut_by_columns):
        assert "use state_dtype='bfloat16'" in message
        assert "m0.weight" in message


def grown_after_consolidating(change: str) -> None:
    """What rank 0 does alone, as a checkpoint has it, must not wait for the others."""
    model = wrap(zoo(), "ddp")
    optimizer = build(model, "muon")
    train(model, optimizer, 1)
    optimizer.consolidate_state_dict(to=0)
    if change == "group":
        optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(4, 4)))], "kind": "matrix"})
    else:
        optimizer._planned_for = ()  # as parameters that were replaced leave it
    if dist.get_rank() == 0:
        if change == "group":
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                optimizer.state_dict()
        else:
            assert len(optimizer.state_dict()["state"]) == sum(len(g["params"]) for g in optimizer.param_groups)
    dist.barrier()
    if change == "group":
        optimizer.consolidate_state_dict(to=0)
        assert optimizer.state_dict()["param_groups"][-1]["param_names"] == ["late"]


@pytest.mark.parametrize("change", ["group", "parameters"])
def test_a_rank_that_saves_alone_does_not_plan_anew(two: World, change: str) -> None:
    two.run(grown_after_consolidating, change=change)


def of_two_groups() -> int:
    """Each pair of ranks trains a model of its own; the second pair has no rank 0."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    optimizer = build(zoo(), "muon", process_group=group)
    for parameter in (p for g in optimizer.param_groups for p in g["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.consolidate_state_dict()
    saved = len(optimizer.state_dict()["state"])
    if dist.get_rank() >= 2:
        with pytest.raises(ValueError, match=r"ranks \[2, 3\]"):
            optimizer.consolidate_state_dict(to=0)
        optimizer.consolidate_state_dict(to=3)
        assert bool(optimizer.state_dict()["state"]) == (dist.get_rank() == 3)
    return saved


def test_state_comes_to_the_first_rank_of_a_group(worlds: Worlds) -> None:
    saved = worlds[4].run(of_two_groups)
    assert saved[0] == saved[2] > 0
    assert saved[1] == saved[3] == 0


def asked_by_one_rank_after_loading() -> None:
    model = wrap(zoo(), "fsdp2")
    optimizer = build(model, "muon")
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    other = build(wrap(zoo(), "fsdp2"), "muon")
    other.load_state_dict(saved)
    if dist.get_rank() == 0:
        assert other.state_dict()["state"].keys() == saved["state"].keys()
    dist.barrier()


def test_where_nothing_is_gathered_a_rank_may_ask_alone(two: World) -> None:
    two.run(asked_by_one_rank_after_loading)


def looked_at_again() -> tuple[int, int]:
    """Parameters whose state was made, or looked through for what is missing, in two steps and in the two after."""
    model = wrap(zoo().to(torch.bfloat16), "ddp")
    optimizer = build(model, "muon")
    states, calls = optimizer.current_context().store, [0]
    ready = states.ready

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return ready(*args, **options)

    states.ready = counted  # type: ignore[method-assign]
    seen = []
    for step in range(4):
        backward(model, step)
        optimizer.step()
        seen.append(calls[0])
    return seen[1], seen[3] - seen[1]


def test_state_that_others_own_is_looked_at_once(two: World) -> None:
    """Of it there is a count of steps alone: nothing beside it is missing, also with 16-bit weights."""
    for made, again in two.run(looked_at_again):
        assert made > 0
        assert again == 0
