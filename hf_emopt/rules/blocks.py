"""Cutting a tensor into blocks, so that no preconditioner is larger than asked for.

Each dimension is cut into pieces of ``limit`` and a remainder, without padding. The blocks of one shape form a class; a
matrix has at most four (inner, right edge, bottom edge, corner), and one class is one batch for the maths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_emopt.linalg.matmul_precision import Precision, multiply_16, scaled_half
from hf_emopt.linalg.symmetric_products import kernels_pay

_LONGEST_HALF_SUM = 2**13


@dataclass(frozen=True)
class BlockClass:
    """Blocks of one shape: for each dimension, where they start, how long each is, and how many stand side by side."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.counts)


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of tensors of one shape.

    Attributes:
        dims: shape of a tensor, without the batch dimension.
        limits: longest piece of each dimension.
    """

    dims: tuple[int, ...]
    limits: tuple[int, ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(dims: tuple[int, ...], limits: tuple[int, ...]) -> BlockGrid:
        """The grid for a shape; made once."""
        return BlockGrid(dims, limits)

    @property
    def classes(self) -> tuple[BlockClass, ...]:
        """Classes in row-major order of (whole pieces, remainder) by dimension."""
        options = []
        for size, limit in zip(self.dims, self.limits):
            whole, rest = divmod(size, limit)
            pieces = [(0, limit, whole)] if whole else []
            options.append(pieces + ([(whole * limit, rest, 1)] if rest else []))
        return tuple(BlockClass(*zip(*choice)) for choice in itertools.product(*options))

    def split(self, x: Tensor) -> list[Tensor]:
        """``(N, *dims)`` to one ``(N, count, *sizes)`` for each class."""
        return [self._class_view(x, c) for c in self.classes]

    def merge(self, parts: Sequence[Tensor], scales: Sequence[Tensor | None] | None = None) -> Tensor:
        """The inverse of :meth:`split`.

        Args:
            parts: ``(N, count, *sizes)``, one for each class; may be changed.
            scales: ``(N * count,)``, what the blocks of a part are multiplied by on their way.
        """
        first, scales = parts[0], scales or [None] * len(parts)
        if len(parts) == 1 and first.shape[1] == 1:
            whole = first if scales[0] is None else _scaled_into(first, scales[0], first)
            return whole.reshape(first.shape[0], *self.dims)
        out = first.new_empty(first.shape[0], *self.dims)
        for part, scale, block_class in zip(parts, scales, self.classes):
            blocks = self._class_view(out, block_class)
            if blocks.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
                blocks.copy_(part) if scale is None else _scaled_into(part, scale, blocks)
                continue
            part = part if scale is None else _scaled_into(part, scale, part)
            window = out
            for d, (start, size, count) in enumerate(_spans(block_class)):
                window = window.narrow(d + 1, start, size * count)
            interleaved, order = _interleaved(block_class, first.shape[0])
            inverse = [order.index(i) for i in range(len(order))]
            shape = [interleaved[i] for i in order]
            window.copy_(part.reshape(shape).permute(inverse).reshape(window.shape))
        return out

    def _class_view(self, x: Tensor, block_class: BlockClass) -> Tensor:
        window = x
        for d, (start, size, count) in enumerate(_spans(block_class)):
            window = window.narrow(d + 1, start, size * count)
        interleaved, order = _interleaved(block_class, x.shape[0])
        return window.reshape(interleaved).permute(order).reshape(x.shape[0], block_class.count, *block_class.sizes)


def _scaled_into(part: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``out = s part`` for blocks ``(N, count, *sizes)``."""
    wide = part.ndim == 4 and part.dtype == out.dtype == scale.dtype == torch.float32 and part.is_contiguous()
    if wide and kernels_pay(part.device):
        from hf_emopt.kernels.triton import half_precision

        if half_precision.takes(out):
            return half_precision.times(part.flatten(0, 1), scale, out)
    return torch.mul(part, scale.view(*part.shape[:2], *[1] * (part.ndim - 2)), out=out)


def _spans(block_class: BlockClass) -> zip[tuple[int, int, int]]:
    return zip(block_class.starts, block_class.sizes, block_class.counts)


def _interleaved(block_class: BlockClass, batch: int) -> tuple[list[int], list[int]]:
    """Shape ``(N, count1, size1, count2, size2 ...)`` and the order that puts the counts before the sizes."""
    shape = [batch]
    for count, size in zip(block_class.counts, block_class.sizes):
        shape += [count, size]
    dims = len(block_class.sizes)
    return shape, [0, *(1 + 2 * d for d in range(dims)), *(2 + 2 * d for d in range(dims))]


def unfold(x: Tensor, d: int) -> Tensor:
    """``(B, b1, ..., bk)`` to ``(B, b_d, rest)``, dimension ``d`` (from 0, the batch not counted) as rows."""
    return x.movedim(d + 1, 1).reshape(x.shape[0], x.shape[d + 1], -1)


def mode_product(x: Tensor, matrix: Tensor, d: int) -> Tensor:
    """Multiplies dimension ``d`` of each block by a matrix: ``y[.., i, ..] = sum_j matrix[i, j] x[.., j, ..]``.

    Args:
        x: ``(B, b1, ..., bk)``.
        matrix: ``(B, p, b_d)``.
        d: dimension, the batch not counted.
    """
    if x.ndim == 3:  # matrices, without moving anything
        return matrix @ x if d == 0 else x @ matrix.mT
    moved = x.movedim(d + 1, 1)
    product = matrix @ moved.reshape(x.shape[0], x.shape[d + 1], -1)
    return product.reshape(x.shape[0], -1, *moved.shape[2:]).movedim(1, d + 1)


