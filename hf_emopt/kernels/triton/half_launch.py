"""Launches the passes that make 16-bit factors; see :mod:`half_kernels`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_emopt.kernels.triton.launching import launch, specialization
from hf_emopt.kernels.triton.runtime import multiprocessors

__all__ = ["BLOCK", "OPTIONS", "factors", "programs_of", "scaled_half", "takes", "times"]

BLOCK = 4096
OPTIONS = {"num_warps": 8}


def takes(x: Tensor) -> bool:
    """Whether rows of every matrix are contiguous and their elements can be counted in 32 bits."""
    return x.ndim in (3, 4) and x.numel() > 0 and x.stride(-1) == 1 and math.prod(x.shape[-2:]) + BLOCK * 2**16 < 2**31


def programs_of(size: int, batch: int, device: torch.device) -> int:
    """Of one matrix: eight for every multiprocessor in all, as far as there is work."""
    return max(1, min(-(-size // BLOCK), -(-8 * multiprocessors(device) // batch)))


def scaled_half(x: Tensor, least: float, largest: float, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``X / s`` and ``s`` of every matrix, as :func:`hf_emopt.linalg.matmul_precision.scaled_half` says.

    Args:
        x: ``(N, m, n)`` or ``(N, count, m, n)``, which :func:`takes`.

    Returns:
        ``(N * count, m, n)`` float16 and ``(N * count,)`` float32.
    """
    from hf_emopt.kernels.triton.half_kernels import largest_kernel, scaled_half_kernel

    x = x if x.ndim == 4 else x[:, None]
    outer, count, rows, cols = x.shape
    batch, size = outer * count, rows * cols
    flat = rows == 1 or x.stride(2) == cols
    bits = torch.zeros(batch, dtype=torch.int32, device=x.device) if peak is None else peak.view(torch.int32)
    scale = torch.empty(batch, dtype=torch.float32, device=x.device)
    half = torch.empty(batch, rows, cols, dtype=torch.float16, device=x.device)
    programs = programs_of(size, batch, x.device)
    integers = (size, cols, count, programs, *x.stride()[:3])
    if peak is None:
        key = ("largest", specialization((x, bits), integers), flat, x.device)
        launch(largest_kernel, key, batch * programs, (x, bits, *integers, flat, BLOCK), OPTIONS, x.device)
    key = ("scaled_half", specialization((x, bits, half, scale), integers), flat, x.device)
    arguments = (x, bits, half, scale, *integers, least, largest, flat, BLOCK)
    launch(scaled_half_kernel, key, batch * programs, arguments, OPTIONS, x.device)
    return half, scale


def factors(e: Tensor, lift: float, slope: float, active: Tensor | None) -> tuple[Tensor, Tensor]:
    """``lift I + slope E``, zero where not ``active``, and ``I + E`` in float16 of ``(N, d, d)`` contiguous float32.

    Args:
        active: ``(N,)`` bool; ``None`` where all are, and then ``lift`` is zero.
    """
    from hf_emopt.kernels.triton.half_kernels import factors_kernel

    batch, d = e.shape[:2]
    first, second = (torch.empty(e.shape, dtype=torch.float16, device=e.device) for _ in range(2))
    programs = programs_of(d * d, batch, e.device)
    integers = (d * d, d, programs)
    lifted = active is not None
    tensors = (e, e if active is None else active, first, second)
    key = ("factors", specialization(tensors, integers), lifted, e.device)
    arguments = (*tensors, *integers, lift, slope, lifted, BLOCK)
    launch(factors_kernel, key, batch * programs, arguments, OPTIONS, e.device)
    return first, second


def times(x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``out = s X`` of every matrix.

    Args:
        x: ``(N * count, m, n)``, contiguous float32.
        scale: ``(N * count,)`` float32.
        out: ``(N, count, m, n)`` float32, which :func:`takes`; may be ``x``.
    """
    from hf_emopt.kernels.triton.half_kernels import times_kernel

    count, rows, cols = out.shape[1:]
    batch, size = x.shape[0], rows * cols
    flat = rows == 1 or out.stride(2) == cols
    programs = programs_of(size, batch, x.device)
    integers = (size, cols, count, programs, *out.stride()[:3])
    key = ("times", specialization((x, scale, out), integers), flat, x.device)
    launch(times_kernel, key, batch * programs, (x, scale, out, *integers, flat, BLOCK), OPTIONS, x.device)
    return out
