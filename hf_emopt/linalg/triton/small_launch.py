"""Launches the kernel for small matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_emopt.linalg.triton.runtime import interpreting

__all__ = ["LARGEST_SIDE", "small_gram_newton_schulz"]

LARGEST_SIDE = 128


@functools.lru_cache(maxsize=256)
def _on_device(
    coefficients: tuple[float, ...], ends: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(coefficients, dtype=torch.float32).to(device),
        torch.tensor(ends, dtype=torch.int32).to(device),
    )


def small_gram_newton_schulz(
    x: Tensor, coefficients: Sequence[float], restarts: Sequence[int], safety_factor: float, out: Tensor
) -> Tensor:
    """Orthogonalizes ``(B, m, n)`` with ``min(m, n) <= 128`` into float16 ``out``, one program a matrix.

    Any strides; ``x`` in float32, bfloat16 or float16.
    """
    from hf_emopt.linalg.triton.small_kernels import small_gram_newton_schulz_kernel

    wide, result = (x.mT, out.mT) if x.shape[-2] > x.shape[-1] else (x, out)
    batch, m, n = wide.shape
    side = max(16, 1 << (m - 1).bit_length())
    ends = (*restarts, len(coefficients) // 3)
    numbers, places = _on_device(tuple(coefficients), ends, x.device)
    block = 16 if interpreting() else 64 if side <= 64 else 32
    small_gram_newton_schulz_kernel[(batch,)](
        wide,
        result,
        numbers,
        places,
        len(ends),
        m,
        n,
        *wide.stride(),
        *result.stride(),
        safety_factor,
        R_SCALE=4096.0,
        SIDE=side,
        BLOCK=max(16, block),
        UPCAST=interpreting(),
        num_warps=8 if side > 64 else 4,
        num_stages=2,
    )
    return out
