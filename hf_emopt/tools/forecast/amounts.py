"""What each rank holds, computes on and receives, counted from plans; arrays have one number a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hf_emopt.distributed.layout import Region, Storage, full_region
from hf_emopt.distributed.owned_regions import Cut
from hf_emopt.distributed.plan import Bucket, Plan
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.state.forms import elementwise_state, matrix_state
from hf_emopt.tools.forecast.layouts import Placed

__all__ = ["Array", "BucketAmounts", "Kind", "Memory", "bucket_amounts", "memory", "spread"]

Array = np.ndarray[Any, np.dtype[np.float64]]


@lru_cache(maxsize=1024)
def _edges(storage: Storage) -> tuple[Array, Array, Array]:
    """Starts and stops of all regions, ``(regions, dims)``, and the shard that each is of."""
    regions = [(shard, region) for shard, held in enumerate(storage.regions) for region in held]
    edges = np.array([region for _, region in regions], dtype=np.float64).reshape(len(regions), len(storage.shape), 2)
    return edges[..., 0], edges[..., 1], np.array([shard for shard, _ in regions])


@lru_cache(maxsize=16384)
def _overlaps(storage: Storage, given: tuple[Region, ...]) -> Array:
    """Elements of the regions that each shard holds."""
    starts, stops, shards = _edges(storage)
    total = np.zeros(storage.shards)
    for region in given:
        edges = np.array(region, dtype=np.float64).reshape(len(storage.shape), 2)
        sizes = np.maximum(0.0, np.minimum(stops, edges[:, 1]) - np.maximum(starts, edges[:, 0]))
        total += np.bincount(shards, weights=sizes.prod(axis=1), minlength=storage.shards)
    return total


def held(storage: Storage) -> Array:
    """Elements of each position ``(replicas, shards)``."""
    return np.tile(_overlaps(storage, (full_region(storage.shape),)), (storage.replicas, 1))


def spread(storage: Storage, amounts: Array, world_size: int) -> Array:
    """From positions ``(replicas, shards)`` to ranks. What the ranks of one tensor-parallel column share among themselves,
    those of the other columns do likewise."""
    if storage.world_size < world_size:
        return np.repeat(amounts.reshape(-1), world_size // storage.world_size)
    result = np.zeros(world_size)
    result[np.array(storage.ranks).reshape(-1)] = amounts.reshape(-1)
    return result


@dataclass(frozen=True)
class Kind:
    """Matrices of one shape that are transformed in one call.

    Attributes:
        shape: ``(m, n)`` of each, of the slice where they are cut.
        cut: how they are cut over a compute group, if they are.
    """

    shape: tuple[int, int]
    cut: Cut | None = None


@dataclass
class BucketAmounts:
    """One bucket; elements.

    Attributes:
        bucket: itself.
        batches: for each position of a rank that owns something, the matrices of each kind.
        owned: what a rank transforms.
        local: what it holds.
        sent, returned, shared: received by a rank in the three collectives, its own part of an all-to-all counted.
    """

    bucket: Bucket
    batches: dict[int, dict[Kind, int]]
    owned: Array
    local: Array
    sent: Array
    returned: Array
    shared: Array = field(default_factory=lambda: np.zeros(1))


def bucket_amounts(plan: Plan, world_size: int) -> list[BucketAmounts]:
    """Amounts of every bucket of a plan."""
    return [_amounts(bucket, world_size) for bucket in plan.buckets]


def _amounts(bucket: Bucket, world_size: int) -> BucketAmounts:
    grid = bucket.storage
    shape = (grid.replicas, grid.shards)
    batches: dict[int, dict[Kind, int]] = defaultdict(lambda: defaultdict(int))
    owned, sent, returned, shared = (np.zeros(shape) for _ in range(4))
    for s in bucket.owned_regions:
        storage = bucket.parameters[s.parameter].storage
        where = divmod(s.owner, grid.shards)
        owned[where] += s.numel
        for u, matrix_view in enumerate(s.matrix_views):
            batches[s.owner][Kind(matrix_view.shape[1:], s.cut(u))] += matrix_view.shape[0]
        if bucket.sends:
            sent[where] += s.numel
        parts = _overlaps(storage, (s.region,) if s.gives is None else s.gives)
        if bucket.returns:
            returned[where[0]] += parts
        shared += parts
        shared[where[0]] -= parts
    local = sum((held(p.storage) for p in bucket.parameters), np.zeros(shape))
    owned, local, sent, returned, shared = (spread(grid, a, world_size) for a in (owned, local, sent, returned, shared))
    return BucketAmounts(bucket, {k: dict(v) for k, v in batches.items()}, owned, local, sent, returned, shared)


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Memory:
    """Bytes of each rank.

    Attributes:
        weights, gradients: of everything that is trained, in the parameters' dtypes, and of frozen weights.
        state: the optimizer's, as it allocates it in its first step.
        adamw_state: of ``torch.optim.AdamW`` on the same layout.
    """

    weights: Array
    gradients: Array
    state: Array
    adamw_state: Array


def memory(optimizer: MatrixOptimizer, placed: Placed, frozen_bytes: int = 0) -> Memory:
    """Bytes on every rank of a layout.

    Args:
        frozen_bytes: of weights that are not trained; they are sharded as the others are.
    """
    world, sharded = placed.layout.world_size, placed.layout.is_sharded
    weights, state, adamw = np.zeros(world), np.zeros(world), np.zeros(world)
    groups = optimizer.param_groups

    def count(storage: Storage, dtype: torch.dtype) -> Array:
        nonlocal weights, adamw
        numel = spread(storage, held(storage), world)
        weights = weights + numel * dtype.itemsize
        adamw = adamw + 2 * numel * dtype.itemsize + 4
        return numel

    for bucket in placed.plan.buckets:
        group = groups[bucket.group]
        amounts = np.zeros((bucket.storage.replicas, bucket.storage.shards))
        for p in bucket.parameters:
            param = group["params"][p.position]
            numel = count(p.storage, param.dtype)
            if sharded:
                state = state + numel * _bytes_each(optimizer, param, bucket.group)
            state = state + 4 + (8 if optimizer.rule.scheduled else 0)
        for s in bucket.owned_regions:
            param = group["params"][bucket.parameters[s.parameter].position]
            where = divmod(s.owner, bucket.storage.shards)
            if not sharded:
                amounts[where] += s.numel * _bytes_each(optimizer, param, bucket.group)
            amounts[where] += sum(
                _matrix_view_bytes(optimizer, matrix_view.shape, param.dtype, bucket.group)
                for matrix_view in s.matrix_views
            )
        state = state + spread(bucket.storage, amounts, world)
    for bucket in placed.aux_plan.buckets:
        amounts = np.zeros((bucket.storage.replicas, bucket.storage.shards))
        for p in bucket.parameters:
            count(p.storage, groups[bucket.group]["params"][p.position].dtype)
            state = state + 4
        for s in bucket.owned_regions:
            param = groups[bucket.group]["params"][bucket.parameters[s.parameter].position]
            amounts[divmod(s.owner, bucket.storage.shards)] += s.numel * _bytes_each(optimizer, param, bucket.group)
        state = state + spread(bucket.storage, amounts, world)
    for g, i, storage in placed.own:
        param = groups[g]["params"][i]
        state = state + count(storage, param.dtype) * _bytes_each(optimizer, param, g) + 4
    shards = 1 if not sharded else placed.layout.shards if placed.layout.name == "hsdp" else world
    return Memory(weights + frozen_bytes / shards, weights.copy(), state, adamw)


def _bytes_each(optimizer: MatrixOptimizer, param: torch.Tensor, group_index: int) -> float:
    """Of state that is shaped as the parameter, for each element."""
    group, like = optimizer.param_groups[group_index], torch.empty(param.shape, dtype=param.dtype, device="meta")
    state = elementwise_state(optimizer.rule, group, like, like.shape)
    return sum(t.nbytes for t in state.values()) / max(1, param.numel())


_matrix_view_sizes: dict[Any, int] = {}


def _matrix_view_bytes(
    optimizer: MatrixOptimizer, shape: tuple[int, int, int], dtype: torch.dtype, group_index: int
) -> int:
    group = optimizer.param_groups[group_index]
    plain = tuple(sorted((k, str(v)) for k, v in group.items() if k not in ("params", "param_names", "units")))
    key = (optimizer.rule.name, shape, dtype, plain)
    if key not in _matrix_view_sizes:
        like = torch.empty(0, dtype=dtype, device="meta")
        _matrix_view_sizes[key] = sum(t.nbytes for t in matrix_state(optimizer.rule, group, shape, like).values())
    return _matrix_view_sizes[key]


def total(values: Sequence[Array], world_size: int) -> Array:
    """Their sum, also of none."""
    return sum(values, np.zeros(world_size))
