"""What one rank transforms of a parameter, and how it is batched: values that plans are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hf_emopt.distributed.layout import Box
from hf_emopt.routing.unit import Unit

__all__ = ["Batch", "Cut", "Segment"]


@dataclass(frozen=True)
class Cut:
    """How matrices are cut that several ranks have slices of.

    Attributes:
        full_shape: ``(m, n)`` of the whole matrices.
        dim: the side that is cut, -2 or -1.
        spans: what of it each rank has; empty where slices are matrices of their own.
        team: positions of those ranks.
        method: of the distributed iteration.
    """

    full_shape: tuple[int, int]
    dim: int
    spans: tuple[tuple[int, int], ...]
    team: tuple[int, ...]
    method: Literal["standard", "gram"] = "standard"


@dataclass(frozen=True)
class Segment:
    """What one rank transforms of one parameter.

    Attributes:
        parameter: index into the bucket's parameters.
        box: the part of the parameter.
        owner: position ``replica * shards + shard`` of the rank that transforms it.
        units: its matrices, as the part's own.
        cost: operations of the owner.
        team: positions of all owners of a matrix that is cut; empty for whole matrices.
        dim: dimension of the parameter along which it differs from the whole.
        indices: which of the parameter's units these are; empty for all of them.
        cuts: how each unit is cut, if it is; empty where none is.
        copy: another rank transforms the same, for itself.
        gives: the part of the result that the owner passes on, where it is not all of it.
    """

    parameter: int
    box: Box
    owner: int
    units: tuple[Unit, ...]
    cost: int
    team: tuple[int, ...] = ()
    dim: int = 0
    indices: tuple[int, ...] = ()
    cuts: tuple[Cut | None, ...] = ()
    copy: bool = False
    gives: tuple[Box, ...] | None = None

    def index(self, place: int) -> int:
        """Number, in the parameter, of the unit at a place in ``units``."""
        return self.indices[place] if self.indices else place

    def place(self, index: int) -> int | None:
        """Where the parameter's unit of this number is in ``units``, if it is."""
        if not self.indices:
            return index
        return self.indices.index(index) if index in self.indices else None

    def cut(self, place: int) -> Cut | None:
        """How the unit at a place in ``units`` is cut."""
        return self.cuts[place] if self.cuts else None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that one rank transforms in one call.

    Attributes:
        shape: ``(m, n)`` of each matrix.
        jobs: ``(index of the segment among the rank's, index of the unit)`` of each unit.
        sizes: matrices in each job.
        cut: how they are cut, if they are.
        copy: another rank transforms the same.
    """

    shape: tuple[int, int]
    jobs: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]
    cut: Cut | None = None
    copy: bool = False

    @property
    def count(self) -> int:
        return sum(self.sizes)
