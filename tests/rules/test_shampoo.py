"""Shampoo against a reference written out, and against what it becomes when its preconditioner is trivial."""

from __future__ import annotations

import pytest
import torch
from shampoo_reference import ReferenceShampoo
from torch import Tensor, nn

import hf_emopt
from hf_emopt.rules.base import RefreshClock
from hf_emopt.rules.shampoo import ShampooRule

BASE = {
    "betas": (0.9, 0.99), "epsilon": 1e-6, "max_preconditioner_dim": 4, "precondition_frequency": 3,
    "start_preconditioning_step": 2, "grafting": "adam", "grafting_beta2": 0.99, "grafting_epsilon": 1e-8,
    "bias_correction": True, "exponent_override": None, "momentum": 0.0, "nesterov": False, "refresh": "synchronous",
    "root_solver": "eigh", "relative_epsilon": 0.0,
    "root_dtype": "float32", "oversize": "block", "kl": False,
    "matmul_precision": "highest", "factor_storage": "float32", "tolerated_failures": 3, "weight_decay": 0.0,
    "weight_decay_type": "decoupled",
}  # fmt: skip


def run_rule(shape: tuple[int, ...], grads: list[Tensor], group: dict) -> list[Tensor]:
    """The directions of the rule for a batch of two tensors, of which the first is returned."""
    rule = ShampooRule()
    rule.validate(group)
    state = rule.init_matrix_state((2, *shape), group, torch.empty(0, dtype=torch.float64))
    directions = []
    for t, g in enumerate(grads, start=1):
        x = torch.stack([g, g.flip(0)])
        directions.append(rule.transform(x, state, group, None, RefreshClock((t, t)))[0])
    return directions


def gradients(shape: tuple[int, ...], count: int = 11) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]


def reference(shape: tuple[int, ...], grads: list[Tensor], group: dict) -> list[Tensor]:
    model = ReferenceShampoo(
        shape, group["max_preconditioner_dim"], group["betas"], group["epsilon"], group["precondition_frequency"],
        group["start_preconditioning_step"], group["grafting"], graft_beta2=group["grafting_beta2"],
        graft_eps=group["grafting_epsilon"], exponent=group["exponent_override"], momentum=group["momentum"],
        nesterov=group["nesterov"], bias_correction=group["bias_correction"], kl=group["kl"],
        one_sided=group["oversize"] == "one_sided",
    )  # fmt: skip
    return [model.step(g) for g in grads]


def assert_parity(shape: tuple[int, ...], **changes) -> None:
    group = BASE | changes
    grads = gradients(shape)
    for ours, theirs in zip(run_rule(shape, grads, group), reference(shape, grads, group), strict=True):
        assert (ours - theirs).norm() <= 1e-8 * theirs.norm()


@pytest.mark.parametrize("shape", [(9,), (6, 9), (3, 5, 4), (3, 2, 5, 4)])
@pytest.mark.parametrize("grafting", ["adam", "rmsprop", "adagrad", "sgd", "none"])
def test_orders_and_grafting(shape: tuple[int, ...], grafting: str) -> None:
    assert_parity(shape, grafting=grafting)


@pytest.mark.parametrize("shape", [(9,), (6, 9), (3, 5, 4)])
@pytest.mark.parametrize("exponent", [0.25, 0.5, 0.2, 1.0])
def test_exponents(shape: tuple[int, ...], exponent: float) -> None:
    assert_parity(shape, exponent_override=exponent)


@pytest.mark.parametrize(
    "changes",
    [
        {"betas": (0.9, 1.0), "grafting_beta2": 0.9},
        {"betas": (0.0, 0.99)},
        {"bias_correction": False},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"kl": True},
        {"kl": True, "grafting": "none"},
        {"kl": True, "grafting": "none", "exponent_override": 0.4, "bias_correction": False},
        {"oversize": "one_sided", "max_preconditioner_dim": 7},
        {"max_preconditioner_dim": 100},
        {"start_preconditioning_step": 5, "precondition_frequency": 2},
    ],
)
def test_variants(changes: dict) -> None:
    assert_parity((6, 9), **changes)


def test_exponent_by_order() -> None:
    """A matrix with one side above the limit has one preconditioned dimension."""
    grads = gradients((6, 9))
    sided = BASE | {"oversize": "one_sided", "max_preconditioner_dim": 7}
    by_order = run_rule((6, 9), grads, sided | {"exponent_override": {1: 0.3, 2: 9.0}})
    plain = run_rule((6, 9), grads, sided | {"exponent_override": 0.3})
    assert all(torch.equal(a, b) for a, b in zip(by_order, plain))


