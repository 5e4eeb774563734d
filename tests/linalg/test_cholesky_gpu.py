"""Cholesky factors of large matrices on a GPU: residuals in float64, CUDA graphs, and the bases made of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_emopt.linalg import cholesky as blocked
from hf_emopt.linalg import refresh_eigenbasis
from hf_emopt.linalg.cholesky import cholesky, triangular_solve_right

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def symmetric(n: int, d: int, floor: float = 1e-5, power: float = -4.0) -> Tensor:
    """``(N, d, d)`` float32 with eigenvalues ``i^power + floor`` in a random basis."""
    q = torch.linalg.qr(torch.randn(n, d, d, device="cuda")).Q.double()
    spectrum = torch.arange(1, d + 1, device="cuda", dtype=torch.float64) ** power + floor
    a = (q * spectrum) @ q.mT
    return (0.5 * (a + a.mT)).float()


def residual(a: Tensor, lower: Tensor) -> float:
    a, lower = a.double(), lower.double()
    error = (a - lower @ lower.mT).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1)
    return error.max().item()


def solve_error(x: Tensor, y: Tensor, lower: Tensor) -> float:
    """``|Y L^T - X|_F / |Y|_F`` in float64, the largest of the batch; ``L`` of norm about 1 each."""
    error = (y.double() @ lower.double().mT - x.double()).flatten(1).norm(dim=1) / y.double().flatten(1).norm(dim=1)
    return error.max().item()


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("d", [200, 768, 1536, 2048, 3000])
def test_residuals_are_those_of_the_library(d: int, n: int) -> None:
    for a in (symmetric(n, d), symmetric(n, d, 1.0)):
        factor = cholesky(a)
        assert len(factor.inverses) == (0 if d <= 2 * blocked.BLOCK else (d - 1) // blocked.BLOCK)
        library = torch.linalg.cholesky_ex(a).L
        assert residual(a, factor.lower) <= 6 * residual(a, library) + 1e-7
        assert torch.equal(factor.lower.triu(1), torch.zeros_like(a))
        x = torch.randn(n, d, d, device="cuda")
        y, expected = triangular_solve_right(x, factor), torch.linalg.solve_triangular(
            library.mT, x, upper=True, left=False
        )  # fmt: skip
        assert solve_error(x, y, factor.lower) <= 6 * solve_error(x, expected, library) + 1e-7


def test_float64() -> None:
    a = symmetric(2, 1100).double()
    assert residual(a, cholesky(a).lower) < 1e-14


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("d", [200, 1536, 2048])
def test_a_recorded_graph_gives_the_same_numbers(d: int, n: int) -> None:
    """Recorded on one batch and replayed on another. Libraries may take other kernels while they record, so to rounding."""
    a, later = symmetric(n, d, 1.0), symmetric(n, d, 0.5, -2.0)
    source, x = a.clone(), torch.randn(n, d, d, device="cuda")

    def work() -> tuple[Tensor, Tensor]:
        factor = cholesky(source)
        return factor.lower, triangular_solve_right(x, factor)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    source.copy_(later)
    graph.replay()
    torch.testing.assert_close(found, work(), rtol=1e-5, atol=1e-5)
    assert residual(later, found[0]) < 2e-6


@pytest.mark.parametrize("position", [0, 700, 1499])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_one_bad_matrix(value: float, position: int) -> None:
    """A matrix without a factor is NaN from its first bad block on, whatever the library leaves there."""
    good = symmetric(2, 1500)
    bad = torch.eye(1500, device="cuda")
    bad[position, position] = value
    factor = cholesky(torch.stack([good[0], bad, good[1]]))
    y = triangular_solve_right(torch.ones(3, 4, 1500, device="cuda"), factor)
    assert factor.lower[[0, 2]].isfinite().all()
    assert y[[0, 2]].isfinite().all()
    start = position // blocked.BLOCK * blocked.BLOCK
    diagonal = factor.lower[1].diagonal()
    # Of NaN the library may make a factor with NaN, instead of reporting it.
    assert diagonal[position:].isnan().all() if math.isnan(value) else diagonal[start:].isnan().all()
    assert y[1, :, position:].isnan().all()
    assert residual(good, factor.lower[[0, 2]]) < 2e-6


@pytest.mark.parametrize("precision", ["fp16", "highest"])
def test_bases_need_no_fallback(precision: str) -> None:
    """Of the sum of gradients that have nothing in common with the one whose basis is refreshed."""
    d = 2048
    first = symmetric(2, d, 0.0)
    a = first + sum(symmetric(2, d, 0.0) for _ in range(3))
    q = torch.linalg.eigh(first).eigenvectors.flip(-1)
    result = refresh_eigenbasis(a, q, precision=precision)
    assert not result.fell_back.any()
    assert not result.failed.any()
    assert result.orthogonality.max() <= 2e-5
    error = result.q.double().mT @ result.q.double() - torch.eye(d, device="cuda", dtype=torch.float64)
    assert error.flatten(1).norm(dim=1).max() / math.sqrt(d) <= 2e-5
