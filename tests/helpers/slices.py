"""Ranks as threads: each runs the same function on its slice, and sums meet at a barrier."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class ComputeGroup:
    """Reductions over threads, in rank order, so that all get the same bits; counts calls and elements."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[tuple[str, torch.dtype, int]] = []
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[Tensor | None] = [None] * size

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` on every rank; the first exception of any is raised."""
        results: list[T | None] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results  # type: ignore[return-value]

    def sum(self, rank: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: self._reduce(rank, tensor, "sum")

    def max(self, rank: int) -> Callable[[Tensor], Tensor]:
        return lambda tensor: self._reduce(rank, tensor, "max")

    def _reduce(self, rank: int, tensor: Tensor, kind: str) -> Tensor:
        assert tensor.is_contiguous()
        self._parts[rank] = tensor.clone()
        self._barrier.wait()
        parts: Sequence[Tensor] = [p for p in self._parts if p is not None]
        assert len({(p.shape, p.dtype) for p in parts}) == 1
        total = parts[0].clone()
        for part in parts[1:]:
            # As a transport may: a NaN loses against a number when the largest is asked for.
            total = total + part if kind == "sum" else torch.fmax(total, part)
        if rank == 0:
            self.calls.append((kind, tensor.dtype, tensor.numel()))
        self._barrier.wait()
        return tensor.copy_(total)


def cuts(size: int, parts: int, kind: str = "even") -> list[tuple[int, int]]:
    """Bounds of the slices: as FSDP2 chunks (``"even"``), or very uneven with empty ones (``"uneven"``)."""
    if kind == "even":
        step = -(-size // parts)
        return [(min(size, i * step), min(size, (i + 1) * step)) for i in range(parts)]
    edges = [0, *(size * i * i // (parts * parts) for i in range(1, parts)), size]
    if parts > 2:
        edges[1] = 0
    return list(itertools.pairwise(edges))
