"""Refreshed eigenbases against float64 eigh, on spectra that break orthonormalisation."""

from __future__ import annotations

import math

import pytest
import torch
from spectra import SPECTRA, D, host_reads, matrices
from torch import Tensor

from hf_emopt.linalg import eigenbasis, eigendecomposition, refresh_eigenbasis
from hf_emopt.linalg.symmetric_batches import largest_entry, power_of_two_scale, spectral_bound

METHODS = ["orthogonal_iteration", "qr", "eigh"]
ITERATIVE = ["orthogonal_iteration", "qr"]
PRECISIONS = ["highest", "bf16x3", "tf32_emulated"]
NAMES = list(SPECTRA)


def orthogonality(q: Tensor) -> float:
    q = q.double()
    return (q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max().item()


def off_diagonal(a: Tensor, q: Tensor) -> Tensor:
    """``(N,)``, by its definition, in float64."""
    b = q.double().mT @ a.double() @ q.double()
    off = b - torch.diag_embed(b.diagonal(dim1=-2, dim2=-1))
    return off.flatten(1).norm(dim=1) / a.double().flatten(1).norm(dim=1)


def turned(q: Tensor, angle: float, seed: int = 0) -> Tensor:
    """The basis after a random rotation of about this angle."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(q.shape, generator=generator, dtype=torch.float64) * (angle / D**0.5)
    return (q.double() @ torch.matrix_exp(s - s.mT)).to(q.dtype)


def shuffled(q: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(D, generator=generator) for _ in q])
    return q.gather(-1, order.unsqueeze(-2).expand_as(q)), order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenbasis(dtype: torch.dtype) -> None:
    a = matrices(NAMES, dtype)
    before = a.clone()
    eigenvalues, q = eigendecomposition(a)
    unit = torch.finfo(dtype).eps
    assert orthogonality(q) < 50 * unit
    assert off_diagonal(a, q).max() < 50 * unit
    assert (eigenvalues.diff(dim=-1) <= 0).all()
    expected = torch.linalg.eigvalsh(a.double()).flip(-1)
    assert ((eigenvalues - expected).abs().amax(-1) <= 50 * unit * expected.abs().amax(-1)).all()
    assert torch.equal(eigenbasis(a), q)
    assert torch.equal(a, before)


def test_eigenbasis_of_a_nonfinite_block() -> None:
    a = matrices(["condition_1e2", "duplicates"])
    clean = eigenbasis(a)
    a[0, 0, 0] = math.inf
    q = eigenbasis(a)
    assert q[0].isnan().all()
    torch.testing.assert_close(q[1], clean[1])


@pytest.mark.parametrize("start", ["near", "far", "identity"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", METHODS)
def test_orthonormal_on_all_spectra(method: str, precision: str, start: str) -> None:
    """From anywhere in every precision, and from nearby without a fallback."""
    a = matrices(NAMES, torch.float32)
    q_old = (
        torch.eye(D).expand_as(a) if start == "identity" else turned(eigenbasis(a), 0.05 if start == "near" else 1.0)
    )
    result = refresh_eigenbasis(a, q_old, method, precision=precision)
    assert not result.failed.any()
    if start == "near":
        assert not result.fell_back.any()
        assert orthogonality(result.q) < 5e-6
    # The bound is on the root mean square of columns, of which one entry has at most all.
    assert result.orthogonality.max() < 2e-5
    assert orthogonality(result.q) < 2e-5 * D**0.5


@pytest.mark.parametrize("method", METHODS)
def test_estimates_are_those_of_the_result(method: str) -> None:
    a = matrices(NAMES)
    result = refresh_eigenbasis(a, turned(eigenbasis(a), 0.1), method)
    diagonal = (result.q.mT @ a @ result.q).diagonal(dim1=-2, dim2=-1)
    scale = a.flatten(1).norm(dim=1)
    assert ((result.eigenvalues_estimate - diagonal).abs().amax(-1) < 1e-14 * scale).all()
    torch.testing.assert_close(result.off_diagonal, off_diagonal(a, result.q), rtol=1e-6, atol=1e-14)


@pytest.mark.parametrize("precision", ["highest", "bf16x3", "tf32_emulated", "fp16"])
@pytest.mark.parametrize("decay", [1, 3, 4])
def test_a_far_basis_needs_no_fallback(decay: int, precision: str) -> None:
    """The second refresh of a run: five gradients that have nothing in common with the first, whose basis it is."""
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, 193).float() ** -decay

    def square() -> torch.Tensor:
        q = torch.linalg.qr(torch.randn(192, 192, generator=generator)).Q
        return (q * spectrum.square()) @ q.mT

    first, later = square(), sum(square() for _ in range(5))
    a = (first + later)[None]
    result = refresh_eigenbasis(0.5 * (a + a.mT), eigenbasis(first[None]), precision=precision, fallback=False)
    assert not result.failed.any()
    assert result.orthogonality.max() < 2e-6


@pytest.mark.parametrize("method", ["orthogonal_iteration", "qr"])
def test_one_iteration_is_qr_of_a_q(method: str) -> None:
    """Both have the column spaces of Householder QR, one column after the other (signs aside)."""
    a = matrices(["condition_1e2", "condition_1e4", "duplicates"])
    q_old = turned(eigenbasis(a), 0.2)
    estimate = (q_old.mT @ a @ q_old).diagonal(dim1=-2, dim2=-1)
    shifted = a
    if method == "orthogonal_iteration":  # sorts by powers of 256, and shifts by 64 roundoffs of float32
        shifted = a + 64 * 2.0**-24 * spectral_bound(a) * torch.eye(D)
        estimate = torch.frexp(estimate / power_of_two_scale(largest_entry(a)).squeeze(-1)).exponent >> 3
    order = torch.argsort(estimate, dim=-1, descending=True, stable=True)
    sorted_columns = torch.stack([q[:, index] for q, index in zip(q_old, order)])
    expected = torch.linalg.qr(shifted @ sorted_columns).Q
    result = refresh_eigenbasis(a, q_old, method)
    assert torch.equal(result.permutation, order)
    torch.testing.assert_close((expected.mT @ result.q).abs(), torch.eye(D).double().expand_as(a), rtol=0, atol=1e-8)
    if method == "orthogonal_iteration":  # and keeps the orientation of columns, which Householder QR does not
        assert ((sorted_columns * result.q).sum(-2) > 0).all()


def test_qr_is_the_reference_program() -> None:
    """Sort, permute, multiply, factorise: the refresh of the SOAP paper's program, one matrix at a time."""
    a = matrices(["condition_1e2", "condition_1e4"])
    q_old, _ = shuffled(turned(eigenbasis(a), 0.2))
    second_moment = torch.rand(2, D, D, dtype=torch.float64)
    result = refresh_eigenbasis(a, q_old, "qr")
    permuted = second_moment.gather(-1, result.permutation.unsqueeze(-2).expand_as(second_moment))
    for i in range(2):
        estimate = torch.diag(q_old[i].T @ a[i] @ q_old[i])
        index = torch.argsort(estimate, descending=True)
        expected, _ = torch.linalg.qr(a[i] @ q_old[i][:, index])
        torch.testing.assert_close(result.q[i], expected, rtol=0, atol=1e-12)
        assert torch.equal(permuted[i], second_moment[i].index_select(1, index))


@pytest.mark.parametrize("method", METHODS)
def test_permutation_follows_the_columns(method: str) -> None:
    """From a shuffled eigenbasis: the sort is undone, and column i continues column permutation[i]."""
    a = matrices(["condition_1e2", "condition_1e4"])
    q = eigenbasis(a)
    q_old, _ = shuffled(q)
    result = refresh_eigenbasis(a, q_old, method)
    continued = q_old.gather(-1, result.permutation.unsqueeze(-2).expand_as(q_old))
    iteration = method == "orthogonal_iteration"  # sorts by powers of 256
    assert torch.equal(continued, q) or iteration
    alignment = (continued * result.q).sum(-2).abs()
    torch.testing.assert_close(alignment, torch.ones_like(alignment), rtol=0, atol=1e-8)
    ratios = result.eigenvalues_estimate[:, 1:] / result.eigenvalues_estimate[:, :-1]
    assert (ratios < (256 if iteration else 1)).all()


@pytest.mark.parametrize("method", ITERATIVE)
def test_repeated_refreshes_find_the_eigenbasis(method: str) -> None:
    names = ["condition_1e2", "condition_1e4", "condition_1e6", "duplicates", "rank_1"]
    a = matrices(names)
    q = turned(eigenbasis(a), 0.1)
    for _ in range(60):
        q = refresh_eigenbasis(a, q, method).q
    assert off_diagonal(a, q).max() < 1e-6
    # Up to sign where eigenvalues are simple; by projections onto the fourfold spaces of "duplicates".
    q_true = eigenbasis(a)
    overlap = (q_true.mT @ q).square()
    torch.testing.assert_close(overlap[0], torch.eye(D).double(), rtol=0, atol=1e-6)
    groups = overlap[3].reshape(6, 4, 6, 4).sum((1, 3)) / 4
    torch.testing.assert_close(groups, torch.eye(6).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("precision", ["highest", "bf16x3"])
def test_null_space_stays_put(precision: str) -> None:
    """The basis of a null space is arbitrary, and turned by rounding alone it would spoil what is kept per column."""
    a = matrices(["rank_1"], torch.float32)
    q = start = eigenbasis(a)
    for _ in range(5):
        q = refresh_eigenbasis(a, q, precision=precision).q
    assert (q * start).sum(-2).abs().min() > 0.999
    assert refresh_eigenbasis(torch.zeros_like(a), start).q.sub(start).abs().max() < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_batch_equals_loop(method: str) -> None:
    a = matrices(NAMES)
    q_old = turned(eigenbasis(a), 0.1)
    batch = refresh_eigenbasis(a, q_old, method)
    loop = [refresh_eigenbasis(a[i : i + 1], q_old[i : i + 1], method) for i in range(len(NAMES))]
    torch.testing.assert_close(batch.q, torch.cat([r.q for r in loop]), rtol=0, atol=1e-7)
    assert torch.equal(batch.permutation, torch.cat([r.permutation for r in loop]))


@pytest.mark.parametrize("method", METHODS)
def test_inputs_unchanged_and_scale_free(method: str) -> None:
    a = matrices(["condition_1e2", "duplicates"], torch.float32)
    q_old = turned(eigenbasis(a), 0.1)
    a_before, q_before = a.clone(), q_old.clone()
    result = refresh_eigenbasis(a, q_old, method)
    assert torch.equal(a, a_before)
    assert torch.equal(q_old, q_before)
    for power in (-100, 100):
        scaled = refresh_eigenbasis(a * 2.0**power, q_old, method)
        torch.testing.assert_close(scaled.q, result.q, rtol=0, atol=1e-6)
        torch.testing.assert_close(
            scaled.eigenvalues_estimate * 2.0**-power, result.eigenvalues_estimate, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("method", METHODS)
def test_nonfinite_block_keeps_its_basis(method: str) -> None:
    a = matrices(["condition_1e2", "identity", "duplicates"], torch.float32)
    q_old, _ = shuffled(turned(eigenbasis(a), 0.1))
    clean = refresh_eigenbasis(a, q_old, method)
    a[1, 2, 3] = math.nan
    result = refresh_eigenbasis(a, q_old, method)
    assert result.failed.tolist() == [False, True, False]
    assert torch.equal(result.q[1], q_old[1])
    assert torch.equal(result.permutation[1], torch.arange(D))
    assert result.off_diagonal[1] == math.inf
    torch.testing.assert_close(result.q[[0, 2]], clean.q[[0, 2]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ITERATIVE)
def test_falls_back_from_a_basis_that_is_none(method: str) -> None:
    """A NaN, two equal columns, zeros: QR or eigh mends it, in this block alone."""
    a = matrices(["condition_1e2", "condition_1e4", "identity", "duplicates"])
    q_old = turned(eigenbasis(a), 0.1)
    clean = refresh_eigenbasis(a, q_old, method)
    q_old[0, 1, 1] = math.nan
    q_old[1, :, 3] = 0
    result = refresh_eigenbasis(a, q_old, method)
    assert not result.failed.any()
    assert result.fell_back[:2].any()
    assert result.fell_back[0]
    assert not result.fell_back[2:].any()
    assert orthogonality(result.q) < 1e-8
    torch.testing.assert_close(result.q[2:], clean.q[2:], rtol=0, atol=1e-7)
    if method != "qr":  # Householder QR completes the basis by itself
        assert result.fell_back[1]
    reported = refresh_eigenbasis(a, q_old, method, fallback=False)
    assert reported.failed.tolist() == result.fell_back.tolist()
    torch.testing.assert_close(reported.q[0], q_old[0], equal_nan=True)


@pytest.mark.parametrize("method", ITERATIVE)
def test_tolerance_leaves_good_blocks_alone(method: str) -> None:
    a = matrices(["condition_1e2", "condition_1e4", "duplicates"])
    q = eigenbasis(a)
    q_old = torch.stack([turned(q, 0.1)[0], q[1], turned(q, 0.1)[2]])
    result = refresh_eigenbasis(a, q_old, method, iterations=200, tolerance=1e-2)
    assert torch.equal(result.q[1], q_old[1])
    assert off_diagonal(a, result.q).max() <= 1e-2
    once = refresh_eigenbasis(a, q_old, method, iterations=1, tolerance=1e-2)
    torch.testing.assert_close(once.q[0], refresh_eigenbasis(a, q_old, method).q[0], rtol=0, atol=1e-9)


def test_adaptive_qr_is_the_qr_algorithm() -> None:
    """``A Q`` factorised equals ``Q`` times the factor of ``Q^T A Q``, iteration by iteration, up to signs."""
    a = matrices(["condition_1e2"])
    q = turned(eigenbasis(a), 0.3)
    start = refresh_eigenbasis(a, q, "qr", iterations=1, tolerance=math.inf).q  # sorted only
    b, accumulated = start.mT @ a @ start, start
    for _ in range(4):
        factor, upper = torch.linalg.qr(b)
        b, accumulated = upper @ factor, accumulated @ factor
    result = refresh_eigenbasis(a, q, "qr", iterations=4)
    torch.testing.assert_close((accumulated.mT @ result.q).abs()[0], torch.eye(D).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_host_reads(method: str) -> None:
    a = matrices(["condition_1e2", "identity"], torch.float32)
    q_old = turned(eigenbasis(a), 0.1)
    refresh_eigenbasis(a, q_old, method)  # fills the cache of probes
    with host_reads() as reads:
        refresh_eigenbasis(a, q_old, method)
    assert reads.count == (0 if method == "eigh" else 1)
    with host_reads() as reads:
        refresh_eigenbasis(a, q_old, method, fallback=False)
    assert reads.count == 0


def test_small_and_empty() -> None:
    one = refresh_eigenbasis(torch.full((2, 1, 1), 3.0), torch.tensor([1.0, -1.0]).reshape(2, 1, 1))
    torch.testing.assert_close(one.q.abs(), torch.ones(2, 1, 1))
    torch.testing.assert_close(one.eigenvalues_estimate, torch.full((2, 1), 3.0))
    for shape in ((0, 4, 4), (2, 0, 0)):
        for method in METHODS:
            empty = refresh_eigenbasis(torch.zeros(shape), torch.zeros(shape), method)
            assert empty.q.shape == shape
            assert empty.failed.shape == shape[:1]


def test_bad_arguments() -> None:
    a = torch.eye(3).unsqueeze(0)
    with pytest.raises(TypeError, match="float32 or float64"):
        refresh_eigenbasis(a.half(), a.half())
    with pytest.raises(TypeError, match="one dtype"):
        refresh_eigenbasis(a, a.double())
    with pytest.raises(ValueError, match="shape of a"):
        refresh_eigenbasis(a, a.expand(2, 3, 3))
    with pytest.raises(ValueError, match=r"\(N, d, d\)"):
        refresh_eigenbasis(a[0], a[0])
    with pytest.raises(ValueError, match="method must be one of"):
        refresh_eigenbasis(a, a, "power")
    with pytest.raises(ValueError, match="iterations must be"):
        refresh_eigenbasis(a, a, iterations=0)
    with pytest.raises(ValueError, match="tolerance must be"):
        refresh_eigenbasis(a, a, tolerance=-1.0)
    with pytest.raises(ValueError, match="precision must be one of"):
        refresh_eigenbasis(a, a, precision="high")
