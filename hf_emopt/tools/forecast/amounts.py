"""Elements that each rank holds, transforms and receives, and its bytes of memory, counted from plans.

Arrays have one number a rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hf_emopt.distributed.layout import Region, Storage, full_region
from hf_emopt.distributed.plan import Bucket, Slicing
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.rules.base import Group
from hf_emopt.state.forms import elementwise_state, matrix_state
from hf_emopt.tools.forecast.layouts import Placed

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
    """Elements that each rank index holds, ``(replicas, shards)``."""
    return np.tile(_overlaps(storage, (full_region(storage.shape),)), (storage.replicas, 1))


def spread(storage: Storage, amounts: Array, world_size: int) -> Array:
    """From rank indices ``(replicas, shards)`` to ranks; a parameter that fewer ranks share has copies on the others."""
    if storage.world_size < world_size:
        return np.repeat(amounts.reshape(-1), world_size // storage.world_size)
    result = np.zeros(world_size)
    result[np.array(storage.ranks).reshape(-1)] = amounts.reshape(-1)
    return result


Kind = tuple[tuple[int, int], Slicing | None]
"""Matrices that are transformed in one call: ``(m, n)`` of each matrix or slice, and how matrices are sliced."""


@dataclass
class BucketAmounts:
    """Elements of one bucket.

    Attributes:
        batches: the matrices of each kind, by the rank index of their owner.
        owned, local: elements that a rank transforms, and that it holds.
        sent, returned, shared: elements that a rank receives in the three collectives, its own part of an all-to-all counted.
        width: bytes of an element that travels.
    """

    bucket: Bucket
    batches: dict[int, dict[Kind, int]]
    owned: Array
    local: Array
    sent: Array
    returned: Array
    shared: Array
    width: int


def bucket_amounts(bucket: Bucket, world_size: int, width: int) -> BucketAmounts:
    """Amounts of a bucket whose elements travel with ``width`` bytes each."""
    grid = bucket.storage
    shape = (grid.replicas, grid.shards)
    batches: dict[int, dict[Kind, int]] = defaultdict(lambda: defaultdict(int))
    owned, sent, returned, shared = (np.zeros(shape) for _ in range(4))
    for s in bucket.owned_regions:
        storage = bucket.parameters[s.parameter].storage
        where = divmod(s.owner, grid.shards)
        owned[where] += s.numel
        for u, matrix_view in enumerate(s.matrix_views):
            batches[s.owner][matrix_view.shape[1:], s.slicing(u)] += matrix_view.shape[0]
        if bucket.sends:
            sent[where] += s.numel
        parts = _overlaps(storage, s.results)
        if bucket.returns:
            returned[where[0]] += parts
        shared += parts
        shared[where[0]] -= parts
    local = sum((held(p.storage) for p in bucket.parameters), np.zeros(shape))
    owned, local, sent, returned, shared = (spread(grid, a, world_size) for a in (owned, local, sent, returned, shared))
    return BucketAmounts(bucket, {k: dict(v) for k, v in batches.items()}, owned, local, sent, returned, shared, width)


@dataclass(frozen=True)
class Memory:
    """Bytes of each rank.

    Attributes:
        weights, gradients: of trained parameters, in their dtypes; weights also of frozen ones.
        state, adamw_state: of the optimizer's state after its first step, and of ``torch.optim.AdamW``'s.
    """

    weights: Array
    gradients: Array
    state: Array
    adamw_state: Array


def memory(optimizer: MatrixOptimizer, placed: Placed, frozen_bytes: int = 0) -> Memory:
    """Bytes on every rank of a layout; weights that are not trained, ``frozen_bytes``, are sharded as the others are."""
    world, sharded = placed.layout.world_size, placed.layout.is_sharded
    weights, state, adamw = np.zeros(world), np.zeros(world), np.zeros(world)

    def count(param: torch.Tensor, storage: Storage) -> Array:
        nonlocal weights, adamw
        numel = spread(storage, held(storage), world)
        weights = weights + numel * param.dtype.itemsize
        adamw = adamw + 2 * numel * param.dtype.itemsize + 4
        return numel

    for bucket in (*placed.plan.buckets, *placed.aux_plan.buckets):
        group = optimizer.param_groups[bucket.group]
        params = [group["params"][p.position] for p in bucket.parameters]
        each = [_bytes_each(optimizer, group, param) for param in params]
        for p, param, bytes_each in zip(bucket.parameters, params, each):
            numel = count(param, p.storage)
            state = state + 4 + (8 if optimizer.rule.scheduled and p.matrix_views else 0)  # the counts of steps
            if sharded:
                state = state + numel * bytes_each
        owned = np.zeros((bucket.storage.replicas, bucket.storage.shards))
        for s in bucket.owned_regions:
            param, where = params[s.parameter], divmod(s.owner, bucket.storage.shards)
            owned[where] += 0 if sharded else s.numel * each[s.parameter]
            owned[where] += sum(_matrix_view_bytes(optimizer, group, u.shape, param.dtype) for u in s.matrix_views)
        state = state + spread(bucket.storage, owned, world)
    for g, i, storage in placed.own:
        group = optimizer.param_groups[g]
        param = group["params"][i]
        state = state + count(param, storage) * _bytes_each(optimizer, group, param) + 4
    shards = 1 if not sharded else placed.layout.shards if placed.layout.name == "hsdp" else world
    return Memory(weights + frozen_bytes / shards, weights.copy(), state, adamw)


def _bytes_each(optimizer: MatrixOptimizer, group: Group, param: torch.Tensor) -> float:
    """Bytes of state for each element of a parameter, in tensors of the parameter's shape."""
    like = torch.empty(param.shape, dtype=param.dtype, device="meta")
    state = elementwise_state(optimizer.rule, group, like, like.shape)
    return sum(t.nbytes for t in state.values()) / max(1, param.numel())


_matrix_view_sizes: dict[Any, int] = {}


def _matrix_view_bytes(
    optimizer: MatrixOptimizer, group: Group, shape: tuple[int, int, int], dtype: torch.dtype
) -> int:
    """Bytes of matrix state of a matrix view."""
    plain = tuple(sorted((k, str(v)) for k, v in group.items() if k not in ("params", "param_names", "units")))
    key = (optimizer.rule.name, shape, dtype, plain)
    if key not in _matrix_view_sizes:
        like = torch.empty(0, dtype=dtype, device="meta")
        _matrix_view_sizes[key] = sum(t.nbytes for t in matrix_state(optimizer.rule, group, shape, like).values())
    return _matrix_view_sizes[key]
