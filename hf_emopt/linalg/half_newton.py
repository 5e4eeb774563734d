"""Coupled Newton iterations on 16-bit symmetric products, for :func:`hf_emopt.linalg.inverse_root`.

All of ``X``, ``M`` and the polynomials between them are functions of one symmetric matrix, so every product is symmetric and
half of it need not be computed (:func:`hf_emopt.linalg.symmetric.symmul`). ``X`` and ``E = M - I`` are kept in float32, what
multiplies them (``D = P - I`` and ``(I + D)^p - I``) in float16. Both use the same rounded ``D``: that moves the path of the
iteration alone, since ``M = X^p M_0`` holds for any ``D`` that commutes with it. As ``D`` goes to zero, so does the rounding
of every product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_emopt.linalg.symmetric import symmul

__all__ = ["half_newton"]

# X is held so that its largest eigenvalue is below 2 to this, which leaves the sums of float16 numbers far from their range.
_LARGEST_ROOT = 8


def half_newton(
    e: Tensor, steps: Sequence[tuple[float, ...]], p: int, active: Tensor, largest: float
) -> tuple[Tensor, Tensor]:
    """Runs the steps from ``X = I``.

    Args:
        e: ``(N, d, d)`` float32, ``M_0 - I``, symmetric; changed in place.
        steps: ``(c_0, c_1)`` of each ``P = c_0 I + c_1 M``.
        p: of the root ``M_0^(-1/p)``.
        active: ``(N,)`` bool; the other blocks wait through steps with ``c_0 + c_1 != 1``.
        largest: bound on the eigenvalues of the root.

    Returns:
        ``X``, symmetric bit for bit, and ``(N,)`` ``|M - I|_F`` before the last step.
    """
    scale = 2.0 ** -max(0, math.ceil(math.log2(largest)) - _LARGEST_ROOT)
    x = torch.empty(0)
    for step, (c0, c1) in enumerate(steps):
        d = _deviation(e, c0 + c1 - 1.0, c1, active)
        if step == 0:
            x = d.float()
            _diagonal(x).add_(1.0)
        else:
            rounded = torch.mul(x, scale, out=torch.empty_like(d))
            symmul(rounded, d, x, alpha=1.0 / scale, beta=1.0, out=x)
        if step + 1 < len(steps):
            m = e.half()
            _set_diagonal(m, _diagonal(e) + 1.0)
            symmul(_power(d, p), m, e, beta=1.0, out=e)
    return x, torch.linalg.vector_norm(e, dim=(-2, -1))


def _deviation(e: Tensor, lift: float, slope: float, active: Tensor) -> Tensor:
    """``lift I + slope E`` in float16. Without a lift it vanishes with ``E``, to the last bit of float16."""
    d = torch.empty(e.shape, dtype=torch.float16, device=e.device)
    if abs(lift) <= 1e-9:
        return torch.mul(e, slope, out=d)
    on = active.to(e.dtype)
    torch.mul(e, (on * slope).view(-1, 1, 1), out=d)
    _set_diagonal(d, (_diagonal(e) * slope + lift) * on.view(-1, 1))
    return d


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(dim1=-2, dim2=-1)


def _set_diagonal(x: Tensor, value: Tensor) -> None:
    """Rounds what was summed in float32: of 1 - 0.97 the sum of two rounded numbers would leave few digits."""
    _diagonal(x).copy_(value)


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
