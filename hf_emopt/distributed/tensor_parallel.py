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
from hf_emopt.distributed.layout import Grid, Region, Storage, _is_strided, _regions, coordinates, full_region
from hf_emopt.distributed.plan import Cut, OwnedRegion, PlannedParameter, overlap
from hf_emopt.routing.matrix_view import MatrixView

__all__ = [
    "UnavailableModeError",
    "blockwise_matrix_views",
    "distributed_cuts",
    "owned_regions_of",
    "tensor_cut",
    "tensor_dims",
]


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
    regions: list[tuple[Region, ...]] = []
    of_shard = []
    for rank in grid.ranks[0]:
        key = tuple(where[rank][d] for d in wanted)
        if key not in slices:
            slices[key] = len(regions)
            regions.append(_regions(storage.shape, alone, sizes, where[rank]))
        of_shard.append(slices[key])
    cut = TensorCut(tuple(of_shard), tuple(regions))
    for t, own in enumerate(regions):
        held = [region for s, own_shard in enumerate(storage.regions) if of_shard[s] == t for region in own_shard]
        inside = sum(overlap(x, y) for x in held for y in own)
        if inside != _numel(own) or inside != _numel(held):
            raise UnavailableModeError(f"placements {placements} interleave slices of tensor parallelism")
    return cut


def _numel(regions: Iterable[Region]) -> int:
    return sum(math.prod(b - a for a, b in region) for region in regions)


# ---------------------------------------------------------------------- matrix views inside regions


@dataclass(frozen=True)
class _Piece:
    """What a region has of a matrix view: the matrices there, and the part of which side they are, or ``None`` for all
    of both."""

    matrix_view: MatrixView
    dim: int | None
    span: tuple[int, int]


def _restricted(matrix_view: MatrixView, shape: tuple[int, ...], region: Region) -> _Piece | None:
    """A matrix view inside a region, in the region's own coordinates; ``None`` where the region has none of it.

    Raises:
        UnavailableModeError: what is there is no part of rows or of columns.
    """
    if matrix_view.view != shape:
        raise UnavailableModeError(f"its matrices are seen through the view {matrix_view.view} of {shape}")
    counts, before, first, last = [], [], 0, 0
    for d, (a, b) in enumerate(region):
        chosen = (
            range(matrix_view.start, matrix_view.stop, matrix_view.step) if d == matrix_view.dim else range(shape[d])
        )
        skipped, upto = _below(chosen, a), _below(chosen, b)
        before.append(skipped)
        counts.append(upto - skipped)
        if d == matrix_view.dim and upto > skipped:
            first, last = chosen[skipped] - a, chosen[upto - 1] + 1 - a
    if 0 in counts:
        return None
    view = tuple(b - a for a, b in region)
    dim: int | None = matrix_view.dim
    step = matrix_view.step
    if dim is not None and (first, last, step) == (0, view[dim], 1):
        dim, first, last = None, 0, 0
    if dim is None:
        first, last, step = 0, 0, 1
    inner = MatrixView(
        matrix_view.name, view, matrix_view.rows, matrix_view.cols, matrix_view.batch, dim, first, last, step
    )
    full = matrix_view.cut_view
    changed = [d for d in range(len(shape)) if counts[d] != full[d]]
    if not changed:
        return _Piece(inner, None, (0, 0))
    side = matrix_view.rows if changed[0] in matrix_view.rows else matrix_view.cols
    if len(changed) > 1 or changed[0] != side[0]:
        raise UnavailableModeError("it is cut along both sides, or between its matrices as well")
    rest = math.prod(full[d] for d in side[1:])
    start = before[changed[0]]
    return _Piece(inner, -2 if side == matrix_view.rows else -1, (start * rest, (start + counts[changed[0]]) * rest))


