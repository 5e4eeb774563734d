"""LoRA on several ranks: both factors of a pair come to one owner, and the weights are those of one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from adapters_zoo import MODES, PAIRS, adapters_zoo
from harness import World, Worlds
from test_prepare import accelerate_on_cpu, fsdp2, llama, run_llama
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zoo import assert_close, backward, build, full, give_gradients, train, weights, wrap

import hf_emopt
from hf_emopt.distributed.layout import UnsupportedLayoutError

STEPS = 5


@functools.cache
def reference(mode: str) -> dict[str, Tensor]:
    model = adapters_zoo(start=True)
    optimizer = build(model, MODES[mode])
    train(model, optimizer, STEPS)
    return weights(model)


def trained(mode: str, layout: str, **options: Any) -> dict[str, Any]:
    model = wrap(adapters_zoo(start=True), layout)
    optimizer = build(model, MODES[mode], **options)
    train(model, optimizer, STEPS)
    return {
        "weights": weights(model),
        "transforms": optimizer.transform_count,
        "wanted": optimizer.routes.matrix_count * STEPS,
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("mode", list(MODES))
def test_weights_are_those_of_one_process(two: World, mode: str, layout: str) -> None:
    results = two.run(trained, mode=mode, layout=layout)
    for result in results:
        assert_close(result["weights"], reference(mode), 1e-5)
        if mode != "separate":
            assert result["wanted"] == PAIRS * STEPS
    assert sum(result["transforms"] for result in results) == results[0]["wanted"]
    if mode != "separate":
        assert all(result["transforms"] > 0 for result in results)  # the work is shared


@pytest.mark.second_tier
@pytest.mark.parametrize(("layout", "size"), [("hsdp", 4), ("fsdp2", 3)])
def test_weights_on_more_ranks(worlds: Worlds, layout: str, size: int) -> None:
    """Two replicas of two shards; and a rank of three without a row of some factors."""
    results = worlds[size].run(trained, mode="normuon", layout=layout)
    for result in results:
        assert_close(result["weights"], reference("normuon"), 1e-5)
    assert sum(result["transforms"] for result in results) == PAIRS * STEPS


def resumed(mode: str, layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after five steps without a break, and after two, a new model and optimizer, and three more."""
    model = adapters_zoo(start=True) if layout == "single" else wrap(adapters_zoo(start=True), layout)
    optimizer = build(model, MODES[mode])
    train(model, optimizer, 2)
    optimizer.consolidate_state_dict(to=None)
    state = copy.deepcopy(optimizer.state_dict())
    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, optimizer, range(2, STEPS))

    other = adapters_zoo() if layout == "single" else wrap(adapters_zoo(), layout)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(saved[name])
    fresh = build(other, MODES[mode])
    fresh.load_state_dict(state)
    train(other, fresh, range(2, STEPS))
    return weights(model), weights(other)


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("mode", ["muon", "normuon"])
def test_resumed_bit_by_bit(two: World, mode: str, layout: str) -> None:
    results = [resumed(mode, layout)] if layout == "single" else two.run(resumed, mode=mode, layout=layout)
    for uninterrupted, again in results:
        assert set(uninterrupted) == set(again)
        assert all(torch.equal(again[name], value) for name, value in uninterrupted.items())


def apart() -> str:
    """One factor sharded, the other not."""
    model = adapters_zoo()
    fully_shard(model.blocks["linears"].a.lora_A["default"], mesh=init_device_mesh("cpu", (2,)))
    optimizer = build(model, MODES["muon"])
    give_gradients(model, 0)
    with pytest.raises(UnsupportedLayoutError, match="one fully_shard call") as error:
        optimizer.step()
    return str(error.value)


def test_factors_on_different_ranks_are_refused(two: World) -> None:
    assert all("lora_A.default.weight and its partner lie on different ranks" in text for text in two.run(apart))


def half_present(layout: str) -> str:
    """A step in which a factor has no gradient."""
    model = wrap(adapters_zoo(), layout)
    optimizer = build(model, MODES["muon"])
    train(model, optimizer, 1)
    backward(model, 1)
    next(p for n, p in model.named_parameters() if n.endswith("c_proj.lora_B.default.weight")).grad = None
    with pytest.raises(RuntimeError, match="has a gradient and") as error:
        optimizer.step()
    return str(error.value)


