"""Cutting a tensor into blocks, so that no preconditioner is larger than asked for.

Each dimension is cut into pieces of ``limit`` and a remainder, without padding. The blocks of one shape form a class; a
matrix has at most four (inner, right edge, bottom edge, corner), and one class is one batch for the maths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

__all__ = ["BlockClass", "BlockGrid"]


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

    def merge(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        first = parts[0]
        if len(parts) == 1 and parts[0].shape[1] == 1:
            return first.reshape(first.shape[0], *self.dims)
        out = first.new_empty(first.shape[0], *self.dims)
        for part, block_class in zip(parts, self.classes):
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


def _spans(block_class: BlockClass) -> zip[tuple[int, int, int]]:
    return zip(block_class.starts, block_class.sizes, block_class.counts)


def _interleaved(block_class: BlockClass, batch: int) -> tuple[list[int], list[int]]:
    """Shape ``(N, count1, size1, count2, size2 ...)`` and the order that puts the counts before the sizes."""
    shape = [batch]
    for count, size in zip(block_class.counts, block_class.sizes):
        shape += [count, size]
    dims = len(block_class.sizes)
    return shape, [0, *(1 + 2 * d for d in range(dims)), *(2 + 2 * d for d in range(dims))]
