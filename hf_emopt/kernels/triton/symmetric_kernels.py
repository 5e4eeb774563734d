"""Symmetric products ``D = alpha A B^T + beta C``, lower triangle computed, upper triangle mirrored.

Only tiles that touch the lower triangle are launched, by a table of tile coordinates, so no program exits idle and any
order of tiles is a table. Elements above the diagonal are never taken from a product: they are the mirror of those below,
in diagonal tiles too, so that ``D`` is symmetric bit for bit. An iteration on matrices that are symmetric only up to
rounding amplifies the difference.

A tile twice as wide as high (or as high as wide) that the diagonal enters has one square below it and one above: only the
square on the diagonal is computed, by programs that come last, so that two of them take the time of one whole tile.

``beta C`` is where the sums of 16-bit results start, not what is added at their end, when the registers hold a whole tile
already. To float32 results it is added at the end (``C_LAST``), by squares: tensor cores cut what they add to a sum to the
sum's last bit, and started from ``C``, 2048 products lost 2e-5 of it, always towards zero.

Two kernels with one rule of storing: loads and stores by pointers (any strides, any architecture), or by tensor
descriptors (sm_90 and later: the copy engine). Addresses of batches and rows are 64-bit. ``alpha``, ``beta`` and the
diagonals are run-time values: one binary serves every coefficient.

``CORRECTED``: a number ``t`` for each matrix of the batch is read from memory. 1: it multiplies the whole result; 2: its
square multiplies ``alpha``, as for ``X X^T`` of a matrix that should be ``t X``; 3: the same, and a second number for each
matrix is the factor of ``C``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["symmetric_product_descriptor_kernel", "symmetric_product_pointer_kernel"]


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    # Triton's interpreter multiplies the bit patterns of bfloat16 numbers; in float32 the products are the same ones.
    if UPCAST:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _corrected(alpha, beta, diagonal, correction_ptr, batch, CORRECTED: tl.constexpr, C_LAST: tl.constexpr):
    """``alpha``, the factor of ``C`` (in the sums, or after them), and the diagonal of one matrix of the batch."""
    if CORRECTED == 3:
        tl.static_assert(C_LAST)
        t = tl.load(correction_ptr + 2 * batch)
        alpha *= t * t
        beta = tl.load(correction_ptr + 2 * batch + 1)
    elif CORRECTED > 0:
        t = tl.load(correction_ptr + batch)
        alpha *= t
        if CORRECTED == 1:
            diagonal *= t
            if C_LAST:
                beta *= t
        else:
            alpha *= t
    return alpha, beta, diagonal


@triton.jit
def _corner(ptr, batch, batch_stride, row, row_stride, col):
    """Address of a tile. 64 bits are needed here and not within the tile, where they would cost registers."""
    return ptr + batch.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride + col


@triton.jit
def _diagonal_square(value, diagonal, dtype: tl.constexpr, SIDE: tl.constexpr):
    """``value + diagonal I``, rounded, with its lower triangle mirrored."""
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    out = (value + tl.where(i == j, diagonal, 0.0)).to(dtype)
    return tl.where(i >= j, out, tl.trans(out))


@triton.jit
def _store_square_pointer(
    value,
    ptr,
    c_ptr,
    c_row,
    beta,
    batch,
    batch_stride,
    row_stride,
    row,
    col,
    M,
    diagonal,
    C_LAST: tl.constexpr,
    SIDE: tl.constexpr,
):
    """``c_ptr`` is that of the matrix, ``ptr`` of the batch."""
    i = tl.arange(0, SIDE)
    j = tl.arange(0, SIDE)
    dtype: tl.constexpr = ptr.dtype.element_ty
    if C_LAST:  # noqa: SIM102 (a constant, and a branch of the program)
        if row >= col:
            c_ptrs = c_ptr + row.to(tl.int64) * c_row + col + (i[:, None] * c_row + j[None, :])
            value += beta * tl.load(c_ptrs, mask=(row + i < M)[:, None] & (col + j < M)[None, :], other=0.0)
    if row > col:
        out = value.to(dtype)
        lower = _corner(ptr, batch, batch_stride, row, row_stride, col) + (i[:, None] * row_stride + j[None, :])
        upper = _corner(ptr, batch, batch_stride, col, row_stride, row) + (i[:, None] * row_stride + j[None, :])
        # Columns of a tile below the diagonal are never past the end.
        tl.store(lower, out, mask=(row + i < M)[:, None])
        tl.store(upper, tl.trans(out), mask=(row + j < M)[None, :])
    if row == col:
        out = _diagonal_square(value, diagonal, dtype, SIDE)
        square = _corner(ptr, batch, batch_stride, row, row_stride, col) + (i[:, None] * row_stride + j[None, :])
        tl.store(square, out, mask=(row + i < M)[:, None] & (col + j < M)[None, :])


@triton.jit
def _store_pointer(
    value,
    ptr,
    c_ptr,
    c_row,
    beta,
    batch,
    batch_stride,
    row_stride,
    row,
    col,
    M,
    diagonal,
    C_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile as one or two squares, each of them wholly below, on, or above the diagonal."""
    if BLOCK_M == BLOCK_N:
        _store_square_pointer(
            value, ptr, c_ptr, c_row, beta, batch, batch_stride, row_stride, row, col, M, diagonal, C_LAST, BLOCK_M
        )
    elif BLOCK_M < BLOCK_N:
        left, right = value.reshape(BLOCK_M, 2, BLOCK_M).permute(0, 2, 1).split()
        _store_square_pointer(
            left, ptr, c_ptr, c_row, beta, batch, batch_stride, row_stride, row, col, M, diagonal, C_LAST, BLOCK_M
        )
        _store_square_pointer(
            right,
            ptr,
            c_ptr,
            c_row,
            beta,
            batch,
            batch_stride,
            row_stride,
            row,
            col + BLOCK_M,
            M,
            diagonal,
            C_LAST,
            BLOCK_M,
        )
    else:
        top, bottom = value.reshape(2, BLOCK_N, BLOCK_N).permute(1, 2, 0).split()
        _store_square_pointer(
            top, ptr, c_ptr, c_row, beta, batch, batch_stride, row_stride, row, col, M, diagonal, C_LAST, BLOCK_N
        )
        _store_square_pointer(
            bottom,
            ptr,
            c_ptr,
            c_row,
            beta,
            batch,
            batch_stride,
            row_stride,
            row + BLOCK_N,
            col,
            M,
            diagonal,
            C_LAST,
            BLOCK_N,
        )


