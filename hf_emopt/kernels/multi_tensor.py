"""Elementwise passes over many tensors at once: momentum, copies with a cast and a scale, and the weights' step.

A table of *flat spans* is made once: stretches of consecutive elements of a tensor of one list (the left) and of a tensor of
another (the right). Then each pass is one launch of a Triton kernel, whatever the number of tensors; elsewhere a caller uses
torch's foreach functions, which do the same sums. Times are in docs/kernels.md.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hf_emopt.kernels.triton.launching import Prepared
from hf_emopt.kernels.triton.runtime import current_stream, interpreting, supported

Index = tuple[slice, ...]

_dtype_of = operator.attrgetter("dtype")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEPT_TABLES = 16


def kernels_run_on(device: torch.device) -> bool:
    """Whether the kernels run on tensors of a device."""
    return (device.type == "cuda" or (device.type == "cpu" and interpreting())) and supported(device)


def flat_span(where: Index, shape: Sequence[int]) -> tuple[int, int] | None:
    """``(offset, numel)`` of a region in a contiguous tensor, or ``None`` where its elements do not follow one another."""
    offset, numel, open_ended = 0, 1, True
    stride = math.prod(shape)
    for piece, size in zip(where, shape):
        stride //= max(size, 1)
        length = piece.stop - piece.start
        offset += piece.start * stride
        if not open_ended and length != size:
            return None
        if length != 1:  # from here on every dimension must be whole
            open_ended = False
        numel *= length
    return offset, numel


class MultiTensorTable:
    """A multi-tensor table: the flat spans that tensors of two lists have in common.

    Args:
        runs: ``(left tensor, offset in it, right tensor, offset in it, elements)``; tensors are contiguous, offsets in
            elements.
    """

    BLOCK = 4096
    """Elements of a program: 16 for each of 256 threads."""

    def __init__(self, runs: Sequence[tuple[int, int, int, int, int]]) -> None:
        table = np.array(runs, dtype=np.int64).reshape(-1, 5).T
        table = table[:, table[4] > 0]
        self.left, self.left_offset, self.right, self.right_offset, self.numel = table
        # By what scales are counted, also where tensors are parts of larger ones.
        self._left_part, self._right_part = self.left, self.right
        self._chunks: dict[tuple[torch.device, int], tuple[Tensor, Tensor, Tensor, int]] = {}
        self._tables: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._scales: dict[tuple[torch.device, tuple[float, ...]], Tensor] = {}
        self._even = bool((self.numel % 16 == 0).all())

    def __len__(self) -> int:
        return len(self.numel)

    def within(
        self, *, left: Sequence[tuple[int, int]] | None = None, right: Sequence[tuple[int, int]] | None = None
    ) -> MultiTensorTable:
        """The same where tensors of a list are contiguous parts of larger ones, which then are the list. Each part keeps its
        scale.

        Args:
            left, right: for each tensor of that list ``(number of the larger one, offset in it)``.
        """
        runs = MultiTensorTable([*zip(self.left, self.left_offset, self.right, self.right_offset, self.numel)])
        if left is not None and len(runs):
            where = np.array(left, dtype=np.int64)[self.left]
            runs.left, runs.left_offset = where[:, 0], self.left_offset + where[:, 1]
        if right is not None and len(runs):
            where = np.array(right, dtype=np.int64)[self.right]
            runs.right, runs.right_offset = where[:, 0], self.right_offset + where[:, 1]
        runs._left_part, runs._right_part = self._left_part, self._right_part
        return runs

    def momentum(
        self,
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor],
        outs: Sequence[Tensor],
        momentum: float,
        nesterov: bool,
        ok: Tensor | None,
    ) -> None:
        """``m += (1 - mu) (g - m)`` in place, and ``g + mu (m - g)`` (or ``m`` without Nesterov) to the right.

        Args:
            grads, buffers: left lists; float32, bfloat16 or float16 each, buffers float32.
            outs: right list, of one dtype.
            ok: scalar bool on the device; where ``False`` gradients are read as the momentum itself.
        """
        if not len(self):
            return
        from hf_emopt.kernels.triton import multi_tensor_kernels as kernels

        prepared = self._prepared((grads, buffers), (outs,), outs[0].device)
        arguments = (_flag(ok, prepared), momentum, 1.0 - momentum)
        constants = (nesterov, ok is not None)
        kernels.launch_spans(kernels.momentum_kernel, prepared, (grads, buffers, outs), arguments, constants)

    def to_right(
        self,
        left: Sequence[Tensor],
        right: Sequence[Tensor],
        scales: Sequence[float] | None = None,
        ok: Tensor | None = None,
    ) -> None:
        """Copies with a cast, times one float32 scale for each left tensor if given; zeros where ``ok``, a scalar bool on the
        device, is ``False``."""
        if len(self):
            self._copy(self._prepared((left,), (right,), right[0].device), left, right, scales, ok)

    def to_left(self, right: Sequence[Tensor], left: Sequence[Tensor]) -> None:
        """Copies with a cast."""
        if len(self):
            prepared = self._prepared((left,), (right,), left[0].device, right_first=True)
            self._copy(prepared, right, left)

    def apply(
        self,
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        shrink: float,
        ok: Tensor | None,
        scales: Sequence[float] | None = None,
        decay: Literal["before", "after", "cautious"] = "before",
    ) -> None:
        """``p <- (1 - shrink) p - lr scale u`` in place on the left.

        Args:
            weights: left list, float32.
            updates: right list, of one dtype.
            ok: scalar bool on the device; ``False`` leaves the weights as they are.
            scales: one for each right tensor.
            decay: shrink the weight before the update, after it, or only where the update pulls the weight towards zero.
        """
        if not len(self):
            return
        from hf_emopt.kernels.triton import multi_tensor_kernels as kernels

        prepared = self._prepared((weights,), (updates,), weights[0].device)
        kind = 0 if shrink == 0.0 else {"before": 1, "after": 2, "cautious": 3}[decay]
        factors = self._scale_table(scales, self._right_part, prepared)
        arguments = (factors, _flag(ok, prepared), lr, shrink if kind == 3 else 1.0 - shrink)
        constants = (scales is not None, kind, ok is not None)
        kernels.launch_spans(kernels.apply_kernel, prepared, (weights, updates), arguments, constants)

    def _copy(
        self,
        prepared: Prepared,
        source: Sequence[Tensor],
        target: Sequence[Tensor],
        scales: Sequence[float] | None = None,
        ok: Tensor | None = None,
    ) -> None:
        from hf_emopt.kernels.triton import multi_tensor_kernels as kernels

        arguments = (self._scale_table(scales, self._left_part, prepared), _flag(ok, prepared))
        constants = (scales is not None, ok is not None)
        kernels.launch_spans(kernels.copy_kernel, prepared, (source, target), arguments, constants)

    def _prepared(
        self,
        left: Sequence[Sequence[Tensor]],
        right: Sequence[Sequence[Tensor]],
        device: torch.device,
        right_first: bool = False,
    ) -> Prepared:
        """The tables of a launch over lists of tensors, addresses of the left ones first, or of the right ones. None is made
        where the addresses are known. A table is for the stream that was made to wait for it."""
        key = (device, current_stream(device), self.BLOCK, right_first, *map(_pointers, left), *map(_pointers, right))
        known = self._tables.get(key)
        if known is None:
            known = self._tables[key] = self._make(left, right, device, right_first)
            while len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return known

    def _make(
        self,
        left: Sequence[Sequence[Tensor]],
        right: Sequence[Sequence[Tensor]],
        device: torch.device,
        right_first: bool,
    ) -> Prepared:
        rows = [_addresses(tensors, self.left, self.left_offset) for tensors in left]
        others = [_addresses(tensors, self.right, self.right_offset) for tensors in right]
        rows = [*others, *rows] if right_first else [*rows, *others]
        # Rows begin at multiples of 16 bytes.
        table = np.zeros((len(rows), len(self) + len(self) % 2), dtype=np.int64)
        table[:, : len(self)] = rows
        sent = _sent(torch.from_numpy(table), device)
        aligned = self._even and not (table & 15).any()
        return Prepared(*self._chunks_on(device), tuple(sent.unbind(0)), bool(aligned), self.BLOCK)

    def _chunks_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
        """Of each program the span and its start there, on the device; elements of each span; and the number of programs."""
        key = (device, self.BLOCK)
        if key not in self._chunks:
            counts = -(-self.numel // self.BLOCK)
            run_of = np.repeat(np.arange(len(self), dtype=np.int32), counts)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            start_of = (np.arange(len(run_of), dtype=np.int64) - first) * self.BLOCK
            tables = [torch.from_numpy(part).to(device) for part in (run_of, start_of, self.numel.copy())]
            self._chunks[key] = (tables[0], tables[1], tables[2], len(run_of))
        return self._chunks[key]

    def _scale_table(self, scales: Sequence[float] | None, which: np.ndarray, prepared: Prepared) -> Tensor:
        """Scales of the spans, or, since kernels read a tensor in any case, another tensor."""
        if scales is None:
            return prepared.numel_of
        device = prepared.run_of.device
        key = (device, tuple(scales))
        if key not in self._scales:
            self._scales[key] = torch.tensor(np.array(scales, dtype=np.float32)[which], device=device)
        return self._scales[key]


def _flag(ok: Tensor | None, prepared: Prepared) -> Tensor:
    """``ok`` as bytes, or another tensor where there is none."""
    return (prepared.run_of if ok is None else ok).view(torch.uint8)


def _sent(table: Tensor, device: torch.device) -> Tensor:
    """A table on the device. It is copied on a stream of its own: on the current stream, whose turn comes late, a few bytes
    would wait for all copies that a loader or offloaded state has begun meanwhile."""
    if device.type != "cuda":
        return table
    pinned = table.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        return pinned.to(device, non_blocking=True)
    current, stream = torch.cuda.current_stream(device), _upload_stream(device)
    with torch.cuda.stream(stream):
        sent = pinned.to(device, non_blocking=True)
    current.wait_stream(stream)
    # Its memory is the other stream's, which must not use it again before this one has read.
    sent.record_stream(current)
    return sent


@functools.cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _pointers(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The addresses of tensors of one dtype, and the width of their elements."""
    return (tensors[0].element_size() if tensors else 0, *map(Tensor.data_ptr, tensors))


