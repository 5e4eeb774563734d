"""Launches compiled kernels with little work on the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton.runtime import interpreting, on

# Compiled kernels by everything that Triton would specialize on. Its own look-up costs as much as the rest of a launch.
_COMPILED: dict[Hashable, Any] = {}


def specialization(tensors: Sequence[Tensor], integers: Sequence[int]) -> Hashable:
    """The properties of arguments that Triton specializes on: dtypes, alignment, and integers that are 1, multiples of 16, or
    wider than 32 bits."""
    return (
        tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]),
        tuple([(i == 1, i % 16 == 0, i >= 2**31) for i in integers]),
    )


def launch(
    kernel: Any, key: Hashable, grid: int, arguments: tuple[Any, ...], options: dict[str, Any], device: torch.device
) -> None:
    """``kernel[(grid,)](*arguments)``, compiled where ``key`` is new.

    Args:
        key: must differ wherever Triton would compile another binary, devices included.
        arguments: every parameter of the kernel in order, constants too.
        options: ``num_warps`` and its like.
        device: of all tensors; need not be the current one.
    """
    compiled = _COMPILED.get(key)
    with on(device):
        if compiled is not None:
            compiled[(grid, 1, 1)](*arguments)
            return
        compiled = kernel[(grid,)](*arguments, **options)
    if not interpreting():
        _COMPILED[key] = compiled
