"""AdamW's step of everything that is no matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from hf_emopt.distributed.assignment import MAX_BUCKET_NUMEL
from hf_emopt.distributed.layout import local_tensors
from hf_emopt.distributed.plan import Bucket
from hf_emopt.engine.bucket_view import AUX_PIECES, gradients, home_states, lent_states, owned_parts
from hf_emopt.engine.buckets import _gather
from hf_emopt.engine.elementwise import Part
from hf_emopt.engine.engine import Engine
from hf_emopt.engine.pipeline import Task
from hf_emopt.formats.master_weights import needs_master
from hf_emopt.formats.rounding_noise import moment_noise, weight_noise
from hf_emopt.rules.adamw import adamw_step
from hf_emopt.rules.base import Group, state_dtype
from hf_emopt.state.placement import compute_device, is_offloaded

__all__ = ["step_aux_bucket", "step_own_aux"]


# ---------------------------------------------------------------------- everything else


def step_aux_bucket(engine: Engine, index: int, bucket: Bucket, present: Sequence[int], group: Group) -> Task:
    """AdamW on replicated parameters: each rank steps the rows that it owns and passes the weights on."""
    grid, watch = engine.grid_of_bucket(bucket), engine.watch
    params = [engine.parameter(bucket, i) for i in present]
    chosen = set(present)
    owned = [s for s in bucket.owned(grid.position) if s.parameter in chosen]
    ok = engine.ok_on(params[0].device)
    mine = {s.parameter for s in owned}
    engine.count_step([engine.states.of(bucket, i) for i in present if i not in mine], ok)
    generator = weight_noise(index, group, params[0].device, grid.position)
    noise = moment_noise(index, group, params[0].device, grid.position, AUX_PIECES)
    home = home_states(engine, bucket, sorted(mine))
    names = [bucket.parameters[s.parameter].name for s in owned]
    exchange = engine.exchange(bucket, present, exact=True)
    if watch is not None:
        watch.others([(bucket.parameters[i].name, bucket.parameters[i].numel) for i in present], group)
    with lent_states(engine, ("aux", index), bucket, home, lambda key: True, group, ok, noise) as lent:
        parts = owned_parts(engine, bucket, owned, lent)
        if parts:
            weights, grads, states = [p.weight for p in parts], [p.grad for p in parts], [p.state for p in parts]
            with nullcontext() if watch is None else watch.adamw(names, weights, states, group):
                adamw_step(weights, grads, states, group, ok, generator)
        parts = [Part(p.weight, p.grad, {}) for p in parts]
    yield from _gather(engine, [p.weight for p in parts], params, exchange)


def step_own_aux(engine: Engine, group_index: int, group: Group, present: frozenset[str]) -> list[Task]:
    """AdamW on a group's parameters with these names, where each rank steps what it holds."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, param in zip(group["param_names"], group["params"]):
        if name in present and param.grad is not None:
            alike[param.device, param.dtype].append(param)
    copied = engine.offload is not None or group["state_dtype"] != "float32"
    tasks: list[Task] = []
    for members in alike.values():
        bounded = copied or needs_master(members[0]) or is_offloaded(members[0])
        for params in _chunks(members, MAX_BUCKET_NUMEL) if bounded else [members]:
            tasks.append(_step_own_parts(engine, group_index, group, params, len(tasks)))
    return tasks


def _step_own_parts(engine: Engine, group_index: int, group: Group, params: list[Tensor], number: int) -> Task:
    device = compute_device(params[0])
    states = engine.states.elementwise((group_index, number), params, group)
    held = zip(local_tensors(params), gradients(params), states)
    fetched = engine.fetch(params, [Part(weight, grad, state) for weight, grad, state in held], ("step",))
    if fetched.early:
        yield
    parts = fetched.wait()
    weights, grads, states = [p.weight for p in parts], [p.grad for p in parts], [p.state for p in parts]
    watch = engine.watch
    ok, generator = engine.ok_on(device), weight_noise(group_index, group, device)
    noise = moment_noise(group_index, group, device, 0, AUX_PIECES + 1 + number)
    args = (device, lambda key: True, state_dtype(params[0]), group, ok, noise, fetched.early)
    with (
        engine.states.lender.lent(("own", group_index, number), states, *args) as lent,
        nullcontext() if watch is None else watch.own(group, params, weights, lent),
    ):
        adamw_step(weights, grads, lent, group, ok, generator)
    fetched.store()


def _chunks(params: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Runs of parameters of bounded size, so that copies of 16-bit weights or of state never all exist at once."""
    chunks: list[list[Tensor]] = [[]]
    size = 0
    for param in params:
        if chunks[-1] and size + param.numel() > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(param)
        size += param.numel()
    return chunks
