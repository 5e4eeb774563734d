"""Launches the variant ``persistent`` of symmetric products: which problems, which tiles, and which program has which.

For sm_90, inputs that descriptors can read, results of 16 bits and no ``+ beta C``; all else runs on the other kernels.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hf_emopt.linalg.triton.configs import Config
from hf_emopt.linalg.triton.descriptors import descriptor
from hf_emopt.linalg.triton.launching import launch, specialization
from hf_emopt.linalg.triton.runtime import interpreting, multiprocessors

__all__ = ["CANDIDATES", "Schedule", "choose", "persistent_product", "programs_of", "schedule"]

# What is compared on a GPU. None of these has been measured; all compile without spills, with as many registers and as much
# shared memory as `programs_of` needs (tests/linalg/test_triton_persistent.py).
CANDIDATES = (
    Config(256, 128, 64, 8, 4),
    Config(128, 256, 64, 8, 4),
    Config(128, 128, 64, 4, 3),
    Config(128, 128, 32, 4, 5),
    Config(128, 128, 64, 8, 4),
)
_STAYING = Config(128, 128, 64, 4, 3, group=4)
_INTERPRETED = Config(64, 32, 32, 4, 1, group=2)

Tile: TypeAlias = tuple[int, int, int]


class Schedule(NamedTuple):
    """What every program computes.

    Attributes:
        tiles: matrix, first row and first column of each tile, program after program.
        bounds: of every program: where its whole tiles begin, its squares below the diagonal, its squares on it, and its end.
    """

    tiles: tuple[Tile, ...]
    bounds: tuple[tuple[int, int, int, int], ...]


def programs_of(config: Config) -> int:
    """Programs that share a multiprocessor: two of four warps and 128 x 128, one of anything larger."""
    return 2 if config.num_warps == 4 else 1


def _parts(config: Config) -> int:
    """How many pieces a square is stored in: two programs a multiprocessor have no room for it beside their blocks, but
    those of depth 32 do."""
    return 2 if config.num_warps == 4 and config.block_m == config.block_n and config.block_k >= 64 else 1


def choose(architecture: int | None, batch: int, m: int, k: int, multiprocessor_count: int) -> Config | None:
    """A configuration for ``batch`` results of ``(m, m)``, or ``None`` where the variant has none.

    Args:
        architecture: compute capability as one number; ``None`` when interpreting.
        multiprocessor_count: of the device. With fewer than three tiles a program, little is read ahead, and programs are
            not level.
    """
    if architecture is None:
        return _INTERPRETED
    if not 90 <= architecture < 100:
        return None
    if m < 2048 or k > 16384:
        return None
    squares = batch * (-(-m // 128)) * (-(-m // 128) + 1) // 2
    return _STAYING if squares >= 2 * multiprocessor_count * programs_of(_STAYING) else None


def _kinds(m: int, block_m: int, block_n: int, group: int) -> tuple[list[tuple[int, int]], ...]:
    """First rows and columns of whole tiles, of squares below the diagonal and of squares on it; the first in squares of
    ``group`` tiles, so that programs that run together read the same rows."""
    side = min(block_m, block_n)
    step = group * max(block_m, block_n)
    whole: list[tuple[int, int]] = []
    below: list[tuple[int, int]] = []
    on: list[tuple[int, int]] = []
    for row in range(0, m, block_m):
        for col in range(0, min(row + block_m, m), block_n):
            if row >= col + block_n:
                whole.append((row, col))
                continue
            for i in range(row, min(row + block_m, m), side):
                for j in range(col, min(col + block_n, i + 1), side):
                    (on if i == j else below).append((i, j))
    return sorted(whole, key=lambda t: (t[0] // step, t[1] // step, t)), below, on


def schedule(m: int, batch: int, programs: int, block_m: int, block_n: int, group: int) -> Schedule:
    """Whole tiles in turn, so that programs are level and read the same rows; then squares, each to the program that has
    least. A square counts half of a tile of two squares."""
    kinds = _kinds(m, block_m, block_n, group)
    weights = (max(block_m, block_n) // min(block_m, block_n), 1, 1)
    given: list[tuple[list[Tile], ...]] = [([], [], []) for _ in range(programs)]
    loads = [(0, p) for p in range(programs)]
    for kind, (places, weight) in enumerate(zip(kinds, weights, strict=True)):
        for b in range(batch):
            for row, col in places:
                load, p = loads[0]
                given[p][kind].append((b, row, col))
                heapq.heapreplace(loads, (load + weight, p))
    tiles: list[Tile] = []
    bounds = []
    for lists in given:
        starts = [len(tiles)]
        for some in lists:
            tiles += some
            starts.append(len(tiles))
        bounds.append((starts[0], starts[1], starts[2], starts[3]))
    return Schedule(tuple(tiles), tuple(bounds))


@functools.lru_cache(maxsize=1024)
def _tables(
    m: int, batch: int, programs: int, block_m: int, block_n: int, group: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    found = schedule(m, batch, programs, block_m, block_n, group)
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
        same: B is A.
    """
    from hf_emopt.linalg.triton.persistent_kernels import persistent_product_kernel as kernel

    batch, m = out.shape[:2]
    k = a.shape[1] if trans else a.shape[2]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    side = min(block_m, block_n)
    square = block_m == block_n
    parts = _parts(config)
    programs = min(multiprocessors(out.device) * programs_of(config), batch * (-(-m // side)) ** 2)
    tiles, bounds = _tables(m, batch, programs, block_m, block_n, config.group, out.device)

    def factor(x: Tensor, rows: int) -> Any:
        return descriptor(x, *((block_k, rows) if trans else (rows, block_k)))

    arguments = (
        factor(a, block_m),
        None if square and same else factor(b, block_n),
        None if square or same else factor(b if block_m < block_n else a, side),
        descriptor(out, side, side // parts),
        correction,
        tiles,
        bounds,
        k,
        alpha,
        diagonal,
        trans,
        block_m,
        block_n,
        block_k,
        interpreting(),
        power,
        same,
        parts,
    )
    special: Hashable = None if correction is None else specialization((correction,), ())
    key = ("persistent", config, a.dtype, out.dtype, trans, same, power, special, k % 16 == 0, k == 1, a.device)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch(kernel, key, programs, arguments, options, out.device)
