"""Small orthogonalizations, roots and bases as CUDA graphs, whose kernels a host launches more slowly than a GPU runs them.

The second call with the same shape records the work, and later calls replay it: one launch. :func:`recorded` reads the input
and gives the result where they are; :func:`replayed` copies both. The graphs of a stream run one after another, so they share
their memory, a *room*: a pool for intermediate results, and a buffer for inputs and outputs. Orthogonalizations have one,
roots and bases another. Two threads must not use one stream. Nothing is recorded while somebody else records (then the
kernels become part of that graph), with ``HF_EMOPT_DISABLE_CUDA_GRAPHS=1``, or once a recording has failed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.kernels.triton.runtime import current_stream, variable

logger = logging.getLogger("hf_emopt")

DISABLE_VARIABLE = "HF_EMOPT_DISABLE_CUDA_GRAPHS"
# Elements of two copies of the matrices and of four square matrices: 640 MiB in 16 bits.
_MAX_ELEMENTS = 5 * 2**26
_MAX_RECORDED = 512
# Of the first input of a part of replayed(): eight sides of 2048, with which roots and bases take some 2 GiB.
_MAX_REPLAYED_ELEMENTS = 8 * 2**22
_MAX_REPLAYED = 256
# Memory that a recording takes, as a multiple of the first input.
_NEEDED = 16
_ALIGNMENT = 256

Pair = tuple[Tensor, Tensor]
Place = tuple[torch.device, int]
"""A device, and the address of a stream on which graphs run."""


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    sources: list[Tensor]
    results: list[Tensor]


class _Room:
    """Memory of the graphs of one stream."""

    def __init__(self, place: Place, size: int = 0) -> None:
        self.device, self.pool = place[0], torch.cuda.graph_pool_handle()
        # One for all, since memory that a recording gives back to the pool is found again on its own stream only. And none of
        # another room, since cuBLAS keeps a workspace for each stream, in the pool of the first graph recorded there.
        self.stream = _unused_stream(place[0])
        self.buffer = self._bytes(size)

    def _bytes(self, size: int) -> Tensor:
        with torch.inference_mode(False):  # tensors made there could not be written to elsewhere
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def grow(self, size: int, most: int) -> None:
        """Makes the buffer at least ``size`` bytes large. Graphs keep the smaller one they were recorded on; by doubling,
        all of those are no more than this one, but none is larger than ``most`` or the ``size`` asked for."""
        if self.buffer.numel() < size:
            self.buffer = self._bytes(max(size, min(1 << size.bit_length(), most)))

    def carve(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Dense tensors of these shapes, strides and dtypes, side by side in the buffer."""
        sizes = [_room_of(x) for x in likes]
        with torch.inference_mode(False):
            parts = self.buffer[: sum(sizes)].split(sizes)
            whole = [part[: x.numel() * x.element_size()].view(x.dtype) for part, x in zip(parts, likes)]
            return [part.as_strided(x.shape, x.stride()) for part, x in zip(whole, likes)]


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which no graph is recorded or runs: torch gives out 32 in turn."""
    rooms = (*_recorded_in.values(), *_rooms.values())
    used = {room.stream.cuda_stream for room in rooms} | {place[1] for place in (*_recorded_in, *_rooms)}
    for _ in range(32):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in used:
            break
    return stream


def _room_of(x: Tensor) -> int:
    return -(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT


# Before the second call: sources and results of recorded(), and results of replayed(), without memory.
_recordings: dict[Hashable, _Recording | list[Tensor]] = {}
_recorded_in: dict[Place, _Room] = {}
_replays: dict[Hashable, _Recording | list[Tensor]] = {}
_rooms: dict[Place, _Room] = {}
# Graphs whose recording failed. The allocator refers to them still.
_broken: list[torch.cuda.CUDAGraph] = []


def clear() -> None:
    """Forgets all graphs and frees their memory."""
    for known in (_recordings, _recorded_in, _replays, _rooms):
        known.clear()  # type: ignore[attr-defined]


def _without_memory(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x, device="meta") for x in tensors]


def usable(batch: int, m: int, n: int, device: torch.device) -> bool:
    """Whether a problem with short side ``m`` is recorded at all."""
    return batch * (2 * m * n + 4 * m * m) <= _MAX_ELEMENTS and _can_record(device)


def _can_record(device: torch.device) -> bool:
    if device.type != "cuda" or _broken or variable(DISABLE_VARIABLE) not in ("", "0"):
        return False
    return not torch.cuda.is_current_stream_capturing()


def recorded(
    key: Hashable, likes: Sequence[Tensor], device: torch.device, fill: Callable[..., object], work: Callable[..., Pair]
) -> Pair:
    """``work(*sources)`` after ``fill(*sources)``, the work replayed from its second call on.

    Args:
        key: everything that the work depends on but the numbers in its input.
        likes: have shapes, strides and dtypes of the sources; need no memory.
        fill: writes the input into the tensors that it is given.
        work: launches on the current stream alone and allocates nothing that outlives it but its result, which the next call
            on this stream overwrites. It may write that into ``out``, a pair like its result.
    """
    place = device, current_stream(device)
    full_key = (key, *place)
    known = _recordings.get(full_key)
    if isinstance(known, list):
        made = _record(full_key, known, work, place)
        known = known if made is None else made
    if isinstance(known, _Recording):
        fill(*known.sources)
        known.graph.replay()
        return known.results[0], known.results[1]
    # Compiles what has to be, and shows the libraries the shapes.
    sources = [torch.empty_like(like, device=device) for like in likes]
    fill(*sources)
    result = work(*sources)
    if known is None:
        if len(_recordings) >= _MAX_RECORDED:
            # All of them, with their rooms: a pool is no more when its last graph has gone.
            _recordings.clear()
            _recorded_in.clear()
        _recordings[full_key] = _without_memory((*sources, *result))
    return result


def _record(full_key: Hashable, likes: list[Tensor], work: Callable[..., Pair], place: Place) -> _Recording | None:
    if place not in _recorded_in or _recorded_in[place].buffer.numel() < sum(map(_room_of, likes)):
        _make_room(place)
    room = _recorded_in[place]
    carved = room.carve(likes)
    sources, out = carved[:-2], (carved[-2], carved[-1])
    for source in sources:
        source.zero_()  # work may ask for numbers when a library chooses how to multiply
    result: list[Tensor] = []

    def run() -> None:
        for made, there in zip(work(*sources, out=out), out):
            kept = any(made is tensor for tensor in carved)
            result.append(made if kept else there.copy_(made))

    graph = _capture(room, run, sources[0])
    if graph is None:
        return None
    recording = _recordings[full_key] = _Recording(graph, sources, list(result))
    return recording


def _make_room(place: Place) -> None:
    """A room for the largest of all shapes that were seen on a stream. Graphs of a smaller one will be recorded again."""
    sizes = []
    for key, known in _recordings.items():
        if key[1:] == place:  # type: ignore[index]
            likes = _without_memory(known if isinstance(known, list) else (*known.sources, *known.results))
            _recordings[key] = likes
            sizes.append(sum(map(_room_of, likes)))
    _recorded_in.pop(place, None)  # whose pool is no more, since its graphs are gone
    _recorded_in[place] = _Room(place, max(sizes))


def _capture(room: _Room, run: Callable[[], None], first: Tensor) -> torch.cuda.CUDAGraph | None:
    """A graph of the kernels that ``run`` launches; ``None``, and a warning, where a library does not allow it.

    All memory but the buffer's goes back to the pool, where the next recording finds it. ``first`` is the first tensor read.
    """
    device = room.device
    room.stream.wait_stream(torch.cuda.current_stream(device))  # first, since graphs of its pool may be running
    if torch.cuda.mem_get_info(device)[0] < _NEEDED * first.numel() * first.element_size():
        torch.cuda.empty_cache()  # while it is recorded, the allocator gives nothing of its cache back
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.clone_state()
    try:
        with torch.cuda.device(device), torch.cuda.stream(room.stream):
            # Not torch.cuda.graph, which empties the allocator's cache. Other threads (data loading, collectives' watchdogs)
            # may use the device meanwhile.
            graph.capture_begin(pool=room.pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
    except BaseException as error:
        # The end of a recording that failed leaves much undone: the generator and the allocator believe that it goes on.
        generator.graphsafe_set_state(state)
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(generator.device.index, room.pool)
        _broken.append(graph)
        if not isinstance(error, RuntimeError):
            raise
        logger.warning(
            "an orthogonalization or a refresh of %s could not be recorded as a CUDA graph. From now on kernels are launched "
            "one by one, which a host takes longer for; %s=1 does so from the start. The reason: %s",
            tuple(first.shape), DISABLE_VARIABLE, error,
        )  # fmt: skip
        return None
    torch.cuda.current_stream(device).wait_stream(room.stream)
    return graph


def replayed(key: Hashable, inputs: Sequence[Tensor], work: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``work(*inputs)``, replayed from its second call on.

    Large batches are worked on in parts of one size, or of two that differ by one, so that intermediate results take no more
    memory than those of a part. Where nothing can be recorded, or a single member is too large, the result is the work's own.

    Args:
        key: everything that the work depends on but its input.
        inputs: batches of one device and one size; shapes and dtypes are part of the key.
        work: as for :func:`recorded`; it reads nothing else that may change, and returns no view of an input. The results
            for one member of the batch depend on no other.
    """
    device, size = inputs[0].device, inputs[0].shape[0]
    most = _MAX_REPLAYED_ELEMENTS * size // max(1, inputs[0].numel())
    if not _can_record(device) or not most:
        return work(*inputs)
    if size <= most:
        return _replayed(key, inputs, work, device)
    count = -(-size // most)
    parts = [_replayed(key, part, work, device) for part in zip(*(x.tensor_split(count) for x in inputs))]
    return tuple([torch.cat(made) for made in zip(*parts)])


def _replayed(
    key: Hashable, inputs: Sequence[Tensor], work: Callable[..., tuple[Tensor, ...]], device: torch.device
) -> tuple[Tensor, ...]:
    place = device, current_stream(device)
    full_key = (key, *((x.shape, x.dtype) for x in inputs), *place)
    if full_key not in _replays:
        made = work(*inputs)  # compiles what has to be
        if len(_replays) >= _MAX_REPLAYED:
            _replays.clear()
            _rooms.clear()
        _replays[full_key] = _without_memory(made)
        return made
    known = _replays[full_key]
    if isinstance(known, list):
        if place not in _rooms:
            _rooms[place] = _Room(place)
        replay = _record_shared([*inputs], known, work, _rooms[place])
        if replay is None:
            return work(*inputs)
        known = _replays[full_key] = replay
    for source, x in zip(known.sources, inputs):
        source.copy_(x)
    known.graph.replay()
    return tuple([result.clone() for result in known.results])


def _record_shared(
    inputs: list[Tensor], likes: list[Tensor], work: Callable[..., tuple[Tensor, ...]], room: _Room
) -> _Recording | None:
    size = sum(map(_room_of, [*inputs, *likes]))
    room.grow(size, size * _MAX_REPLAYED_ELEMENTS // max(1, inputs[0].numel()))
    carved = room.carve([*(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in inputs), *likes])
    sources, results = carved[: len(inputs)], carved[len(inputs) :]

    def run() -> None:
        for result, value in zip(results, work(*sources), strict=True):
            result.copy_(value)

    graph = _capture(room, run, inputs[0])
    return None if graph is None else _Recording(graph, sources, results)
