"""Matrices that tensor parallelism has sliced: the slices of a parameter, and four modes of computing updates from them.

``layerwise``: ranks transform whole matrices, each its share. ``duplicated``: each gathers and transforms every momentum, and
keeps its slice. ``distributed``: each transforms its slice, and Gram matrices are summed over ranks. ``blockwise``: each
slice is a matrix of its own, which is another update. Under FSDP too, "slice" means a slice of tensor parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_emopt.distributed.layout import (
    Grid,
    Region,
    Storage,
    _is_strided,
    _regions,
    coordinates,
    full_region,
    takes_all_ranks,
)
from hf_emopt.distributed.plan import OwnedRegion, PlannedParameter, Slicing, TensorSlices, long_side, overlap
from hf_emopt.routing.matrix_view import MatrixView

NAMES = frozenset({"tp", "tensor", "tensor_parallel", "model", "mp"})
"""Names of mesh dimensions of tensor parallelism; any other dimension is one of data or experts."""


class UnavailableModeError(ValueError):
    """A parameter's layout excludes a mode; the message is the reason."""


def _tensor_dims(params: Iterable[Tensor]) -> dict[Any, tuple[int, ...]]:
    """The tensor-parallel dimensions of each mesh: by name, else those over which a parameter is sharded along another
    dimension than its first, which FSDP2 does not do by itself."""
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


def tensor_slices(
    planned: Sequence[PlannedParameter], params: Sequence[Tensor], grids: Mapping[str, Grid]
) -> list[TensorSlices | UnavailableModeError | None]:
    """The slices of each parameter, ``None`` where it has none, or why its shards are no slices."""
    dims = _tensor_dims(params)
    found: list[TensorSlices | UnavailableModeError | None] = []
    for p, param in zip(planned, params):
        try:
            found.append(_slices(param, grids[p.name], p.storage, dims))
        except UnavailableModeError as error:
            found.append(error)
    return found


def _slices(param: Tensor, grid: Grid, storage: Storage, dims: dict[Any, tuple[int, ...]]) -> TensorSlices | None:
    """The slices of a parameter, ``None`` where it has none. Raises where a slice is not the union of some shards."""
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
    for t, own in enumerate(regions):
        held = [region for s, own_shard in enumerate(storage.regions) if of_shard[s] == t for region in own_shard]
        inside = sum(overlap(x, y) for x in held for y in own)
        if inside != _numel(own) or inside != _numel(held):
            raise UnavailableModeError(f"placements {placements} interleave slices of tensor parallelism")
    return TensorSlices(tuple(of_shard), tuple(regions), takes_all_ranks(grid))


def _numel(regions: Iterable[Region]) -> int:
    return sum(math.prod(b - a for a, b in region) for region in regions)


# ---------------------------------------------------------------------- matrix views inside regions


@dataclass(frozen=True)
class _ViewSlice:
    """The matrices of a matrix view inside one region of a slice.

    Attributes:
        number: of the slice.
        region: in coordinates of the parameter.
        matrix_view: those matrices, in coordinates of the region.
        dim, span: the sliced dimension of the matrices, -2 or -1, and its span; ``None`` for whole matrices.
    """

    number: int
    region: Region
    matrix_view: MatrixView
    dim: int | None
    span: tuple[int, int]


def _view_slices(matrix_view: MatrixView, shape: tuple[int, ...], slices: TensorSlices) -> list[_ViewSlice]:
    """The matrices of a matrix view inside each region of each slice, for regions that have some of them."""
    return [
        _ViewSlice(t, region, *restricted)
        for t, regions in enumerate(slices.regions)
        for region in regions
        if (restricted := _restricted(matrix_view, shape, region)) is not None
    ]


def _restricted(
    matrix_view: MatrixView, shape: tuple[int, ...], region: Region
) -> tuple[MatrixView, int | None, tuple[int, int]] | None:
    """The last three attributes of a :class:`_ViewSlice`, or ``None`` where the region has none of the matrices.

    Raises:
        UnavailableModeError: the elements inside the region are no whole rows and no whole columns.
    """
    if matrix_view.view != shape:
        raise UnavailableModeError(f"its matrices are seen through the view {matrix_view.view} of {shape}")
    counts, before, first, last = [], [], 0, 0
    cut = range(matrix_view.start, matrix_view.stop, matrix_view.step)
    for d, (a, b) in enumerate(region):
        chosen = cut if d == matrix_view.dim else range(shape[d])
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
    inner = replace(matrix_view, view=view, dim=dim, start=first, stop=last, step=step)
    full = matrix_view.cut_view
    changed = [d for d in range(len(shape)) if counts[d] != full[d]]
    if not changed:
        return inner, None, (0, 0)
    side = matrix_view.rows if changed[0] in matrix_view.rows else matrix_view.cols
    if len(changed) > 1 or changed[0] != side[0]:
        raise UnavailableModeError("it is cut along both sides, or between its matrices as well")
    rest = math.prod(full[d] for d in side[1:])
    start = before[changed[0]]
    return inner, -2 if side == matrix_view.rows else -1, (start * rest, (start + counts[changed[0]]) * rest)


