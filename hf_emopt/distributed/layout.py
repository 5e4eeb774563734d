"""How a parameter is stored: which ranks hold which part of it, and what an optimizer may assume at ``step()``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_emopt.routing.matrix_view import MatrixView

Region = tuple[tuple[int, int], ...]
"""Part of a tensor: ``(start, stop)`` in each dimension."""

LOST = "lost"
"""What a copy of an optimizer has for a process group."""

ProcessGroupArgument = dist.ProcessGroup | Literal["self"] | None


class UnsupportedLayoutError(RuntimeError):
    """A parameter is laid out so that its matrices cannot be stepped correctly; the message says what to use."""


class _ReplicasAndShards:
    """The sizes of ``ranks``, which has the global rank of ``[replica][shard]``."""

    ranks: tuple[tuple[int, ...], ...]

    @cached_property
    def shards(self) -> int:
        return len(self.ranks[0])

    @cached_property
    def replicas(self) -> int:
        return len(self.ranks)

    @cached_property
    def world_size(self) -> int:
        return self.shards * self.replicas


@dataclass(frozen=True)
class Storage(_ReplicasAndShards):
    """Where the elements of a parameter lie: what planning needs, the same on every rank.

    Attributes:
        shape: of the whole parameter.
        regions: what each shard holds, in coordinates of the whole. A shard has several regions where a dimension is cut
            twice, inner before outer (``_StridedShard``, which tensor parallelism under FSDP2 makes).
    """

    shape: tuple[int, ...]
    regions: tuple[tuple[Region, ...], ...]
    ranks: tuple[tuple[int, ...], ...] = ((0,),)

    @classmethod
    def whole(cls, shape: Sequence[int], replicas: int = 1) -> Storage:
        """Held whole by each of ``replicas`` ranks, numbered from 0."""
        return cls(tuple(shape), ((full_region(shape),),), tuple((r,) for r in range(replicas)))

    @classmethod
    def sharded(cls, shape: Sequence[int], shards: int, replicas: int = 1, dim: int = 0) -> Storage:
        """Cut along ``dim`` as FSDP2 and DTensor cut it, over ``shards`` ranks, with ``replicas`` copies of each shard."""
        ranks = tuple(tuple(r * shards + s for s in range(shards)) for r in range(replicas))
        return cls(tuple(shape), tuple((region,) for region in chunk_regions(shape, dim, shards)), ranks)

    @classmethod
    def copies(cls, shape: Sequence[int], grid: Grid) -> Storage:
        """Held whole by every rank of a grid."""
        return cls(tuple(shape), ((full_region(shape),),), tuple((rank,) for row in grid.ranks for rank in row))

    def held(self, shard: int) -> tuple[tuple[Region, Region], ...]:
        """The regions of a shard, each in the whole's coordinates and in those of the shard's local tensor."""
        return _placed(self.regions[shard])

    def local_part(self, whole: Tensor, shard: int) -> Tensor:
        """What a shard holds of a whole tensor, as its local tensor."""
        held = self.held(shard)
        size = [max((region[d][1] for _, region in held), default=0) for d in range(len(self.shape))]
        local = whole.new_empty(size)
        for region, place in held:
            local[slices(place)] = whole[slices(region)]
        return local

    def rank(self, position: int) -> int:
        """Global rank of a position ``replica * shards + shard``."""
        return self.ranks[position // self.shards][position % self.shards]


@dataclass(frozen=True)
class Grid(_ReplicasAndShards):
    """The ranks that share a parameter, ``replicas x shards`` of them, as process groups: what moving bytes needs.

    Attributes:
        replica, shard: this process's coordinates.
        shard_group: the ranks that together hold this replica; ``None`` for one.
        replica_group: the ranks that hold copies of this shard; ``None`` for one.
    """

    ranks: tuple[tuple[int, ...], ...]
    replica: int
    shard: int
    shard_group: Any = None
    replica_group: Any = None

    @cached_property
    def position(self) -> int:
        """Index of this rank among those of the grid, ``replica * shards + shard``."""
        return self.replica * self.shards + self.shard


class Partition(torch.Tensor):
    """This rank's run of a parameter that was flattened before it was cut among ranks (ZeRO).

    A tensor of one dimension and of any length, also none, in the memory of the flat tensor that a wrapper steps.

    Attributes:
        local: the same memory as a plain tensor.
        storage_map: where all elements of the flat parameter lie.
        full_shape: of the parameter before it was flattened.
        compute: device of the step; another than the partition's where that is offloaded to the host.
        offloaded: it is computed on copies, even where both devices are the CPU.
        pinned: its state is to be in page-locked memory.
    """

    local: Tensor
    storage_map: Storage
    grid: Grid
    full_shape: tuple[int, ...]
    compute: torch.device
    offloaded: bool = False
    pinned: bool = False
    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(
        cls, local: Tensor, storage: Storage, grid: Grid, full_shape: Sequence[int], compute: torch.device | None = None
    ) -> Partition:
        """A partition that shares the memory of ``local``."""
        part: Partition = torch.Tensor._make_subclass(cls, local.detach())
        part.storage_map, part.grid, part.full_shape = storage, grid, tuple(full_shape)
        part.compute = local.device if compute is None else compute
        part.point_to(local)
        return part

    def point_to(self, local: Tensor) -> None:
        """Follows the elements to where a wrapper has moved them."""
        self.local = local.detach()
        self.data = self.local

    @property
    def span(self) -> tuple[int, int]:
        """``(start, stop)`` of the run in the flat parameter."""
        return self.storage_map.regions[self.grid.shard][0][0]


def full_region(shape: Sequence[int]) -> Region:
    """The region that is everything."""
    return tuple((0, size) for size in shape)


def chunk_regions(shape: Sequence[int], dim: int, count: int) -> tuple[Region, ...]:
    """Regions of ``torch.chunk`` along ``dim``, which is how DTensor cuts: all but the last few of equal length."""
    size = shape[dim]
    length = -(-size // count) if size else 0
    spans = [(min(i * length, size), min((i + 1) * length, size)) for i in range(count)]
    return tuple((*full_region(shape[:dim]), span, *full_region(shape[dim + 1 :])) for span in spans)


def slices(region: Region) -> tuple[slice, ...]:
    """A region as an index."""
    return tuple(slice(start, stop) for start, stop in region)


@lru_cache(maxsize=65536)
def _placed(regions: tuple[Region, ...]) -> tuple[tuple[Region, Region], ...]:
    """Regions with their places in the tensor that is made of them by leaving out what lies between."""
    starts: list[dict[tuple[int, int], int]] = []
    for runs in zip(*regions):
        offset, known = 0, {}
        for start, stop in sorted(set(runs)):
            known[start, stop] = offset
            offset += stop - start
        starts.append(known)
    return tuple(
        (region, tuple((starts[d][run], starts[d][run] + run[1] - run[0]) for d, run in enumerate(region)))
        for region in regions
    )


def single_grid() -> Grid:
    """This process alone."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Grid(((rank,),), 0, 0)


