"""What a refresh is computed from, what it gives, and what is known of one that is still under way."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.rules.base import Group
from hf_emopt.rules.blocks import Side

__all__ = ["Flight", "Refreshed", "Snapshot", "Unread", "alike_sides", "of_same_blocks"]


@dataclass(frozen=True)
class Snapshot:
    """What a refresh is computed from: tensors ``(sides, ...)`` by name, of sides of one size.

    Attributes:
        order: dimensions of their blocks that are preconditioned.
    """

    tensors: dict[str, Tensor]
    order: int


@dataclass(frozen=True)
class Refreshed:
    """What a refresh gives: new state ``(sides, ...)`` by name, and which sides failed.

    Attributes:
        clean: the host knows already that none failed.
        unread: tried without a look at the result. What failed is still to climb the ladder.
    """

    tensors: dict[str, Tensor]
    failed: Tensor
    clean: bool = False
    unread: bool = False

    def split(self, sizes: Sequence[int]) -> list[Refreshed]:
        """Results of runs of sides."""
        parts = {name: value.split(list(sizes)) for name, value in self.tensors.items()}
        return [
            Refreshed({name: values[i] for name, values in parts.items()}, failed, self.clean, self.unread)
            for i, failed in enumerate(self.failed.split(list(sizes)))
        ]


@dataclass
class Flight:
    """A refresh under way: which sides, their results, and whether the step that began it is skipped."""

    sides: list[Side]
    result: Future[Refreshed]
    skipped: Tensor | None


@dataclass
class Unread:
    """What failed in the refreshes of a step, on its way to the host.

    Attributes:
        sides: with blocks that hold no gradients.
        flags: on the host, one for each side of a block, in order; valid once ``arrived``.
        options: hyperparameters as they were.
    """

    sides: list[Side]
    flags: Tensor
    arrived: torch.cuda.Event | None
    options: Group

    def read(self) -> list[bool]:
        """The flags, once they are there: asked for a step later, they are."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.flags.tolist()  # type: ignore[no-any-return]


def alike_sides(sides: Sequence[Side]) -> list[list[Side]]:
    """Sides of one size and order, which are computed in one call."""
    runs: dict[tuple[int, int], list[Side]] = {}
    for side in sides:
        runs.setdefault((side.block.sizes[side.d], side.order), []).append(side)
    return list(runs.values())


def of_same_blocks(results: Sequence[tuple[Side, Refreshed]]) -> list[list[tuple[Side, Refreshed]]]:
    """Results for several dimensions of the same blocks, which are put to use together; in order of the dimensions."""
    runs: dict[tuple[int, tuple[int, ...]], list[tuple[Side, Refreshed]]] = {}
    for side, new in results:
        runs.setdefault((side.block.index, side.chosen), []).append((side, new))
    return [sorted(run, key=lambda pair: pair[0].d) for run in runs.values()]
