"""The time that a step waits for collectives: exposed communication."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Arrival, Exchange


class Stopwatch:
    """Adds up waits: by events of the current stream on an accelerator, by the clock on the CPU.

    One event is recorded before the stream waits for a collective and one after it. The time between them is the part of the
    collective that the work queued before does not hide. The host waits for neither event.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Counts the time inside, of a device's current stream."""
        if device.type == "cpu":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        before, after = (torch.Event(device.type, enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._spans.append((before, after))

    def reduction(self, reduce: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A blocking collective with this watch around it."""

        def timed(tensor: Tensor, **options: Any) -> Tensor:
            with self.running(tensor.device):
                return reduce(tensor, **options)

        return timed

    def exchange(self, exchange: Exchange) -> Exchange:
        """The same exchange, with this watch around the waits for its arrivals."""
        timed = copy.copy(exchange)
        timed.__class__ = _TimedExchange
        timed.stopwatch = self  # type: ignore[attr-defined]
        return timed

    def take(self) -> float:
        """Seconds since the last call. The device must have come past the waits: read a result of the step first.

        Waits whose end the device has not reached yet are left for the next call.
        """
        total, self._seconds = self._seconds, 0.0
        left = []
        for before, after in self._spans:
            if after.query():
                total += before.elapsed_time(after) / 1e3
            else:
                left.append((before, after))
        self._spans = left
        return total


@dataclass
class _TimedArrival(Arrival):
    stopwatch: Stopwatch | None = None

    def wait(self) -> Tensor:
        if self.stopwatch is None or not self.works:
            return super().wait()
        with self.stopwatch.running(self.buffer.device):
            return super().wait()


class _TimedExchange(Exchange):
    stopwatch: Stopwatch

    def _timed(self, arrival: Arrival) -> Arrival:
        return _TimedArrival(arrival.buffer, arrival.works, arrival.keep, self.stopwatch)

    def storage_to_compute(self, inputs: Sequence[Tensor] | Tensor) -> Arrival:
        return self._timed(super().storage_to_compute(inputs))

    def compute_to_storage(self, *args: Any, **kwargs: Any) -> Arrival:
        return self._timed(super().compute_to_storage(*args, **kwargs))

    def all_gather_replicas(self, arrival: Arrival) -> Arrival:
        gathered = super().all_gather_replicas(arrival)
        return arrival if gathered is arrival else self._timed(gathered)
