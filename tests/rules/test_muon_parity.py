"""Muon against other implementations: weights after ten steps, relative to how far they moved."""

from __future__ import annotations

import itertools

import pytest
import torch
from references import (
    keller_adam_step,
    keller_step,
    moonlight_adam_step,
    moonlight_step,
    normuon_step,
    zeropower_via_newtonschulz5,
)
from torch import Tensor, nn

import hf_emopt

SHAPES = ((32, 32), (48, 20), (20, 48), (1, 16), (64, 33), (48, 20))
STEPS, LR, MOMENTUM = 10, 0.02, 0.95


def start(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [0.1 * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [1e-2 * torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def displacement_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Largest distance between two trajectories over the length of one, across matrices."""
    return max(
        float((a.detach() - b.detach()).norm() / (b.detach() - w).norm()) for a, b, w in zip(ours, theirs, start())
    )


def matrices(params: list[Tensor]) -> list[dict]:
    """Says that all are matrices: left to itself, routing takes a single row for a vector."""
    return [{"params": params, "kind": "matrix"}]


def run_optimizer(make, steps: int = STEPS) -> list[Tensor]:
    params = [nn.Parameter(w) for w in start()]
    optimizer = make(params)
    for step in range(steps):
        for p, g in zip(params, gradients(step)):
            p.grad = g
        optimizer.step()
    return params


def run_reference(step_fn, **hyper) -> list[Tensor]:
    params, states = start(), [{} for _ in SHAPES]
    for step in range(STEPS):
        for p, g, s in zip(params, gradients(step), states):
            step_fn(p, g, s, **hyper)
    return params


TORCH_CASES = list(itertools.product(("original", "match_rms_adamw"), (True, False), (0.0, 0.1)))


@pytest.mark.parametrize(("adjust_lr_fn", "nesterov", "wd"), TORCH_CASES)
def test_torch_muon_in_bfloat16(adjust_lr_fn: str, nesterov: bool, wd: float) -> None:
    """compat="torch" against torch.optim.Muon as it is: bfloat16 Newton-Schulz on both sides."""
    shared = {"lr": LR, "momentum": MOMENTUM, "nesterov": nesterov, "weight_decay": wd, "adjust_lr_fn": adjust_lr_fn}
    theirs = run_optimizer(lambda ps: torch.optim.Muon(ps, **shared))
    ours = run_optimizer(lambda ps: hf_emopt.Muon(matrices(ps), compat="torch", **shared))
    assert displacement_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize(("adjust_lr_fn", "nesterov", "wd"), TORCH_CASES)
def test_torch_muon_in_float32(adjust_lr_fn: str, nesterov: bool, wd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own arithmetic against torch.optim.Muon with its orthogonalization done in float32."""
    import torch.optim._muon as torch_muon

    monkeypatch.setattr(
        torch_muon,
        "_zeropower_via_newtonschulz",
        # Its floor of 1e-7 is far below these norms and acts as a minimum, so it changes nothing.
        lambda g, coefficients, steps, eps: zeropower_via_newtonschulz5(g, steps, torch.float32, eps=0.0),
    )
    shared = {"lr": LR, "momentum": MOMENTUM, "nesterov": nesterov, "weight_decay": wd, "adjust_lr_fn": adjust_lr_fn}
    theirs = run_optimizer(lambda ps: torch.optim.Muon(ps, **shared))
    ours = run_optimizer(lambda ps: hf_emopt.Muon(matrices(ps), ns_dtype="float32", **shared))
    assert displacement_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize(("nesterov", "wd"), itertools.product((True, False), (0.0, 0.1)))
@pytest.mark.parametrize(("name", "reference"), [("keller", keller_step), ("moonlight", moonlight_step)])
def test_reference_implementations(name: str, reference, nesterov: bool, wd: float) -> None:
    theirs = run_reference(reference, lr=LR, wd=wd, momentum=MOMENTUM, nesterov=nesterov)
    ours = run_optimizer(
        lambda ps: hf_emopt.Muon(
            matrices(ps), lr=LR, momentum=MOMENTUM, nesterov=nesterov, weight_decay=wd, compat=name
        )
    )
    assert displacement_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_normuon_reference(wd: float) -> None:
    theirs = run_reference(normuon_step, lr=LR, wd=wd, momentum=MOMENTUM, beta2=0.9)
    ours = run_optimizer(
        lambda ps: hf_emopt.NorMuon(matrices(ps), lr=LR, momentum=MOMENTUM, weight_decay=wd, beta2=0.9)
    )
    assert displacement_error(ours, theirs) <= 1e-5


@pytest.mark.parametrize(
    ("compat", "reference"),
    [(None, keller_adam_step), ("keller", keller_adam_step), ("moonlight", moonlight_adam_step)],
)
def test_auxiliary_adamw(compat: str | None, reference) -> None:
    """A gradient as small as eps tells apart where eps stands."""
    eps, betas = 1e-3, (0.9, 0.95)
    theirs, states = [w.clone() for w in start()], [{} for _ in SHAPES]
    params = [nn.Parameter(w) for w in start()]
    optimizer = hf_emopt.Muon(
        [{"params": params, "kind": "aux"}],
        lr=LR,
        weight_decay=0.1,
        compat=compat,
        aux_betas=betas,
        aux_eps=eps,
        allow_no_matrices=True,
    )
    for step in range(STEPS):
        for p, q, g, s in zip(params, theirs, gradients(step), states):
            p.grad = g
            reference(q, g, s, lr=LR, wd=0.1, betas=betas, eps=eps)
        optimizer.step()
    assert displacement_error(params, theirs) <= 1e-5


def test_the_parity_tests_can_fail() -> None:
    """The three implementations differ by far more than the bound that separates them from ours."""
    keller = run_reference(keller_step, lr=LR, wd=0.1, momentum=MOMENTUM, nesterov=True)
    plain = run_reference(keller_step, lr=LR, wd=0.1, momentum=MOMENTUM, nesterov=False)
    moonlight = run_reference(moonlight_step, lr=LR, wd=0.1, momentum=MOMENTUM, nesterov=True)
    assert displacement_error(keller, plain) > 1e-2
    assert displacement_error(keller, moonlight) > 1e-2
