"""State that lies with owners: brought together for a checkpoint, and taken apart after one is loaded.

Whole state is a dictionary by parameter name whose tensors are those of a single process: elementwise state shaped like the
parameter, matrix state with one row for each matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_emopt.distributed.consensus import control_device
from hf_emopt.distributed.layout import Partition, Storage, chunk_regions, storage_of
from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.engine.engine import Engine
from hf_emopt.formats.moments import is_scale
from hf_emopt.rules.base import Group
from hf_emopt.state.forms import elementwise_state, laid_out, matrix_state, shape_of_entry
from hf_emopt.state.keys import is_count, is_shaped
from hf_emopt.state.placement import compute_device, part_of

__all__ = [
    "as_parameter",
    "fresh",
    "gathered",
    "has_matrix_state",
    "keep_owned",
    "materialize",
    "sharded_matrix_state",
    "whole_matrix_state",
]

State = dict[str, Any]

_SPREAD_NUMEL = 2**12


def materialize(engine: Engine) -> None:
    """Makes all state that there is not yet, as it is before a first step, with the same keys on every rank.

    ``torch.distributed.checkpoint`` asks for an entry of every trainable parameter on every rank, and takes the keys that
    it looks for in a file from ``optimizer.state``. So what another rank owns has an empty tensor here.
    """
    for plan in (engine.plan, engine.aux_plan):
        for index, bucket in enumerate(plan.buckets):
            group = engine.groups[bucket.group]
            for i in range(len(bucket.parameters)):
                state = engine.states.of(bucket, i)
                if plan is engine.plan and engine.rule.scheduled:
                    state.setdefault("rounds", torch.zeros((), dtype=torch.int64))
            if plan is engine.plan:
                for b, batch in enumerate(engine.batches(index, bucket)):
                    engine.states.of_batch((index, b), bucket, batch, group)
            if bucket.storage.world_size > 1:
                for i in range(len(bucket.parameters)):
                    state = engine.states.of(bucket, i)
                    for key in _expected(engine, bucket, i):
                        if key not in state:
                            state[key] = torch.empty(0)
    planned = {p.name for plan in (engine.plan, engine.aux_plan) for bucket in plan.buckets for p in bucket.parameters}
    for group, params in zip(engine.groups, engine.params):
        for name, param in zip(group["param_names"], params):
            if name not in planned:
                engine.states.ready(param, group)


def _expected(engine: Engine, bucket: Bucket, i: int) -> State:
    """The whole state of a parameter as the rule starts it, without memory."""
    param, group = engine.parameter(bucket, i), engine.groups[bucket.group]
    return _start(engine, bucket, i, _meta(param), torch.empty(0, dtype=param.dtype, device="meta"), group)


def _meta(param: Tensor) -> Tensor:
    """A tensor of the whole parameter's shape, without memory."""
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _start(engine: Engine, bucket: Bucket, i: int, like: Tensor, matrix_view_like: Tensor, group: Group) -> State:
    result = elementwise_state(engine.rule, group, like, like.shape)
    if group["kind"] == "matrix":
        for u, matrix_view in enumerate(bucket.parameters[i].matrix_views):
            state = matrix_state(engine.rule, group, matrix_view.shape, matrix_view_like)
            result |= {f"{name}.{u}": value for name, value in state.items()}
    return result


def fresh(engine: Engine) -> dict[str, State]:
    """Whole state as it is before a first step, on the host, of every parameter whose state lies with owners."""
    result: dict[str, State] = {}
    for plan in (engine.plan, engine.aux_plan):
        for bucket in plan.buckets:
            group = engine.groups[bucket.group]
            for i, parameter in enumerate(bucket.parameters):
                if engine.states.owned(bucket, i) is None:
                    continue
                param = engine.parameter(bucket, i).detach().cpu()
                whole = _start(engine, bucket, i, param, torch.empty(0, dtype=param.dtype), group)
                counts = {k: torch.zeros_like(v) for k, v in engine.states.of(bucket, i).items() if is_count(k)}
                result[parameter.name] = whole | counts
    return result


