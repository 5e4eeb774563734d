"""Refreshing what a rule computes from its factors (roots, eigenbases), and what happens when that fails.

Each factor is refreshed by itself. Factors of one size that are due on the same step are computed in one call, whatever class
of blocks and dimension they belong to.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_emopt.kernels.streams import SideStreams
from hf_emopt.linalg.matmul_precision import matmul_precision
from hf_emopt.linalg.retry_ladder import LadderReport
from hf_emopt.rules.base import BatchKey, Group, RefreshClock
from hf_emopt.rules.blocks import BlockState, FactorDim
from hf_emopt.rules.refresh_schedule import ScheduledRule

logger = logging.getLogger("hf_emopt")

Refresh = Literal["staggered", "synchronous"]

STREAMS = 2
"""Streams on which batches are refreshed at the same time. Each one keeps some memory for its CUDA graphs."""

FIRST_PENDING = -1
"""Value of ``failures`` for a factor that has had no refresh although the step of the first one has passed."""


@dataclass(frozen=True)
class Snapshot:
    """The input of a refresh: tensors ``(factors, ...)`` by name, of factors of one size.

    Attributes:
        order: number of dimensions of their blocks that have a factor.
    """

    tensors: dict[str, Tensor]
    order: int


@dataclass(frozen=True)
class Refreshed:
    """The result of a refresh.

    Attributes:
        tensors: new state ``(factors, ...)`` by name.
        failed: ``(factors,)`` bool.
        clean: the host knows that none failed.
        deferred: ``failed`` has not been read, and what failed has not climbed the retry ladder.
    """

    tensors: dict[str, Tensor]
    failed: Tensor
    clean: bool = False
    deferred: bool = False

    def split(self, sizes: Sequence[int]) -> list[Refreshed]:
        """Results of consecutive runs of these numbers of factors."""
        parts = {name: value.split(list(sizes)) for name, value in self.tensors.items()}
        return [
            replace(self, tensors={name: values[i] for name, values in parts.items()}, failed=failed)
            for i, failed in enumerate(self.failed.split(list(sizes)))
        ]


@dataclass
class PendingRefresh:
    """A refresh whose failures are on their way to the host.

    Attributes:
        factor_dims: the refreshed factors. Their blocks hold no gradients.
        flags: on the host, one for each factor, in order; valid once ``arrived``.
        options: hyperparameters of the step.
    """

    factor_dims: list[FactorDim]
    flags: Tensor
    arrived: torch.cuda.Event | None
    options: Group

    def read(self) -> list[bool]:
        """The flags. The wait for them is short, since they are asked for a step later."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.flags.tolist()  # type: ignore[no-any-return]


