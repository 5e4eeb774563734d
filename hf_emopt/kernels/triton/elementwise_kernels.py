"""Normalization with a cast: memory-bound passes over float data.

The norm is taken in float32 with the power of two of the largest element split off, block by block, so that squares
neither overflow nor vanish, and partial sums are added in a fixed order: the result does not depend on timing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["cast_kernel", "sum_of_squares_kernel"]


@triton.jit
def _power_of_two(k):
    """``2 ** k`` for integers ``-126 <= k <= 127``, exactly; 0 below."""
    bits = (tl.maximum(k, -127) + 127).to(tl.int32) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _times_power_of_two(x, k):
    """``x * 2 ** k`` for ``|k| <= 250``, in two factors that are both representable."""
    half = k // 2
    return x * _power_of_two(half) * _power_of_two(k - half)


@triton.jit
def _exponent(x):
    """Exponent of the leading bit of a float32 that is not negative; -126 for zero and subnormal numbers."""
    return tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, -126)


@triton.jit
def sum_of_squares_kernel(
    x_ptr, exponent_ptr, sum_ptr, size, chunks, batch_stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """For each chunk of a matrix: ``e`` and ``s`` with ``sum(x ** 2) = s * 4 ** e``."""
    program = tl.program_id(0)
    batch = (program // chunks).to(tl.int64)
    start = (program % chunks).to(tl.int64) * CHUNK
    exponent = tl.full((), -126, dtype=tl.int32)
    total = tl.full((), 0.0, dtype=tl.float32)
    for offset in range(0, CHUNK, BLOCK):
        index = start + offset + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + batch * batch_stride + index, mask=index < size, other=0.0).to(tl.float32)
        largest = _exponent(tl.max(tl.abs(x), axis=0))
        scaled = _times_power_of_two(x, -largest)
        part = tl.sum(scaled * scaled, axis=0)
        new = tl.maximum(exponent, largest)
        total = _times_power_of_two(total, tl.maximum(2 * (exponent - new), -250)) + _times_power_of_two(
            part, tl.maximum(2 * (largest - new), -250)
        )
        exponent = new
    tl.store(exponent_ptr + program, exponent)
    tl.store(sum_ptr + program, total)


@triton.jit
def cast_kernel(
    x_ptr,
    y_ptr,
    exponent_ptr,
    sum_ptr,
    size,
    chunks,
    x_batch,
    y_batch,
    factor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``y = factor x / norm``, and zeros for a zero matrix."""
    # Backwards: what the sums read last is still in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    matrix = program // chunks
    batch = matrix.to(tl.int64)
    parts = tl.arange(0, PARTS)
    exponents = tl.load(exponent_ptr + matrix * chunks + parts, mask=parts < chunks, other=-126)
    sums = tl.load(sum_ptr + matrix * chunks + parts, mask=parts < chunks, other=0.0)
    largest = tl.max(exponents, axis=0)
    total = tl.sum(_times_power_of_two(sums, tl.maximum(2 * (exponents - largest), -250)), axis=0)
    scale = tl.where(total == 0.0, 0.0, factor / tl.sqrt(total))
    # An infinity makes the whole matrix show it, as a NaN does.
    scale = tl.where(total == float("inf"), float("nan"), scale)
    start = (program % chunks).to(tl.int64) * CHUNK
    for offset in range(0, CHUNK, BLOCK):
        index = start + offset + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + batch * x_batch + index, mask=index < size, other=0.0).to(tl.float32)
        y = _times_power_of_two(x, -largest) * scale
        tl.store(y_ptr + batch * y_batch + index, y.to(y_ptr.dtype.element_ty), mask=index < size)
