"""What is in ``optimizer.state`` is what the next step starts from, whoever put it there, and what a checkpoint has."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hf_emopt

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {}),
    "normuon": (hf_emopt.NorMuon, {}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 2}),
    "soap, offloaded": (hf_emopt.SOAP, {"precondition_frequency": 2, "offload_state": "cpu"}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 2}),
    "kl_shampoo": (hf_emopt.KLShampoo, {"precondition_frequency": 2}),
}


def built(rule: str, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Linear(8, 12))
    cls, own = RULES[rule]
    return model, cls(model, lr=1e-2, **own, **options)


def step(model: nn.Module, optimizer: Any, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def clear(optimizer: Any) -> None:
    optimizer.state.clear()


def replace(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def replace_each(optimizer: Any) -> None:
    for param in list(optimizer.state):
        optimizer.state[param] = {}


def clear_each(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state.clear()


@pytest.mark.parametrize("reset", [clear, replace, replace_each, clear_each])
@pytest.mark.parametrize("rule", RULES)
def test_a_reset_optimizer_is_a_new_one(rule: str, reset: Callable[[Any], None]) -> None:
    model, optimizer = built(rule)
    step(model, optimizer, 3, seed=1)
    weights = copy.deepcopy(model.state_dict())
    reset(optimizer)
    step(model, optimizer, 3, seed=2)
    other, new = built(rule)
    other.load_state_dict(weights)
    step(other, new, 3, seed=2)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)
    saved, expected = optimizer.state_dict()["state"], new.state_dict()["state"]
    assert {index: set(entry) for index, entry in saved.items()} == {i: set(entry) for i, entry in expected.items()}
    for index, entry in expected.items():
        assert all(torch.equal(saved[index][key], value) for key, value in entry.items())


def test_one_matrixs_state_is_replaced() -> None:
    model, optimizer = built("soap")
    step(model, optimizer, 2, seed=1)
    weight = model[0].weight
    state = optimizer.state[weight]
    key = next(key for key in state if key.startswith("exp_avg_sq"))
    state[key] = torch.full_like(state[key], 1e8)
    before = weight.detach().clone()
    step(model, optimizer, 1, seed=2)
    assert (weight.detach() - before).abs().max() < 1e-4  # a learning rate of 1e-2 moves it as far otherwise
    assert optimizer.state[weight][key].min() > 1e7


@pytest.mark.parametrize("policy", ["split", "master", "kahan"])
@pytest.mark.parametrize("rule", ["muon", "soap"])
@pytest.mark.parametrize("way", ["to", "loaded"])
def test_weights_that_become_narrow_keep_what_they_cannot_hold(rule: str, policy: str, way: str) -> None:
    """All of them, those of AdamW too, and it is in a checkpoint."""
    model, optimizer = built(rule, low_precision_weights=policy)
    step(model, optimizer, 2, seed=1)
    if way == "to":
        model.to(torch.bfloat16)
    else:
        saved, weights = optimizer.state_dict(), model.state_dict()
        model, optimizer = built(rule, low_precision_weights=policy)
        model.load_state_dict(weights)
        model.to(torch.bfloat16)
        optimizer = type(optimizer)(model, lr=1e-2, low_precision_weights=policy, **RULES[rule][1])
        optimizer.load_state_dict(saved)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5  # far below the weights' spacing
    step(model, optimizer, 2, seed=2)
    kept = {"split": "weight_low_bits", "master": "master_weight", "kahan": "weight_compensation"}[policy]
    assert all(kept in state for state in optimizer.state.values())
    assert all(kept in entry for entry in optimizer.state_dict()["state"].values())
    moved = [
        (s[kept].float() - p.float()).abs().max() if policy == "master" else s[kept].abs().max()
        for p, s in optimizer.state.items()
    ]
    assert all(bool(amount > 0) for amount in moved)


def test_a_hook_on_the_state_dict_has_the_last_word() -> None:
    model, optimizer = built("soap")
    step(model, optimizer, 1, seed=1)

    def halve(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        narrow: Callable[[Tensor], Tensor] = lambda x: x.half() if x.is_floating_point() else x  # noqa: E731
        state = {i: {k: narrow(v) for k, v in entry.items()} for i, entry in state_dict["state"].items()}
        return {**state_dict, "state": state, "noted": True}

    handle = optimizer.register_state_dict_post_hook(halve)
    made = optimizer.state_dict()
    assert made["noted"]
    assert made["state"][0]["step"].dtype is torch.float16
    handle.remove()
    assert "noted" not in optimizer.state_dict()


def test_foreign_parameters_are_named_at_once_and_later() -> None:
    model, optimizer = built("muon")
    model.append(nn.Linear(12, 12))
    for param in model[2].parameters():
        param.grad = torch.zeros_like(param)
    with pytest.warns(UserWarning, match=r"2 parameters have a gradient .* 2\.weight, 2\.bias"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            optimizer.step()
    assert ["2 parameters have a gradient" in str(w.message) for w in caught] == [True]


def test_a_group_that_there_was_none_of_joins_the_schedule() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    optimizer = hf_emopt.Muon(model, lr=1e-2, allow_no_matrices=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    model[0].bias.grad = torch.zeros(8)
    optimizer.step()
    schedule.step()
    model[0].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="Make the scheduler anew"):
        assert optimizer.refresh_parameters() == (["0.weight"], [])
    group = next(g for g in optimizer.param_groups if g["kind"] == "matrix")
    assert (group["lr"], group["initial_lr"]) == (pytest.approx(5e-3), pytest.approx(1e-2))
    again = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5, last_epoch=schedule.last_epoch)
    again.step()
    assert all(g["lr"] < 5e-3 for g in optimizer.param_groups)


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        ("muon", {"momentum": 1.5}, "momentum=1.5"),
        ("muon", {"low_precision_weights": "nonsense"}, "low_precision_weights='nonsense'"),
        ("muon", {"state_dtype": "bfloat16"}, "state_dtype from 'float32' to 'bfloat16': that needs other state"),
        ("shampoo", {"momentum": 0.9}, "momentum from 0.0 to 0.9: that needs other state"),
        ("shampoo", {"refresh": "async"}, "refresh='async' was removed"),
        ("soap", {"precondition_frequency": 0}, "precondition_frequency=0"),
    ],
)
def test_what_is_written_into_a_group_is_checked(rule: str, change: dict[str, Any], message: str) -> None:
    model, optimizer = built(rule)
    step(model, optimizer, 1, seed=1)
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match="was changed between steps") as raised:
        optimizer.step()
    assert message in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("number", [float, np.float32])
def test_schedules_of_hyperparameters_are_free(number: Callable[[float], Any]) -> None:
    model, optimizer = built("soap", weight_decay=0.1)
    for value in map(number, (0.05, 0.0, 0.2)):
        for group in optimizer.param_groups:
            group["weight_decay"], group["lr"] = value, value / 10
        optimizer.param_groups[0]["precondition_frequency"] = 3 + int(10 * value)
        step(model, optimizer, 2, seed=1)


def test_less_state_than_there_is_may_be_asked_for() -> None:
    model, optimizer = built("shampoo", momentum=0.9)
    step(model, optimizer, 2, seed=1)
    optimizer.param_groups[0].update(betas=(0.0, 0.99), momentum=0.0)
    step(model, optimizer, 2, seed=2)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    with pytest.raises(ValueError, match="that needs other state"):
        optimizer.step()


def late_or_not(zeros: bool) -> tuple[nn.Module, Any]:
    """After two steps, of which the first matrix has had gradients of zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    optimizer = hf_emopt.SOAP(model, lr=1e-2, precondition_frequency=6)
    for seed in range(2):
        fed(model, optimizer, seed, zeros)
    return model, optimizer