def gathered(engine: Engine, keep: bool = True) -> dict[str, State]:
    """Collective: whole state of every parameter whose state lies with owners, on the host.

    Args:
        keep: whether this rank wants it; others take part and return nothing.
    """
    materialize(engine)
    result: dict[str, State] = {}
    for plan in (engine.plan, engine.aux_plan):
        for bucket in plan.buckets:
            for i, parameter in enumerate(bucket.parameters):
                state = engine.states.of(bucket, i)
                whole: State = {
                    key: value.detach().to("cpu", copy=True)
                    for key, value in state.items()
                    if is_count(key) or (is_shaped(key) and engine.states.owned(bucket, i) is None)
                }
                if engine.states.owned(bucket, i) is not None:
                    whole |= _whole_shaped(engine, bucket, i, keep)
                whole |= whole_matrix_state(engine, bucket, i, lambda t: t.to("cpu", copy=True) if keep else None)
                result[parameter.name] = whole
    return result if keep else {}


def _whole_shaped(engine: Engine, bucket: Bucket, i: int, keep: bool) -> State:
    """Elementwise state of a parameter, from the parts that owners have."""
    param, group = engine.parameter(bucket, i), engine.groups[bucket.group]
    expected = elementwise_state(engine.rule, group, _meta(param), param.shape)
    state = engine.state[param]
    mine = engine.states.owned(bucket, i) or []
    result: State = {}
    for key, like in sorted(expected.items()):
        whole = torch.empty(like.shape, dtype=like.dtype, device=param.device)
        offset = 0
        for owned_region in (s for s in bucket.owned_regions if s.parameter == i):
            region = owned_region.region[:1] if is_scale(key) else owned_region.region
            where = tuple(slice(a, b) for a, b in region)
            part = None
            if owned_region in mine:
                part = (
                    state[key].narrow(owned_region.dim, offset, owned_region.shape[owned_region.dim])
                    if state[key].ndim
                    else state[key]
                )
                offset += owned_region.shape[owned_region.dim] if owned_region.shape else 0
            shape = whole[where].shape
            whole[where] = _from_owner(engine, bucket, owned_region, part, shape, like.dtype, param.device)
        if keep:
            result[key] = whole.cpu()
    return result


def whole_matrix_state(engine: Engine, bucket: Bucket, i: int, use: Callable[[Tensor], Any]) -> State:
    """Collective: matrix state of one parameter, one tensor at a time on all ranks, each handed to ``use``."""
    parameter, group = bucket.parameters[i], engine.groups[bucket.group]
    param = engine.parameter(bucket, i)
    state = engine.state.get(param, {})
    result: State = {}
    for u, matrix_view in enumerate(parameter.matrix_views):
        for name, like in sorted(_matrix_view_like(engine, matrix_view.shape, group, param).items()):
            device = torch.device("cpu") if like.device.type == "cpu" else compute_device(param)
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
            offset = 0
            present = f"{name}.{u}" in state
            for owned_region in (s for s in bucket.owned_regions if s.parameter == i and not s.copy):
                place = owned_region.local_index(u)
                if place is None:
                    continue
                shape = _matrix_view_like(engine, owned_region.matrix_views[place].shape, group, param)[name].shape
                where = _matrix_view_place(bucket, owned_region, place, like.shape, shape)
                part = None
                if owned_region.owner == engine.grid_of_bucket(bucket).position and present:
                    part = state[f"{name}.{u}"][offset : offset + shape[0]]
                    offset += shape[0]
                whole[where] = _from_owner(engine, bucket, owned_region, part, shape, like.dtype, device)
            result[f"{name}.{u}"] = use(whole)
    return result


