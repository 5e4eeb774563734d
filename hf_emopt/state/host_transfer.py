"""Copies of state between host and device, on streams of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 2**25
"""The size up to which one copy moves tensors together: enough for the link's full rate, and little compared with a bucket.

Copies to the host also pause after so many bytes, some 0.6 ms at 50 GB/s, and let other copies pass. A tensor of up to twice
that is copied at once."""


def host_copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in host memory that ``device`` can read while it computes: page-locked, unless ``device`` is the CPU.

    Args:
        tensor: on any device; returned as it is if it is such a tensor already.
        device: of the mathematics.
    """
    pinned = device.type not in ("cpu", "meta")
    if tensor.device.type == "cpu" and (not pinned or tensor.is_pinned()):
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)


def _runs(copies: Sequence[Tensor], host: Sequence[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Copies and their targets that go to the host without a pause: a chunk together, or a tensor of up to two. Longer
    contiguous tensors are cut."""
    run: list[tuple[Tensor, Tensor]] = []
    size = 0
    for copy, tensor in zip(copies, host):
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
    """Two streams of an accelerator: one copies to the device and one to the host.

    Copies are allocated on the first stream. So only its later copies reuse their memory, and it waits for the second stream
    first: no other stream waits for a copy to the host.

    The copy engine to the host finishes the copies of one stream before it serves another. A number that the model or the
    loop reads (transformers reads the positions in each forward pass) would wait for all state on its way to the host: 23 to
    38 ms of a step of 270 on an H200, in which the GPU is idle. So the second stream pauses after every chunk (but
    not inside a longer tensor that is not contiguous), until a kernel on a third stream has run; an event alone is no pause.
    That kernel has a high priority, since the next chunk waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._to_device, self._to_host = self._module.Stream(device), self._module.Stream(device)
        self._pausing = self._module.Stream(device, priority=-1)
        self._paused: Any = None
        self._mark: Tensor | None = None

    def copy_to_device(self, host: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        with self._module.stream(self._to_device):
            copies = [torch.empty_like(t, device=self.device) for t in host]
            for copy, tensor in zip(copies, host):
                copy.copy_(tensor, non_blocking=True)
            arrived = self._module.Event()
            arrived.record(self._to_device)
        return copies, arrived

    def await_arrival(self, arrived: Any) -> None:
        self._module.current_stream(self.device).wait_event(arrived)

    def copy_to_host(self, copies: Sequence[Tensor], host: Sequence[Tensor]) -> Any:
        done = self._module.Event()
        done.record(self._module.current_stream(self.device))
        self._to_host.wait_event(done)
        left = None
        for run in _runs(copies, host):
            if self._paused is not None:
                self._to_host.wait_event(self._paused)
            with self._module.stream(self._to_host):
                for copy, tensor in run:
                    tensor.copy_(copy, non_blocking=True)
                left = self._module.Event()
                left.record(self._to_host)
            self._paused = self._pause_after(left)
        return left

    def _pause_after(self, left: Any) -> Any:
        """An event after a kernel that runs after ``left``."""
        self._pausing.wait_event(left)
        with self._module.stream(self._pausing):
            if self._mark is None:
                self._mark = torch.empty(1, device=self.device)
            self._mark.fill_(1.0)  # not zero_(), which the copy engine may run
            over = self._module.Event()
            over.record(self._pausing)
        return over

    def release(self, left: Any) -> None:
        """Orders later copies to the device after ``left``, or after the current stream: called before copies are freed."""
        if left is None:  # nobody has written to the copies, and the current stream may still read them
            left = self._module.Event()
            left.record(self._module.current_stream(self.device))
        self._to_device.wait_event(left)

    def synchronize(self) -> None:
        self._to_host.synchronize()


class _SameMemory:
    """Host to host. It copies too, so that one flow serves both and tests can count."""

    def copy_to_device(self, host: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        return [t.clone() for t in host], None

    def await_arrival(self, arrived: Any) -> None:
        pass

    def copy_to_host(self, copies: Sequence[Tensor], host: Sequence[Tensor]) -> Any:
        for copy, tensor in zip(copies, host):
            tensor.copy_(copy)
        return None

    def release(self, left: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


CopyStream = _DeviceCopyStream | _SameMemory
"""Copies to a device and back: ``copy_to_device``, ``await_arrival``, ``copy_to_host``, and ``release`` before copies are
freed."""


def copy_stream_to(device: torch.device) -> CopyStream:
    """The streams between the host and a device."""
    return _SameMemory() if device.type == "cpu" else _DeviceCopyStream(device)