def _below(chosen: range, bound: int) -> int:
    """How many of the numbers are below a bound."""
    return max(0, min(len(chosen), -(-(bound - chosen.start) // chosen.step)))


def blockwise_matrix_views(
    matrix_views: Sequence[MatrixView], shape: tuple[int, ...], cut: TensorCut
) -> list[tuple[MatrixView, MatrixView]]:
    """Each matrix view's part of each slice, as a matrix view of the whole parameter and beside the matrix view it is
    part of; slice by slice.

    Raises:
        UnavailableModeError: a part is not a run of one dimension.
    """
    return [
        (_block(matrix_view, shape, region, t), matrix_view)
        for t, regions in enumerate(cut.regions)
        for region in regions
        for matrix_view in matrix_views
        if _restricted(matrix_view, shape, region) is not None
    ]


def _block(matrix_view: MatrixView, shape: tuple[int, ...], region: Region, t: int) -> MatrixView:
    """A matrix view's part of a region of slice ``t``."""
    part = replace(matrix_view, name=f"{matrix_view.name}[{t}]")
    cuts = [d for d, (a, b) in enumerate(region) if (a, b) != (0, shape[d])]
    dim = matrix_view.dim if matrix_view.dim is not None else cuts[0] if cuts else None
    if any(d != dim for d in cuts):
        raise UnavailableModeError("it is cut along another dimension than the one its matrices share")
    if dim is None:
        return part
    a, b = region[dim]
    start, stop, step = (
        (matrix_view.start, matrix_view.stop, matrix_view.step) if matrix_view.dim is not None else (0, shape[dim], 1)
    )
    start += max(0, -(-(a - start) // step)) * step
    return replace(part, dim=dim, start=start, stop=min(stop, b), step=step)


def distributed_cuts(
    matrix_views: Sequence[MatrixView], shape: tuple[int, ...], cut: TensorCut
) -> tuple[bool, list[int | None]]:
    """``(recut, dims)``: whether slices have to be exchanged first, and which side of each matrix view is then cut.

    Raises:
        UnavailableModeError: the matrix views cannot be transformed in slices; the message says why.
    """
    dims: list[int | None] = [None] * len(matrix_views)
    for regions in cut.regions:
        for u, matrix_view in enumerate(matrix_views):
            pieces = [piece for region in regions if (piece := _restricted(matrix_view, shape, region)) is not None]
            if len(pieces) > 1:
                raise UnavailableModeError("a slice has several runs of one matrix")
            for piece in pieces:
                dims[u] = piece.dim if piece.dim is not None else dims[u]
    wrong = [
        u
        for u, dim in enumerate(dims)
        if dim is not None and matrix_views[u].shape[dim] < max(matrix_views[u].shape[1:])
    ]
    if not wrong:
        return False, dims
    if len(matrix_views) > 1 or matrix_views[0].batch or len(shape) != 2:
        raise UnavailableModeError("several matrices in one parameter are cut along their short side")
    if max(shape) < cut.size:
        raise UnavailableModeError(
            "it is cut along its short side, and the long one has fewer rows than there are ranks"
        )
    return True, [_long_dim(matrix_views[0])]


def _long_dim(matrix_view: MatrixView) -> int:
    """The side along which :func:`~hf_emopt.distributed.cutting.recut` cuts: the first unless the other is longer."""
    dim = 0 if matrix_view.view[0] >= matrix_view.view[1] else 1
    return -2 if dim in matrix_view.rows else -1


# ---------------------------------------------------------------------- owned regions


def owned_regions_of(parameter: PlannedParameter, loads: dict[int, int]) -> list[OwnedRegion]:
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
            OwnedRegion(
                0,
                full_region(storage.shape),
                owner,
                parameter.matrix_views,
                cost,
                copy=t > 0,
                gives=arrangement.cut.regions[t],
            )
            for t, owner in enumerate(column)
        ]
    if arrangement.mode == "distributed":
        if arrangement.recut:
            return recut(parameter, column, cost, arrangement.methods[0])
        return _distributed(parameter, arrangement, column)
    return _blockwise(parameter, arrangement, column)


def _distributed(parameter: PlannedParameter, arrangement: Arrangement, column: tuple[int, ...]) -> list[OwnedRegion]:
    matrix_views, shape = parameter.matrix_views, parameter.storage.shape
    places = [(t, region) for t, regions in enumerate(arrangement.cut.regions) for region in regions]
    pieces = {
        (t, region, u): _restricted(matrix_view, shape, region)
        for t, region in places
        for u, matrix_view in enumerate(matrix_views)
    }
    cuts: list[Cut | None] = []
    for u, matrix_view in enumerate(matrix_views):
        sharing = [(t, piece) for (t, _, v), piece in pieces.items() if v == u and piece is not None]
        if len(sharing) < 2:
            cuts.append(None)
            continue
        dim = next(piece.dim for _, piece in sharing if piece.dim is not None)
        spans = tuple(piece.span for _, piece in sharing)
        compute_group = tuple(column[t] for t, _ in sharing)
        cuts.append(
            Cut((matrix_view.shape[1], matrix_view.shape[2]), dim, spans, compute_group, arrangement.methods[u])
        )
    owned_regions = []
    for t, region in places:
        mine = [(u, piece) for u in range(len(matrix_views)) if (piece := pieces[t, region, u]) is not None]
        if mine:
            owned_regions.append(
                OwnedRegion(
                    0,
                    region,
                    column[t],
                    tuple(piece.matrix_view for _, piece in mine),
                    sum(arrangement.costs[u] for u, _ in mine),
                    indices=tuple(u for u, _ in mine),
                    cuts=tuple(cuts[u] for u, _ in mine),
                )
            )
    return owned_regions


def _blockwise(parameter: PlannedParameter, arrangement: Arrangement, column: tuple[int, ...]) -> list[OwnedRegion]:
    """Of a parameter whose matrix views are the slices' already."""
    owned_regions, shape = [], parameter.storage.shape
    for t, regions in enumerate(arrangement.cut.regions):
        for region in regions:
            mine = []
            for u, matrix_view in enumerate(parameter.matrix_views):
                piece = _restricted(matrix_view, shape, region) if matrix_view.name.endswith(f"[{t}]") else None
                if piece is not None:
                    mine.append((u, piece.matrix_view))
            if mine:
                owned_regions.append(
                    OwnedRegion(
                        0,
                        region,
                        column[t],
                        tuple(matrix_view for _, matrix_view in mine),
                        sum(arrangement.costs[u] for u, _ in mine),
                        indices=tuple(u for u, _ in mine),
                        cuts=tuple(Cut(parameter.whole_shapes[u], -2, (), ()) for u, _ in mine),
                    )
                )
    return owned_regions
