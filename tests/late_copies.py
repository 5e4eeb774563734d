"""Copies between host and device as streams of their own may make them: in order, and as late as they may."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hf_emopt.engine


@dataclass
class Record:
    """What was asked for.

    Attributes:
        events: names of methods, in the order in which they were called.
        pinned: tensors that were put into page-locked memory.
    """

    events: list[str] = field(default_factory=list)
    pinned: list[Tensor] = field(default_factory=list)


class LateChannel:
    """What is brought is not a number until it is waited for; what is taken away is there in the end."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._queue: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def bring(self, home: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        self.record.events.append("bring")
        copies = [torch.full_like(t.detach(), float("nan")) for t in home]
        self._queue += zip(copies, (t.detach() for t in home))
        return copies, len(self._queue)

    def await_arrival(self, arrived: Any) -> None:
        self.record.events.append("arrived")
        self._until(arrived)

    def take_away(self, copies: Sequence[Tensor], home: Sequence[Tensor]) -> Any:
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

    engine: Any = hf_emopt.engine
    originals = engine.channel_to, engine.home_of
    engine.channel_to, engine.home_of = (lambda device: LateChannel(record)), pin
    try:
        yield record
    finally:
        engine.channel_to, engine.home_of = originals
