"""Copies between host and device as streams of their own may make them: in order, and as late as they may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hf_emopt.engine.context
import hf_emopt.engine.cpu_params
import hf_emopt.state.offload
from hf_emopt.state.offload import StateOffload


@dataclass
class Record:
    """What was asked for.

    Attributes:
        events: names of methods, in the order in which they were called.
        pinned: tensors that were put into page-locked memory.
    """

    events: list[str] = field(default_factory=list)
    pinned: list[Tensor] = field(default_factory=list)


class LateCopyStream:
    """What is brought is not a number until it is waited for; what is taken away is there in the end."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def copy_to_device(self, home: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.record.events.append("bring")
        copies = [torch.full_like(t.detach(), float("nan")) for t in home]
        self._queue += zip(copies, (t.detach() for t in home))
        return copies, len(self._queue)

    def await_arrival(self, arrived: Any) -> None:
        self.record.events.append("arrived")
        self._until(arrived)

    def copy_to_host(self, copies: Sequence[Tensor], home: Sequence[Tensor]) -> Any:
        self.record.events.append("take")
        self._queue += zip(home, (t.clone() for t in copies))
        return len(self._queue)

    def release(self, left: Any) -> None:
        pass

    def synchronize(self) -> None:
        self.record.events.append("synchronize")
        self._until(len(self._queue))

    def _until(self, mark: int) -> None:
        for target, source in self._queue[self._done : mark]:
            target.copy_(source)
        self._done = max(self._done, mark)


@contextmanager
def late_copies() -> Iterator[Record]:
    """Has optimizers that step inside it use them."""
    record = Record()

    def pin(tensor: Tensor, device: torch.device) -> Tensor:
        if not any(tensor is known for known in record.pinned):
            record.pinned.append(tensor.clone())
            return record.pinned[-1]
        return tensor

    context: Any = hf_emopt.engine.context
    params: Any = hf_emopt.engine.cpu_params
    originals = context.copy_stream_to, params.host_copy_of
    context.copy_stream_to, params.host_copy_of = (lambda device: LateCopyStream(record)), pin
    try:
        yield record
    finally:
        context.copy_stream_to, params.host_copy_of = originals


class TwoStreams:
    """What comes and what goes, each in its own order, as late as anybody may wait; or what comes, as early as it may.

    What is brought is garbage until it is waited for. It is what lies on the host when that happens, or, ``early``, when
    it was asked for: where bytes that are on their way home had to be there before, somebody must have said so (``release``).
    What is taken away lies on the host when it must, and the copies are garbage from then on: their memory is another's.
    """

    def __init__(self, early: bool) -> None:
        self.early = early
        self._brought: list[tuple[list[Tensor], list[Tensor], int]] = []
        self._taken: list[tuple[list[Tensor], list[Tensor]]] = []
        self._there = self._home = self._waited_for = 0

    def copy_to_device(self, home: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        copies = [_garbage(t.detach().clone()) for t in home]
        sources = [t.detach() for t in home]
        if self.early:
            self._take(self._waited_for)
            sources = [t.clone() for t in sources]
        self._brought.append((list(copies), sources, self._waited_for))
        return copies, len(self._brought)

    def await_arrival(self, arrived: Any) -> None:
        for copies, sources, after in self._brought[self._there : arrived]:
            self._take(after)
            for copy, source in zip(copies, sources):
                copy.copy_(source)
        self._there = max(self._there, arrived)

    def copy_to_host(self, copies: Sequence[Tensor], home: Sequence[Tensor]) -> Any:
        self._taken.append((list(home), [t.clone() for t in copies]))
        for copy in copies:
            _garbage(copy)
        return len(self._taken)

    def release(self, left: Any) -> None:
        self._waited_for = max(self._waited_for, left or 0)

    def synchronize(self) -> None:
        self._take(len(self._taken))

    def _take(self, mark: int) -> None:
        for home, sources in self._taken[self._home : mark]:
            for target, source in zip(home, sources):
                target.data.copy_(source)  # it was counted as written to when it was asked for
        self._home = max(self._home, mark)


def _garbage(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 77)


@contextmanager
def two_streams(early: bool) -> Iterator[None]:
    """Has offloaded state that is first moved inside it take them."""
    offload: Any = hf_emopt.state.offload
    original = offload.copy_stream_to
    offload.copy_stream_to = lambda device: TwoStreams(early)
    try:
        yield
    finally:
        offload.copy_stream_to = original


@contextmanager
def swapped_in(offload: StateOffload, key: str, host: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Host tensors swapped in for the work inside, and swapped out after it."""
    copies = offload.swap_in(key, host, device)
    try:
        yield copies
    finally:
        offload.swap_out(key)
