"""State that other tools (Lookahead, averages of weights, SAM) keep in ``optimizer.state`` beside the optimizer's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Worlds
from torch import Tensor, nn
from zoo import assert_close, backward, bare, build, full, steps_of, train, weights, wrap, zoo

from hf_emopt.optimizers.base import MatrixOptimizer

RULES = ("muon", "normuon", "soap", "shampoo", "klshampoo")
LAYOUTS = ("single", "ddp", "fsdp2", "hsdp")
OTHERS = ("slow", "averages.fast", "decay", "window", "updates", "kind")


def put(model: nn.Module, optimizer: MatrixOptimizer) -> None:
    """Tensors of the parameter's shape and of others, and what is no tensor."""
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] |= {
            "slow": parameter.detach() + number,
            "averages.fast": parameter.detach() * 2,
            "decay": torch.tensor(0.5 + number),
            "window": torch.arange(3.0),
            "updates": number,
            "kind": "lookahead",
        }


def kept(model: nn.Module, state: Any) -> dict[str, dict[str, Any]]:
    """What others keep, by name and whole."""
    return {
        bare(name): {k: full(v) if isinstance(v, Tensor) else v for k, v in sorted(state(p).items()) if k in OTHERS}
        for name, p in model.named_parameters()
    }


def differences(found: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name} {key}"
        for name, entry in wanted.items()
        for key, value in entry.items()
        if type(found[name].get(key)) is not type(value)
        or not (torch.equal(found[name][key], value) if isinstance(value, Tensor) else found[name][key] == value)
    ]


def saved(layout: str, rule: str, **options: Any) -> tuple[dict[str, list[str]], dict[str, Any], dict[str, Any]]:
    """What is lost where; the saved state, whole; and what others kept."""
    model = zoo() if layout == "single" else wrap(zoo(), layout)
    optimizer = build(model, rule, **options)
    train(model, optimizer, 1)
    put(model, optimizer)
    wanted = kept(model, optimizer.state.get)
    assert all(set(entry) == set(OTHERS) for entry in wanted.values())
    train(model, optimizer, range(1, 2))
    lost = {"a step": differences(kept(model, optimizer.state.get), wanted)}
    optimizer.refresh_parameters()
    lost["refresh_parameters"] = differences(kept(model, optimizer.state.get), wanted)
    optimizer.consolidate_state_dict(to=None)
    state_dict = optimizer.state_dict()
    whole = {
        index: {key: full(v) if isinstance(v, Tensor) else v for key, v in entry.items()}
        for index, entry in state_dict["state"].items()
    }
    by_name = {
        name: index
        for group in state_dict["param_groups"]
        for name, index in zip(group["param_names"], group["params"])
    }
    names = {id(p): n for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"])}
    lost["state_dict"] = differences(kept(model, lambda p: whole[by_name[names[id(p)]]]), wanted)
    train(model, optimizer, range(2, steps_of(rule)))
    return lost, {**state_dict, "state": whole}, {"others": wanted, "weights": weights(model)}


def loaded(layout: str, rule: str, state_dict: dict[str, Any]) -> dict[str, Any]:
    model = zoo()
    model = model if layout == "single" else wrap(model, layout)
    optimizer = build(model, rule)
    optimizer.load_state_dict(state_dict)
    found = kept(model, optimizer.state.get)
    backward(model, 2)
    optimizer.step()
    assert differences(kept(model, optimizer.state.get), found) == []
    return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "to", "on"), [(2, "ddp", 3), (2, "fsdp2", 3), (2, "single", 1), (2, "hsdp", 4)])
def test_state_of_others_stays(worlds: Worlds, layout: str, rule: str, size: int, to: str, on: int) -> None:
    if layout == "single":
        lost, state_dict, held = saved(layout, rule)
    else:
        (lost, state_dict, held), *others = worlds[size].run(saved, layout=layout, rule=rule)
        assert all(other[0] == lost for other in others)
    assert lost == {"a step": [], "refresh_parameters": [], "state_dict": []}
    run = {"layout": to, "rule": rule, "state_dict": state_dict}
    for found in [loaded(**run)] if to == "single" else worlds[on].run(loaded, **run):
        assert differences(found, held["others"]) == []


def undisturbed(layout: str, rule: str) -> dict[str, Tensor]:
    model = wrap(zoo(), layout)
    optimizer = build(model, rule)
    train(model, optimizer, steps_of(rule))
    return weights(model)


@pytest.mark.second_tier
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_a_run_is_the_same_with_state_of_others(worlds: Worlds, layout: str, rule: str) -> None:
    plain = worlds[2].run(undisturbed, layout=layout, rule=rule)
    for (_, _, held), expected in zip(worlds[2].run(saved, layout=layout, rule=rule), plain):
        assert_close(held["weights"], expected, 1e-6)
    packed = {"offload_state": "cpu", "state_dtype": "bfloat16"}
    for lost, _, _ in worlds[2].run(saved, layout=layout, rule=rule, **packed):
        assert lost == {"a step": [], "refresh_parameters": [], "state_dict": []}
