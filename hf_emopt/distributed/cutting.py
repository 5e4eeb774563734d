"""Owned regions of one parameter: rows of a stack, and slices of a matrix for a compute group of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hf_emopt.distributed.layout import full_region
from hf_emopt.distributed.owned_regions import Cut, OwnedRegion
from hf_emopt.distributed.plan import PlannedParameter

__all__ = ["recut"]


def _even_cuts(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """At most ``parts`` runs of near-equal length."""
    count = min(parts, stop - start)
    size = stop - start
    return [(start + size * i // count, start + size * (i + 1) // count) for i in range(count)]


def _rows(parameter: PlannedParameter, start: int, stop: int, owner: int, cost: int) -> OwnedRegion:
    """Rows ``start:stop`` of a stack, or the whole of anything else."""
    shape = parameter.storage.shape
    if not shape:
        return OwnedRegion(0, (), owner, parameter.matrix_views, cost)
    row = parameter.row_numel
    region = ((start * row, stop * row), *full_region(shape)[1:])
    matrix_views = parameter.matrix_views
    if (start, stop) != (0, parameter.rows):
        matrix_views = tuple(replace(u, view=(stop - start, *u.view[1:])) for u in matrix_views)
    return OwnedRegion(0, region, owner, matrix_views, cost)


def recut(
    parameter: PlannedParameter,
    compute_group: tuple[int, ...],
    cost: int,
    method: Literal["standard", "gram"] = "standard",
) -> list[OwnedRegion]:
    """One matrix cut along its long side, a slice for each member of the compute group."""
    shape, matrix_view = parameter.storage.shape, parameter.matrix_views[0]
    dim = 0 if shape[0] >= shape[1] else 1
    spans = tuple(_even_cuts(0, shape[dim], len(compute_group)))
    cut = Cut(
        (matrix_view.shape[1], matrix_view.shape[2]),
        -2 if dim in matrix_view.rows else -1,
        spans,
        compute_group,
        method,
    )
    owned_regions = []
    for owner, (start, stop) in zip(compute_group, spans, strict=True):
        region = list(full_region(shape))
        region[dim] = (start, stop)
        view = list(shape)
        view[dim] = stop - start
        part = replace(matrix_view, view=tuple(view))
        owned_regions.append(OwnedRegion(0, tuple(region), owner, (part,), cost, compute_group, dim, cuts=(cut,)))
    return owned_regions
