"""``lora="joint"``: the update of a pair of factors is that of their product, whatever basis they are written in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters_zoo import PAIRS, adapters_zoo
from torch import Tensor, nn
from zoo import assert_close, full, give_gradients

import hf_emopt
from hf_emopt.linalg.newton_schulz import newton_schulz
from hf_emopt.routing.lora import unpack_adapter
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.packing import unpack_matrix_views
from hf_emopt.rules.lora_pairs import inverse_sqrt

OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "lora": "joint", "ns_dtype": "float64"}
RULES = [hf_emopt.Muon, hf_emopt.NorMuon]


def pairs_of(optimizer: Any) -> list[tuple[str, tuple[nn.Parameter, MatrixView], tuple[nn.Parameter, MatrixView]]]:
    """Name of A, then A and B, each with its matrix view of ``rank`` columns."""
    (group,) = optimizer.param_groups
    by_name = {
        name: (param, unpack_matrix_views(matrix_views)[0], unpack_adapter(adapter))
        for name, param, matrix_views, adapter in zip(
            group["param_names"], group["params"], group["units"], group["adapters"]
        )
    }
    return [
        (name, (param, matrix_view), by_name[adapter.partner][:2])
        for name, (param, matrix_view, adapter) in by_name.items()
        if adapter.side == "A"
    ]


def products(optimizer: Any) -> dict[str, Tensor]:
    return {
        name: matrix_view_b.extract(b.detach()) @ matrix_view_a.extract(a.detach()).mT
        for name, (a, matrix_view_a), (b, matrix_view_b) in pairs_of(optimizer)
    }


def change(tensor: Tensor, matrix_view: MatrixView, basis: Tensor) -> None:
    """Multiplies the columns of all matrices by ``basis``, in place."""
    matrix_view.insert(tensor, matrix_view.extract(tensor.clone()) @ basis)


def run(cls: Any, basis: Tensor | None, start: bool, steps: int = 10) -> list[dict[str, Tensor]]:
    """Products after each step; with a basis, of ``A <- R^-1 A``, ``B <- B R`` under the gradients that go with it."""
    model = adapters_zoo(start=start, dtype=torch.float64)
    optimizer = cls(model, **OPTIONS)
    found = []
    for _, (a, matrix_view_a), (b, matrix_view_b) in pairs_of(optimizer):
        if basis is not None:
            change(a.data, matrix_view_a, torch.linalg.inv(basis).mT)
            change(b.data, matrix_view_b, basis)
    for step in range(steps):
        give_gradients(model, step)
        for _, (a, matrix_view_a), (b, matrix_view_b) in pairs_of(optimizer):
            assert a.grad is not None
            assert b.grad is not None
            if basis is not None:
                change(a.grad, matrix_view_a, basis)
                change(b.grad, matrix_view_b, torch.linalg.inv(basis).mT)
        optimizer.step()
        found.append(products(optimizer))
    assert optimizer.transform_count == PAIRS * steps == optimizer.routes.matrix_count * steps
    return found


@pytest.mark.parametrize("start", [False, True], ids=["random", "zero"])
@pytest.mark.parametrize("cls", RULES)
def test_products_do_not_depend_on_the_basis(cls: Any, start: bool) -> None:
    """Any invertible R, for adapters of every kind, along ten steps with momentum and decay; also from B = 0 on."""
    torch.manual_seed(3)
    basis = torch.randn(3, 3, dtype=torch.float64)
    assert 3.0 < float(torch.linalg.cond(basis)) < 100.0
    for wanted, found in zip(run(cls, None, start), run(cls, basis, start), strict=True):
        assert_close(found, wanted, 1e-11)


def test_separate_factors_do_depend_on_it() -> None:
    """The test above can fail: the same change of basis moves the products of ``lora="separate"``."""
    model = nn.Sequential(nn.Linear(3, 17, bias=False), nn.Linear(40, 3, bias=False)).double()
    start = [p.detach().clone() for p in model.parameters()]
    grads = [torch.randn_like(p) for p in model.parameters()]
    basis = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    moved = []
    for r in (torch.eye(3, dtype=torch.float64), basis):
        b, a = model.parameters()
        b.data, a.data = start[0] @ r, torch.linalg.solve(r, start[1])
        b.grad, a.grad = grads[0] @ torch.linalg.inv(r).mT, r.mT @ grads[1]
        hf_emopt.Muon(model, lr=0.1, ns_dtype="float64", muon_modules=["0", "1"]).step()
        moved.append(b.detach() @ a.detach())
    assert float((moved[0] - moved[1]).norm() / moved[0].norm()) > 1e-3


def test_the_update_is_the_formula_with_any_square_root() -> None:
    """``-c/s msign(M L^-T) L^-1`` with any ``L L^T`` the Gram matrix: here Cholesky's, the symmetric one in the rule."""
    model = adapters_zoo(dtype=torch.float64)
    lr, reach = OPTIONS["lr"], 0.1
    optimizer = hf_emopt.Muon(model, **{**OPTIONS, "weight_decay": 0.0, "nesterov": False, "momentum": 0.0})
    give_gradients(model, 0)
    (picked,) = [pair for pair in pairs_of(optimizer) if "linears.a" in pair[0]]
    _, (a, _), (b, _) = picked
    assert a.grad is not None
    assert b.grad is not None
    before, grads = (a.detach().clone(), b.detach().clone()), (a.grad.clone(), b.grad.clone())
    optimizer.step()

    scaling, size = 2.0, 0.2 * 33**0.5 / 2
    gram_a = before[0] @ before[0].mT
    delta = lr * size / reach
    gram_b = scaling**2 * before[1].mT @ before[1] + delta**2 * torch.linalg.inv(gram_a)
    steps = []
    for message, gram in ((grads[1], gram_a), (grads[0].mT, gram_b)):
        inverse = torch.linalg.inv(torch.linalg.cholesky(gram))
        steps.append(newton_schulz(message @ inverse.mT, 5, "jordan", torch.float64) @ inverse)
    torch.testing.assert_close(b.detach(), before[1] - lr * size / scaling * steps[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(a.detach(), before[0] - lr * size * steps[1].mT, rtol=1e-9, atol=1e-12)


def test_a_step_is_at_most_that_of_a_whole_matrix() -> None:
    """The first-order update of the weight, ``s (dB A + B dA)``, has no singular value above ``0.2 lr sqrt(max(m, n))``."""
    model = adapters_zoo(dtype=torch.float64)
    optimizer = hf_emopt.Muon(
        model, **{**OPTIONS, "weight_decay": 0.0, "lr": 1e-6, "ns_steps": 12, "ns_coefficients": "polar_express"}
    )
    before = products(optimizer)
    give_gradients(model, 0)
    optimizer.step()
    for name, after in products(optimizer).items():
        moved = 2.0 * (after - before[name])  # lora_alpha / r
        largest = torch.linalg.matrix_norm(moved, ord=2).max()
        assert 0.5 <= float(largest) / (1e-6 * 0.2 * max(after.shape[1:]) ** 0.5) <= 1.02, name


def test_what_starts_at_zero_moves_and_the_other_factor_waits() -> None:
    """B = 0: the gradient of A is exactly zero. A stays, nothing is NaN, and from then on A changes by a tenth at most."""
    torch.manual_seed(0)
    model = adapters_zoo(start=True)
    optimizer = hf_emopt.Muon(model, lr=1e-3, weight_decay=0.0, lora="joint")
    still = {}
    for name, (a, _), (b, _) in pairs_of(optimizer):
        waits, starts = (b, a) if "embedding" in name else (a, b)
        assert not starts.any(), name
        assert waits.any(), name
        still[name] = waits
    for step in range(4):
        before = {name: waits.detach().clone() for name, waits in still.items()}
        give_gradients(model, step)
        if step == 0:
            for waits in still.values():
                waits.grad = torch.zeros_like(waits)
        optimizer.step()
        for name, waits in still.items():
            moved = float((waits - before[name]).norm() / before[name].norm())
            assert torch.isfinite(waits).all()
            assert moved == 0.0 if step == 0 else 0.0 < moved < 0.2, (name, step)
    assert all(bool(p.any()) and bool(torch.isfinite(p).all()) for p in optimizer.param_groups[0]["params"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_degenerate_factors_stay_finite(dtype: torch.dtype) -> None:
    """Both zero; a rank above the width; a factor with equal rows; a gradient that is not finite."""
    import peft

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 5), nn.Linear(5, 4))
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["0", "1", "2"]), base).to(dtype)
    with torch.no_grad():
        model[1].lora_A["default"].weight.zero_()
        model[2].lora_A["default"].weight.fill_(0.5)
    optimizer = hf_emopt.Muon(model, lr=0.01, lora="joint")
    for step in range(3):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert all(bool(torch.isfinite(p).all()) for p in optimizer.param_groups[0]["params"]), step
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0]["params"][0].grad.fill_(float("nan"))
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, b) for p, b in zip(optimizer.param_groups[0]["params"], before))


