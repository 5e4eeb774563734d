"""Products with a symmetric operand or result, the building blocks of matrix iterations.

Each function is the one place where a faster kernel for its product can be put; all of them run torch's general matrix
products for now. Matrices are ``(m, n)`` or batches ``(B, m, n)`` of one floating dtype; nothing is changed in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_product", "gram", "symmetric_polynomial"]


def gram(x: Tensor) -> Tensor:
    """``X X^T``: ``(..., m, n) -> (..., m, m)``, symmetric positive semidefinite up to rounding."""
    return x @ x.mT


def symmetric_polynomial(a: Tensor, b: float, c: float) -> Tensor:
    """``b A + c A A`` for symmetric ``A`` ``(..., m, m)``, rounded once.

    ``c == 0`` skips the product. That is a saving, and a must: ``torch.baddbmm`` on the CPU ignores ``beta`` for
    bfloat16 when ``alpha`` is 0 (torch 2.13).
    """
    if c == 0:
        return b * a
    product = torch.addmm if a.ndim == 2 else torch.baddbmm
    return product(a, a, a, beta=b, alpha=c)


def add_product(a: float, b: Tensor, x: Tensor) -> Tensor:
    """``a X + B X`` for symmetric ``B`` ``(..., m, m)`` and ``X`` ``(..., m, n)``, rounded once."""
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    return product(x, b, x, beta=a)
