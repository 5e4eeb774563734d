"""Computing on the side: a worker thread, or a stream of a GPU."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Background", "Beside"]

T = TypeVar("T")

_HELD = 2


class Background:
    """Runs functions of tensors while the caller goes on.

    Two things make the result the same as in the foreground: the inputs must be copies that nobody writes to, and
    :meth:`wait` must be called before results are read. One thread, so that work is done in the order it was given.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def submit(self, device: torch.device, function: Callable[[], T]) -> Future[T]:
        """Starts ``function`` after all that has been queued on the current stream of ``device``."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf_emopt")
        if device.type != "cuda":
            return self._executor.submit(_without_gradients, function)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))

        def on_stream() -> T:
            with torch.cuda.stream(stream):
                result = _without_gradients(function)
                stream.synchronize()
                return result

        return self._executor.submit(on_stream)

    @staticmethod
    def wait(future: Future[T]) -> T:
        """The result, or the exception that the function raised."""
        return future.result()

    def __getstate__(self) -> dict[str, object]:
        """Threads and streams are made anew by a copy."""
        return {"_executor": None, "_streams": {}}


class Beside:
    """Streams for work that nothing else waits for until :meth:`wait` or :meth:`join`.

    Small factorizations, and passes that wait for memory or for other ranks, leave most of a GPU to the products of the next
    matrices. Nobody may touch what they read and write before that; then it is as if all had run on one stream.

    Args:
        name: of what is done there. Streams are one for all optimizers of a process, since what is recorded as a CUDA graph
            is kept by stream; but work of another kind has others, so that it need not wait in line.
        lanes: streams beside one another.
    """

    def __init__(self, name: str, lanes: int = 1) -> None:
        self.name, self.lanes = name, lanes
        self._open: set[torch.cuda.Stream] = set()
        self._held: deque[tuple[tuple[Tensor, ...], torch.cuda.Event]] = deque()

    def stream(self, device: torch.device, lane: int = 0) -> torch.cuda.Stream:
        """The stream of a lane, counted modulo the number of lanes."""
        return _stream_beside(device, self.name, lane % self.lanes)

    def open(self, device: torch.device, lane: int = 0) -> None:
        """What will be queued on the lane runs after all that has been queued on the current stream."""
        stream = self.stream(device, lane)
        stream.wait_stream(torch.cuda.current_stream(device))
        self._open.add(stream)

    @property
    def is_used(self) -> bool:
        """Whether any lane has been opened since the last :meth:`join`."""
        return bool(self._open)

    def is_open(self, device: torch.device, lane: int = 0) -> bool:
        """Whether the lane has been opened since the last :meth:`join`."""
        return self.is_used and self.stream(device, lane) in self._open

    @contextmanager
    def on(self, device: torch.device, lane: int = 0, reads: Iterable[Tensor] = ()) -> Iterator[None]:
        """Inside, work is queued on a lane, after all that has been queued on the current stream.

        Args:
            reads: what it reads or writes of the current stream's memory and may not outlive it.
        """
        self.open(device, lane)
        stream = self.stream(device, lane)
        for tensor in reads:
            tensor.record_stream(stream)  # freed or not, its memory is not used again before the lane has come so far
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def holding(self, device: torch.device, reads: tuple[Tensor, ...]) -> Iterator[None]:
        """Inside, work is queued on the first lane, which is open; what was queued on the current stream since it was opened
        is not waited for.

        What it reads is kept, and given back when two more such works have been queued and the current stream waits for this
        one. So memory is used again in the same order in every step, whatever the device has done by then. (Memory that was
        recorded on a stream comes back when that has come so far: buffers would lie elsewhere from step to step, and their
        addresses be sent anew.)

        Args:
            reads: tensors of the current stream's memory, or of the lane's.
        """
        stream, done = self.stream(device), torch.cuda.Event()
        with torch.cuda.stream(stream):
            yield
            done.record(stream)
        self._held.append((reads, done))
        if len(self._held) > _HELD:
            torch.cuda.current_stream(device).wait_event(self._held[0][1])
            self._held.popleft()

    def wait(self) -> None:
        """Makes the current streams wait for all that was queued. Others that ask later wait as well."""
        for stream in tuple(self._open):
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def join(self) -> None:
        """:meth:`wait`, and the lanes are open no more."""
        self.wait()
        self._open.clear()
        self._held.clear()

    def __getstate__(self) -> dict[str, object]:
        """A copy has begun nothing."""
        return {**self.__dict__, "_open": set(), "_held": deque()}


@functools.cache
def _stream_beside(device: torch.device, name: str, lane: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _without_gradients(function: Callable[[], T]) -> T:
    with torch.no_grad():
        return function()
