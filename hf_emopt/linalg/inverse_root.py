"""Inverse roots of symmetric positive semidefinite matrices, the preconditioners of Shampoo.

``solver="eigh"`` is the reference. The coupled iteration is made of matrix products (docs/roots-and-bases.md has times).
Blocks that it does not solve are found by their residual and computed by ``eigh``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from hf_emopt.linalg.inverse_root_fp16 import SINGLE_EPSILON, SPLIT_ROUNDOFF, half_newton
from hf_emopt.linalg.inverse_root_schedule import Polynomial, newton_schedule, power_deviation
from hf_emopt.linalg.matmul_precision import Precision, add_product, check_precision, matmul_precision, unit_roundoff
from hf_emopt.linalg.symmetric_batches import (
    block_chunks,
    check_batch,
    finite_blocks,
    identity_where_not,
    largest_entry,
    power_of_two_scale,
    random_probes,
    relative_norm,
    spectral_bound,
)

RootSolver: TypeAlias = Literal["eigh", "coupled_newton"]

# Roots of a higher order than this are no preconditioner, and their iterations multiply the rounding by it.
_MAX_ROOT = 64


class InverseRoot(NamedTuple):
    """Result of :func:`inverse_root`.

    Attributes:
        value: ``(N, d, d)``, exactly symmetric, dtype and device of the input. NaN in failed blocks.
        residual: ``(N,)``, an estimate of the backward error, relative to ``|A|_F`` (in float64, and with 16-bit factors in
            float32): ``|A X^p A - A|_F`` for the iterations (``X = A^(-1/p)``), ``|Q L Q^T - A|_F`` for ``eigh``.
            Directions whose eigenvalue is below ``residual * lambda_max`` may be wrong by a factor.
        failed: ``(N,)`` bool. The input was not finite, or no finite root with a small residual was found.
        fell_back: ``(N,)`` bool. Computed by ``eigh`` since the iteration did not converge.
    """

    value: Tensor
    residual: Tensor
    failed: Tensor
    fell_back: Tensor


@torch.no_grad()
def inverse_root(
    a: Tensor,
    exponent: float | Fraction,
    epsilon: float = 1e-12,
    solver: RootSolver = "eigh",
    *,
    relative_epsilon: float = 0.0,
    precision: Precision = "highest",
    tolerance: float | None = None,
    max_iterations: int = 100,
    residual_tolerance: float | None = None,
    compute_dtype: torch.dtype | None = None,
    fallback: bool = True,
) -> InverseRoot:
    """``(A + e I)^(-exponent)`` of every block.

    Args:
        a: ``(N, d, d)`` symmetric positive semidefinite up to rounding, float32 or float64; not changed.
        exponent: positive; 1/4 for the two sides of a matrix in Shampoo. The iteration takes ``1/p`` with ``p`` up to 64; a
            float is taken for the fraction within 1e-6.
        epsilon, relative_epsilon: ``e = max(epsilon, relative_epsilon * b)``, where ``b`` bounds the largest eigenvalue
            (:func:`~hf_emopt.linalg.symmetric_batches.spectral_bound`). ``eigh`` first shifts the spectrum by
            ``-lambda_min`` where that is positive, so that the least eigenvalue becomes ``e``, as
            facebookresearch/optimizers does (``PerturbationConfig``). The iterations cannot: where ``e`` does not lift the
            least eigenvalue above rounding they do not converge and fall back. In float32 that happens to every singular
            matrix unless ``relative_epsilon`` is at least 1e-6 (highest, and fp16, which splits its factors below 1e-3,
            but for sides of 2048 on a GPU), 1e-5 (those, bf16x3) or 1e-3 (tf32); it also sets the number of steps.
        solver: ``eigh``; or ``coupled_newton``, the coupled inverse Newton iteration (Guo and Higham 2006; Higham, Functions
            of Matrices, 7.18) with steps scaled to the spectrum's bounds.
        precision: of the products in coupled Newton, see :mod:`hf_emopt.linalg.matmul_precision`; ``eigh`` is exact.
        tolerance: an iteration has converged when ``|M - I|_F^2`` before its last step, which squares the error, is at most
            this. ``None``, and the least there is: 16 unit roundoffs of ``precision`` (1e-6 in float32).
        max_iterations: at most this many steps, and no more than the least eigenvalue that ``e`` leaves can need.
        residual_tolerance: largest residual of an iteration's result. ``None``: 1e-2, or 16 unit roundoffs if larger.
        compute_dtype: ``torch.float64`` computes float32 input in float64 and rounds the result. ``None``: as ``a``.
        fallback: compute blocks that did not converge by ``eigh``. ``False``: report them as failed.

    Iterations read one ``(N,)`` tensor on the host, after the last step, to decide about the fallback (``fallback=False``
    reads nothing). Decisions depend on the data alone. A block's result does not depend on its batch, but for rounding.

    Raises:
        TypeError, ValueError: another dtype; not a batch of square matrices, or an argument out of range.
        torch.linalg.LinAlgError: ``eigh`` did not converge; see :func:`hf_emopt.linalg.with_ladder`.
    """
    check_batch(a, "a", "inverse_root")
    fraction = _check_arguments(exponent, epsilon, relative_epsilon, solver, precision, max_iterations)
    if a.numel() == 0:
        empty = a.new_zeros(a.shape[0])
        return InverseRoot(a.clone(), empty, empty.bool(), empty.bool())
    dtype = compute_dtype or a.dtype
    peak = largest_entry(a)
    finite = peak < math.inf
    scale = power_of_two_scale(peak).to(dtype)
    work = a.to(dtype) / scale
    if solver == "eigh":
        work = identity_where_not(finite, work)
    bound = spectral_bound(work)
    # float64 on the host side of the quotient: epsilon may be subnormal in float32.
    ridge = torch.maximum((epsilon / scale.double()).to(dtype), relative_epsilon * bound)

    factor = scale.double().pow(-float(exponent))
    with matmul_precision("highest"):
        if solver == "eigh":
            value, residual = _by_eigh(work, float(exponent), ridge)
            failed = _eigh_failed(value, residual)
            fell_back = torch.zeros_like(failed)
        else:
            limit = residual_tolerance or max(1e-2, 16 * unit_roundoff(dtype, precision))
            settings = _Iteration(fraction.denominator, precision, tolerance, max_iterations, relative_epsilon, limit)
            z = 1.0 / (bound + ridge)
            value, residual, failed = _by_iteration(work, ridge, z, settings)
            of_scaled = factor
            factor = factor * z.double().pow(float(fraction))
            fell_back = torch.zeros_like(failed)
            # The one synchronisation.
            if fallback and bool(failed.any()):
                rows = failed.nonzero().squeeze(-1)
                exact = identity_where_not(finite[rows], work[rows]), float(exponent), ridge[rows].nan_to_num(nan=1.0)
                value[rows], residual[rows] = _by_eigh(*exact)
                factor[rows] = of_scaled[rows]
                fell_back = failed
                failed = torch.where(failed, _eigh_failed(value, residual), False)

    factor = factor.to(dtype)
    # Blocks may be finite at the scale of the computation and not at that of the input. No entry of a positive matrix is
    # larger than its largest diagonal entry.
    largest = value.diagonal(dim1=-2, dim2=-1).amax(-1)
    failed = failed | ~finite | ~torch.isfinite((largest * factor.reshape(-1)).to(a.dtype))
    value.mul_(factor.masked_fill(failed.reshape(-1, 1, 1), math.nan))
    return InverseRoot(
        value.to(a.dtype), residual.masked_fill(~finite, math.inf).to(a.dtype), failed, fell_back & finite
    )


def _check_arguments(
    exponent: float | Fraction,
    epsilon: float,
    relative_epsilon: float,
    solver: str,
    precision: Precision,
    max_iterations: int,
) -> Fraction:
    check_precision(precision)
    if solver == "coupled_higher_order":
        raise ValueError(
            "solver='coupled_higher_order' is gone: use solver='coupled_newton' for exponents 1/p, or 'eigh' for any exponent"
        )
    if solver not in get_args(RootSolver):
        raise ValueError(f"solver must be one of {', '.join(get_args(RootSolver))}, got {solver!r}")
    if not (exponent > 0 and math.isfinite(exponent)):
        raise ValueError(f"exponent must be positive, it is the p of A^(-p), got {exponent}")
    for name, value in (("epsilon", epsilon), ("relative_epsilon", relative_epsilon)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be a finite number >= 0, got {value}")
    if max_iterations < 1:
        raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
    fraction = Fraction(exponent).limit_denominator(_MAX_ROOT)
    if solver == "eigh":
        return fraction
    if abs(float(fraction) - float(exponent)) > 1e-6 * float(exponent):
        raise ValueError(
            f"coupled_newton computes A^(-1/p) for p up to {_MAX_ROOT}, and exponent={exponent} is no such fraction: "
            "use solver='eigh'"
        )
    if fraction.numerator != 1:
        raise ValueError(f"coupled_newton computes A^(-1/p), and exponent={exponent} is -{fraction}: use solver='eigh'")
    return fraction


def _by_eigh(a: Tensor, exponent: float, ridge: Tensor) -> tuple[Tensor, Tensor]:
    eigenvalues, q = torch.linalg.eigh(a)
    residual = torch.cat([_reconstruction(a[s], eigenvalues[s], q[s]) for s in block_chunks(*a.shape[:2])])
    # ridge is added to eigenvalues, not to A, where large entries would swallow it.
    shifted = eigenvalues - eigenvalues[:, :1].clamp(max=0.0) + ridge.squeeze(-1)
    # Halves on both sides: the product is then symmetric, and positive, to the last bit but for summation order.
    half = q * shifted.pow(-0.5 * exponent).unsqueeze(-2)
    return _symmetric_part(half @ half.mT), residual


def _reconstruction(a: Tensor, eigenvalues: Tensor, q: Tensor) -> Tensor:
    q, probes = q.double(), random_probes(a)
    image = a.double() @ probes
    return relative_norm(q @ (eigenvalues.double().unsqueeze(-1) * (q.mT @ probes)) - image, image).to(a.dtype)


def _eigh_failed(value: Tensor, residual: Tensor) -> Tensor:
    # A decomposition is right to a few roundoffs or is none; libraries have returned such without an error.
    return ~finite_blocks(value) | ~(residual < 1e-3)


def _symmetric_part(x: Tensor) -> Tensor:
    return (x + x.mT).mul_(0.5)


class _Iteration(NamedTuple):
    root: int
    precision: Precision
    tolerance: float | None
    max_iterations: int
    relative_epsilon: float
    residual_limit: float


def _by_iteration(a: Tensor, ridge: Tensor, z: Tensor, settings: _Iteration) -> tuple[Tensor, Tensor, Tensor]:
    """Root of ``z (A + ridge I)``, residual, and which blocks are not to be trusted. ``X_0 = I`` and ``M_0`` is the matrix;
    each step makes ``X P`` and ``P^p M`` of them, so that ``M = X^p M_0`` and its convergence to ``I`` makes ``X`` the root.

    All products are with ``D = P - I`` and are added: ``X + X D``. As ``D`` goes to zero so does the rounding of
    the products, in every precision, and converged blocks stay as they are.
    """
    p, precision = settings.root, settings.precision
    start = a * z
    start.diagonal(dim1=-2, dim2=-1).add_((ridge * z).squeeze(-1))
    half = precision == "fp16" and a.dtype == torch.float32
    # An inverse is as large as the condition, and not half as many digits of it are right.
    split = half and (settings.relative_epsilon < SINGLE_EPSILON or p == 1)
    unit = SPLIT_ROUNDOFF if split else unit_roundoff(a.dtype, precision)
    floor = max(settings.tolerance or 0.0, 16 * unit)
    degree = 2 if split or unit <= unit_roundoff(torch.float32, "highest") else 1
    # Half of the smallest eigenvalue that M_0 has after the ridge and the rounding of the input.
    lowest = 0.5 * min(1.0, max(settings.relative_epsilon, unit_roundoff(a.dtype, "highest")))
    steps = newton_schedule(p, lowest, unit, degree)[: settings.max_iterations]
    # A step that is scaled for a wide spectrum leads away from the identity: blocks that are there already wait.
    deviation = _plus_identity(start, -1.0)
    active = ~(largest_entry(deviation) <= floor)
    # The last step squares the error. The residual, and not the error, is checked after it.
    if half:
        x, error = half_newton(deviation, steps, p, active, lowest, split)
    else:
        x, error = _full_newton(start, steps, p, active, precision)
    # The limit is far above what float32 leaves; with 16-bit factors, split or not, it spares copies of both in float64.
    exact = start.dtype if half else torch.float64
    chunks = [slice(None)] if half else block_chunks(*a.shape[:2])
    residual = torch.cat([_root_residual(start[s].to(exact), x[s].to(exact), p) for s in chunks]).to(a.dtype)
    untrusted = ~(error * error <= floor) | ~(residual <= settings.residual_limit) | ~finite_blocks(x)
    return x, residual, untrusted


def _full_newton(
    m: Tensor, steps: Sequence[Polynomial], p: int, active: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """``X`` after all steps, and ``|M - I|_F`` before the last."""
    x = m

    def times(a: Tensor, b: Tensor, c: Tensor, beta: float) -> Tensor:
        return add_product(c, a, b, precision, beta=beta)

    for step, polynomial in enumerate(steps):
        d = _deviation(polynomial, m, active, precision)
        x = _plus_identity(d, 1.0) if step == 0 else add_product(x, x, d, precision)
        if step + 1 < len(steps):
            m = add_product(m, power_deviation(d, p, torch.add, times), m, precision)
    return _symmetric_part(x), torch.linalg.vector_norm(_plus_identity(m, -1.0), dim=(-2, -1))


def _plus_identity(m: Tensor, times: float) -> Tensor:
    result = m.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(times)
    return result


def _deviation(polynomial: Polynomial, m: Tensor, active: Tensor, precision: Precision) -> Tensor:
    """``P - I`` for ``P = c_0 I + c_1 M (+ c_2 M^2)``, in powers of ``M - I``. Steps with ``P(1) != 1`` have zero in blocks
    that are not active."""
    lift = sum(polynomial) - 1.0
    scaled = abs(lift) > 1e-9
    on: Tensor | float = active.to(m.dtype).reshape(-1, 1) if scaled else 1.0
    wide = on.unsqueeze(-1) if isinstance(on, Tensor) else on
    if len(polynomial) == 3:
        e, (_, c1, c2) = _plus_identity(m, -1.0), polynomial
        value = add_product(e, e, e, precision, beta=(c1 + 2 * c2) / c2).mul_(c2 * wide)
        value.diagonal(dim1=-2, dim2=-1).add_(on * (lift if scaled else 0.0))
        return value
    value = m * (polynomial[1] * wide)
    value.diagonal(dim1=-2, dim2=-1).add_(on * (polynomial[0] - 1.0))
    return value


def _root_residual(a: Tensor, x: Tensor, p: int) -> Tensor:
    y = image = a @ random_probes(a).to(a.dtype)
    for _ in range(p):
        y = x @ y
    return relative_norm(a @ y - image, image)
