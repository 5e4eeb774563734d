"""Failures of a refresh that the host reads one step later, as it does on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.formats.moments import unpacked
from hf_emopt.rules import shampoo as shampoo_rule
from hf_emopt.rules import soap as soap_rule

CASES = {
    "soap": (hf_emopt.SOAP, {"basis_method": "orthogonal_iteration"}, "basis"),
    "shampoo": (hf_emopt.Shampoo, {"root_solver": "coupled_newton", "start_preconditioning_step": 1}, "root"),
    "kl_shampoo": (hf_emopt.KLShampoo, {"root_solver": "coupled_newton", "start_preconditioning_step": 1}, "root"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any], str]:
    return CASES[request.param]


def make(case: tuple[Any, dict[str, Any], str], later: bool, **options: Any) -> tuple[list[nn.Parameter], Any]:
    cls, own, _ = case
    params = [nn.Parameter(torch.full((12, 20), 0.1)), nn.Parameter(torch.full((12, 20), 0.2))]
    settings = {"lr": 0.01, "precondition_frequency": 4, "refresh": "synchronous", **own, **options}
    optimizer = cls(params, **settings)
    optimizer.rule.read_later = frozenset({"cpu"} if later else ())
    return params, optimizer


def run(params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def kept(params: list[nn.Parameter], optimizer: Any, name: str) -> list[Tensor]:
    return [v.clone() for p in params for k, v in optimizer.state[p].items() if k.startswith(name)]


def fail_once(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> dict[str, int]:
    """Attempts without a fallback lose the first block of their batch, ``times`` times."""
    calls = {"lost": 0, "careful": 0}

    def losing(real: Any) -> Any:
        def attempt(a: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = real(a, *args, **kwargs)
            if kwargs.get("fallback", True):
                calls["careful"] += 1
            elif calls["lost"] < times:
                calls["lost"] += 1
                result.failed[0] = True
            return result

        return attempt

    monkeypatch.setattr(soap_rule, "refresh_eigenbasis", losing(soap_rule.refresh_eigenbasis))
    monkeypatch.setattr(shampoo_rule, "inverse_root", losing(shampoo_rule.inverse_root))
    return calls


def test_where_nothing_fails_nothing_changes(case: tuple[Any, dict[str, Any], str]) -> None:
    now, at_once = make(case, later=False)
    then, one_later = make(case, later=True)
    run(now, at_once, range(12))
    run(then, one_later, range(12))
    assert all(torch.equal(p, q) for p, q in zip(now, then))
    assert one_later.state_dict()["state"].keys() == at_once.state_dict()["state"].keys()
    assert one_later.rule.ladder == at_once.rule.ladder
    assert one_later.rule.ladder.clean


def test_what_fails_is_kept_for_a_step_and_then_computed(
    case: tuple[Any, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = make(case, later=True)
    run(params, optimizer, range(4))
    before = kept(params, optimizer, case[2])
    calls = fail_once(monkeypatch)
    run(params, optimizer, range(4, 5))  # the refresh
    failing = kept(params, optimizer, case[2])
    same = [torch.equal(a, b) for a, b in zip(before, failing)]
    assert same.count(True) == 1
    assert calls == {"lost": 1, "careful": 0}
    run(params, optimizer, range(5, 6))
    after = kept(params, optimizer, case[2])
    assert [torch.equal(a, b) for a, b in zip(failing, after)] == [not x for x in same]
    assert optimizer.rule.failures == 0
    assert not any(v.any() for v in kept(params, optimizer, "failures"))
    assert optimizer.rule.ladder.blocks == 2 * sum(v.numel() for v in kept(params, optimizer, "failures"))


def test_a_checkpoint_in_between_holds_what_the_next_step_would_have(
    case: tuple[Any, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = make(case, later=True)
    run(params, optimizer, range(4))
    before = kept(params, optimizer, case[2])
    fail_once(monkeypatch)
    run(params, optimizer, range(4, 5))
    saved = copy.deepcopy(optimizer.state_dict())
    assert not any(torch.equal(a, b) for a, b in zip(before, kept(params, optimizer, case[2])))
    weights = [p.detach().clone() for p in params]
    run(params, optimizer, range(5, 12))
    resumed, other = make(case, later=True)
    for p, w in zip(resumed, weights):
        p.data.copy_(w)
    other.load_state_dict(saved)
    run(resumed, other, range(5, 12))
    assert all(torch.equal(p, q) for p, q in zip(params, resumed))


def test_failing_in_a_row_is_counted_once_a_refresh_and_raises(case: tuple[Any, dict[str, Any], str]) -> None:
    params, optimizer = make(case, later=True, tolerated_failures=1)
    run(params, optimizer, range(4))
    factor = next(v for k, v in optimizer.state[params[0]].items() if k.startswith("factor"))
    factor[0, 0, 0, 0] = torch.inf  # for good: the running mean does not forget it
    before = kept(params[:1], optimizer, case[2])
    run(params[:1], optimizer, range(4, 6))
    assert optimizer.rule.failures == 1
    assert sorted(int(v.max()) for v in kept(params[:1], optimizer, "failures")) == [0, 1]
    assert [torch.equal(a, b) for a, b in zip(before, kept(params[:1], optimizer, case[2]))].count(True) == 1
    run(params, optimizer, range(6, 9))  # the second refresh is in the last of these
    with pytest.raises(RuntimeError, match="2 times in a row"):
        run(params, optimizer, range(9, 10))


def test_a_checkpoint_in_between_does_not_change_the_run(
    case: tuple[Any, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for saves in (False, True):
        params, optimizer = make(case, later=True)
        run(params, optimizer, range(4))
        with monkeypatch.context() as patch:
            fail_once(patch)
            run(params, optimizer, range(4, 5))
        if saves:
            optimizer.state_dict()
        run(params, optimizer, range(5, 8))
        found.append((params, kept(params, optimizer, case[2])))
    assert all(torch.equal(p, q) for p, q in zip(found[0][0], found[1][0]))
    assert all(torch.equal(p, q) for p, q in zip(found[0][1], found[1][1]))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("then", ["skipped", "absent"])
def test_moments_in_eight_bits_turn_with_their_basis(then: str, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mended belongs to the last step: it is kept though the next one is skipped, or without that matrix."""
    pytest.importorskip("bitsandbytes")
    cls, own, _ = CASES["soap"]
    options = {**own, "state_dtype": "int8", "refresh": "synchronous", "precondition_frequency": 4}
    params = [nn.Parameter(torch.full((64, 64), 0.1)) for _ in range(2)]
    optimizer = cls(params, lr=0.01, **options)
    optimizer.rule.read_later = frozenset({"cpu"})
    run(params, optimizer, range(4))
    fail_once(monkeypatch)
    run(params, optimizer, range(4, 5))

    def momentum(p: nn.Parameter) -> Tensor:
        state = unpacked({k.removesuffix(".0"): v for k, v in optimizer.state[p].items()}, torch.float32)
        left, right = state["basis.0.0"][0], state["basis.0.1"][0]
        return left @ state["exp_avg.0"][0] @ right.mT

    before, bases = momentum(params[0]), kept(params[:1], optimizer, "basis")
    other = [v.clone() for v in kept(params[1:], optimizer, "exp_avg")]
    if asks:
        optimizer.state_dict()
    if then == "skipped":
        for p in params:
            p.grad = torch.full_like(p, torch.nan)
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(other, kept(params[1:], optimizer, "exp_avg")))
    else:
        params[0].grad = None
        params[1].grad = torch.randn(64, 64)
        optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(bases, kept(params[:1], optimizer, "basis")))
    assert (momentum(params[0]) - before).norm() < 0.03 * before.norm()


