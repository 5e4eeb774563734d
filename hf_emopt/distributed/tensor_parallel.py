"""Matrices that tensor parallelism has cut: where the slices lie, and in which of four ways they become updates.

===============  ===============================================================  =================================
mode             what a rank does of ``k``                                        what travels in a step
===============  ===============================================================  =================================
``layerwise``    transforms whole matrices, its share of all of them              slices to owners and updates back
``duplicated``   gathers every momentum, transforms it, keeps its slice           slices to everybody
``distributed``  transforms its slice; Gram matrices are summed over the ranks    Gram matrices
``blockwise``    transforms its slice as a matrix of its own: another update      nothing
===============  ===============================================================  =================================

The first three give the update of the whole matrix, and are free to choose among. Under FSDP as well, slices are those of
tensor parallelism alone: ranks of the FSDP dimension share the matrices out among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_emopt.distributed.arrangement import Arrangement, TensorCut
from hf_emopt.distributed.cutting import recut
from hf_emopt.distributed.layout import Box, Grid, Storage, _boxes, _is_strided, coordinates, full_box
from hf_emopt.distributed.plan import Cut, PlannedParameter, Segment, overlap
from hf_emopt.routing.unit import Unit

__all__ = ["UnavailableModeError", "blockwise_units", "distributed_cuts", "segments_of", "tensor_cut", "tensor_dims"]


NAMES = frozenset({"tp", "tensor", "tensor_parallel", "model", "mp"})
"""Names of mesh dimensions over which matrices are cut for their own sake; any other dimension is of data or experts."""


class UnavailableModeError(ValueError):
    """A parameter is laid out so that a mode cannot be; the message is the reason."""


def tensor_dims(params: Iterable[Tensor]) -> dict[Any, tuple[int, ...]]:
    """For each mesh, the dimensions that are tensor parallel: by name, or, where a mesh has no names, because some parameter
    is cut along another dimension than its first there, which FSDP2 does not do unless told to."""
    dims: dict[Any, set[int]] = {}
    for param in params:
        if not isinstance(param, DTensor):
            continue
        mesh = param.device_mesh
        found = dims.setdefault(mesh, set())
        if mesh.mesh_dim_names:
            found.update(d for d, name in enumerate(mesh.mesh_dim_names) if name.lower() in NAMES)
            continue
        placements: Iterable[tuple[int, Any]] = enumerate(param.placements)
        found.update(d for d, p in placements if (isinstance(p, Shard) or _is_strided(p)) and p.dim % param.ndim)
    return {mesh: tuple(sorted(d for d in found if mesh.size(d) > 1)) for mesh, found in dims.items()}


def tensor_cut(param: Tensor, grid: Grid, storage: Storage, dims: dict[Any, tuple[int, ...]]) -> TensorCut | None:
    """How tensor parallelism cuts a parameter, or ``None`` where it does not.

    Raises:
        UnavailableModeError: the slices are not what the shards of some other dimension make up.
    """
    if not isinstance(param, DTensor) or storage.shards == 1:
        return None
    mesh, placements = param.device_mesh, tuple(param.placements)
    wanted = tuple(d for d in dims.get(mesh, ()) if type(placements[d]) is not Replicate)
    if not wanted:
        return None
    alone = tuple(p if d in wanted else Replicate() for d, p in enumerate(placements))
    sizes, where = tuple(mesh.mesh.shape), coordinates(mesh)
    slices: dict[tuple[int, ...], int] = {}
    boxes: list[tuple[Box, ...]] = []
    of_shard = []
    for rank in grid.ranks[0]:
        key = tuple(where[rank][d] for d in wanted)
        if key not in slices:
            slices[key] = len(boxes)
            boxes.append(_boxes(storage.shape, alone, sizes, where[rank]))
        of_shard.append(slices[key])
    cut = TensorCut(tuple(of_shard), tuple(boxes))
    for t, own in enumerate(boxes):
        held = [box for s, own_shard in enumerate(storage.boxes) if of_shard[s] == t for box in own_shard]
        inside = sum(overlap(x, y) for x in held for y in own)
        if inside != _numel(own) or inside != _numel(held):
            raise UnavailableModeError(f"placements {placements} interleave slices of tensor parallelism")
    return cut


def _numel(boxes: Iterable[Box]) -> int:
    return sum(math.prod(b - a for a, b in box) for box in boxes)


# ---------------------------------------------------------------------- units inside boxes


@dataclass(frozen=True)
class _Piece:
    """What a box has of a unit: the matrices there, and the part of which side they are, or ``None`` for all of both."""

    unit: Unit
    dim: int | None
    span: tuple[int, int]


def _restricted(unit: Unit, shape: tuple[int, ...], box: Box) -> _Piece | None:
    """A unit inside a box, in the box's own coordinates; ``None`` where the box has none of it.

    Raises:
        UnavailableModeError: what is there is no part of rows or of columns.
    """
    if unit.view != shape:
        raise UnavailableModeError(f"its matrices are seen through the view {unit.view} of {shape}")
    counts, before, first, last = [], [], 0, 0
    for d, (a, b) in enumerate(box):
        chosen = range(unit.start, unit.stop, unit.step) if d == unit.dim else range(shape[d])
        skipped, upto = _below(chosen, a), _below(chosen, b)
        before.append(skipped)
        counts.append(upto - skipped)
        if d == unit.dim and upto > skipped:
            first, last = chosen[skipped] - a, chosen[upto - 1] + 1 - a
    if 0 in counts:
        return None
    view = tuple(b - a for a, b in box)
    dim: int | None = unit.dim
    step = unit.step
    if dim is not None and (first, last, step) == (0, view[dim], 1):
        dim, first, last = None, 0, 0
    if dim is None:
        first, last, step = 0, 0, 1
    inner = Unit(unit.name, view, unit.rows, unit.cols, unit.batch, dim, first, last, step)
    full = unit.cut_view
    changed = [d for d in range(len(shape)) if counts[d] != full[d]]
    if not changed:
        return _Piece(inner, None, (0, 0))
    side = unit.rows if changed[0] in unit.rows else unit.cols
    if len(changed) > 1 or changed[0] != side[0]:
        raise UnavailableModeError("it is cut along both sides, or between its matrices as well")
    rest = math.prod(full[d] for d in side[1:])
    start = before[changed[0]]
    return _Piece(inner, -2 if side == unit.rows else -1, (start * rest, (start + counts[changed[0]]) * rest))


def _below(chosen: range, bound: int) -> int:
    """How many of the numbers are below a bound."""
    return max(0, min(len(chosen), -(-(bound - chosen.start) // chosen.step)))


def blockwise_units(units: Sequence[Unit], shape: tuple[int, ...], cut: TensorCut) -> list[tuple[Unit, Unit]]:
    """Each unit's part of each slice, as a unit of the whole parameter and beside the unit it is part of; slice by slice.

    Raises:
        UnavailableModeError: a part is not a run of one dimension.
    """
    return [
        (_block(unit, shape, box, t), unit)
        for t, boxes in enumerate(cut.boxes)
        for box in boxes
        for unit in units
        if _restricted(unit, shape, box) is not None
    ]


def _block(unit: Unit, shape: tuple[int, ...], box: Box, t: int) -> Unit:
    """A unit's part of a box of slice ``t``."""
    part = replace(unit, name=f"{unit.name}[{t}]")
    cuts = [d for d, (a, b) in enumerate(box) if (a, b) != (0, shape[d])]
    dim = unit.dim if unit.dim is not None else cuts[0] if cuts else None
    if any(d != dim for d in cuts):
        raise UnavailableModeError("it is cut along another dimension than the one its matrices share")
    if dim is None:
        return part
    a, b = box[dim]
    start, stop, step = (unit.start, unit.stop, unit.step) if unit.dim is not None else (0, shape[dim], 1)
    start += max(0, -(-(a - start) // step)) * step
    return replace(part, dim=dim, start=start, stop=min(stop, b), step=step)


def distributed_cuts(units: Sequence[Unit], shape: tuple[int, ...], cut: TensorCut) -> tuple[bool, list[int | None]]:
    """``(recut, dims)``: whether slices have to be exchanged first, and which side of each unit is then cut.

    Raises:
        UnavailableModeError: the units cannot be transformed in slices; the message says why.
    """
    dims: list[int | None] = [None] * len(units)
    for boxes in cut.boxes:
        for u, unit in enumerate(units):
            pieces = [piece for box in boxes if (piece := _restricted(unit, shape, box)) is not None]
            if len(pieces) > 1:
                raise UnavailableModeError("a slice has several runs of one matrix")
            for piece in pieces:
                dims[u] = piece.dim if piece.dim is not None else dims[u]
    wrong = [u for u, dim in enumerate(dims) if dim is not None and units[u].shape[dim] < max(units[u].shape[1:])]
    if not wrong:
        return False, dims
    if len(units) > 1 or units[0].batch or len(shape) != 2:
        raise UnavailableModeError("several matrices in one parameter are cut along their short side")
    if max(shape) < cut.size:
        raise UnavailableModeError(
            "it is cut along its short side, and the long one has fewer rows than there are ranks"
        )
    return True, [_long_dim(units[0])]


def _long_dim(unit: Unit) -> int:
    """The side along which :func:`~hf_emopt.distributed.cutting.recut` cuts: the first unless the other is longer."""
    dim = 0 if unit.view[0] >= unit.view[1] else 1
    return -2 if dim in unit.rows else -1


# ---------------------------------------------------------------------- segments


def segments_of(parameter: PlannedParameter, loads: dict[int, int]) -> list[Segment]:
    """Who transforms what of a parameter that has an arrangement.

    Args:
        loads: operations that each rank has already; the ranks of the least loaded column are chosen.
    """
    arrangement, storage = parameter.arrangement, parameter.storage
    assert isinstance(arrangement, Arrangement)
    columns = arrangement.cut.columns(storage)
    column = min(columns, key=lambda c: (max(loads[storage.rank(p)] for p in c), c))
    cost = sum(arrangement.costs)
    if arrangement.mode == "duplicated":
        return [
            Segment(
                0, full_box(storage.shape), owner, parameter.units, cost, copy=t > 0, gives=arrangement.cut.boxes[t]
            )
            for t, owner in enumerate(column)
        ]
    if arrangement.mode == "distributed":
        if arrangement.recut:
            return recut(parameter, column, cost, arrangement.methods[0])
        return _distributed(parameter, arrangement, column)
    return _blockwise(parameter, arrangement, column)


def _distributed(parameter: PlannedParameter, arrangement: Arrangement, column: tuple[int, ...]) -> list[Segment]:
    units, shape = parameter.units, parameter.storage.shape
    places = [(t, box) for t, boxes in enumerate(arrangement.cut.boxes) for box in boxes]
    pieces = {(t, box, u): _restricted(unit, shape, box) for t, box in places for u, unit in enumerate(units)}
    cuts: list[Cut | None] = []
    for u, unit in enumerate(units):
        sharing = [(t, piece) for (t, _, v), piece in pieces.items() if v == u and piece is not None]
        if len(sharing) < 2:
            cuts.append(None)
            continue
        dim = next(piece.dim for _, piece in sharing if piece.dim is not None)
        spans = tuple(piece.span for _, piece in sharing)
        team = tuple(column[t] for t, _ in sharing)
        cuts.append(Cut((unit.shape[1], unit.shape[2]), dim, spans, team, arrangement.methods[u]))
    segments = []
    for t, box in places:
        mine = [(u, piece) for u in range(len(units)) if (piece := pieces[t, box, u]) is not None]
        if mine:
            segments.append(
                Segment(
                    0,
                    box,
                    column[t],
                    tuple(piece.unit for _, piece in mine),
                    sum(arrangement.costs[u] for u, _ in mine),
                    indices=tuple(u for u, _ in mine),
                    cuts=tuple(cuts[u] for u, _ in mine),
                )
            )
    return segments


def _blockwise(parameter: PlannedParameter, arrangement: Arrangement, column: tuple[int, ...]) -> list[Segment]:
    """Of a parameter whose units are the slices' already."""
    segments, shape = [], parameter.storage.shape
    for t, boxes in enumerate(arrangement.cut.boxes):
        for box in boxes:
            mine = []
            for u, unit in enumerate(parameter.units):
                piece = _restricted(unit, shape, box) if unit.name.endswith(f"[{t}]") else None
                if piece is not None:
                    mine.append((u, piece.unit))
            if mine:
                segments.append(
                    Segment(
                        0,
                        box,
                        column[t],
                        tuple(unit for _, unit in mine),
                        sum(arrangement.costs[u] for u, _ in mine),
                        indices=tuple(u for u, _ in mine),
                        cuts=tuple(Cut(parameter.whole_shapes[u], -2, (), ()) for u, _ in mine),
                    )
                )
    return segments