@pytest.mark.parametrize(
    ("grafting", "make"),
    [
        ("sgd", lambda ps: torch.optim.SGD(ps, lr=0.1)),
        ("adagrad", lambda ps: torch.optim.Adagrad(ps, lr=0.1, eps=1e-8)),
        ("rmsprop", lambda ps: torch.optim.RMSprop(ps, lr=0.1, alpha=0.9, eps=1e-8)),
        ("adam", lambda ps: torch.optim.Adam(ps, lr=0.1, betas=(0.8, 0.9), eps=1e-8)),
        ("adamw", lambda ps: torch.optim.AdamW(ps, lr=0.1, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.3)),
    ],
)
def test_without_preconditioner_it_is_the_grafted_method(grafting: str, make) -> None:
    """Before start_preconditioning_step the update is that of SGD, AdaGrad, RMSprop, Adam and AdamW."""
    start = [torch.randn(6, 9, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)]
    ours, theirs = ([nn.Parameter(w.clone()) for w in start] for _ in range(2))
    first = 0.8 if grafting in ("adam", "adamw") else 0.0
    optimizer = hf_emopt.Shampoo(
        ours,
        lr=0.1,
        betas=(first, 0.9),
        grafting=grafting.removesuffix("w"),
        weight_decay=0.3 if grafting == "adamw" else 0.0,
        start_preconditioning_step=1000,
    )
    expected = make(theirs)
    for _ in range(6):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step(), expected.step()
    for p, q, w in zip(ours, theirs, start):
        assert (p - q).norm() <= 1e-8 * (q - w).norm()


def test_identity_factors_leave_the_direction() -> None:
    """With one element a side the root is a positive number, and grafting makes even that vanish."""
    grads = gradients((3, 3))
    group = BASE | {"max_preconditioner_dim": 1, "grafting": "sgd"}
    sgd = run_rule((3, 3), grads, group | {"start_preconditioning_step": 1000})
    for a, b in zip(run_rule((3, 3), grads, group), sgd):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_iteration_agrees_with_eigh() -> None:
    """With the same relative epsilon, also on factors of rank one, and it does not fall back for good."""
    for rank in (1, 6):
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.randn(11, n, rank, generator=generator, dtype=torch.float64) for n in (6, 9))
        grads = list(left @ right.mT)
        group = BASE | {"start_preconditioning_step": 1, "max_preconditioner_dim": 16, "relative_epsilon": 1e-6}
        by_eigh, by_products = (run_rule((6, 9), grads, group | {"root_solver": s}) for s in ("eigh", "coupled_newton"))
        for a, b in zip(by_eigh, by_products):
            assert (a - b).norm() <= 1e-4 * a.norm()


def test_a_power_of_minus_one_quarter() -> None:
    """One gradient diag(2, 3, 5), no averaging: L = R = G G^T, so L^-1/4 G R^-1/4 is the identity."""
    g = torch.diag(torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64))
    group = BASE | {
        "betas": (0.0, 1.0), "grafting": "none", "start_preconditioning_step": 1, "epsilon": 0.0, "bias_correction": False,
    }  # fmt: skip
    (direction,) = run_rule((3, 3), [g], group)
    torch.testing.assert_close(direction, torch.eye(3, dtype=torch.float64), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("decoupled", 0.05 * 0.2),
        ("corrected", 0.05 * 0.2 * 0.05 / 0.1),
        ("independent", 0.2 * 0.05 / 0.1),
        ("l2", None),
    ],
)
def test_four_kinds_of_decay(kind: str, lost: float | None) -> None:
    """Peak learning rate 0.1, now 0.05, decay 0.2, and a gradient of zero."""
    w = torch.randn(5, 4, dtype=torch.float64)
    p = nn.Parameter(w.clone())
    optimizer = hf_emopt.Shampoo(
        [p], lr=0.1, weight_decay=0.2, weight_decay_type=kind, grafting="sgd", betas=(0.0, 0.9)
    )
    optimizer.param_groups[0]["lr"] = 0.05
    p.grad = torch.zeros_like(p)
    optimizer.step()
    expected = w * (1 - lost) if lost is not None else w - 0.05 * 0.2 * w
    torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("solver", ["eigh", "coupled_newton"])
def test_a_root_beyond_float16_is_a_failure_where_roots_are_kept_so(solver: str, later: bool) -> None:
    """Of gradients of 1e-6 a factor has 1e-12 on its diagonal, and its root of -1/2 a million; weights were NaN by it."""
    param = nn.Parameter(torch.ones(8, 12))
    optimizer = hf_emopt.KLShampoo(
        [param], lr=1e-3, precondition_frequency=2, root_dtype="float16", root_solver=solver, tolerated_failures=2
    )
    optimizer.rule.read_later = frozenset({"cpu"} if later else ())
    generator = torch.Generator().manual_seed(0)

    def steps(count: int) -> None:
        for _ in range(count):
            param.grad = torch.randn(param.shape, generator=generator) * 1e-6
            optimizer.step()
            assert param.isfinite().all()
            assert all(v.isfinite().all() for k, v in optimizer.state[param].items() if k.startswith("root"))

    steps(2)
    assert optimizer.rule.failures > 0
    with pytest.raises(RuntimeError, match="float16 ends at 65504"):
        steps(8)
