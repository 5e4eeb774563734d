"""Storage of parameters on ranks that do not exist, and the plans that the optimizer would make there.

The plans are the optimizer's own: the same functions, fed with the regions that DDP, FSDP2 and tensor parallelism give
to each rank.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor, nn

from hf_emopt.distributed.assignment import BucketSizes, make_plan, planned_sizes
from hf_emopt.distributed.communication_dtype import communication_dtype
from hf_emopt.distributed.layout import Region, Storage, chunk_regions
from hf_emopt.distributed.plan import Plan, PlannedParameter, TensorSlices
from hf_emopt.distributed.tensor_parallel_choice import choose_modes
from hf_emopt.optimizers.base import MatrixOptimizer

LAYOUTS = ("ddp", "fsdp2", "hsdp", "fsdp2+tp")


@dataclass(frozen=True)
class Layout:
    """How a model is laid over ranks.

    Attributes:
        shards: ranks that together hold one copy, under ``"hsdp"``.
        tp_size: ranks that share each matrix, under ``"fsdp2+tp"``; neighbours by number, as in a mesh ``(data, tensor)``.

    Raises:
        ValueError: when the sizes do not fit.
    """

    name: str
    world_size: int
    shards: int = 8
    tp_size: int = 8

    def __post_init__(self) -> None:
        if self.name not in LAYOUTS:
            raise ValueError(f"--layout {self.name} is not one of {', '.join(LAYOUTS)}")
        if self.world_size < 1:
            raise ValueError(f"--world-size {self.world_size} must be at least 1")
        fitting = [n for n in range(2, self.world_size // 2 + 1) if self.world_size % n == 0]
        if self.name == "hsdp" and self.shards not in fitting:
            raise ValueError(
                f"--layout hsdp needs two replicas or more, each of two ranks or more: --world-size {self.world_size} with "
                f"--shard-size {self.shards} has not; "
                + (f"--shard-size {', '.join(map(str, fitting))} would fit" if fitting else "no --shard-size fits it")
            )
        if self.name == "fsdp2+tp" and (self.tp_size < 2 or self.world_size % self.tp_size):
            raise ValueError(
                f"--layout fsdp2+tp needs a number of ranks that --tp-size divides, from 2: {self.world_size} and "
                f"{self.tp_size} do not fit"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are DTensors, whose state is sharded as they are."""
        return self.name != "ddp"


def layout_on(
    name: str, world_size: int, per_node: int, shard_size: int | None = None, tp_size: int | None = None
) -> Layout:
    """A layout in which a node shares a matrix and a replica is a node, or half of the only one, where no sizes are given."""
    node = min(per_node, world_size)
    shards = shard_size if shard_size is not None else node if node < world_size else world_size // 2
    return Layout(name, world_size, shards, node if tp_size is None else tp_size)


def check_sizes(names: Sequence[str], shard_size: int | None, tp_size: int | None) -> None:
    """Raises ``ValueError`` for a size that applies to none of the layouts."""
    for flag, size, layout in (("--shard-size", shard_size, "hsdp"), ("--tp-size", tp_size, "fsdp2+tp")):
        if size is not None and layout not in names:
            raise ValueError(f"{flag} {size} is for --layout {layout}, and the layouts are {', '.join(names)}")


