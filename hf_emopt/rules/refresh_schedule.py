"""On which step a factor is due for a refresh: a function of shapes, hyperparameters and counts of steps alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hf_emopt.rules.base import Group, MatrixRule, RefreshClock
from hf_emopt.rules.blocks import BlockGrid, BlockState, FactorDim

_CALL_DIM = {"cpu": 128, "cuda": 2048}
"""The dimension of a factor whose refresh takes as long as the fixed cost of a call (launches, checks, the wait of the host).
Measured for SOAP and Shampoo: 1150 to 1900 on an H200, rounded up to a power of two here, and next to nothing on a CPU, for
which 128 stands. Other devices count as a GPU."""

_SMALL_DIM = {"cpu": 1000, "cuda": 0}
"""A refresh of dimension ``s`` takes ``s^2 (s + this)``. On a CPU small matrices are slower than their cubes say: 704 takes 8
(eigh) to 11 (orthogonal iteration) times as long as 256."""

CALL_COST = 10**9
"""Fixed cost of a call, in the unit of periodic costs. The unit is a billionth of it, so that costs are integers, which all
ranks round alike."""


class ScheduledRule(MatrixRule):
    """A rule with factors: which dimensions of which blocks have one, what a refresh costs, and on which step each is due."""

    scheduled = True

    @abstractmethod
    def grid(self, dims: Sequence[int], group: Group) -> BlockGrid:
        """The blocks of a matrix (or tensor) of this shape."""

    @abstractmethod
    def has_factor(self, size: int, group: Group) -> bool:
        """Whether a dimension of a block of this size has a factor."""

    def factored(self, block: BlockState, group: Group) -> list[int]:
        """The dimensions of a block that have a factor."""
        return [d for d, size in enumerate(block.sizes) if self.has_factor(size, group)]

    def period(self, group: Group) -> int:
        return int(group["precondition_frequency"])

    def periodic_costs(self, m: int, n: int, group: Group) -> tuple[int, ...]:
        """One cost for each factor of each block, where a call costs :data:`CALL_COST`."""
        device = next(("cuda" for p in group.get("params", [])[:1] if p.device.type not in ("cpu", "meta")), "cpu")
        call, small = _CALL_DIM[device], _SMALL_DIM[device]
        unit = call**2 * (call + small)
        return tuple(
            max(1, s**2 * (s + small) * CALL_COST // unit)
            for c in self.grid((m, n), group).classes
            for _ in range(c.count)
            for s in c.sizes
            if self.has_factor(s, group)
        )

    def first_refresh_step(self, group: Group) -> int:
        """The param step of the first refresh, which is the same for all factors. Periods are counted from it."""
        return 1

    def due(
        self, blocks: Sequence[BlockState], group: Group, clock: RefreshClock
    ) -> tuple[list[FactorDim], list[FactorDim]]:
        """The factors that are due for their first refresh, and those that are due again.

        The first refresh is on the same step for all factors: it is done once, so that spreading it saves no time, and blocks
        would go without it meanwhile.
        """
        period, start = self.period(group), self.first_refresh_step(group)
        synchronous = group["refresh"] == "synchronous"
        first: list[FactorDim] = []
        again: list[FactorDim] = []
        for block in blocks:
            dims = self.factored(block, group)
            for k, d in enumerate(dims):
                new: list[int] = []
                old: list[int] = []
                for i, step in enumerate(clock.param_steps):
                    if step < start:
                        continue
                    for j in range(block.count):
                        due = 0 if synchronous else clock.refresh_steps[i][block.first_piece + j * len(dims) + k]
                        if step == start:
                            new.append(i * block.count + j)
                        elif (step - start) % period == due:
                            old.append(i * block.count + j)
                first += [self.factor_dim(block, d, new, len(dims))] if new else []
                again += [self.factor_dim(block, d, old, len(dims))] if old else []
        return first, again

    def refreshed_before(self, block: BlockState, group: Group, clock: RefreshClock) -> list[bool]:
        """For each block, whether the step of its first refresh has come."""
        start = self.first_refresh_step(group)
        return [step >= start for step in clock.param_steps for _ in range(block.count)]

    def refresh_age(self, param_steps: int, refresh_steps: Sequence[int], group: Group) -> int | None:
        since = param_steps - self.first_refresh_step(group)
        if since < 0 or not refresh_steps:
            return None
        due = [0] if group["refresh"] == "synchronous" else refresh_steps
        # Before its own turn comes, a factor has the result of the first refresh.
        return max(since if since < step else (since - step) % self.period(group) for step in due)

    @abstractmethod
    def factor_dim(self, block: BlockState, d: int, chosen: Sequence[int], order: int) -> FactorDim:
        """Dimension ``d`` of the blocks with these numbers."""