@triton.jit
def _only_diagonal_square(row0, col0, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether a tile of two squares has one above the diagonal; the other then starts at ``(col0, col0)``."""
    if BLOCK_M < BLOCK_N:
        return row0 == col0
    else:
        return row0 + BLOCK_N == col0


@triton.jit
def _sum_pointer(
    a_ptr,
    b_ptr,
    c_ptr,
    row,
    col,
    M,
    K,
    a_row,
    a_col,
    b_row,
    b_col,
    c_row,
    beta,
    HAS_C: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``A B^T + beta C`` of one tile of one matrix of the batch, float32."""
    ks = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one: loads need no mask, and what they compute is not stored.
    i = tl.minimum(tl.arange(0, ROWS), M - 1 - row)
    j = tl.minimum(tl.arange(0, COLS), M - 1 - col)
    a_ptrs = a_ptr + row.to(tl.int64) * a_row + (i[:, None] * a_row + ks[None, :] * a_col)
    b_ptrs = b_ptr + col.to(tl.int64) * b_row + (j[None, :] * b_row + ks[:, None] * b_col)
    if HAS_C:
        c_ptrs = c_ptr + row.to(tl.int64) * c_row + col + (i[:, None] * c_row + j[None, :])
        # What is read above the diagonal may be another program's output by now; it is not used.
        acc = beta * tl.load(c_ptrs).to(tl.float32)
    else:
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        else:
            a = tl.load(a_ptrs, mask=(ks < K - k)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(ks < K - k)[:, None], other=0.0)
        acc = _dot(a, b, acc, UPCAST)
        a_ptrs += BLOCK_K * a_col
        b_ptrs += BLOCK_K * b_col
    return acc


@triton.jit(do_not_specialize=["num_tiles"])
def symmetric_product_pointer_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    correction_ptr,
    tiles_ptr,
    num_tiles,
    M,
    K,
    a_batch,
    a_row,
    a_col,
    b_batch,
    b_row,
    b_col,
    c_batch,
    c_row,
    d_batch,
    d_row,
    alpha,
    beta,
    diagonal,
    HAS_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    UPCAST: tl.constexpr,
    CORRECTED: tl.constexpr,
    C_LAST: tl.constexpr,
):
    # Without it the ends of the loops are merged across the branches, and the assembler serializes wgmma.
    tl.assume(K > 0)
    program = tl.program_id(0)
    batch = program // num_tiles
    tile = program % num_tiles
    row0 = tl.load(tiles_ptr + 2 * tile) * BLOCK_M
    col0 = tl.load(tiles_ptr + 2 * tile + 1) * BLOCK_N
    alpha, beta, diagonal = _corrected(alpha, beta, diagonal, correction_ptr, batch, CORRECTED, C_LAST)
    a_ptr += batch.to(tl.int64) * a_batch
    b_ptr += batch.to(tl.int64) * b_batch
    c_ptr += batch.to(tl.int64) * c_batch
    if BLOCK_M == BLOCK_N:
        acc = _sum_pointer(
            a_ptr, b_ptr, c_ptr, row0, col0, M, K, a_row, a_col, b_row, b_col, c_row, beta,
            HAS_C and not C_LAST, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, UPCAST,
        )  # fmt: skip
        _store_pointer(
            alpha * acc, d_ptr, c_ptr, c_row, beta, batch, d_batch, d_row, row0, col0, M, diagonal, C_LAST, BLOCK_M, BLOCK_N
        )  # fmt: skip
    else:
        SIDE: tl.constexpr = min(BLOCK_M, BLOCK_N)
        if _only_diagonal_square(row0, col0, BLOCK_M, BLOCK_N):
            square = _sum_pointer(
                a_ptr, b_ptr, c_ptr, col0, col0, M, K, a_row, a_col, b_row, b_col, c_row, beta,
                HAS_C and not C_LAST, SIDE, SIDE, BLOCK_K, EVEN_K, UPCAST,
            )  # fmt: skip
            _store_pointer(
                alpha * square, d_ptr, c_ptr, c_row, beta, batch, d_batch, d_row, col0, col0, M, diagonal, C_LAST, SIDE, SIDE
            )  # fmt: skip
        else:
            acc = _sum_pointer(
                a_ptr, b_ptr, c_ptr, row0, col0, M, K, a_row, a_col, b_row, b_col, c_row, beta,
                HAS_C and not C_LAST, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, UPCAST,
            )  # fmt: skip
            _store_pointer(
                alpha * acc, d_ptr, c_ptr, c_row, beta, batch, d_batch, d_row, row0, col0, M, diagonal, C_LAST,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit
def _load_block(desc, batch, row, k, TRANS: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """``(ROWS, BLOCK_K)`` from ``(batch, M, K)``, or from ``(batch, K, M)`` when ``TRANS``."""
    if TRANS:
        block = tl.trans(desc.load([batch, k, row]).reshape(BLOCK_K, ROWS))
    else:
        block = desc.load([batch, row, k]).reshape(ROWS, BLOCK_K)
    return block


@triton.jit
def _store_square_descriptor(
    value, desc, c_desc, beta, batch, row, col, diagonal, C_LAST: tl.constexpr, SIDE: tl.constexpr
):
    if C_LAST:  # noqa: SIM102 (a constant, and a branch of the program)
        if row >= col:
            value += beta * c_desc.load([batch, row, col]).reshape(SIDE, SIDE)
    if row > col:
        out = value.to(desc.dtype)
        desc.store([batch, row, col], out.reshape(1, SIDE, SIDE))
        desc.store([batch, col, row], tl.trans(out).reshape(1, SIDE, SIDE))
    if row == col:
        out = _diagonal_square(value, diagonal, desc.dtype, SIDE)
        desc.store([batch, row, col], out.reshape(1, SIDE, SIDE))


@triton.jit
def _store_descriptor(
    value,
    desc,
    c_desc,
    beta,
    batch,
    row,
    col,
    diagonal,
    C_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """As :func:`_store_pointer`; the copy engine cuts off what is past the end."""
    if BLOCK_M == BLOCK_N:
        _store_square_descriptor(value, desc, c_desc, beta, batch, row, col, diagonal, C_LAST, BLOCK_M)
    elif BLOCK_M < BLOCK_N:
        left, right = value.reshape(BLOCK_M, 2, BLOCK_M).permute(0, 2, 1).split()
        _store_square_descriptor(left, desc, c_desc, beta, batch, row, col, diagonal, C_LAST, BLOCK_M)
        _store_square_descriptor(right, desc, c_desc, beta, batch, row, col + BLOCK_M, diagonal, C_LAST, BLOCK_M)
    else:
        top, bottom = value.reshape(2, BLOCK_N, BLOCK_N).permute(1, 2, 0).split()
        _store_square_descriptor(top, desc, c_desc, beta, batch, row, col, diagonal, C_LAST, BLOCK_N)
        _store_square_descriptor(bottom, desc, c_desc, beta, batch, row + BLOCK_N, col, diagonal, C_LAST, BLOCK_N)


@triton.jit
def _start_descriptor(c_desc, batch, row, col, beta, HAS_C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    if HAS_C:
        acc = beta * c_desc.load([batch, row, col]).reshape(ROWS, COLS).to(tl.float32)
    else:
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    return acc


@triton.jit
def _sum_descriptor(
    a_desc,
    b_desc,
    acc,
    batch,
    row,
    col,
    K,
    TRANS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    ONE: tl.constexpr,
):
    """``ONE``: both factors are the same block, which is read once."""
    for k in range(0, K, BLOCK_K):
        a = _load_block(a_desc, batch, row, k, TRANS, ROWS, BLOCK_K)
        if ONE:
            acc = _dot(a, a.T, acc, UPCAST)
        else:
            b = _load_block(b_desc, batch, col, k, TRANS, COLS, BLOCK_K)
            acc = _dot(a, b.T, acc, UPCAST)
    return acc


@triton.jit(do_not_specialize=["num_tiles"])
def symmetric_product_descriptor_kernel(
    a_desc,
    b_desc,
    side_desc,
    c_desc,
    d_desc,
    correction_ptr,
    tiles_ptr,
    num_tiles,
    K,
    alpha,
    beta,
    diagonal,
    HAS_C: tl.constexpr,
    SQUARE: tl.constexpr,
    TRANS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
    CORRECTED: tl.constexpr,
    DIAGONAL: tl.constexpr,
    C_LAST: tl.constexpr,
):
    """``side_desc`` reads blocks of ``min(BLOCK_M, BLOCK_N)`` rows of the factor whose own blocks are longer. ``DIAGONAL``:
    1: square tiles on the diagonal have code of their own, which takes fewer registers; 2: and B is A, of which they, and the
    squares of other tiles there, read each block once."""
    # Without it the ends of the loops are merged across the branches, and the assembler serializes wgmma.
    tl.assume(K > 0)
    program = tl.program_id(0)
    batch = program // num_tiles
    tile = program % num_tiles
    row0 = tl.load(tiles_ptr + 2 * tile) * BLOCK_M
    col0 = tl.load(tiles_ptr + 2 * tile + 1) * BLOCK_N
    alpha, beta, diagonal = _corrected(alpha, beta, diagonal, correction_ptr, batch, CORRECTED, C_LAST)
    if BLOCK_M == BLOCK_N:
        acc = _start_descriptor(c_desc, batch, row0, col0, beta, HAS_C and not C_LAST, BLOCK_M, BLOCK_N)
        if DIAGONAL > 0:
            if row0 == col0:
                acc = _sum_descriptor(
                    a_desc, b_desc, acc, batch, row0, row0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, DIAGONAL == 2
                )
                _store_square_descriptor(
                    alpha * acc, d_desc, c_desc, beta, batch, row0, row0, diagonal, C_LAST, BLOCK_M
                )
            else:
                if SQUARE:
                    acc = _sum_descriptor(
                        a_desc, a_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False
                    )
                else:
                    acc = _sum_descriptor(
                        a_desc, b_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False
                    )
                _store_square_descriptor(
                    alpha * acc, d_desc, c_desc, beta, batch, row0, col0, diagonal, C_LAST, BLOCK_M
                )
        elif SQUARE:  # B is A, and its tiles have the same shape
            acc = _sum_descriptor(
                a_desc, a_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False
            )
            _store_descriptor(alpha * acc, d_desc, c_desc, beta, batch, row0, col0, diagonal, C_LAST, BLOCK_M, BLOCK_N)
        else:
            acc = _sum_descriptor(
                a_desc, b_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False
            )
            _store_descriptor(alpha * acc, d_desc, c_desc, beta, batch, row0, col0, diagonal, C_LAST, BLOCK_M, BLOCK_N)
    else:
        SIDE: tl.constexpr = min(BLOCK_M, BLOCK_N)
        if _only_diagonal_square(row0, col0, BLOCK_M, BLOCK_N):
            square = tl.zeros((SIDE, SIDE), dtype=tl.float32)
            if HAS_C and not C_LAST:  # descriptors of C read whole tiles
                c = _start_descriptor(c_desc, batch, row0, col0, beta, HAS_C and not C_LAST, BLOCK_M, BLOCK_N)
                if BLOCK_M < BLOCK_N:
                    square, _ = c.reshape(SIDE, 2, SIDE).permute(0, 2, 1).split()
                else:
                    _, square = c.reshape(2, SIDE, SIDE).permute(1, 2, 0).split()
            if BLOCK_M < BLOCK_N:
                square = _sum_descriptor(
                    a_desc, side_desc, square, batch, col0, col0, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, DIAGONAL == 2
                )
            else:
                if DIAGONAL == 2:
                    square = _sum_descriptor(
                        b_desc, b_desc, square, batch, col0, col0, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, True
                    )
                else:
                    square = _sum_descriptor(
                        side_desc, b_desc, square, batch, col0, col0, K, TRANS, SIDE, SIDE, BLOCK_K, UPCAST, False
                    )
            _store_square_descriptor(alpha * square, d_desc, c_desc, beta, batch, col0, col0, diagonal, C_LAST, SIDE)
        else:
            acc = _start_descriptor(c_desc, batch, row0, col0, beta, HAS_C and not C_LAST, BLOCK_M, BLOCK_N)
            acc = _sum_descriptor(
                a_desc, b_desc, acc, batch, row0, col0, K, TRANS, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, False
            )
            _store_descriptor(alpha * acc, d_desc, c_desc, beta, batch, row0, col0, diagonal, C_LAST, BLOCK_M, BLOCK_N)
