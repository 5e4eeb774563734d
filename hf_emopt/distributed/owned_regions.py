"""What one rank transforms of a parameter, and how it is batched: values that plans are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hf_emopt.distributed.layout import Region
from hf_emopt.routing.matrix_view import MatrixView

__all__ = ["Batch", "Cut", "OwnedRegion"]


@dataclass(frozen=True)
class Cut:
    """How matrices are cut that several ranks have slices of.

    Attributes:
        full_shape: ``(m, n)`` of the whole matrices.
        dim: the side that is cut, -2 or -1.
        spans: what of it each rank has; empty where slices are matrices of their own.
        compute_group: positions of those ranks.
        method: of the distributed iteration.
    """

    full_shape: tuple[int, int]
    dim: int
    spans: tuple[tuple[int, int], ...]
    compute_group: tuple[int, ...]
    method: Literal["standard", "gram"] = "standard"


@dataclass(frozen=True)
class OwnedRegion:
    """What one rank transforms of one parameter.

    Attributes:
        parameter: index into the bucket's parameters.
        region: the part of the parameter.
        owner: position ``replica * shards + shard`` of the rank that transforms it.
        matrix_views: its matrices, as the part's own.
        cost: operations of the owner.
        compute_group: positions of all owners of a matrix that is cut; empty for whole matrices.
        dim: dimension of the parameter along which it differs from the whole.
        indices: which of the parameter's matrix views these are; empty for all of them.
        cuts: how each matrix view is cut, if it is; empty where none is.
        copy: another rank transforms the same, for itself.
        gives: the part of the result that the owner passes on, where it is not all of it.
    """

    parameter: int
    region: Region
    owner: int
    matrix_views: tuple[MatrixView, ...]
    cost: int
    compute_group: tuple[int, ...] = ()
    dim: int = 0
    indices: tuple[int, ...] = ()
    cuts: tuple[Cut | None, ...] = ()
    copy: bool = False
    gives: tuple[Region, ...] | None = None

    def index(self, place: int) -> int:
        """Number, in the parameter, of the matrix view at a place in ``matrix_views``."""
        return self.indices[place] if self.indices else place

    def place(self, index: int) -> int | None:
        """Where the parameter's matrix view of this number is in ``matrix_views``, if it is."""
        if not self.indices:
            return index
        return self.indices.index(index) if index in self.indices else None

    def cut(self, place: int) -> Cut | None:
        """How the matrix view at a place in ``matrix_views`` is cut."""
        return self.cuts[place] if self.cuts else None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that one rank transforms in one call.

    Attributes:
        shape: ``(m, n)`` of each matrix.
        jobs: ``(index of the owned_region among the rank's, index of the matrix_view)`` of each matrix view.
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
