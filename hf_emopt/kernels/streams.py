"""CUDA streams for work that runs at the same time as the step, or after it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_HELD = 2


class SideStreams:
    """Streams for work that nothing else needs until :meth:`wait` or :meth:`join`.

    Until :meth:`wait`, nobody may touch the tensors that the work reads and writes. The result is then that of one stream.

    Args:
        name: the kind of work. Streams of one name are shared by all optimizers of a process, because CUDA graphs are kept by
            stream. Another kind of work has another name, so that it does not queue behind this one.
    """

    def __init__(self, name: str, count: int = 1) -> None:
        self.name, self.count = name, count
        self._open: set[torch.cuda.Stream] = set()
        self._held: deque[tuple[tuple[Tensor, ...], torch.cuda.Event]] = deque()

    def stream(self, device: torch.device, index: int = 0) -> torch.cuda.Stream:
        """The stream of this index, counted modulo :attr:`count`."""
        return _side_stream(device, self.name, index % self.count)

    def open(self, device: torch.device, index: int = 0) -> None:
        """Orders later work of the stream after everything that is queued on the current stream."""
        stream = self.stream(device, index)
        stream.wait_stream(torch.cuda.current_stream(device))
        self._open.add(stream)

    @property
    def is_used(self) -> bool:
        """Whether any stream has been opened since the last :meth:`join`."""
        return bool(self._open)

    def is_open(self, device: torch.device) -> bool:
        """Whether the first stream has been opened since the last :meth:`join`."""
        return self.is_used and self.stream(device) in self._open

    @contextmanager
    def on(self, device: torch.device, index: int = 0, reads: Iterable[Tensor] = ()) -> Iterator[None]:
        """Queues the work inside on a stream, after everything that is queued on the current stream.

        Args:
            reads: tensors of the current stream's memory that the work reads or writes, and that may be freed before it ran.
        """
        self.open(device, index)
        stream = self.stream(device, index)
        for tensor in reads:
            tensor.record_stream(stream)  # freed or not, its memory is not used again before the stream has come so far
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def holding(self, device: torch.device, reads: tuple[Tensor, ...]) -> Iterator[None]:
        """Queues the work inside on the first stream, which must be open. It does not wait for what the current stream has
        queued since then.

        The tensors that the work reads, of the current stream's memory or the side stream's, are kept until two more such
        works are queued. The current stream then waits for this one and the tensors are freed. So memory is used again in the
        same order in every step. (With memory recorded on a stream, buffers would change their addresses from step to step.)
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
        """Makes the current streams wait for all queued work. Streams that ask later wait too."""
        for stream in tuple(self._open):
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def join(self) -> None:
        """Waits, and closes the streams."""
        self.wait()
        self._open.clear()
        self._held.clear()

    def __getstate__(self) -> dict[str, object]:
        """A copy has no open stream."""
        return {**self.__dict__, "_open": set(), "_held": deque()}


@functools.cache
def _side_stream(device: torch.device, name: str, index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
