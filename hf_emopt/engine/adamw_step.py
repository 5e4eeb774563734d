"""AdamW's step of the parameters that hold no matrix."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hf_emopt.distributed.assignment import MAX_BUCKET_NUMEL
from hf_emopt.distributed.layout import compute_device, is_offloaded, local_gradients, local_tensors
from hf_emopt.engine.bucket_members import BucketMembers
from hf_emopt.engine.bucket_step import all_gather_weights, owned_slices
from hf_emopt.engine.context import Step, Task
from hf_emopt.engine.cpu_params import ParamSlice, fetch
from hf_emopt.formats.master_weights import LOW_DTYPES
from hf_emopt.formats.rounding_noise import moment_noise, weight_noise
from hf_emopt.rules.adamw import adamw_step
from hf_emopt.rules.base import state_dtype
from hf_emopt.state.store import SwapIn

_PIECES = 2**16
"""The first number of AdamW's pieces of state; smaller numbers belong to batches of matrices."""


def step_adamw_bucket(step: Step, members: BucketMembers) -> Task:
    """AdamW on parameters that ranks hold copies of: each rank steps the rows that it owns and sends the weights."""
    context, index, bucket, device = step.context, members.index, members.bucket, members.device
    group, ok, position = step.groups[bucket.group], step.verdict.on(device)[0], members.grid.position
    mine = sorted({s.parameter for s in members.owned})
    others = [context.store.of(bucket, i)["step"] for i in members.present if i not in mine]
    if others:
        torch._foreach_add_(others, [step.verdict.on(others[0].device)[1]] * len(others))
    if step.observer is not None:
        planned = [bucket.parameters[i] for i in members.present]
        step.observer.others([(p.name, p.numel) for p in planned], group)
    kept = [context.store.local(bucket, i) for i in mine]
    noise = moment_noise(index, group, device, position, _PIECES)
    request = SwapIn(("aux", index), device, members.dtype, ok=ok, noise=noise, on_device=members.on_host)
    with context.store.swapped_in(kept, group, request) if kept else nullcontext(kept) as states:
        slices = owned_slices(members, dict(zip(mine, states)))
        weights = [s.weight for s in slices]
        if slices:
            entries = [s.state for s in slices]
            names = [bucket.parameters[s.parameter].name for s in members.owned]
            observed = nullcontext() if step.observer is None else step.observer.adamw(names, weights, entries, group)
            with observed:
                generator = weight_noise(index, group, device, position)
                adamw_step(weights, [s.grad for s in slices], entries, group, ok, generator)
        del slices
    exchange = members.exact_exchange
    if step.observer is not None:
        exchange = step.observer.stopwatch.exchange(exchange)
    yield from all_gather_weights(step, members, exchange, weights)


def local_adamw_tasks(step: Step, names: frozenset[str]) -> list[Task]:
    """AdamW on the parameters with these names, each rank on its own part."""
    tasks: list[Task] = []
    copied = step.context.store.offload is not None
    for index, group in enumerate(step.groups):
        if group["kind"] != "aux":
            continue
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for name, param in zip(group["param_names"], group["params"]):
            if name in names and param.grad is not None:
                alike[param.device, param.dtype].append(param)
        chunks: list[list[Tensor]] = []
        for members in alike.values():
            first = members[0]
            bounded = copied or group["state_dtype"] != "float32" or first.dtype in LOW_DTYPES or is_offloaded(first)
            chunks += _chunks(members, MAX_BUCKET_NUMEL) if bounded else [members]
        tasks += [_step_locally(step, index, params, number) for number, params in enumerate(chunks)]
    return tasks


def _step_locally(step: Step, group_index: int, params: list[Tensor], number: int) -> Task:
    context, group, device = step.context, step.groups[group_index], compute_device(params[0])
    kept = context.store.elementwise((group_index, number), params, group)
    weights, grads = local_tensors(params), local_gradients(params)
    fetched = None
    if is_offloaded(params[0]):
        fetched = fetch(context, params, [ParamSlice(*each) for each in zip(weights, grads, kept)], ("step",))
        yield
        slices = fetched.wait()
        weights, grads, kept = [s.weight for s in slices], [s.grad for s in slices], [s.state for s in slices]
    ok, generator = step.verdict.on(device)[0], None
    if group["low_precision_weights"] == "stochastic":
        generator = weight_noise(group_index, group, device)
    swapped_in: AbstractContextManager[list[dict[str, Tensor]]] = nullcontext(kept)
    if not context.store.is_direct(group, fetched is not None):
        noise = moment_noise(group_index, group, device, 0, _PIECES + 1 + number)
        key, dtype = ("own", group_index, number), state_dtype(params[0])
        request = SwapIn(key, device, dtype, ok=ok, noise=noise, on_device=fetched is not None)
        swapped_in = context.store.swapped_in(kept, group, request)
    with swapped_in as states, step.observer.own(group, params, weights, states) if step.observer else nullcontext():
        adamw_step(weights, grads, states, group, ok, generator)
    if fetched is not None:
        fetched.store()


def _chunks(params: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Parameters in lists of bounded size, so that copies of 16-bit weights or of state never exist all at once."""
    chunks: list[list[Tensor]] = [[]]
    size = 0
    for param in params:
        if chunks[-1] and size + param.numel() > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(param)
        size += param.numel()
    return chunks
