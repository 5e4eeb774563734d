"""Factors of 16-bit products for Shampoo and SOAP: matrices are rounded in as many passes as they have to be read.

A matrix is divided by the power of two of its largest entry: one pass finds that, unless it is known, another rounds. A
step of a coupled iteration needs one pass, which writes both factors of its products. Times are in docs/kernels.md.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton.launching import launch_pass
from hf_emopt.kernels.triton.runtime import multiprocessors

BLOCK = 4096


@triton.jit
def _offsets(x_ptr, matrix, index, count, cols, stride_n, stride_c, stride_r, FLAT: tl.constexpr):
    """Addresses of elements ``index`` of one of ``count`` blocks of a tensor, each ``(rows, cols)`` with rows contiguous."""
    x_ptr += (matrix // count).to(tl.int64) * stride_n + (matrix % count).to(tl.int64) * stride_c
    if FLAT:
        return x_ptr + index
    return x_ptr + (index // cols).to(tl.int64) * stride_r + index % cols


@triton.jit
def largest_kernel(
    x_ptr, peak_ptr,
    size, cols, count, programs, stride_n, stride_c, stride_r,
    FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest absolute value of each matrix, into zeros. No order of the programs gives another."""
    matrix = tl.program_id(0) // programs
    first = (tl.program_id(0) % programs) * BLOCK
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(first, size, programs * BLOCK):
        index = start + lanes
        x = tl.load(
            _offsets(x_ptr, matrix, index, count, cols, stride_n, stride_c, stride_r, FLAT),
            mask=index < size,
            other=0.0,
        )
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    # Numbers that are not negative are ordered as their bits are.
    bits = tl.max(largest, axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(peak_ptr + matrix, bits)


@triton.jit
def scaled_half_kernel(
    x_ptr, peak_ptr, y_ptr, scale_ptr,
    size, cols, count, programs, stride_n, stride_c, stride_r,
    LEAST: tl.constexpr, LARGEST: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``x / s`` in the dtype of ``y``, and ``s``: the power of two at or below the largest entry; 1 where that is zero or not
    finite."""
    matrix = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    bits = tl.load(peak_ptr + matrix)
    known = (bits > 0) & (bits < 0x7F800000)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(known, tl.minimum(tl.maximum(power, LEAST), LARGEST), 1.0)
    if program == 0:
        tl.store(scale_ptr + matrix, scale)
    inverse = 1.0 / scale
    lanes = tl.arange(0, BLOCK)
    y_ptr += matrix.to(tl.int64) * size
    for start in range(program * BLOCK, size, programs * BLOCK):
        index = start + lanes
        inside = index < size
        x = tl.load(
            _offsets(x_ptr, matrix, index, count, cols, stride_n, stride_c, stride_r, FLAT), mask=inside, other=0.0
        )
        tl.store(y_ptr + index, (x.to(tl.float32) * inverse).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def factors_kernel(
    e_ptr, active_ptr, d_ptr, m_ptr,
    size, cols, programs, lift, slope,
    LIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``d = lift I + slope E``, zero where ``LIFTED`` and not active, and ``m = I + E``; summed in float32, rounded once."""
    matrix = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    if LIFTED:
        on = tl.load(active_ptr + matrix).to(tl.float32)
        lift *= on
        slope *= on
    else:
        lift = 0.0
    e_ptr += matrix.to(tl.int64) * size
    d_ptr += matrix.to(tl.int64) * size
    m_ptr += matrix.to(tl.int64) * size
    lanes = tl.arange(0, BLOCK)
    for start in range(program * BLOCK, size, programs * BLOCK):
        index = start + lanes
        inside = index < size
        e = tl.load(e_ptr + index, mask=inside, other=0.0)
        diagonal = index % (cols + 1) == 0
        d = slope * e + tl.where(diagonal, lift, 0.0)
        m = e + tl.where(diagonal, 1.0, 0.0)
        tl.store(d_ptr + index, d.to(d_ptr.dtype.element_ty), mask=inside)
        tl.store(m_ptr + index, m.to(m_ptr.dtype.element_ty), mask=inside)


@triton.jit
def times_kernel(
    x_ptr, scale_ptr, y_ptr,
    size, cols, count, programs, stride_n, stride_c, stride_r,
    FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``y = s x`` of each matrix, written into its block."""
    matrix = tl.program_id(0) // programs
    program = tl.program_id(0) % programs
    scale = tl.load(scale_ptr + matrix)
    x_ptr += matrix.to(tl.int64) * size
    lanes = tl.arange(0, BLOCK)
    for start in range(program * BLOCK, size, programs * BLOCK):
        index = start + lanes
        inside = index < size
        x = tl.load(x_ptr + index, mask=inside, other=0.0)
        tl.store(
            _offsets(y_ptr, matrix, index, count, cols, stride_n, stride_c, stride_r, FLAT), scale * x, mask=inside
        )


def takes(x: Tensor) -> bool:
    """Whether rows of every matrix are contiguous and their elements can be counted in 32 bits."""
    return x.ndim in (3, 4) and x.numel() > 0 and x.stride(-1) == 1 and math.prod(x.shape[-2:]) + BLOCK * 2**16 < 2**31


def programs_of(size: int, batch: int, device: torch.device) -> int:
    """Of one matrix: eight for every multiprocessor in all, as far as there is work."""
    return max(1, min(-(-size // BLOCK), -(-8 * multiprocessors(device) // batch)))


def scaled_half(x: Tensor, least: float, largest: float, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``X / s`` and ``s`` of every matrix, as :func:`hf_emopt.linalg.matmul_precision.scaled_half` says: for ``(N, m, n)`` or
    ``(N, count, m, n)``, which :func:`takes`, ``(N * count, m, n)`` float16 and ``(N * count,)`` float32."""
    x = x if x.ndim == 4 else x[:, None]
    outer, count, rows, cols = x.shape
    batch, size = outer * count, rows * cols
    flat = rows == 1 or x.stride(2) == cols
    bits = torch.zeros(batch, dtype=torch.int32, device=x.device) if peak is None else peak.view(torch.int32)
    scale = torch.empty(batch, dtype=torch.float32, device=x.device)
    half = torch.empty(batch, rows, cols, dtype=torch.float16, device=x.device)
    programs = programs_of(size, batch, x.device)
    integers = (size, cols, count, programs, *x.stride()[:3])
    grid = batch * programs
    if peak is None:
        launch_pass(largest_kernel, grid, (x, bits), integers, (), (flat, BLOCK))
    launch_pass(scaled_half_kernel, grid, (x, bits, half, scale), integers, (), (least, largest, flat, BLOCK))
    return half, scale


def factors(e: Tensor, lift: float, slope: float, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """``lift I + slope E``, zero where not ``active``, and ``I + E`` in float16 of ``(N, d, d)`` contiguous float32.
    ``active`` is ``(N,)`` bool, or ``None`` where all are, and then ``lift`` is zero."""
    batch, d = e.shape[:2]
    first, second = (torch.empty(e.shape, dtype=torch.float16, device=e.device) for _ in range(2))
    programs = programs_of(d * d, batch, e.device)
    tensors, constants = (e, e if active is None else active, first, second), (active is not None, BLOCK)
    launch_pass(factors_kernel, batch * programs, tensors, (d * d, d, programs), (lift, slope), constants)
    return first, second


def times(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``out = s X`` of every matrix: ``(N * count, m, n)`` contiguous and ``(N * count,)`` into ``(N, count, m, n)``, which
    :func:`takes`, all float32. ``out`` may be ``x``."""
    count, rows, cols = out.shape[1:]
    batch, size = x.shape[0], rows * cols
    flat = rows == 1 or out.stride(2) == cols
    programs = programs_of(size, batch, x.device)
    integers = (size, cols, count, programs, *out.stride()[:3])
    launch_pass(times_kernel, batch * programs, (x, scale, out), integers, (), (flat, BLOCK))
    return out
