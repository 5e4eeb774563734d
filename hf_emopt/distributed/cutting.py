"""Segments of one parameter: rows of a stack, and slices of a matrix for a team of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hf_emopt.distributed.layout import full_box
from hf_emopt.distributed.plan import PlannedParameter
from hf_emopt.distributed.segments import Cut, Segment

__all__ = ["recut"]


def _even_cuts(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """At most ``parts`` runs of near-equal length."""
    count = min(parts, stop - start)
    size = stop - start
    return [(start + size * i // count, start + size * (i + 1) // count) for i in range(count)]


def _rows(parameter: PlannedParameter, start: int, stop: int, owner: int, cost: int) -> Segment:
    """Rows ``start:stop`` of a stack, or the whole of anything else."""
    shape = parameter.storage.shape
    if not shape:
        return Segment(0, (), owner, parameter.units, cost)
    row = parameter.row_numel
    box = ((start * row, stop * row), *full_box(shape)[1:])
    units = parameter.units
    if (start, stop) != (0, parameter.rows):
        units = tuple(replace(u, view=(stop - start, *u.view[1:])) for u in units)
    return Segment(0, box, owner, units, cost)


def recut(
    parameter: PlannedParameter, team: tuple[int, ...], cost: int, method: Literal["standard", "gram"] = "standard"
) -> list[Segment]:
    """One matrix cut along its long side, a slice for each member of the team."""
    shape, unit = parameter.storage.shape, parameter.units[0]
    dim = 0 if shape[0] >= shape[1] else 1
    spans = tuple(_even_cuts(0, shape[dim], len(team)))
    cut = Cut((unit.shape[1], unit.shape[2]), -2 if dim in unit.rows else -1, spans, team, method)
    segments = []
    for owner, (start, stop) in zip(team, spans, strict=True):
        box = list(full_box(shape))
        box[dim] = (start, stop)
        view = list(shape)
        view[dim] = stop - start
        part = replace(unit, view=tuple(view))
        segments.append(Segment(0, tuple(box), owner, (part,), cost, team, dim, cuts=(cut,)))
    return segments