def test_inverse_root_is_of_the_range() -> None:
    vectors = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    a = vectors @ torch.diag(torch.tensor([4.0, 1e-4, 0.0, 0.0], dtype=torch.float64)) @ vectors.mT
    wanted = vectors @ torch.diag(torch.tensor([0.5, 100.0, 0.0, 0.0], dtype=torch.float64)) @ vectors.mT
    found = inverse_sqrt(torch.stack([a, torch.zeros_like(a), torch.full_like(a, float("nan"))]))
    torch.testing.assert_close(found[0], wanted, rtol=1e-9, atol=1e-9)
    assert not found[1:].any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_lr_ratio": 4.0}, "lora_lr_ratio"),
        ({"cautious_weight_decay": True}, "cautious_weight_decay=True"),
        ({"compat": "torch"}, "compat='torch'"),
        ({"lora_scale": "factor"}, "lora_scale='factor'"),
        ({"lora_max_change": 0.0}, "lora_max_change=0.0"),
        ({"aux_modules": r"blocks\.linears\.a\.lora_A"}, "name both or none"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hf_emopt.Muon(adapters_zoo(), lora="joint", **options)


def test_only_a_model_has_pairs_and_a_frozen_factor_breaks_one() -> None:
    model = adapters_zoo()
    with pytest.raises(ValueError, match="pass the model itself"):
        hf_emopt.Muon([(n, p) for n, p in model.named_parameters() if p.requires_grad], lora="joint")
    with pytest.raises(ValueError, match="lora='both' is not one of separate, joint"):
        hf_emopt.Muon(model, lora="both")  # type: ignore[arg-type]
    model.blocks["linears"].a.lora_A["default"].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"linears\.a\.lora_B\.default\.weight is trained without its partner"):
        hf_emopt.Muon(model, lora="joint")


def test_the_mode_is_the_live_one_and_shown() -> None:
    """A checkpoint of separate factors goes on as pairs: momentum is the factors' own in both."""
    model = adapters_zoo()
    separate = hf_emopt.Muon(model, lr=0.01)
    give_gradients(model, 0)
    separate.step()
    other = adapters_zoo()
    embeddings = r"blocks\.moe\.embedding"  # AdamW's when separate, and AdamW's here
    joint = hf_emopt.Muon(other, lora="joint", aux_modules=embeddings)
    joint.load_state_dict(separate.state_dict())
    assert [g.get("lora") for g in joint.param_groups if g["kind"] == "matrix"] == ["joint"]
    assert joint.param_groups[0]["lr"] == 0.01
    assert "one matrix with its partner" in joint.explain()
    assert full(next(iter(joint.state.values()))["momentum_buffer"]).any()
