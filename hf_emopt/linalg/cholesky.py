"""Cholesky factors of large matrices on a GPU, and solves with them, by blocks: nearly all arithmetic is in products.

The library factorizes the diagonal blocks. Each panel below them is updated by one product, and multiplied by the inverse of
the diagonal block's factor (N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., chapter 10 on the
factorization, here by block columns, left-looking, and chapter 14 on inverses of triangles). Nothing here reads a number on
the host or keeps a tensor between calls, so all of it can be recorded in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_emopt.linalg.matmul_precision import matmul_precision
from hf_emopt.linalg.symmetric_batches import eye_like

# Columns of a diagonal block: the work that is not in products grows with it, the number of launches falls.
BLOCK = 256
# Triangles of this size are inverted by substitution, larger ones from them by products. From 64 on torch solves the matrices
# of a small batch one by one.
LEAF = 32
# Where the library's own blocks are large (LAPACK on a CPU), it is faster than these functions.
DEVICES = ("cuda",)


class Factor(NamedTuple):
    """Result of :func:`cholesky`.

    Attributes:
        lower: ``(N, d, d)``, ``L`` with ``A = L L^T``, zero above the diagonal. Columns are contiguous, as torch has them.
        inverses: ``(N, b, b)`` each, of the diagonal blocks of ``L`` but the last, from the top; all zero above the diagonal.
            Empty where the library made the whole factor.
    """

    lower: Tensor
    inverses: tuple[Tensor, ...]


@torch.no_grad()
def cholesky(a: Tensor) -> Factor:
    """The lower Cholesky factor of symmetric positive definite ``a``, ``(N, d, d)`` float32 or float64; not changed.

    The lower triangle of ``a`` alone counts. The residual ``A - L L^T`` is the library's, or some times that (four were seen)
    where diagonal blocks are ill-conditioned.

    A matrix that is not positive definite does not disturb the others of the batch. Up to two blocks, and on a CPU, its
    numbers are those that ``torch.linalg.cholesky_ex`` leaves. Beyond, NaN fills the diagonal of the first block column that
    has no factor, all of ``L`` below that block, and the diagonal right of it. A number in the lower triangle that is not
    finite leaves at least one such in ``L``.
    """
    d = a.shape[-1]
    if a.device.type not in DEVICES or d <= 2 * BLOCK:
        return Factor(torch.linalg.cholesky_ex(a).L, ())
    lower = torch.zeros_like(a, memory_format=torch.contiguous_format).mT
    elsewhere = _elsewhere(BLOCK, a.device)
    inverses = []
    with matmul_precision("highest"):
        for start in range(0, d, BLOCK):
            stop = min(start + BLOCK, d)
            panel = a[:, start:, start:stop]
            if start:
                left = lower[:, start:, :start]
                panel = torch.baddbmm(panel, left, left[:, : stop - start].mT, alpha=-1.0)
            block, info = torch.linalg.cholesky_ex(panel[:, : stop - start])
            # What the library leaves of a block that has no factor may look like one. NaN of the diagonal goes into the
            # inverse, and so into everything below and, by the products, right of it.
            block.diagonal(dim1=-2, dim2=-1).masked_fill_((info != 0).unsqueeze(-1), math.nan)
            lower[:, start:stop, start:stop] = block
            if stop < d:
                inverses.append(_inverse(block, elsewhere))
                torch.bmm(panel[:, stop - start :], inverses[-1].mT, out=lower[:, stop:, start:stop])
    return Factor(lower, tuple(inverses))


@torch.no_grad()
def triangular_solve_right(x: Tensor, factor: Factor) -> Tensor:
    """``X L^{-T}`` for ``(N, m, d)`` in the dtype of the factor, which is :func:`cholesky`'s; not changed.

    By block columns, ``Y_j = (X_j - sum_{i<j} Y_i L_ji^T) L_jj^{-T}``. From the first block column where :func:`cholesky` has
    put NaN, ``Y`` is NaN.
    """
    lower, inverses = factor
    if not inverses:
        return torch.linalg.solve_triangular(lower.mT, x, upper=True, left=False)
    start = sum(inverse.shape[-1] for inverse in inverses)
    last = _inverse(lower[:, start:, start:], _elsewhere(lower.shape[-1] - start, x.device))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    start = 0
    with matmul_precision("highest"):
        for inverse in (*inverses, last):
            stop = start + inverse.shape[-1]
            right = x[..., start:stop]
            if start:
                right = torch.baddbmm(right, y[..., :start], lower[:, start:stop, :start].mT, alpha=-1.0)
            torch.bmm(right, inverse.mT, out=y[..., start:stop])
            start = stop
    return y


def _inverse(lower: Tensor, elsewhere: list[Tensor]) -> Tensor:
    """The inverse of lower triangles ``(N, b, b)``, zero above the diagonal.

    By halves, ``[[A, 0], [C, B]]^{-1} = [[A^{-1}, 0], [-B^{-1} C A^{-1}, B^{-1}]]``, from LEAF up. With all the inverses of
    halves on the diagonal of one matrix ``X``, and their ``C`` in place in another, this is ``X - X C X``. The products are
    mostly of zeros, but take less time than the launches that would spare the zeros.
    """
    n, b = lower.shape[:2]
    size = _padded(b)
    if size != b:  # ones on the rest of the diagonal
        wide = eye_like(lower.new_empty(0, size)).repeat(n, 1, 1)
        wide[:, :b, :b] = lower
        lower = wide
    inverse = lower.new_zeros(n, size, size)
    leaves = _leaves(lower)
    _leaves(inverse).copy_(torch.linalg.solve_triangular(leaves, eye_like(leaves), upper=False))
    with matmul_precision("highest"):
        for mask in elsewhere:
            corner = lower.masked_fill(mask, 0.0)
            inverse = torch.baddbmm(inverse, inverse, torch.bmm(corner, inverse), alpha=-1.0)
    return inverse[:, :b, :b]


def _padded(b: int) -> int:
    return b + -b % LEAF


def _leaves(x: Tensor) -> Tensor:
    """View ``(N, count, LEAF, LEAF)`` of the diagonal blocks of ``(N, count * LEAF, count * LEAF)``."""
    tiles = x.unflatten(2, (-1, LEAF)).unflatten(1, (-1, LEAF))
    return tiles.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _elsewhere(b: int, device: torch.device) -> list[Tensor]:
    """For :func:`_inverse` at ``b``: bool masks of all that is in no ``C`` of a pair of triangles of LEAF, of twice LEAF, and
    so on. A triangle without a partner has none."""
    row = torch.arange(_padded(b), device=device).unsqueeze(-1)
    masks = []
    width = LEAF
    while width < b:
        block = row // width
        masks.append((block != block.mT + 1) | (block % 2 == 0))
        width *= 2
    return masks