def takes_all_ranks(grid: Grid) -> bool:
    """Whether every rank of the job shares the grid's parameters."""
    return grid.world_size == 1 or grid.world_size == dist.get_world_size()


def grid_of(name: str, param: Tensor, process_group: ProcessGroupArgument = None) -> Grid:
    """The ranks that share a parameter.

    Args:
        param: a plain tensor, copies of which the ranks of ``process_group`` hold, or a DTensor, which knows its mesh.
        process_group: ``None`` for all ranks, ``"self"`` where each process trains a model of its own.

    Raises:
        UnsupportedLayoutError: for placements other than ``Shard``, ``_StridedShard`` and ``Replicate``.
    """
    if isinstance(param, DTensor):
        return _mesh_grid(name, param)
    if isinstance(param, Partition):
        return param.grid
    if process_group == LOST:
        raise UnsupportedLayoutError(
            "this optimizer is a copy, and process groups cannot be copied: set optimizer.process_group to the ranks that "
            "hold copies of its parameters"
        )
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
    cut = [d for d in wide if isinstance(placements[d], Shard) or _is_strided(placements[d])]
    copied = [d for d in wide if type(placements[d]) is Replicate]
    if len(cut) + len(copied) != len(wide):
        raise UnsupportedLayoutError(
            f"{name} is a DTensor with placements {tuple(placements)} on a mesh {tuple(mesh.shape)} "
            f"{mesh.mesh_dim_names or ''}; parameters that are sharded or replicated can be stepped (FSDP2, HSDP, tensor and "
            "expert parallelism), partial sums cannot"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedLayoutError(f"{name} lies on a mesh that this process is no part of")
    narrow = [d for d in range(mesh.ndim) if d not in wide]
    table = mesh.mesh.permute(*narrow, *copied, *cut).reshape(math.prod(mesh.size(d) for d in copied), -1)
    # A group numbers its members by rank, whatever way the mesh counts them.
    rows = tuple(sorted(tuple(sorted(int(r) for r in row)) for row in table.tolist()))
    if any(list(column) != sorted(column) for column in zip(*rows)):
        raise UnsupportedLayoutError(f"{name} lies on a mesh whose ranks are in an unusual order, {table.tolist()}")
    rank = dist.get_rank()
    ((replica, shard),) = ((r, row.index(rank)) for r, row in enumerate(rows) if rank in row)
    shard_group, replica_group = (mesh.get_group(dims[0]) if len(dims) == 1 else None for dims in (cut, copied))
    return Grid(rows, replica, shard, shard_group, replica_group)


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"  # private to torch, and no subclass of Shard in every version


def storage_of(param: Tensor, grid: Grid) -> Storage:
    """What each rank of the grid holds of a parameter.

    Raises:
        UnsupportedLayoutError: when this rank's part is not what its placement says.
    """
    shape = tuple(param.shape)
    if isinstance(param, Partition):
        return param.storage_map
    if not isinstance(param, DTensor) or grid.shards == 1:
        return Storage(shape, ((full_region(shape),),), grid.ranks)
    mesh, placements = param.device_mesh, tuple(param.placements)
    places, sizes = coordinates(mesh), tuple(mesh.mesh.shape)
    regions, *others = (tuple(_regions(shape, placements, sizes, places[rank]) for rank in row) for row in grid.ranks)
    if any(other != regions for other in others):
        raise UnsupportedLayoutError(
            f"the copies of a parameter of {shape} are cut over ranks {grid.ranks} in other orders"
        )
    storage = Storage(shape, regions, grid.ranks)
    held = tuple(local_tensor(param).shape)
    planned = sum(math.prod(b - a for a, b in region) for region in regions[grid.shard])
    if math.prod(held) != planned:
        raise UnsupportedLayoutError(
            f"this rank holds {held} of a parameter of {shape} with placements {placements} on a mesh {sizes}, where "
            f"DTensor's rule gives {planned} elements"
        )
    return storage


def coordinates(mesh: Any) -> dict[int, tuple[int, ...]]:
    """Where each global rank is in a device mesh."""
    places = itertools.product(*(range(size) for size in mesh.mesh.shape))
    return dict(zip(mesh.mesh.flatten().tolist(), places))


@lru_cache(maxsize=65536)
def _regions(
    shape: tuple[int, ...], placements: tuple[Any, ...], sizes: tuple[int, ...], where: tuple[int, ...]
) -> tuple[Region, ...]:
    """What the rank at a mesh coordinate holds: DTensor's own cutting, done to the indices of each dimension."""
    indices = [torch.arange(size, device="cpu") for size in shape]
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Replicate or sizes[mesh_dim] == 1:
            continue
        dim = placement.dim % len(shape)
        if type(placement) is Shard:
            start, stop = chunk_regions((len(indices[dim]),), 0, sizes[mesh_dim])[where[mesh_dim]][0]
            indices[dim] = indices[dim][start:stop]
        else:
            shaped = indices[dim].view([-1 if d == dim else 1 for d in range(len(shape))])
            pieces, _ = placement._split_tensor(shaped, sizes[mesh_dim], with_padding=False, contiguous=False)
            indices[dim] = pieces[where[mesh_dim]].flatten()
    return tuple(itertools.product(*(_runs(index.tolist()) for index in indices)))


def _runs(index: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as ``(start, stop)``; one empty run where there are none."""
    runs: list[tuple[int, int]] = []
    for i in index:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs or [(0, 0)]


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def local_tensor(tensor: Tensor) -> Tensor:
    """The part that this rank holds, sharing memory; the tensor itself where it is plain."""
    if type(tensor) in _PLAIN:  # most are, and this is asked of every tensor in every step
        return tensor
    if isinstance(tensor, DTensor):
        return _local(tensor)
    return tensor.local if isinstance(tensor, Partition) else tensor


def _local(tensor: DTensor) -> Tensor:
    # What `to_local` gives where no gradient is recorded, which is everywhere in a step; it takes five times as long.
    local: Tensor = tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor
    if type(local) is not Tensor and isinstance(local, AsyncCollectiveTensor):  # an address before that is of nothing
        return local.wait()  # type: ignore[no-any-return]
    return local


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """:func:`local_tensor` of each; in a step, where no gradient is recorded, with nothing to call for most of them."""
    tensors = list(tensors)
    if torch.is_grad_enabled():
        return [local_tensor(t) for t in tensors]
    held = [t._local_tensor if type(t) is DTensor else t for t in tensors]
    return held if _PLAIN.issuperset(map(type, held)) else [local_tensor(t) for t in tensors]


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor knows of ranks that hold other parts, even if it is one rank; else ranks have copies of it."""
    return isinstance(tensor, (DTensor, Partition))


def compute_device(param: Tensor) -> torch.device:
    """The device on which a parameter is stepped: the mesh's accelerator for a shard that is offloaded to the host."""
    if isinstance(param, Partition):
        return param.compute
    if isinstance(param, DTensor):
        kind = param.device_mesh.device_type
        if kind != param.device.type:
            return torch.device(kind, torch.accelerator.current_device_index())
    return param.device


def is_offloaded(param: Tensor) -> bool:
    """Whether a parameter is stepped on copies. A partition says so itself, so that a test can have both on the CPU."""
    return (isinstance(param, Partition) and param.offloaded) or compute_device(param) != param.device


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Shape of the parameter before it was cut."""
    return tensor.full_shape if isinstance(tensor, Partition) else tuple(tensor.shape)


def whole_numel(tensor: Tensor) -> int:
    """Elements of the parameter before it was cut."""
    return math.prod(whole_shape(tensor))


def local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a gradient, laid out as the parameter is."""
    grad = param.grad
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return grad
    if grad._spec is not param._spec and tuple(grad.placements) != tuple(param.placements):
        grad = grad.redistribute(param.device_mesh, param.placements)  # tensor parallel leaves some gradients whole
    return _local(grad)


def local_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """:func:`local_gradient` of each; zeros where only other ranks have one: that step is skipped, but must not hang."""
    plain = not torch.is_grad_enabled()
    found = [
        local
        if plain
        and type(p) is DTensor
        and type(grad := p.grad) is DTensor
        and (grad._spec is p._spec or grad._spec.placements == p._spec.placements)
        and type(local := grad._local_tensor) is Tensor
        else p.grad
        if type(p) in _PLAIN
        else local_gradient(p)
        for p in params
    ]
    return [torch.zeros_like(local_tensor(p)) if grad is None else grad for p, grad in zip(params, found)]


def check_layout(name: str, param: Tensor, matrix_views: Sequence[MatrixView]) -> None:
    """Refuses a parameter whose whole shape is no longer the one it was routed with.

    Raises:
        UnsupportedLayoutError: for a flattened or emptied parameter (FSDP1, ZeRO) and for sparse or quantized storage.
    """
    expected = math.prod(matrix_views[0].view) if matrix_views else None
    if expected is not None and whole_numel(param) != expected:
        raise UnsupportedLayoutError(
            f"{name} was a parameter of {expected:,} elements when it was routed and now has shape {tuple(param.shape)}: a "
            "wrapper (FSDP1, DeepSpeed ZeRO) has flattened or partitioned it, so its matrices cannot be seen. Under "
            "DeepSpeed, import hf_emopt before deepspeed.initialize; else train it under FSDP2, under DDP or on one process"
        )
    if local_tensor(param).layout is not torch.strided:
        raise UnsupportedLayoutError(f"{name} has layout {param.layout}; only dense parameters can be stepped")


def build_grids(named: Sequence[tuple[str, Tensor]], process_group: ProcessGroupArgument) -> dict[str, Grid]:
    """The ranks of every parameter; parameters of one mesh share one grid."""
    grids: dict[str, Grid] = {}
    known: dict[Any, Grid] = {}
    for name, param in named:
        if param.device.type == "meta" and not is_sharded(param):
            grids[name] = known.setdefault("meta", single_grid())
            continue
        key: Any = "plain"
        if isinstance(param, Partition):
            key = id(param.grid)
        elif isinstance(param, DTensor):
            key = (param.device_mesh, tuple((type(p), getattr(p, "dim", None)) for p in param.placements))
        if key not in known:
            known[key] = grid_of(name, param, process_group)
        grids[name] = known[key]
    return grids
