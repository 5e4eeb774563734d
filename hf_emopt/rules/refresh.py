"""When what is computed from the factors is computed anew: at once, spread over the period, or in the background.

A refresh concerns one dimension of a block, a side, by itself. Sides of one size that are due on the same step are
computed in one call, whatever class of blocks and dimension they belong to.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_emopt.kernels.streams import Background, Beside
from hf_emopt.linalg.matmul_precision import matmul_precision
from hf_emopt.linalg.retry_ladder import LadderReport
from hf_emopt.rules.base import Clock, Group
from hf_emopt.rules.blocks import BlockState, Side
from hf_emopt.rules.refresh_results import Flight, Refreshed, Snapshot, Unread, alike_sides, of_same_blocks
from hf_emopt.rules.refresh_schedule import ScheduledRule

__all__ = ["REFRESHES", "Refresh", "RefreshingRule"]

logger = logging.getLogger("hf_emopt")

Refresh = Literal["staggered", "synchronous", "async"]
REFRESHES: tuple[str, ...] = ("staggered", "synchronous", "async")

LANES = 2
"""Streams on which refreshes of different batches run beside one another. Each keeps some memory for its CUDA graphs."""

LATE = -1
"""Stands in place of the number of failures, of a side that has had no refresh though the round of the first has passed."""


class RefreshingRule(ScheduledRule):
    """The schedule of refreshes, their failures, and those that run in the background."""

    read_later: ClassVar[frozenset[str]] = frozenset({"cuda"})
    """Kinds of devices on which failures are read as the step after the refresh begins, so that the host need not wait for
    it. A rule calls :meth:`mend` there."""

    def __init__(self) -> None:
        self.failures = 0
        self.ladder = LadderReport()
        self._background = Background()
        self._beside = Beside("refresh", LANES)
        self._calls = 0
        self._flights: dict[tuple[int, int], list[Flight]] = {}
        self._unread: dict[tuple[int, int], Unread] = {}
        self._late: dict[tuple[int, int] | None, frozenset[tuple[int, int, int]]] = {}
        """Of batches, which sides are late; of others the host does not know."""
        self._rows: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    def __getstate__(self) -> dict[str, object]:
        """What is being computed is settled before a copy is made, by the optimizer."""
        return {**self.__dict__, "_flights": {}, "_unread": {}, "_late": {}, "_rows": {}}

    def side(self, block: BlockState, d: int, chosen: Sequence[int], order: int) -> Side:
        """A side of some blocks. Their index on the device is kept, since they come back every period."""
        numbers, device = tuple(chosen), block.grads.device
        if len(numbers) == block.grads.shape[0]:
            return Side(block, d, numbers, None, order)
        if (numbers, device) not in self._rows:
            if len(self._rows) > 4096:  # gradients that come and go make many subsets
                self._beside.wait()  # which may read them still
                self._rows.clear()
            self._rows[numbers, device] = torch.tensor(numbers, device=device)
        return Side(block, d, numbers, self._rows[numbers, device], order)

    # ------------------------------------------------------------------ refresh

    @abstractmethod
    def snapshot(self, side: Side, group: Group) -> dict[str, Tensor]:
        """What a refresh of a side is computed from, which may be views of state."""

    @abstractmethod
    def compute(self, snapshot: Snapshot, group: Group, first: bool, unread: bool = False) -> Refreshed:
        """The refresh itself: a function of the snapshot alone, so that it may run on the side.

        Args:
            first: these sides have never been refreshed; all of the first round are, and those that were late.
            unread: leave what fails as failed, if that spares a read of the device.
        """

    @abstractmethod
    def install(self, sides: Sequence[Side], new: Sequence[Refreshed], keep: Sequence[Tensor], group: Group) -> None:
        """Puts a refresh to use.

        Args:
            sides: dimensions of the same blocks.
            new: the result for each.
            keep: for each, one bool a block: stay with the old.
        """

    @abstractmethod
    def refreshed_names(self, group: Group) -> tuple[str, ...]:
        """State that a refresh makes anew, by its name without class and dimension."""

    def refresh(
        self,
        blocks: Sequence[BlockState],
        group: Group,
        ok: Tensor | None,
        clock: Clock,
        where: AbstractContextManager[None] | None = None,
    ) -> None:
        """Refreshes the sides that are due, now or in the background.

        Args:
            where: entered for sides that have been refreshed before; the first refresh decomposes them and waits for that.
        """
        in_background = group["refresh"] == "async"
        if in_background:
            self._install_arrivals(blocks, group, clock)
        first, again = self.due(blocks, group, clock)
        late, again = self._late_among(again, blocks, group, clock.key)
        if first or late:
            self.refresh_now([*first, *late], group, True, ok)
            if clock.key is None:  # these are some of a batch: which, is not known here
                self._late.clear()
            else:  # it has waited for the device already
                self._late[clock.key] = self._which_late(blocks, group)
        if again and in_background:
            self._launch(again, group, ok, clock)
        elif again:
            with where or nullcontext():
                self.refresh_now(again, group, False, ok, clock.key)

    def refresh_now(
        self,
        sides: Sequence[Side],
        group: Group,
        first: bool,
        ok: Tensor | None,
        key: tuple[int, int] | None = None,
    ) -> None:
        """Refreshes the sides and puts the result to use.

        Args:
            key: of the batch, where what fails may climb the ladder in its next step.
        """
        results: list[tuple[Side, Refreshed]] = []
        none: dict[int, Tensor] = {}
        unread = key is not None and sides[0].block.grads.device.type in self.read_later
        for rows in [side.rows for side in sides if side.rows is not None and side.rows.is_cuda]:
            rows.record_stream(torch.cuda.current_stream(rows.device))  # a lane's, which may outlive this rule
        for alike in alike_sides(sides):
            snapshot, sizes = self._snapshot(alike, group, copy=False), [len(s.chosen) for s in alike]
            results += zip(alike, self.compute(snapshot, group, first, unread).split(sizes))
            if first:
                none |= zip(map(id, alike), _has_none(snapshot, ok).split(sizes))
        for same in of_same_blocks(results):
            keep = [new.failed if ok is None else new.failed | ~ok for _, new in same]
            keep = [kept | none[id(side)] if first else kept for kept, (side, _) in zip(keep, same)]
            self.install([side for side, _ in same], [new for _, new in same], keep, group)
        later = [(side, new) for side, new in results if new.unread]
        if key is not None and later:
            self._read_later(key, later, group, ok)
        for side, new in results:
            if first:
                self.note_failures(side, new.failed & ~none[id(side)], group, new.clean)
                side.put("failures", side.take("failures").masked_fill(none[id(side)], LATE))
            elif not new.unread:
                self.note_failures(side, new.failed, group, new.clean)

    # ------------------------------------------------------------------ sides that are late

    def _which_late(self, blocks: Sequence[BlockState], group: Group) -> frozenset[tuple[int, int, int]]:
        """Of a batch: class, dimension and number of the block. A read of the device."""
        places = [(block, d) for block in blocks for d in self.factored(block, group)]
        counts = [block.tensor("failures", d) for block, d in places]
        flags: list[bool] = (torch.cat(counts) == LATE).tolist() if counts else []
        found = set()
        for (block, d), count in zip(places, counts):
            found |= {(block.index, d, number) for number in range(len(count)) if flags[number]}
            flags = flags[len(count) :]
        return frozenset(found)

    def _late_among(
        self, sides: list[Side], blocks: Sequence[BlockState], group: Group, key: tuple[int, int] | None
    ) -> tuple[list[Side], list[Side]]:
        """Sides that were late and have had a gradient by now, and those that are not late; who still has had none (an idle
        expert) is in neither. Where the host does not know who is late, it asks once."""
        if not sides:
            return [], []
        if key is None:
            flags = (torch.cat([side.take("failures") for side in sides]) == LATE).tolist()
        else:
            if key not in self._late:
                self._late[key] = self._which_late(blocks, group)
            known = self._late[key]
            flags = [(side.block.index, side.d, number) in known for side in sides for number in side.chosen]
        if not any(flags):
            return [], sides
        late, again = self._divided(sides, flags)
        snapshots = [self._snapshot([side], group, copy=False) for side in late]
        late, _ = self._divided(late, torch.cat([~_has_none(s, None) for s in snapshots]).tolist())
        return late, again

    def _divided(self, sides: Sequence[Side], flags: list[bool]) -> tuple[list[Side], list[Side]]:
        """Those parts of sides that a flag for each block, in order, says yes to, and the others."""
        found: dict[bool, list[Side]] = {True: [], False: []}
        for side in sides:
            own, flags = flags[: len(side.chosen)], flags[len(side.chosen) :]
            for answer, those in found.items():
                numbers = [number for number, flag in zip(side.chosen, own) if flag is answer]
                those += [self.side(side.block, side.d, numbers, side.order)] if numbers else []
        return found[True], found[False]

    def may_be_late(self, key: tuple[int, int] | None) -> bool:
        """Whether a side of the batch is late, or nobody knows."""
        return key not in self._late or bool(self._late[key])

    # ------------------------------------------------------------------ failures, a step later

    def _read_later(
        self, key: tuple[int, int], results: Sequence[tuple[Side, Refreshed]], group: Group, ok: Tensor | None
    ) -> None:
        """Sends to the host which sides failed. A failed side keeps its count until it has climbed the ladder."""
        sides = []
        for side, new in results:
            side.put("failures", side.take("failures") * new.failed)
            grads = side.block.grads.new_zeros(()).expand(side.block.grads.shape)  # the shape, without the memory
            sides.append(replace(side, block=replace(side.block, grads=grads)))
        failed = torch.cat([new.failed for _, new in results])
        flags = (failed if ok is None else failed & ok).to("cpu", non_blocking=True)
        arrived = None
        if failed.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(failed.device))
        self._unread[key] = Unread(sides, flags, arrived, dict(group))

    def refresh_beside(
        self, blocks: Sequence[BlockState], group: Group, ok: Tensor | None, clock: Clock, device: torch.device
    ) -> None:
        """:meth:`refresh` beside what follows, in the step and after it, until somebody asks for the state (:meth:`join`)."""
        possible = clock.undisturbed and clock.key is not None and group["refresh"] != "async"
        # What somebody records has to end with the step.
        if not possible or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            self.refresh(blocks, group, ok, clock)
            return
        lane, state = self._calls % LANES, blocks[0].state  # of all blocks of the batch
        self._calls += 1
        used = [x for x in (*state.values(), ok) if x is not None and x.device == device]
        self.refresh(blocks, group, ok, clock, self._beside.on(device, lane, used))

    def join(self) -> None:
        self._calls = 0  # a period later the same batch is on the same lane, which has its graph
        # Who records has waited for all that went before.
        if self._beside.is_used and not torch.cuda.is_current_stream_capturing():
            self._beside.wait()

    def mend(self, key: tuple[int, int] | None, state: dict[str, Tensor]) -> None:
        """Refreshes again, with the ladder, what failed in the batch's last step; before anything else of the next one.

        It belongs to the last step: it is computed from what that one left, which is also what is there when a checkpoint
        is saved between the two, and a next step that is skipped does not keep it from use.
        """
        if key is None:
            return
        unread = self._unread.pop(key, None)
        if unread is None:
            return
        flags = unread.read()
        self.ladder += LadderReport(flags.count(False))
        broken = []
        for side in unread.sides:
            own, flags = flags[: len(side.chosen)], flags[len(side.chosen) :]
            numbers = [number for number, failed in zip(side.chosen, own) if failed]
            if numbers:
                side.block.state = state
                broken.append(self.side(side.block, side.d, numbers, side.order))
        if broken:
            self._beside.wait()  # libraries keep some memory for all streams
            with matmul_precision(unread.options["matmul_precision"]):
                self.refresh_now(broken, unread.options, False, None)

    def to_mend(self, key: tuple[int, int]) -> frozenset[int]:
        unread = self._unread.get(key)
        if unread is None:
            return frozenset()
        numbers = [(side.block.count, number) for side in unread.sides for number in side.chosen]
        return frozenset(number // count for (count, number), failed in zip(numbers, unread.read()) if failed)

    def _snapshot(self, alike: Sequence[Side], group: Group, copy: bool) -> Snapshot:
        parts = [self.snapshot(side, group) for side in alike]
        if len(parts) > 1:
            tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        else:
            tensors = {name: value.clone() if copy else value for name, value in parts[0].items()}
        return Snapshot(tensors, alike[0].order)

    # ------------------------------------------------------------------ in the background

    def _launch(self, sides: Sequence[Side], group: Group, ok: Tensor | None, clock: Clock) -> None:
        """Begins a refresh whose results will wait in ``next_*`` until their round comes."""
        options = dict(group)  # as it is now; the learning rate and its like may change meanwhile
        skipped = None if ok is None else ~ok
        for side in sides:
            side.block.tensor("pending", side.d)[list(side.chosen)] = self.delay(group)
        for alike in alike_sides(sides):
            snapshot = self._snapshot(alike, group, copy=True)
            if clock.key is None:  # some of the batch are absent, and this state is a copy: nowhere to deliver to later
                self._deliver(alike, self.compute(snapshot, options, first=False), skipped)
                continue
            device = alike[0].block.grads.device
            result = self._background.submit(device, partial(self.compute, snapshot, options, first=False))
            self._flights.setdefault(clock.key, []).append(Flight(alike, result, skipped))

    def _deliver(self, sides: Sequence[Side], new: Refreshed, skipped: Tensor | None) -> None:
        for side, part in zip(sides, new.split([len(s.chosen) for s in sides])):
            for name in part.tensors:
                side.put(f"next_{name}", part.tensors[name])
            side.put("next_failed", part.failed)
            side.put(
                "next_skipped", torch.zeros_like(part.failed) if skipped is None else skipped.expand_as(part.failed)
            )

    def forget(self) -> None:
        self._unread.clear()

    def forget_batches(self) -> None:
        self._late.clear()

    def forget_batch(self, key: tuple[int, int]) -> None:
        self._late.pop(key, None)
        self._unread.pop(key, None)
        for flight in self._flights.pop(key, []):
            self._background.wait(flight.result)  # whose results were for what was there

    def in_flight(self, key: tuple[int, int]) -> bool:
        return bool(self._flights.get(key)) or key in self._unread

    def settle(self, key: tuple[int, int], storage: dict[str, Tensor]) -> None:
        """Waits for what is being computed for a batch and writes it to the batch's state."""
        self.mend(key, storage)
        for flight in self._flights.pop(key, []):
            for side in flight.sides:
                side.block.state = storage
            self._deliver(flight.sides, self._background.wait(flight.result), flight.skipped)

    def _install_arrivals(self, blocks: Sequence[BlockState], group: Group, clock: Clock) -> None:
        arrived: list[tuple[Side, Refreshed]] = []
        for block in blocks:
            dims = self.factored(block, group)
            for d in dims:
                pending = block.tensor("pending", d)
                numbers = (pending == 1).nonzero().flatten().tolist()  # on the host, always
                pending.sub_(1).clamp_(min=0)
                if not numbers:
                    continue
                if clock.key is not None:
                    self.settle(clock.key, block.state)
                side = self.side(block, d, numbers, len(dims))
                parts = {name: side.take(f"next_{name}") for name in self.refreshed_names(group)}
                arrived.append((side, Refreshed(parts, side.take("next_failed"))))
        for same in of_same_blocks(arrived):
            keep = [new.failed | side.take("next_skipped") for side, new in same]
            self.install([side for side, _ in same], [new for _, new in same], keep, group)
        for side, new in arrived:
            self.note_failures(side, new.failed & ~side.take("next_skipped"), group)

    def init_arrivals(self, state: dict[str, Tensor], shape: Sequence[int], group: Group) -> None:
        """Adds the counters of failures to fresh state, and the waiting room of asynchronous refreshes."""
        like = state["count"]
        for index, c in enumerate(self.grid(shape[1:], group).classes):
            lead = (shape[0], c.count)
            for d, size in enumerate(c.sizes):
                if not self.has_factor(size, group):
                    continue
                side = f"{index}.{d}"
                state[f"failures.{side}"] = torch.zeros(lead, dtype=torch.int32, device=like.device)
                if group["refresh"] != "async":
                    continue
                state[f"pending.{side}"] = torch.zeros(lead, dtype=torch.int64)  # read by the host at every step
                for name in ("next_failed", "next_skipped"):
                    state[f"{name}.{side}"] = torch.zeros(lead, dtype=torch.bool, device=like.device)
                for name in self.refreshed_names(group):
                    state[f"next_{name}.{side}"] = torch.zeros_like(state[f"{name}.{side}"])

    # ------------------------------------------------------------------ failures

    def note_failures(self, side: Side, failed: Tensor, group: Group, clean: bool = False) -> None:
        """Counts sides whose refresh failed and that go on with what they had; raises when one fails too often in a row.

        Args:
            clean: the host knows that none failed; otherwise the device is read once.
        """
        consecutive = (side.take("failures").clamp_min(0) + 1) * failed
        side.put("failures", consecutive)
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


def _has_none(snapshot: Snapshot, ok: Tensor | None) -> Tensor:
    """For each block, whether its first refresh must be put off: the step is skipped, or there was no gradient but zeros, as
    there is none of an adapter whose other one starts as zero. Such a side is late, and has it when its next one is due."""
    seen = snapshot.tensors["factor"].diagonal(dim1=-2, dim2=-1).amax(-1) != 0
    return ~seen if ok is None else ~(seen & ok)
