"""Elementwise passes over many tensors at once: momentum, copies with a cast and a scale, and the weights' step.

What takes part is described once, as *runs*: stretches of elements that lie one after another in a tensor of one list (the
left) and in a tensor of another (the right). Then each pass is one launch of a Triton kernel, whatever the number of tensors;
elsewhere a caller uses torch's foreach functions, which do the same sums.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_emopt.linalg.triton.runtime import interpreting, supported

__all__ = ["Runs", "all_finite", "contiguous_run", "fits", "runs_work", "whole_tensors"]

Index = tuple[slice, ...]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KEPT_TABLES = 8


def runs_work(device: torch.device) -> bool:
    """Whether the kernels run on tensors of a device."""
    return (device.type == "cuda" or (interpreting() and device.type == "cpu")) and supported(device)


def contiguous_run(where: Index, shape: Sequence[int]) -> tuple[int, int] | None:
    """``(offset, numel)`` of a box in a contiguous tensor, or ``None`` where its elements do not follow one another."""
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


@dataclass(frozen=True)
class _Chunks:
    run_of: Tensor
    start_of: Tensor
    numel_of: Tensor
    count: int


class Runs:
    """Stretches of elements that tensors of two lists have in common.

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
        self._chunks: dict[tuple[torch.device, int], _Chunks] = {}
        self._tables: OrderedDict[tuple[torch.device, bytes], Tensor] = OrderedDict()
        self._scales: dict[tuple[torch.device, tuple[float, ...]], Tensor] = {}
        self._even = bool((self.numel % 16 == 0).all())

    def __len__(self) -> int:
        return len(self.numel)

    # ------------------------------------------------------------------ passes

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
        from hf_emopt.linalg.triton.run_launch import launch_momentum

        addresses = [self._on_left(grads), self._on_left(buffers), self._on_right(outs)]
        launch_momentum(self._prepared(addresses, outs[0].device), grads, buffers, outs, momentum, nesterov, ok)

    def to_right(self, left: Sequence[Tensor], right: Sequence[Tensor], scales: Sequence[float] | None = None) -> None:
        """Copies with a cast, times one float32 scale for each left tensor if given."""
        self._copy(left, right, self._on_left(left), self._on_right(right), scales, self.left)

    def to_left(self, right: Sequence[Tensor], left: Sequence[Tensor], scales: Sequence[float] | None = None) -> None:
        """Copies with a cast, times one float32 scale for each right tensor if given."""
        self._copy(right, left, self._on_right(right), self._on_left(left), scales, self.right)

    def apply(
        self,
        weights: Sequence[Tensor],
        updates: Sequence[Tensor],
        lr: float,
        shrink: float,
        ok: Tensor | None,
        scales: Sequence[float] | None = None,
        cautious: bool = False,
        after: bool = False,
    ) -> None:
        """``p <- (1 - shrink) p - lr scale u`` in place on the left.

        Args:
            weights: left list, float32.
            updates: right list, of one dtype.
            ok: scalar bool on the device; ``False`` leaves the weights as they are.
            scales: one for each right tensor.
            cautious: shrink only where the update pulls the weight towards zero.
            after: shrink what the update has made of the weight.
        """
        if not len(self):
            return
        from hf_emopt.linalg.triton.run_launch import launch_apply

        device = weights[0].device
        prepared = self._prepared([self._on_left(weights), self._on_right(updates)], device)
        factors = None if scales is None else self._scale_table(scales, self.right, device)
        decay = 0 if shrink == 0.0 else 3 if cautious else 2 if after else 1
        launch_apply(prepared, weights, updates, factors, lr, shrink, decay, ok)

    def _copy(
        self,
        source: Sequence[Tensor],
        target: Sequence[Tensor],
        read: np.ndarray,
        written: np.ndarray,
        scales: Sequence[float] | None,
        which: np.ndarray,
    ) -> None:
        if not len(self):
            return
        from hf_emopt.linalg.triton.run_launch import launch_copy

        device = target[0].device
        factors = None if scales is None else self._scale_table(scales, which, device)
        launch_copy(self._prepared([read, written], device), source, target, factors)

    # ------------------------------------------------------------------ tables

    def _on_left(self, tensors: Sequence[Tensor]) -> np.ndarray:
        return _addresses(tensors, self.left, self.left_offset)

    def _on_right(self, tensors: Sequence[Tensor]) -> np.ndarray:
        return _addresses(tensors, self.right, self.right_offset)

    def _prepared(self, addresses: list[np.ndarray], device: torch.device) -> Prepared:
        chunks = self._chunks_on(device)
        table = np.zeros(
            (len(addresses), len(self) + len(self) % 2), dtype=np.int64
        )  # rows begin at multiples of 16 bytes
        for row, values in zip(table, addresses):
            row[: len(values)] = values
        aligned = self._even and not (table & 15).any()
        return Prepared(
            chunks.run_of, chunks.start_of, chunks.numel_of, chunks.count, self._uploaded(table, device), aligned
        )

    def _uploaded(self, table: np.ndarray, device: torch.device) -> Tensor:
        """The table on the device; most steps find their tensors where the last one did, and nothing is sent."""
        key = (device, table.tobytes())
        if key not in self._tables:
            host = torch.from_numpy(table)
            self._tables[key] = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
            while len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def _chunks_on(self, device: torch.device) -> _Chunks:
        key = (device, self.BLOCK)
        if key not in self._chunks:
            counts = -(-self.numel // self.BLOCK)
            run_of = np.repeat(np.arange(len(self), dtype=np.int32), counts)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            start_of = (np.arange(len(run_of), dtype=np.int64) - first) * self.BLOCK
            tables = [torch.from_numpy(part).to(device) for part in (run_of, start_of, self.numel.copy())]
            self._chunks[key] = _Chunks(tables[0], tables[1], tables[2], len(run_of))
        return self._chunks[key]

    def _scale_table(self, scales: Sequence[float], which: np.ndarray, device: torch.device) -> Tensor:
        key = (device, tuple(scales))
        if key not in self._scales:
            self._scales[key] = torch.tensor(np.array(scales, dtype=np.float32)[which], device=device)
        return self._scales[key]


@dataclass(frozen=True)
class Prepared:
    """What every kernel takes: chunks, the addresses of runs by list, and whether all of it is aligned to 16 bytes."""

    run_of: Tensor
    start_of: Tensor
    numel_of: Tensor
    count: int
    addresses: Tensor
    aligned: bool


def _addresses(tensors: Sequence[Tensor], which: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    if not tensors:
        return np.zeros(0, dtype=np.int64)
    starts = np.fromiter((t.data_ptr() for t in tensors), dtype=np.int64, count=len(tensors))
    return starts[which] + offsets * tensors[0].element_size()  # type: ignore[no-any-return]


def fits(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether a list of tensors can take part: contiguous, of one dtype that kernels know, on the device."""
    dtype = tensors[0].dtype if tensors else torch.float32
    return dtype in _DTYPES and all(t.dtype == dtype and t.is_contiguous() and t.device == device for t in tensors)


@functools.lru_cache(maxsize=64)
def whole_tensors(sizes: tuple[int, ...]) -> Runs:
    """Tensors of so many elements, each of them one run in both lists."""
    return Runs([(k, 0, k, 0, size) for k, size in enumerate(sizes)])


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Scalar bool on the device: whether every number in contiguous tensors of one dtype and device is finite."""
    from hf_emopt.linalg.triton.run_launch import launch_finite

    runs = whole_tensors(tuple(t.numel() for t in tensors))
    flag = torch.ones((), dtype=torch.int32, device=tensors[0].device)
    if len(runs):
        launch_finite(runs._prepared([runs._on_left(tensors)], tensors[0].device), tensors, flag)
    return flag.bool()
