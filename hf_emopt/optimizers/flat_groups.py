"""Parameters that a wrapper has flattened and cut among ranks: what an optimizer steps when a group holds flat tensors.

DeepSpeed's ZeRO replaces the parameters of a group by one flat float32 tensor for each rank and calls ``step()`` with one
group, or part of one, at a time. Nothing here knows of DeepSpeed: an integration says what lies where.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hf_emopt.distributed.flat_params import FlatTensor
from hf_emopt.distributed.layout import Partition, Storage, UnsupportedLayoutError
from hf_emopt.rules.base import Group


class Flattened:
    """Shows an optimizer its groups as they were, with a :class:`~hf_emopt.distributed.layout.Partition` for each parameter.

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
        self._flat_params: list[list[Tensor]] = []
        self.is_exposed = False
        found: dict[tuple[int, int], Partition] = {}
        self._where: dict[int, tuple[int, int]] = {}
        for number, flat in enumerate(flats):
            for place in flat.places:
                regions = tuple((((a, b),),) for a, b in place.spans)
                storage = Storage((math.prod(place.shape),), regions, flat.grid.ranks)
                start, stop = place.spans[flat.grid.shard]
                local = flat.tensor.detach()[place.offset : place.offset + stop - start]
                part = Partition.of(local, storage, flat.grid, place.shape, flat.compute)
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

    def expose(self, shown: list[Group]) -> list[Group]:
        """Puts the partitions into the groups, in place of flat tensors, and returns all groups as they were built.

        Args:
            shown: the optimizer's groups as the wrapper has left them.
        """
        if len(shown) == len(self.groups):
            self.groups = list(shown)
        self._follow()
        self._flat_params = [group["params"] for group in self.groups]
        for group, parts in zip(self.groups, self._parts):
            group["params"] = parts
        self.is_exposed = True
        return self.groups

    def hide(self, groups: list[Group], state: dict[Tensor, Any]) -> None:
        """Puts the flat tensors back; a checkpoint that was loaded meanwhile has put other groups and state in place."""
        self.groups, self.state, self.is_exposed = groups, state, False
        for group, params in zip(self.groups, self._flat_params):
            group["params"] = params

    def check(self, flats: Sequence[Tensor]) -> None:
        """Refuses tensors that are none of the flat ones."""
        foreign = [tuple(param.shape) for param in flats if id(param) not in self._flats]
        if foreign:
            raise UnsupportedLayoutError(
                f"parameter groups hold tensors of shapes {foreign[:3]} that DeepSpeed had not put there when the optimizer "
                "was attached to it; build a new optimizer for every deepspeed.initialize"
            )

    @contextmanager
    def with_gradients(self, flats: Sequence[Tensor]) -> Iterator[frozenset[str]]:
        """Inside, the partitions in these flat tensors have their part of the flat gradients; yields their names."""
        inside = [item for flat in flats for item in self._inside[id(flat)]]
        try:
            for flat in flats:
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