def fed(model: nn.Module, optimizer: Any, seed: int, zeros: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for i, param in enumerate(model.parameters()):
        param.grad = torch.randn(param.shape, generator=generator) * (0.0 if zeros and i == 0 else 1.0)
    optimizer.step()


def test_nothing_that_was_known_of_replaced_state_holds() -> None:
    """A side without its first refresh, put in place of one with it, gets it at its next turn."""
    model, optimizer = late_or_not(zeros=True)
    late = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    weights = copy.deepcopy(model.state_dict())
    other, replaced = late_or_not(zeros=False)
    other.load_state_dict(weights)
    for param, state in zip(other.parameters(), late):
        replaced.state[param].clear()
        replaced.state[param].update(state)
    for seed in range(2, 14):
        fed(model, optimizer, seed)
        fed(other, replaced, seed)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)


@pytest.mark.parametrize("rule", ["soap", "shampoo"])
def test_a_side_that_never_has_a_gradient_costs_no_refresh(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(16, 16)) for _ in range(4)]
    optimizer = RULES[rule][0](weights, precondition_frequency=5)
    firsts: list[int] = []
    compute = optimizer.rule.compute

    def counted(snapshot: Any, group: Any, first: bool, unread: bool = False) -> Any:
        firsts.append(len(snapshot.tensors["factor"]) if first else 0)
        return compute(snapshot, group, first, unread)

    monkeypatch.setattr(optimizer.rule, "compute", counted)
    for step_number in range(30):
        for i, weight in enumerate(weights):
            weight.grad = torch.randn(16, 16) * (i > 0 or step_number >= 22)
        optimizer.step()
        if step_number == 20:
            assert sum(firsts) == 8  # two sides each, in the first round
    assert sum(firsts) == 10  # and those of the last one, when it has had a gradient
