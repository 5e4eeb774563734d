"""Owners' state: gathered for a checkpoint, and distributed after one is loaded.

Whole state is a dictionary by parameter name with the tensors of a single process: elementwise state shaped like the
parameter, matrix state with one row for each matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_emopt.distributed.first_step_checks import control_device
from hf_emopt.distributed.layout import Partition, Storage, chunk_regions, compute_device, storage_of, whole_shape
from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.engine.context import StepContext
from hf_emopt.formats.moments import is_scale
from hf_emopt.rules.base import Group
from hf_emopt.state.forms import copied, elementwise_state, is_foreign, laid_out, matrix_state, part_of, shape_of_entry
from hf_emopt.state.keys import is_count, is_shaped

State = dict[str, Any]

_SPREAD_NUMEL = 2**12


def _planned(context: StepContext) -> Iterator[tuple[Bucket, int, str]]:
    """Every parameter of the plans: its bucket, its index there, its name."""
    for plan in (context.plan, context.aux_plan):
        for bucket in plan.buckets:
            for i, parameter in enumerate(bucket.parameters):
                yield bucket, i, parameter.name


def materialize(context: StepContext) -> None:
    """Makes all missing state, as it is before a first step, with the same keys on every rank.

    ``torch.distributed.checkpoint`` asks for an entry of every trainable parameter on every rank, and looks for the keys of
    ``optimizer.state`` in a file. So an entry that another rank owns is an empty tensor here.
    """
    for plan in (context.plan, context.aux_plan):
        for index, bucket in enumerate(plan.buckets):
            group = context.groups[bucket.group]
            for i in range(len(bucket.parameters)):
                state = context.store.of(bucket, i)
                if plan is context.plan and context.rule.scheduled:
                    state.setdefault("rounds", torch.zeros((), dtype=torch.int64, device="cpu"))
            if plan is context.plan:
                for b, batch in enumerate(context.batches(index, bucket)):
                    context.store.of_batch((index, b), bucket, batch, group)
            if bucket.storage.world_size > 1:
                for i in range(len(bucket.parameters)):
                    state = context.store.of(bucket, i)
                    for key in _start(context, bucket, i, _meta(context.parameter(bucket, i))):
                        state.setdefault(key, torch.empty(0, dtype=torch.float32, device="cpu"))
    planned = {name for _, _, name in _planned(context)}
    for group, params in zip(context.groups, context.params):
        for name, param in zip(group["param_names"], params):
            if name not in planned:
                context.store.ready(param, group)


def _meta(param: Tensor) -> Tensor:
    """A tensor of the whole parameter's shape, without memory."""
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _start(context: StepContext, bucket: Bucket, i: int, like: Tensor) -> State:
    """The whole initial state of a parameter, on the device of ``like``: a tensor of its shape and dtype."""
    group, matrix_view_like = context.groups[bucket.group], torch.empty(0, dtype=like.dtype, device=like.device)
    result = elementwise_state(context.rule, group, like, like.shape)
    if group["kind"] == "matrix":
        for u, matrix_view in enumerate(bucket.parameters[i].matrix_views):
            state = matrix_state(context.rule, group, matrix_view.shape, matrix_view_like)
            result |= {f"{name}.{u}": value for name, value in state.items()}
    return result


def fresh(context: StepContext) -> dict[str, State]:
    """Whole state as it is before a first step, on the host, of every parameter whose owners hold the state."""
    result: dict[str, State] = {}
    for bucket, i, name in _planned(context):
        if context.store.owned(bucket, i) is not None:
            whole = _start(context, bucket, i, context.parameter(bucket, i).detach().cpu())
            counts = {k: torch.zeros_like(v) for k, v in context.store.of(bucket, i).items() if is_count(k)}
            result[name] = whole | counts | _foreign(context, bucket, i)
    return result


def gathered(context: StepContext, keep: bool = True, without: Container[str] = ()) -> dict[str, State]:
    """Collective: whole state on the host, by name; empty without ``keep``, on a rank that only takes part."""
    materialize(context)
    result: dict[str, State] = {}
    for bucket, i, name in _planned(context):
        if name in without:
            continue
        owned, group = context.store.owned(bucket, i) is not None, context.groups[bucket.group]
        whole: State = {
            key: value.detach().to("cpu", copy=True)
            for key, value in context.store.of(bucket, i).items()
            if is_count(key) or (is_shaped(key) and not owned and not is_foreign(context.rule, group, key))
        } | _foreign(context, bucket, i)
        if owned:
            whole |= _whole_shaped(context, bucket, i, keep)
        whole |= _whole_matrix_state(context, bucket, i, lambda t: t.to("cpu", copy=True) if keep else None)
        result[name] = whole
    return result if keep else {}


def _foreign(context: StepContext, bucket: Bucket, i: int) -> State:
    """What other tools keep of a parameter, as this rank has it, on the host."""
    rule, group, host = context.rule, context.groups[bucket.group], torch.device("cpu")
    return {k: copied(v, host) for k, v in context.store.of(bucket, i).items() if is_foreign(rule, group, k)}


