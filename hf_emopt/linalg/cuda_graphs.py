"""Small orthogonalizations as CUDA graphs.

A matrix of some million elements is orthogonalized in less time than a host needs to launch twenty kernels. The second
call with the same shape records everything between normalization and the last product (of the smallest ones normalization
too, on a copy of the input), and later calls replay it: one launch. The recorded part works in memory of its own; the input
is read and the result is written where the caller's tensors are.

At most ``_MAX_BYTES`` are kept a device, the least recently used graph going first. Nothing is recorded while somebody else
records (then the kernels become part of that graph), for problems above ``_MAX_ELEMENTS``, or with
``HF_EMOPT_DISABLE_CUDA_GRAPHS=1``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.linalg.triton.runtime import current_stream, variable

__all__ = ["DISABLE_VARIABLE", "clear", "recorded"]

DISABLE_VARIABLE = "HF_EMOPT_DISABLE_CUDA_GRAPHS"
# Elements of two copies of the matrices and of four squares beside them: 640 MiB in 16 bits.
_MAX_ELEMENTS = 5 * 2**26
_MAX_BYTES = 2**30

Pair = tuple[Tensor, Tensor]


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    sources: tuple[Tensor, ...]
    result: Pair
    size: int


_seen: OrderedDict[Hashable, _Recording | None] = OrderedDict()


def clear() -> None:
    """Forgets all graphs and frees their memory."""
    _seen.clear()


def usable(batch: int, m: int, n: int, device: torch.device) -> bool:
    """Whether a problem with short side ``m`` is recorded at all."""
    if device.type != "cuda" or variable(DISABLE_VARIABLE) not in ("", "0"):
        return False
    return batch * (2 * m * n + 4 * m * m) <= _MAX_ELEMENTS and not torch.cuda.is_current_stream_capturing()


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
