"""Scales weights outside of a step, together with the low bits that the optimizer keeps of them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.layout import Grid, grid_of, local_tensor, slices, storage_of
from hf_emopt.distributed.plan import OwnedRegion
from hf_emopt.engine.context import StepContext
from hf_emopt.formats.master_weights import WEIGHT_STATE, load_weights, needs_master, store_weights
from hf_emopt.linalg.matmul_precision import plain_arithmetic
from hf_emopt.optimizers.base import MatrixOptimizer

State = dict[str, Tensor]


@plain_arithmetic()
def scale_slices(
    optimizer: MatrixOptimizer | None,
    name: str,
    param: Tensor,
    factors: Tensor,
    dim: int,
    zero_centered: bool,
) -> None:
    """Multiplies slices of a parameter along one dimension, in place; slices with factor 1 are not touched.

    16-bit weights are scaled as the optimizer sees them, in float32, and stored back by its policy
    (``low_precision_weights``), so that the next step goes on from the scaled weight. Where owners hold that state (DDP),
    it is a collective among the ranks that hold copies: each gets the owner's weight.

    Args:
        optimizer: that steps the parameter, or ``None``: then the weights that are stored are all there is.
        param: plain or DTensor; each rank scales what it holds.
        factors: ``(param.shape[dim],)`` float64, on the CPU; the same on every rank.
        dim: of the whole parameter.
        zero_centered: what the module multiplies by is ``1 + param``.
    """
    policy, owned = "none", None
    state: State = {}
    if optimizer is not None and needs_master(param):
        group = next((g for g in optimizer.param_groups if any(p is param for p in g["params"])), None)
        policy = "none" if group is None else group["low_precision_weights"]
    if optimizer is not None and policy != "none":
        state = optimizer.state.get(param, {})
        owned = None if optimizer.context is None else _owned(optimizer.context, param)
    noise = _noise(name, param, state) if policy == "stochastic" else None
    scale = partial(_scale, dim=dim, zero_centered=zero_centered, policy=policy, noise=noise)
    if owned is not None:
        _scale_owned(param, state, owned, factors, dim, scale)
        return
    grid = grid_of(name, param, "self")
    storage, local = storage_of(param, grid), local_tensor(param)
    mine = {key: local_tensor(state[key]) for key in WEIGHT_STATE if key in state}
    for region, place in storage.held(grid.shard):
        where = slices(place)
        part = {key: value[where] for key, value in mine.items()}
        scale(local[where], part, factors[slice(*region[dim])])


def _owned(context: StepContext, param: Tensor) -> tuple[Grid, list[OwnedRegion]] | None:
    """The ranks that hold copies of a parameter whose owners hold the state, and the owned regions of this rank."""
    for plan in (context.plan, context.aux_plan):
        for bucket in plan.buckets:
            for i in range(len(bucket.parameters)):
                if context.parameter(bucket, i) is param:
                    owned_regions = context.store.owned(bucket, i)
                    return None if owned_regions is None else (context.ranks.grid(bucket), owned_regions)
    return None


def _scale_owned(
    param: Tensor,
    state: State,
    owned: tuple[Grid, list[OwnedRegion]],
    factors: Tensor,
    dim: int,
    scale: Callable[[Tensor, State, Tensor], None],
) -> None:
    """Owners ``scale`` their owned regions, and all ranks take the slices that changed from them."""
    grid, owned_regions = owned
    offset = 0
    for owned_region in owned_regions:
        length = owned_region.shape[owned_region.dim]
        part = {key: state[key] for key in WEIGHT_STATE if key in state}
        if owned_region.shape != tuple(param.shape):
            part = {key: value.narrow(owned_region.dim, offset, length) for key, value in part.items()}
        offset += length
        scale(param[slices(owned_region.region)], part, factors[slice(*owned_region.region[dim])])
    changed = (factors != 1).nonzero().flatten().to(param.device)
    # In float32, which holds every 16-bit number and which every backend adds; all but the owner add zeros.
    mine = torch.zeros(param.shape, dtype=torch.float32, device=param.device)
    for owned_region in owned_regions:
        mine[slices(owned_region.region)] = param[slices(owned_region.region)].float()
    sent = mine.index_select(dim, changed)
    dist.all_reduce(sent, group=grid.replica_group)
    param.index_copy_(dim, changed, sent.to(param.dtype))


def _scale(
    weight: Tensor,
    state: State,
    factors: Tensor,
    dim: int,
    zero_centered: bool,
    policy: str,
    noise: torch.Generator | None,
) -> None:
    """Scales part of a weight and of its low bits; both share memory with the whole."""
    changed = (factors != 1).nonzero().flatten()
    if not changed.numel() or not weight.numel():
        return
    index = changed.to(weight.device)
    shape = [1] * weight.dim()
    shape[dim] = -1
    by = factors[changed].to(weight.device, torch.promote_types(weight.dtype, torch.float32)).view(shape)
    stored = weight.index_select(dim, index)
    beside = {key: value.index_select(dim, index.to(value.device)).to(weight.device) for key, value in state.items()}
    exact = load_weights([stored], [beside], policy)[0]
    exact = exact * by + (by - 1) if zero_centered else exact * by
    if needs_master(stored):
        store_weights([stored], [exact], [beside], policy, noise)
    else:
        stored = exact
    weight.index_copy_(dim, index, stored)
    for key, value in state.items():
        value.index_copy_(dim, index.to(value.device), beside[key].to(value.device))


def _noise(name: str, param: Tensor, state: State) -> torch.Generator:
    """Noise that ranks with copies of a shard draw alike, and a resumed run again."""
    step = int(state["step"]) if "step" in state else 0
    return torch.Generator(param.device).manual_seed(zlib.crc32(name.encode()) * 65_537 + step)
