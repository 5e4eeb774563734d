"""Whole matrices of one rank in, their updates out: the middle of a bucket's step, in which nothing travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Stacks
from hf_emopt.distributed.plan import Batch, Bucket
from hf_emopt.engine.engine import Engine
from hf_emopt.formats.rounding_noise import moment_noise
from hf_emopt.kernels.multi_tensor import runs_work
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.rules.base import Group, RefreshClock, Shard

if TYPE_CHECKING:
    from hf_emopt.engine.observer import StepObserver

__all__ = ["Roster", "Transform"]

State = dict[str, Tensor]


def _is_plain(matrix_view: MatrixView) -> bool:
    """Whether the matrix view's matrices are the owned region's elements in their own order."""
    return matrix_view.dim is None and matrix_view.batch + matrix_view.rows + matrix_view.cols == tuple(
        range(len(matrix_view.view))
    )


class Roster:
    """Who takes part in a bucket on this rank, which follows from the plan and from the parameters with a gradient.

    Attributes:
        every: this rank's owned regions; ``owned`` those of them that take part.
        row: place of each present parameter among them.
        owned_at: from an index into ``every`` to one into ``owned``.
        batches: the plan's, of all owned regions; those of parameters without a gradient are left out row by row.
        jobs: for each batch ``(index into owned, matrix_view, matrices)`` of what takes part.
        whole: for each batch whether each job is all of its owned region, in the owned region's own order.
        stacks: where the owned regions lie in the batches that anything takes part of, where that is so of all of them.
    """

    def __init__(self, engine: Engine, index: int, bucket: Bucket, present: Sequence[int]) -> None:
        chosen = set(present)
        self.row = {i: k for k, i in enumerate(present)}
        self.every = bucket.owned(engine.grid_of_bucket(bucket).position)
        self.owned = [s for s in self.every if s.parameter in chosen]
        place = {id(owned_region): k for k, owned_region in enumerate(self.owned)}
        self.owned_at = {
            i: place[id(owned_region)] for i, owned_region in enumerate(self.every) if id(owned_region) in place
        }
        self.batches = engine.batches(index, bucket)
        self.jobs = [
            [
                (self.owned_at[i], matrix_view := self.every[i].matrix_views[u], matrix_view.shape[0])
                for i, u in batch.jobs
                if i in self.owned_at
            ]
            for batch in self.batches
        ]
        self.whole = [
            all(_is_plain(matrix_view) and len(self.owned[k].matrix_views) == 1 for k, matrix_view, _ in jobs)
            for jobs in self.jobs
        ]
        self.stacks = self._stacks() if all(self.whole) else None

    def _stacks(self) -> Stacks:
        shapes = tuple(owned_region.shape for owned_region in self.owned)
        rows, places = [(0, 0, 0)] * len(shapes), [(0, 0)] * len(shapes)
        for number, (batch, jobs) in enumerate((b, j) for b, j in zip(self.batches, self.jobs) if j):
            start = 0
            for k, _, size in jobs:
                rows[k], places[k] = (number, start, size), (number, start * math.prod(batch.shape))
                start += size
        return Stacks(tuple(rows), shapes, tuple(places))


class Transform:
    """Whole matrices of one rank's owned regions in, updates of the owned regions out."""

    def __init__(
        self,
        engine: Engine,
        index: int,
        bucket: Bucket,
        roster: Roster,
        group: Group,
        rounds: dict[int, int],
        device: torch.device,
    ) -> None:
        self.engine, self.index, self.bucket, self.roster = engine, index, bucket, roster
        self.owned, self.group, self.rounds, self._device = roster.owned, group, rounds, device
        self.grid = engine.grid_of_bucket(bucket)
        self.every, self.owned_at, self.batches = roster.every, roster.owned_at, roster.batches
        self._rooms: list[Tensor | None] = []
        self._kernels = runs_work(device)
        self.scales = [1.0] * len(self.owned)
        """What each update is still to be multiplied by."""

    def stack(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """One ``(B, m, n)`` for each batch, of the owned regions; ``None`` where none of a batch takes part."""
        return [self._stacked(b, inputs, self._device) for b in range(len(self.batches))]

    def _stacked(self, b: int, inputs: Sequence[Tensor], device: torch.device) -> Tensor | None:
        parts = [matrix_view.extract(inputs[k]) for k, matrix_view, _ in self.roster.jobs[b]]
        if not parts:
            return None
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)

    def make_room(self, like: Tensor, wire: torch.dtype | None = None) -> list[Tensor]:
        """What is to be filled: the roster's stacks; where it has none, a tensor for each owned region, rows of a batch
        where that has whole owned regions.

        Args:
            wire: dtype of what will arrive. Where it is narrow, and the rule reads that, the room has it.
        """
        device, dtype = self._device, torch.promote_types(like.dtype, torch.float32)
        if wire is not None and all(map(self._defers, range(len(self.batches)))):
            dtype = wire
        if self.roster.stacks is not None:
            self._rooms = [
                torch.empty(sum([size for _, _, size in jobs]), *batch.shape, dtype=dtype, device=device)
                if jobs
                else None
                for batch, jobs in zip(self.batches, self.roster.jobs)
            ]
            return [room for room in self._rooms if room is not None]
        targets = [torch.empty(0)] * len(self.owned)
        for batch, jobs, whole in zip(self.batches, self.roster.jobs, self.roster.whole):
            if not jobs or not whole:
                self._rooms.append(None)
                for k, _, _ in jobs:
                    if not targets[k].numel():
                        targets[k] = torch.empty(self.owned[k].shape, dtype=dtype, device=device)
                continue
            sizes = [size for _, _, size in jobs]
            room = torch.empty(sum(sizes), *batch.shape, dtype=dtype, device=device)
            for (k, _, _), rows in zip(jobs, room.split(sizes)):
                targets[k] = rows.view(self.owned[k].shape)
            self._rooms.append(room)
        return targets

    def _defers(self, b: int) -> bool:
        """Whether updates of a batch leave the transform without their scale, for the next pass to multiply by."""
        possible = self.roster.whole[b] and self.batches[b].cut is None and self.engine.rule.defers_scale(self.group)
        return possible and self._kernels

    def filled(self, targets: Sequence[Tensor]) -> list[Tensor | None]:
        """As :meth:`stack`, of what :meth:`make_room` made."""
        if self.roster.stacks is not None:
            return self._rooms
        return [
            self._stacked(b, targets, targets[0].device) if room is None and targets else room
            for b, room in enumerate(self._rooms)
        ]

    def run(self, stacked: list[Tensor | None], watch: StepObserver | None = None) -> list[Tensor]:
        """The update of each owned region, as the roster's stacks where it has them.

        Args:
            watch: measures the state of whole matrices after it.
        """
        together = self.roster.stacks is not None
        updates: list[Tensor | None] = [] if together else [None] * len(self.owned)
        whole = len(self.owned) == len(self.every)
        for b, (batch, x) in enumerate(zip(self.batches, stacked)):
            key = (self.index, b)
            storage = self.engine.states.of_batch(key, self.bucket, batch, self.group)
            if x is None:
                continue
            jobs = self.roster.jobs[b]
            if self.group["state_dtype"] != "float32" and self.engine.rule.to_retry(key):
                self.engine.settle_batch(key, storage)  # others' moments than this step's, and though it be skipped
            with self._lent(key, storage, x, whole) as lent:
                out, scale = self._transformed(x, lent, b, key, whole)
                if watch is not None:
                    watch.matrix_state(self.bucket, self, b, lent[0])
            if together:
                updates.append(out)
                for k, _, _ in jobs:
                    self.scales[k] = scale
                continue
            for part, (k, matrix_view, _) in zip(out.split([size for _, _, size in jobs]), jobs):
                if self.roster.whole[b] or (_is_plain(matrix_view) and len(self.owned[k].matrix_views) == 1):
                    updates[k], self.scales[k] = part.reshape(self.owned[k].shape), scale
                    continue
                if updates[k] is None:
                    updates[k] = torch.empty(self.owned[k].shape, dtype=part.dtype, device=part.device)
                matrix_view.insert(updates[k], part)  # type: ignore[arg-type]
        for k, owned_region in enumerate(self.owned):
            self.scales[k] *= self.bucket.parameters[owned_region.parameter].scale
        return updates  # type: ignore[return-value]

    def _lent(
        self, key: tuple[int, int], storage: State, x: Tensor, whole: bool
    ) -> AbstractContextManager[list[State]]:
        """State of a batch while it is transformed."""
        if self.engine.states.lender.lends_as_kept(self.group):
            return nullcontext([storage])
        noise = moment_noise(self.index, self.group, x.device, self.grid.shard, 1 + key[1])
        ok, wide = self.engine.ok_on(x.device), torch.promote_types(x.dtype, torch.float32)
        rows = None
        if not whole and self.group["state_dtype"] != "float32":
            rows = self.engine.rows(self._rows(self.batches[key[1]]), x.device)
        return self.engine.states.lender.lent(
            ("units", key), [storage], x.device, lambda name: True, wide, self.group, ok, noise, rows=rows
        )

    def _transformed(
        self, x: Tensor, lent: list[State], b: int, key: tuple[int, int], whole: bool
    ) -> tuple[Tensor, float]:
        """:meth:`_transform` with the state of the matrices that take part, all of a batch or some rows of it."""
        storage = matrix_state = lent[0]
        if not whole:
            self.engine.rule.finish_pending(key, storage)
            rows = self._rows(self.batches[b])
            index = {name: self.engine.rows(rows, value.device) for name, value in storage.items()}
            matrix_state = {name: value[index[name]] for name, value in storage.items()}
        out, scale = self._transform(x, matrix_state, b, key if whole else None)
        if self._kernels:  # tall matrices may come out transposed, and the next pass reads along memory
            out = out.contiguous()
        if not whole:
            for name, value in matrix_state.items():
                storage[name][index[name]] = value
        return out, scale

    def _transform(self, x: Tensor, matrix_state: State, b: int, key: tuple[int, int] | None) -> tuple[Tensor, float]:
        """The update of a batch, and what it is still to be multiplied by."""
        batch, rule, ok = self.batches[b], self.engine.rule, self.engine.ok_on(x.device)
        clock = self._clock(batch, key)
        cut, first = batch.cut, not batch.copy
        scale = 1.0
        if self._defers(b):
            out, scale = rule.transform_unscaled(x, matrix_state, self.group, ok, clock)
        elif cut is None:
            out = rule.transform(x, matrix_state, self.group, ok, clock)
        elif not cut.compute_group:
            out = rule.transform_part(x, matrix_state, self.group, ok, clock, cut.full_shape)
        else:
            place = cut.compute_group.index(self.grid.position)
            total, largest = self.engine.compute_group_reductions(self.bucket, cut.compute_group)
            shard = Shard(
                cut.dim, cut.full_shape, *cut.spans[place], total, largest, len(cut.compute_group), place, cut.method
            )  # fmt: skip
            out = rule.transform_shard(x, matrix_state, self.group, ok, clock, shard)
            first = place == 0
        self.engine.transform_count += x.shape[0] if first else 0
        # The result is scaled in place later: it must not be the rule's own state, or the message it was given.
        taken = {t.untyped_storage().data_ptr() for t in (x, *matrix_state.values())}
        return (out.clone() if out.untyped_storage().data_ptr() in taken else out), scale

    def _rows(self, batch: Batch) -> list[int]:
        """Places, in the batch, of the matrices that take part."""
        here, offset = self.owned_at, 0
        rows: list[int] = []
        for (i, _), size in zip(batch.jobs, batch.sizes):
            if i in here:
                rows.extend(range(offset, offset + size))
            offset += size
        return rows

    def _clock(self, batch: Batch, key: tuple[int, int] | None) -> RefreshClock:
        if not self.engine.rule.scheduled:
            return RefreshClock((1,) * batch.count)
        here = self.owned_at
        jobs = [(self.every[i], u, size) for (i, u), size in zip(batch.jobs, batch.sizes) if i in here]
        return RefreshClock(
            tuple(self.rounds[s.parameter] for s, _, size in jobs for _ in range(size)),
            tuple(self.engine.slot(self.bucket, s, u, b) for s, u, size in jobs for b in range(size)),
            key,
            key is not None and self.engine.undisturbed and self.engine.states.lender.lends_as_kept(self.group),
        )
