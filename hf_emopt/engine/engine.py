"""What a step needs beside the rule: the plan, the ranks, and where state lies. Rebuilt when parameters change identity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.assignment import make_plan
from hf_emopt.distributed.consensus import (
    Agreement,
    Council,
    control_device,
    council_group,
    verify_plan,
    verify_replicas,
    warm_up,
)
from hf_emopt.distributed.exchange import Arrival, Exchange
from hf_emopt.distributed.layout import Grid, Partition, local_tensor
from hf_emopt.distributed.plan import Batch, Bucket, OwnedRegion, Plan, PlannedParameter
from hf_emopt.distributed.planner import plan_of, world_size
from hf_emopt.distributed.process_groups import group_of, open_groups
from hf_emopt.distributed.refresh_slots import Matrix, matrix_of, plan_slots
from hf_emopt.engine.cpu_params import Fetched, InPlace
from hf_emopt.engine.elementwise import Gradients, Part
from hf_emopt.formats.moments import is_moment
from hf_emopt.formats.rounding_noise import moment_noise
from hf_emopt.kernels.streams import SideStreams
from hf_emopt.rules.base import Group, MatrixRule, state_dtype
from hf_emopt.state.host_transfer import Channel, channel_to, home_of
from hf_emopt.state.keys import is_shaped
from hf_emopt.state.offload import StateOffload
from hf_emopt.state.placement import compute_device, is_offloaded
from hf_emopt.state.store import HeldStates

if TYPE_CHECKING:
    from hf_emopt.engine.observer import StepObserver

__all__ = ["Engine"]

State = dict[str, Tensor]

_MAX_EXCHANGES = 1024
"""Kept objects for subsets of parameters that have a gradient."""


class Engine:
    """The plans of one set of parameters, and what is kept between steps to carry them out.

    Args:
        rule: the update of a matrix.
        groups: the optimizer's parameter groups.
        state: the optimizer's ``state``, filled here.
        matrices, others: what is planned: the matrix parameters, and of the other parameters those that ranks hold copies
            of, whose elementwise step they share.
        grids: the ranks of every parameter, by name.
        transport_dtype: of the wire by name, or ``None``: bfloat16 on accelerators, float32 on the CPU.
        overlaps: whether updates are put off until a forward pass needs them. Buckets then follow the model's order, and
            copies are kept alike in a process group of their own: what DDP sends around before a forward pass does not wait
            in line behind what is put off.
        offloads: whether state lies on the host between steps.
    """

    def __init__(
        self,
        rule: MatrixRule,
        groups: list[Group],
        state: dict[Tensor, Any],
        matrices: Sequence[PlannedParameter],
        others: Sequence[PlannedParameter],
        grids: dict[str, Grid],
        transport_dtype: str | None,
        overlaps: bool = False,
        offloads: bool = False,
    ) -> None:
        self.rule, self.groups, self.state, self.grids = rule, groups, state, grids
        rule.forget()
        # As planned: wrappers put other parameters into groups, and state is found under those it was made for.
        self.params = [list(group["params"]) for group in groups]
        self.transport_dtype = transport_dtype
        self.world_size = world_size(grids)
        """Ranks that share any parameter."""
        self.plan: Plan = plan_of(matrices, rule, groups, self.world_size, offloads, overlaps)
        self.aux_plan: Plan = make_plan(others, forward_order=overlaps)
        self.transform_count = 0
        self._overlaps = overlaps
        self.council = Council(None, ())
        self._councils: dict[frozenset[str], Council] = {}
        self._agreement = Agreement(None, frozenset())
        self._ok: dict[torch.device, Tensor | None] = {}
        self._counts: tuple[Tensor, Tensor] | None = None
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}
        self._channels: dict[torch.device, Channel] = {}
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._batches: dict[int, tuple[Batch, ...]] = {}
        self._compute_groups: dict[tuple[int, ...], Any] = {}
        self.undisturbed = False
        """Whether, in this step, nobody reads state or weights before :meth:`end_tasks`."""
        self._landing = SideStreams("landing")
        self._slots: dict[Matrix, tuple[int, ...]] = {}
        self._slots_for: tuple[int, ...] = ()
        self._follow_periods()
        self._rows: dict[tuple[Any, ...], Tensor] = {}
        self.shared_aux = frozenset(p.name for bucket in self.aux_plan.buckets for p in bucket.parameters)
        self.offload = StateOffload() if offloads else None
        self.states = HeldStates(rule, groups, self.params, state, grids, self.offload)
        self._prepared = False
        self.watch: StepObserver | None = None
        """Measures the steps, where somebody wants to know."""

    # ------------------------------------------------------------------ ranks

    def prepare(self) -> None:
        """Everything that ranks do together before their first step; once, and in the same order on all.

        Raises:
            RuntimeError: when ranks have different plans, or different values of what should be copies.
        """
        if self._prepared:
            return
        self._prepared = True
        if self.world_size == 1:
            return
        # In the order of parameters, so that all ranks make the same groups in the same order.
        grids = {id(grid): grid for grid in self.grids.values()}
        opened = {key: open_groups(grid, own=self._overlaps) for key, grid in grids.items()}
        self.grids = {name: opened[id(grid)] for name, grid in self.grids.items()}
        self.council = Council(council_group(list(self.grids.values())), self._shared_names())
        warm_up(list(self.grids.values()), self.council.group)
        verify_plan((self.plan.digest(), self.aux_plan.digest()), self.council.group)
        by_group: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
        handles: dict[int, Any] = {}
        for name, param in self._named():
            grid = self.grids[name]
            if grid.replica_group is not None:
                by_group[id(grid.replica_group)].append((name, local_tensor(param)))
                handles[id(grid.replica_group)] = grid.replica_group
        for key, named in by_group.items():
            verify_replicas(named, handles[key])
        self._open_compute_groups()

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for g in self.groups for name, p in zip(g["param_names"], g["params"])]

    def _shared_names(self) -> list[str]:
        """Parameters whose gradient must be there on all ranks or on none: all but those that need no collective."""
        local = {p.name for b in self.plan.buckets if b.communication_free for p in b.parameters}
        return [n for n, _ in self._named() if self.grids[n].world_size > 1 and n not in local]

    def _open_compute_groups(self) -> None:
        """Makes the groups of all compute groups, on all ranks in one order; compute groups are planned only where all
        ranks take part."""
        compute_groups = {
            tuple(b.storage.rank(p) for p in compute_group)
            for b in self.plan.buckets
            for compute_group in b.compute_groups
        }
        for ranks in sorted(compute_groups):
            group = group_of(ranks)
            if dist.get_rank() in ranks:
                dist.all_reduce(torch.zeros(1, device=control_device(group)), group=group)
                self._compute_groups[ranks] = group

    def compute_group_reductions(
        self, bucket: Bucket, compute_group: tuple[int, ...]
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Sum and maximum over the ranks that share a matrix, in place."""
        group = self._compute_groups[tuple(bucket.storage.rank(position) for position in compute_group)]
        reduce = _reduce if self.watch is None else self.watch.stopwatch.reduction(_reduce)
        return partial(reduce, op=dist.ReduceOp.SUM, group=group), partial(reduce, op=dist.ReduceOp.MAX, group=group)

    def grid_of_bucket(self, bucket: Bucket) -> Grid:
        """The ranks of a bucket's parameters."""
        return self.grids[bucket.parameters[0].name]

    # ------------------------------------------------------------------ a step

    def begin(self, gradients: Gradients, among: frozenset[str] | None = None) -> Agreement:
        """Settles whether this step counts and which parameters take part.

        Args:
            gradients: what this rank has.
            among: names of the parameters that this step is about; ``None`` for all.
        """
        self._follow_periods()
        present, flag = gradients.present, None
        for device_flag in gradients.finite.values():
            flag = device_flag if flag is None else flag & device_flag.to(flag.device)
        council = self._council_of(among)
        if self.watch is None or council.group is None:
            self._agreement = council.agree(flag, present)
        else:
            with self.watch.stopwatch.running(control_device(council.group)):
                self._agreement = council.agree(flag, present)
        self._ok = {}
        return self._agreement

    def _council_of(self, among: frozenset[str] | None) -> Council:
        """The ranks and what they agree on, where a wrapper steps some parameters at a time."""
        if among is None or self.council.group is None:
            return self.council
        if among not in self._councils:
            names = [name for name in self.council.names if name in among]
            self._councils[among] = Council(self.council.group, names)
        return self._councils[among]

    def ok_on(self, device: torch.device) -> Tensor | None:
        """The agreement's verdict on a device, or ``None``."""
        if device not in self._ok:
            ok = self._agreement.ok
            # To the host it must have arrived before it is read.
            self._ok[device] = None if ok is None else ok.to(device, non_blocking=device.type != "cpu")
        return self._ok[device]

    def present(self, bucket: Bucket) -> list[int]:
        """Indices of a bucket's parameters that take part in this step."""
        return [i for i, p in enumerate(bucket.parameters) if p.name in self._agreement.present]

    def count_step(self, states: Sequence[State], ok: Tensor | None) -> None:
        """Adds 1 to each ``step``, where the step counts."""
        if not states:
            return
        steps = [state["step"] for state in states]
        counted = torch.ones((), device=steps[0].device) if ok is None else self._counted(ok)
        # A list, since adding one tensor to many makes torch wait for the device to read it.
        torch._foreach_add_(steps, [counted] * len(steps))

    def _counted(self, ok: Tensor) -> Tensor:
        """The verdict as a number; worked out once for all whose counters it moves."""
        if self._counts is None or self._counts[0] is not ok:
            self._counts = ok, ok.float()
        return self._counts[1]

    def begin_tasks(self, undisturbed: bool) -> None:
        """Before the tasks of a step, when it is settled whether it counts.

        Args:
            undisturbed: nobody reads state or weights before :meth:`end_tasks`.
        """
        self.undisturbed = undisturbed
        if undisturbed and self.world_size > 1 and self.offload is None:
            for device in {params[0].device for params in self.params if params}:
                if device.type == "cuda":
                    self._landing.open(device)

    def landing(self, param: Tensor, arrival: Arrival) -> AbstractContextManager[None]:
        """Where updates of other ranks are waited for and put onto the weights: beside the products of other buckets, which
        need not wait then. What is read there was queued before the collective that brings the updates; where none does,
        it is the current stream.

        Args:
            param: one of those whose weights are stepped.
            arrival: what is waited for there.
        """
        if not arrival.works or is_offloaded(param) or not self._landing.is_open(param.device):
            return nullcontext()
        return self._landing.holding(param.device, (arrival.buffer, *arrival.keep))

    def end_tasks(self, stay_open: bool) -> None:
        """After the tasks of a step.

        Args:
            stay_open: what the rule does beside the step goes on; :meth:`join` is called before anybody asks for state.
        """
        self.undisturbed = False
        self._landing.join()
        if not stay_open:
            self.join()

    def join(self) -> None:
        """Makes the device's current streams wait for what the last step left to be done beside them."""
        self.rule.join()

    # ------------------------------------------------------------------ buckets

    def parameter(self, bucket: Bucket, i: int) -> Tensor:
        """The ``i``-th parameter of a bucket."""
        return self.params[bucket.group][bucket.parameters[i].position]  # type: ignore[no-any-return]

    def batches(self, index: int, bucket: Bucket) -> tuple[Batch, ...]:
        """This rank's batches of a bucket of matrices."""
        if index not in self._batches:
            self._batches[index] = bucket.batches(self.grid_of_bucket(bucket).position)
        return self._batches[index]

    def exchange(self, bucket: Bucket, present: Sequence[int], exact: bool = False) -> Exchange:
        """The collectives of a bucket, timed where somebody measures; ``exact`` carries the parameters' own dtype."""
        key = (id(bucket), exact, None if len(present) == len(bucket.parameters) else tuple(present))
        if key not in self._exchanges:
            if len(self._exchanges) > _MAX_EXCHANGES:  # gradients that come and go make many subsets
                self._landing.wait()  # which may read their tables still
                self._exchanges.clear()
            param = self.parameter(bucket, present[0])
            dtype = param.dtype if exact else self._wire(param)
            if bucket.local and bucket.storage.replicas == 1 and not exact:  # nothing is sent, so nothing is rounded
                dtype = torch.promote_types(param.dtype, torch.float32)
            grid = self.grid_of_bucket(bucket)
            self._exchanges[key] = Exchange(bucket, grid, present, dtype, compute_device(param))
        found = self._exchanges[key]
        return found if self.watch is None else self.watch.stopwatch.exchange(found)

    def kept(self, what: str, index: int, present: Sequence[int], make: Callable[[], Any]) -> Any:
        """What follows from the plan and from which of a bucket's parameters take part, made when first asked for."""
        key = (what, index, *present)
        if key not in self._kept:
            if len(self._kept) > _MAX_EXCHANGES:
                self._kept.clear()
            self._kept[key] = make()
        return self._kept[key]

    def _wire(self, param: Tensor) -> torch.dtype:
        if self.transport_dtype is not None:
            return getattr(torch, self.transport_dtype)  # type: ignore[no-any-return]
        if param.dtype is torch.float64:
            return torch.float64
        return torch.float32 if compute_device(param).type == "cpu" else torch.bfloat16

    # ------------------------------------------------------------------ parameters on the host

    def fetch(self, params: Sequence[Tensor], parts: list[Part], also: Sequence[str] = ()) -> InPlace:
        """Starts to bring parts of parameters to where they are computed; nothing, where they are there.

        Args:
            params: alike in where they lie.
            parts: of each.
            also: keys of state, beside what is shaped like the parameter, that is wanted there.
        """
        if not params or not is_offloaded(params[0]):
            return InPlace(parts)
        device = compute_device(params[0])
        if device not in self._channels:
            self._channels[device] = channel_to(device)
        keys = [[key for key in part.state if is_shaped(key) or key in also] for part in parts]
        for param, part, names in zip(params, parts, keys, strict=True):
            if isinstance(param, Partition) and param.pinned:
                for name in names:
                    part.state[name] = self.state[param][name] = home_of(part.state[name], device)
        return Fetched(self._channels[device], parts, keys)

    def finish_copies(self) -> None:
        """Waits until all that was fetched, and changed, is back on the host; offloaded state may still be on its way."""
        if self.offload is not None:
            self.offload.finish()
        for channel in self._channels.values():
            channel.synchronize()

    # ------------------------------------------------------------------ state

    def rows(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """Rows of a batch as an index on the device; kept, since the same parameters tend to be without a gradient."""
        key = (device, *rows)
        if key not in self._rows:
            if len(self._rows) > _MAX_EXCHANGES:
                self._rows.clear()
            self._rows[key] = torch.tensor(rows, device=device)
        return self._rows[key]

    def settle(self) -> None:
        """Finishes what a rule computes in the background, so that ``state`` says all there is to say."""
        self.join()
        for key, storage in self.states.by_batch.items():
            if self.rule.to_retry(key):
                self.settle_batch(key, storage)
        if self.offload is not None:
            self.offload.settle()

    def settle_batch(self, key: tuple[int, int], storage: State) -> None:
        """:meth:`settle` for one batch. Moments are lent only where some are written to, since packed anew they would not
        be the same: a run must not depend on who asks for its state."""
        index, b = key
        bucket = self.plan.buckets[index]
        grid, group = self.grid_of_bucket(bucket), self.groups[bucket.group]
        owned_region = bucket.owned(grid.position)[self.batches(index, bucket)[b].jobs[0][0]]
        param = self.parameter(bucket, owned_region.parameter)
        device, broken = compute_device(param), self.rule.to_retry(key)
        rows = self.rows(sorted(broken), device) if broken else None
        with self.states.lender.lent(
            ("settled", key),
            [storage],
            device,
            lambda name: bool(broken) or not is_moment(name),
            state_dtype(param),
            group,
            noise=moment_noise(index, group, device, grid.shard, 1 + b),
            rows=rows,
        ) as lent:
            self.rule.finish_pending(key, lent[0])

    @property
    def has_owned_state(self) -> bool:
        """Whether a parameter that every rank holds whole has its state with owners."""
        owners = any(self.states.has_owners(b) for plan in (self.plan, self.aux_plan) for b in plan.buckets)
        return owners and self.scattered

    @property
    def scattered(self) -> bool:
        """Whether any state of this rank is its own part of a whole that other ranks have parts of, DTensors apart."""
        return self.world_size > 1 and any("step" in state for state in self.state.values())

    # ------------------------------------------------------------------ schedule

    def slot(self, bucket: Bucket, owned_region: OwnedRegion, matrix_view: int, b: int) -> tuple[int, ...]:
        """Slots of the pieces of a matrix."""
        return self._slots[matrix_of(bucket, owned_region, matrix_view, b)]

    def next_round(self, state: State) -> int:
        """Counts the optimizer steps that a parameter took part in, on the host; for rules with a schedule."""
        state.setdefault("rounds", torch.zeros((), dtype=torch.int64)).add_(1)
        return int(state["rounds"])

    def _follow_periods(self) -> None:
        """Assigns slots anew when a period was changed: a slot past the new period would never come."""
        periods = tuple(self.rule.period(group) for group in self.groups if group["kind"] == "matrix")
        if periods != self._slots_for:
            self._slots, self._slots_for = plan_slots(self.plan, self.groups, self.rule), periods


def _reduce(tensor: Tensor, op: Any, group: Any) -> Tensor:
    dist.all_reduce(tensor, op=op, group=group)
    return tensor
