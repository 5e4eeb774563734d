"""Products of split factors, ``A = A_1 + 2^-11 A_2``, with everything that a step of a coupled iteration does to them.

A step of the inner loop has three products of two blocks each, into two sums: ``A_1 B_1``, and ``A_1 B_2 + A_2 B_1``. Both
start at zero, since tensor cores cut what they add to a sum to the sum's last bit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from hf_emopt.kernels.triton.symmetric_kernels import _dot

__all__ = ["split_kernel", "split_product_kernel"]


@triton.jit
def split_kernel(
    x_ptr, high_ptr, low_ptr, size, cols, programs, scale, diagonal, LOW: tl.constexpr, BLOCK: tl.constexpr
):
    """The parts of ``scale X + diagonal I``."""
    matrix = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    x_ptr += matrix.to(tl.int64) * size
    high_ptr += matrix.to(tl.int64) * size
    low_ptr += matrix.to(tl.int64) * size
    lanes = tl.arange(0, BLOCK)
    for start in range(program * BLOCK, size, programs * BLOCK):
        index = start + lanes
        inside = index < size
        x = scale * tl.load(x_ptr + index, mask=inside, other=0.0)
        x += tl.where(index % (cols + 1) == 0, diagonal, 0.0)
        high = x.to(tl.float16)
        tl.store(high_ptr + index, high, mask=inside)
        tl.store(low_ptr + index, ((x - high.to(tl.float32)) * (1.0 / LOW)).to(tl.float16), mask=inside)


@triton.jit
def _load(desc, batch, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    return desc.load([batch, row, col]).reshape(ROWS, COLS)


@triton.jit
def _factor(desc, batch, row, k, TRANS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """``(ROWS, BLOCK_K)`` of a factor, or of its transpose."""
    if TRANS:
        block = tl.trans(_load(desc, batch, k, row, BLOCK_K, ROWS))
    else:
        block = _load(desc, batch, row, k, ROWS, BLOCK_K)
    return block


@triton.jit
def _store_tile(desc, batch, row, col, value, SYMMETRIC: tl.constexpr, SIDE: tl.constexpr):
    """A tile, and with ``SYMMETRIC`` its mirror image."""
    desc.store([batch, row, col], value.reshape(1, SIDE, SIDE))
    if SYMMETRIC:  # noqa: SIM102 (a constant, and a branch of the program)
        if row != col:
            desc.store([batch, col, row], tl.trans(value).reshape(1, SIDE, SIDE))


@triton.jit(do_not_specialize=["num_tiles"])
def split_product_kernel(
    a1_desc,
    a2_desc,
    b1_desc,
    b2_desc,
    c_desc,
    c2_desc,
    out_desc,
    high_desc,
    low_desc,
    active_ptr,
    tiles_ptr,
    num_tiles,
    K,
    alpha,
    beta,
    diagonal,
    wide_diagonal,
    C_PARTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
    TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    LOW: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``V = alpha A B + beta C + diagonal I`` as ``V + wide_diagonal I`` in float32 (``WIDE``) and in parts (``PARTS``).

    ``C_PARTS``: -1 for no C, 0 for one in float32, 1 for one in parts. ``TRANS_A``, ``TRANS_B``: what is read is the
    transpose of A, and not that of B. ``SYMMETRIC``: the tiles are those that touch the lower triangle.
    """
    tl.assume(K > 0)
    program = tl.program_id(0)
    batch = program // num_tiles
    tile = program % num_tiles
    row = tl.load(tiles_ptr + 2 * tile) * SIDE
    col = tl.load(tiles_ptr + 2 * tile + 1) * SIDE
    value = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    mixed = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a1 = _factor(a1_desc, batch, row, k, TRANS_A, SIDE, BLOCK_K)
        b1 = _factor(b1_desc, batch, col, k, TRANS_B, SIDE, BLOCK_K)
        a2 = _factor(a2_desc, batch, row, k, TRANS_A, SIDE, BLOCK_K)
        b2 = _factor(b2_desc, batch, col, k, TRANS_B, SIDE, BLOCK_K)
        value = _dot(a1, b1.T, value, UPCAST)
        mixed = _dot(a1, b2.T, mixed, UPCAST)
        mixed = _dot(a2, b1.T, mixed, UPCAST)
    value = alpha * (value + LOW * mixed)
    if C_PARTS == 0:
        value += beta * _load(c_desc, batch, row, col, SIDE, SIDE)
    if C_PARTS == 1:
        high = _load(c_desc, batch, row, col, SIDE, SIDE).to(tl.float32)
        value += beta * (high + LOW * _load(c2_desc, batch, row, col, SIDE, SIDE).to(tl.float32))
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    on_diagonal = (row == col) & (i == j)
    if SYMMETRIC:  # noqa: SIM102 (a constant, and a branch of the program)
        if row == col:
            value = tl.where(i >= j, value, tl.trans(value))
    value += tl.where(on_diagonal, diagonal, 0.0)
    if ACTIVE:
        value *= tl.load(active_ptr + batch).to(tl.float32)
    if PARTS:
        high = value.to(tl.float16)
        low = ((value - high.to(tl.float32)) * (1.0 / LOW)).to(tl.float16)
        _store_tile(high_desc, batch, row, col, high, SYMMETRIC, SIDE)
        _store_tile(low_desc, batch, row, col, low, SYMMETRIC, SIDE)
    if WIDE:
        wide = value + tl.where(on_diagonal, wide_diagonal, 0.0)
        _store_tile(out_desc, batch, row, col, wide, SYMMETRIC, SIDE)
