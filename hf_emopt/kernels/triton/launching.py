"""Tensor descriptors, which are kept between launches, and launches of compiled kernels with little work on the host."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_emopt.kernels.triton.runtime import interpreting, on

# Compiled kernels by everything that Triton would specialize on. Its own look-up costs as much as the rest of a launch.
_COMPILED: dict[Hashable, Any] = {}
# Of passes over memory.
OPTIONS = {"num_warps": 8}


class Prepared(NamedTuple):
    """A table of flat spans for a launch: chunks, addresses by list, and whether all are aligned to 16 bytes."""

    run_of: Tensor
    start_of: Tensor
    numel_of: Tensor
    programs: int
    addresses: tuple[Tensor, ...]
    aligned: bool
    block: int


def describable(x: Tensor) -> bool:
    """Whether the copy engine can read a tensor: unit stride inside, other strides and the address multiples of 16 bytes."""
    size = x.element_size()
    outer = (x.stride(-2), *((x.stride(0),) if x.shape[0] > 1 else ()))
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * size % 16 == 0 for stride in outer)
        and all(size < 2**31 for size in x.shape)
    )


class _Address:
    """The address and dtype of a tensor, for a descriptor that does not keep its memory alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def _described(base: _Address | Tensor, *layout: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, *map(list, layout))


@functools.lru_cache(maxsize=4096)
def _kept(address: int, dtype: torch.dtype, *layout: tuple[int, ...]) -> Any:
    return _described(_Address(address, dtype), *layout)


def descriptor(x: Tensor, rows: int, cols: int) -> Any:
    """A descriptor of blocks ``(1, rows, cols)`` of ``(B, m, n)``."""
    batch_stride = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)
    layout = (tuple(x.shape), (batch_stride, x.stride(1), 1), (1, rows, cols))
    return _described(x, *layout) if interpreting() else _kept(x.data_ptr(), x.dtype, *layout)


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
    """``kernel[(grid,)](*arguments)``, constants too, compiled where ``key`` is new. The key must differ wherever Triton
    would compile another binary, devices included. ``device`` need not be the current one."""
    compiled = _COMPILED.get(key)
    with on(device):
        if compiled is not None:
            compiled[(grid, 1, 1)](*arguments)
            return
        compiled = kernel[(grid,)](*arguments, **options)
    if not interpreting():
        _COMPILED[key] = compiled


def launch_pass(
    kernel: Any,
    grid: int,
    tensors: tuple[Tensor, ...],
    integers: tuple[int, ...],
    numbers: tuple[float, ...],
    constants: tuple[Any, ...],
) -> None:
    """Launches a pass over memory, whose arguments are in this order and, but for the numbers, decide about its binary."""
    key = (kernel.__name__, specialization(tensors, integers), constants, tensors[0].device)
    arguments = (*tensors, *integers, *numbers, *constants)
    launch(kernel, key, grid, arguments, OPTIONS, tensors[0].device)