def _whole_shaped(context: StepContext, bucket: Bucket, i: int, keep: bool) -> State:
    """Collective: elementwise state of a parameter, from the parts of its owners."""
    param, group = context.parameter(bucket, i), context.groups[bucket.group]
    expected = elementwise_state(context.rule, group, _meta(param), param.shape)
    state = context.store.state[param]
    mine = context.store.owned(bucket, i) or []
    result: State = {}
    for key, like in sorted(expected.items()):
        whole = torch.empty(like.shape, dtype=like.dtype, device=param.device)
        offset = 0
        for owned_region in (s for s in bucket.owned_regions if s.parameter == i):
            region = owned_region.region[:1] if is_scale(key) else owned_region.region
            where = tuple(slice(a, b) for a, b in region)
            size = owned_region.shape[owned_region.dim] if owned_region.shape else 0
            part = None
            if owned_region in mine:
                part = state[key].narrow(owned_region.dim, offset, size) if state[key].ndim else state[key]
                offset += size
            whole[where] = _from_owner(context, bucket, owned_region, part, whole[where])
        if keep:
            result[key] = whole.cpu()
    return result


def _whole_matrix_state(context: StepContext, bucket: Bucket, i: int, use: Callable[[Tensor], Any]) -> State:
    """Collective: matrix state of one parameter, one tensor at a time on all ranks, each handed to ``use``."""
    parameter, group = bucket.parameters[i], context.groups[bucket.group]
    param = context.parameter(bucket, i)
    state = context.store.state.get(param, {})
    result: State = {}
    for u, matrix_view in enumerate(parameter.matrix_views):
        for name, like in sorted(_matrix_view_like(context, matrix_view.shape, group, param).items()):
            device = torch.device("cpu") if like.device.type == "cpu" else compute_device(param)
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
            offset = 0
            present = f"{name}.{u}" in state
            for owned_region in (s for s in bucket.owned_regions if s.parameter == i and not s.copy):
                place = owned_region.local_index(u)
                if place is None:
                    continue
                shape = _matrix_view_like(context, owned_region.matrix_views[place].shape, group, param)[name].shape
                where = _matrix_view_place(bucket, owned_region, place, like.shape, shape)
                part = None
                if owned_region.owner == context.ranks.grid(bucket).position and present:
                    part = state[f"{name}.{u}"][offset : offset + shape[0]]
                    offset += shape[0]
                whole[where] = _from_owner(context, bucket, owned_region, part, whole[where])
            result[f"{name}.{u}"] = use(whole)
    return result


def has_matrix_state(context: StepContext) -> bool:
    """Whether any matrix has matrix state."""
    return any(
        _matrix_view_like(context, matrix_view.shape, context.groups[bucket.group], context.parameter(bucket, i))
        for bucket in context.plan.buckets
        for i, parameter in enumerate(bucket.parameters)
        for matrix_view in parameter.matrix_views
    )


def sharded_matrix_state(context: StepContext) -> dict[str, State]:
    """Collective: matrix state of sharded parameters, as DTensors on the parameter's mesh, by parameter name."""
    result: dict[str, State] = {}
    for bucket in context.plan.buckets:
        for i, parameter in enumerate(bucket.parameters):
            param = context.parameter(bucket, i)
            if "step" in context.store.state.get(param, {}) and isinstance(param, DTensor):
                result[parameter.name] = _whole_matrix_state(context, bucket, i, partial(_spread, like=param))
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


def _matrix_view_like(
    context: StepContext, shape: tuple[int, int, int], group: Group, param: Tensor
) -> dict[str, Tensor]:
    """Matrix state of a shape without memory. State that the rule keeps on the host is on the host."""
    return matrix_state(context.rule, group, shape, torch.empty(0, dtype=param.dtype, device="meta"))


def _matrix_view_place(
    bucket: Bucket, owned_region: OwnedRegion, place: int, whole: Sequence[int], part: Sequence[int]
) -> tuple[slice, ...]:
    """Index of the state of an owned region's matrix view in that of the parameter."""
    cut, parameter = owned_region.slicing(place), bucket.parameters[owned_region.parameter]
    if cut is not None and cut.compute_group:  # along the dimension that differs, if any does
        start, stop = cut.spans[cut.compute_group.index(owned_region.owner)]
        return tuple(slice(None) if a == b else slice(start, stop) for a, b in zip(whole, part))
    per_row = parameter.matrix_views[owned_region.index(place)].shape[0] // max(1, parameter.rows)
    first = owned_region.region[0][0] // parameter.row_numel * per_row if part[0] != whole[0] else 0
    return (slice(first, first + part[0]),)


