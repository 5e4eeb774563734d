"""What a step keeps for the next one is not used when it is no longer so: as a fresh optimizer would step, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.kernels.triton import runtime
from hf_emopt.linalg import newton_schulz

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "muon": lambda model, **options: hf_emopt.Muon(model, lr=0.05, weight_decay=0.1, **options),
    "soap": lambda model, **options: hf_emopt.SOAP(model, lr=0.05, precondition_frequency=1, **options),
}


def make(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(7, 6), nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 5)]
    return nn.Sequential(*layers).to(dtype)


def give(model: nn.Module, step: int, leave_out: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = grad if param.requires_grad and name not in leave_out else None


def steps(model: nn.Module, optimizer: Any, numbers: range, leave_out: tuple[str, ...] = ()) -> None:
    for number in numbers:
        give(model, number, leave_out)
        optimizer.step()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state.get(param, {}).items()}
    return found


def moments_replaced(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        state = optimizer.state[param]
        for key in [key for key in state if key in ("momentum_buffer", "exp_avg", "exp_avg_sq")]:
            state[key] = state[key] * 0.5


def states_replaced(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        if not any("." in key for key in optimizer.state[param]):  # state of whole matrices is kept as it was made
            optimizer.state[param] = {key: value.clone() * 1 for key, value in optimizer.state[param].items()}


def states_exchanged(model: nn.Module, optimizer: Any) -> None:
    """Two entries change places: the same tensors under other names."""
    state = optimizer.state[model[0].weight]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]
    state["exp_avg_sq"].abs_()


def loaded(model: nn.Module, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        for key in entries:
            if key in ("momentum_buffer", "exp_avg"):
                entries[key].mul_(0.25)
    optimizer.load_state_dict(state)


def data_replaced(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.data = param.data.clone() * 0.5


def another_format(model: nn.Module, optimizer: Any) -> None:
    """The same numbers in memory of another order, which is no run of elements."""
    for layer in (model[1], model[4]):
        layer.weight.data = layer.weight.data.t().contiguous().t()


def groups_changed(model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["lr"] * 0.3, 0.4
        if "momentum" in group:
            group["momentum"], group["ns_steps"], group["ns_coefficients"] = 0.5, 6, "polar_express"
        if group["kind"] == "aux":
            group["betas"] = (0.5, 0.7)


def frozen(model: nn.Module, optimizer: Any) -> None:
    for param in (*model[1].parameters(), *model[3].parameters()):
        param.requires_grad_(False)


def frozen_and_back(model: nn.Module, optimizer: Any) -> None:
    frozen(model, optimizer)
    steps(model, optimizer, range(10, 12))
    for param in model.parameters():
        param.requires_grad_(True)


def without_some(model: nn.Module, optimizer: Any) -> None:
    steps(model, optimizer, range(10, 12), ("1.weight", "3.bias"))
    steps(model, optimizer, range(12, 13), ("2.weight",))


CHANGES = [
    moments_replaced,
    states_replaced,
    states_exchanged,
    loaded,
    data_replaced,
    another_format,
    groups_changed,
    frozen,
    frozen_and_back,
    without_some,
]


KINDS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("muon", torch.float32, {}),
    ("muon", torch.float32, {"offload_state": "cpu"}),
    ("muon", torch.bfloat16, {}),
    ("muon", torch.bfloat16, {"state_dtype": "bfloat16", "offload_state": "cpu"}),
]


@pytest.mark.parametrize(
    ("rule", "dtype", "options", "change"),
    [(*kind, change) for kind in KINDS for change in CHANGES]
    + [("soap", torch.float32, {}, change) for change in (moments_replaced, loaded, without_some)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_change_between_steps_is_seen(rule: str, dtype: torch.dtype, options: dict[str, Any], change: Any) -> None:
    model = make(dtype)
    optimizer = OPTIMIZERS[rule](model, **options)
    steps(model, optimizer, range(3))
    change(model, optimizer)
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        param.requires_grad_(True)
    fresh = OPTIMIZERS[rule](twin, **options)
    for param, other in zip(model.parameters(), twin.parameters()):
        other.requires_grad_(param.requires_grad)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = everything(twin, fresh)
    steps(model, optimizer, range(20, 22))
    steps(twin, fresh, range(20, 22))
    found, wanted = everything(model, optimizer), everything(twin, fresh)
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    assert any(not torch.equal(before[name], found[name]) for name in before), "nothing was stepped"


def test_a_swapped_parameter_is_stepped() -> None:
    """Wrappers put other Parameters into the groups."""
    model = make(torch.float32)
    optimizer = OPTIMIZERS["muon"](model)
    steps(model, optimizer, range(2))
    new = nn.Parameter(model[1].weight.detach().clone())
    group = next(g for g in optimizer.param_groups if any(p is model[1].weight for p in g["params"]))
    place = next(i for i, p in enumerate(group["params"]) if p is model[1].weight)
    group["params"][place] = new
    optimizer.state[new] = optimizer.state.pop(model[1].weight)
    old, model[1].weight = model[1].weight, new
    twin = copy.deepcopy(model)
    fresh = OPTIMIZERS["muon"](twin)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = old.detach().clone()
    steps(model, optimizer, range(5, 7))
    steps(twin, fresh, range(5, 7))
    assert torch.equal(old, before)
    for param, other in zip(model.parameters(), twin.parameters()):
        assert torch.equal(param, other)


def test_a_variable_is_read_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HF_EMOPT_OF_A_TEST"
    assert runtime.variable(name) == ""
    assert runtime.variable(name, "else") == "else"
    monkeypatch.setenv(name, "gr\u00fcn")
    assert runtime.variable(name, "else") == "gr\u00fcn"
    monkeypatch.setenv(name, "")
    assert runtime.variable(name, "else") == ""
    monkeypatch.delenv(name)
    assert runtime.variable(name) == ""
    monkeypatch.setattr(runtime, "os", SimpleNamespace(environ={name: "plain"}))
    assert runtime.variable(name) == "plain"
    assert runtime.variable("HF_EMOPT_OF_NO_TEST", "else") == "else"


def test_arguments_of_newton_schulz_are_checked_in_every_call() -> None:
    x = torch.randn(4, 6)
    right = newton_schulz(x, 5, "jordan")
    for _ in range(2):
        with pytest.raises(TypeError, match="ns_steps"):
            newton_schulz(x, True, "jordan")
        with pytest.raises(TypeError, match="ns_steps"):
            newton_schulz(x, [5], "jordan")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="unknown coefficient set"):
            newton_schulz(x, 5, "jordam")
        with pytest.raises(ValueError, match="method must be"):
            newton_schulz(x, 5, "jordan", method="Gram")  # type: ignore[arg-type]
        assert torch.equal(newton_schulz(x, 5, "jordan"), right)
        assert not torch.equal(newton_schulz(x, 4, "jordan"), right)
        triple = [3.4445, -4.7750, 2.0315]
        assert torch.equal(newton_schulz(x, 5, triple), newton_schulz(x, 5, tuple(triple)))