def has_matrix_state(engine: Engine) -> bool:
    """Whether any matrix has state of its own, beside what lies as its parameter does."""
    return any(
        _matrix_view_like(engine, matrix_view.shape, engine.groups[bucket.group], engine.parameter(bucket, i))
        for bucket in engine.plan.buckets
        for i, parameter in enumerate(bucket.parameters)
        for matrix_view in parameter.matrix_views
    )


def sharded_matrix_state(engine: Engine) -> dict[str, State]:
    """Collective: matrix state of sharded parameters, as DTensors on the parameter's mesh, by parameter name."""
    result: dict[str, State] = {}
    for bucket in engine.plan.buckets:
        for i, parameter in enumerate(bucket.parameters):
            param = engine.parameter(bucket, i)
            if "step" in engine.state.get(param, {}) and isinstance(param, DTensor):
                result[parameter.name] = whole_matrix_state(engine, bucket, i, partial(_spread, like=param))
    return result


def _spread(whole: Tensor, like: DTensor) -> Tensor:
    """Cuts a tensor that all ranks have evenly over a parameter's shards; small ones stay whole, the same on all ranks."""
    placements, mesh = list(like.placements), like.device_mesh
    cut = [d for d, p in enumerate(placements) if isinstance(p, Shard) and mesh.size(d) > 1]
    plain = all(isinstance(p, Shard | Replicate) for p in placements)
    if len(cut) != 1 or not plain or whole.numel() < _SPREAD_NUMEL or whole.device.type != mesh.device_type:
        return whole.clone()
    count = mesh.size(cut[0])
    dim = next((d for d, size in enumerate(whole.shape) if size >= count), whole.shape.index(max(whole.shape)))
    placements[cut[0]] = Shard(dim)
    region = chunk_regions(whole.shape, dim, count)[mesh.get_local_rank(cut[0])]
    local = whole[tuple(slice(a, b) for a, b in region)].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _matrix_view_like(engine: Engine, shape: tuple[int, int, int], group: Group, param: Tensor) -> dict[str, Tensor]:
    """Matrix state of a shape without its memory. What rules keep on the host comes out on the host."""
    return matrix_state(engine.rule, group, shape, torch.empty(0, dtype=param.dtype, device="meta"))


def _matrix_view_place(
    bucket: Bucket, owned_region: OwnedRegion, place: int, whole: Sequence[int], part: Sequence[int]
) -> tuple[slice, ...]:
    """Where the state of an owned region's matrix view belongs in the parameter's."""
    cut, parameter = owned_region.slicing(place), bucket.parameters[owned_region.parameter]
    if cut is not None and cut.compute_group:  # along the dimension that differs, if any does
        start, stop = cut.spans[cut.compute_group.index(owned_region.owner)]
        return tuple(slice(None) if a == b else slice(start, stop) for a, b in zip(whole, part))
    per_row = parameter.matrix_views[owned_region.index(place)].shape[0] // max(1, parameter.rows)
    first = owned_region.region[0][0] // parameter.row_numel * per_row if part[0] != whole[0] else 0
    return (slice(first, first + part[0]),)


