"""State that lies on the host between steps, and is on the device only while it is worked on.

A step borrows the state of one piece of work at a time (:meth:`StateOffload.borrow`) and gives it back. While one piece is
worked on, the next ones, as the last step went, are on their way to the device on a stream of its own; what is given back is
written to the host on another one. What arrives takes the memory of what left, a few tensors at a time, and is written to it
only when their last byte is on the host. So the link is busy in both directions in the memory of a few pieces, three unless
:data:`ROOM_VARIABLE` says otherwise; and one piece, the first of the next step, waits on the device between steps. Who knows
that a step is near says so (:meth:`StateOffload.approach`): then the memory of a step is filled before it begins.

Nothing here knows what state is, whose it is or what is done with it.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from hf_emopt.state.host_transfer import CHUNK_BYTES, CopyStream, copy_stream_to

ROOM_VARIABLE = "HF_EMOPT_OFFLOAD_BUCKETS"
"""Environment variable with the room in a step, in buckets; 3 where it is not set. More of it hides more of the link.

Measured on an H200, Muon at 1.1 B in float32: 1.11 times the step without offload with 3, 1.04 with 5."""


def room_in_buckets() -> float:
    """The environment's :data:`ROOM_VARIABLE`, else 3: the piece that is worked on, and twice as much that comes or goes.

    Raises:
        ValueError: when the variable is not a number from 2 on.
    """
    given = os.environ.get(ROOM_VARIABLE, "") or "3"
    try:
        buckets = float(given)
    except ValueError:
        buckets = 0.0
    if not 2.0 <= buckets < math.inf:
        raise ValueError(f"{ROOM_VARIABLE}={given!r} must be a number of buckets from 2 on, or unset for 3")
    return buckets


@dataclass
class _Chunk:
    """Tensors that are moved together.

    Attributes:
        memory: addresses of their memory on the host.
        copies: on the device, or on their way.
        versions: of the tensors on the host when they were read.
        arrived: event after which the copies can be read, or ``None`` where that is now.
        left: event after which they are back on the host, or ``None``.
    """

    home: list[Tensor]
    memory: frozenset[int]
    copies: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    arrived: Any = None
    left: Any = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.home)

    @property
    def unchanged(self) -> bool:
        """Whether what lies on the host is what was read."""
        return not self.copies or [_version(t) for t in self.home] == self.versions


class _Piece:
    """What a piece of work takes: its name, the tensors on the host, and where they are worked on."""

    def __init__(self, key: Hashable, home: Sequence[Tensor], device: torch.device) -> None:
        self.key, self.home, self.device = key, list(home), device
        self.memory = _memory(home)
        self.nbytes = sum(t.nbytes for t in home)

    def is_of(self, key: Hashable, home: Sequence[Tensor]) -> bool:
        """Whether it is that piece, of these tensors."""
        return (
            key == self.key
            and len(home) == len(self.home)
            and all(
                a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype
                for a, b in zip(self.home, home)
            )
        )


class _SwappedIn:
    """A piece on the device, or as many chunks of it as are on their way there."""

    def __init__(self, piece: _Piece, copy_stream: CopyStream) -> None:
        self.piece, self.copy_stream = piece, copy_stream
        self.chunks = [_Chunk(tensors, _memory(tensors)) for tensors in _together(piece.home)]
        self.brought = 0

    @property
    def complete(self) -> bool:
        return self.brought == len(self.chunks)

    @property
    def next(self) -> _Chunk:
        """The chunk that is to be brought next."""
        return self.chunks[self.brought]

    def serves(self, key: Hashable, home: Sequence[Tensor]) -> bool:
        """Whether it is of these tensors as they are now."""
        return self.piece.is_of(key, home) and all(chunk.unchanged for chunk in self.chunks)


def _memory(tensors: Sequence[Tensor]) -> frozenset[int]:
    return frozenset(t.untyped_storage().data_ptr() for t in tensors if t.nbytes)


def _version(tensor: Tensor) -> int:
    """Grows with every write in place; of tensors made in inference mode nobody counts."""
    return -1 if tensor.is_inference() else tensor._version


def _together(home: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of up to :data:`CHUNK_BYTES` together; a larger tensor alone."""
    chunks: list[list[Tensor]] = []
    size = 0
    for tensor in home:
        if not chunks or size + tensor.nbytes > CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.nbytes
    return chunks


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_at_a_time(
    method: Callable[Concatenate[StateOffload, _P], _R],
) -> Callable[Concatenate[StateOffload, _P], _R]:
    """Has other threads wait: a backward pass, on a thread of autograd's own, may say that a step is near at any time."""

    @functools.wraps(method)
    def alone(self: StateOffload, /, *args: _P.args, **options: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **options)

    return alone


