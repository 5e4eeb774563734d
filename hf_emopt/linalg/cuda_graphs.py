"""Small orthogonalizations, roots and bases as CUDA graphs.

A matrix of some million elements is orthogonalized in less time than a host needs to launch twenty kernels. The second
call with the same shape records everything between normalization and the last product (of the smallest ones normalization
too, on a copy of the input), and later calls replay it: one launch. The recorded part works in memory of its own; the input
is read and the result is written where the caller's tensors are.

Of orthogonalizations at most ``_MAX_BYTES`` are kept a device, the least recently used graph going first, and none of
problems above ``_MAX_ELEMENTS``. Nothing is recorded while somebody else records (then the kernels become part of that
graph), with ``HF_EMOPT_DISABLE_CUDA_GRAPHS=1``, or once a recording has failed.

Roots and bases are some hundred launches for a few sides, which take a host as long as a GPU. They are recorded by
:func:`replayed`, whose graphs share their memory: what they read is copied there, and what they give is copied from there.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.linalg.triton.runtime import current_stream, variable

__all__ = ["DISABLE_VARIABLE", "clear", "recorded", "replayed"]

logger = logging.getLogger("hf_emopt")

DISABLE_VARIABLE = "HF_EMOPT_DISABLE_CUDA_GRAPHS"
# Elements of two copies of the matrices and of four squares beside them: 640 MiB in 16 bits.
_MAX_ELEMENTS = 5 * 2**26
_MAX_BYTES = 2**30
# Of the first input of a part of replayed(): eight sides of 2048, with which roots and bases take some 2 GiB.
_MAX_REPLAYED_ELEMENTS = 8 * 2**22
# Sizes of parts times sides, with room to spare: graphs share their memory, and one costs little more than its nodes.
_MAX_REPLAYED = 256
# What recording makes on the way, as a multiple of the first input: free memory below that is looked for before.
_NEEDED = 16
_ALIGNMENT = 256

Pair = tuple[Tensor, Tensor]


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    sources: tuple[Tensor, ...]
    result: Pair
    size: int


_seen: OrderedDict[Hashable, _Recording | None] = OrderedDict()


@dataclass
class _Replay:
    graph: torch.cuda.CUDAGraph
    sources: list[Tensor]
    results: list[Tensor]


class _Room:
    """What the graphs of one stream share: a pool for what they make on the way, and a buffer for what goes in and out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()
        # One for all: memory that one recording gives back to the pool is found again on its own stream only.
        self.stream = torch.cuda.Stream(device)
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def carve(self, likes: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors of these shapes and dtypes, side by side in the buffer."""
        sizes = [-(-x.numel() * x.element_size() // _ALIGNMENT) * _ALIGNMENT for x in likes]
        if self.buffer.numel() < sum(sizes):
            # Graphs that were recorded on a smaller one keep that; by doubling, all of them are no more than this one.
            self.buffer = torch.empty(1 << sum(sizes).bit_length(), dtype=torch.uint8, device=self.device)
        parts = self.buffer[: sum(sizes)].split(sizes)
        return [part[: x.numel() * x.element_size()].view(x.dtype).view(x.shape) for part, x in zip(parts, likes)]


# Before the second call the shapes of the results.
_replays: dict[Hashable, _Replay | list[Tensor]] = {}
_rooms: dict[Hashable, _Room] = {}
# Graphs whose recording failed. The allocator refers to them still.
_broken: list[torch.cuda.CUDAGraph] = []


def clear() -> None:
    """Forgets all graphs and frees their memory."""
    _seen.clear()
    _replays.clear()
    _rooms.clear()


def usable(batch: int, m: int, n: int, device: torch.device) -> bool:
    """Whether a problem with short side ``m`` is recorded at all."""
    return batch * (2 * m * n + 4 * m * m) <= _MAX_ELEMENTS and _can_record(device)


def _can_record(device: torch.device) -> bool:
    if device.type != "cuda" or _broken or variable(DISABLE_VARIABLE) not in ("", "0"):
        return False
    return not torch.cuda.is_current_stream_capturing()


def recorded(
    key: Hashable,
    likes: Sequence[Tensor],
    device: torch.device,
    fill: Callable[..., object],
    work: Callable[..., Pair],
) -> Pair:
    """``work(*sources)`` after ``fill(*sources)``, the work replayed from its second call on.

    Args:
        key: everything that the work depends on but the numbers in its input.
        likes: have shapes, strides and dtypes of the sources; need no memory.
        fill: writes the input into the tensors that it is given.
        work: launches on the current stream alone and allocates nothing that outlives it but its result, which is
            overwritten by the next call with this key.
    """
    full_key = (key, device, current_stream(device))
    if full_key not in _seen:
        # Compiles what has to be, and shows the libraries the shapes.
        sources = [torch.empty_like(like, device=device) for like in likes]
        fill(*sources)
        result = work(*sources)
        _remember(full_key, None)
        return result
    recording = _seen[full_key]
    if recording is None:
        recording = _record(likes, device, work)
        _remember(full_key, recording)
    _seen.move_to_end(full_key)
    fill(*recording.sources)
    recording.graph.replay()
    return recording.result


def _record(likes: Sequence[Tensor], device: torch.device, work: Callable[..., Pair]) -> _Recording:
    # The sources must hold numbers, since work runs on them once while it is recorded only.
    sources = tuple(torch.zeros_like(like, device=device) for like in likes)
    before = torch.cuda.memory_reserved(device)
    graph = torch.cuda.CUDAGraph()
    # Other threads (data loading, collectives' watchdogs) may use the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work(*sources)
    size = torch.cuda.memory_reserved(device) - before + sum(x.numel() * x.element_size() for x in sources)
    return _Recording(graph, sources, result, size)


def _remember(key: Hashable, recording: _Recording | None) -> None:
    _seen[key] = recording
    _seen.move_to_end(key)
    while sum(kept.size for kept in _seen.values() if kept is not None) > _MAX_BYTES and len(_seen) > 1:
        _seen.popitem(last=False)
    while len(_seen) > 256:
        _seen.popitem(last=False)


# ------------------------------------------------------------------ with shared memory


def replayed(key: Hashable, inputs: Sequence[Tensor], work: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``work(*inputs)``, replayed from its second call on.

    Large batches are worked on in parts of one size, or of two that differ by one: a graph then is long enough for the host
    to be ahead of the device, there are fewer kinds of them, and what they make on the way takes no more memory than that of
    a part.

    Args:
        key: everything that the work depends on but its input.
        inputs: batches of one device and one size; shapes and dtypes are part of the key.
        work: as for :func:`recorded`, and nothing of what it reads may lie elsewhere and change. What it gives for one member
            of the batch depends on no other. Gives no view of an input.

    Returns:
        Tensors of the caller's own. Where nothing can be recorded, or a single member is too large, those of the work itself.
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
            # All of them, with their rooms: a pool is no more when its last graph has gone.
            _replays.clear()
            _rooms.clear()
        _replays[full_key] = [torch.empty_like(x, device="meta") for x in made]
        return made
    known = _replays[full_key]
    if isinstance(known, list):
        if place not in _rooms:
            _rooms[place] = _Room(device)
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
) -> _Replay | None:
    """Records the work on parts of the room's buffer; ``None``, and a warning, where a library does not allow it.

    All other memory goes back to the pool, where the next recording finds it: the graphs of a room run one after another, and
    what one gives has been copied before the next begins.
    """
    device = room.device
    if torch.cuda.mem_get_info(device)[0] < _NEEDED * inputs[0].numel() * inputs[0].element_size():
        torch.cuda.empty_cache()  # while it is recorded, the allocator gives nothing of its cache back
    carved = room.carve([*inputs, *likes])
    sources, results = carved[: len(inputs)], carved[len(inputs) :]
    graph = torch.cuda.CUDAGraph()
    room.stream.wait_stream(torch.cuda.current_stream(device))
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.clone_state()
    try:
        with torch.cuda.device(device), torch.cuda.stream(room.stream):
            # Not torch.cuda.graph, which empties the allocator's cache. Other threads may use the device meanwhile.
            graph.capture_begin(pool=room.pool, capture_error_mode="thread_local")
            try:
                for result, value in zip(results, work(*sources), strict=True):
                    result.copy_(value)
            finally:
                graph.capture_end()
    except RuntimeError as error:
        # The end of a recording that failed leaves much undone: the generator and the allocator believe that it goes on.
        generator.graphsafe_set_state(state)
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(generator.device.index, room.pool)
        _broken.append(graph)
        logger.warning(
            "a refresh of %s could not be recorded as a CUDA graph. From here on kernels are launched one by one, which "
            "takes a host longer; %s=1 does so from the start. The reason: %s",
            tuple(inputs[0].shape), DISABLE_VARIABLE, error,
        )  # fmt: skip
        return None
    torch.cuda.current_stream(device).wait_stream(room.stream)
    return _Replay(graph, sources, results)