def _below(chosen: range, bound: int) -> int:
    return max(0, min(len(chosen), -(-(bound - chosen.start) // chosen.step)))


def blockwise_matrix_views(
    matrix_views: Sequence[MatrixView], shape: tuple[int, ...], slices: TensorSlices
) -> list[tuple[MatrixView, MatrixView]]:
    """Each matrix view's part of each slice, as a matrix view of the parameter, with the matrix view that it is part of.

    Raises:
        UnavailableModeError: a part is no span of one dimension.
    """
    return [
        (_block(matrix_view, shape, region, t), matrix_view)
        for t, regions in enumerate(slices.regions)
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
    if matrix_view.dim is None:
        return replace(part, dim=dim, start=a, stop=min(shape[dim], b))
    start = matrix_view.start + max(0, -(-(a - matrix_view.start) // matrix_view.step)) * matrix_view.step
    return replace(part, start=start, stop=min(matrix_view.stop, b))


def sliced_dims(
    matrix_views: Sequence[MatrixView], shape: tuple[int, ...], slices: TensorSlices
) -> tuple[bool, list[int | None]]:
    """``(recut, dims)``: whether slices have to be exchanged first, and which dimension of each matrix view is then sliced.

    Raises:
        UnavailableModeError: the matrix views cannot be transformed in slices; the message says why.
    """
    dims: list[int | None] = []
    for matrix_view in matrix_views:
        found = _view_slices(matrix_view, shape, slices)
        if len({part.number for part in found}) < len(found):
            raise UnavailableModeError("a slice has several runs of one matrix")
        dims.append(next((part.dim for part in reversed(found) if part.dim is not None), None))
    short = [u for u, dim in zip(matrix_views, dims) if dim is not None and u.shape[dim] < max(u.shape[1:])]
    if not short:
        return False, dims
    if len(matrix_views) > 1 or matrix_views[0].batch or len(shape) != 2:
        raise UnavailableModeError("several matrices in one parameter are cut along their short side")
    if max(shape) < slices.size:
        raise UnavailableModeError(
            "it is cut along its short side, and the long one has fewer rows than there are ranks"
        )
    return True, [long_side(matrix_views[0])[1]]


# ---------------------------------------------------------------------- owned regions


def owned_regions_of(parameter: PlannedParameter, ranks: tuple[int, ...]) -> list[OwnedRegion]:
    """Which rank transforms which region of a parameter with a tensor-parallel mode; ``ranks`` own its slices in order."""
    how = parameter.tensor_parallel
    assert how is not None
    if how.mode == "duplicated":
        whole, cost = full_region(parameter.storage.shape), sum(how.costs)
        return [
            OwnedRegion(0, whole, owner, parameter.matrix_views, cost, copy=t > 0, gives=how.slices.regions[t])
            for t, owner in enumerate(ranks)
        ]
    if how.recut:
        return parameter.owned_slices(ranks, sum(how.costs), how.methods[0])
    sliced: list[list[_ViewSlice]] = []
    slicings: list[Slicing | None] = []
    for u, matrix_view in enumerate(parameter.matrix_views):
        found = _view_slices(matrix_view, parameter.storage.shape, how.slices)
        if how.mode == "blockwise":  # matrix views are those of the slices
            found = [part for part in found if matrix_view.name.endswith(f"[{part.number}]")]
            slicings.append(Slicing(parameter.whole_shapes[u], -2, (), ()))
        elif len(found) < 2:
            slicings.append(None)
        else:
            dim = next(part.dim for part in found if part.dim is not None)
            compute_group = tuple(ranks[part.number] for part in found)
            spans = tuple(part.span for part in found)
            slicings.append(Slicing(matrix_view.shape[1:], dim, spans, compute_group, how.methods[u]))
        sliced.append(found)
    owned_regions = []
    for t, regions in enumerate(how.slices.regions):
        for region in regions:
            here = {u: part for u, found in enumerate(sliced) for part in found if part.region == region}
            if here:
                views, cost = tuple(part.matrix_view for part in here.values()), sum(how.costs[u] for u in here)
                cut = tuple(slicings[u] for u in here)
                owned_regions.append(OwnedRegion(0, region, ranks[t], views, cost, indices=tuple(here), slicings=cut))
    return owned_regions