def _addresses(tensors: Sequence[Tensor], which: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    if not tensors:
        return np.zeros(0, dtype=np.int64)
    starts = np.array([*map(Tensor.data_ptr, tensors)], dtype=np.int64)
    return starts[which] + offsets * tensors[0].element_size()  # type: ignore[no-any-return]


def fits(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether a list of tensors can take part: contiguous, of one dtype that kernels know, on the device."""
    if not tensors:
        return True
    dtype, first = tensors[0].dtype, tensors[0].device
    if dtype not in _DTYPES or first != device:
        return False
    # Every tensor of a step comes by here, so nothing of Python's runs for each of them.
    alike = len(set(map(Tensor.get_device, tensors))) == 1 and len(set(map(_dtype_of, tensors))) == 1
    return alike and all(map(Tensor.is_contiguous, tensors))


@functools.lru_cache(maxsize=64)
def whole_tensors(sizes: tuple[int, ...]) -> MultiTensorTable:
    """Tensors of these numbers of elements, each of them one span in both lists."""
    return MultiTensorTable([(k, 0, k, 0, size) for k, size in enumerate(sizes)])


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Scalar bool on the device: whether every number in contiguous tensors of one dtype and device is finite."""
    from hf_emopt.kernels.triton import multi_tensor_kernels as kernels

    runs = whole_tensors(tuple(map(Tensor.numel, tensors)))
    flag = torch.ones((), dtype=torch.int32, device=tensors[0].device)
    if len(runs):
        prepared = runs._prepared((tensors,), (), tensors[0].device)
        kernels.launch_spans(kernels.finite_kernel, prepared, (tensors,), (flag,), ())
    return flag.bool()
