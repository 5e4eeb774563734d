"""Tensor descriptors: which tensors the copy engine can read and write, and descriptors kept between launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton.runtime import interpreting


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
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=4096)
def _described(
    base: _Address | Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), list(strides), list(block))


@functools.lru_cache(maxsize=4096)
def _address(address: int, dtype: torch.dtype) -> _Address:
    return _Address(address, dtype)


def descriptor(x: Tensor, rows: int, cols: int) -> Any:
    """A descriptor of blocks ``(1, rows, cols)`` of ``(B, m, n)``."""
    batch_stride = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)
    layout = (tuple(x.shape), (batch_stride, x.stride(1), 1), (1, rows, cols))
    if interpreting():
        return _described.__wrapped__(x, *layout)
    return _described(_address(x.data_ptr(), x.dtype), *layout)
