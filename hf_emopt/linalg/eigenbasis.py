"""Eigenbases of symmetric positive semidefinite matrices, and their refresh from a previous basis, for SOAP.

The old basis nearly diagonalises the new matrix, so one step of an iteration does for a whole decomposition.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from hf_emopt.linalg.cholesky import cholesky, triangular_solve_right
from hf_emopt.linalg.matmul_precision import Precision, check_precision, matmul_precision, product, unit_roundoff
from hf_emopt.linalg.split_products import general_product, gram_product
from hf_emopt.linalg.symmetric_batches import (
    block_chunks,
    check_batch,
    eye_like,
    finite_blocks,
    identity_where_not,
    largest_entry,
    power_of_two_scale,
    random_probes,
    relative_norm,
    spectral_bound,
)

RefreshMethod: TypeAlias = Literal["orthogonal_iteration", "qr", "eigh"]

# Eigenvalues below this many unit roundoffs of the largest are noise in A Q; see _shift. Four times as many where float32's
# or float64's own roundoff is the unit, since the sums are rounded as well.
_NOISE = 16
# Of split factors.
_PARTS_ROUNDOFF = 2.0**-22


class EigenbasisRefresh(NamedTuple):
    """Result of :func:`refresh_eigenbasis`.

    Attributes:
        q: ``(N, d, d)``, orthonormal columns, nearly by descending eigenvalue. The old basis, unsorted, in failed blocks.
        eigenvalues_estimate: ``(N, d)``, the diagonal of ``q^T A q``.
        permutation: ``(N, d)`` int64. Column ``i`` of ``q`` continues column ``permutation[:, i]`` of the old basis, so
            state of columns (SOAP's second moment) must be permuted likewise. The identity in failed blocks.
        off_diagonal: ``(N,)``, norm of the off-diagonal part of ``q^T A q`` relative to ``|A|_F``; infinite where the input
            was not finite.
        orthogonality: ``(N,)``, an estimate in float64 of ``|q^T q - I|_F / sqrt(d)``.
        failed: ``(N,)`` bool. The input was not finite, or no method gave a finite orthonormal basis.
        fell_back: ``(N,)`` bool. Computed by QR or ``eigh`` since the method asked for missed the tolerance.
    """

    q: Tensor
    eigenvalues_estimate: Tensor
    permutation: Tensor
    off_diagonal: Tensor
    orthogonality: Tensor
    failed: Tensor
    fell_back: Tensor


@torch.no_grad()
def eigendecomposition(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``(N, d)``, descending, and the eigenvectors ``(N, d, d)`` in the columns of a matrix.

    ``a`` is ``(N, d, d)`` symmetric, float32 or float64, and not changed. Blocks that are not finite give NaN.

    Raises:
        TypeError, ValueError: another dtype, another shape.
        torch.linalg.LinAlgError: ``eigh`` did not converge; see :func:`hf_emopt.linalg.with_ladder`.
    """
    check_batch(a, "a", "eigendecomposition")
    finite = finite_blocks(a)
    with matmul_precision("highest"):
        eigenvalues, q = torch.linalg.eigh(identity_where_not(finite, a))
    failed = ~finite.unsqueeze(-1)
    return eigenvalues.flip(-1).masked_fill(failed, math.nan), q.flip(-1).masked_fill(failed.unsqueeze(-1), math.nan)


def eigenbasis(a: Tensor) -> Tensor:
    """The eigenvectors of :func:`eigendecomposition`, which see: ``(N, d, d)``, columns by descending eigenvalue."""
    return eigendecomposition(a)[1]


@torch.no_grad()
def refresh_eigenbasis(
    a: Tensor,
    q_old: Tensor,
    method: RefreshMethod = "orthogonal_iteration",
    iterations: int = 1,
    tolerance: float | None = None,
    *,
    precision: Precision = "highest",
    orthogonality_tolerance: float | None = None,
    fallback: bool = True,
    measure: bool = True,
) -> EigenbasisRefresh:
    """An orthonormal basis that diagonalises ``A`` better than the old one does.

    All methods first sort the columns of the old basis by ``diag(Q^T A Q)``, descending (and report the permutation);
    ``orthogonal_iteration`` takes values between two powers of 256, and all at the rounding level of ``A``, for equal.

    Args:
        a: ``(N, d, d)`` symmetric positive semidefinite up to rounding, float32 or float64; not changed.
        q_old: ``(N, d, d)``, orthonormal columns, same dtype; not changed.
        method: one iteration is

            - ``orthogonal_iteration``: ``A Q`` made orthonormal by products and two Cholesky factorisations. Directions
              with eigenvalues at the rounding level of ``A`` stay where they are.
            - ``qr``: ``A Q`` made orthonormal by Householder QR, as in the SOAP paper's program (arXiv 2409.11321): a step
              of the QR algorithm on ``Q^T A Q``. With a ``tolerance``, the adaptive QR of facebookresearch/optimizers.
            - ``eigh``: the decomposition itself, matched to the old columns by rank.
        iterations: this many, or with a ``tolerance`` at most this many.
        tolerance: blocks whose ``off_diagonal`` is at most this are sorted alone, before the first iteration and after
            each. Costs one read of ``(N,)`` flags on the host per iteration.
        precision: of the products with ``A``; see :mod:`hf_emopt.linalg.matmul_precision`. ``fp16`` splits its factors in
            two. Bases are orthonormal to float32's rounding whatever it is. ``qr`` and ``eigh`` factorise exactly.
        orthogonality_tolerance: largest ``orthogonality``. ``None``: 2e-5 in float32, 1e-10 in float64.
        fallback: blocks that are less orthogonal, or not finite, are computed again by QR and, if that fails too, by
            ``eigh``. ``False``: reported as failed.
        measure: fill ``eigenvalues_estimate`` and ``off_diagonal``, which takes a product with the new basis. ``False``:
            the former are those of the old basis, its columns sorted, and the latter 0.

    Reads one ``(N,)`` tensor on the host, to decide about the fallback (``fallback=False`` reads nothing). Decisions
    depend on the data alone.

    Raises:
        TypeError, ValueError: another dtype, or two; shapes that do not fit, or an argument out of range.
        torch.linalg.LinAlgError: ``eigh`` did not converge; see :func:`hf_emopt.linalg.with_ladder`.
    """
    _check_refresh(a, q_old, method, iterations, tolerance, precision)
    if a.numel() == 0:
        order = torch.zeros(a.shape[:2], dtype=torch.int64, device=a.device)
        zeros, no = a.new_zeros(a.shape[0]), a.new_zeros(a.shape[0], dtype=torch.bool)
        return EigenbasisRefresh(q_old.clone(), a.new_zeros(a.shape[:2]), order, zeros, zeros, no, no)
    peak = largest_entry(a)
    finite = peak < math.inf
    scale = power_of_two_scale(peak)
    work = a / scale
    if method in ("qr", "eigh") or tolerance is not None:  # factorizations refuse what is not finite
        work = identity_where_not(finite, work)
    limit = orthogonality_tolerance or (2e-5 if a.dtype == torch.float32 else 1e-10)
    with matmul_precision("highest"):
        start = _measure(work, q_old, precision)
        # Columns whose estimate is noise stay where they are. The programs that "qr" and "eigh" follow sort them.
        shift = _shift(work, precision)
        start, permutation = _sort_columns(start, shift if method == "orthogonal_iteration" else None)
        basis = _iterate(work, start, shift, _Settings(method, iterations, tolerance, precision, measure))
        orthogonality = _orthogonality(basis.q)
        fell_back = torch.zeros_like(finite)
        bad = ~(orthogonality <= limit)
        if fallback and method != "eigh" and bool(bad.any()):  # the one synchronisation
            rows = bad.nonzero().squeeze(-1)
            repaired = _fall_back(identity_where_not(finite[rows], work[rows]), start.rows(rows), limit)
            basis = basis.with_rows(rows, repaired)
            orthogonality = orthogonality.index_copy(0, rows, _orthogonality(repaired.q))
            fell_back, bad = bad, ~(orthogonality <= limit)
        off_diagonal = _off_diagonal(work, basis) if measure else torch.zeros_like(orthogonality)

    failed = bad | ~finite
    keep = failed.unsqueeze(-1)
    identity = torch.arange(a.shape[-1], device=a.device).expand_as(permutation)
    return EigenbasisRefresh(
        q=torch.where(keep.unsqueeze(-1), q_old, basis.q),
        eigenvalues_estimate=basis.eigenvalues * scale.squeeze(-1),
        permutation=torch.where(keep, identity, permutation),
        off_diagonal=off_diagonal.masked_fill(~finite, math.inf),
        orthogonality=orthogonality,
        failed=failed,
        fell_back=fell_back & finite,
    )


def _check_refresh(
    a: Tensor, q_old: Tensor, method: str, iterations: int, tolerance: float | None, precision: Precision
) -> None:
    check_batch(a, "a", "refresh_eigenbasis")
    check_batch(q_old, "q_old", "refresh_eigenbasis")
    check_precision(precision)
    if a.dtype != q_old.dtype:
        raise TypeError(f"refresh_eigenbasis needs a and q_old in one dtype, got {a.dtype} and {q_old.dtype}")
    if a.shape != q_old.shape:
        raise ValueError(f"q_old must have the shape of a, {tuple(a.shape)}, got {tuple(q_old.shape)}")
    if method == "first_order":
        raise ValueError("method='first_order' is gone: use method='orthogonal_iteration', the default")
    if method not in get_args(RefreshMethod):
        raise ValueError(f"method must be one of {', '.join(get_args(RefreshMethod))}, got {method!r}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance must be >= 0, or None for exactly {iterations} iterations, got {tolerance}")


class _Settings(NamedTuple):
    method: RefreshMethod
    iterations: int
    tolerance: float | None
    precision: Precision
    measure: bool


class _Basis(NamedTuple):
    """A basis with its image ``A Q`` and its Rayleigh quotients."""

    q: Tensor
    image: Tensor
    eigenvalues: Tensor

    def rows(self, rows: Tensor) -> _Basis:
        return _Basis(*(x[rows] for x in self))

    def with_rows(self, rows: Tensor, other: _Basis) -> _Basis:
        return _Basis(*(x.index_copy(0, rows, y) for x, y in zip(self, other)))


def _measure(a: Tensor, q: Tensor, precision: Precision) -> _Basis:
    image = _product(a, q, precision)
    return _Basis(q, image, (q * image).sum(-2))


def _off_diagonal(a: Tensor, basis: _Basis) -> Tensor:
    """``(N,)``: the off-diagonal norm of ``Q^T A Q``; ``|A|^2 - |diag|^2`` would cancel."""
    return relative_norm(basis.image - basis.q * basis.eigenvalues.unsqueeze(-2), a)


def _sort_columns(basis: _Basis, floor: Tensor | None) -> tuple[_Basis, Tensor]:
    key = basis.eigenvalues
    if floor is not None:
        # By powers of 256: rounding would choose between two that are nearly equal, and with them the next basis.
        key = torch.frexp(torch.maximum(key, floor.squeeze(-1))).exponent >> 3
    order = key.sort(dim=-1, descending=True, stable=True).indices
    eigenvalues = basis.eigenvalues.gather(-1, order)
    columns = order.unsqueeze(-2).expand_as(basis.q)
    return _Basis(basis.q.gather(-1, columns), basis.image.gather(-1, columns), eigenvalues), order


def _iterate(a: Tensor, basis: _Basis, shift: Tensor, settings: _Settings) -> _Basis:
    precision = settings.precision
    for iteration in range(settings.iterations):
        if settings.tolerance is None:
            q = _step(a, basis, shift, settings)
            unmeasured = iteration + 1 == settings.iterations and not settings.measure
            basis = basis._replace(q=q) if unmeasured else _measure(a, q, precision)
            continue
        # Synchronises; NaN counts as not done.
        rows = (~(_off_diagonal(a, basis) <= settings.tolerance)).nonzero().squeeze(-1)
        if rows.numel() == 0:
            break
        subset = a[rows]
        stepped = _step(subset, basis.rows(rows), shift[rows], settings)
        basis = basis.with_rows(rows, _measure(subset, stepped, precision))
    return basis


def _step(a: Tensor, basis: _Basis, shift: Tensor, settings: _Settings) -> Tensor:
    if settings.method == "qr":
        return torch.linalg.qr(basis.image).Q
    if settings.method == "eigh":
        return torch.linalg.eigh(a).eigenvectors.flip(-1)
    return _orthogonal_iteration(basis, shift, settings.precision)


def _orthogonality(q: Tensor) -> Tensor:
    probes, wide = random_probes(q), (q[s].double() for s in block_chunks(*q.shape[:2]))
    errors = [torch.linalg.vector_norm(x.mT @ (x @ probes) - probes, dim=(-2, -1)) for x in wide]
    # The probes are signs, so their norm is known. A number in q that is not finite makes the error NaN or infinite.
    return (torch.cat(errors) / math.sqrt(probes.numel())).nan_to_num(nan=math.inf, posinf=math.inf).to(q.dtype)


def _fall_back(a: Tensor, basis: _Basis, limit: float) -> _Basis:
    """QR of the shifted ``A Q``, and ``eigh`` where that is no basis either (the old one was none)."""
    image = torch.where(torch.isfinite(basis.image), basis.image, basis.q)
    result = _measure(a, torch.linalg.qr(image + _shift(a, "highest") * basis.q).Q, "highest")
    bad = ~(_orthogonality(result.q) <= limit)
    if bool(bad.any()):
        rows = bad.nonzero().squeeze(-1)
        exact = _measure(a[rows], torch.linalg.eigh(a[rows]).eigenvectors.flip(-1), "highest")
        result = result.with_rows(rows, exact)
    return result


def _shift(a: Tensor, precision: Precision) -> Tensor:
    """``(N, 1, 1)``: somewhat above the rounding of ``A Q``.

    ``A + s I`` has the eigenvectors of ``A``. Without the shift, the image of a direction in the null space is rounding
    noise, and scaled it is a random direction. The order of eigenvalues below ``s`` is not resolved.
    """
    bound = spectral_bound(a)
    unit = max(_roundoff(a.dtype, precision), 4 * unit_roundoff(torch.float32, "highest"))
    return _NOISE * unit * torch.where(bound == 0, 1.0, bound)


def _orthogonal_iteration(basis: _Basis, shift: Tensor, precision: Precision) -> Tensor:
    """The orthogonal factor of ``(A + s I) Q``, without a QR factorisation.

    Cholesky-QR of ``A Q`` itself fails even near the eigenbasis: the column of a small eigenvalue, turned away by a small
    angle, is mostly made of directions of large ones. But with ``Q^T (A + s I) Q = L L^T``, ``(A + s I) Q = Q L L^T``, and
    as ``L^T`` is upper triangular, the factor is ``Q`` times that of ``L``. The condition of ``L`` is the root of that of
    ``A + s I``, so Cholesky-QR gives its factor.
    """
    b = _symmetric_product(basis.q, basis.image, precision)
    b.diagonal(dim1=-2, dim2=-1).add_(shift.squeeze(-1))
    # A block that is not positive definite comes out as no basis, which the caller finds.
    x = cholesky(b).lower
    x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    gram = _symmetric_product(x, x, precision)
    # The columns have length 1, but tensor cores cut sums of squares. Shifted Cholesky-QR (Fukaya et al. 2020) bears a Gram
    # matrix that is numerically singular. The Newton-Schulz steps remove the error, of the size of the shift.
    gram.diagonal(dim1=-2, dim2=-1).fill_(1.0 + math.sqrt(x.shape[-1]) * _gram_roundoff(x.dtype, precision))
    rotation = triangular_solve_right(x, cholesky(gram))
    at_least_split: Precision = precision if precision in ("highest", "fp16") else "bf16x3"
    return _orthonormalize(_product(basis.q, rotation, at_least_split), precision)


def _symmetric_product(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """``A^T B`` that is symmetric, to 22 bits at least: far from the eigenbasis, 16 bits leave no orthonormal basis."""
    if precision == "highest" or a.dtype == torch.float64:
        return product(a.mT, b, "highest")
    return gram_product(a, b)


def _product(a: Tensor, b: Tensor, precision: Precision) -> Tensor:
    """``A B``; with ``fp16`` of split factors, since 11 bits lose all directions below a hundredth of the largest."""
    split = precision == "fp16" and a.dtype == torch.float32
    return general_product(a, b) if split else product(a, b, precision)


def _roundoff(dtype: torch.dtype, precision: Precision) -> float:
    """Of :func:`_product`. Sums of split factors are cut by the units: four times a factor's rounding."""
    return 4 * _PARTS_ROUNDOFF if precision == "fp16" and dtype == torch.float32 else unit_roundoff(dtype, precision)


def _gram_roundoff(dtype: torch.dtype, precision: Precision) -> float:
    exact = precision == "highest" or dtype == torch.float64
    return unit_roundoff(dtype, "highest") if exact else _PARTS_ROUNDOFF


def _orthonormalize(x: Tensor, precision: Precision) -> Tensor:
    """Newton-Schulz steps ``X (3 I - X^T X) / 2``, each of which makes ``3/4 E^2`` of an orthogonality error ``E``: one in
    float32, two of split factors, which begin with a larger error, three in float64."""
    for _ in range(3 if x.dtype == torch.float64 else 2 if precision == "fp16" else 1):
        if precision == "highest" or x.dtype == torch.float64:
            with matmul_precision("highest"):
                error = torch.baddbmm(eye_like(x), x.mT, x, alpha=-1.0)
                x = torch.baddbmm(x, x, error, alpha=0.5)
            continue
        error = gram_product(x, x, alpha=-1.0, diagonal=1.0)
        # Tensor cores cut sums of squares to one side, by 4e-6 for 1024 of them.
        error.diagonal(dim1=-2, dim2=-1).copy_(1.0 - torch.linalg.vector_norm(x, dim=-2).square_())
        x = torch.add(x, product(x, error, "fp16"), alpha=0.5)
    return x
