"""Normalization that reads its input once.

The norm of a matrix is known when all of it was read, and the 16-bit numbers are wanted then. Read again, the input costs
4 of 10 bytes an element. Here a program scales by an *estimate* of the norm, from some numbers all over the matrix, and sums
squares as it goes. A second launch, which reads these sums alone, finds by how much the estimate was off. That factor
belongs into ``alpha`` of products that follow. Where it is too far from 1 for the range of 16 bits, the second launch casts
again, with the norm.

Every program of a matrix reads the same sample and takes the same estimate, sums are added in a fixed order, and nothing
depends on the batch, on timing, or on earlier calls. Powers of two are split off as in :mod:`elementwise_kernels`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl

from hf_emopt.kernels.triton.elementwise_kernels import _exponent, _times_power_of_two

__all__ = ["correct_kernel", "estimated_cast_kernel"]


@triton.jit
def _estimate(x_ptr, size, factor, SAMPLES: tl.constexpr):
    """``e`` and ``s`` such that ``x * 2 ** -e * s`` has about the norm ``factor``; ``s = 0`` where all that was read is 0."""
    # Groups of eight, 32 bytes of float32, each somewhere in its own stretch: not all in one column.
    lanes = tl.arange(0, SAMPLES)
    group = lanes // 8
    stretch = tl.maximum(size // SAMPLES, 1)
    index = (group * stretch + (group * 40503) % stretch) * 8 + lanes % 8
    inside = index < size
    x = tl.load(x_ptr + index, mask=inside, other=0.0).to(tl.float32)
    exponent = _exponent(tl.max(tl.abs(x), axis=0))
    scaled = _times_power_of_two(x, -exponent)
    mean = tl.sum(scaled * scaled, axis=0) / tl.sum(inside.to(tl.float32), axis=0)
    scale = tl.where(mean > 0.0, factor / tl.sqrt(mean * size.to(tl.float32)), 0.0)
    return exponent, scale


@triton.jit
def estimated_cast_kernel(
    x_ptr,
    y_ptr,
    exponent_ptr,
    sum_ptr,
    estimate_exponent_ptr,
    estimate_ptr,
    size,
    parts,
    programs,
    x_batch,
    y_batch,
    factor,
    BLOCK: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """The cast with the estimate, and of each ``BLOCK`` numbers ``e`` and ``s`` with ``sum(x ** 2) = s * 4 ** e``."""
    matrix = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    x_ptr += matrix.to(tl.int64) * x_batch
    y_ptr += matrix.to(tl.int64) * y_batch
    guess, scale = _estimate(x_ptr, size, factor, SAMPLES)
    if program == 0:
        tl.store(estimate_exponent_ptr + matrix, guess)
        tl.store(estimate_ptr + matrix, scale)
    lanes = tl.arange(0, BLOCK)
    for i in range(PER_PROGRAM):
        block = program * PER_PROGRAM + i
        start = block.to(tl.int64) * BLOCK
        inside = lanes < tl.minimum(size - start, BLOCK).to(tl.int32)
        # Of what is read here and written below, the next product wants the latter in L2.
        x = tl.load(x_ptr + start + lanes, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        y = _times_power_of_two(x, -guess) * scale
        tl.store(y_ptr + start + lanes, y.to(y_ptr.dtype.element_ty), mask=inside)
        largest = _exponent(tl.max(tl.abs(x), axis=0))
        scaled = _times_power_of_two(x, -largest)
        tl.store(exponent_ptr + matrix * parts + block, largest, mask=block < parts)
        tl.store(sum_ptr + matrix * parts + block, tl.sum(scaled * scaled, axis=0), mask=block < parts)


@triton.jit
def correct_kernel(
    x_ptr,
    y_ptr,
    correction_ptr,
    exponent_ptr,
    sum_ptr,
    estimate_exponent_ptr,
    estimate_ptr,
    size,
    parts,
    programs,
    x_batch,
    y_batch,
    factor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``correction = factor / ||y||`` where that is near 1; elsewhere ``y = factor x / ||x||``, and 1."""
    matrix = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    exponent_ptr += matrix * parts
    sum_ptr += matrix * parts
    lanes = tl.arange(0, PARTS)
    largest = tl.full((), -126, dtype=tl.int32)
    for first in range(0, parts, PARTS):
        exponents = tl.load(exponent_ptr + first + lanes, mask=lanes < parts - first, other=-126)
        largest = tl.maximum(largest, tl.max(exponents, axis=0))
    total = tl.full((), 0.0, dtype=tl.float32)
    for first in range(0, parts, PARTS):
        inside = lanes < parts - first
        exponents = tl.load(exponent_ptr + first + lanes, mask=inside, other=-126)
        sums = tl.load(sum_ptr + first + lanes, mask=inside, other=0.0)
        total += tl.sum(_times_power_of_two(sums, tl.maximum(2 * (exponents - largest), -250)), axis=0)
    wanted = tl.where(total == 0.0, 0.0, factor / tl.sqrt(total))
    # An infinity makes the whole matrix show it, as a NaN does.
    wanted = tl.where(total == float("inf"), float("nan"), wanted)
    shift = tl.load(estimate_exponent_ptr + matrix) - largest
    correction = _times_power_of_two(wanted / tl.load(estimate_ptr + matrix), tl.minimum(tl.maximum(shift, -250), 250))
    # Two bits each way: float16 neither overflows nor loses small numbers. A NaN, zeros and infinities fail this too.
    near = (correction >= 0.25) & (correction <= 4.0)
    if program == 0:
        tl.store(correction_ptr + matrix, tl.where(near, correction, 1.0))
    if not near:
        x_ptr += matrix.to(tl.int64) * x_batch
        y_ptr += matrix.to(tl.int64) * y_batch
        offsets = tl.arange(0, BLOCK)
        for first in range(0, parts, programs):
            start = (first + program).to(tl.int64) * BLOCK
            inside = offsets < tl.minimum(size - start, BLOCK).to(tl.int32)
            x = tl.load(x_ptr + start + offsets, mask=inside, other=0.0).to(tl.float32)
            y = _times_power_of_two(x, -largest) * wanted
            tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)
