"""What Shampoo and SOAP share: factors of the gradient's covariance by block and by dimension, and when to use them.

For a block ``G`` of the gradient and each of its dimensions ``d``, with ``G_d`` the block unfolded so that dimension ``d``
counts rows, the factor is a running mean (or sum) of ``G_d G_d^T``. What is computed from the factors (inverse roots,
eigenbases) is refreshed once in ``precondition_frequency`` steps.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_emopt.linalg.failures import LadderReport
from hf_emopt.linalg.precision import matmul_precision
from hf_emopt.rules.background import Background
from hf_emopt.rules.base import Clock, Group, MatrixRule, state_dtype
from hf_emopt.rules.blocks import BlockGrid
from hf_emopt.rules.factor_storage import FACTOR_STORAGE, init_factor, load_factor, store_factor

__all__ = [
    "BlockState",
    "Gate",
    "KroneckerRule",
    "Oversize",
    "Refresh",
    "Refreshed",
    "Snapshot",
    "gate_of",
    "mode_product",
    "unfold",
]

logger = logging.getLogger("hf_emopt")

Refresh = Literal["staggered", "synchronous", "async"]
Oversize = Literal["block", "one_sided"]
REFRESHES: tuple[str, ...] = ("staggered", "synchronous", "async")

Gate = Tensor | float
"""1 where a step counts and 0 where it is skipped, as a number or as a scalar tensor on the device."""


def unfold(x: Tensor, d: int) -> Tensor:
    """``(B, b1, ..., bk)`` to ``(B, b_d, rest)``, dimension ``d`` (from 0, the batch not counted) as rows."""
    return x.movedim(d + 1, 1).reshape(x.shape[0], x.shape[d + 1], -1)


def mode_product(x: Tensor, matrix: Tensor, d: int) -> Tensor:
    """Multiplies dimension ``d`` of each block by a matrix: ``y[.., i, ..] = sum_j matrix[i, j] x[.., j, ..]``.

    Args:
        x: ``(B, b1, ..., bk)``.
        matrix: ``(B, p, b_d)``.
        d: dimension, the batch not counted.
    """
    if x.ndim == 3:  # matrices, without moving anything
        return matrix @ x if d == 0 else x @ matrix.mT
    moved = x.movedim(d + 1, 1)
    product = matrix @ moved.reshape(x.shape[0], x.shape[d + 1], -1)
    return product.reshape(x.shape[0], -1, *moved.shape[2:]).movedim(1, d + 1)


@dataclass
class BlockState:
    """The blocks of one class in a batch of matrices, flattened to one batch dimension, and where their state is.

    Attributes:
        index: which class of the grid.
        grads: ``(N * count, b1, ..., bk)``.
        count: blocks of this class in each matrix.
        first_piece: number of the class's first block among the blocks of a matrix.
        state: the batch's unit state.
    """

    index: int
    grads: Tensor
    count: int
    first_piece: int
    state: dict[str, Tensor]

    def tensor(self, name: str, d: int | None = None) -> Tensor:
        """A state tensor with matrices and blocks flattened together: a view, to be changed in place."""
        value = self.state[self.key(name, d)]
        return value.view(-1, *value.shape[2:])

    def key(self, name: str, d: int | None = None) -> str:
        return f"{name}.{self.index}" if d is None else f"{name}.{self.index}.{d}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.grads.shape[1:])


@dataclass(frozen=True)
class Snapshot:
    """What a refresh is computed from: for each dimension, tensors ``(blocks, ...)`` by name."""

    by_dimension: dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Refreshed:
    """What a refresh gives: for each dimension, new state ``(blocks, ...)`` by name; and which blocks failed."""

    by_dimension: dict[int, dict[str, Tensor]]
    failed: Tensor


class KroneckerRule(MatrixRule):
    """Base of the rules with factors: validation, blocks, factor updates, the schedule and the count of failures."""

    scheduled = True

    def __getstate__(self) -> dict[str, object]:
        """What is being computed is settled before a copy is made, by the optimizer."""
        return {**self.__dict__, "_flights": {}, "_rows": {}}

    def __init__(self) -> None:
        self.failures = 0
        self.ladder = LadderReport()
        self._background = Background()
        self._flights: dict[tuple[int, int], list[tuple[BlockState, Tensor, Future[Refreshed], Tensor | None]]] = {}
        self._rows: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    # ------------------------------------------------------------------ hyperparameters

    def validate(self, group: Group) -> None:
        for key, low in (("precondition_frequency", 1), ("max_preconditioner_dim", 1), ("tolerated_failures", 0)):
            if not (isinstance(group[key], int) and group[key] >= low):
                raise ValueError(f"{key}={group[key]!r} must be a whole number, at least {low}")
        if group["refresh"] not in REFRESHES:
            raise ValueError(f"refresh={group['refresh']!r} is not one of {', '.join(REFRESHES)}")
        delay = group["async_delay"]
        if delay is not None and not (isinstance(delay, int) and 1 <= delay < group["precondition_frequency"]):
            raise ValueError(
                f"async_delay={delay!r} must be a whole number from 1 to precondition_frequency - 1 = "
                f"{group['precondition_frequency'] - 1}"
            )
        if group["refresh"] == "async" and group["matmul_precision"] != "highest":
            raise ValueError(
                f"refresh='async' runs beside the training, and matmul_precision={group['matmul_precision']!r} sets flags "
                "of the whole process that the training would see; use matmul_precision='highest' or refresh='staggered'"
            )
        if group["refresh"] == "async" and group["precondition_frequency"] < 2:
            raise ValueError("refresh='async' needs precondition_frequency of at least 2: results come a step later")
        if group["oversize"] not in ("block", "one_sided"):
            raise ValueError(f"oversize={group['oversize']!r} must be 'block' or 'one_sided'")
        if group["factor_storage"] not in FACTOR_STORAGE:
            raise ValueError(f"factor_storage={group['factor_storage']!r} is not one of {', '.join(FACTOR_STORAGE)}")
        if len(group["betas"]) != 2 or not (0.0 <= group["betas"][0] < 1.0 and 0.0 <= group["betas"][1] <= 1.0):
            raise ValueError(f"betas={group['betas']} must be in [0, 1), and [0, 1] for the second")

    def grid(self, dims: Sequence[int], group: Group) -> BlockGrid:
        """The blocks of a matrix (or tensor) of this shape."""
        limit = group["max_preconditioner_dim"]
        one_sided = group["oversize"] == "one_sided"
        return BlockGrid.of(tuple(dims), tuple(d if one_sided else min(d, limit) for d in dims))

    def has_factor(self, size: int, group: Group) -> bool:
        """Whether a side of a block is preconditioned; one above the limit is left alone (one-sided)."""
        return bool(size <= group["max_preconditioner_dim"])

    def factored(self, block: BlockState, group: Group) -> list[int]:
        """Dimensions of a block that have a factor."""
        return [d for d, size in enumerate(block.sizes) if self.has_factor(size, group)]

    # ------------------------------------------------------------------ schedule

    def period(self, group: Group) -> int:
        return int(group["precondition_frequency"])

    def periodic_costs(self, m: int, n: int, group: Group) -> tuple[int, ...]:
        """One piece a block; its cost is the sum of the cubes of its preconditioned sides."""
        return tuple(
            sum(s**3 for s in c.sizes if self.has_factor(s, group))
            for c in self.grid((m, n), group).classes
            for _ in range(c.count)
        )

    def block_flops(self, m: int, n: int, group: Group, products: int, refresh_products: int) -> int:
        """Floating-point operations of an ``m x n`` matrix in a step, averaged over a period.

        Args:
            products: products of a block with a square matrix on each preconditioned side, in every step.
            refresh_products: products of two such square matrices, once a period.
        """
        total = 0
        for c in self.grid((m, n), group).classes:
            sides = [s for s in c.sizes if self.has_factor(s, group)]
            numel = math.prod(c.sizes)
            total += c.count * sum(
                2 * products * numel * s + 2 * refresh_products * s**3 // self.period(group) for s in sides
            )
        return total

    def first_round(self, group: Group) -> int:
        """The round in which a synchronous schedule refreshes for the first time."""
        return 1

    def due(self, block: BlockState, group: Group, clock: Clock) -> tuple[list[int], list[int]]:
        """Blocks (flat indices) to refresh now: those that have never been, and the others.

        The first time is the same for all: to spread work that is done once saves no time, and blocks would go without.
        """
        period, start = self.period(group), self.first_round(group)
        first: list[int] = []
        again: list[int] = []
        for i, rounds in enumerate(clock.rounds):
            if rounds < start:
                continue
            for j in range(block.count):
                if rounds == start:
                    first.append(i * block.count + j)
                elif (rounds - start) % period == self._slot(block, group, clock, i, j):
                    again.append(i * block.count + j)
        return first, again

    def refreshed_before(self, block: BlockState, group: Group, clock: Clock) -> list[bool]:
        """For each block, whether it has had a refresh, one in this round counted."""
        start = self.first_round(group)
        return [rounds >= start for rounds in clock.rounds for _ in range(block.count)]

    def _slot(self, block: BlockState, group: Group, clock: Clock, i: int, j: int) -> int:
        return 0 if group["refresh"] == "synchronous" else clock.slots[i][block.first_piece + j]

    def rows(self, chosen: Sequence[int], block: BlockState) -> Tensor:
        """Flat block numbers as an index on the device; kept, since they come back every period."""
        key = (tuple(chosen), block.grads.device)
        if key not in self._rows:
            if len(self._rows) > 4096:  # gradients that come and go make many subsets
                self._rows.clear()
            self._rows[key] = torch.tensor(chosen, device=block.grads.device)
        return self._rows[key]

    # ------------------------------------------------------------------ phases

    def accumulate(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        group: Group,
        ok: Tensor | None,
    ) -> list[Tensor]:
        """The gradient itself, with the decay added where it is of the L2 kind; all other state is the owner's."""
        wide = [g.to(state_dtype(p)) for g, p in zip(grads, params)]
        if group["weight_decay_type"] == "l2" and group["weight_decay"]:
            wide = [g.add(p.to(g.dtype), alpha=group["weight_decay"]) for g, p in zip(wide, params)]
        return wide if ok is None else [torch.where(ok, g, 0.0) for g in wide]

    def blocks(self, x: Tensor, state: dict[str, Tensor], group: Group) -> Iterator[BlockState]:
        """The classes of blocks of a batch ``(N, ...)``."""
        first_piece = 0
        for index, part in enumerate(self.grid(x.shape[1:], group).split(x)):
            yield BlockState(index, part.flatten(0, 1), part.shape[1], first_piece, state)
            first_piece += part.shape[1]

    def init_factors(self, x_shape: Sequence[int], group: Group, like: Tensor) -> dict[str, Tensor]:
        """Zero factors for a batch ``(N, ...)``."""
        state: dict[str, Tensor] = {}
        for index, c in enumerate(self.grid(x_shape[1:], group).classes):
            for d, size in enumerate(c.sizes):
                if self.has_factor(size, group):
                    lead = (x_shape[0], c.count)
                    state |= init_factor(f"factor.{index}.{d}", lead, size, group["factor_storage"], like)
        return state

    def factor(self, block: BlockState, d: int, group: Group) -> Tensor:
        """The factor of dimension ``d`` as ``(N * count, b_d, b_d)``."""
        full = load_factor(block.state, block.key("factor", d), block.sizes[d], group["factor_storage"])
        return full.view(-1, *full.shape[2:])

    def update_factor(
        self, block: BlockState, d: int, group: Group, beta: float, rows: Tensor, gate: Gate, clock: Clock
    ) -> None:
        """``A <- beta A + (1 - beta) R R^T``, or ``A + R R^T`` for ``beta = 1``, where the step counts.

        Args:
            rows: ``(N * count, b_d, rest)``, the block unfolded (and whitened, where a variant asks for it).
        """
        new = 1.0 if beta == 1.0 else 1.0 - beta
        factor = self.factor(block, d, group)
        # The root on both sides keeps the product as symmetric as the library's matrix product is.
        weight = gate * new
        scaled = rows * (weight.sqrt() if isinstance(weight, Tensor) else math.sqrt(weight))
        if beta != 1.0:
            factor.mul_(1.0 - weight)
        factor.baddbmm_(scaled, scaled.mT)
        storage, key = group["factor_storage"], block.key("factor", d)
        if storage == "float32":
            return
        generator = None
        if storage == "int8":  # noise of the round, so that replicas agree and a resumed run repeats it
            seed = clock.rounds[0] * 1_000_003 + 97 * block.index + d
            generator = torch.Generator(factor.device).manual_seed(seed)
        shape = (*block.state[key].shape[:2], *factor.shape[1:])
        store_factor(block.state, key, factor.view(shape), storage, generator)

    def precision(self, group: Group) -> AbstractContextManager[None]:
        """Context in which this rule's float32 products run."""
        return matmul_precision(group["matmul_precision"])

    # ------------------------------------------------------------------ refresh

    @abstractmethod
    def snapshot(self, block: BlockState, rows: Tensor, group: Group) -> Snapshot:
        """Copies of what a refresh of these blocks is computed from."""

    @abstractmethod
    def compute(self, snapshot: Snapshot, group: Group, first: bool) -> Refreshed:
        """The refresh itself: a function of the snapshot alone, so that it may run on the side.

        Args:
            first: these blocks have never been refreshed.
        """

    @abstractmethod
    def install(self, block: BlockState, rows: Tensor, new: Refreshed, keep: Tensor, group: Group) -> None:
        """Puts a refresh to use, except in blocks where ``keep`` (one bool a block) says to stay with the old."""

    def refresh(self, block: BlockState, group: Group, ok: Tensor | None, clock: Clock) -> None:
        """Refreshes the blocks that are due, now or in the background."""
        if not self.factored(block, group):
            return
        in_background = group["refresh"] == "async"
        if in_background:
            self._install_arrivals(block, group, clock)
        for chosen, first in zip(self.due(block, group, clock), (True, False)):
            if not chosen:
                continue
            rows = self.rows(chosen, block)
            if in_background and not first:
                self._launch(block, chosen, rows, group, ok, clock)
            else:
                self.refresh_now(block, rows, group, first, ok)

    def refresh_now(self, block: BlockState, rows: Tensor, group: Group, first: bool, ok: Tensor | None) -> None:
        """Refreshes the blocks ``rows`` and puts the result to use."""
        new = self.compute(self.snapshot(block, rows, group), group, first)
        self.install(block, rows, new, new.failed if ok is None else new.failed | ~ok, group)
        self.note_failures(block, rows, new.failed, group)

    def delay(self, group: Group) -> int:
        """Rounds between the launch of an asynchronous refresh and its use."""
        if group["refresh"] != "async":
            return 0
        given = group["async_delay"]
        return int(max(1, group["precondition_frequency"] // 2) if given is None else given)

    def _launch(
        self,
        block: BlockState,
        chosen: list[int],
        rows: Tensor,
        group: Group,
        ok: Tensor | None,
        clock: Clock,
    ) -> None:
        """Begins a refresh whose results will wait in ``next.*`` until their round comes."""
        block.tensor("pending")[chosen] = self.delay(group)
        snapshot = self.snapshot(block, rows, group)
        options = dict(group)  # as it is now; the learning rate and its like may change meanwhile
        skipped = None if ok is None else ~ok
        if clock.key is None:  # some of the batch are absent, and this state is a copy: no place to deliver to later
            self._deliver(block, rows, self.compute(snapshot, options, first=False), skipped)
            return
        future = self._background.submit(block.grads.device, lambda: self.compute(snapshot, options, first=False))
        self._flights.setdefault(clock.key, []).append((block, rows, future, skipped))

    def _deliver(self, block: BlockState, rows: Tensor, new: Refreshed, skipped: Tensor | None) -> None:
        for d, parts in new.by_dimension.items():
            for name, value in parts.items():
                block.tensor(f"next_{name}", d)[rows] = value.to(block.tensor(f"next_{name}", d).dtype)
        block.tensor("next_failed")[rows] = new.failed
        block.tensor("next_skipped")[rows] = False if skipped is None else skipped

    def settle(self, key: tuple[int, int], storage: dict[str, Tensor]) -> None:
        """Waits for what is being computed for a batch and writes it to the batch's state."""
        for block, rows, future, skipped in self._flights.pop(key, []):
            block.state = storage
            self._deliver(block, rows, self._background.wait(future), skipped)

    def _install_arrivals(self, block: BlockState, group: Group, clock: Clock) -> None:
        pending = block.tensor("pending")
        arrived = (pending == 1).nonzero().flatten().tolist()
        if arrived:
            if clock.key is not None:
                self.settle(clock.key, block.state)
            rows = self.rows(arrived, block)
            failed, skipped = block.tensor("next_failed")[rows], block.tensor("next_skipped")[rows]
            parts = {
                d: {name: block.tensor(f"next_{name}", d)[rows] for name in self.refreshed_names(group)}
                for d in self.factored(block, group)
            }
            self.install(block, rows, Refreshed(parts, failed), failed | skipped, group)
            self.note_failures(block, rows, failed & ~skipped, group)
        pending.sub_(1).clamp_(min=0)

    @abstractmethod
    def refreshed_names(self, group: Group) -> tuple[str, ...]:
        """State that a refresh makes anew, by its name without class and dimension."""

    def init_arrivals(self, state: dict[str, Tensor], shape: Sequence[int], group: Group) -> None:
        """Adds the counters of failures to fresh state, and the waiting room of asynchronous refreshes."""
        like = state["count"]
        for index, c in enumerate(self.grid(shape[1:], group).classes):
            lead = (shape[0], c.count)
            state[f"failures.{index}"] = torch.zeros(lead, dtype=torch.int32, device=like.device)
            if group["refresh"] != "async":
                continue
            state[f"pending.{index}"] = torch.zeros(lead, dtype=torch.int64)  # read by the host at every step
            for name in ("next_failed", "next_skipped"):
                state[f"{name}.{index}"] = torch.zeros(lead, dtype=torch.bool, device=like.device)
            for d, size in enumerate(c.sizes):
                if self.has_factor(size, group):
                    for name in self.refreshed_names(group):
                        state[f"next_{name}.{index}.{d}"] = torch.zeros_like(state[f"{name}.{index}.{d}"])

    # ------------------------------------------------------------------ failures

    def note_failures(self, block: BlockState, indices: Tensor, failed: Tensor, group: Group) -> None:
        """Counts blocks whose refresh failed and that go on with what they had; raises when one fails too often in a row.

        Reads the device once, which a refresh does anyway.
        """
        consecutive = block.tensor("failures")
        consecutive[indices] = torch.where(failed, consecutive[indices] + 1, torch.zeros_like(consecutive[indices]))
        number = int(failed.sum())
        if not number:
            return
        self.failures += number
        worst = int(consecutive.max())
        logger.warning(
            "%s: %d block(s) could not be refreshed and keep their previous preconditioner (%d in a row at most, %d in all)",
            self.name, number, worst, self.failures,
        )  # fmt: skip
        if worst > group["tolerated_failures"]:
            raise RuntimeError(
                f"{self.name}: a preconditioner could not be refreshed {worst} times in a row (tolerated_failures="
                f"{group['tolerated_failures']}). Its factor is probably not finite or overflows: lower the learning rate, "
                "clip gradients, or raise epsilon"
            )


def gate_of(ok: Tensor | None, like: Tensor) -> Gate:
    """``ok`` as a number to multiply by."""
    return 1.0 if ok is None else ok.to(like.dtype)
