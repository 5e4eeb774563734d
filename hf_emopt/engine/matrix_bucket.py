"""One step of a plan: the three phases of every bucket, and between them the exchange.

The step of a bucket is a generator. It yields where it has started a collective and could wait; :func:`pipeline` goes on
with other buckets meanwhile, always in the same order on every rank. Where nothing has to travel it never yields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Exchange, Stacks
from hf_emopt.distributed.layout import is_sharded, local_tensor, local_tensors
from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.engine.bucket_view import Workplace
from hf_emopt.engine.buckets import _gather
from hf_emopt.engine.elementwise import Part, Passes
from hf_emopt.engine.engine import Engine
from hf_emopt.engine.pipeline import Task
from hf_emopt.engine.transform import Roster, Transform
from hf_emopt.formats.master_weights import needs_master
from hf_emopt.formats.rounding_noise import weight_noise
from hf_emopt.kernels.multi_tensor import Runs, contiguous_run
from hf_emopt.rules.adamw import apply_updates
from hf_emopt.rules.base import Group

__all__ = ["bucket_exchange", "conclude", "step_bucket"]


# ---------------------------------------------------------------------- matrices


def step_bucket(engine: Engine, index: int, bucket: Bucket, present: Sequence[int], group: Group) -> Task:
    """The step of a bucket of matrices.

    Args:
        engine: whose rule, state and grids are used.
        index: of the bucket in the plan.
        present: indices of the bucket's parameters with a gradient.
        group: hyperparameters as they are to be applied.
    """
    grid, watch = engine.grid_of_bucket(bucket), engine.watch
    roster = engine.kept("roster", index, present, lambda: Roster(engine, index, bucket, present))
    owned, row, stacks = roster.owned, roster.row, roster.stacks
    place = Workplace(engine, index, bucket, present, owned)
    params, states = place.params, place.states
    rounds = [engine.next_round(state) for state in states] if engine.rule.scheduled else [1] * len(present)
    sharded = is_sharded(params[0])  # state lies as the parameter does, also where there is but one shard
    if place.early:
        yield
    place.wait()
    ok = engine.ok_on(place.device)
    exchange, homes = bucket_exchange(engine, bucket, present), None
    transform = Transform(engine, index, bucket, roster, group, {i: rounds[k] for i, k in row.items()}, place.device)
    if sharded and exchange is not None and exchange.travels:
        with place.lent_moments(group, ok) as lent:
            parts = place.parts(lent)
            passes = Passes(engine.rule, parts, group, ok)
            arrival = passes.send(exchange)
            if watch is not None:
                watch.held(engine, bucket, present, owned, parts)
        yield
        targets = transform.make_room(params[0], exchange.dtype)
        exchange.receive(arrival, targets, stacks)
        stacked = transform.filled(targets)
    else:
        with place.lent_moments(group, ok) as lent:
            parts = place.parts(lent)
            passes = Passes(engine.rule, parts, group, ok)
            shard = grid.shard if sharded else None
            homes = engine.kept("homes", index, present, lambda: _homes(bucket, roster, shard, parts))
            targets = transform.make_room(params[0]) if passes.possible(homes) else []
            if targets and passes.fill(homes, targets):
                stacked = transform.filled(targets)
            else:
                messages = passes.messages()
                if sharded:
                    messages = [messages[row[s.parameter]][_within(s, bucket, grid.shard)] for s in owned]
                stacked = place.apart(transform.stack(messages), lent)
            if watch is not None:
                watch.held(engine, bucket, present, owned, parts)
    updates = transform.run(stacked, watch)
    if watch is not None:
        apart = updates if stacks is None else stacks.apart(updates)
        watch.bucket(engine, bucket, group, present, rounds, owned, apart, transform.scales)
        watch.matrices(bucket, transform, apart)
    engine.count_step(states, engine.ok_on(states[0]["step"].device))
    warmup = engine.rule.warmup_steps(group)
    moving = [k for k in range(len(present)) if rounds[k] > warmup]
    scales = transform.scales
    yield from conclude(engine, index, bucket, present, passes, owned, updates, scales, moving, place, homes, stacks)
    place.store()


def conclude(
    engine: Engine,
    index: int,
    bucket: Bucket,
    present: Sequence[int],
    passes: Passes,
    owned: Sequence[OwnedRegion],
    updates: list[Tensor],
    scales: Sequence[float],
    moving: Sequence[int],
    place: Workplace,
    homes: Runs | None = None,
    stacks: Stacks | None = None,
) -> Task:
    """The rest of a bucket's step: owners' updates back to where the weights lie, and onto them.

    Args:
        passes: of what this rank accumulated.
        updates: of the owned regions, or ``stacks`` of them; ``scales`` what each is still to be multiplied by.
        moving: places in ``present`` of what is stepped at all.
        place: where the parts are.
        homes: where each owned region, in ``stacks`` if they are, lies in the parts, where all are in one launch's reach.
    """
    grid, group, ok, parts = engine.grid_of_bucket(bucket), passes.group, passes.ok, passes.parts
    params = place.params
    sharded = is_sharded(params[0])
    row = {i: k for k, i in enumerate(present)}
    exchange = bucket_exchange(engine, bucket, present)
    everyone = len(moving) == len(present)
    generator = weight_noise(index, group, place.device, grid.shard)
    if exchange is None:
        if not (everyone and passes.apply(homes, parts, updates, scales)):
            updates = _scaled(updates, scales, stacks)
            with place.weighed(group, parts) as parts:
                _apply([parts[k] for k in moving], [updates[k] for k in moving], group, ok, generator)
        return
    if not sharded and needs_master(params[0]):  # weights travel: what their dtype cannot hold stays with the owner
        awake = set(moving)
        applied = [k for k, s in enumerate(owned) if row[s.parameter] in awake]
        updates = _scaled(updates, scales, stacks)
        with place.weighed(group, parts) as parts:
            _apply([parts[k] for k in applied], [updates[k] for k in applied], group, ok, generator)
        yield from _gather(engine, [p.weight for p in parts], [local_tensor(p) for p in params], exchange)
        return
    arrival = exchange.give(updates, scales, stacks)
    if exchange.returns:
        yield
    if grid.replicas > 1:
        with engine.landing(params[0], arrival):
            arrival = exchange.share(arrival)
        yield
    whole = parts if sharded else [Part(local, local, {}) for local in local_tensors(params)]
    weights = [p.weight for p in whole]
    with engine.landing(params[0], arrival):
        if everyone and passes.apply(exchange.runs("taken", weights), whole, [arrival.wait()], None):
            return
        returned = [torch.empty(w.shape, dtype=exchange.dtype, device=w.device) for w in weights]
        exchange.take(arrival, returned)
        with place.weighed(group, whole) as whole:
            _apply([whole[k] for k in moving], [returned[k] for k in moving], group, ok, generator)


def bucket_exchange(engine: Engine, bucket: Bucket, present: Sequence[int]) -> Exchange | None:
    """What carries a bucket's matrices; ``None`` in one process."""
    if engine.grid_of_bucket(bucket).world_size == 1:
        return None
    param = engine.parameter(bucket, present[0])
    return engine.exchange(bucket, present, exact=not is_sharded(param) and needs_master(param))


