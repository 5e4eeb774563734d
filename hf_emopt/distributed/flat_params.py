"""Where parameters lie in the flat tensors of a wrapper (ZeRO), as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.distributed.layout import Grid


@dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Attributes:
        position: of the parameter in its group.
        spans: for each rank, ``(start, stop)`` of the run that it holds of the flattened parameter; equal for none.
        offset: of this rank's run in its flat tensor.
    """

    position: int
    shape: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    offset: int


@dataclass(frozen=True)
class FlatTensor:
    """A flat tensor that a wrapper puts into a parameter group.

    Attributes:
        tensor: of this rank, one dimension, float32.
        group: index of the parameter group.
        places: of the parameters that are spread over this tensor and those of the other ranks.
        compute: device of the step.
        offloaded: whether the tensor is kept on the host, to be computed on copies.
        pinned: whether state belongs in page-locked memory, as the tensor is.
    """

    tensor: Tensor
    group: int
    places: tuple[Place, ...]
    grid: Grid
    compute: torch.device
    offloaded: bool = False
    pinned: bool = False


def cut_together(
    shapes: Sequence[Sequence[int]], offsets: Sequence[int], size: int, ranks: int, rank: int
) -> tuple[Place, ...]:
    """Places of concatenated parameters that are cut in runs of equal size (ZeRO-1 and 2).

    Args:
        offsets: of each parameter in all runs together; between parameters there may be padding.
        size: elements of each rank's run.
    """
    places = []
    for index, (shape, start) in enumerate(zip(shapes, offsets, strict=True)):
        stop = start + math.prod(shape)
        spans = []
        for r in range(ranks):
            low = min(max(start, r * size), stop)
            spans.append((low - start, max(low, min(stop, (r + 1) * size)) - start))
        offset = max(0, start - rank * size)
        places.append(Place(index, tuple(shape), tuple(spans), min(offset, size)))
    return tuple(places)


def cut_each(shapes: Sequence[Sequence[int]], ranks: int, rank: int, first: int) -> tuple[Place, ...]:
    """Places of parameters that are each cut in runs of equal size, the last one padded (ZeRO-3).

    ``first`` is the position of the first parameter in its group.
    """
    places, offset = [], 0
    for index, shape in enumerate(shapes):
        numel = math.prod(shape)
        size = -(-numel // ranks)
        spans = tuple((min(r * size, numel), min((r + 1) * size, numel)) for r in range(ranks))
        places.append(Place(first + index, tuple(shape), spans, offset))
        offset += size
    return tuple(places)
