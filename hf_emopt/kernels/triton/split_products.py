"""Products of split factors, ``A = A_1 + 2^-11 A_2``, with everything that a step of a coupled iteration does to them.

A step of the inner loop has three products of two blocks each, into two sums: ``A_1 B_1``, and ``A_1 B_2 + A_2 B_1``. Both
start at zero, since tensor cores cut what they add to a sum to the sum's last bit. Times are in docs/kernels.md.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton.configs import LOW, family
from hf_emopt.kernels.triton.half_precision import BLOCK, programs_of
from hf_emopt.kernels.triton.launching import describable, descriptor, launch, launch_pass
from hf_emopt.kernels.triton.runtime import architecture, interpreting
from hf_emopt.kernels.triton.symmetric_product import dot, load_block, tile_table

# Two sums of 128 x 128 take 128 registers of each thread; three stages of four blocks 192 KiB.
_SIDE, _BLOCK_K = 128, 64
_PRODUCT_OPTIONS = {"num_warps": 8, "num_stages": 3}
_GROUP = 16


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
def _store_tile(desc, batch, row, col, value, SYMMETRIC: tl.constexpr, SIDE: tl.constexpr):
    """A tile, and with ``SYMMETRIC`` its mirror image."""
    desc.store([batch, row, col], value.reshape(1, SIDE, SIDE))
    if SYMMETRIC:  # noqa: SIM102 (a constant, and a branch of the program)
        if row != col:
            desc.store([batch, col, row], tl.trans(value).reshape(1, SIDE, SIDE))


@triton.jit(do_not_specialize=["num_tiles"])
def split_product_kernel(
    a1_desc, a2_desc, b1_desc, b2_desc, c_desc, c2_desc, out_desc, high_desc, low_desc, active_ptr, tiles_ptr,
    num_tiles, K, alpha, beta, diagonal, wide_diagonal,
    C_PARTS: tl.constexpr, ACTIVE: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, TRANS_A: tl.constexpr,
    TRANS_B: tl.constexpr, SYMMETRIC: tl.constexpr, LOW: tl.constexpr, SIDE: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """``V = alpha A B + beta C + diagonal I`` as ``V + wide_diagonal I`` in float32 (``WIDE``) and in parts (``PARTS``).

    ``C_PARTS``: -1 for no C, 0 for one in float32, 1 for one in parts. ``TRANS_A``, ``TRANS_B``: A is read
    transposed, and B is not. ``SYMMETRIC``: the tiles are those that touch the lower triangle.
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
        a1 = load_block(a1_desc, batch, row, k, TRANS_A, SIDE, BLOCK_K)
        b1 = load_block(b1_desc, batch, col, k, TRANS_B, SIDE, BLOCK_K)
        a2 = load_block(a2_desc, batch, row, k, TRANS_A, SIDE, BLOCK_K)
        b2 = load_block(b2_desc, batch, col, k, TRANS_B, SIDE, BLOCK_K)
        value = dot(a1, b1.T, value, UPCAST)
        mixed = dot(a1, b2.T, mixed, UPCAST)
        mixed = dot(a2, b1.T, mixed, UPCAST)
    value = alpha * (value + LOW * mixed)
    if C_PARTS == 0:
        value += beta * load_block(c_desc, batch, row, col, False, SIDE, SIDE)
    if C_PARTS == 1:
        high = load_block(c_desc, batch, row, col, False, SIDE, SIDE).to(tl.float32)
        value += beta * (high + LOW * load_block(c2_desc, batch, row, col, False, SIDE, SIDE).to(tl.float32))
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


Parts = tuple[Tensor, Tensor]


def takes(*matrices: Tensor) -> bool:
    """Whether the copy engine can read and write all of them, and the device has the shared memory (sm_90)."""
    capability = None if interpreting() else architecture(matrices[0].device)
    return (capability is None or family(capability) == 90) and all(x.numel() and describable(x) for x in matrices)


def split(x: Tensor, scale: float, diagonal: float) -> Parts:
    """Parts of ``scale X + diagonal I`` of ``(N, d, d)`` contiguous float32."""
    batch, d = x.shape[:2]
    high, low = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for _ in range(2))
    programs = programs_of(d * d, batch, x.device)
    launch_pass(split_kernel, batch * programs, (x, high, low), (d * d, d, programs), (scale, diagonal), (LOW, BLOCK))
    return high, low


def split_product(
    a: Parts,
    b: Parts,
    *,
    alpha: float = 1.0,
    c: Tensor | Parts | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    active: Tensor | None = None,
    wide: bool = False,
    wide_diagonal: float = 0.0,
    out: Tensor | None = None,
    parts: bool = False,
    trans: tuple[bool, bool] = (False, False),
    symmetric: bool = True,
) -> tuple[Tensor | None, Parts | None]:
    """See :func:`hf_emopt.linalg.split_products.split_product`; of matrices which :func:`takes`. ``trans``: whether the
    tensors hold the transpose of A, and B itself instead of its transpose."""
    side, block_k = (32, 32) if interpreting() else (_SIDE, _BLOCK_K)
    like = a[0]
    batch, d = like.shape[:2]
    if wide and out is None:
        out = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    new = (torch.empty_like(like), torch.empty_like(like)) if parts else None
    tiles, count = tile_table(d, side, side, _GROUP, like.device, symmetric)

    def factor(x: Tensor, turned: bool) -> Any:
        return descriptor(x, block_k, side) if turned else descriptor(x, side, block_k)

    def square(x: Tensor | None) -> Any:
        return None if x is None else descriptor(x, side, side)

    first, second = (c, None) if isinstance(c, Tensor) or c is None else c
    kinds = (-1 if c is None else 0 if isinstance(c, Tensor) else 1, active is not None, wide, parts, *trans, symmetric)
    arguments = (
        *(factor(x, trans[0]) for x in a),
        *(factor(x, trans[1]) for x in b),
        square(first),
        square(second),
        square(out),
        *(square(x) for x in new or (None, None)),
        *(active, tiles, count, d, alpha, beta, diagonal, wide_diagonal),
        *(*kinds, LOW, side, block_k, interpreting()),
    )
    aligned = active is None or active.data_ptr() % 16
    key = ("split product", kinds, d % 16 == 0, d == 1, aligned, like.device)
    launch(split_product_kernel, key, count * batch, arguments, _PRODUCT_OPTIONS, like.device)
    return out, new
