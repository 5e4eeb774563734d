"""The way from the host to a device and back, for state that lies on the host: streams, and whose turn it is on the link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 2**25
"""Up to which tensors are moved together: long enough for the link's full rate, short beside a piece.

Also after how much that leaves others have their turn on the link, some 0.6 ms at 50 GB/s (a tensor of up to twice that goes
at once)."""


def host_copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory that ``device`` can read while it computes: page-locked, where there is such a thing.

    Args:
        tensor: on any device; returned as it is where it lies there already.
        device: of the mathematics.
    """
    pinned = device.type not in ("cpu", "meta")
    if tensor.device.type == "cpu" and (not pinned or tensor.is_pinned()):
        return tensor
    home = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    home.copy_(tensor)
    return home


def _runs(copies: Sequence[Tensor], home: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """What is taken away without a pause: up to a chunk together, or a tensor of up to two. Longer ones are cut, if their
    memory lies in order."""
    run: list[tuple[Tensor, Tensor]] = []
    size = 0
    for copy, tensor in zip(copies, home):
        parts = [(copy, tensor)]
        if tensor.nbytes > 2 * CHUNK_BYTES and copy.is_contiguous() and tensor.is_contiguous():
            numel = CHUNK_BYTES // tensor.element_size()
            parts = list(zip(copy.view(-1).split(numel), tensor.view(-1).split(numel)))
        for part in parts:
            if run and size + part[1].nbytes > CHUNK_BYTES:
                yield run
                run, size = [], 0
            run.append(part)
            size += part[1].nbytes
    yield run


class _DeviceCopyStream:
    """Two streams of an accelerator: one that brings and one that takes away.

    Copies are allocated on the first, so their memory is used again only by what that stream brings later, and it waits for
    the second before it does: no other stream has to wait for a byte that leaves.

    The engine that copies to the host finishes what one stream has queued before it looks at another. A number that the
    model or the loop reads (transformers looks at the positions in each forward pass) would wait for all state that leaves:
    23 to 38 ms of a step of 270 on an H200, in which the GPU has nothing to do. So the second stream pauses after every
    chunk (a longer tensor that is not contiguous goes as it is), until a kernel on a third one has run; an event alone is no
    pause. That kernel goes first wherever there is room on a multiprocessor, since the next chunk waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._bringing, self._taking = self._module.Stream(device), self._module.Stream(device)
        self._pausing = self._module.Stream(device, priority=-1)
        self._paused: Any = None
        self._mark: Tensor | None = None

    def bring(self, home: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        with self._module.stream(self._bringing):
            copies = [torch.empty_like(t, device=self.device) for t in home]
            for copy, tensor in zip(copies, home):
                copy.copy_(tensor, non_blocking=True)
            arrived = self._module.Event()
            arrived.record(self._bringing)
        return copies, arrived

    def await_arrival(self, arrived: Any) -> None:
        self._module.current_stream(self.device).wait_event(arrived)

    def take_away(self, copies: Sequence[Tensor], home: Sequence[Tensor]) -> Any:
        done = self._module.Event()
        done.record(self._module.current_stream(self.device))
        self._taking.wait_event(done)
        left = None
        for run in _runs(copies, home):
            if self._paused is not None:
                self._taking.wait_event(self._paused)
            with self._module.stream(self._taking):
                for copy, tensor in run:
                    tensor.copy_(copy, non_blocking=True)
                left = self._module.Event()
                left.record(self._taking)
            self._paused = self._pause_after(left)
        return left

    def _pause_after(self, left: Any) -> Any:
        """An event behind a kernel behind ``left``."""
        self._pausing.wait_event(left)
        with self._module.stream(self._pausing):
            if self._mark is None:
                self._mark = torch.empty(1, device=self.device)
            self._mark.fill_(1.0)  # not zero_(), which copies' own engine may run
            over = self._module.Event()
            over.record(self._pausing)
        return over

    def release(self, left: Any) -> None:
        """Before copies are let go of."""
        if left is not None:
            self._bringing.wait_event(left)
            return
        unused = self._module.Event()  # nobody has written to them, and the current stream may still read
        unused.record(self._module.current_stream(self.device))
        self._bringing.wait_event(unused)

    def synchronize(self) -> None:
        self._taking.synchronize()


class _SameMemory:
    """Host to host: copies are made all the same, so that one flow serves both and tests can count."""

    def bring(self, home: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        return [t.clone() for t in home], None

    def await_arrival(self, arrived: Any) -> None:
        pass

    def take_away(self, copies: Sequence[Tensor], home: Sequence[Tensor]) -> Any:
        for copy, tensor in zip(copies, home):
            tensor.copy_(copy)
        return None

    def release(self, left: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


CopyStream = _DeviceCopyStream | _SameMemory
"""To a device and back: ``bring``, ``await_arrival``, ``take_away``, and ``release`` before copies are let go of."""


def copy_stream_to(device: torch.device) -> CopyStream:
    """The way from the host to a device."""
    return _SameMemory() if device.type == "cpu" else _DeviceCopyStream(device)
