"""When the sides of a rule's factors are due for what is computed from them: a function of shapes, hyperparameters and the
count of steps alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from hf_emopt.rules.base import Clock, Group, MatrixRule
from hf_emopt.rules.blocks import BlockGrid, BlockState, Side

__all__ = ["CALL_COST", "ScheduledRule"]

_CALL_SIDE = {"cpu": 128, "cuda": 2048}
"""The side of a matrix whose refresh alone takes as long as what every call costs besides (launches, checks, the host's
wait). Measured for SOAP and Shampoo: a side of 1150 to 1900 on an H200, for which the next power of two stands here; on a CPU
next to nothing, for which 128 does. Other devices are taken for a GPU."""

_SMALL_SIDE = {"cpu": 1000, "cuda": 0}
"""A refresh of side ``s`` takes ``s^2 (s + this)``: on a CPU small matrices are slower than their cubes, 704 taking 8 (eigh)
to 11 (orthogonal iteration) times as long as 256."""

CALL_COST = 10**9
"""What a call costs of its own, beside the work on its sides, in the unit of periodic costs: a billionth of it, so that they
are integers, which all ranks round alike."""


class ScheduledRule(MatrixRule):
    """Which sides of which blocks are preconditioned, what that costs, and in which steps each is due."""

    scheduled = True

    @abstractmethod
    def grid(self, dims: Sequence[int], group: Group) -> BlockGrid:
        """The blocks of a matrix (or tensor) of this shape."""

    @abstractmethod
    def has_factor(self, size: int, group: Group) -> bool:
        """Whether a side of a block is preconditioned."""

    def factored(self, block: BlockState, group: Group) -> list[int]:
        """Dimensions of a block that have a factor."""
        return [d for d, size in enumerate(block.sizes) if self.has_factor(size, group)]

    def period(self, group: Group) -> int:
        return int(group["precondition_frequency"])

    def periodic_costs(self, m: int, n: int, group: Group) -> tuple[int, ...]:
        """One piece for each preconditioned side of each block, where a call costs :data:`CALL_COST`."""
        params = group.get("params") or [torch.empty(0)]
        device = "cpu" if params[0].device.type in ("cpu", "meta") else "cuda"
        call, small = _CALL_SIDE[device], _SMALL_SIDE[device]
        matrix_view = call**2 * (call + small)
        return tuple(
            max(1, s**2 * (s + small) * CALL_COST // matrix_view)
            for c in self.grid((m, n), group).classes
            for _ in range(c.count)
            for s in c.sizes
            if self.has_factor(s, group)
        )

    def first_round(self, group: Group) -> int:
        """The round of the first refresh, the same for all sides; periods are counted from it."""
        return 1

    def due(self, blocks: Sequence[BlockState], group: Group, clock: Clock) -> tuple[list[Side], list[Side]]:
        """Sides to refresh now: those that have never been, and the others.

        The first time is the same for all: to spread work that is done once saves no time, and blocks would go without.
        """
        period, start = self.period(group), self.first_round(group)
        synchronous = group["refresh"] == "synchronous"
        first: list[Side] = []
        again: list[Side] = []
        for block in blocks:
            dims = self.factored(block, group)
            for k, d in enumerate(dims):
                new: list[int] = []
                old: list[int] = []
                for i, rounds in enumerate(clock.rounds):
                    if rounds < start:
                        continue
                    for j in range(block.count):
                        slot = 0 if synchronous else clock.slots[i][block.first_piece + j * len(dims) + k]
                        if rounds == start:
                            new.append(i * block.count + j)
                        elif (rounds - start) % period == slot:
                            old.append(i * block.count + j)
                first += [self.side(block, d, new, len(dims))] if new else []
                again += [self.side(block, d, old, len(dims))] if old else []
        return first, again

    def refreshed_before(self, block: BlockState, group: Group, clock: Clock) -> list[bool]:
        """For each block, whether it has had a refresh, one in this round counted."""
        start = self.first_round(group)
        return [rounds >= start for rounds in clock.rounds for _ in range(block.count)]

    def refresh_age(self, rounds: int, slots: Sequence[int], group: Group) -> int | None:
        start, delay = self.first_round(group), self.delay(group)
        if rounds < start or not slots:
            return None
        ages = []
        for slot in slots:
            since = rounds - delay - start - (0 if group["refresh"] == "synchronous" else slot)
            # Before a piece's own turn has come it has what all got in the first round.
            ages.append(rounds - start if since < 0 else since % self.period(group) + delay)
        return min(max(ages), rounds - start)

    @abstractmethod
    def side(self, block: BlockState, d: int, chosen: Sequence[int], order: int) -> Side:
        """A side of some blocks."""

    def delay(self, group: Group) -> int:
        """Rounds between the launch of an asynchronous refresh and its use."""
        if group["refresh"] != "async":
            return 0
        given = group["async_delay"]
        return int(max(1, group["precondition_frequency"] // 2) if given is None else given)
