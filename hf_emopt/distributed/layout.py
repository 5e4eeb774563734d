"""How a parameter is stored: which ranks hold which part of it, and what an optimizer may assume at ``step()``.

Two values describe it. A :class:`Storage` is what planning needs, the same on every rank: the whole shape and the box
that each shard holds. A :class:`Grid` is what moving bytes needs: the process groups, and this rank's place among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_emopt.routing.unit import Unit

__all__ = [
    "Box",
    "Grid",
    "ProcessGroupArgument",
    "Storage",
    "UnsupportedLayoutError",
    "check_layout",
    "grid_of",
    "local_gradient",
    "local_tensor",
    "single_grid",
    "storage_of",
]

Box = tuple[tuple[int, int], ...]
"""Part of a tensor: ``(start, stop)`` in each dimension."""

ProcessGroupArgument = dist.ProcessGroup | Literal["self"] | None


class UnsupportedLayoutError(RuntimeError):
    """A parameter is laid out so that its matrices cannot be stepped correctly; the message says what to use."""


@dataclass(frozen=True)
class Storage:
    """Where the elements of a parameter lie.

    Attributes:
        shape: of the whole parameter.
        boxes: what each shard holds; one box that is everything where the parameter is not sharded.
        ranks: global rank of ``[replica][shard]``.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[tuple[int, ...], ...] = ((0,),)

    @classmethod
    def whole(cls, shape: Sequence[int], replicas: int = 1) -> Storage:
        """Held whole by each of ``replicas`` ranks, numbered from 0."""
        return cls(tuple(shape), (full_box(shape),), tuple((r,) for r in range(replicas)))

    @classmethod
    def sharded(cls, shape: Sequence[int], shards: int, replicas: int = 1, dim: int = 0) -> Storage:
        """Cut along ``dim`` as FSDP2 and DTensor cut it, over ``shards`` ranks, with ``replicas`` copies of each shard."""
        ranks = tuple(tuple(r * shards + s for s in range(shards)) for r in range(replicas))
        return cls(tuple(shape), chunk_boxes(shape, dim, shards), ranks)

    @classmethod
    def copies(cls, shape: Sequence[int], grid: Grid) -> Storage:
        """Held whole by every rank of a grid."""
        return cls(tuple(shape), (full_box(shape),), tuple((rank,) for row in grid.ranks for rank in row))

    @property
    def shards(self) -> int:
        return len(self.boxes)

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        return self.shards * self.replicas

    def rank(self, position: int) -> int:
        """Global rank of a position ``replica * shards + shard``."""
        return self.ranks[position // self.shards][position % self.shards]


@dataclass(frozen=True)
class Grid:
    """The ranks that share a parameter, ``replicas x shards`` of them, as process groups.

    Attributes:
        ranks: global rank of ``[replica][shard]``.
        replica, shard: this process's coordinates.
        shard_group: the ranks that together hold this replica; ``None`` for one.
        replica_group: the ranks that hold copies of this shard; ``None`` for one.
    """

    ranks: tuple[tuple[int, ...], ...]
    replica: int
    shard: int
    shard_group: Any = None
    replica_group: Any = None

    @property
    def shards(self) -> int:
        return len(self.ranks[0])

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        return self.shards * self.replicas

    @property
    def position(self) -> int:
        return self.replica * self.shards + self.shard


def full_box(shape: Sequence[int]) -> Box:
    """The box that is everything."""
    return tuple((0, size) for size in shape)


def chunk_boxes(shape: Sequence[int], dim: int, count: int) -> tuple[Box, ...]:
    """Boxes of ``torch.chunk`` along ``dim``, which is how DTensor cuts: all but the last few of equal length."""
    size = shape[dim]
    length = -(-size // count) if size else 0
    boxes = []
    for i in range(count):
        box = list(full_box(shape))
        box[dim] = (min(i * length, size), min((i + 1) * length, size))
        boxes.append(tuple(box))
    return tuple(boxes)


def single_grid() -> Grid:
    """This process alone."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Grid(((rank,),), 0, 0)


def grid_of(name: str, param: Tensor, process_group: ProcessGroupArgument = None) -> Grid:
    """The ranks that share a parameter.

    Args:
        name: for messages.
        param: a plain tensor, copies of which the ranks of ``process_group`` hold, or a DTensor, which knows its mesh.
        process_group: ``None`` for all ranks, ``"self"`` where each process trains a model of its own.

    Raises:
        UnsupportedLayoutError: for placements other than ``Shard`` on one mesh dimension and ``Replicate`` on one.
    """
    if isinstance(param, DTensor):
        return _mesh_grid(name, param)
    if process_group == "self" or not (dist.is_available() and dist.is_initialized()):
        return single_grid()
    group: Any = dist.group.WORLD if process_group is None else process_group
    if dist.get_world_size(group) == 1:
        return single_grid()
    members = tuple((rank,) for rank in dist.get_process_group_ranks(group))
    return Grid(members, dist.get_rank(group), 0, None, group)


def _mesh_grid(name: str, param: DTensor) -> Grid:
    mesh, placements = param.device_mesh, param.placements
    wide = [d for d in range(mesh.ndim) if mesh.size(d) > 1]
    cut = [d for d in wide if type(placements[d]) is Shard]
    copied = [d for d in wide if type(placements[d]) is Replicate]
    if len(cut) + len(copied) != len(wide) or len(cut) > 1 or len(copied) > 1:
        raise UnsupportedLayoutError(
            f"{name} is a DTensor with placements {tuple(placements)} on a mesh {tuple(mesh.shape)} "
            f"{mesh.mesh_dim_names or ''}. This version steps what FSDP2 (Shard on one mesh dimension) and HSDP (Replicate "
            "and Shard) make; use one of these instead of tensor or expert parallelism over several dimensions"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedLayoutError(f"{name} lies on a mesh that this process is no part of")
    ranks = mesh.mesh
    for d in reversed([d for d in range(mesh.ndim) if d not in wide]):
        ranks = ranks.squeeze(d)
    table = ranks.reshape(-1, 1) if not cut else ranks.reshape(1, -1) if not copied else ranks
    if cut and copied and cut[0] < copied[0]:
        table = table.T
    rows = tuple(tuple(int(r) for r in row) for row in table.tolist())
    return Grid(
        rows,
        coordinate[copied[0]] if copied else 0,
        coordinate[cut[0]] if cut else 0,
        mesh.get_group(cut[0]) if cut else None,
        mesh.get_group(copied[0]) if copied else None,
    )


def storage_of(param: Tensor, grid: Grid) -> Storage:
    """What each rank of the grid holds of a parameter.

    Raises:
        UnsupportedLayoutError: when this rank's part is not what its placement says.
    """
    shape = tuple(param.shape)
    if not isinstance(param, DTensor) or grid.shards == 1:
        return Storage(shape, (full_box(shape),), grid.ranks)
    (dim,) = (p.dim for d, p in enumerate(param.placements) if isinstance(p, Shard) and param.device_mesh.size(d) > 1)
    boxes = chunk_boxes(shape, dim, grid.shards)
    held, planned = tuple(local_tensor(param).shape), tuple(b - a for a, b in boxes[grid.shard])
    if math.prod(held) != math.prod(planned):
        raise UnsupportedLayoutError(
            f"this rank holds {held} of a parameter of {shape} sharded on dimension {dim} over {grid.shards} ranks, where "
            f"DTensor's rule gives {planned}"
        )
    return Storage(shape, boxes, grid.ranks)


def local_tensor(tensor: Tensor) -> Tensor:
    """The part that this rank holds, sharing memory; the tensor itself unless it is a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a gradient, laid out as the parameter is."""
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return grad
    if tuple(grad.placements) != tuple(param.placements):  # tensor parallel leaves some gradients whole
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad.to_local()


def check_layout(name: str, param: Tensor, units: Sequence[Unit]) -> None:
    """Refuses a parameter whose whole shape is no longer the one it was routed with.

    Raises:
        UnsupportedLayoutError: for a flattened or emptied parameter (FSDP1, ZeRO) and for sparse or quantized storage.
    """
    expected = math.prod(units[0].view) if units else None
    if expected is not None and param.numel() != expected:
        raise UnsupportedLayoutError(
            f"{name} was a parameter of {expected:,} elements when it was routed and now has shape {tuple(param.shape)}: a "
            "wrapper (FSDP1, DeepSpeed ZeRO) has flattened or partitioned it, so its matrices are gone; train it under "
            "FSDP2, under DDP or on one process"
        )
    if local_tensor(param).layout is not torch.strided:
        raise UnsupportedLayoutError(f"{name} has layout {param.layout}; only dense parameters can be stepped")
