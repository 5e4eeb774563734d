"""The comparison of symmetric products counts nobody's time for another result."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from hf_emopt.bench import products


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(products, "graphed", lambda call: call)
    monkeypatch.setattr(products, "time_ms", lambda call, repeat_ms: 8.0)
    return torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(0)).bfloat16()


def attempt(product: products.Product, x: torch.Tensor) -> dict[str, object]:
    return products._attempt(product, x, x.float() @ x.float().mT, 1.0)


def test_a_wrong_result_has_no_time(x: torch.Tensor) -> None:
    right = attempt(lambda a: a @ a.mT, x)
    assert right["ms"] == 1.0
    assert 0 < float(right["error"]) < 5e-3  # type: ignore[arg-type]
    for wrong in (lambda a: (a @ a.mT)[1], lambda a: 2 * (a @ a.mT), lambda a: (a @ a.mT) * float("nan")):
        found = attempt(wrong, x)
        assert "ms" not in found
        assert "off by" in str(found["failed"])


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
    assert found["ms"] == 1.0, found
