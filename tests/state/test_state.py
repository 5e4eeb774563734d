"""Saving and loading: what comes back, and that asking for it changes nothing."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import hf_emopt

OPTIMIZERS = (hf_emopt.Muon, hf_emopt.NorMuon)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.side = nn.Linear(6, 10, bias=False)
        self.norm, self.dead = nn.LayerNorm(6), nn.Linear(6, 6)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x) + self.side(x))))


def build(cls, dtype: torch.dtype = torch.float32, **kwargs) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(dtype)
    return model, cls(model, lr=0.05, aux_lr=0.01, muon_modules=r"up|down|side|dead", aux_modules="bias", **kwargs)


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = model.up.weight.dtype
    for step in steps:
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def through_disk(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["split", "master", "kahan", "stochastic", "none"])
@pytest.mark.parametrize("saved_at", [0, 1, 4])
def test_resumed_equals_uninterrupted(cls, dtype: torch.dtype, policy: str, saved_at: int) -> None:
    """Bit for bit five steps on, with a layer that never has a gradient, and gradients left on at save."""
    model, optimizer = build(cls, dtype, low_precision_weights=policy)
    train(model, optimizer, range(saved_at))
    checkpoint = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(saved_at, saved_at + 5))
    resumed, again = build(cls, dtype, low_precision_weights=policy)
    resumed.load_state_dict(checkpoint["model"])
    again.load_state_dict(checkpoint["optimizer"])
    train(resumed, again, range(saved_at, saved_at + 5))
    assert_equal(weights(model), weights(resumed))


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_dtypes_survive(cls) -> None:
    """torch's loader would turn float32 state of bfloat16 weights into bfloat16, and int16 as well."""
    model, optimizer = build(cls, torch.bfloat16)
    train(model, optimizer, range(2))
    other, loaded = build(cls, torch.bfloat16)
    loaded.load_state_dict(through_disk(optimizer.state_dict()))
    for p, q in zip(model.parameters(), other.parameters()):
        before, after = optimizer.state.get(p, {}), loaded.state.get(q, {})
        assert {k: v.dtype for k, v in before.items()} == {k: v.dtype for k, v in after.items()}
        for key, value in before.items():
            assert torch.equal(value, after[key])
    assert optimizer.state[model.up.weight]["momentum_buffer"].dtype is torch.float32
    assert optimizer.state[model.up.weight]["weight_low_bits"].dtype is torch.int16


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_asking_for_state_before_the_first_step_changes_nothing(cls) -> None:
    model, optimizer = build(cls)
    other, untouched = build(cls)
    before = weights(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.explain()
    assert_equal(before, weights(model))
    assert optimizer.transform_count == 0
    train(model, optimizer, range(3))
    train(other, untouched, range(3))
    assert_equal(weights(model), weights(other))


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_a_step_on_zero_gradients_at_zero_rate_moves_nothing(cls) -> None:
    """How distributed checkpointing makes an optimizer create its state."""
    model, optimizer = build(cls)
    before = weights(model)
    rates = [g["lr"] for g in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_equal(before, weights(model))
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
    for p in model.parameters():
        assert all(torch.isfinite(v).all() for v in optimizer.state[p].values())


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_loading_twice_into_a_live_optimizer(cls) -> None:
    """Nothing cached outlives a load; the first step after it has a layer without a gradient."""
    model, optimizer = build(cls)
    train(model, optimizer, range(3))
    saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(3, 6))
    wanted = weights(model)
    for _ in range(2):
        train(model, optimizer, range(50, 52))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, range(3, 6))
    assert_equal(wanted, weights(model))


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_a_saved_state_is_not_changed_by_later_steps_after_loading(cls) -> None:
    model, optimizer = build(cls)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    other, second = build(cls)
    second.load_state_dict(saved)
    reference = copy.deepcopy(saved)
    train(other, second, range(2))
    for index, entry in reference["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, saved["state"][index][key])


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_train_on_alike(cls, how: str) -> None:
    model, optimizer = build(cls)
    train(model, optimizer, range(2))
    pair = (model, optimizer)
    other, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert copied.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
    assert str(copied.routes) == str(optimizer.routes)
    train(model, optimizer, range(2, 5))
    train(other, copied, range(2, 5))
    assert_equal(weights(model), weights(other))


def test_groups_hold_plain_values_only() -> None:
    """A checkpoint loads with weights_only=True, and groups survive a deep copy by a wrapper."""
    _, optimizer = build(hf_emopt.Muon, ns_dtype=torch.bfloat16, ns_coefficients=[(3.4445, -4.775, 2.0315)] * 5)
    state = through_disk(optimizer.state_dict())
    for group in state["param_groups"]:
        assert all(isinstance(v, (str, int, float, bool, tuple, list, type(None))) for v in group.values())


def test_state_is_keyed_by_live_parameters_only() -> None:
    model, optimizer = build(hf_emopt.NorMuon)
    train(model, optimizer, range(2))
    assert set(optimizer.state) <= set(model.parameters())


def test_hyperparameters_come_from_the_checkpoint_and_structure_from_the_model() -> None:
    _, optimizer = build(hf_emopt.Muon)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(lr=0.5, momentum=0.8, kind="aux", matrix_views=[], name="stranger")
    del saved["param_groups"][0]["nesterov"]  # as an older version might
    _, other = build(hf_emopt.Muon)
    matrix_views = other.param_groups[0]["units"]
    other.load_state_dict(saved)
    group = other.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.5, 0.8, True)
    assert (group["kind"], group["name"], group["units"]) == ("matrix", "matrix", matrix_views)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda s: s["state"][0].update(momentum_buffer=torch.zeros(3, 3)),
            r"up\.weight: the optimizer state's momentum",
        ),
        (lambda s: s["param_groups"].pop(), "2 parameter groups|parameter groups"),
        (lambda s: s["param_groups"][0]["param_names"].__setitem__(0, "foreign.weight"), "foreign.weight"),
        (lambda s: s["param_groups"][0].update(state_version=99), "version 99"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil, message: str) -> None:
    model, optimizer = build(hf_emopt.Muon)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(v, after["state"][index][k]) for k, v in entry.items())


def test_state_follows_names_when_the_order_changed() -> None:
    model, optimizer = build(hf_emopt.Muon)
    train(model, optimizer, range(2))
    other = Net()
    named = [(n, p) for n, p in other.named_parameters() if p.ndim == 2][::-1]
    reordered = hf_emopt.Muon([{"params": named, "kind": "matrix"}])
    saved = optimizer.state_dict()
    saved["param_groups"] = saved["param_groups"][:1]
    reordered.load_state_dict(saved)
    for name, p in named:
        wanted = optimizer.state[dict(model.named_parameters())[name]].get("momentum_buffer")
        got = reordered.state.get(p, {}).get("momentum_buffer")
        assert (wanted is None and got is None) or torch.equal(wanted, got)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_state_that_is_taken_away_is_not_kept_alive(cls) -> None:
    """Some methods begin anew now and then, by an empty dictionary in place of a parameter's state."""
    model, optimizer = build(cls)
    gone = []
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        gone += [weakref.ref(v) for v in optimizer.state[model.up.weight].values() if v.shape == (10, 6)]
        kept = optimizer.state[model.up.weight]  # so that no other dictionary gets its identity
        optimizer.state[model.up.weight] = {}
        kept.clear()
    train(model, optimizer, range(4, 5))
    gc.collect()
    assert len(gone) == 4
    assert all(ref() is None for ref in gone)
