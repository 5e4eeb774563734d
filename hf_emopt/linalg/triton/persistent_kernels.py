"""``D = alpha A B^T + diagonal I``, symmetric, by programs that each compute several tiles.

A program walks a list of square tiles of its own. The compiler makes one loop of the walk and of the sums within
(``flatten``), so that the first blocks of the next tile are being read while a tile is turned, rounded and stored; the last
store of a tile is being written while the next tile is summed. No program waits for another.

What this takes, and what is therefore not here:

* The end of a tile has no branches: Triton 3.6 cannot flatten a loop whose end has any. There is a loop for tiles below the
  diagonal and one for those on it.
* No ``+ beta C``: sums that start from ``C`` keep the blocks from being read ahead, and with what is held of ``C`` the
  registers are full. Such products run on :mod:`hf_emopt.linalg.triton.symmetric_kernels`.
* Sums and stores have shared memory of their own, since both are in use at once. Two programs share a multiprocessor, so
  tiles are stored in two halves, one after the other through the same memory.

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
def _store_square(out, desc, batch, row, col, SIDE: tl.constexpr):
    HALF: tl.constexpr = SIDE // 2
    left, right = out.reshape(SIDE, 2, HALF).permute(0, 2, 1).split()
    desc.store([batch, row, col], left.reshape(1, SIDE, HALF))
    desc.store([batch, row, col + HALF], right.reshape(1, SIDE, HALF))


@triton.jit
def _store_mirror(out, desc, batch, row, col, SIDE: tl.constexpr):
    # Halves by rows, which are columns of the mirror: blocks of one shape go through one buffer.
    HALF: tl.constexpr = SIDE // 2
    top, bottom = out.reshape(2, HALF, SIDE).permute(1, 2, 0).split()
    desc.store([batch, col, row], tl.trans(top).reshape(1, SIDE, HALF))
    desc.store([batch, col, row + HALF], tl.trans(bottom).reshape(1, SIDE, HALF))


@triton.jit
def _store_below(value, desc, batch, row, col, SIDE: tl.constexpr):
    """A square wholly below the diagonal, and its mirror."""
    out = value.to(desc.dtype)
    _store_square(out, desc, batch, row, col, SIDE)
    _store_mirror(out, desc, batch, row, col, SIDE)


@triton.jit
def _place(tiles_ptr, t):
    """Matrix, first row and first column of a tile."""
    return tl.load(tiles_ptr + 3 * t), tl.load(tiles_ptr + 3 * t + 1), tl.load(tiles_ptr + 3 * t + 2)


@triton.jit
def persistent_product_kernel(
    a_desc,
    b_desc,
    d_desc,
    correction_ptr,
    tiles_ptr,
    bounds_ptr,
    K,
    alpha,
    diagonal,
    TRANS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    CORRECTED: tl.constexpr,
    ONE: tl.constexpr,
):
    """``bounds_ptr``: of every program, where its tiles below the diagonal and those on it begin in ``tiles_ptr``, and where
    they end. ``b_desc`` is ``None`` where B is A (``ONE``). ``d_desc`` stores half of a tile's columns."""
    tl.assume(K > 0)
    # Bounds are read from memory, never carried: Triton 3.6 compiled an integer carried by an outer loop as its first value.
    bounds_ptr += 3 * tl.program_id(0)
    below = tl.load(bounds_ptr)
    on = tl.load(bounds_ptr + 1)
    end = tl.load(bounds_ptr + 2)
    right_desc = a_desc if ONE else b_desc
    for t in tl.range(below, on, flatten=True):
        batch, row, col = _place(tiles_ptr, t)
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        acc = _sum_descriptor(a_desc, right_desc, acc, batch, row, col, K, TRANS, BLOCK, BLOCK, BLOCK_K, UPCAST, False)
        scale, _ = _corrected(alpha, diagonal, correction_ptr, batch, CORRECTED)
        _store_below(scale * acc, d_desc, batch, row, col, BLOCK)
    # Not flattened for two factors: their blocks, the store and what turns the tile need more shared memory than two
    # programs a multiprocessor have.
    for t in tl.range(on, end, flatten=ONE):
        batch, row, _ = _place(tiles_ptr, t)
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        acc = _sum_descriptor(a_desc, right_desc, acc, batch, row, row, K, TRANS, BLOCK, BLOCK, BLOCK_K, UPCAST, ONE)
        scale, added = _corrected(alpha, diagonal, correction_ptr, batch, CORRECTED)
        out = _diagonal_square(scale * acc, added, d_desc.dtype, BLOCK)
        _store_square(out, d_desc, batch, row, row, BLOCK)