def _from_owner(
    engine: Engine,
    bucket: Bucket,
    owned_region: OwnedRegion,
    part: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Broadcasts an owned region's part from its owner."""
    grid = engine.grid_of_bucket(bucket)
    if grid.world_size == 1:
        assert part is not None
        return part
    # Rather that of all ranks, which waits as long as the job's own collectives do: ranks come far apart before a checkpoint.
    everyone = grid.world_size == dist.get_world_size(engine.council.group)
    one = grid.shard_group if grid.replicas == 1 else grid.replica_group if grid.shards == 1 else None
    group = engine.council.group if everyone or one is None else one
    wire = control_device(group)
    value = torch.empty(tuple(shape), dtype=dtype, device=wire) if part is None else part.to(wire).contiguous()
    # As bytes, since backends differ in which dtypes they move.
    dist.broadcast(
        value.view(torch.uint8) if value.ndim else value, src=bucket.storage.rank(owned_region.owner), group=group
    )
    return value.to(device)


def keep_owned(engine: Engine, whole: dict[str, State]) -> None:
    """Puts whole state into the engine's, each rank its own part of it."""
    planned: set[str] = set()
    for plan in (engine.plan, engine.aux_plan):
        for bucket in plan.buckets:
            for i, parameter in enumerate(bucket.parameters):
                if whole.get(parameter.name):
                    param = engine.parameter(bucket, i)
                    engine.state[param] = _own(engine, bucket, i, whole[parameter.name], param)
                    planned.add(parameter.name)
    for group in engine.groups:
        for name, param in zip(group["param_names"], group["params"]):
            if name in planned or not whole.get(name):
                continue
            storage = storage_of(param, engine.grids[name])
            engine.state[param] = {
                key: as_parameter(value, param, storage, key, engine.states.home_device(param, key))
                if is_shaped(key)
                else value.detach().to("cpu" if key == "rounds" else param.device, copy=True)
                for key, value in sorted(whole[name].items())
            }
    engine.states.bring_home()


def _own(engine: Engine, bucket: Bucket, i: int, whole: State, param: Tensor) -> State:
    parameter, group = bucket.parameters[i], engine.groups[bucket.group]
    position = engine.grid_of_bucket(bucket).position
    held = engine.states.owned(bucket, i)
    mine = [s for s in bucket.owned(position) if s.parameter == i]
    device = compute_device(param)
    kept: State = {}
    for key in sorted(whole):  # sorted: a DTensor's whole is a collective
        value = whole[key]
        if is_shaped(key):
            part = value if held is None else part_of(_full(value), held, key)
            where = engine.states.home_device(param, key)
            if part is not None:
                kept[key] = (
                    as_parameter(part, param, parameter.storage, key, where)
                    if held is None
                    else part.to(where, copy=True)
                )
        elif "." not in key:
            kept[key] = value.detach().to("cpu" if key == "rounds" else param.device, copy=True)
        else:
            value = _full(value)
            name, u = key.rsplit(".", 1)
            parts = []
            for owned_region in mine:
                place = owned_region.local_index(int(u))
                if place is None:
                    continue
                like = _matrix_view_like(engine, owned_region.matrix_views[place].shape, group, param)[name]
                parts.append(value[_matrix_view_place(bucket, owned_region, place, value.shape, like.shape)])
                on_host = like.device.type == "cpu" or engine.offload is not None
                device = torch.device("cpu") if on_host else compute_device(param)
            if parts:
                kept[key] = torch.cat(parts).to(device, copy=True)
    return kept


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def as_parameter(
    value: Tensor, param: Tensor, storage: Storage, key: str = "", device: torch.device | None = None
) -> Tensor:
    """Elementwise state laid out as its parameter is, from a whole tensor or from one that is laid out already.

    Args:
        key: of the entry.
        device: where it is to lie; ``None`` for where the parameter does.
    """
    device = param.device if device is None else device
    if isinstance(param, Partition):
        start, stop = param.span
        return _full(value).detach().reshape(-1)[start:stop].to(device, copy=True)
    if not isinstance(param, DTensor):
        return _full(value).detach().to(device, copy=True)
    if isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh and tuple(value.placements) == tuple(param.placements):
            local = value.to_local()
        else:
            local = _cut(value.full_tensor(), storage, param, key)
    else:
        local = _cut(value, storage, param, key)
    return laid_out(local.detach().to(device, copy=True), param, shape_of_entry(key, param.shape))


def _cut(whole: Tensor, storage: Storage, param: DTensor, key: str) -> Tensor:
    shard = 0
    if storage.shards > 1:
        rank = dist.get_rank()
        (shard,) = {row.index(rank) for row in storage.ranks if rank in row}
    if is_scale(key):  # a row for each of the parameter's, which is cut by rows
        rows = [whole[slice(*region[0])] for region, _ in storage.held(shard)]
        return torch.cat(rows) if rows else whole[:0]
    return storage.local_part(whole, shard)
