"""Gram Newton-Schulz of one small matrix by one program: attention heads, LoRA factors, small experts.

The short side is at most 64, and the Gram matrix and everything made of it stay on chip. The matrix itself is read twice to
scale it and form ``R``, and once between two restarts to apply ``Q``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton.normalize import exponent_of, times_power_of_two
from hf_emopt.kernels.triton.runtime import interpreting
from hf_emopt.kernels.triton.symmetric_product import dot


@triton.jit
def _symmetric(value):
    """Symmetric bit for bit, in float16."""
    return (0.5 * (value + tl.trans(value))).to(tl.float16)


@triton.jit
def _load_scaled(ptr, i, j, row, col, M, N, exponent):
    inside = (i < M)[:, None] & (j < N)[None, :]
    x = tl.load(ptr + i[:, None].to(tl.int64) * row + j[None, :].to(tl.int64) * col, mask=inside, other=0.0)
    return times_power_of_two(x.to(tl.float32), 10 - exponent)


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
        p = _symmetric(c * dot(r, r, None, UPCAST) + b * r.to(tl.float32) + a * identity)
        q = _symmetric(dot(q, p, None, UPCAST))
        t = _symmetric(dot(r, p, None, UPCAST))
        r = _symmetric(dot(p, t, None, UPCAST))
    return q


@triton.jit
def small_gram_newton_schulz_kernel(
    x_ptr, out_ptr, coefficients_ptr, bounds_ptr,
    segments, M, N, x_batch, x_row, x_col, out_batch, out_row, out_col, safety_factor,
    R_SCALE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
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
    exponent = exponent_of(tl.max(peak, axis=0))

    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    squares = tl.zeros((SIDE,), dtype=tl.float32)
    for start in range(0, N, BLOCK):
        x = _load_scaled(x_ptr, i, start + tl.arange(0, BLOCK), x_row, x_col, M, N, exponent)
        squares += tl.sum(x * x, axis=1)
        half = x.to(tl.float16)
        gram += dot(half, tl.trans(half), None, UPCAST)
    total = tl.sum(squares, axis=0)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / (tl.sqrt(total) * safety_factor))
    # An infinity makes the whole matrix show it, as a NaN does.
    inverse = tl.where(total == float("inf"), float("nan"), inverse)

    r = _symmetric(gram * (inverse * inverse * R_SCALE))
    for segment in range(segments):
        # From memory, both: Triton 3.6 keeps an integer that a loop carries at its first value.
        begin = tl.load(bounds_ptr + segment)
        end = tl.load(bounds_ptr + segment + 1)
        last = segment == segments - 1
        q = _polynomial(r, coefficients_ptr, begin, end, R_SCALE, SIDE, UPCAST)
        factor = tl.where(segment == 0, inverse, 1.0 / 1024.0) * tl.where(last, 1.0, 1024.0)
        gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
        for start in range(0, N, BLOCK):
            j = start + tl.arange(0, BLOCK)
            offsets = i[:, None].to(tl.int64) * out_row + j[None, :].to(tl.int64) * out_col
            inside = (i < M)[:, None] & (j < N)[None, :]
            if segment == 0:
                half = _load_scaled(x_ptr, i, j, x_row, x_col, M, N, exponent).to(tl.float16)
            else:
                half = tl.load(out_ptr + offsets, mask=inside, other=0.0).to(tl.float16)
            y = (factor * dot(q, half, None, UPCAST)).to(tl.float16)
            tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)
            gram += dot(y, tl.trans(y), None, UPCAST)
        # After the next restart the program loads what it has stored here.
        tl.debug_barrier()
        r = _symmetric(gram * (R_SCALE / 1048576.0))


@functools.lru_cache(maxsize=256)
def _on_device(coefficients: tuple[float, ...], bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(coefficients, dtype=torch.float32, device=device),
        torch.tensor(bounds, dtype=torch.int32, device=device),
    )


def small_gram_newton_schulz(
    x: Tensor, coefficients: Sequence[float], restarts: Sequence[int], safety_factor: float, out: Tensor
) -> Tensor:
    """Orthogonalizes ``(B, m, n)`` with ``min(m, n) <= 64`` into float16 ``out``, one program a matrix. Any strides; ``x`` is
    float32, bfloat16 or float16."""
    wide, result = (x.mT, out.mT) if x.shape[-2] > x.shape[-1] else (x, out)
    batch, m, n = wide.shape
    side = max(16, 1 << (m - 1).bit_length())
    bounds = (0, *restarts, len(coefficients) // 3)
    numbers, device_bounds = _on_device(tuple(coefficients), bounds, x.device)
    small_gram_newton_schulz_kernel[(batch,)](
        *(wide, result, numbers, device_bounds, len(bounds) - 1, m, n),
        *wide.stride(),
        *result.stride(),
        safety_factor,
        R_SCALE=4096.0,
        SIDE=side,
        BLOCK=16 if interpreting() else 64,
        UPCAST=interpreting(),
        num_warps=4,
        num_stages=2,
    )
    return out
