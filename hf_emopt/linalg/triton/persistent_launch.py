"""Launches symmetric products on programs that stay: which problems, and which program has which tiles.

For sm_90, square tiles, inputs that descriptors can read, results of 16 bits and no ``+ beta C``.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hf_emopt.linalg.triton.configs import Config
from hf_emopt.linalg.triton.descriptors import describable, descriptor
from hf_emopt.linalg.triton.launching import launch, specialization
from hf_emopt.linalg.triton.runtime import interpreting, multiprocessors

__all__ = ["PROGRAMS", "Schedule", "persistent_product", "schedule", "takes"]

PROGRAMS = 2
"""That share a multiprocessor: while one turns and stores a tile, the other multiplies."""

Tile: TypeAlias = tuple[int, int, int]


class Schedule(NamedTuple):
    """What every program computes.

    Attributes:
        tiles: matrix, first row and first column of each tile, program after program.
        bounds: of every program: where its tiles below the diagonal begin, its tiles on it, and its end.
    """

    tiles: tuple[Tile, ...]
    bounds: tuple[tuple[int, int, int], ...]


def takes(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, config: Config) -> bool:
    """Whether a product can be computed so."""
    return (
        c is None
        and config.descriptors
        and config.block_m == config.block_n
        and out.element_size() == 2
        and all(describable(x) for x in (a, b, out))
    )


def _kinds(m: int, block: int, group: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """First rows and columns of tiles below the diagonal and of those on it; the former in squares of ``group`` tiles, so
    that programs that run together read the same rows."""
    step = group * block
    below = [(row, col) for row in range(0, m, block) for col in range(0, row, block)]
    return sorted(below, key=lambda t: (t[0] // step, t[1] // step, t)), [(row, row) for row in range(0, m, block)]


def schedule(m: int, batch: int, programs: int, block: int, group: int) -> Schedule:
    """Tiles in turn, each to the program that has least, so that programs are level and read the same rows."""
    given: list[tuple[list[Tile], list[Tile]]] = [([], []) for _ in range(programs)]
    loads = [(0, p) for p in range(programs)]
    for kind, places in enumerate(_kinds(m, block, group)):
        for b in range(batch):
            for row, col in places:
                load, p = loads[0]
                given[p][kind].append((b, row, col))
                heapq.heapreplace(loads, (load + 1, p))
    tiles: list[Tile] = []
    bounds = []
    for below, on in given:
        bounds.append((len(tiles), len(tiles) + len(below), len(tiles) + len(below) + len(on)))
        tiles += [*below, *on]
    return Schedule(tuple(tiles), tuple(bounds))


def _squares(m: int, block: int) -> int:
    """Tiles of a matrix."""
    rows = -(-m // block)
    return rows * (rows + 1) // 2


@functools.lru_cache(maxsize=1024)
def _tables(m: int, batch: int, programs: int, block: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    found = schedule(m, batch, programs, block, group)
    tables = (torch.tensor(found.tiles, dtype=torch.int32), torch.tensor(found.bounds, dtype=torch.int32))
    return tables[0].to(device), tables[1].to(device)


def persistent_product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    alpha: float,
    diagonal: float,
    correction: Tensor | None,
    power: int,
    config: Config,
    trans: bool,
    same: bool,
) -> None:
    """``out = alpha A B^T + diagonal I`` on programs that stay.

    Args:
        a, b: ``(B, m, k)``, or ``(B, k, m)`` with ``trans``, bfloat16 or float16, describable.
        out: ``(B, m, m)`` of 16-bit elements, describable.
        correction, power: as for :func:`~hf_emopt.linalg.triton.symmetric_launch.symmetric_product`; power 0 without one.
        config: square tiles, for which :func:`takes` is true.
        same: B is A.
    """
    from hf_emopt.linalg.triton.persistent_kernels import persistent_product_kernel as kernel

    batch, m = out.shape[:2]
    k = a.shape[1] if trans else a.shape[2]
    block, block_k = config.block_m, config.block_k
    programs = min(multiprocessors(out.device) * PROGRAMS, batch * _squares(m, block))
    tiles, bounds = _tables(m, batch, programs, block, config.group, out.device)

    def factor(x: Tensor) -> Any:
        return descriptor(x, *((block_k, block) if trans else (block, block_k)))

    arguments = (
        factor(a),
        None if same else factor(b),
        descriptor(out, block, block // 2),
        correction,
        tiles,
        bounds,
        k,
        alpha,
        diagonal,
        trans,
        block,
        block_k,
        interpreting(),
        power,
        same,
    )
    special: Hashable = None if correction is None else specialization((correction,), ())
    key = ("persistent", config, a.dtype, out.dtype, trans, same, power, special, k % 16 == 0, k == 1, a.device)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch(kernel, key, programs, arguments, options, out.device)
