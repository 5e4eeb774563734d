"""Which cluster of two multiprocessors computes which tiles of a batch of symmetric results.

A column of tiles is 256 wide. Below its square on the diagonal come tiles of 128 by 256, an odd number of them where the
matrix ends with the column: the first touches the diagonal. Two tiles of one column share what they read of B. What remains
of each column, and the squares, are paired too, but share nothing.
"""

from __future__ import annotations

import functools
import heapq
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["END", "NOTHING", "SHARED", "SQUARE", "TILE", "Item", "Work", "schedule", "table"]

# As in symmetric_product.cu.
NOTHING, TILE, SQUARE, SHARED, END = range(5)
ROWS, COLS = 128, 256
LATE = 8
"""Matrices at the end whose squares come last of all."""


class Work(NamedTuple):
    """What one multiprocessor computes: ``ROWS`` rows of matrix ``batch`` from ``row`` on, and columns from ``col`` on. Of
    ``NOTHING``, ``row`` is the kind of what the other one computes."""

    batch: int
    row: int
    col: int
    kind: int


Item: TypeAlias = tuple[Work, Work]
_END = Work(0, 0, 0, END)


def _column(m: int, col: int) -> tuple[list[tuple[int, int]], int | None]:
    """First rows of pairs of tiles of a column, and of the tile that has no other, if there is one."""
    rows = list(range(col + ROWS, m, ROWS))
    # The one without another touches the diagonal: a square of its tile is not computed.
    alone = rows.pop(0) if len(rows) % 2 else None
    return list(zip(rows[::2], rows[1::2], strict=True)), alone


def _pairs(m: int, group: int) -> list[tuple[int, int, int]]:
    """Rows of both tiles and their column, in squares of ``group`` pairs: those that run together read the same rows."""
    step = group * COLS
    found = [(a, b, col) for col in range(0, m, COLS) for a, b in _column(m, col)[0]]
    return sorted(found, key=lambda t: (t[0] // step, t[2] // step, t[0], t[2]))


def _of_two(works: list[Work]) -> list[Item]:
    if len(works) % 2:
        works = [*works, Work(0, works[-1].kind, 0, NOTHING)]
    return list(zip(works[::2], works[1::2], strict=True))


def _items(m: int, batch: int, group: int) -> list[tuple[int, Item]]:
    """Items and what they cost, in the order in which they are begun: matrix after matrix, so that each is read from memory
    once, but the squares of the last ones at the end, where they level the clusters."""
    pairs, columns = _pairs(m, group), range(0, m, COLS)
    alone = [(col, rows) for col in columns if (rows := _column(m, col)[1]) is not None]
    items: list[tuple[int, Item]] = []
    tiles: list[Work] = []
    squares: list[Work] = []
    late: list[tuple[int, Item]] = []
    for b in range(batch):
        items += [(2, (Work(b, i, col, SHARED), Work(b, j, col, SHARED))) for i, j, col in pairs]
        tiles += [Work(b, row, col, TILE) for col, row in alone]
        squares += [Work(b, col, col, SQUARE) for col in columns]
        final = b == batch - 1
        for works, cost, to in ((tiles, 2, items), (squares, 1, late if b >= batch - LATE else items)):
            count = len(works) if final else len(works) // 2 * 2
            to += [(cost, item) for item in _of_two(works[:count])]
            del works[:count]
    return items + late


def schedule(m: int, batch: int, clusters: int, group: int) -> list[list[Item]]:
    """What every cluster computes, in turn: each item to the cluster that has least."""
    given: list[list[Item]] = [[] for _ in range(clusters)]
    loads = [(0, c) for c in range(clusters)]
    for cost, item in _items(m, batch, group):
        load, c = loads[0]
        given[c].append(item)
        heapq.heapreplace(loads, (load + cost, c))
    return given


@functools.lru_cache(maxsize=1024)
def table(m: int, batch: int, clusters: int, group: int, device: torch.device) -> Tensor:
    """The schedule on the device, int32 ``(clusters, items, 2, 4)``, each cluster's items followed by ``END``."""
    given = schedule(m, batch, clusters, group)
    items = max(map(len, given)) + 1
    return torch.tensor([own + [(_END, _END)] * (items - len(own)) for own in given], dtype=torch.int32).to(device)
