"""The parameters that take part in the step of a bucket, and this rank's work on them; kept from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.communication_dtype import communication_dtype
from hf_emopt.distributed.exchange import Exchange, Stacks
from hf_emopt.distributed.layout import compute_device, is_offloaded, is_sharded
from hf_emopt.distributed.plan import Batch, Bucket, OwnedRegion
from hf_emopt.engine.context import StepContext
from hf_emopt.formats.master_weights import needs_master
from hf_emopt.kernels.multi_tensor import MultiTensorTable, flat_span, kernels_run_on
from hf_emopt.linalg.newton_schulz_sharded import Shard
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.rules.base import RefreshClock


class BucketMembers:
    """The parameters of a bucket that take part, and this rank's work on them.

    Args:
        context: of the plans.
        index: of the bucket in its plan.
        bucket: the bucket.
        present: indices of the bucket's parameters that take part; the same on all ranks.

    Attributes:
        params: the parameters that take part.
        row: index of each in ``params``, by its index in the bucket.
        sharded: parameters and state are laid out over ranks, perhaps over one; else every rank holds copies of parameters,
            and owners hold the state.
        on_host: the wrapper keeps the parameters on the host, and the step works on copies.
        low_precision: weights have 16 bits.
        device: of the mathematics.
        kernels: foreach operations run as one launch there.
        exchange: brings matrices to owners and back; ``None`` in one process.
        every: all owned regions of this rank; ``owned``: the ones that take part.
        owned_at: from an index into ``every`` to one into ``owned``.
        batches: the plan's, of ``every``; the step leaves out rows of parameters without a gradient.
        jobs: for each batch ``(index into owned, matrix view, number of matrices)`` of the matrices that take part.
        whole: for each batch whether each job is all of its owned region, in the region's own order.
        stacks: the places of the owned regions in the stacks of their batches; ``None`` where a batch is not whole.
        complete: whether all owned regions take part.
        shards: for each batch this rank's part of matrices that a compute group transforms together; ``None`` for others.
    """

    def __init__(self, context: StepContext, index: int, bucket: Bucket, present: tuple[int, ...]) -> None:
        self.context, self.index, self.bucket, self.present = context, index, bucket, present
        self.grid = context.ranks.grid(bucket)
        self.params = [context.parameter(bucket, i) for i in present]
        first = self.params[0]
        self.sharded, self.on_host, self.device = is_sharded(first), is_offloaded(first), compute_device(first)
        self.low_precision = needs_master(first)
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.kernels = kernels_run_on(self.device)
        self.row = {i: k for k, i in enumerate(present)}
        self.every = bucket.owned(self.grid.position)
        self.owned = [s for s in self.every if s.parameter in self.row]
        index_of = {id(s): k for k, s in enumerate(self.owned)}
        self.owned_at = {i: index_of[id(s)] for i, s in enumerate(self.every) if id(s) in index_of}
        self.complete = len(self.owned) == len(self.every)
        self.scales = [bucket.parameters[s.parameter].scale for s in self.owned]
        self.batches = context.batches(index, bucket)
        self.jobs = [
            [
                (self.owned_at[i], view := self.every[i].matrix_views[u], view.shape[0])
                for i, u in batch.jobs
                if i in self.owned_at
            ]
            for batch in self.batches
        ]
        self.whole = [
            all(_is_plain(view) and len(self.owned[k].matrix_views) == 1 for k, view, _ in jobs) for jobs in self.jobs
        ]
        self.stacks = self._stacks() if all(self.whole) else None
        self.exchange: Exchange | None = None
        if self.grid.world_size > 1:  # of copies in 16 bits owners send weights, in their own dtype, and no updates
            weights_travel = self.low_precision and not self.sharded
            self.exchange = self.exact_exchange if weights_travel else self._exchange(exact=False)
        self._local_table: list[MultiTensorTable | None] = []
        self._rows: dict[tuple[int, torch.device], Tensor] = {}
        # For each batch: the parameter of each matrix that takes part, its refresh steps, and the schedule they are from.
        self.clock_parts: list[tuple[tuple[int, ...], Any, tuple[tuple[int, ...], ...]]] = [
            (tuple(self.row[self.owned[k].parameter] for k, _, size in jobs for _ in range(size)), None, ())
            for jobs in self.jobs
        ]
        self.shards = [self._shard(batch) for batch in self.batches]

    @classmethod
    def kept(cls, context: StepContext, index: int, bucket: Bucket, present: tuple[int, ...]) -> BucketMembers:
        """New members, which the context keeps under ``(id(bucket), present)``."""
        members = cls(context, index, bucket, present)
        context.keep_members((id(bucket), present), members)
        return members

    def _stacks(self) -> Stacks:
        shapes = tuple(owned_region.shape for owned_region in self.owned)
        rows, places = [(0, 0, 0)] * len(shapes), [(0, 0)] * len(shapes)
        for number, (batch, jobs) in enumerate((b, j) for b, j in zip(self.batches, self.jobs) if j):
            start = 0
            for k, _, size in jobs:
                rows[k], places[k] = (number, start, size), (number, start * math.prod(batch.shape))
                start += size
        return Stacks(tuple(rows), shapes, tuple(places))

    # ------------------------------------------------------------------ travel

    @cached_property
    def exact_exchange(self) -> Exchange:
        """An exchange in the parameters' own dtype."""
        return self._exchange(exact=True)

    def _exchange(self, exact: bool) -> Exchange:
        param = self.params[0]
        if exact:
            dtype = param.dtype
        elif self.bucket.local and self.bucket.storage.replicas == 1:  # nothing is sent, so nothing is rounded
            dtype = self.dtype
        else:
            dtype = communication_dtype(param.dtype, self.device.type, self.context.transport_dtype)
        return Exchange(self.bucket, self.grid, self.present, dtype, self.device)

    # ------------------------------------------------------------------ matrices of this rank

    def local_table(self, shapes: Sequence[Sequence[int]]) -> MultiTensorTable | None:
        """Flat spans of the owned regions: parameter slices on the left, ``stacks`` (or the owned regions) on the right.

        Args:
            shapes: of the parameter slices: this rank's part of each present parameter, or the owned regions.

        Returns:
            ``None`` where an owned region is no flat span of its slice.
        """
        if not self._local_table:
            self._local_table.append(self._make_local_table(shapes))
        return self._local_table[0]

    def _make_local_table(self, shapes: Sequence[Sequence[int]]) -> MultiTensorTable | None:
        spans = []
        for k, owned_region in enumerate(self.owned):
            source, span = k, (0, owned_region.numel)
            if self.sharded:
                source = self.row[owned_region.parameter]
                found = flat_span(self.within_shard(owned_region), shapes[source])
                if found is None:
                    return None
                span = found
            spans.append((source, span[0], k, 0, owned_region.numel))
        return (
            MultiTensorTable(spans) if self.stacks is None else MultiTensorTable(spans).within(right=self.stacks.places)
        )

    def within_shard(self, owned_region: OwnedRegion) -> tuple[slice, ...]:
        """An owned region as an index into the local tensor of this rank's shard, which holds all of it."""
        for region, offset in self.bucket.parameters[owned_region.parameter].storage.held(self.grid.shard):
            if all(start <= a and b <= stop for (a, b), (start, stop) in zip(owned_region.region, region)):
                return tuple(
                    slice(a - start + first, b - start + first)
                    for (a, b), (start, _), (first, _) in zip(owned_region.region, region, offset)
                )
        raise AssertionError(f"shard {self.grid.shard} does not hold the owned region {owned_region.region}")

    def rows(self, b: int, device: torch.device) -> Tensor:
        """Index on a device of the matrices of a batch that take part."""
        key = b, device
        if key not in self._rows:
            batch, offset = self.batches[b], 0
            rows: list[int] = []
            for (i, _), size in zip(batch.jobs, batch.sizes):
                if i in self.owned_at:
                    rows.extend(range(offset, offset + size))
                offset += size
            self._rows[key] = torch.tensor(rows, device=device)
        return self._rows[key]

    def follow_schedule(self, b: int) -> tuple[tuple[int, ...], ...]:
        """Refresh steps of the matrices of a batch that take part, by the schedule as it is now."""
        schedule, batch = self.context.schedule, self.batches[b]
        steps = tuple(
            schedule.of(self.bucket, self.every[i], u, k)
            for (i, u), size in zip(batch.jobs, batch.sizes)
            if i in self.owned_at
            for k in range(size)
        )
        self.clock_parts[b] = self.clock_parts[b][0], schedule.steps, steps
        return steps

    @cached_property
    def first_clocks(self) -> list[RefreshClock]:
        """Clocks of the batches for a rule without a schedule, which reads nothing in them."""
        return [RefreshClock((1,) * batch.count) for batch in self.batches]

    def _shard(self, batch: Batch) -> Shard | None:
        cut = batch.slicing
        if cut is None or not cut.compute_group:
            return None
        rank = cut.compute_group.index(self.grid.position)
        total, largest = self.context.ranks.reductions(self.bucket, cut.compute_group)
        start, stop = cut.spans[rank]
        return Shard(cut.dim, cut.full_shape, start, stop, total, largest, len(cut.compute_group), rank, cut.method)


def _is_plain(matrix_view: MatrixView) -> bool:
    """Whether the matrices are the owned region's elements in their own order."""
    order = matrix_view.batch + matrix_view.rows + matrix_view.cols
    return matrix_view.dim is None and order == tuple(range(len(matrix_view.view)))


def is_whole_region(owned_region: OwnedRegion, matrix_view: MatrixView) -> bool:
    """Whether a matrix view is all of its owned region, in the region's own order."""
    return len(owned_region.matrix_views) == 1 and _is_plain(matrix_view)