def _from_owner(
    context: StepContext, bucket: Bucket, owned_region: OwnedRegion, part: Tensor | None, like: Tensor
) -> Tensor:
    """Broadcasts an owned region's part, of the form of ``like``, from its owner."""
    grid = context.ranks.grid(bucket)
    if grid.world_size == 1:
        assert part is not None
        return part
    # The group of all ranks where it serves: its timeout is the job's own, and ranks are far apart before a checkpoint.
    everyone = grid.world_size == dist.get_world_size(context.ranks.consensus.group)
    one = grid.shard_group if grid.replicas == 1 else grid.replica_group if grid.shards == 1 else None
    group = context.ranks.consensus.group if everyone or one is None else one
    wire = control_device(group)
    value = torch.empty(like.shape, dtype=like.dtype, device=wire) if part is None else part.to(wire).contiguous()
    # As bytes, since backends support different dtypes.
    sent = value.view(torch.uint8) if value.ndim else value
    dist.broadcast(sent, src=bucket.storage.rank(owned_region.owner), group=group)
    return value.to(like.device)


def keep_owned(context: StepContext, whole: dict[str, State]) -> None:
    """Puts whole state into the store, each rank its own part of it."""
    planned: set[str] = set()
    for bucket, i, name in _planned(context):
        if whole.get(name):
            param = context.parameter(bucket, i)
            context.store.state[param] = _own(context, bucket, i, whole[name], param)
            planned.add(name)
    for group in context.groups:
        for name, param in zip(group["param_names"], group["params"]):
            if name in planned or not whole.get(name):
                continue
            storage = storage_of(param, context.ranks.grids[name])
            context.store.state[param] = {
                key: _as_it_is(value, param, storage)
                if is_foreign(context.rule, group, key)
                else _as_parameter(value, param, storage, key, context.store.kept_device(param, key))
                if is_shaped(key)
                else value.detach().to("cpu" if key == "rounds" else param.device, copy=True)
                for key, value in sorted(whole[name].items())
            }
    context.store.move_to_host()


def _own(context: StepContext, bucket: Bucket, i: int, whole: State, param: Tensor) -> State:
    parameter, group = bucket.parameters[i], context.groups[bucket.group]
    held = context.store.owned(bucket, i)
    mine = [s for s in bucket.owned(context.ranks.grid(bucket).position) if s.parameter == i]
    kept: State = {}
    for key in sorted(whole):  # sorted: a DTensor's whole is a collective
        value = whole[key]
        if is_foreign(context.rule, group, key):
            kept[key] = _as_it_is(value, param, parameter.storage)
        elif is_shaped(key):
            where = context.store.kept_device(param, key)
            if held is None:
                kept[key] = _as_parameter(value, param, parameter.storage, key, where)
            elif (part := part_of(_full(value), held, key)) is not None:
                kept[key] = part.to(where, copy=True)
        elif "." not in key:
            kept[key] = value.detach().to("cpu" if key == "rounds" else param.device, copy=True)
        else:
            value = _full(value)
            name, u = key.rsplit(".", 1)
            parts, device = [], compute_device(param)
            for owned_region in mine:
                place = owned_region.local_index(int(u))
                if place is None:
                    continue
                like = _matrix_view_like(context, owned_region.matrix_views[place].shape, group, param)[name]
                parts.append(value[_matrix_view_place(bucket, owned_region, place, value.shape, like.shape)])
                if like.device.type == "cpu" or context.store.offload is not None:
                    device = torch.device("cpu")
            if parts:
                kept[key] = torch.cat(parts).to(device, copy=True)
    return kept


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _as_it_is(value: Any, param: Tensor, storage: Storage) -> Any:
    """What another tool keeps: laid out as the parameter where it has its shape, else unchanged."""
    if isinstance(value, Tensor) and tuple(value.shape) == whole_shape(param):
        return _as_parameter(value, param, storage, "", param.device)
    return copied(value, param.device)


def _as_parameter(value: Tensor, param: Tensor, storage: Storage, key: str, device: torch.device) -> Tensor:
    """Elementwise state laid out as its parameter is, from a whole tensor or from one that is laid out already."""
    if isinstance(param, Partition):
        start, stop = param.span
        return _full(value).detach().reshape(-1)[start:stop].to(device, copy=True)
    if not isinstance(param, DTensor):
        return _full(value).detach().to(device, copy=True)
    layout = (param.device_mesh, tuple(param.placements))
    if isinstance(value, DTensor) and (value.device_mesh, tuple(value.placements)) == layout:
        local = value.to_local()
    else:
        local = _cut(_full(value), storage, key)
    return laid_out(local.detach().to(device, copy=True), param, shape_of_entry(key, param.shape))


def _cut(whole: Tensor, storage: Storage, key: str) -> Tensor:
    shard = 0
    if storage.shards > 1:
        rank = dist.get_rank()
        (shard,) = {row.index(rank) for row in storage.ranks if rank in row}
    if is_scale(key):  # a row for each of the parameter's, which is cut by rows
        rows = [whole[slice(*region[0])] for region, _ in storage.held(shard)]
        return torch.cat(rows) if rows else whole[:0]
    return storage.local_part(whole, shard)