Rounded = tuple[int, Tensor, Tensor]
"""A dimension, the float16 matrices that it is multiplied by, ``(B, p, b_d)``, and their scales ``(B, 1, 1)``."""

Half = tuple[Tensor, Tensor]
"""``(B, m, n)`` float16 and the scale of each matrix, ``(B, 1, 1)``: what ``scaled_half`` gives."""


def mode_products(x: Tensor, matrices: Sequence[tuple[int, Tensor]], precision: Precision) -> Tensor:
    """Several of :func:`mode_product`, one after another: ``(dimension, matrix)``.

    With ``fp16`` as :func:`half_mode_products`; matrices of another precision are multiplied as the context says
    (:func:`~hf_emopt.linalg.matmul_precision.matmul_precision`).
    """
    if precision == "fp16" and x.dtype == torch.float32 and x.ndim == 3 and matrices:
        return rounded_mode_products(x, rounded(matrices))
    for d, matrix in matrices:
        x = mode_product(x, matrix.to(x.dtype), d)
    return x


def rounded(matrices: Sequence[tuple[int, Tensor]], peak: Callable[[Tensor], Tensor] | None = None) -> list[Rounded]:
    """Factors for :func:`half_mode_products`, each read as it lies, transposed or not.

    Args:
        peak: gives what no entry of a matrix is larger than, ``(B,)``; ``None`` looks for the largest, which is a pass.
    """
    result: list[Rounded] = []
    for d, matrix in matrices:
        known = None if peak is None else peak(matrix)
        if matrix.stride(-1) == 1:
            result.append((d, *scaled_half(matrix, known)))
        else:
            half, scale = scaled_half(matrix.mT, known)
            result.append((d, half.mT, scale))
    return result


def peak_of_positive(matrix: Tensor) -> Tensor:
    """The largest entry of positive semidefinite matrices ``(B, m, m)``, which is on the diagonal: ``(B,)`` float32."""
    return matrix.diagonal(dim1=-2, dim2=-1).amax(-1).float()


def peak_of_basis(matrix: Tensor) -> Tensor:
    """A bound on the entries of orthonormal columns ``(B, m, m)``: ``(B,)`` ones."""
    return torch.ones(matrix.shape[0], dtype=torch.float32, device=matrix.device)


def rounded_mode_products(x: Tensor, factors: Sequence[Rounded], half: Half | None = None) -> Tensor:
    """The result of :func:`half_mode_products`, multiplied by its scale."""
    value, scale = half_mode_products(x, factors, half)
    _scaled_into(value[:, None], scale, value[:, None])
    return value


def half_mode_products(x: Tensor, factors: Sequence[Rounded], half: Half | None = None) -> tuple[Tensor, Tensor]:
    """``y`` and ``s`` such that ``s y`` is the result of several of :func:`mode_product`, of float16 factors.

    What one product hands to the next is rounded as the factors are.

    Args:
        x: ``(B, m, n)``, or ``(N, count, m, n)`` for blocks where they lie, with ``B = N * count``; float32.
        factors: at least one.
        half: ``x`` rounded, where that is known.

    Returns:
        ``(B, m, n)`` and ``(B,)``, float32.
    """
    y, scale = scaled_half(x) if half is None else half
    for number, (d, factor, size) in enumerate(factors):
        last = number + 1 == len(factors)
        # Sums of numbers below 2 leave the range of float16 from 16,384 terms on.
        wide = last or factor.shape[-1] > _LONGEST_HALF_SUM
        y = multiply_16(*((factor, y) if d == 0 else (y, factor.mT)), wide=wide)
        scale = scale * size
        if wide and not last:
            y, size = scaled_half(y)
            scale = scale * size
    return y, scale.view(-1)


@dataclass
class BlockState:
    """The blocks of one class in a batch of matrices, flattened to one batch dimension, and where their state is.

    Attributes:
        index: which class of the grid.
        grads: ``(N * count, b1, ..., bk)``.
        count: blocks of this class in each matrix.
        first_piece: number of the first block's first factor among all factors of a matrix.
        state: the batch's matrix state.
    """

    index: int
    grads: Tensor
    count: int
    first_piece: int
    state: dict[str, Tensor]

    def tensor(self, name: str, d: int | None = None) -> Tensor:
        """A state tensor with matrices and blocks flattened together: a view, to be changed in place."""
        value = self.state[self.key(name, d)]
        return value.view(-1, *value.shape[2:])

    def key(self, name: str, d: int | None = None) -> str:
        return f"{name}.{self.index}" if d is None else f"{name}.{self.index}.{d}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.grads.shape[1:])


@dataclass(frozen=True)
class FactorDim:
    """One dimension of some blocks of a class, with a factor in each block.

    Attributes:
        block: the class.
        d: the dimension.
        chosen: numbers of the blocks, matrices and blocks flattened together.
        rows: the same as an index on the device; ``None`` for all blocks, which need none.
        order: number of dimensions of the block that have a factor.
    """

    block: BlockState
    d: int
    chosen: tuple[int, ...]
    rows: Tensor | None
    order: int

    def take(self, name: str) -> Tensor:
        """State of these blocks and this dimension: a view of all, a copy of some."""
        return self.pick(self.block.tensor(name, self.d))

    def pick(self, value: Tensor) -> Tensor:
        """These blocks of a tensor ``(N * count, ...)``: a view of all, a copy of some."""
        return value if self.rows is None else value[self.rows]

    def put(self, name: str, value: Tensor) -> None:
        """Writes what :meth:`take` reads."""
        self.assign(self.block.tensor(name, self.d), value)

    def assign(self, target: Tensor, value: Tensor) -> None:
        """Writes these blocks of a tensor ``(N * count, ...)``."""
        if self.rows is None:
            target.copy_(value)
        else:
            target[self.rows] = value.to(target.dtype)
