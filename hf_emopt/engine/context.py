"""What the steps of one set of plans share, and what belongs to a single step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Arrival
from hf_emopt.distributed.layout import compute_device
from hf_emopt.distributed.plan import Batch, Bucket, OwnedRegion, Plan
from hf_emopt.distributed.rank_groups import RankGroups, StepVerdict
from hf_emopt.distributed.refresh_steps import Matrix, matrix_of, plan_refresh_steps
from hf_emopt.engine.stopwatch import Stopwatch
from hf_emopt.formats.moments import is_moment
from hf_emopt.formats.rounding_noise import moment_noise
from hf_emopt.kernels.streams import SideStreams
from hf_emopt.rules.base import Group, MatrixRule, state_dtype
from hf_emopt.state.host_transfer import CopyStream, copy_stream_to
from hf_emopt.state.store import StateStore, SwapIn

State = dict[str, Tensor]

Task = Iterator[None]
"""The step of a bucket. It yields after it has begun a collective, so that other steps go on."""

MAX_KEPT = 1024
"""Number of kept values for subsets of parameters: gradients that come and go make many subsets."""


class RefreshSchedule:
    """The refresh step of each piece of a matrix's periodic work, known on the host.

    Args:
        rule: gives periods and costs.
        groups: the optimizer's parameter groups.
        plan: of the matrices.

    Attributes:
        steps: refresh steps of the pieces of each matrix, from 0 to the period less 1.
    """

    def __init__(self, rule: MatrixRule, groups: Sequence[Group], plan: Plan) -> None:
        self._rule, self._groups, self._plan = rule, groups, plan
        self._periods: tuple[int, ...] = ()
        self.steps: dict[Matrix, tuple[int, ...]] = {}
        self.follow_periods()

    def follow_periods(self) -> None:
        """Assigns refresh steps again when a period has changed: a step past the new period would never come."""
        periods = tuple([self._rule.period(group) for group in self._groups if group["kind"] == "matrix"])
        if periods != self._periods:
            self.steps, self._periods = plan_refresh_steps(self._plan, self._groups, self._rule), periods

    def of(self, bucket: Bucket, owned_region: OwnedRegion, matrix_view: int, b: int) -> tuple[int, ...]:
        """Refresh steps of the pieces of a matrix, the ``b``-th of a matrix view."""
        return self.steps[matrix_of(bucket, owned_region, matrix_view, b)]


class ApplyStream:
    """A stream that waits for the updates of other ranks and applies them, while the current stream goes on with the products
    of other buckets. Everything that it reads was queued before the collective of the updates.

    Args:
        devices: the GPUs of the parameters.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._streams = SideStreams("apply")

    def open(self) -> None:
        """Begins a step in which nobody reads weights before the end."""
        for device in self._devices:
            self._streams.open(device)

    def waiting_for(self, arrival: Arrival) -> AbstractContextManager[None]:
        """Queues the work inside on the stream, if it is open and the arrival has collectives to wait for."""
        device = arrival.buffer.device
        if not arrival.works or not self._streams.is_open(device):
            return nullcontext()
        return self._streams.holding(device, (arrival.buffer, *arrival.keep))

    def wait(self) -> None:
        """Makes the current streams wait for all work on the stream."""
        self._streams.wait()

    def close(self) -> None:
        """Ends a step: as :meth:`wait`, and the stream takes no work until :meth:`open`."""
        self._streams.join()


