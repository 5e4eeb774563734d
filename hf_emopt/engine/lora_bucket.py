"""The step of a bucket of LoRA pairs: both factors of an adapter to one owner, and one update for the two.

Beside the momentum of a factor its weight has to come to the owner, since the one factor is the measure of the other. Where
ranks hold parameters whole (DDP) it is there; shards (FSDP2, ZeRO) are sent. Adapters are small, so nothing is overlapped but
the collectives of a bucket with other buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_emopt.distributed.layout import is_sharded, local_tensor
from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.engine.bucket_view import Workplace
from hf_emopt.engine.elementwise import Passes
from hf_emopt.engine.engine import Engine
from hf_emopt.engine.matrix_bucket import bucket_exchange, conclude
from hf_emopt.engine.pipeline import Task
from hf_emopt.formats.rounding_noise import moment_noise
from hf_emopt.routing.lora import Adapter
from hf_emopt.routing.packing import adapter_at
from hf_emopt.rules.base import Group, state_dtype
from hf_emopt.rules.lora_pairs import Factor
from hf_emopt.state.placement import compute_device

__all__ = ["step_pair_bucket"]

State = dict[str, Tensor]


@dataclass(frozen=True)
class _Job:
    """A pair by the places of its owned regions: the factor that does not start at zero, and the one that does."""

    still: int
    starting: int
    adapter: Adapter


def step_pair_bucket(engine: Engine, index: int, bucket: Bucket, present: Sequence[int], group: Group) -> Task:
    """The step of a bucket whose parameters are pairs of factors.

    Args:
        engine: whose rule, state and grids are used.
        index: of the bucket in the plan.
        present: indices of the bucket's parameters with a gradient.
        group: hyperparameters as they are to be applied; its weight decay is the product's, so each factor gets half.

    Raises:
        RuntimeError: when one factor of a pair has a gradient and the other has none.
    """
    _check_complete(bucket, present)
    params, watch = [engine.parameter(bucket, i) for i in present], engine.watch
    states = [engine.states.of(bucket, i) for i in present]
    chosen = set(present)
    owned = [s for s in bucket.owned(engine.grid_of_bucket(bucket).position) if s.parameter in chosen]
    device = compute_device(params[0])
    place = Workplace(engine, index, bucket, present, owned)
    if place.early:
        yield
    place.wait()
    ok = engine.ok_on(device)
    exchange = bucket_exchange(engine, bucket, present)
    with place.lent_moments(group, ok) as lent:
        parts = place.parts(lent)
        passes = Passes(engine.rule, parts, _halved_decay(group), ok)
        messages = [m for m in place.apart(passes.messages(), lent) if m is not None]
        if watch is not None:
            watch.held(engine, bucket, present, owned, parts)
    if exchange is not None and exchange.travels:  # sharded
        whole = engine.exchange(bucket, present, exact=True)
        arrivals = exchange.send(messages), whole.send([part.weight for part in parts])
        yield
        wide = [state_dtype(engine.parameter(bucket, s.parameter)) for s in owned]
        messages, weights = (
            [torch.empty(s.shape, dtype=dtype, device=device) for s, dtype in zip(owned, wide)] for _ in arrivals
        )
        exchange.receive(arrivals[0], messages)
        whole.receive(arrivals[1], weights)
    else:
        row = {i: k for k, i in enumerate(present)}
        if is_sharded(params[0]):  # and on one rank, which has all of each
            messages = [messages[row[s.parameter]].view(s.shape) for s in owned]
            weights = [parts[row[s.parameter]].weight.view(s.shape) for s in owned]
        else:
            weights = [local_tensor(params[row[s.parameter]]) for s in owned]
        messages = [m.to(device) for m in messages]
        weights = [w.to(device, m.dtype) for w, m in zip(weights, messages)]
    updates = _updates(engine, index, bucket, owned, messages, weights, group)
    if watch is not None:
        watch.bucket(engine, bucket, group, present, [1] * len(present), owned, updates, [1.0] * len(owned))
    engine.count_step(states, engine.ok_on(states[0]["step"].device))
    everyone = list(range(len(present)))
    yield from conclude(engine, index, bucket, present, passes, owned, updates, [1.0] * len(owned), everyone, place)
    place.store()


def _halved_decay(group: Group) -> Group:
    """The group with half its weight decay: the product then decays by ``lr weight_decay`` as a whole matrix does."""
    return {**group, "weight_decay": group["weight_decay"] / 2}


def _check_complete(bucket: Bucket, present: Sequence[int]) -> None:
    here = {bucket.parameters[i].name for i in present}
    factors: dict[str, list[str]] = defaultdict(list)
    for parameter in bucket.parameters:
        factors[parameter.pair].append(parameter.name)
    for names in factors.values():
        missing = [name for name in names if name not in here]
        if missing and len(missing) < len(names):
            alone = next(name for name in names if name in here)
            raise RuntimeError(
                f"lora='joint' steps both factors of an adapter together, and in this step {alone} has a gradient and "
                f"{missing[0]} has none: train or freeze both, or use lora='separate'"
            )


def _updates(
    engine: Engine,
    index: int,
    bucket: Bucket,
    owned: Sequence[OwnedRegion],
    messages: Sequence[Tensor],
    weights: Sequence[Tensor],
    group: Group,
) -> list[Tensor]:
    """The update of each owned region, both of a pair from one call, and pairs of one shape in one batch."""
    for b, batch in enumerate(engine.batches(index, bucket)):  # makes the state of whole factors
        engine.states.of_batch((index, b), bucket, batch, engine.groups[bucket.group])
    place = {bucket.parameters[s.parameter].name: k for k, s in enumerate(owned)}
    alike: dict[tuple[object, ...], list[_Job]] = defaultdict(list)
    for k in place.values():
        planned = bucket.parameters[owned[k].parameter]
        adapter = adapter_at(engine.groups[bucket.group], planned.position)
        assert adapter is not None
        if adapter.zero_init:
            other = place[adapter.partner]
            key = (adapter.side, owned[k].matrix_views[0].shape[1:], owned[other].matrix_views[0].shape[1:])
            alike[key].append(_Job(other, k, adapter))
    updates: list[Tensor] = [torch.empty(0)] * len(owned)
    if not owned:
        return updates
    present = [s.parameter for s in owned]
    kept = {s.parameter: _matrix_state(engine, bucket, s) for s in owned}
    ok, noise = engine.ok_on(messages[0].device), moment_noise(index, group, messages[0].device, 0, 1)
    args = (list(kept.values()), messages[0].device, lambda name: True, state_dtype(messages[0]), group, ok, noise)
    with engine.states.lender.lent(("pairs", index), *args) as lent:
        states = dict(zip(kept, lent))
        for kind, jobs in alike.items():
            like = messages[jobs[0].starting]
            # Kept, since to bring numbers to a device makes the host wait for it.
            scaling = engine.kept(f"scaling {kind}", index, present, partial(_scalings, jobs, owned, like))
            _update_batch(engine, states, owned, messages, weights, group, jobs, scaling, updates)
    return updates


def _scalings(jobs: Sequence[_Job], owned: Sequence[OwnedRegion], like: Tensor) -> Tensor:
    """What the model multiplies each product by, ``(N, 1, 1)``."""
    counts = [owned[job.starting].matrix_views[0].shape[0] for job in jobs]
    values = [job.adapter.scaling for job, count in zip(jobs, counts) for _ in range(count)]
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def _update_batch(
    engine: Engine,
    states: dict[int, State],
    owned: Sequence[OwnedRegion],
    messages: Sequence[Tensor],
    weights: Sequence[Tensor],
    group: Group,
    jobs: Sequence[_Job],
    scaling: Tensor,
    updates: list[Tensor],
) -> None:
    """Fills in the updates of pairs of one shape."""
    counts = [owned[job.starting].matrix_views[0].shape[0] for job in jobs]
    sides = [job.still for job in jobs], [job.starting for job in jobs]
    factors: list[Factor] = []
    views: list[tuple[State, list[State]]] = []
    for places in sides:
        own = [states[owned[k].parameter] for k in places]
        state = {name: torch.cat([s[name] for s in own]) for name in own[0]}
        views.append((state, own))
        weight, message = (
            torch.cat([owned[k].matrix_views[0].extract(t[k]) for k in places]) for t in (weights, messages)
        )
        factors.append(Factor(weight, message, state))
    shape = jobs[0].adapter.outputs, jobs[0].adapter.inputs
    still, starting = factors
    results = engine.rule.transform_pair(still, starting, scaling, shape, group, engine.ok_on(scaling.device))
    engine.transform_count += sum(counts)
    for places, result, (state, own) in zip(sides, results, views):
        for part, k in zip(result.split(counts), places):
            updates[k] = torch.empty(owned[k].shape, dtype=part.dtype, device=part.device)
            owned[k].matrix_views[0].insert(updates[k], part)
        for name, value in state.items():
            for view, s in zip(value.split(counts), own):
                s[name].copy_(view)


def _matrix_state(engine: Engine, bucket: Bucket, owned_region: OwnedRegion) -> State:
    """State of the one matrix view of an owned region, as views of where it is kept."""
    state: State = engine.state[engine.parameter(bucket, owned_region.parameter)]
    return {name.removesuffix(".0"): value for name, value in state.items() if name.endswith(".0")}