def _scaled(updates: Sequence[Tensor], scales: Sequence[float], stacks: Stacks | None) -> list[Tensor]:
    """Updates of owned regions times what the transform has left to do."""
    pairs = zip(updates if stacks is None else stacks.apart(updates), scales)
    return [u if s == 1.0 else u.to(torch.promote_types(u.dtype, torch.float32)) * s for u, s in pairs]


def _apply(parts: list[Part], updates: list[Tensor], group: Group, ok: Tensor | None, generator: Any) -> None:
    apply_updates([p.weight for p in parts], updates, [p.state for p in parts], group, ok, generator)


def _within(owned_region: OwnedRegion, bucket: Bucket, shard: int) -> tuple[slice, ...]:
    """An owned region in the local tensor of the shard that holds all of it."""
    for region, place in bucket.parameters[owned_region.parameter].storage.held(shard):
        if all(start <= a and b <= stop for (a, b), (start, stop) in zip(owned_region.region, region)):
            return tuple(
                slice(a - start + offset, b - start + offset)
                for (a, b), (start, _), (offset, _) in zip(owned_region.region, region, place)
            )
    raise AssertionError(f"shard {shard} does not hold owned region {owned_region.region}")


def _homes(bucket: Bucket, roster: Roster, shard: int | None, parts: Sequence[Part]) -> Runs | None:
    """Where each owned region lies in the parts: all of one where parts are the owned regions (``shard`` is ``None``)."""
    runs = []
    for k, owned_region in enumerate(roster.owned):
        part = k if shard is None else roster.row[owned_region.parameter]
        run: tuple[int, int] | None = (0, owned_region.numel)
        if shard is not None:
            run = contiguous_run(_within(owned_region, bucket, shard), parts[part].weight.shape)
        if run is None:
            return None
        runs.append((part, run[0], k, 0, owned_region.numel))
    return Runs(runs) if roster.stacks is None else Runs(runs).within(right=roster.stacks.places)
