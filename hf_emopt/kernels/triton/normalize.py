"""Normalization with a cast, in two passes over memory (docs/kernels.md).

The norm is taken in float32 with the power of two of the largest element split off, block by block, so that squares
neither overflow nor vanish, and partial sums are added in a fixed order: the result does not depend on timing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton.launching import launch_pass
from hf_emopt.kernels.triton.runtime import multiprocessors

_BLOCK = 4096


@triton.jit
def _power_of_two(k):
    """``2 ** k`` for integers ``-126 <= k <= 127``, exactly; 0 below."""
    bits = (tl.maximum(k, -127) + 127).to(tl.int32) << 23
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def times_power_of_two(x, k):
    """``x * 2 ** k`` for ``|k| <= 250``, in two factors that are both representable."""
    half = k // 2
    return x * _power_of_two(half) * _power_of_two(k - half)


@triton.jit
def exponent_of(x):
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
        largest = exponent_of(tl.max(tl.abs(x), axis=0))
        scaled = times_power_of_two(x, -largest)
        part = tl.sum(scaled * scaled, axis=0)
        new = tl.maximum(exponent, largest)
        total = times_power_of_two(total, tl.maximum(2 * (exponent - new), -250)) + times_power_of_two(
            part, tl.maximum(2 * (largest - new), -250)
        )
        exponent = new
    tl.store(exponent_ptr + program, exponent)
    tl.store(sum_ptr + program, total)


@triton.jit
def cast_kernel(
    x_ptr, y_ptr, exponent_ptr, sum_ptr,
    size, chunks, x_batch, y_batch, factor,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``y = factor x / norm``, and zeros for a zero matrix."""
    # Backwards: what the sums read last is still in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    matrix = program // chunks
    batch = matrix.to(tl.int64)
    parts = tl.arange(0, PARTS)
    exponents = tl.load(exponent_ptr + matrix * chunks + parts, mask=parts < chunks, other=-126)
    sums = tl.load(sum_ptr + matrix * chunks + parts, mask=parts < chunks, other=0.0)
    largest = tl.max(exponents, axis=0)
    total = tl.sum(times_power_of_two(sums, tl.maximum(2 * (exponents - largest), -250)), axis=0)
    scale = tl.where(total == 0.0, 0.0, factor / tl.sqrt(total))
    # An infinity makes the whole matrix show it, as a NaN does.
    scale = tl.where(total == float("inf"), float("nan"), scale)
    start = (program % chunks).to(tl.int64) * CHUNK
    for offset in range(0, CHUNK, BLOCK):
        index = start + offset + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + batch * x_batch + index, mask=index < size, other=0.0).to(tl.float32)
        y = times_power_of_two(x, -largest) * scale
        tl.store(y_ptr + batch * y_batch + index, y.to(y_ptr.dtype.element_ty), mask=index < size)


def _chunk(size: int, batch: int, device: torch.device) -> int:
    """Elements a program: a power of two, at most 65,536, with several programs for every multiprocessor."""
    wanted = size * batch // (8 * multiprocessors(device))
    chunk = _BLOCK
    while chunk < 65536 and 2 * chunk <= wanted:
        chunk *= 2
    # The parts of one norm are summed by each program that needs it.
    while -(-size // chunk) > 4096:
        chunk *= 2
    return chunk


def normalize_cast(x: Tensor, factor: float, out: Tensor) -> Tensor:
    """``out = factor X / ||X||_F`` for each of ``(B, m, n)`` contiguous matrices."""
    batch, size = x.shape[0], x.shape[1] * x.shape[2]
    chunk = _chunk(size, batch, x.device)
    chunks = -(-size // chunk)
    exponents = torch.empty(batch * chunks, dtype=torch.int32, device=x.device)
    sums = torch.empty(batch * chunks, dtype=torch.float32, device=x.device)
    grid, integers = batch * chunks, (size, chunks, x.stride(0))
    launch_pass(sum_of_squares_kernel, grid, (x, exponents, sums), integers, (), (chunk, _BLOCK))
    constants = (chunk, _BLOCK, 1 << max(0, (chunks - 1).bit_length()))
    launch_pass(cast_kernel, grid, (x, out, exponents, sums), (*integers, out.stride(0)), (factor,), constants)
    return out
