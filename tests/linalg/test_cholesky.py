"""Blocked Cholesky factors against LAPACK's, in the residual, in small blocks that are forced upon a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from spectra import SPECTRA, host_reads, matrices, orthogonal
from torch import Tensor

from hf_emopt.linalg import cholesky as blocked
from hf_emopt.linalg import refresh_eigenbasis
from hf_emopt.linalg.cholesky import cholesky, triangular_solve_right


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where blocks are larger, so that matrices of a test have several of them."""
    monkeypatch.setattr(blocked, "DEVICES", ("cpu",))
    monkeypatch.setattr(blocked, "BLOCK", 32)
    monkeypatch.setattr(blocked, "LEAF", 8)


def spectrum(name: str, d: int) -> Tensor:
    index = torch.arange(1, d + 1, dtype=torch.float64)
    return {
        "well": 1 + index / d,
        "graded": index**-4 + 1e-5,
        "steep": index**-8 + 1e-6,
        "geometric": torch.logspace(0, -6, d, dtype=torch.float64),
        "two clusters": torch.where(index < d / 2, 1.0, 1e-6),
    }[name]


def batch(name: str, kind: str, d: int) -> Tensor:
    """``(2, d, d)`` float64: in a far basis, in one nearby, or what the iteration makes of the far one's factor."""
    q = orthogonal(2, d)
    if kind == "near":
        q = torch.linalg.qr(torch.eye(d, dtype=torch.float64) + 0.1 * q).Q
    a = (q.mT * spectrum(name, d)) @ q
    if kind == "gram":
        lower = torch.linalg.cholesky(a)
        x = lower / lower.norm(dim=-2, keepdim=True)
        a = x.mT @ x + d**0.5 * 2.0**-22 * torch.eye(d, dtype=torch.float64)
    return 0.5 * (a + a.mT)


def residual(a: Tensor, lower: Tensor) -> Tensor:
    """``(N,)``: ``|A - L L^T|_F / |A|_F`` in float64."""
    a, lower = a.double(), lower.double()
    return (a - lower @ lower.mT).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["far", "near", "gram"])
@pytest.mark.parametrize("name", ["well", "graded", "steep", "geometric", "two clusters"])
def test_residuals_are_those_of_lapack(name: str, kind: str, dtype: torch.dtype) -> None:
    """The inverses of diagonal blocks must not cost what their condition would allow."""
    a = batch(name, kind, 200).to(dtype)
    before = a.clone()
    factor = cholesky(a)
    assert len(factor.inverses) == 6
    assert torch.equal(a, before)
    assert torch.equal(factor.lower.triu(1), torch.zeros_like(a))
    library = torch.linalg.cholesky_ex(a).L
    assert (residual(a, factor.lower) <= 6 * residual(a, library)).all()

    x = torch.randn(2, 70, 200, generator=torch.Generator().manual_seed(0), dtype=dtype)
    y, expected = (
        triangular_solve_right(x, factor),
        torch.linalg.solve_triangular(library.mT, x, upper=True, left=False),
    )
    errors = [(v.double() @ w.double().mT - x).norm() / v.norm() for v, w in ((y, factor.lower), (expected, library))]
    assert errors[0] <= 3 * errors[1]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("d", [1, 64, 65, 96, 99, 121, 130])
