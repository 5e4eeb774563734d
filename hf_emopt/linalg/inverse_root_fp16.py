"""Coupled Newton iterations on 16-bit symmetric products, for :func:`hf_emopt.linalg.inverse_root`.

All of ``X``, ``M`` and the polynomials between them are functions of one symmetric matrix, so every product is symmetric.
``X`` and ``E = M - I`` are kept in float32, their factors (``D = P - I`` and ``(I + D)^p - I``) in float16. Both use the
same rounded ``D``, which moves the path of the iteration alone: ``M = X^p M_0`` holds for any ``D`` that commutes with it.

11 bits lose eigenvalues below 1e-3 of the largest. Then factors are split in two (:mod:`hf_emopt.linalg.split_products`),
but for the last steps, where ``D`` is small. Inverses are split in any case: they are as large as the condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_emopt.linalg.inverse_root_schedule import Polynomial, finishes, power_deviation
from hf_emopt.linalg.split_products import Parts, joined, split, split_product
from hf_emopt.linalg.symmetric_products import kernels_pay, symmul

# The smallest share of the largest eigenvalue that factors of 11 bits are right for.
SINGLE_EPSILON = 1e-3
# Of split factors: 22 bits each, and last steps that are not split.
SPLIT_ROUNDOFF = 2.0**-18
# X is held so that its largest eigenvalue is below 2 to this, which leaves the sums of float16 numbers far from their range.
_LARGEST_ROOT = 8


def half_newton(
    e: Tensor, steps: Sequence[Polynomial], p: int, active: Tensor, lowest: float, split_steps: bool = False
) -> tuple[Tensor, Tensor]:
    """Runs the steps from ``X = I``.

    Args:
        e: ``(N, d, d)`` float32, ``M_0 - I``, symmetric; changed in place.
        steps: coefficients of each ``P(M)``, lowest first: of the first degree, or of the second in steps that are split and
            in those with ``P(1) = 1``.
        active: ``(N,)`` bool; the other blocks wait through steps with ``P(1) != 1``.
        lowest: bound on the eigenvalues of ``M_0``.
        split_steps: split the factors of all but the last steps.

    Returns:
        ``X``, symmetric bit for bit, and ``(N,)`` ``|M - I|_F`` before the last step.
    """
    scale = 2.0 ** -max(0, math.ceil(-math.log2(lowest) / p) - _LARGEST_ROOT)
    x: Tensor | None = None
    for number, polynomial in enumerate(steps):
        advance = _split_step if split_steps and not finishes(polynomial, p) else _step
        x = advance(x, e, polynomial, p, active, scale, number + 1 == len(steps))
    assert x is not None
    return x, torch.linalg.vector_norm(e, dim=(-2, -1))


def _step(
    x: Tensor | None, e: Tensor, polynomial: Polynomial, p: int, active: Tensor, scale: float, last: bool
) -> Tensor:
    """``X P``, and ``P^p M - I`` in place of ``E`` unless the step is the last."""
    if len(polynomial) == 2:
        d, m = _factors(e, sum(polynomial) - 1.0, polynomial[1], active)
    else:  # in powers of E, with which D vanishes
        half, m = _factors(e, 0.0, 1.0, active)
        _, c1, c2 = polynomial
        d = symmul(half, half, half, alpha=c2, beta=c1 + 2 * c2)
    if x is None:
        x = d.float()
        _diagonal(x).add_(1.0)
    else:
        rounded = x.half() if scale == 1.0 else torch.mul(x, scale, out=torch.empty_like(d))
        symmul(rounded, d, x, alpha=1.0 / scale, beta=1.0, out=x)
    if not last:
        symmul(power_deviation(d, p, torch.add, _times), m, e, beta=1.0, out=e)
    return x


def _split_step(
    x: Tensor | None, e: Tensor, polynomial: Polynomial, p: int, active: Tensor, scale: float, last: bool
) -> Tensor:
    """The same with split factors."""
    m = split(e, diagonal=1.0)
    c0, c1, c2 = (*polynomial, 0.0)[:3]
    # c_0 I + c_1 M - I = c_1 E + (c_0 + c_1 - 1) I
    terms = {"alpha": c2, "c": e, "beta": c1, "diagonal": c0 + c1 - 1.0, "active": active}
    first = x is None
    wide, d = split_product(m, m, wide=first, wide_diagonal=1.0, parts=True, **terms)  # type: ignore[arg-type]
    assert d is not None
    if x is None:
        assert wide is not None
        x = wide
    else:
        split_product(split(x, scale=scale), d, alpha=1.0 / scale, c=x, beta=1.0, out=x)
    if not last:
        power = power_deviation(d, p, lambda one, other: joined(one) + joined(other), _split_times)
        split_product(power, m, c=e, beta=1.0, out=e)
    return x


def _split_times(a: Parts, b: Parts, c: Tensor | Parts, beta: float) -> Parts:
    value = split_product(a, b, c=c, beta=beta, parts=True)[1]
    assert value is not None
    return value


def _factors(e: Tensor, lift: float, slope: float, active: Tensor) -> tuple[Tensor, Tensor]:
    """``D = lift I + slope E`` and ``M = I + E`` in float16. Diagonals are summed in float32 and rounded once. Steps that
    leave the identity where it is have no lift but for rounding: then ``D`` vanishes with ``E``, to the last bit."""
    scaled = abs(lift) > 1e-9
    lift = lift if scaled else 0.0
    if kernels_pay(e.device) and e.is_contiguous():
        from hf_emopt.kernels.triton.half_precision import factors

        return factors(e, lift, slope, active if scaled else None)
    d, m = torch.empty(e.shape, dtype=torch.float16, device=e.device), e.half()
    on = active.to(e.dtype).view(-1, 1) if scaled else torch.ones((), device=e.device)
    torch.mul(e, (on * slope).view(-1, 1, 1), out=d)
    _diagonal(d).copy_((_diagonal(e) * slope + lift) * on)
    _diagonal(m).copy_(_diagonal(e) + 1.0)
    return d, m


def _times(a: Tensor, b: Tensor, c: Tensor, beta: float) -> Tensor:
    return symmul(a, b, c, beta=beta)


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1)