class RefreshingRule(ScheduledRule):
    """A rule that refreshes its factors on a schedule, and goes on with the old result where a refresh fails."""

    read_later: ClassVar[frozenset[str]] = frozenset({"cuda"})
    """Device types on which failures are read when the next step begins, so that the host does not wait for the refresh."""

    def __init__(self) -> None:
        self.failures = 0
        self.ladder = LadderReport()
        self._streams = SideStreams("refresh", STREAMS)
        self._streams_used = False
        self._calls = 0
        self._pending: dict[BatchKey, PendingRefresh] = {}
        self._first_pending: dict[BatchKey | None, frozenset[tuple[int, int, int]]] = {}
        """For each batch, the class, dimension and number of every block whose first refresh is pending. The host knows
        nothing of batches that are missing here."""
        self._rows: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def __getstate__(self) -> dict[str, object]:
        """A copy knows nothing of the device; the optimizer finishes pending refreshes before it is copied."""
        return {**self.__dict__, "_pending": {}, "_first_pending": {}, "_rows": {}}

    def factor_dim(self, block: BlockState, d: int, chosen: Sequence[int], order: int) -> FactorDim:
        """Dimension ``d`` of some blocks. Their index on the device is kept, since the same ones come back every period."""
        numbers, device = tuple(chosen), block.grads.device
        if len(numbers) == block.grads.shape[0]:
            return FactorDim(block, d, numbers, None, order)
        if (numbers, device) not in self._rows:
            if len(self._rows) > 4096:  # gradients that come and go make many subsets
                self._streams.wait()  # a refresh may still read them
                self._rows.clear()
            self._rows[numbers, device] = torch.tensor(numbers, device=device)
        return FactorDim(block, d, numbers, self._rows[numbers, device], order)

    # ------------------------------------------------------------------ refresh

    @abstractmethod
    def snapshot(self, factor_dim: FactorDim, group: Group) -> dict[str, Tensor]:
        """The input of a refresh of one dimension of some blocks. It may be views of state."""

    @abstractmethod
    def compute(self, snapshot: Snapshot, group: Group, first: bool, deferred: bool = False) -> Refreshed:
        """Refreshes the factors of a snapshot. Writes no state.

        Args:
            first: this is the first refresh of these factors.
            deferred: report failures instead of climbing the retry ladder, where that spares a read of the device.
        """

    @abstractmethod
    def install(
        self, dims: Sequence[FactorDim], new: Sequence[Refreshed], keep: Sequence[Tensor], group: Group
    ) -> None:
        """Writes a refresh to the state.

        Args:
            dims: dimensions of the same blocks.
            new: the result for each dimension.
            keep: for each dimension, ``(blocks,)`` bool: leave the old result.
        """

    def refresh(
        self,
        blocks: Sequence[BlockState],
        group: Group,
        ok: Tensor | None,
        clock: RefreshClock,
        where: AbstractContextManager[None] | None = None,
    ) -> None:
        """Refreshes the factors that are due.

        Args:
            where: a context for factors that have been refreshed before. The first refresh decomposes them in full and waits
                for the result, so it runs outside.
        """
        first, again = self.due(blocks, group, clock)
        pending, again = self._first_pending_among(again, blocks, group, clock.key)
        if first or pending:
            self.refresh_now([*first, *pending], group, True, ok)
            if clock.key is None:  # the blocks are some of a batch, and the host does not know which
                self._first_pending.clear()
            else:  # the refresh has waited for the device already
                self._first_pending[clock.key] = self._read_first_pending(blocks, group)
        if again:
            with where or nullcontext():
                self.refresh_now(again, group, False, ok, clock.key)

    def refresh_now(
        self,
        dims: Sequence[FactorDim],
        group: Group,
        first: bool,
        ok: Tensor | None,
        key: BatchKey | None = None,
    ) -> None:
        """Refreshes factors and writes the result.

        Args:
            key: the batch whose failures may be retried in its next step; ``None`` to retry them at once.
        """
        results: list[tuple[FactorDim, Refreshed]] = []
        unseen: dict[int, Tensor] = {}
        deferred = key is not None and dims[0].block.grads.device.type in self.read_later
        for rows in [dim.rows for dim in dims if dim.rows is not None and dim.rows.is_cuda]:
            rows.record_stream(torch.cuda.current_stream(rows.device))  # a side stream, which may outlive this rule
        alike: dict[tuple[int, int], list[FactorDim]] = {}
        for dim in dims:
            alike.setdefault((dim.block.sizes[dim.d], dim.order), []).append(dim)
        for together in alike.values():
            snapshot, sizes = self._snapshot(together, group), [len(dim.chosen) for dim in together]
            results += zip(together, self.compute(snapshot, group, first, deferred).split(sizes))
            if first:
                unseen |= zip(map(id, together), _unseen(snapshot, ok).split(sizes))
        of_blocks: dict[tuple[int, tuple[int, ...]], list[tuple[FactorDim, Refreshed]]] = {}
        for dim, new in results:
            of_blocks.setdefault((dim.block.index, dim.chosen), []).append((dim, new))
        for same in of_blocks.values():
            same.sort(key=lambda pair: pair[0].d)
            keep = [new.failed if ok is None else new.failed | ~ok for _, new in same]
            keep = [kept | unseen[id(dim)] if first else kept for kept, (dim, _) in zip(keep, same)]
            self.install([dim for dim, _ in same], [new for _, new in same], keep, group)
        if key is not None and any(new.deferred for _, new in results):
            self._read_later(key, [(dim, new) for dim, new in results if new.deferred], group, ok)
        for dim, new in results:
            if first:
                self._note_failures(dim, new.failed & ~unseen[id(dim)], group, new.clean)
                dim.put("failures", dim.take("failures").masked_fill(unseen[id(dim)], FIRST_PENDING))
            elif not new.deferred:
                self._note_failures(dim, new.failed, group, new.clean)

    def _snapshot(self, alike: Sequence[FactorDim], group: Group) -> Snapshot:
        parts = [self.snapshot(dim, group) for dim in alike]
        if len(parts) == 1:
            return Snapshot(parts[0], alike[0].order)
        return Snapshot({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, alike[0].order)

    def refresh_on_side_stream(
        self, blocks: Sequence[BlockState], group: Group, ok: Tensor | None, clock: RefreshClock, device: torch.device
    ) -> None:
        """Does what :meth:`refresh` does, where possible on a side stream that runs until :meth:`join`."""
        possible = clock.undisturbed and clock.key is not None
        # A CUDA graph of the step has to end with the step.
        if not possible or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self.refresh(blocks, group, ok, clock)
            return
        index, state = self._calls % STREAMS, blocks[0].state  # of all blocks of the batch
        self._calls += 1
        self._streams_used = True
        used = [x for x in (*state.values(), ok) if x is not None and x.device == device]
        self.refresh(blocks, group, ok, clock, self._streams.on(device, index, used))

    def join(self) -> None:
        self._calls = 0  # a period later the same batch is on the same stream, which has its graph
        # A stream that is recorded has waited for everything before.
        if self._streams_used and not torch.cuda.is_current_stream_capturing():
            self._streams.wait()

    # ------------------------------------------------------------------ the first refresh, made up for

    def _read_first_pending(self, blocks: Sequence[BlockState], group: Group) -> frozenset[tuple[int, int, int]]:
        """Class, dimension and number of the blocks whose first refresh is pending. Reads the device."""
        places = [(block, d) for block in blocks for d in self.factored(block, group)]
        counts = [block.tensor("failures", d) for block, d in places]
        flags: list[bool] = (torch.cat(counts) == FIRST_PENDING).tolist() if counts else []
        found = set()
        for (block, d), count in zip(places, counts):
            found |= {(block.index, d, number) for number in range(len(count)) if flags[number]}
            flags = flags[len(count) :]
        return frozenset(found)

    def _first_pending_among(
        self, dims: list[FactorDim], blocks: Sequence[BlockState], group: Group, key: BatchKey | None
    ) -> tuple[list[FactorDim], list[FactorDim]]:
        """The factors whose first refresh is pending and that have had a gradient by now, and those with a first refresh.

        A factor that still has had no gradient (of an idle expert) is in neither. Reads the device if the host does not know.
        """
        if not dims:
            return [], []
        if key is None:
            flags = (torch.cat([dim.take("failures") for dim in dims]) == FIRST_PENDING).tolist()
        else:
            if key not in self._first_pending:
                self._first_pending[key] = self._read_first_pending(blocks, group)
            known = self._first_pending[key]
            flags = [(dim.block.index, dim.d, number) in known for dim in dims for number in dim.chosen]
        if not any(flags):
            return [], dims
        pending, again = self._divided(dims, flags)
        snapshots = [self._snapshot([dim], group) for dim in pending]
        pending, _ = self._divided(pending, torch.cat([~_unseen(s, None) for s in snapshots]).tolist())
        return pending, again

    def _divided(self, dims: Sequence[FactorDim], flags: list[bool]) -> tuple[list[FactorDim], list[FactorDim]]:
        """The factors whose flag is true, and the others. ``flags`` has one for each block of each dimension, in order."""
        found: dict[bool, list[FactorDim]] = {True: [], False: []}
        for dim in dims:
            own, flags = flags[: len(dim.chosen)], flags[len(dim.chosen) :]
            for answer, those in found.items():
                numbers = [number for number, flag in zip(dim.chosen, own) if flag is answer]
                those += [self.factor_dim(dim.block, dim.d, numbers, dim.order)] if numbers else []
        return found[True], found[False]

    def may_await_first(self, key: BatchKey | None) -> bool:
        """Whether a first refresh in the batch is pending, or the host does not know."""
        return key not in self._first_pending or bool(self._first_pending[key])

    # ------------------------------------------------------------------ failures, read a step later

    def _read_later(
        self, key: BatchKey, results: Sequence[tuple[FactorDim, Refreshed]], group: Group, ok: Tensor | None
    ) -> None:
        """Sends the failures to the host. A factor that failed keeps its count until it has climbed the retry ladder."""
        dims = []
        for dim, new in results:
            dim.put("failures", dim.take("failures") * new.failed)
            grads = dim.block.grads.new_zeros(()).expand(dim.block.grads.shape)  # the shape, without the memory
            dims.append(replace(dim, block=replace(dim.block, grads=grads)))
        failed = torch.cat([new.failed for _, new in results])
        flags = (failed if ok is None else failed & ok).to("cpu", non_blocking=True)
        arrived = None
        if failed.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(failed.device))
        self._pending[key] = PendingRefresh(dims, flags, arrived, dict(group))

    def to_retry(self, key: BatchKey) -> frozenset[int]:
        pending = self._pending.get(key)
        if pending is None:
            return frozenset()
        flags = pending.read()
        if not any(flags):
            self.finish_pending(key, {})
        blocks = [(dim.block.count, number) for dim in pending.factor_dims for number in dim.chosen]
        return frozenset(number // count for (count, number), failed in zip(blocks, flags) if failed)

    def finish_pending(self, key: BatchKey | None, matrix_state: dict[str, Tensor]) -> None:
        """Retries, on the retry ladder, the refreshes that failed in the batch's last step.

        The retry belongs to the last step and comes before anything else of the next one. It is computed from the state that
        the last step left, which is also the state of a checkpoint that is saved between the two. A next step that is skipped
        does not undo it.
        """
        pending = None if key is None else self._pending.pop(key, None)
        if pending is None:
            return
        flags = pending.read()
        self.ladder += LadderReport(flags.count(False))
        for dim in pending.factor_dims:
            dim.block.state = matrix_state
        failed, _ = self._divided(pending.factor_dims, flags)
        if failed:
            self._streams.wait()  # libraries keep some memory for all streams
            with matmul_precision(pending.options["matmul_precision"]):
                self.refresh_now(failed, pending.options, False, None)

    def forget(self, key: BatchKey | None = None) -> None:
        for known in (self._first_pending, self._pending):
            if key is None:
                known.clear()
            else:
                known.pop(key, None)

    def init_failures(self, shape: Sequence[int], group: Group, device: torch.device) -> dict[str, Tensor]:
        """Counters of failed refreshes in a row, one for each factor of a batch of this shape."""
        return {
            f"failures.{index}.{d}": torch.zeros(shape[0], c.count, dtype=torch.int32, device=device)
            for index, c in enumerate(self.grid(shape[1:], group).classes)
            for d, size in enumerate(c.sizes)
            if self.has_factor(size, group)
        }

    def _note_failures(self, dim: FactorDim, failed: Tensor, group: Group, clean: bool = False) -> None:
        """Counts failed refreshes. The factors go on with their old result.

        Args:
            clean: the host knows that none failed; otherwise this reads the device.

        Raises:
            RuntimeError: when a factor has failed more than ``tolerated_failures`` times in a row.
        """
        consecutive = (dim.take("failures").clamp_min(0) + 1) * failed
        dim.put("failures", consecutive)
        number = 0 if clean else int(failed.sum())
        if not number:
            return
        self.failures += number
        worst = int(consecutive.max())
        logger.warning(
            "%s: %d side(s) of blocks could not be refreshed and keep their previous preconditioner (%d in a row at most, "
            "%d in all)", self.name, number, worst, self.failures,
        )  # fmt: skip
        if worst > group["tolerated_failures"]:
            raise RuntimeError(
                f"{self.name}: a preconditioner could not be refreshed {worst} times in a row (tolerated_failures="
                f"{group['tolerated_failures']}). Its factor is probably not finite or overflows: lower the learning rate, "
                "clip gradients, or raise epsilon (and keep roots in float32 or bfloat16: float16 ends at 65504)"
            )


def without_async_refresh(state_dict: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's ``state_dict`` without what ``refresh="async"`` of earlier versions left in it.

    Such groups are refreshed as ``"staggered"``, with a warning. Results that were under way are dropped: the factors keep
    their old result until they are due again.
    """
    if not any("async_delay" in group or group.get("refresh") == "async" for group in state_dict["param_groups"]):
        return state_dict
    groups = [{key: value for key, value in g.items() if key != "async_delay"} for g in state_dict["param_groups"]]
    asynchronous = [group for group in groups if group.get("refresh") == "async"]
    if not asynchronous:
        return {**state_dict, "param_groups": groups}
    for group in asynchronous:
        group["refresh"] = "staggered"
    warnings.warn(
        "the optimizer state was saved with refresh='async', which this version does not have: it goes on with "
        "refresh='staggered', and refreshes that were under way are dropped",
        stacklevel=3,
    )
    state = {
        index: {key: value for key, value in entry.items() if not key.startswith(("pending.", "next_"))}
        for index, entry in state_dict["state"].items()
    }
    return {**state_dict, "param_groups": groups, "state": state}


def _unseen(snapshot: Snapshot, ok: Tensor | None) -> Tensor:
    """For each factor, whether its first refresh must wait: the step is skipped, or all gradients so far were zero.

    A LoRA factor has gradients of zero as long as the other factor is zero. The first refresh is then made when the factor is
    due next.
    """
    seen = snapshot.tensors["factor"].diagonal(dim1=-2, dim2=-1).amax(-1) != 0
    return ~seen if ok is None else ~(seen & ok)