def test_a_factor_without_a_gradient_is_refused_on_all_ranks(two: World) -> None:
    for text in two.run(half_present, layout="fsdp2"):
        assert "c_proj.lora_A.default.weight has a gradient" in text
        assert "lora='separate'" in text


def prepared(rank: int = 4) -> dict[str, Any]:
    """A PEFT model through ``Accelerator.prepare`` with FSDP2 where there are ranks, which replaces every parameter."""
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear"))
    optimizer: Any = build(model, MODES["muon"])
    accelerator = None
    with accelerate_on_cpu(fsdp=dist.is_initialized()):
        if dist.is_initialized():
            accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp2())
            model, optimizer = accelerator.prepare(model, optimizer)
        return {
            "pairs": hf_emopt.route_parameters(model).matrix_count // 2,
            **run_llama(model, optimizer, accelerator, 1.0),
        }


def test_accelerate_prepares_pairs_for_fsdp2(two: World) -> None:
    wanted = prepared()
    assert wanted["pairs"] * 3 == wanted["transforms"] == 2 * 7 * 3
    results = two.run(prepared)
    for result in results:
        assert_close(result["weights"], wanted["weights"], 1e-5)
    assert sum(result["transforms"] for result in results) == wanted["transforms"]


def in_bfloat16(layout: str) -> dict[str, Any]:
    """16-bit adapters: their weights travel, and what they cannot hold stays with the owner."""
    model = adapters_zoo(start=True, dtype=torch.bfloat16)
    model = model if layout == "single" else wrap(model, layout)
    optimizer = build(model, MODES["muon"], lr=1e-3)
    train(model, optimizer, STEPS)
    optimizer.consolidate_state_dict(to=None)
    entries = copy.deepcopy(optimizer.state_dict()["state"])
    low = {index: full(entry["weight_low_bits"]).to(torch.int32) for index, entry in entries.items()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    whole = {}
    for (index, bits), param in zip(sorted(low.items()), params):  # the float32 weight: both halves of its bits
        upper = full(param).view(torch.int16).to(torch.int32)
        whole[str(index)] = ((upper << 16) + (bits & 0xFFFF)).view(torch.float32)
    return {"weights": weights(model), "masters": whole}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_bfloat16_adapters_are_those_of_one_process(two: World, layout: str) -> None:
    wanted = in_bfloat16("single")
    first, second = two.run(in_bfloat16, layout=layout)
    assert all(torch.equal(first["weights"][name], value) for name, value in second["weights"].items())
    assert_close(first["masters"], wanted["masters"], 1e-5)


def come_and_go(mode: str) -> dict[str, Any]:
    """One adapter joins and one leaves between steps, on ranks that own each other's state."""
    model = adapters_zoo()
    optimizer = build(model, MODES[mode])
    for step in range(2):
        give_gradients(model, step)
        optimizer.step()
    torch.manual_seed(7)
    layers = model.blocks["linears"]
    layers.b.update_layer("late", 2, lora_alpha=4, config=peft.LoraConfig(r=2, lora_alpha=4))
    layers.b.set_adapter(["default", "late"])
    layers.a.delete_adapter("default")
    added, removed = optimizer.refresh_parameters(model)
    assert [name.rsplit(".", 4)[-4] for name in removed] == ["a", "a"]
    assert len(added) == 2
    for step in range(2, 5):
        give_gradients(model, step)
        optimizer.step()
    return {"weights": weights(model), "transforms": optimizer.transform_count}


@pytest.mark.parametrize("mode", ["normuon", "separate"])
def test_adapters_come_and_go_on_ranks(two: World, mode: str) -> None:
    wanted = come_and_go(mode)
    results = two.run(come_and_go, mode=mode)
    for result in results:
        assert_close(result["weights"], wanted["weights"], 1e-5)
    assert sum(result["transforms"] for result in results) == wanted["transforms"]