def test_a_skipped_step_does_not_keep_it_from_use(
    case: tuple[Any, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, optimizer = make(case, later=True)
    run(params, optimizer, range(4))
    fail_once(monkeypatch)
    run(params, optimizer, range(4, 5))
    failing = kept(params, optimizer, case[2])
    for p in params:
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    after = kept(params, optimizer, case[2])
    assert [torch.equal(a, b) for a, b in zip(failing, after)].count(False) == 1


def test_soap_does_not_notice_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its refresh is the last thing in a step, and what failed in it is computed before anything else of the next one.
    found = []
    for later in (False, True):
        params, optimizer = make(CASES["soap"], later=later)
        run(params, optimizer, range(4))
        with monkeypatch.context() as patch:
            fail_once(patch)
            run(params, optimizer, range(4, 7))
        found.append(params)
    # The two sides turn the moments one after the other, in the order in which they are installed.
    for p, q in zip(*found):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_an_earlier_checkpoint_can_be_loaded_after_a_failure(case: tuple[Any, dict[str, Any], str]) -> None:
    params, optimizer = make(case, later=True, tolerated_failures=0)
    run(params, optimizer, range(4))
    good = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in params]
    next(v for k, v in optimizer.state[params[0]].items() if k.startswith("factor"))[0, 0, 0, 0] = torch.inf
    run(params, optimizer, range(4, 5))  # its refresh fails, and that is not read yet
    optimizer.load_state_dict(good)
    for p, w in zip(params, weights):
        p.data.copy_(w)
    run(params, optimizer, range(4, 8))
    wanted, other = make(case, later=True)
    run(wanted, other, range(8))
    assert all(torch.equal(p, q) for p, q in zip(params, wanted))
    assert optimizer.rule.failures == 0
