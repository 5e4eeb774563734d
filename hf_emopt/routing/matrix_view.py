"""A matrix view: how a parameter, as it is stored, holds a batch of the matrices that the forward pass multiplies by.

It consists of plain integers, so that it can be printed, compared across ranks and kept in a checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixView:
    """A batch of ``out x in`` matrices inside one parameter.

    The parameter is reshaped to ``view``; dimension ``dim`` of that view is cut to ``start:stop:step``; then the view's
    dimensions are put in the order ``batch + rows + cols`` and merged, which gives a tensor ``(B, m, n)`` where ``m``
    counts outputs and ``n`` inputs of the linear map. Every dimension of ``view`` occurs exactly once in
    ``batch + rows + cols``.

    Attributes:
        name: role of the matrix (``"q"``, ``"gate"`` ...); empty for a parameter that is one matrix view.
        view: shape that the whole parameter is reshaped to; ``prod(view) == parameter.numel()``.
        rows: view dimensions that make up the outputs.
        cols: view dimensions that make up the inputs.
        batch: view dimensions that count independent matrices (experts, heads, groups of a convolution).
        dim: view dimension that is cut, or ``None`` when the matrix view is the whole view.
        start, stop, step: the cut along ``dim``.
    """

    name: str
    view: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    batch: tuple[int, ...] = ()
    dim: int | None = None
    start: int = 0
    stop: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        order = self.batch + self.rows + self.cols
        where = f"matrix view {self.name!r}"
        if sorted(order) != list(range(len(self.view))):
            raise ValueError(f"{where}: batch + rows + cols = {order} must name each of {self.view} once")
        if not self.rows or not self.cols:
            raise ValueError(f"{where}: a matrix needs rows and columns, got rows={self.rows} cols={self.cols}")
        if self.dim is not None and not (0 <= self.start < self.stop <= self.view[self.dim] and self.step >= 1):
            cut = f"{self.start}:{self.stop}:{self.step}"
            raise ValueError(f"{where}: cut {cut} is outside dimension {self.dim} of {self.view}")

    @classmethod
    def whole(cls, shape: tuple[int, ...] | torch.Size, *, transposed: bool = False) -> MatrixView:
        """A plain matrix ``(out, in)``, or ``(in, out)`` when ``transposed``; leading dimensions are a batch."""
        dims = tuple(shape)
        if len(dims) < 2:
            raise ValueError(f"a matrix needs two dimensions, got shape {dims}")
        last, before = len(dims) - 1, len(dims) - 2
        rows, cols = ((last,), (before,)) if transposed else ((before,), (last,))
        return cls("", dims, rows=rows, cols=cols, batch=tuple(range(before)))

    @property
    def cut_view(self) -> tuple[int, ...]:
        """Shape of the view after the cut."""
        if self.dim is None:
            return self.view
        length = len(range(self.start, self.stop, self.step))
        return (*self.view[: self.dim], length, *self.view[self.dim + 1 :])

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(B, m, n)``: number of matrices, outputs, inputs."""
        sizes = self.cut_view
        batch, rows, cols = (math.prod(sizes[d] for d in dims) for dims in (self.batch, self.rows, self.cols))
        return batch, rows, cols

    @property
    def numel(self) -> int:
        """Elements of the parameter that this matrix view covers."""
        return math.prod(self.cut_view)

    def _cut(self, tensor: Tensor) -> Tensor:
        viewed = tensor.reshape(self.view)
        if self.dim is None:
            return viewed
        index = [slice(None)] * len(self.view)
        index[self.dim] = slice(self.start, self.stop, self.step)
        return viewed[tuple(index)]

    def extract(self, tensor: Tensor) -> Tensor:
        """The matrices ``(B, m, n)`` out of a tensor of any dtype with the parameter's elements in row-major order; a view
        where strides allow."""
        return self._cut(tensor).permute(self.batch + self.rows + self.cols).reshape(self.shape)

    def insert(self, target: Tensor, matrices: Tensor) -> None:
        """Writes matrices ``(B, m, n)`` to their place in ``target``, the inverse of :meth:`extract`.

        Args:
            target: contiguous tensor with the parameter's elements, changed in place (cast to its dtype).

        Raises:
            ValueError: when ``target`` is not contiguous, since the write would go to a copy.
        """
        if not target.is_contiguous():
            raise ValueError(
                "MatrixView.insert needs a contiguous target; writing through a reshaped copy would be lost"
            )
        order = self.batch + self.rows + self.cols
        sizes = self.cut_view
        self._cut(target).permute(order).copy_(matrices.reshape([sizes[d] for d in order]))
