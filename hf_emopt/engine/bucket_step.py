"""The step of a bucket of matrices: accumulate where the gradient is, transform on the owner, apply where the parameter is.

The step is a generator. It yields after it has begun a collective, and :func:`~hf_emopt.engine.pipeline.pipeline` goes on
with the mathematics of other buckets, in the same order on every rank.

An elementwise phase (accumulate, apply) has two ways. Where kernels run, one launch covers all tensors of the bucket: it
writes transform inputs straight into the buffer of the exchange or into the stacks of matrices, and reads updates where they
arrived. Elsewhere the rule's own functions run on lists of tensors. Both do the same sums, to the rounding of float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Arrival, Exchange
from hf_emopt.distributed.layout import local_gradients, local_tensors
from hf_emopt.engine.bucket_members import BucketMembers, is_whole_region
from hf_emopt.engine.context import Step, Task
from hf_emopt.engine.cpu_params import FetchedSlices, ParamSlice, fetch
from hf_emopt.formats.moments import is_moment, is_scale
from hf_emopt.formats.rounding_noise import moment_noise, weight_noise
from hf_emopt.kernels.multi_tensor import MultiTensorTable, fits
from hf_emopt.rules.adamw import apply_updates, decay_factor
from hf_emopt.rules.base import RefreshClock
from hf_emopt.state.forms import is_weight_state
from hf_emopt.state.keys import is_shaped
from hf_emopt.state.store import SwapIn

State = dict[str, Tensor]


class BucketStep:
    """One step of one bucket of matrices: :meth:`accumulate`, :meth:`transform`, :meth:`apply`.

    Args:
        step: the step.
        members: the parameters of the bucket that have a gradient.

    Attributes:
        group: hyperparameters of this step; ``apply_group`` those of the last phase.
        ok: scalar bool on the device: the step counts; ``None`` where it always does.
        states: state of all present parameters, as ``optimizer.state`` has it.
        slices: the param slices that this rank accumulates: its shard of each present parameter, or its owned regions.
        scales: for each owned region, the factor that its update does not contain yet.
        param_steps: of each present parameter, this step included; ones for a rule without a schedule.
    """

    def __init__(self, step: Step, members: BucketMembers) -> None:
        self.step, self.members, self.context, self.rule = step, members, step.context, step.context.rule
        self.observer = step.observer
        self.group = self.apply_group = step.groups[members.bucket.group]
        self.exchange = members.exchange
        if self.exchange is not None and self.observer is not None:
            self.exchange = self.observer.stopwatch.exchange(self.exchange)
        self.scales = [1.0] * len(members.owned)
        self.slices: list[ParamSlice] = []
        self._stacked: list[Tensor | None] = []
        self._fetched: FetchedSlices | None = None
        self._copies: list[ParamSlice] = []

    def run(self) -> Task:
        """The three phases. Parameters that their wrapper keeps on the host are fetched before and stored after them."""
        members, store = self.members, self.context.store
        known = store.of_bucket(members.index, members.bucket, members.present)
        self.states, self._kept = known.states, known.local
        self.param_steps = [1] * len(self.states)
        if self.rule.scheduled:
            for state in self.states:
                if "rounds" not in state:  # counted on the host
                    state["rounds"] = torch.zeros((), dtype=torch.int64, device="cpu")
                state["rounds"].add_(1)
            self.param_steps = [int(state["rounds"]) for state in self.states]
        # Whether the phases use the state of slices, and that of matrices, as it is kept.
        self._direct = store.is_direct(self.group, members.on_host)
        self._matrix_direct = self._direct and store.offload is None
        if members.on_host:
            slices = self._slices(self._kept)
            self._fetched = fetch(self.context, members.params, slices)
            yield
            self._copies = self._fetched.wait()
            self._kept = {i: s.state for i, s in zip(members.present, self._copies)}
        self.ok = self.step.verdict.on(members.device)[0]
        arrivals = self.accumulate()
        if arrivals:
            yield
        updates = self.transform(arrivals)
        yield from self.apply(updates)
        if self._fetched is not None:
            self._fetched.store()

    # ------------------------------------------------------------------ accumulate: where the gradient is

    def accumulate(self) -> tuple[Arrival, ...]:
        """Updates the momentum with the gradients, and sends the transform inputs to the owners.

        Returns:
            The transform inputs on their way here; none where this rank has whole matrices already.
        """
        members = self.members
        arrivals: tuple[Arrival, ...] = ()
        with self._swapped_in_slices("moments", is_moment) as states:
            self.slices = self._slices(states)
            if self.exchange is not None and members.sharded and self.exchange.travels:
                arrivals = (self._send(self.exchange),)
            else:
                self._stack_locally(states)
            if self.observer is not None:
                self.observer.accumulated(self)
        return arrivals

    def _send(self, exchange: Exchange) -> Arrival:
        if self.members.kernels:
            table = exchange.table("sent", [s.weight for s in self.slices])
            if table is not None and self._fits_one_launch():
                buffer = exchange.empty("sent")
                if self._accumulate_into(table, [buffer]):
                    return exchange.storage_to_compute(buffer)
        return exchange.storage_to_compute(self._accumulated())

    def _stack_locally(self, states: dict[int, State]) -> None:
        """Makes the stacks of a rank that has whole matrices: in one launch where that is possible, else by the rule."""
        members = self.members
        if members.kernels and self.slices:
            table = members.local_table([s.weight.shape for s in self.slices])
            if table is not None and self._fits_one_launch():
                targets = self._empty_stacks(members.dtype)
                if targets and self._accumulate_into(table, targets):
                    self._fill_stacks(targets)
                    return
        inputs = self._accumulated()
        if members.sharded:
            inputs = [inputs[members.row[s.parameter]][members.within_shard(s)] for s in members.owned]
        stacked = [self._stack(b, inputs) for b in range(len(members.batches))]
        self._stacked = [None if x is None else t for x, t in zip(stacked, self._own_memory(stacked, states))]

    def _accumulated(self) -> list[Tensor]:
        """The transform input of each slice, by the rule's own function."""
        slices = self.slices
        if not slices:
            return []
        return self.rule.accumulate(
            [s.weight for s in slices], [s.grad for s in slices], [s.state for s in slices], self.group, self.ok
        )

    def _fits_one_launch(self) -> bool:
        """Whether the rule and the slices allow :meth:`_accumulate_into`."""
        if not self.slices or not fits([s.grad for s in self.slices], self.members.device):
            return False
        if self.rule.passes_gradients(self.group):
            return True
        if self.rule.momentum_form(self.group) is None:
            return False
        buffers = [s.state["momentum_buffer"] for s in self.slices]
        return buffers[0].dtype is torch.float32 and fits(buffers, self.members.device)

    def _accumulate_into(self, table: MultiTensorTable, targets: Sequence[Tensor]) -> bool:
        """Accumulates in one launch into the right list of a table; ``False``, and nothing done, where targets do not fit."""
        if not fits(targets, self.members.device):
            return False
        grads = [s.grad for s in self.slices]
        if self.rule.passes_gradients(self.group):
            table.to_right(grads, targets, ok=self.ok)
            return True
        form = self.rule.momentum_form(self.group)
        assert form is not None
        table.momentum(grads, [s.state["momentum_buffer"] for s in self.slices], targets, *form, self.ok)
        return True

    # ------------------------------------------------------------------ transform: whole matrices, on the owner

    def transform(self, arrivals: tuple[Arrival, ...]) -> list[Tensor]:
        """The update of each owned region, or each stack of ``members.stacks``, without its factor in :attr:`scales`."""
        updates = self._transform(arrivals)
        if self.observer is not None:
            self.observer.transformed(self, updates)
        steps = [state["step"] for state in self.states]
        # A list of operands: torch reads a single one on the host, which waits for the device.
        torch._foreach_add_(steps, [self.step.verdict.on(steps[0].device)[1]] * len(steps))
        return updates

    def _transform(self, arrivals: tuple[Arrival, ...]) -> list[Tensor]:
        members, context, group = self.members, self.context, self.group
        if arrivals:
            assert self.exchange is not None
            targets = self._empty_stacks(members.dtype, self.exchange.dtype)
            self.exchange.unpack("received", arrivals[0], targets, members.stacks)
            self._fill_stacks(targets)
        owned, stacks = members.owned, members.stacks
        updates: list[Tensor | None] = [] if stacks is not None else [None] * len(owned)
        for b, (batch, x) in enumerate(zip(members.batches, self._stacked)):
            key = (members.index, b)
            storage = context.store.of_batch(key, members.bucket, batch, group)
            if x is None:
                continue
            if group["state_dtype"] != "float32" and self.rule.to_retry(key):
                context.finish_batch(
                    key, storage
                )  # it writes other moments than this step, also if this step is skipped
            out, scale = self._transform_batch(b, x, storage)
            jobs = members.jobs[b]
            if stacks is not None:
                updates.append(out)
                for k, _, _ in jobs:
                    self.scales[k] = scale * members.scales[k]
                continue
            for part, (k, view, _) in zip(out.split([size for _, _, size in jobs]), jobs):
                self.scales[k] = scale * members.scales[k]
                if members.whole[b] or is_whole_region(owned[k], view):
                    updates[k] = part.reshape(owned[k].shape)
                    continue
                if updates[k] is None:
                    updates[k] = torch.empty(owned[k].shape, dtype=part.dtype, device=part.device)
                view.insert(updates[k], part)  # type: ignore[arg-type]
        return updates  # type: ignore[return-value]

    def _transform_batch(self, b: int, x: Tensor, storage: State) -> tuple[Tensor, float]:
        """The update of a batch ``x`` ``(B, m, n)``, and the factor that it does not contain.

        The rule sees the state of the matrices that take part: that of the whole batch, or a copy of some rows.
        """
        members, key = self.members, (self.members.index, b)
        with nullcontext((storage,)) if self._matrix_direct else self._swapped_in_batch(b, x, storage) as (state,):
            matrix_state, rows = state, {}
            if not members.complete:
                self.rule.finish_pending(key, state)
                rows = {name: members.rows(b, value.device) for name, value in state.items()}
                matrix_state = {name: value[rows[name]] for name, value in state.items()}
            out, scale = self._call_rule(b, x, matrix_state)
            if members.kernels:  # tall matrices may come out transposed, and the next launch reads along memory
                out = out.contiguous()
            for name, index in rows.items():
                state[name][index] = matrix_state[name]
            if self.observer is not None:
                self.observer.batch_state(self, b, state)
        return out, scale

    def _swapped_in_batch(self, b: int, x: Tensor, storage: State) -> AbstractContextManager[list[State]]:
        members, group = self.members, self.group
        packed = group["state_dtype"] != "float32"
        key, dtype = ("units", (members.index, b)), torch.promote_types(x.dtype, torch.float32)
        noise = moment_noise(members.index, group, x.device, members.grid.shard, 1 + b)
        rows = members.rows(b, x.device) if packed and not members.complete else None
        request = SwapIn(key, x.device, dtype, ok=self.ok, noise=noise, rows=rows)
        return self.context.store.swapped_in([storage], group, request)

    def _call_rule(self, b: int, x: Tensor, matrix_state: State) -> tuple[Tensor, float]:
        members, rule, group, ok = self.members, self.rule, self.group, self.ok
        batch, clock = members.batches[b], self._clock(b) if rule.scheduled else members.first_clocks[b]
        cut, counted, scale = batch.slicing, not batch.copy, 1.0
        if members.kernels and self._defers_scale(b):
            out, scale = rule.transform_unscaled(x, matrix_state, group, ok, clock)
        elif cut is None:
            out = rule.transform(x, matrix_state, group, ok, clock)
        elif (shard := members.shards[b]) is None:
            out = rule.transform_part(x, matrix_state, group, ok, clock, cut.full_shape)
        else:
            counted = shard.index == 0
            if self.observer is not None:
                timed = self.observer.stopwatch.reduction
                shard = replace(shard, sum=timed(shard.sum), max=timed(shard.max))
            out = rule.transform_shard(x, matrix_state, group, ok, clock, shard)
        if counted:
            self.context.counts["transforms"] += x.shape[0]
        # A later phase scales the result in place: it must not share memory with the rule's state or its input.
        taken = {t.untyped_storage().data_ptr() for t in (x, *matrix_state.values())}
        return (out.clone() if out.untyped_storage().data_ptr() in taken else out), scale

    def _clock(self, b: int) -> RefreshClock:
        """The refresh clock of the matrices of a batch that take part."""
        members, schedule = self.members, self.context.schedule
        parameters, known, refresh_steps = members.clock_parts[b]
        if known is not schedule.steps:
            refresh_steps = members.follow_schedule(b)
        key = (members.index, b) if members.complete else None
        undisturbed = key is not None and self.step.undisturbed and self._matrix_direct
        return RefreshClock(tuple([self.param_steps[k] for k in parameters]), refresh_steps, key, undisturbed)

    # ------------------------------------------------------------------ stacks of matrices

    def _defers_scale(self, b: int) -> bool:
        """Whether the updates of a batch leave the transform without their scale, which the next launch multiplies."""
        members = self.members
        return members.whole[b] and members.batches[b].slicing is None and self.rule.defers_scale(self.group)

    def _empty_stacks(self, dtype: torch.dtype, arriving: torch.dtype | None = None) -> list[Tensor]:
        """Empty tensors for the transform inputs: the stacks of ``members.stacks``; without those a tensor for each owned
        region, which is a part of the batch's stack where the batch has whole regions.

        Args:
            dtype: of the tensors.
            arriving: communication dtype. Tensors have it instead where the rule reads 16-bit numbers.
        """
        members, device = self.members, self.members.device
        if arriving is not None and members.kernels and all(map(self._defers_scale, range(len(members.batches)))):
            dtype = arriving
        targets = [torch.empty(0)] * len(members.owned)
        self._stacked = []
        for batch, jobs, whole in zip(members.batches, members.jobs, members.whole):
            if jobs and (whole or members.stacks is not None):
                sizes = [size for _, _, size in jobs]
                stack = torch.empty(sum(sizes), *batch.shape, dtype=dtype, device=device)
                self._stacked.append(stack)
                if members.stacks is None:
                    for (k, _, _), rows in zip(jobs, stack.split(sizes)):
                        targets[k] = rows.view(members.owned[k].shape)
                continue
            self._stacked.append(None)
            for k, _, _ in jobs:
                if not targets[k].numel():
                    targets[k] = torch.empty(members.owned[k].shape, dtype=dtype, device=device)
        return targets if members.stacks is None else [stack for stack in self._stacked if stack is not None]

    def _fill_stacks(self, targets: Sequence[Tensor]) -> None:
        """Makes the stacks that do not contain the targets of :meth:`_empty_stacks`."""
        if self.members.stacks is None and targets:
            self._stacked = [self._stack(b, targets) if x is None else x for b, x in enumerate(self._stacked)]

    def _stack(self, b: int, inputs: Sequence[Tensor]) -> Tensor | None:
        """The stack ``(B, m, n)`` of a batch from its owned regions; ``None`` where no matrix of it takes part."""
        members, jobs = self.members, self.members.jobs[b]
        if not jobs:
            return None
        if members.whole[b]:
            parts = [inputs[k].reshape(size, *members.batches[b].shape) for k, _, size in jobs]
        else:
            parts = [view.extract(inputs[k]) for k, view, _ in jobs]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(members.device)

    # ------------------------------------------------------------------ apply: where the parameter is

    def apply(self, updates: list[Tensor]) -> Task:
        """Sends the updates back to where the weights are, and steps the weights."""
        members, exchange, slices = self.members, self.exchange, self.slices
        warmup = self.rule.warmup_steps(self.group) if self.rule.scheduled else 0  # steps in which no weight moves
        moving = [k for k, now in enumerate(self.param_steps) if now > warmup]
        all_move = len(moving) == len(members.present)
        if exchange is None:
            table = members.local_table([s.weight.shape for s in slices]) if members.kernels and slices else None
            if not (all_move and self._apply_in_one_launch(table, slices, updates, self.scales)):
                scaled = self._scaled(updates)
                with self._with_weight_state(slices) as complete:
                    self._apply([complete[k] for k in moving], [scaled[k] for k in moving])
            return
        if members.low_precision and not members.sharded:  # owners keep the low bits, so weights travel and not updates
            awake = set(moving)
            applied = [k for k, s in enumerate(members.owned) if members.row[s.parameter] in awake]
            scaled = self._scaled(updates)
            with self._with_weight_state(slices) as complete:
                self._apply([complete[k] for k in applied], [scaled[k] for k in applied])
            yield from all_gather_weights(self.step, members, exchange, [s.weight for s in complete])
            return
        arrival = exchange.compute_to_storage(updates, self.scales, members.stacks)
        if exchange.returns:
            yield
        apply_stream = None if members.on_host else self.context.apply_stream
        if members.grid.replicas > 1:
            with nullcontext() if apply_stream is None else apply_stream.waiting_for(arrival):
                arrival = exchange.all_gather_replicas(arrival)
            yield
        if not members.sharded:
            slices = [ParamSlice(local, local, {}) for local in local_tensors(members.params)]
        weights = [s.weight for s in slices]
        with nullcontext() if apply_stream is None else apply_stream.waiting_for(arrival):
            if members.kernels and all_move:
                table = exchange.table("unpacked", weights)
                if self._apply_in_one_launch(table, slices, [arrival.wait()], None):
                    return
            returned = [torch.empty(w.shape, dtype=exchange.dtype, device=w.device) for w in weights]
            exchange.unpack("unpacked", arrival, returned)
            with self._with_weight_state(slices) as complete:
                self._apply([complete[k] for k in moving], [returned[k] for k in moving])

    def _scaled(self, updates: Sequence[Tensor]) -> list[Tensor]:
        """The update of each owned region, times its scale."""
        stacks = self.members.stacks
        pairs = zip(updates if stacks is None else stacks.split(updates), self.scales)
        return [u if s == 1.0 else u.to(torch.promote_types(u.dtype, torch.float32)) * s for u, s in pairs]

    def _apply(self, slices: Sequence[ParamSlice], updates: Sequence[Tensor]) -> None:
        members, group, generator = self.members, self.apply_group, None
        if group["low_precision_weights"] == "stochastic":
            generator = weight_noise(members.index, group, members.device, members.grid.shard)
        weights, states = [s.weight for s in slices], [s.state for s in slices]
        apply_updates(weights, updates, states, group, self.ok, generator)

    def _apply_in_one_launch(
        self,
        table: MultiTensorTable | None,
        slices: Sequence[ParamSlice],
        updates: Sequence[Tensor],
        scales: Sequence[float] | None,
    ) -> bool:
        """Steps float32 weights (left list) by updates (right list); ``False``, and nothing done, where it is impossible."""
        group, lr, device = self.apply_group, self.apply_group["lr"], self.members.device
        if table is None or not slices or isinstance(lr, Tensor) or self.members.low_precision:
            return False
        if group.get("compat") is not None:  # another implementation's bits need its order of sums
            return False
        weights, shrink = [s.weight for s in slices], decay_factor(group, lr)
        if isinstance(shrink, Tensor) or weights[0].dtype is not torch.float32:
            return False
        if not (fits(weights, device) and fits(updates, device)):
            return False
        after: Literal["before", "after"] = "after" if group.get("decay_after", False) else "before"
        decay = "cautious" if group.get("cautious_weight_decay", False) else after
        table.apply(weights, updates, float(lr), float(shrink), self.ok, scales, decay)
        return True

    # ------------------------------------------------------------------ slices of parameters and their state

    def _slices(self, states: dict[int, State]) -> list[ParamSlice]:
        """Weights and gradients of the param slices that this rank accumulates, with the given states."""
        members = self.members
        if self._copies:
            return [ParamSlice(s.weight, s.grad, states[i]) for s, i in zip(self._copies, members.present)]
        if not members.sharded:
            return owned_slices(members, states)
        weights, grads = local_tensors(members.params), local_gradients(members.params)
        return [ParamSlice(w, g, states[i]) for w, g, i in zip(weights, grads, members.present)]

    @contextmanager
    def _swapped_in(self, name: str, wanted: Callable[[str], bool]) -> Iterator[dict[int, State]]:
        members, group = self.members, self.group
        kept = self._kept if members.sharded else {s.parameter: self._kept[s.parameter] for s in members.owned}
        noise = moment_noise(members.index, group, members.device, members.grid.shard)
        key = (name, members.index)
        request = SwapIn(key, members.device, members.dtype, wanted, self.ok, noise, on_device=members.on_host)
        if not kept:
            yield kept
            return
        with self.context.store.swapped_in(list(kept.values()), group, request) as states:
            yield dict(zip(kept, states))

    def _swapped_in_slices(self, name: str, wanted: Callable[[str], bool]) -> AbstractContextManager[dict[int, State]]:
        """State of the slices, by parameter, for a phase."""
        return nullcontext(self._kept) if self._direct else self._swapped_in(name, wanted)

    @contextmanager
    def _with_low_bits(self) -> Iterator[Sequence[ParamSlice]]:
        with self._swapped_in_slices("weights", is_weight_state) as states:
            yield self._slices(states)

    def _with_weight_state(self, slices: Sequence[ParamSlice]) -> AbstractContextManager[Sequence[ParamSlice]]:
        """The slices with the low bits of 16-bit weights, for the phase that steps them; wide weights have none."""
        return self._with_low_bits() if self.members.low_precision else nullcontext(slices)

    def _own_memory(self, tensors: Sequence[Tensor | None], states: dict[int, State]) -> list[Tensor | None]:
        """The same tensors, copied where their memory is swapped-in state, which the next swap-in reuses."""
        if self.context.store.offload is None:
            return list(tensors)
        taken = {t.untyped_storage().data_ptr() for state in states.values() for t in state.values()}
        return [x.clone() if x is not None and x.untyped_storage().data_ptr() in taken else x for x in tensors]


