"""Gram Newton-Schulz of one small matrix by one program: attention heads, LoRA factors, small experts.

The matrix has a short side of at most 64. Its Gram matrix and everything made of it stay on chip; the matrix itself is read
twice to scale it and form ``R``, and once an owned region to apply ``Q``. One launch does a whole batch and allocates
nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from hf_emopt.kernels.triton.elementwise_kernels import _exponent, _times_power_of_two

__all__ = ["small_gram_newton_schulz_kernel"]


@triton.jit
def _product(a, b, UPCAST: tl.constexpr):
    if UPCAST:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        out = tl.dot(a, b)
    return out


@triton.jit
def _symmetric(value):
    """Symmetric bit for bit, in float16."""
    return (0.5 * (value + tl.trans(value))).to(tl.float16)


@triton.jit
def _load_scaled(ptr, i, j, row, col, M, N, exponent):
    inside = (i < M)[:, None] & (j < N)[None, :]
    x = tl.load(ptr + i[:, None].to(tl.int64) * row + j[None, :].to(tl.int64) * col, mask=inside, other=0.0)
    return _times_power_of_two(x.to(tl.float32), 10 - exponent)


@triton.jit
def _polynomial(r, coefficients_ptr, start, end, scale, SIDE: tl.constexpr, UPCAST: tl.constexpr):
    """``Q`` after steps ``start .. end - 1`` for ``R / scale``: ``P = a I + b R + c R R``, ``Q <- Q P``, ``R <- P (R P)``."""
    i = tl.arange(0, SIDE)
    identity = (i[:, None] == i[None, :]).to(tl.float32)
    q = identity.to(tl.float16)
    for step in range(start, end):
        a = tl.load(coefficients_ptr + 3 * step)
        b = tl.load(coefficients_ptr + 3 * step + 1) / scale
        c = tl.load(coefficients_ptr + 3 * step + 2) / (scale * scale)
        p = _symmetric(c * _product(r, r, UPCAST) + b * r.to(tl.float32) + a * identity)
        q = _symmetric(_product(q, p, UPCAST))
        t = _symmetric(_product(r, p, UPCAST))
        r = _symmetric(_product(p, t, UPCAST))
    return q


@triton.jit
def small_gram_newton_schulz_kernel(
    x_ptr,
    out_ptr,
    coefficients_ptr,
    bounds_ptr,
    owned_regions,
    M,
    N,
    x_batch,
    x_row,
    x_col,
    out_batch,
    out_row,
    out_col,
    safety_factor,
    R_SCALE: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    x_ptr += batch * x_batch
    out_ptr += batch * out_batch
    i = tl.arange(0, SIDE)
    peak = tl.zeros((SIDE,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = (i < M)[:, None] & (j < N)[None, :]
        offsets = i[:, None].to(tl.int64) * x_row + j[None, :].to(tl.int64) * x_col
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, tl.max(tl.abs(x), axis=1))
    exponent = _exponent(tl.max(peak, axis=0))

    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    squares = tl.zeros((SIDE,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        x = _load_scaled(x_ptr, i, start + tl.arange(0, BLOCK), x_row, x_col, M, N, exponent)
        squares += tl.sum(x * x, axis=1)
        half = x.to(tl.float16)
        gram += _product(half, tl.trans(half), UPCAST)
    total = tl.sum(squares, axis=0)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / (tl.sqrt(total) * safety_factor))
    # An infinity makes the whole matrix show it, as a NaN does.
    inverse = tl.where(total == float("inf"), float("nan"), inverse)

    r = _symmetric(gram * (inverse * inverse * R_SCALE))
    for owned_region in range(owned_regions):
        # From memory, both: Triton 3.6 keeps an integer that a loop carries at its first value.
        begin = tl.load(bounds_ptr + owned_region)
        end = tl.load(bounds_ptr + owned_region + 1)
        last = owned_region == owned_regions - 1
        q = _polynomial(r, coefficients_ptr, begin, end, R_SCALE, SIDE, UPCAST)
        factor = tl.where(owned_region == 0, inverse, 1.0 / 1024.0) * tl.where(last, 1.0, 1024.0)
        gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        for start in range(0, N, BLOCK):
            j = start + tl.arange(0, BLOCK)
            offsets = i[:, None].to(tl.int64) * out_row + j[None, :].to(tl.int64) * out_col
            inside = (i < M)[:, None] & (j < N)[None, :]
            if owned_region == 0:
                half = _load_scaled(x_ptr, i, j, x_row, x_col, M, N, exponent).to(tl.float16)
            else:
                half = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float16)
            y = (factor * _product(q, half, UPCAST)).to(tl.float16)
            tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)
            gram += _product(y, tl.trans(y), UPCAST)
        # What this program stored is what it loads in the next owned region.
        tl.debug_barrier()
        r = _symmetric(gram * (R_SCALE / 1048576.0))