@dataclass(frozen=True)
class StepContext:
    """The plans of one set of parameters, and everything that their steps share.

    Parameters that change identity, shape or layout get a new context.

    Attributes:
        rule: the update of a matrix.
        groups: the optimizer's parameter groups, with hyperparameters as they are now.
        params: the parameters of each group, as they were planned: a wrapper may put others into the groups.
        plan: of the matrices.
        aux_plan: of the other parameters that ranks hold copies of, whose elementwise step they share.
        ranks: process groups, grids and what ranks agree on.
        store: the optimizer state of this rank.
        schedule: when periodic work is due.
        transport_dtype: name of the communication dtype; ``None`` for the device's default.
        apply_stream: applies updates of other ranks; ``None`` where there are none, on a CPU, and with offloaded state.
        copy_streams: by device, for parameters that their wrapper keeps on the host.
        members: ``BucketMembers`` by bucket and the parameters that take part, and other values of the kind.
        counts: ``"transforms"``: matrices that this process has transformed under these plans.
    """

    rule: MatrixRule
    groups: list[Group]
    params: list[list[Tensor]]
    plan: Plan
    aux_plan: Plan
    ranks: RankGroups
    store: StateStore
    schedule: RefreshSchedule
    transport_dtype: str | None
    apply_stream: ApplyStream | None = None
    copy_streams: dict[torch.device, CopyStream] = field(default_factory=dict, repr=False)
    members: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    counts: Counter[str] = field(default_factory=Counter, repr=False)
    _batches: dict[tuple[int, int], tuple[Batch, ...]] = field(default_factory=dict, repr=False)

    # ------------------------------------------------------------------ parts of the plans

    @cached_property
    def shared_aux(self) -> frozenset[str]:
        """Names of the parameters in :attr:`aux_plan`."""
        return frozenset(p.name for bucket in self.aux_plan.buckets for p in bucket.parameters)

    def named(self) -> list[tuple[str, Tensor]]:
        """All parameters with their names."""
        return [(name, p) for g, params in zip(self.groups, self.params) for name, p in zip(g["param_names"], params)]

    def parameter(self, bucket: Bucket, i: int) -> Tensor:
        """The ``i``-th parameter of a bucket."""
        return self.params[bucket.group][bucket.parameters[i].position]

    def batches(self, index: int, bucket: Bucket) -> tuple[Batch, ...]:
        """This rank's batches of a bucket of matrices."""
        key = index, id(bucket)
        if key not in self._batches:
            self._batches[key] = bucket.batches(self.ranks.grid(bucket).position)
        return self._batches[key]

    def keep_members(self, key: tuple[Any, ...], value: Any) -> Any:
        """Keeps a value in :attr:`members`; drops all when there are too many."""
        if len(self.members) > MAX_KEPT:
            if self.apply_stream is not None:
                self.apply_stream.wait()  # it may still read tables of theirs
            self.members.clear()
        self.members[key] = value
        return value

    def copy_stream(self, device: torch.device) -> CopyStream:
        """The streams between host and device for parameters that their wrapper keeps on the host."""
        if device not in self.copy_streams:
            self.copy_streams[device] = copy_stream_to(device)
        return self.copy_streams[device]

    # ------------------------------------------------------------------ between steps

    def open_ranks(self) -> None:
        """Makes process groups, which ranks do together before their first step; see :meth:`RankGroups.open`."""
        self.ranks.open((self.plan, self.aux_plan), self.named())

    def finish_pending(self) -> None:
        """Finishes pending refreshes and copies, so that the state is that of the last step. No collective."""
        self.rule.join()
        for key, storage in self.store.by_batch.items():
            if self.rule.to_retry(key):
                self.finish_batch(key, storage)
        if self.store.offload is not None:
            self.store.offload.settle()

    def finish_batch(self, key: tuple[int, int], storage: State) -> None:
        """As :meth:`finish_pending`, for one batch.

        Moments are swapped in only where some are written. Packing changes bits, and a run must not depend on who asks for
        its state.
        """
        index, b = key
        bucket = self.plan.buckets[index]
        grid, group = self.ranks.grid(bucket), self.groups[bucket.group]
        owned_region = bucket.owned(grid.position)[self.batches(index, bucket)[b].jobs[0][0]]
        param = self.parameter(bucket, owned_region.parameter)
        device, broken = compute_device(param), self.rule.to_retry(key)
        request = SwapIn(
            ("settled", key),
            device,
            state_dtype(param),
            wanted=lambda name: bool(broken) or not is_moment(name),
            noise=moment_noise(index, group, device, grid.shard, 1 + b),
            rows=torch.tensor(sorted(broken), device=device) if broken else None,
        )
        with self.store.swapped_in([storage], group, request) as (state,):
            self.rule.finish_pending(key, state)

    @property
    def has_owned_state(self) -> bool:
        """Whether a parameter that every rank holds whole has state with its owners alone."""
        owners = any(self.store.has_owners(b) for plan in (self.plan, self.aux_plan) for b in plan.buckets)
        return owners and self.is_scattered

    @property
    def is_scattered(self) -> bool:
        """Whether other ranks hold further parts of this rank's state, DTensors apart."""
        return self.ranks.world_size > 1 and any("step" in state for state in self.store.state.values())


class StepObserver(Protocol):
    """Measures a step while it runs; ``bucket_step`` is a ``BucketStep``."""

    stopwatch: Stopwatch

    def accumulated(self, bucket_step: Any) -> None: ...
    def transformed(self, bucket_step: Any, updates: Sequence[Tensor]) -> None: ...
    def batch_state(self, bucket_step: Any, b: int, state: State) -> None: ...
    def others(self, numels: Sequence[tuple[str, int]], group: Group) -> None: ...
    def adamw(
        self, names: Sequence[str], weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Group
    ) -> AbstractContextManager[None]: ...
    def own(
        self, group: Group, params: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        context: of the plans.
        verdict: the agreement of the ranks.
        groups: the parameter groups with the hyperparameters of this step.
        observer: measures the step, if there is one.
        undisturbed: nobody reads state or weights before the last bucket is done.
    """

    context: StepContext
    verdict: StepVerdict
    groups: list[Group]
    observer: StepObserver | None = None
    undisturbed: bool = False
