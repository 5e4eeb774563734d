"""Launches the kernel for small matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_emopt.kernels.triton.runtime import interpreting

__all__ = ["LARGEST_SIDE", "small_gram_newton_schulz"]

# 128 would fit on chip, but its registers do not: it spills, and was seen to fail on an H100 (docs/kernels.md).
LARGEST_SIDE = 64


@functools.lru_cache(maxsize=256)
def _on_device(coefficients: tuple[float, ...], bounds: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(coefficients, dtype=torch.float32).to(device),
        torch.tensor(bounds, dtype=torch.int32).to(device),
    )


def small_gram_newton_schulz(
    x: Tensor, coefficients: Sequence[float], restarts: Sequence[int], safety_factor: float, out: Tensor
) -> Tensor:
    """Orthogonalizes ``(B, m, n)`` with ``min(m, n) <= 64`` into float16 ``out``, one program a matrix.

    Any strides; ``x`` in float32, bfloat16 or float16.
    """
    from hf_emopt.kernels.triton.small_kernels import small_gram_newton_schulz_kernel

    wide, result = (x.mT, out.mT) if x.shape[-2] > x.shape[-1] else (x, out)
    batch, m, n = wide.shape
    side = max(16, 1 << (m - 1).bit_length())
    bounds = (0, *restarts, len(coefficients) // 3)
    numbers, places = _on_device(tuple(coefficients), bounds, x.device)
    small_gram_newton_schulz_kernel[(batch,)](
        wide,
        result,
        numbers,
        places,
        len(bounds) - 1,
        m,
        n,
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