def test_last_blocks_of_all_sizes(d: int) -> None:
    """The last block may be narrower than a leaf, or no multiple of one; up to two blocks the library does it all."""
    a = batch("well", "far", d)
    factor = cholesky(a)
    assert len(factor.inverses) == (0 if d <= 64 else (d - 1) // 32)
    torch.testing.assert_close(factor.lower, torch.linalg.cholesky(a), rtol=1e-12, atol=1e-13)
    for inverse, start in zip(factor.inverses, range(0, d, 32)):
        block = factor.lower[:, start : start + 32, start : start + 32]
        torch.testing.assert_close(inverse @ block, torch.eye(32, dtype=a.dtype).expand_as(block), rtol=0, atol=1e-13)
    torch.testing.assert_close(
        triangular_solve_right(a, factor), factor.lower.expand_as(a).contiguous(), rtol=0, atol=1e-13
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("leaf", [8, 16, 32])
@pytest.mark.parametrize("b", [5, 24, 40, 32, 72])
def test_inverses_by_halves(b: int, leaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers of leaves that are no power of two as well, where a triangle has no partner."""
    monkeypatch.setattr(blocked, "LEAF", leaf)
    lower = torch.linalg.cholesky(batch("geometric", "far", b))
    inverse = blocked._inverse(lower, blocked._elsewhere(b, lower.device))
    expected = torch.linalg.solve_triangular(lower, torch.eye(b, dtype=lower.dtype), upper=False)
    torch.testing.assert_close(inverse, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(inverse.triu(1), torch.zeros_like(inverse))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("position", [0, 40, 70, 129])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_one_bad_matrix(value: float, position: int) -> None:
    """What has no factor is not finite from the first bad block on, and the others come out as if alone."""
    good = batch("graded", "far", 130).float()
    bad = torch.eye(130) * 2
    bad[position, position] = value
    # The library takes infinity for positive definite.
    bad[129, 0] = math.inf if value == math.inf else 0.5
    bad = bad.tril() + bad.tril(-1).mT
    a = torch.stack([good[0], bad, torch.zeros(130, 130), good[1]])
    factor = cholesky(a)
    y = triangular_solve_right(torch.ones(4, 3, 130), factor)
    assert torch.equal(factor.lower.isfinite().all(-1).all(-1), torch.tensor([True, False, False, True]))
    assert torch.equal(y.isfinite().all(-1).all(-1), torch.tensor([True, False, False, True]))
    assert factor.lower[2].diagonal().isnan().all()
    start = position // 32 * 32
    if value != math.inf:
        assert factor.lower[1, start:, start:].diagonal().isnan().all()
        assert factor.lower[1, start + 32 :, start : start + 32].isnan().all()
        assert y[1, :, start:].isnan().all()
        assert factor.lower[1, :start, :start].isfinite().all()
    assert torch.equal(factor.lower[[0, 3]].triu(1), torch.zeros_like(good))
    torch.testing.assert_close(factor.lower[[0, 3]], cholesky(good).lower, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_blocks")
def test_reads_the_lower_triangle_and_nothing_on_the_host() -> None:
    a = batch("well", "far", 100)
    expected = cholesky(a)
    with host_reads() as reads:
        factor = cholesky(a.tril() + torch.full_like(a, math.nan).triu(1))
        y = triangular_solve_right(a, factor)
    assert reads.count == 0
    assert torch.equal(factor.lower, expected.lower)
    assert torch.equal(y, triangular_solve_right(a, expected))


def test_a_cpu_uses_the_library() -> None:
    a = batch("well", "far", 600)
    factor = cholesky(a)
    assert factor.inverses == ()
    assert torch.equal(factor.lower, torch.linalg.cholesky_ex(a).L)
    expected = torch.linalg.solve_triangular(factor.lower.mT, a, upper=True, left=False)
    assert torch.equal(triangular_solve_right(a, factor), expected)


@pytest.mark.parametrize("precision", ["highest", "bf16x3", "fp16"])
def test_bases_by_blocks(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration whose factors are blocked, of blocks of 8 since the spectra have 24 values, needs no fallback."""
    monkeypatch.setattr(blocked, "DEVICES", ("cpu",))
    monkeypatch.setattr(blocked, "BLOCK", 8)
    monkeypatch.setattr(blocked, "LEAF", 4)
    a = matrices(list(SPECTRA), torch.float32)
    q = torch.linalg.eigh(a).eigenvectors.flip(-1)
    q = torch.linalg.qr(q + 0.05 * torch.randn(q.shape, generator=torch.Generator().manual_seed(0)) / 24**0.5).Q
    result = refresh_eigenbasis(a, q, precision=precision, fallback=False)
    assert not result.failed.any()
    assert result.orthogonality.max() < 2e-6
