"""State that lies on the host between steps, and is on the device only while it is worked on.

A step borrows the state of one piece of work at a time (:meth:`StateOffload.borrow`) and gives it back. While one piece is
worked on, the next one, as the last step went, is on its way to the device on a stream of its own; what is given back is
written to the host on another one. So there are two pieces on the device at most: the one that is worked on, and the one
that arrives in the memory of the one before, which is written to only when its last byte is on the host.

Nothing here knows what state is, whose it is or what is done with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Channel", "StateOffload", "channel_to", "home_of"]


def home_of(tensor: Tensor, device: torch.device) -> Tensor:
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


@dataclass
class _Loan:
    """Copies on the device of tensors at home.

    Attributes:
        arrived: event after which the copies can be read, or ``None`` where that is now.
        left: event after which they are back at home, or ``None``.
        returned: whether they were given back.
    """

    key: Hashable
    home: list[Tensor]
    copies: list[Tensor]
    channel: _Channel | _SameMemory
    arrived: Any = None
    left: Any = None
    returned: bool = False

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    def is_of(self, home: Sequence[Tensor]) -> bool:
        """Whether it was made of these tensors."""
        return len(home) == len(self.home) and all(
            a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype for a, b in zip(self.home, home)
        )


class _Channel:
    """Two streams of an accelerator: one that brings and one that takes away.

    Copies are allocated on the first, so their memory is used again only by what that stream brings later, and it waits for
    the second before it does: no other stream has to wait for a byte that leaves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._bringing, self._taking = self._module.Stream(device), self._module.Stream(device)

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
        with self._module.stream(self._taking):
            for copy, tensor in zip(copies, home):
                tensor.copy_(copy, non_blocking=True)
            left = self._module.Event()
            left.record(self._taking)
        return left

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


Channel = _Channel | _SameMemory
"""To a device and back: ``bring``, ``await_arrival``, ``take_away``, and ``release`` before copies are let go of."""


def channel_to(device: torch.device) -> Channel:
    """The way from the host to a device."""
    return _SameMemory() if device.type == "cpu" else _Channel(device)


class StateOffload:
    """Lends tensors that lie on the host to a device, one piece of work at a time, the next one ahead.

    The order in which pieces are borrowed is learned: what followed a piece in the last step is brought while this one is
    worked on. Where a step goes another way, what was brought for nothing is dropped, and what is asked for comes late.

    Attributes:
        resident_bytes: of copies on devices now, those that arrive counted; those whose memory the next ones take, not.
        peak_bytes: the most that there were.
        largest_bytes: of one piece; :attr:`peak_bytes` is at most twice that where pieces are borrowed one at a time.
        moved_bytes: brought to devices so far.
        fetched_ahead, fetched_late: pieces that were on their way when they were asked for, and those that were not.
    """

    def __init__(self) -> None:
        self.resident_bytes = self.peak_bytes = self.largest_bytes = self.moved_bytes = 0
        self.fetched_ahead = self.fetched_late = 0
        self._channels: dict[torch.device, _Channel | _SameMemory] = {}
        self._loans: list[_Loan] = []
        self._ahead: _Loan | None = None
        self._followed_by: dict[Hashable, tuple[Hashable, list[Tensor], torch.device] | None] = {}
        self._last: Hashable = None

    def begin(self) -> None:
        """Starts to bring what the last step began with; at the beginning of a step."""
        self._clear()
        self._bring_next()

    def borrow(self, key: Hashable, home: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies on the device, which the current stream may read and write.

        Args:
            key: names the piece of work, the same in every step.
            home: tensors on the host, from :func:`home_of`. They are undefined until :meth:`give_back` and
                :meth:`synchronize`.
            device: where they are worked on.
        """
        self._release()
        loan, self._ahead = self._ahead, None
        if loan is not None and not (loan.key == key and loan.is_of(home)):
            self._drop(loan)
            loan = None
        if loan is None:
            loan = self._bring(key, home, device)
            self.fetched_late += 1
        else:
            self.fetched_ahead += 1
        loan.channel.await_arrival(loan.arrived)
        self._loans.append(loan)
        self._followed_by[self._last] = (key, list(home), device)
        self._last = key
        self._bring_next()
        return list(loan.copies)  # whoever keeps one after giving it back keeps its memory too

    def give_back(self, key: Hashable) -> None:
        """Starts to write the copies of a piece to the host, when the current stream is through with them."""
        loan = next(loan for loan in self._loans if loan.key == key and not loan.returned)
        loan.left, loan.returned = loan.channel.take_away(loan.copies, loan.home), True

    @contextmanager
    def lent(self, key: Hashable, home: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
        """:meth:`borrow`, and :meth:`give_back` at the end."""
        copies = self.borrow(key, home, device)
        try:
            yield copies
        finally:
            self.give_back(key)

    def finish(self) -> None:
        """At the end of a step: nothing stays on the device. Bytes may still be on their way to the host."""
        if self._last is not None:
            self._followed_by[self._last] = None
        self._clear()

    def synchronize(self) -> None:
        """Waits until all that was given back is on the host, where it may then be read."""
        for channel in self._channels.values():
            channel.synchronize()

    # ------------------------------------------------------------------ pieces

    def _bring(self, key: Hashable, home: Sequence[Tensor], device: torch.device) -> _Loan:
        if device not in self._channels:
            self._channels[device] = channel_to(device)
        channel = self._channels[device]
        copies, arrived = channel.bring(home)
        loan = _Loan(key, list(home), copies, channel, arrived)
        self.resident_bytes += loan.nbytes
        self.moved_bytes += loan.nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self.largest_bytes = max(self.largest_bytes, loan.nbytes)
        return loan

    def _bring_next(self) -> None:
        following = self._followed_by.get(self._last)
        if following is None or self._ahead is not None or any(loan.key == following[0] for loan in self._loans):
            return
        self._ahead = self._bring(*following)

    def _clear(self) -> None:
        self._release()
        if self._ahead is not None:
            self._drop(self._ahead)
        self._ahead, self._last = None, None

    def _release(self) -> None:
        """Lets go of what was given back."""
        for loan in [loan for loan in self._loans if loan.returned]:
            self._loans.remove(loan)
            self._drop(loan)

    def _drop(self, loan: _Loan) -> None:
        loan.channel.release(loan.left)
        self.resident_bytes -= loan.nbytes
        loan.copies.clear()
