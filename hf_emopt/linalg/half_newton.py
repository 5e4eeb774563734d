"""Coupled Newton iterations on 16-bit symmetric products, for :func:`hf_emopt.linalg.inverse_root`.

All of ``X``, ``M`` and the polynomials between them are functions of one symmetric matrix, so every product is symmetric and
half of it need not be computed (:func:`hf_emopt.linalg.symmetric.symmul`). ``X`` and ``E = M - I`` are kept in float32, what
multiplies them (``D = P - I`` and ``(I + D)^p - I``) in float16. Both use the same rounded ``D``: that moves the path of the
iteration alone, since ``M = X^p M_0`` holds for any ``D`` that commutes with it. As ``D`` goes to zero, so does the rounding
of every product.

For eigenvalues below 1e-3 of the largest, 11 bits are too few: rounded at the size of the large ones, a matrix has lost the
small ones. Then factors are split in two, ``A = A_1 + 2^-11 A_2``, and ``A_1 B_1 + 2^-11 (A_1 B_2 + A_2 B_1)`` takes three
products. Newton's own steps at the end, where ``D`` is small, do without. Inverses are split in any case: they are as large
as the condition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_emopt.linalg.symmetric import kernels_pay, symmul
from hf_emopt.linalg.triton import half_launch

__all__ = ["SINGLE_EPSILON", "SPLIT_ROUNDOFF", "half_newton"]

SINGLE_EPSILON = 1e-3
"""The smallest share of the largest eigenvalue that factors of 11 bits are right for."""

SPLIT_ROUNDOFF = 2.0**-18
"""Of split factors: 22 bits each, and a last step that is not split."""

# X is held so that its largest eigenvalue is below 2 to this, which leaves the sums of float16 numbers far from their range.
_LARGEST_ROOT = 8
_LOW = 2.0**-11

_Parts = tuple[Tensor, Tensor]


def half_newton(
    e: Tensor, steps: Sequence[tuple[float, ...]], p: int, active: Tensor, largest: float, split: bool = False
) -> tuple[Tensor, Tensor]:
    """Runs the steps from ``X = I``.

    Args:
        e: ``(N, d, d)`` float32, ``M_0 - I``, symmetric; changed in place.
        steps: ``(c_0, c_1)`` of each ``P = c_0 I + c_1 M``.
        p: of the root ``M_0^(-1/p)``.
        active: ``(N,)`` bool; the other blocks wait through steps with ``c_0 + c_1 != 1``.
        largest: bound on the eigenvalues of the root.
        split: steps with ``c_0 + c_1 != 1`` multiply split factors.

    Returns:
        ``X``, symmetric bit for bit, and ``(N,)`` ``|M - I|_F`` before the last step.
    """
    scale = 2.0 ** -max(0, math.ceil(math.log2(largest)) - _LARGEST_ROOT)
    x: Tensor | None = None
    for step, (c0, c1) in enumerate(steps):
        advance = _split_step if split and abs(c0 + c1 - 1.0) > 1e-9 else _step
        x = advance(x, e, c0 + c1 - 1.0, c1, p, active, scale, step + 1 == len(steps))
    assert x is not None
    return x, torch.linalg.vector_norm(e, dim=(-2, -1))


def _step(
    x: Tensor | None, e: Tensor, lift: float, slope: float, p: int, active: Tensor, scale: float, last: bool
) -> Tensor:
    """``X P``, and ``P^p M - I`` in place of ``E`` unless the step is the last."""
    d, m = _factors(e, lift, slope, active)
    if x is None:
        x = d.float()
        _diagonal(x).add_(1.0)
    else:
        rounded = x.half() if scale == 1.0 else torch.mul(x, scale, out=torch.empty_like(d))
        symmul(rounded, d, x, alpha=1.0 / scale, beta=1.0, out=x)
    if not last:
        symmul(_power(d, p), m, e, beta=1.0, out=e)
    return x


def _split_step(
    x: Tensor | None, e: Tensor, lift: float, slope: float, p: int, active: Tensor, scale: float, last: bool
) -> Tensor:
    """The same with split factors."""
    on = active.to(e.dtype).view(-1, 1)
    d = e * (on * slope).unsqueeze(-1)
    _diagonal(d).add_(on * lift)
    parts = _split(d)
    if x is None:
        x = d.clone()
        _diagonal(x).add_(1.0)
    else:
        _add_product(x, _split(x * scale), parts, 1.0 / scale)
    if not last:
        m = e.clone()
        _diagonal(m).add_(1.0)
        _add_product(e, _split(_split_power(d, parts, p)), _split(m))
    return x


def _split(a: Tensor) -> _Parts:
    high = a.half()
    # 2^11 keeps the rest out of float16's subnormal numbers.
    return high, ((a - high) * (1.0 / _LOW)).half()


def _add_product(c: Tensor, a: _Parts, b: _Parts, alpha: float = 1.0) -> Tensor:
    """``C + alpha A B`` in place. The mixed products are not symmetric, their sum is; each adds its lower triangle."""
    symmul(a[0], b[0], c, alpha=alpha, beta=1.0, out=c)
    symmul(a[0], b[1], c, alpha=alpha * _LOW, beta=1.0, out=c)
    return symmul(a[1], b[0], c, alpha=alpha * _LOW, beta=1.0, out=c)


def _split_power(d: Tensor, parts: _Parts, n: int) -> Tensor:
    """``(I + D)^n - I`` by squaring, float32."""
    result: tuple[Tensor, _Parts] | None = None
    while True:
        if n & 1:
            if result is None:
                result = d, parts
            else:
                value = _add_product(result[0] + d, result[1], parts)
                result = value, _split(value)
        n >>= 1
        if n == 0:
            assert result is not None
            return result[0]
        d = _add_product(2.0 * d, parts, parts)
        parts = _split(d)


def _factors(e: Tensor, lift: float, slope: float, active: Tensor) -> tuple[Tensor, Tensor]:
    """``D = lift I + slope E`` and ``M = I + E`` in float16. Without a lift ``D`` vanishes with ``E``, to the last bit.

    Diagonals are summed in float32 and rounded once: of 1 - 0.97, two rounded numbers would leave few digits.
    """
    scaled = abs(lift) > 1e-9
    if kernels_pay(e.device) and e.is_contiguous():
        return half_launch.factors(e, lift, slope, active if scaled else None)
    d, m = torch.empty(e.shape, dtype=torch.float16, device=e.device), e.half()
    on = active.to(e.dtype).view(-1, 1) if scaled else torch.ones((), device=e.device)
    torch.mul(e, (on * slope).view(-1, 1, 1), out=d)
    _diagonal(d).copy_((_diagonal(e) * slope + (lift if scaled else 0.0)) * on)
    _diagonal(m).copy_(_diagonal(e) + 1.0)
    return d, m


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1)


def _power(d: Tensor, n: int) -> Tensor:
    """``(I + D)^n - I`` by squaring."""
    result: Tensor | None = None
    while True:
        if n & 1:
            result = d if result is None else symmul(result, d, result + d, beta=1.0)
        n >>= 1
        if n == 0:
            assert result is not None
            return result
        d = symmul(d, d, d, beta=2.0)
