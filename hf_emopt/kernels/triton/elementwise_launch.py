"""Launches the memory-bound kernels."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton.launching import launch, specialization
from hf_emopt.kernels.triton.runtime import multiprocessors

__all__ = ["normalize_cast"]

_BLOCK = 4096


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
    """``out = factor X / ||X||_F`` for each of ``(B, m, n)`` contiguous matrices; see :mod:`elementwise_kernels`."""
    from hf_emopt.kernels.triton.elementwise_kernels import cast_kernel, sum_of_squares_kernel

    batch, size = x.shape[0], x.shape[1] * x.shape[2]
    chunk = _chunk(size, batch, x.device)
    chunks = -(-size // chunk)
    exponents = torch.empty(batch * chunks, dtype=torch.int32, device=x.device)
    sums = torch.empty(batch * chunks, dtype=torch.float32, device=x.device)
    options = {"num_warps": 8}
    key: Hashable
    arguments: tuple[Any, ...] = (x, exponents, sums, size, chunks, x.stride(0), chunk, _BLOCK)
    key = ("sum_of_squares", specialization(arguments[:3], arguments[3:6]), chunk, x.device)
    launch(sum_of_squares_kernel, key, batch * chunks, arguments, options, x.device)
    integers = (size, chunks, x.stride(0), out.stride(0))
    parts = 1 << max(0, (chunks - 1).bit_length())
    key = ("cast", specialization((x, out, exponents, sums), integers), chunk, parts, x.device)
    arguments = (x, out, exponents, sums, *integers, factor, chunk, _BLOCK, parts)
    launch(cast_kernel, key, batch * chunks, arguments, options, x.device)
    return out
