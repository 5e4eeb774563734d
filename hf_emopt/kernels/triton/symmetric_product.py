"""Symmetric products ``D = alpha A B^T + beta C + diagonal I``: the lower triangle is computed, the upper one mirrored.

A table of tile coordinates has the tiles that touch the lower triangle. Elements above the diagonal are never taken from a
product, in diagonal tiles too, so that ``D`` is symmetric bit for bit: an iteration on matrices that are symmetric only up
to rounding amplifies the difference. A tile of two squares that the diagonal enters has one square above it; only the other
is computed, by programs that come last, so that two of them take the time of one whole tile.

The sums of 16-bit results start from ``beta C``: at their end the registers hold a whole tile already. To float32 results it
is added at the end (``C_LAST``), by squares: tensor cores cut what they add to a sum to the sum's last bit. ``alpha``,
``beta`` and the diagonals are run-time values: one binary serves every coefficient. Times are in docs/kernels.md.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton import configs
from hf_emopt.kernels.triton.configs import Config
from hf_emopt.kernels.triton.launching import describable, descriptor, launch, specialization
from hf_emopt.kernels.triton.runtime import architecture, interpreting


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``acc + a b``, or ``a b`` where ``acc`` is ``None``; with ``UPCAST`` in float32."""
    # Triton's interpreter multiplies the bit patterns of bfloat16 numbers; in float32 the products are the same ones.
    if UPCAST:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def load_block(desc, batch, row, k, TRANS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """``(ROWS, BLOCK_K)`` from ``(batch, M, K)``, or from ``(batch, K, M)`` when ``TRANS``."""
    if TRANS:
        block = tl.trans(desc.load([batch, k, row]).reshape(BLOCK_K, ROWS))
    else:
        block = desc.load([batch, row, k]).reshape(ROWS, BLOCK_K)
    return block


@triton.jit
def _start(c_desc, batch, row, col, beta, HAS_C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``beta C`` of a tile, or zeros."""
    if HAS_C:
        acc = beta * load_block(c_desc, batch, row, col, False, ROWS, COLS).to(tl.float32)
    else:
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    return acc


@triton.jit
def _sum(
    a_desc, b_desc,
    acc, batch, row, col, K,
    TRANS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """``acc + A B^T`` of a tile. ``ONE``: both factors are the same block, which is read once."""
    for k in range(0, K, BLOCK_K):
        a = load_block(a_desc, batch, row, k, TRANS, ROWS, BLOCK_K)
        if ONE:
            acc = dot(a, a.T, acc, UPCAST)
        else:
            b = load_block(b_desc, batch, col, k, TRANS, COLS, BLOCK_K)
            acc = dot(a, b.T, acc, UPCAST)
    return acc


@triton.jit
def _store_square(value, desc, c_desc, beta, batch, row, col, diagonal, C_LAST: tl.constexpr, SIDE: tl.constexpr):
    """A square below the diagonal and its mirror image, or one on the diagonal, mirrored in itself; none above.

    The copy engine writes nothing past the end.
    """
    if C_LAST:  # noqa: SIM102 (a constant, and a branch of the program)
        if row >= col:
            value += beta * c_desc.load([batch, row, col]).reshape(SIDE, SIDE)
    if row > col:
        out = value.to(desc.dtype)
        desc.store([batch, row, col], out.reshape(1, SIDE, SIDE))
        desc.store([batch, col, row], tl.trans(out).reshape(1, SIDE, SIDE))
    if row == col:
        i = tl.arange(0, SIDE)[:, None]
        j = tl.arange(0, SIDE)[None, :]
        out = (value + tl.where(i == j, diagonal, 0.0)).to(desc.dtype)
        out = tl.where(i >= j, out, tl.trans(out))
        desc.store([batch, row, col], out.reshape(1, SIDE, SIDE))


@triton.jit
def _store_two_squares(
    value, desc, c_desc, beta, batch, row, col, diagonal, C_LAST: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr
):
    """A tile of two squares side by side (``WIDE``) or one above the other."""
    if WIDE:
        left, right = value.reshape(SIDE, 2, SIDE).permute(0, 2, 1).split()
        _store_square(left, desc, c_desc, beta, batch, row, col, diagonal, C_LAST, SIDE)
        _store_square(right, desc, c_desc, beta, batch, row, col + SIDE, diagonal, C_LAST, SIDE)
    else:
        top, bottom = value.reshape(2, SIDE, SIDE).permute(1, 2, 0).split()
        _store_square(top, desc, c_desc, beta, batch, row, col, diagonal, C_LAST, SIDE)
        _store_square(bottom, desc, c_desc, beta, batch, row + SIDE, col, diagonal, C_LAST, SIDE)


@triton.jit
def _only_diagonal_square(row0, col0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether a tile of two squares has one above the diagonal; the other then starts at ``(col0, col0)``."""
    if BLOCK_M < BLOCK_N:
        return row0 == col0
    else:
        return row0 + BLOCK_N == col0


@triton.jit(do_not_specialize=["num_tiles"])
def symmetric_product_kernel(
    a_desc, b_desc, side_desc, c_desc, d_desc, scales_ptr, tiles_ptr,
    num_tiles, K, alpha, beta, diagonal,
    HAS_C: tl.constexpr, SAME: tl.constexpr, TRANS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, SCALED: tl.constexpr, C_LAST: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix of the batch.

    ``SAME``: B is A. ``SCALED``: two numbers ``t`` and ``b`` for each matrix are read from memory; ``t^2`` multiplies
    ``alpha``, and ``b`` takes the place of ``beta``. ``side_desc`` reads blocks of ``min(BLOCK_M, BLOCK_N)`` rows of the
    factor whose own blocks are longer. Square tiles on the diagonal have code of their own, which takes fewer registers.
    """
    # Without it the ends of the loops are merged across the branches, and the assembler serializes wgmma.
    tl.assume(K > 0)
    program = tl.program_id(0)
    batch = program // num_tiles
    tile = program % num_tiles
    row0 = tl.load(tiles_ptr + 2 * tile) * BLOCK_M
    col0 = tl.load(tiles_ptr + 2 * tile + 1) * BLOCK_N
    if SCALED:
        t = tl.load(scales_ptr + 2 * batch)
        alpha *= t * t
        beta = tl.load(scales_ptr + 2 * batch + 1)
    STARTS: tl.constexpr = HAS_C and not C_LAST
    if BLOCK_M == BLOCK_N:
        acc = _start(c_desc, batch, row0, col0, beta, STARTS, BLOCK_M, BLOCK_N)
        if row0 == col0:
            acc = _sum(a_desc, b_desc, acc, batch, row0, row0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, SAME)
            _store_square(alpha * acc, d_desc, c_desc, beta, batch, row0, row0, diagonal, C_LAST, BLOCK_M)
        else:
            if SAME:
                acc = _sum(a_desc, a_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False)
            else:
                acc = _sum(a_desc, b_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False)
            _store_square(alpha * acc, d_desc, c_desc, beta, batch, row0, col0, diagonal, C_LAST, BLOCK_M)
    else:
        SIDE: tl.constexpr = min(BLOCK_M, BLOCK_N)
        if _only_diagonal_square(row0, col0, BLOCK_M, BLOCK_N):
            square = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            if STARTS:  # descriptors of C read whole tiles
                c = _start(c_desc, batch, row0, col0, beta, True, BLOCK_M, BLOCK_N)
                if BLOCK_M < BLOCK_N:
                    square, _ = c.reshape(SIDE, 2, SIDE).permute(0, 2, 1).split()
                else:
                    _, square = c.reshape(2, SIDE, SIDE).permute(1, 2, 0).split()
            if BLOCK_M < BLOCK_N:
                square = _sum(a_desc, side_desc, square, batch, col0, col0, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, SAME)
            else:
                if SAME:
                    square = _sum(
                        b_desc, b_desc, square, batch, col0, col0, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, True
                    )
                else:
                    square = _sum(
                        side_desc, b_desc, square, batch, col0, col0, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, False
                    )
            _store_square(alpha * square, d_desc, c_desc, beta, batch, col0, col0, diagonal, C_LAST, SIDE)
        else:
            acc = _start(c_desc, batch, row0, col0, beta, STARTS, BLOCK_M, BLOCK_N)
            acc = _sum(a_desc, b_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False)
            _store_two_squares(
                alpha * acc, d_desc, c_desc, beta, batch, row0, col0, diagonal, C_LAST, BLOCK_M < BLOCK_N, SIDE
            )


@functools.lru_cache(maxsize=1024)
def _tiles(m: int, block_m: int, block_n: int, group: int, triangle: bool) -> tuple[tuple[int, int], ...]:
    rows, cols = -(-m // block_m), -(-m // block_n)
    touching = [(i, j) for i in range(rows) for j in range(cols) if not triangle or (i + 1) * block_m > j * block_n]
    side_m, side_n = group * max(block_m, block_n) // block_m, group * max(block_m, block_n) // block_n
    side = min(block_m, block_n)

    def half(tile: tuple[int, int]) -> bool:
        """Whether one of its two squares is above the diagonal."""
        return block_m != block_n and tile[0] * block_m + (block_m > block_n) * side == tile[1] * block_n

    return tuple(sorted(touching, key=lambda t: (half(t), t[0] // side_m, t[1] // side_n, t[0], t[1])))


@functools.lru_cache(maxsize=1024)
def tile_table(
    m: int, block_m: int, block_n: int, group: int, device: torch.device, triangle: bool = True
) -> tuple[Tensor, int]:
    """Row and column of every tile of an ``m x m`` matrix, or with ``triangle`` of those that touch its lower triangle:
    ``(tiles, 2)`` int32, and their number. Squares of ``group`` tiles follow one another, so that programs that run together
    read the same rows."""
    tiles = _tiles(m, block_m, block_n, group, triangle)
    return torch.tensor(tiles, dtype=torch.int32, device=device), len(tiles)


def _as_batch(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.ndim == 2 else x


def _row_major(x: Tensor) -> Tensor:
    """``(B, m, k)``, or ``(B, k, m)`` where columns are contiguous."""
    x = _as_batch(x)
    return x if x.stride(-1) == 1 else x.mT


def takes(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor) -> bool:
    """Whether the copy engine can read and write all of them: the factors or their transposes, and ``c`` and ``out``."""
    if (a.stride(-1) == 1) != (b.stride(-1) == 1):
        return False
    matrices = (_row_major(a), _row_major(b), _as_batch(out), *(() if c is None else (_as_batch(c),)))
    return all(map(describable, matrices))


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float,
    beta: float,
    diagonal: float = 0.0,
    config: Config | None = None,
    scales: Tensor | None = None,
) -> None:
    """``out = alpha A B^T + beta C + diagonal I`` of matrices which the copy engine :func:`takes`.

    Args:
        a, b: ``(B, m, k)`` or ``(m, k)``, bfloat16 or float16; ``A B^T`` must be symmetric.
        c, out: ``(B, m, m)`` or ``(m, m)``. ``c`` may be ``out``.
        config: tiles; ``None`` takes them from the table.
        scales: ``(B, 2)`` float32 on the device, ``t`` and ``b`` of each matrix: the result is
            ``t^2 alpha A B^T + b C + diagonal I``, whatever ``beta`` is.

    Raises:
        ValueError: ``alpha`` 0 with a ``beta`` for a 16-bit result; ``scales`` without ``c``, for a 16-bit result, or of
            another shape.
    """
    last = c is not None and out.dtype == torch.float32
    if alpha == 0.0 and c is not None and beta != 0.0 and not last:
        raise ValueError("alpha must not be 0 with beta C of 16 bits: sums start from beta / alpha C")
    if scales is not None and (not last or scales.ndim != 2):
        raise ValueError(f"scales are (B, 2), for a float32 result with a c, got {tuple(scales.shape)} for {out.dtype}")
    a, b, out = _as_batch(a), _as_batch(b), _as_batch(out)
    c = None if c is None else _as_batch(c)
    batch, m, k = a.shape
    if config is None:
        capability = None if interpreting() else architecture(a.device)
        choose = configs.choose_wide if out.dtype == torch.float32 else configs.choose
        config = choose(capability, batch, m, k, c is not None)
    elif out.dtype == torch.float32:
        config = configs.with_wide_registers(config)
    trans = a.stride(-1) != 1
    same = b.data_ptr() == a.data_ptr() and b.stride() == a.stride()
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    square, side = block_m == block_n, min(block_m, block_n)
    tiles, count = tile_table(m, block_m, block_n, config.group, out.device)

    def factor(x: Tensor, rows: int) -> Any:
        return descriptor(x.mT, block_k, rows) if trans else descriptor(x, rows, block_k)

    arguments = (
        factor(a, block_m),
        None if same and square else factor(b, block_n),
        None if same or square else factor(b if block_m < block_n else a, side),
        None if c is None else descriptor(c, *((side, side) if last else (block_m, block_n))),
        descriptor(out, side, side),
        *(scales, tiles, count, k, alpha),
        beta if last else beta / alpha if beta else 0.0,  # sums start from C, or end with it
        diagonal,
        *(c is not None, same, trans, block_m, block_n, block_k, interpreting(), scales is not None, last),
    )
    special = (k % 16 == 0, k == 1, None if scales is None else specialization((scales,), ()))
    key = ("symmetric product", config, a.dtype, out.dtype, c is None, same, trans, special, a.device)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch(symmetric_product_kernel, key, count * batch, arguments, options, out.device)
