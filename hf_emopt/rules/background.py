"""Computing on the side: a worker thread, or a stream of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["Background", "Beside"]

T = TypeVar("T")


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
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
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
    """A stream for work of a step that nothing else in the step waits for.

    Small factorizations leave most of a GPU to others, so they run beside the products of the next matrices. Nobody may touch
    what they read and write before :meth:`join`; then it is as if all had run on one stream.
    """

    def __init__(self) -> None:
        self._open: set[torch.device] = set()

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """What is queued inside runs after all that has been queued on the current stream, and beside what will be."""
        stream = _stream_beside(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        self._open.add(device)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Makes the current streams wait for all that was queued."""
        for device in self._open:
            torch.cuda.current_stream(device).wait_stream(_stream_beside(device))
        self._open.clear()

    def __getstate__(self) -> dict[str, object]:
        """A copy has begun nothing."""
        return {"_open": set()}


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One for all optimizers of a process, since what is recorded on it is kept by stream."""
    return torch.cuda.Stream(device)


def _without_gradients(function: Callable[[], T]) -> T:
    with torch.no_grad():
        return function()
