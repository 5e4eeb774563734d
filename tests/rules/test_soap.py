"""SOAP against the reference written out, and what the default does about spikes and lost steps."""

from __future__ import annotations

import pytest
import torch
from soap_reference import ReferenceSoap
from torch import Tensor, nn

import hf_emopt


def run(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, grads: list[list[Tensor]]) -> None:
    for gs in grads:
        for p, g in zip(params, gs):
            p.grad = g.clone()
        optimizer.step()


def problem(shapes, steps: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator, dtype=dtype) for s in shapes]
    mixers = [[torch.randn(n, n, generator=generator, dtype=dtype) for n in s] for s in shapes]
    grads = []
    for _ in range(steps):
        gs = []
        for s, (a, b) in zip(shapes, mixers):
            gs.append(a @ torch.randn(s, generator=generator, dtype=dtype) @ b)
        grads.append(gs)
    return start, grads


@pytest.mark.parametrize("freq", [1, 3, 10])
@pytest.mark.parametrize("max_dim", [10000, 8])
@pytest.mark.parametrize("shampoo_beta", [None, 0.8])
def test_the_papers_reference_in_float64(freq: int, max_dim: int, shampoo_beta: float | None) -> None:
    """50 steps with refreshes among them, decay, two matrices in one batch and sides above the limit."""
    shapes = ((6, 9), (6, 9), (7, 5))
    start, grads = problem(shapes, 51)
    ours = [nn.Parameter(w.clone()) for w in start]
    optimizer = hf_emopt.SOAP(
        ours, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, precondition_frequency=freq, max_preconditioner_dim=max_dim,
        shampoo_beta=shampoo_beta, refresh="synchronous", compat="paper",
    )  # fmt: skip
    run(ours, optimizer, grads[:1])
    bases = [{d: optimizer.state[p].get(f"basis.0.{d}.0") for d in range(2)} for p in ours]
    bases = [{d: None if q is None else q[0, 0].clone() for d, q in both.items()} for both in bases]
    run(ours, optimizer, grads[1:])
    for i, (w, p) in enumerate(zip(start, ours)):
        theirs = w.clone()
        model = ReferenceSoap(shapes[i], 0.02, (0.9, 0.95), 1e-8, 0.1, freq, max_dim, shampoo_beta)
        model.step(theirs, grads[0][i])
        for d, a in enumerate(model.gg):
            if a is not None:
                # The first factor may have a null space, where any basis is an eigenbasis: go on from ours.
                q = bases[i][d]
                turned = q.T @ a @ q
                assert (turned - torch.diag(torch.linalg.eigvalsh(a).flip(0))).norm() <= 1e-12 * a.norm()
                model.q[d] = q
        for gs in grads[1:]:
            model.step(theirs, gs[i])
        assert (p - theirs).norm() <= 1e-8 * (theirs - w).norm()


def test_the_papers_first_step_moves_nothing() -> None:
    (w,), grads = problem(((6, 9),), 1)
    p = nn.Parameter(w.clone())
    run([p], hf_emopt.SOAP([p], compat="paper", refresh="synchronous", weight_decay=0.5), grads)
    assert torch.equal(p, w)


def test_by_default_no_step_is_lost() -> None:
    (w,), grads = problem(((6, 9),), 1)
    p = nn.Parameter(w.clone())
    run([p], hf_emopt.SOAP([p], lr=0.1, weight_decay=0.0), grads)
    torch.testing.assert_close((w - p.detach()).abs(), torch.full_like(w, 0.1), rtol=1e-5, atol=0)  # Adam's first step


def test_in_the_identity_basis_it_is_adam() -> None:
    """Sides of one element have nothing to turn."""
    start, grads = problem(((1, 1),), 30)
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    group = [{"params": ours, "kind": "matrix"}]
    run(ours, hf_emopt.SOAP(group, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), grads)
    run(theirs, torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1), grads)
    torch.testing.assert_close(ours[0].detach(), theirs[0].detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", ["orthogonal_iteration", "qr", "eigh"])
def test_bases_stay_orthogonal_and_diagonalize(method: str) -> None:
    """After many refreshes on a stationary problem the factor is nearly diagonal in its basis."""
    start, grads = problem(((12, 16),), 200, torch.float32)
    p = nn.Parameter(start[0].clone())
    optimizer = hf_emopt.SOAP([p], lr=1e-3, precondition_frequency=5, shampoo_beta=0.99, basis_method=method)
    run([p], optimizer, grads)
    state = optimizer.state[p]
    for d in range(2):
        q, a = state[f"basis.0.{d}.0"][0, 0], state[f"factor.0.{d}.0"][0, 0]
        torch.testing.assert_close(q.T @ q, torch.eye(len(q)), rtol=0, atol=1e-5)
        turned = q.T @ a @ q
        off = (turned - torch.diag(turned.diagonal())).norm() / a.norm()
        plain = (a - torch.diag(a.diagonal())).norm() / a.norm()
        assert off < 0.15 * plain


@pytest.mark.parametrize("rank", [None, 4, 1])
@pytest.mark.parametrize("kl", [False, True])
def test_steps_stay_bounded_when_the_basis_is_refreshed_every_step(rank: int | None, kl: bool) -> None:
    """Other implementations take steps of ten to seventy times the learning rate here."""
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(24, 40))
    optimizer = hf_emopt.SOAP([p], lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, precondition_frequency=1, kl=kl)
    largest = 0.0
    for _ in range(25):
        before = p.detach().clone()
        if rank is None:
            p.grad = torch.randn(24, 40, generator=generator)
        else:
            p.grad = torch.randn(24, rank, generator=generator) @ torch.randn(rank, 40, generator=generator)
        optimizer.step()
        largest = max(largest, float((p.detach() - before).square().mean().sqrt()))
    assert largest <= 1.0 + 1e-4


def test_moments_are_carried_through_a_turn() -> None:
    """The first moment is the same vector before and after a refresh; the second keeps its sum."""
    start, grads = problem(((6, 9),), 8, torch.float64)
    p = nn.Parameter(start[0].clone())
    optimizer = hf_emopt.SOAP([p], precondition_frequency=100, refresh="synchronous")
    run([p], optimizer, grads)
    rule, group = optimizer.rule, optimizer.param_groups[0]
    storage = optimizer.context.store.by_batch[0, 0]
    (block,) = rule.blocks(torch.zeros(1, 6, 9, dtype=torch.float64), storage, group)

    def original(name: str) -> Tensor:
        q0, q1 = block.tensor("basis", 0), block.tensor("basis", 1)
        return q0 @ block.tensor(name) @ q1.mT

    before, mass = original("exp_avg").clone(), block.tensor("exp_avg_sq").sum().clone()
    old = block.tensor("basis", 0).clone()
    factor_dims = [rule.factor_dim(block, d, [0], order=2) for d in range(2)]
    rule.refresh_now(factor_dims, group, first=False, ok=None)
    assert (block.tensor("basis", 0) - old).norm() > 0.1
    torch.testing.assert_close(original("exp_avg"), before, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(block.tensor("exp_avg_sq").sum(), mass, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compat": "paper"}, "refresh='synchronous'"),
        ({"compat": "paper", "refresh": "synchronous", "kl": True}, "no KL"),
        ({"precondition_frequency": 0}, "precondition_frequency=0"),
        ({"max_update_rms": 0.0}, "max_update_rms"),
        ({"refresh": "later"}, "refresh='later'"),
        ({"factor_storage": "int3"}, "factor_storage='int3'"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_bad_arguments_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_emopt.SOAP([nn.Parameter(torch.zeros(3, 3))], **changes)
