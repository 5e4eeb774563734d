"""Launches the normalization that reads its input once."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton.launching import launch, specialization
from hf_emopt.kernels.triton.runtime import multiprocessors

__all__ = ["estimated_cast"]

# Numbers whose squares are summed together: the same whatever the batch.
_BLOCK = 8192
_SAMPLES = 1024


def estimated_cast(x: Tensor, factor: float, out: Tensor, correction: Tensor) -> None:
    """``out = factor X / ||X||_F / correction`` for each of ``(B, m, n)`` contiguous matrices, and ``(B,)`` float32
    corrections between 1/4 and 4; see :mod:`estimated_kernels`."""
    from hf_emopt.kernels.triton.estimated_kernels import correct_kernel, estimated_cast_kernel

    batch, size, device = x.shape[0], x.shape[1] * x.shape[2], x.device
    parts, per_program, programs, correcting = _programs(batch, size, device)
    exponents = torch.empty(batch * (parts + 1), dtype=torch.int32, device=device)
    sums = torch.empty(batch * (parts + 1), dtype=torch.float32, device=device)
    partial = (exponents, sums, exponents[batch * parts :], sums[batch * parts :])
    options = {"num_warps": 8}
    key: Hashable
    integers = (size, parts, programs, x.stride(0), out.stride(0))
    special = specialization((x, out, *partial), integers)
    arguments: tuple[Any, ...] = (x, out, *partial, *integers, factor, _BLOCK, per_program, _SAMPLES)
    launch(
        estimated_cast_kernel, ("estimated", special, per_program, device), batch * programs, arguments, options, device
    )
    integers = (size, parts, correcting, x.stride(0), out.stride(0))
    together = 1024 if parts <= 1024 else 4096
    key = ("correct", specialization((x, out, correction, *partial), integers), together, device)
    arguments = (x, out, correction, *partial, *integers, factor, _BLOCK, together)
    launch(correct_kernel, key, batch * correcting, arguments, options, device)


@functools.lru_cache(maxsize=1024)
def _programs(batch: int, size: int, device: torch.device) -> tuple[int, int, int, int]:
    """Blocks of a matrix, blocks of a program, programs of a matrix, and programs that correct one."""
    parts = -(-size // _BLOCK)
    # Several programs for every multiprocessor, and of large matrices several blocks a program.
    per_program = 1
    while per_program < 8 and batch * parts >= 16 * per_program * multiprocessors(device):
        per_program *= 2
    # Mostly those that correct read the sums and are done.
    return parts, per_program, -(-parts // per_program), max(1, min(parts, 2 * multiprocessors(device) // batch))