@lru_cache(maxsize=4096)
def _storage(layout: Layout, shape: tuple[int, ...], cut_dim: int | None) -> Storage:
    """The storage of a parameter that tensor parallelism slices along ``cut_dim``.

    With ``None`` the ranks with one tensor-parallel coordinate share the parameter among themselves.
    """
    world = layout.world_size
    if layout.name == "ddp":
        return Storage.whole(shape, world)
    if layout.name == "hsdp":
        return Storage.sharded(shape, layout.shards, world // layout.shards)
    if not shape:
        return Storage.whole(shape, world)
    if layout.name == "fsdp2":
        return Storage.sharded(shape, world)
    tp, data = layout.tp_size, world // layout.tp_size
    if cut_dim is None:
        column = tuple(i * tp for i in range(data))
        return Storage(shape, tuple((region,) for region in chunk_regions(shape, 0, data)), (column,))
    slices = chunk_regions(shape, cut_dim, tp)
    regions = [_within(slices[t], i, data) for i, t in itertools.product(range(data), range(tp))]
    return Storage(shape, tuple((region,) for region in regions), (tuple(range(world)),))


def _within(region: Region, index: int, count: int) -> Region:
    """The rows of a slice of tensor parallelism that one rank of FSDP holds."""
    start, stop = region[0]
    first, last = chunk_regions((stop - start,), 0, count)[index][0]
    return ((start + first, start + last), *region[1:])


@dataclass(frozen=True)
class Placed:
    """An optimizer's parameters on the ranks of a layout.

    Attributes:
        plan: of the matrices.
        aux_plan: of elementwise parameters that ranks hold copies of, which are all under DDP.
        own: group, position and storage of each elementwise parameter whose ranks step their shards alone.
    """

    layout: Layout
    plan: Plan
    aux_plan: Plan
    own: tuple[tuple[int, int, Storage], ...]


def place(
    optimizer: MatrixOptimizer, layout: Layout, model: nn.Module | None = None, max_bucket_numel: int | None = None
) -> Placed:
    """The plans for an optimizer, whose parameters may be on the meta device.

    Args:
        model: for the layout with tensor parallelism, whose plan it has.
        max_bucket_numel: elements for each rank in a bucket, instead of the optimizer's.

    Raises:
        ValueError: see :func:`tensor_parallel_plan`.
    """
    dims = {}
    if layout.name == "fsdp2+tp":
        styles = tensor_parallel_plan(model, _DIMS, "plan it with --layout fsdp2 or hsdp")
        dims = {f"{pattern}.weight": _DIMS[style] for pattern, style in styles.items()}
    planned: list[PlannedParameter] = []
    sliced: list[TensorSlices | None] = []
    of_shard = tuple(rank % layout.tp_size for rank in range(layout.world_size))
    for p in optimizer.planned_parameters():
        dim = _cut_dim(p.name, dims, p.storage.shape)
        storage = _storage(layout, p.storage.shape, dim)
        # Compute groups are made of ranks of one dimension of the mesh only, and never of some of the job's ranks.
        alone = layout.name == "fsdp2+tp" and dim is None
        planned.append(replace(p, storage=storage, shard_cost=None if alone else p.shard_cost))
        slices = () if dim is None else chunk_regions(storage.shape, dim, layout.tp_size)
        sliced.append(TensorSlices(of_shard, tuple((region,) for region in slices)) if slices else None)
    if any(slices is not None for slices in sliced):
        width = communication_bytes(optimizer, planned[0])
        planned, _ = choose_modes(
            planned, sliced, optimizer.rule, optimizer.param_groups, optimizer.mode_overrides, width
        )
    copies, own = _others(optimizer, layout, dims)
    forward = optimizer.overlap_param_gather and layout.name == "ddp"
    offloads = optimizer.offload_state is not None
    sizes = planned_sizes(optimizer.rule.scheduled, optimizer.param_groups, offloads, layout.world_size)
    given = None if max_bucket_numel is None else BucketSizes(max_bucket_numel, max_bucket_numel)
    plan = make_plan(planned, given or sizes, forward)
    return Placed(layout, plan, make_plan(copies, given, forward), tuple(own))


def parameter_of(optimizer: MatrixOptimizer, planned: PlannedParameter) -> Tensor:
    """The parameter that was planned."""
    param: Tensor = optimizer.param_groups[planned.group]["params"][planned.position]
    return param


def communication_bytes(optimizer: MatrixOptimizer, planned: PlannedParameter) -> int:
    """Bytes of an element of a matrix that travels between GPUs."""
    return communication_dtype(parameter_of(optimizer, planned).dtype, "cuda", optimizer.transport_dtype).itemsize


def _others(
    optimizer: MatrixOptimizer, layout: Layout, dims: dict[str, int]
) -> tuple[list[PlannedParameter], list[tuple[int, int, Storage]]]:
    copies: list[PlannedParameter] = []
    own = []
    for g, group in enumerate(optimizer.param_groups):
        for i, (name, param) in enumerate(zip(group["param_names"], group["params"])):
            shape = tuple(param.shape)
            if group["kind"] != "aux" or not param.numel():
                continue
            if layout.name == "ddp" and layout.world_size > 1:
                storage = Storage.whole(shape, layout.world_size)
                tag = f"{param.dtype} {param.device}"
                copies.append(PlannedParameter(name, g, i, (), (param.numel(),), tag, storage))
            else:
                own.append((g, i, _storage(layout, shape, _cut_dim(name, dims, shape))))
    return copies, own


_DIMS = {"colwise": 0, "colwise_gather_output": 0, "colwise_rep": 0, "rowwise": 1}


def tensor_parallel_plan(model: nn.Module | None, known: Collection[str], advice: str) -> dict[str, str]:
    """The style in which the model's own plan of tensor parallelism slices modules, by pattern of their names.

    Raises:
        ValueError: when the model has no plan, or one with a style that is not ``known``; ``advice`` ends the message.
    """
    base = str(getattr(model, "base_model_prefix", ""))
    styles = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    plan = {f"{base}.{k}" if base else k: v for k, v in styles.items()} | (getattr(type(model), "_tp_plan", None) or {})
    unknown = sorted({style for style in plan.values() if style not in known})
    if not plan or unknown:
        what = f"styles that are not known here: {', '.join(unknown)}" if plan else "no plan of tensor parallelism"
        raise ValueError(f"{type(model).__name__} has {what}; {advice}")
    return plan


def _cut_dim(name: str, dims: dict[str, int], shape: Sequence[int]) -> int | None:
    dim = next((dim for pattern, dim in dims.items() if fnmatch.fnmatch(name, pattern)), None)
    return dim if dim is not None and dim < len(shape) else None
