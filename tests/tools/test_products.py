"""The comparison of symmetric products counts nobody's time for another result."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from hf_emopt.tools.bench import products, timing


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(products, "graphed", lambda call: call)
    return torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0)).bfloat16()


def attempt(product: products.Product, x: torch.Tensor) -> dict[str, object]:
    return products._checked(product, x, x.float() @ x.float().mT)


def test_a_wrong_result_has_no_time(x: torch.Tensor) -> None:
    right = attempt(lambda a: a @ a.mT, x)
    assert right["calls"] == 8
    assert 0 < float(right["error"]) < 5e-3  # type: ignore[arg-type]
    for wrong in (lambda a: (a @ a.mT)[1], lambda a: 2 * (a @ a.mT), lambda a: (a @ a.mT) * float("nan")):
        found = attempt(wrong, x)
        assert "call" not in found
        assert "off by" in str(found["failed"])


def test_all_take_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round all of them, in orders that differ; of each the middle one counts."""
    called: list[str] = []
    times = {"a": [3.0, 1.0, 2.0], "b": [5.0, 4.0, 9.0], "c": [7.0, 7.0, 7.0], "d": [1.0, 2.0, 3.0]}

    def time_ms(function: object, repeat_ms: float) -> float:
        called.append(function())  # type: ignore[operator]
        return times[called[-1]][called.count(called[-1]) - 1]

    monkeypatch.setattr(timing, "time_ms", time_ms)
    found = timing.in_turn({name: lambda name=name: name for name in times}, 1.0)  # type: ignore[misc]
    assert found == {"a": 2.0, "b": 5.0, "c": 7.0, "d": 2.0}
    rounds = [called[i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(one) == sorted(times) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1


def test_who_fails_while_timed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_ms(function: object, repeat_ms: float) -> float:
        return float(function())  # type: ignore[operator]

    monkeypatch.setattr(timing, "time_ms", time_ms)
    functions = {"a": lambda: 1.0, "b": lambda: 1 // 0, "c": lambda: 2.0}
    failed: dict[str, str] = {}
    assert timing.in_turn(functions, 1.0, failed) == {"a": 1.0, "c": 2.0}
    assert list(failed) == ["b"]
    assert "ZeroDivisionError" in failed["b"]
    with pytest.raises(ZeroDivisionError):
        timing.in_turn(functions, 1.0)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_quack_is_asked_for_all_of_the_batch(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch, pair: bool, batch: int
) -> None:
    """It takes a matrix or a batch, and returns the result or, as its signature says, a pair of which it is the second."""

    def gemm_symmetric(a: torch.Tensor, b: torch.Tensor) -> object:
        assert a.ndim == (3 if batch > 1 else 2)
        return (None, a @ b) if pair else a @ b

    module = types.ModuleType("quack.gemm_interface")
    module.gemm_symmetric = gemm_symmetric  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    found = attempt(products._quack(), x[:batch])
    assert "call" in found, found
