"""``D = alpha A B^T + diagonal I``, symmetric, by programs that each compute several tiles: the variant ``persistent``.

A program walks a list of tiles of its own. The compiler makes one loop of the walk and of the sums within (``flatten``), so
that the first blocks of the next tile are being read while a tile is turned, rounded and stored; the last store of a tile is
being written while the next tile is summed. No program waits for another.

What this takes, and what is therefore not here:

* The end of a tile has no branches: Triton 3.6 cannot flatten a loop whose end has any. There is a loop for each kind of
  tile: whole ones below the diagonal, squares below it, squares on it. A tile of two squares that the diagonal enters is cut
  into squares.
* No ``+ beta C``: sums that start from ``C`` keep the blocks from being read ahead, and with what is held of ``C`` the
  registers are full. Such products run on :mod:`hf_emopt.linalg.triton.symmetric_kernels`.
* Sums and stores have shared memory of their own, since both are in use at once. Where two programs share a multiprocessor,
  squares are stored in two ``PARTS``, one after the other through the same half.

Values are those of the other kernels to the bit: the same sums in the same order, mirrored in the same way. Where something
is added to the diagonal, the compiler may round once here and twice there.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from hf_emopt.linalg.triton.symmetric_kernels import _corrected, _diagonal_square, _sum_descriptor

__all__ = ["persistent_product_kernel"]


@triton.jit
def _store_square(out, desc, batch, row, col, SIDE: tl.constexpr, PARTS: tl.constexpr):
    if PARTS == 1:
        desc.store([batch, row, col], out.reshape(1, SIDE, SIDE))
    else:
        HALF: tl.constexpr = SIDE // 2
        left, right = out.reshape(SIDE, 2, HALF).permute(0, 2, 1).split()
        desc.store([batch, row, col], left.reshape(1, SIDE, HALF))
        desc.store([batch, row, col + HALF], right.reshape(1, SIDE, HALF))


@triton.jit
def _store_mirror(out, desc, batch, row, col, SIDE: tl.constexpr, PARTS: tl.constexpr):
    if PARTS == 1:
        desc.store([batch, col, row], tl.trans(out).reshape(1, SIDE, SIDE))
    else:
        # Halves by rows, which are columns of the mirror: blocks of one shape go through one buffer.
        HALF: tl.constexpr = SIDE // 2
        top, bottom = out.reshape(2, HALF, SIDE).permute(1, 2, 0).split()
        desc.store([batch, col, row], tl.trans(top).reshape(1, SIDE, HALF))
        desc.store([batch, col, row + HALF], tl.trans(bottom).reshape(1, SIDE, HALF))


@triton.jit
def _store_below(value, desc, batch, row, col, SIDE: tl.constexpr, PARTS: tl.constexpr):
    """A square wholly below the diagonal, and its mirror."""
    out = value.to(desc.dtype)
    _store_square(out, desc, batch, row, col, SIDE, PARTS)
    _store_mirror(out, desc, batch, row, col, SIDE, PARTS)


@triton.jit
def _place(tiles_ptr, t):
    """Matrix, first row and first column of a tile."""
    return tl.load(tiles_ptr + 3 * t), tl.load(tiles_ptr + 3 * t + 1), tl.load(tiles_ptr + 3 * t + 2)


@triton.jit
def persistent_product_kernel(
    a_desc,
    b_desc,
    side_desc,
    d_desc,
    correction_ptr,
    tiles_ptr,
    bounds_ptr,
    K,
    alpha,
    diagonal,
    TRANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    CORRECTED: tl.constexpr,
    ONE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``bounds_ptr``: of every program, where its whole tiles, its squares below the diagonal and those on it begin in
    ``tiles_ptr``, and where they end. ``a_desc`` and ``b_desc`` read blocks of ``BLOCK_M`` and ``BLOCK_N`` rows,
    ``side_desc`` blocks of the smaller number from the factor whose own are longer; ``None`` where that is the other
    factor's descriptor (``ONE``: B is A). ``PARTS``: ``d_desc`` stores a square at once, or half of its columns."""
    tl.assume(K > 0)
    SIDE: tl.constexpr = min(BLOCK_M, BLOCK_N)
    # Bounds are read from memory, never carried: Triton 3.6 compiled an integer carried by an outer loop as its first value.
    bounds_ptr += 4 * tl.program_id(0)
    whole = tl.load(bounds_ptr)
    below = tl.load(bounds_ptr + 1)
    on = tl.load(bounds_ptr + 2)
    end = tl.load(bounds_ptr + 3)
    if BLOCK_M == BLOCK_N:
        for t in tl.range(whole, below, flatten=True):
            batch, row, col = _place(tiles_ptr, t)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc = _sum_descriptor(
                a_desc, a_desc if ONE else b_desc, acc, batch, row, col, K,
                TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False,
            )  # fmt: skip
            scale, _ = _corrected(alpha, diagonal, correction_ptr, batch, CORRECTED)
            _store_below(scale * acc, d_desc, batch, row, col, SIDE, PARTS)
        left_desc = a_desc
        right_desc = a_desc if ONE else b_desc
    else:
        for t in tl.range(whole, below, flatten=True):
            batch, row, col = _place(tiles_ptr, t)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            acc = _sum_descriptor(
                a_desc, b_desc, acc, batch, row, col, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False
            )
            scale, _ = _corrected(alpha, diagonal, correction_ptr, batch, CORRECTED)
            value = scale * acc
            if BLOCK_M < BLOCK_N:
                first, second = value.reshape(SIDE, 2, SIDE).permute(0, 2, 1).split()
                _store_below(first, d_desc, batch, row, col, SIDE, PARTS)
                _store_below(second, d_desc, batch, row, col + SIDE, SIDE, PARTS)
            else:
                first, second = value.reshape(2, SIDE, SIDE).permute(1, 2, 0).split()
                _store_below(first, d_desc, batch, row, col, SIDE, PARTS)
                _store_below(second, d_desc, batch, row + SIDE, col, SIDE, PARTS)
        if BLOCK_M < BLOCK_N:
            left_desc = a_desc
            right_desc = a_desc if ONE else side_desc
        else:
            left_desc = b_desc if ONE else side_desc
            right_desc = b_desc
        for t in tl.range(below, on, flatten=True):
            batch, row, col = _place(tiles_ptr, t)
            acc = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            acc = _sum_descriptor(
                left_desc, right_desc, acc, batch, row, col, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, False
            )
            scale, _ = _corrected(alpha, diagonal, correction_ptr, batch, CORRECTED)
            _store_below(scale * acc, d_desc, batch, row, col, SIDE, PARTS)
    # Not flattened for two factors: their blocks, the store and what turns the square need more shared memory than two
    # programs a multiprocessor have.
    for t in tl.range(on, end, flatten=ONE):
        batch, row, _ = _place(tiles_ptr, t)
        acc = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        acc = _sum_descriptor(left_desc, right_desc, acc, batch, row, row, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, ONE)
        scale, added = _corrected(alpha, diagonal, correction_ptr, batch, CORRECTED)
        out = _diagonal_square(scale * acc, added, d_desc.dtype, SIDE)
        _store_square(out, d_desc, batch, row, row, SIDE, PARTS)
