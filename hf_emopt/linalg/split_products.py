"""Products of 22 bits from 16-bit units, symmetric ones by half: ``A = A_1 + 2^-11 A_2`` in float16, and three products.

``A_1 B_1 + 2^-11 (A_1 B_2 + A_2 B_1)``; the product that is left out is of the size of float32's rounding. The mixed products
are not symmetric, their sum is. Sums start at zero and ``C`` is added to them in float32, once (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_emopt.kernels.triton.configs import LOW
from hf_emopt.linalg.matmul_precision import multiply_16
from hf_emopt.linalg.symmetric_products import kernels_pay, mirrored

Parts: TypeAlias = "tuple[Tensor, Tensor]"
"""``A_1`` and ``A_2``, ``(N, d, d)`` float16."""


def split(a: Tensor, *, scale: float = 1.0, diagonal: float = 0.0) -> Parts:
    """Parts of ``scale A + diagonal I`` for ``(N, d, d)`` float32, whose entries must be below 65504 and are right to 2^-22
    of themselves or 2^-36. The low ones are held 2^11 times as large, out of the subnormal numbers of float16."""
    if kernels_pay(a.device) and a.is_contiguous() and a.numel():
        from hf_emopt.kernels.triton import split_products

        return split_products.split(a, scale, diagonal)
    value = a * scale
    value.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    high = value.half()
    return high, ((value - high) * (1.0 / LOW)).half()


def joined(a: Parts) -> Tensor:
    """``A_1 + 2^-11 A_2`` in float32."""
    return torch.add(a[0].float(), a[1], alpha=LOW)


def split_product(
    a: Parts,
    b: Parts,
    *,
    alpha: float = 1.0,
    c: Tensor | Parts | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    active: Tensor | None = None,
    wide: bool = False,
    wide_diagonal: float = 0.0,
    out: Tensor | None = None,
    parts: bool = False,
) -> tuple[Tensor | None, Parts | None]:
    """``V = alpha A B + beta C + diagonal I`` of symmetric matrices that commute, symmetric bit for bit.

    Args:
        c: ``(N, d, d)`` float32, symmetric, or in parts.
        active: ``(N,)`` bool; ``V`` is zero in the other blocks.
        wide: give ``V + wide_diagonal I`` in float32. ``out``, ``(N, d, d)`` float32, takes it, and may be ``c``.
        parts: give the parts of ``V``.

    Returns:
        ``V + wide_diagonal I`` and the parts of ``V``, each ``None`` where it is not asked for.
    """
    wide = wide or out is not None
    added = (c,) if isinstance(c, Tensor) else c or ()
    if kernels := _kernels(*a, *b, *added, *(() if out is None else (out,))):
        return kernels.split_product(
            a, b, alpha=alpha, c=c, beta=beta, diagonal=diagonal, active=active, wide=wide, wide_diagonal=wide_diagonal,
            out=out, parts=parts,
        )  # fmt: skip
    value = _products(a, b).mul_(alpha)
    if c is not None:
        value.add_(c if isinstance(c, Tensor) else joined(c), alpha=beta)
    value = mirrored(value, diagonal)
    if active is not None:
        value.mul_(active.to(value.dtype).view(-1, 1, 1))
    low = split(value) if parts else None
    if not wide:
        return None, low
    value.diagonal(dim1=-2, dim2=-1).add_(wide_diagonal)
    return (value if out is None else out.copy_(value)), low


def gram_product(a: Tensor, b: Tensor, *, alpha: float = 1.0, diagonal: float = 0.0) -> Tensor:
    """``alpha A^T B + diagonal I`` of float32 ``(N, d, d)`` whose product is known to be symmetric, such as a Gram matrix or
    ``Q^T A Q``: float32, symmetric bit for bit. Entries as for :func:`split`."""
    turned = not (b is a and not a.is_contiguous() and a.mT.is_contiguous())  # as factorizations leave it
    left = split(a.contiguous() if turned else a.mT)
    right = left if b is a else split(b.contiguous())
    if kernels := _kernels(*left, *right):
        return kernels.split_product(left, right, alpha=alpha, diagonal=diagonal, wide=True, trans=(turned, turned))[0]
    flipped = left[0].mT, left[1].mT
    return mirrored((_products(flipped, right) if turned else _products(left, flipped)).mul_(alpha), diagonal)


def general_product(a: Tensor, b: Tensor) -> Tensor:
    """``A B`` of float32 ``(N, d, d)`` in float32, of factors with 22 bits. Entries as for :func:`split`."""
    left, right = split(a.contiguous()), split(b.contiguous())
    if kernels := _kernels(*left, *right):
        return kernels.split_product(left, right, wide=True, trans=(False, True), symmetric=False)[0]
    return _products(left, right)


def _kernels(*matrices: Tensor) -> Any:
    """The module of the kernels where they take these matrices, else ``None``."""
    if not kernels_pay(matrices[0].device):
        return None
    from hf_emopt.kernels.triton import split_products

    return split_products if split_products.takes(*matrices) else None


def _products(a: Parts, b: Parts) -> Tensor:
    mixed = multiply_16(a[0], b[1]).add_(multiply_16(a[1], b[0]))
    return multiply_16(a[0], b[0]).add_(mixed, alpha=LOW)
