"""What only a GPU can show: no host synchronization, agreement with the CPU, 16-bit products, background streams."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import hf_emopt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RULES = {
    "muon": (hf_emopt.Muon, {"ns_dtype": "float32"}),
    "normuon": (hf_emopt.NorMuon, {"ns_dtype": "float32"}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 3}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 3, "root_solver": "eigh"}),
    "kl_shampoo": (hf_emopt.KLShampoo, {"precondition_frequency": 3, "root_solver": "eigh"}),
}
SHAPES = ((96, 64), (64, 96), (96, 64), (40, 72), (64,))


def make(rule: str, device: str, dtype: torch.dtype = torch.float32, shapes=SHAPES, **extra):
    cls, options = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter((0.1 * torch.randn(s, generator=generator)).to(device, dtype)) for s in shapes]
    return params, cls(params, lr=0.01, weight_decay=0.1, **{**options, **extra})


def gradients(step: int, params: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def run(params, optimizer, steps: range) -> None:
    for step in steps:
        gradients(step, params)
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_the_gpu_agrees_with_the_cpu(rule: str) -> None:
    # The first factor of a side that is longer than the other has a null space, in which every basis is an eigenbasis.
    shapes = ((64, 64), (96, 96), (64, 64), (64,)) if rule == "soap" else SHAPES
    (cpu, a), (gpu, b) = make(rule, "cpu", shapes=shapes), make(rule, "cuda", shapes=shapes)
    start = [p.detach().clone() for p in cpu]
    run(cpu, a, range(8)), run(gpu, b, range(8))
    for p, q, w in zip(cpu, gpu, start):
        # Eigenvectors of a random factor amplify rounding; Newton-Schulz does not.
        bound = 1e-5 if "muon" in rule else 1e-3
        assert (p - q.cpu()).norm() <= bound * (p - w).norm()


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_muon_in_bfloat16(adjust_lr_fn: str, nesterov: bool) -> None:
    shared = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    matrices = [s for s in SHAPES if len(s) == 2]
    start = [0.1 * torch.randn(s, device="cuda") for s in matrices]
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    pair = (hf_emopt.Muon(ours, compat="torch", **shared), torch.optim.Muon(theirs, **shared))
    for _ in range(10):
        for p, q in zip(ours, theirs):
            p.grad = 1e-2 * torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for p, q, w in zip(ours, theirs, start):
        assert (p - q).norm() <= 1e-5 * (q - w).norm()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_does_not_wait_for_the_device(rule: str, dtype: torch.dtype) -> None:
    """Apart from refreshes, which read one small tensor: here those are over before the steps that are watched."""
    params, optimizer = make(rule, "cuda", dtype, **({} if "muon" in rule else {"precondition_frequency": 100}))
    if "muon" not in rule:
        optimizer.param_groups[0]["refresh"] = "synchronous"
        if "shampoo" in rule:
            optimizer.param_groups[0]["start_preconditioning_step"] = 1
    run(params, optimizer, range(2))
    gradients(2, params)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", RULES)
def test_a_bad_gradient_skips_the_step_on_the_device(rule: str) -> None:
    params, optimizer = make(rule, "cuda")
    run(params, optimizer, range(4))
    before = [p.detach().clone() for p in params]
    state = copy.deepcopy({i: dict(optimizer.state[p]) for i, p in enumerate(params)})
    gradients(4, params)
    params[1].grad[3, 3] = math.nan
    optimizer.step()
    assert all(torch.equal(a, p) for a, p in zip(before, params))
    for i, p in enumerate(params):
        for key, value in state[i].items():
            if key != "rounds":
                torch.testing.assert_close(optimizer.state[p][key], value, rtol=1e-6, atol=1e-7)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_resumed_equals_uninterrupted(rule: str, dtype: torch.dtype) -> None:
    params, optimizer = make(rule, "cuda", dtype)
    run(params, optimizer, range(4))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in params]
    run(params, optimizer, range(4, 8))
    others, loaded = make(rule, "cuda", dtype)
    for p, w in zip(others, weights):
        p.data.copy_(w)
    loaded.load_state_dict(saved)
    run(others, loaded, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(params, others))


@pytest.mark.parametrize("coefficients", ["jordan", "polar_express", "you", "cans", "aol"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_orthogonalization(coefficients: str, dtype: str) -> None:
    from hf_emopt.linalg import NS_COEFFICIENTS

    chosen = NS_COEFFICIENTS[coefficients]
    x = torch.randn(4, 256, 1024, device="cuda")
    out = hf_emopt.newton_schulz(x, chosen.default_steps, coefficients, getattr(torch, dtype)).float()
    sigma = torch.linalg.svdvals(out)
    low, high = chosen.singular_value_band
    slack = 0.02 if dtype == "bfloat16" else 0.005
    assert sigma.min() >= low - slack
    assert sigma.max() <= high + slack