def owned_slices(members: BucketMembers, states: dict[int, State]) -> list[ParamSlice]:
    """The owned regions of parameters that this rank holds whole.

    Args:
        states: of this rank's part of each parameter, by index in the bucket.
    """
    params = [members.params[members.row[s.parameter]] for s in members.owned]
    slices = []
    offsets: dict[int, int] = defaultdict(int)
    for owned_region, param, local, grad in zip(members.owned, params, local_tensors(params), local_gradients(params)):
        state = states[owned_region.parameter]
        if owned_region.shape == param.shape:
            slices.append(ParamSlice(local, grad, state))
            continue
        where = tuple(slice(a, b) for a, b in owned_region.region)
        start, length = offsets[owned_region.parameter], owned_region.shape[owned_region.dim]
        offsets[owned_region.parameter] += length
        shaped = [key for key in state if is_shaped(key) and not is_scale(key)]
        mine = {key: state[key].narrow(owned_region.dim, start, length) for key in shaped}
        # Each region counts its steps; only the first one has the parameter's own count.
        mine["step"] = state["step"] if start == 0 else state["step"].clone()
        slices.append(ParamSlice(param[where], grad[where], mine))
    return slices


def all_gather_weights(step: Step, members: BucketMembers, exchange: Exchange, mine: list[Tensor]) -> Task:
    """Copies stepped weights from their owners to all ranks that hold copies.

    Args:
        exchange: in the weights' own dtype.
        mine: weights of this rank's owned regions.
    """
    arrival = exchange.all_gather_replicas(exchange.compute_to_storage(mine))
    yield
    apply_stream = None if members.on_host else step.context.apply_stream
    with nullcontext() if apply_stream is None else apply_stream.waiting_for(arrival):
        exchange.unpack("unpacked", arrival, local_tensors(members.params))