class StateOffload:
    """Lends tensors that lie on the host to a device, one piece of work at a time, the next ones ahead.

    The order in which pieces are borrowed is learned, and so is the largest of them, the bucket by which room is measured:
    in a step there are three buckets of room on the device (:data:`ROOM_VARIABLE`), and between steps one. While one piece
    is worked on, those that followed it in the last step are brought as far as the room goes, and at the end of a step those
    that the next one begins with: they arrive during the next forward pass. From :meth:`approach` on there is the room of a
    step, until it ends or :meth:`settle` is called. Where a step goes another way, what was brought for nothing is dropped,
    and what is asked for comes late.

    What is brought ahead of a step is a copy of what somebody may write to before it. So it is used only where the tensors
    on the host are the same and were not written to since (``Tensor._version``); :meth:`settle` is for writes that nobody
    counts.

    Attributes:
        resident_bytes: of copies on devices now: those that arrive, those that are worked on, and those that leave, until
            what comes next is given their memory.
        peak_bytes: the most that there were; at most the room, where pieces are borrowed one at a time.
        left_bytes: the most that a step left there; at most :attr:`largest_bytes`.
        ready_bytes: that were there, or on their way, when the last step began.
        largest_bytes: of one piece.
        buckets: of room in a step, as :func:`room_in_buckets` was when this was made.
        moved_bytes: brought to devices so far.
        fetched_ahead, fetched_late: pieces that were on their way when they were asked for, and those that were not.
    """

    def __init__(self) -> None:
        self.resident_bytes = self.peak_bytes = self.left_bytes = self.largest_bytes = self.moved_bytes = 0
        self.ready_bytes = self.fetched_ahead = self.fetched_late = 0
        self._copy_streams: dict[torch.device, CopyStream] = {}
        self._ahead: deque[_SwappedIn] = deque()
        """In the order in which they are expected to be asked for; only the last may be incomplete."""
        self._borrowed: list[_SwappedIn] = []
        self._leaving: deque[tuple[CopyStream, _Chunk]] = deque()
        self._followed_by: dict[Hashable, _Piece] = {}
        self._start: _Piece | None = None
        self._last: Hashable = None
        self._stepping = self._near = False
        self._lock = threading.RLock()
        self.buckets = room_in_buckets()

    @_one_at_a_time
    def approach(self) -> None:
        """When a step is near: brings what the last one began with, as far as a step has room.

        From any thread and with any current stream: copies are made on a stream of this object's own, in memory that no
        other one has used, and nothing that is being computed is waited for. Where the step does not come, what was brought
        stays until :meth:`settle` or the next step, which takes it only if it is still what lies on the host.

        Raises:
            torch.OutOfMemoryError: what was brought until then stays, and the rest comes in the step.
        """
        if not self._stepping:
            self._near = True
            self._bring_ahead()

    @_one_at_a_time
    def begin(self) -> None:
        """At the beginning of a step: brings what the last one began with, as far as there is room."""
        self.ready_bytes = self.resident_bytes
        for swapped_in in self._borrowed:  # of a step that broke off
            swapped_in.copy_stream.release(None)
            self._drop(swapped_in)
        self._borrowed.clear()
        self._stepping, self._near, self._last = True, False, None
        self._bring_ahead()

    @_one_at_a_time
    def borrow(self, key: Hashable, home: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies on the device, which the current stream may read and write until :meth:`give_back`.

        Args:
            key: names the piece of work, the same in every step.
            home: tensors on the host, from :func:`host_copy_of`. They are undefined until :meth:`give_back` and
                :meth:`synchronize`.
            device: where they are worked on.
        """
        swapped_in = self._expected(key, home)
        if swapped_in is None:
            swapped_in = self._swapped_in(_Piece(key, home, device))
            self.fetched_late += 1
        else:
            self.fetched_ahead += 1
        self._borrowed.append(swapped_in)
        while not swapped_in.complete:
            self._bring(swapped_in)
        if swapped_in.chunks:  # on one stream, so that the last one is the last to be there
            swapped_in.copy_stream.await_arrival(swapped_in.chunks[-1].arrived)
        if self._stepping:  # else it says nothing of the order in a step
            if self._last is None:
                self._start = swapped_in.piece
            else:
                self._followed_by[self._last] = swapped_in.piece
            self._last = key
        self._bring_ahead()
        return [copy for chunk in swapped_in.chunks for copy in chunk.copies]  # who keeps one keeps its memory too

    @_one_at_a_time
    def give_back(self, key: Hashable) -> None:
        """Starts to write the copies of a piece to the host, when the current stream is through with them."""
        swapped_in = next(swapped_in for swapped_in in self._borrowed if swapped_in.piece.key == key)
        self._borrowed.remove(swapped_in)
        if any(not swapped_in.piece.memory.isdisjoint(other.piece.memory) for other in self._ahead):
            self._drop_ahead()  # they were read before this is written
        for chunk in swapped_in.chunks:
            chunk.left = swapped_in.copy_stream.take_away(chunk.copies, chunk.home)
            self._leaving.append((swapped_in.copy_stream, chunk))
        self._bring_ahead()

    @contextmanager
    def lent(self, key: Hashable, home: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
        """:meth:`borrow`, and :meth:`give_back` at the end."""
        copies = self.borrow(key, home, device)
        try:
            yield copies
        finally:
            self.give_back(key)

    @_one_at_a_time
    def finish(self) -> None:
        """At the end of a step: what the next one begins with is all that stays, and no more than one bucket of it.

        Bytes may still be on their way to the host; nothing waits for them but what is brought next.
        """
        self._stepping, self._last = False, None
        self._drop_ahead()
        self._let_go()
        self._bring_ahead()
        self.left_bytes = max(self.left_bytes, self.resident_bytes)

    @_one_at_a_time
    def settle(self) -> None:
        """Before others read or write what lies on the host: all of it is there, and nothing is on the device."""
        self._near = False
        self._drop_ahead()
        self._let_go()
        self.synchronize()

    def synchronize(self) -> None:
        """Waits until all that was given back is on the host, where it may then be read."""
        for copy_stream in self._copy_streams.values():
            copy_stream.synchronize()

    # ------------------------------------------------------------------ pieces

    def _expected(self, key: Hashable, home: Sequence[Tensor]) -> _SwappedIn | None:
        """What was brought ahead of this; what was brought for others, that were left out, is dropped."""
        while self._ahead:
            swapped_in = self._ahead.popleft()
            if swapped_in.serves(key, home):
                return swapped_in
            self._drop(swapped_in)
        return None

    def _swapped_in(self, piece: _Piece) -> _SwappedIn:
        """A swapped_in of which nothing is brought yet."""
        if piece.device not in self._copy_streams:
            self._copy_streams[piece.device] = copy_stream_to(piece.device)
        self.largest_bytes = max(self.largest_bytes, piece.nbytes)
        return _SwappedIn(piece, self._copy_streams[piece.device])

    def _bring_ahead(self) -> None:
        """Brings what is expected next, as far as there is room."""
        while True:
            if not self._ahead or self._ahead[-1].complete:
                following = self._following()
                if following is None:
                    return
                self._ahead.append(self._swapped_in(following))
            swapped_in = self._ahead[-1]
            if not self._make_room(swapped_in.next.nbytes):
                if not swapped_in.brought:
                    self._ahead.pop()
                return
            self._bring(swapped_in)

    def _following(self) -> _Piece | None:
        """The piece after those that are on their way; ``None`` where that is not known, or is one of the next step."""
        if self._ahead:
            piece = self._followed_by.get(self._ahead[-1].piece.key)
        else:
            piece = self._start if self._last is None else self._followed_by.get(self._last)
        if piece is None or not piece.home:
            return None
        if self._last is not None and self._start is not None and piece.key == self._start.key:
            return None  # of the next step
        return None if any(swapped_in.piece.key == piece.key for swapped_in in self._ahead) else piece

    @property
    def _room(self) -> int:
        """Bytes that may be on devices."""
        return int((self.buckets if self._stepping or self._near else 1) * self.largest_bytes)

    def _make_room(self, nbytes: int) -> bool:
        """Lets go of what leaves, as far as that is needed; whether there is room then."""
        while self._leaving and self.resident_bytes + nbytes > self._room:
            self._let_go(1)
        return self.resident_bytes + nbytes <= self._room

    def _bring(self, swapped_in: _SwappedIn) -> None:
        """Starts to bring the next chunk of a swapped_in, whether there is room or not."""
        chunk = swapped_in.next
        self._make_room(chunk.nbytes)
        while any(not chunk.memory.isdisjoint(other.memory) for _, other in self._leaving):
            self._let_go(1)  # what is read must have been written
        chunk.versions = [_version(t) for t in chunk.home]
        chunk.copies, chunk.arrived = swapped_in.copy_stream.bring(chunk.home)
        swapped_in.brought += 1
        self.resident_bytes += chunk.nbytes
        self.moved_bytes += chunk.nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _let_go(self, count: int | None = None) -> None:
        """Gives the memory of what has been leaving for longest, or of all, to what is brought from here on."""
        for _ in range(len(self._leaving) if count is None else count):
            copy_stream, chunk = self._leaving.popleft()
            copy_stream.release(chunk.left)
            self.resident_bytes -= chunk.nbytes
            chunk.copies.clear()

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._drop(self._ahead.pop())

    def _drop(self, swapped_in: _SwappedIn) -> None:
        """Lets go of copies that are not to be written home; what is brought into their memory comes after them."""
        for chunk in swapped_in.chunks[: swapped_in.brought]:
            self.resident_bytes -= chunk.nbytes
            chunk.copies.clear()
        swapped_in.brought = 0
