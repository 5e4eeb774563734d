"""Parameters that a wrapper has flattened and cut among ranks: what an optimizer steps when a group holds flat tensors.

DeepSpeed's ZeRO replaces the parameters of a group by one flat float32 tensor for each rank and calls ``step()`` with one
group, or part of one, at a time. :class:`Flattened` knows which elements of which parameter lie where in such tensors, and
shows the optimizer its groups as they were, with a :class:`~hf_emopt.distributed.layout.Partition` for each parameter.
Nothing here knows of DeepSpeed: an integration says what lies where.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_emopt.distributed.layout import Grid, Partition, Storage, UnsupportedLayoutError
from hf_emopt.rules.base import Group

if TYPE_CHECKING:
    from hf_emopt.matrix_optimizer import MatrixOptimizer

__all__ = ["FlatTensor", "Flattened", "Place", "cut_each", "cut_together"]


@dataclass(frozen=True)
class Place:
    """Where a parameter lies.

    Attributes:
        position: of the parameter in its group.
        shape: of the parameter.
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
        grid: the ranks.
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
    shapes: Sequence[Sequence[int]], offsets: Sequence[int], size: int, ranks: int, rank: int, first: int = 0
) -> tuple[Place, ...]:
    """Places of parameters that are laid one behind the other and cut in runs of equal size (ZeRO-1 and 2).

    Args:
        shapes: of the parameters.
        offsets: of each parameter in all runs together; between parameters there may be padding.
        size: elements of each rank's run.
        ranks, rank: their number, and this one's.
        first: position of the first parameter in the group.
    """
    places = []
    for index, (shape, start) in enumerate(zip(shapes, offsets, strict=True)):
        stop = start + math.prod(shape)
        spans = []
        for r in range(ranks):
            low = min(max(start, r * size), stop)
            spans.append((low - start, max(low, min(stop, (r + 1) * size)) - start))
        offset = max(0, start - rank * size)
        places.append(Place(first + index, tuple(shape), tuple(spans), min(offset, size)))
    return tuple(places)


def cut_each(shapes: Sequence[Sequence[int]], ranks: int, rank: int, first: int = 0) -> tuple[Place, ...]:
    """Places of parameters that are each cut in runs of equal size, the last one padded (ZeRO-3)."""
    places, offset = [], 0
    for index, shape in enumerate(shapes):
        numel = math.prod(shape)
        size = -(-numel // ranks)
        spans = tuple((min(r * size, numel), min((r + 1) * size, numel)) for r in range(ranks))
        places.append(Place(first + index, tuple(shape), spans, offset))
        offset += size
    return tuple(places)


class Flattened:
    """The flat tensors of an optimizer's groups, and the parameters in them.

    Args:
        groups: the optimizer's groups, which hold flat tensors or nothing by now.
        flats: all flat tensors of this rank.
        checked: whether the wrapper has seen that all gradients are finite before it steps the first group.

    Raises:
        UnsupportedLayoutError: when they are not all of the groups' parameters, each once.
    """

    def __init__(self, groups: Sequence[Group], flats: Sequence[FlatTensor], checked: bool = False) -> None:
        self.groups = list(groups)
        self.checked = checked
        self.state: dict[Tensor, Any] = defaultdict(dict)
        self._flats = {id(flat.tensor): flat for flat in flats}
        self._parts: list[list[Partition]] = []
        self._inside: dict[int, list[tuple[Partition, int, str]]] = defaultdict(list)
        self._open = False
        found: dict[tuple[int, int], Partition] = {}
        self._where: dict[int, tuple[int, int]] = {}
        for number, flat in enumerate(flats):
            for place in flat.places:
                storage = Storage(
                    (math.prod(place.shape),), tuple((((a, b),),) for a, b in place.spans), flat.grid.ranks
                )
                part = Partition.of(_run(flat, place), storage, flat.grid, place.shape, flat.compute)
                part.offloaded, part.pinned = flat.offloaded, flat.pinned
                found[flat.group, place.position] = part
                self._where[id(part)] = (number, place.offset)
                name = self.groups[flat.group]["param_names"][place.position]
                self._inside[id(flat.tensor)].append((part, place.offset, name))
        for index, group in enumerate(self.groups):
            names = group["param_names"]
            missing = [name for position, name in enumerate(names) if (index, position) not in found]
            if missing:
                raise UnsupportedLayoutError(f"no flat tensor has {', '.join(missing[:5])} of group {group['name']!r}")
            self._parts.append([found[index, position] for position in range(len(names))])

    def where(self, part: Partition) -> tuple[int, int]:
        """Number of the flat tensor that a partition is in, and its offset there."""
        return self._where[id(part)]

    @contextmanager
    def exposed(self, optimizer: MatrixOptimizer) -> Iterator[None]:
        """Inside, the optimizer has all its groups, their parameters as partitions, and the state of these."""
        if self._open:
            yield
            return
        shown, shown_state = optimizer.param_groups, optimizer.state
        if len(shown) == len(self.groups):
            self.groups = list(shown)
        self._follow()
        flat_params = [group["params"] for group in self.groups]
        for group, parts in zip(self.groups, self._parts):
            group["params"] = parts
        entered = self.groups
        optimizer.param_groups, self._open = entered, True
        vars(optimizer)["state"] = self.state  # beside the property, for which plans would be made anew
        try:
            yield
        finally:
            self.groups, self.state, self._open = list(optimizer.param_groups), optimizer.state, False
            for group, params in zip(self.groups, flat_params):
                group["params"] = params
            # A loaded checkpoint has put other groups in their place.
            optimizer.param_groups = shown if optimizer.param_groups is entered else self.groups
            vars(optimizer)["state"] = shown_state

    @contextmanager
    def stepping(self, optimizer: MatrixOptimizer) -> Iterator[frozenset[str]]:
        """:meth:`exposed`, with gradients of the parameters in the flat tensors that the groups hold; yields their names.

        Raises:
            UnsupportedLayoutError: for a parameter that is none of the flat tensors.
        """
        called = [param for group in optimizer.param_groups for param in group["params"]]
        foreign = [tuple(param.shape) for param in called if id(param) not in self._flats]
        if foreign:
            raise UnsupportedLayoutError(
                f"parameter groups hold tensors of shapes {foreign[:3]} that DeepSpeed had not put there when the optimizer "
                "was attached to it; build a new optimizer for every deepspeed.initialize"
            )
        inside = [item for flat in called for item in self._inside[id(flat)]]
        with self.exposed(optimizer):
            try:
                for flat in called:
                    for part, offset, _ in self._inside[id(flat)]:
                        part.grad = None if flat.grad is None else flat.grad[offset : offset + part.numel()]
                yield frozenset(name for _, _, name in inside)
            finally:
                for part, _, _ in inside:
                    part.grad = None

    def _follow(self) -> None:
        """Points partitions to where a wrapper has moved its flat tensors (``engine.offload_states`` and back)."""
        for key, flat in self._flats.items():
            inside = self._inside[key]
            held = next(((part, offset) for part, offset, _ in inside if part.numel()), None)
            if held is None:
                continue
            part, offset = held
            if part.data_ptr() != flat.tensor.data_ptr() + offset * flat.tensor.element_size():
                for part, offset, _ in inside:
                    part.point_to(flat.tensor.detach()[offset : offset + part.numel()])


def _run(flat: FlatTensor, place: Place) -> Tensor:
    start, stop = place.spans[flat.grid.shard]
    return flat.tensor.detach()[place.offset : place.offset + stop - start]
