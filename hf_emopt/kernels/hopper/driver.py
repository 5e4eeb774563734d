"""What launching a compiled kernel takes of NVIDIA's driver, by ctypes.

Tensor maps and kernel arguments of 128 bytes are not to be had through torch, and Triton's launcher takes them of its own
kernels alone.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton.runtime import current_stream, on

__all__ = ["Kernel", "TensorMap", "tensor_map"]

# Of cuda.h
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_INTERLEAVE_NONE, _FILL_ZEROS = 0, 0
_SWIZZLE_128B = 3
_PROMOTION_256B = 3
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    """Raises a RuntimeError with the driver's words."""
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what} failed: {text.value.decode() if text.value else code}")


class TensorMap:
    """What the copy engine knows of a tensor: 128 bytes at an address that is a multiple of 64, passed by value."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(128 + 63)
        self.address = (ctypes.addressof(self._memory) + 63) // 64 * 64


@functools.lru_cache(maxsize=8192)
def _encoded(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int, cols: int
) -> TensorMap:
    batch, m, n = shape
    bytes_of = dtype.itemsize
    result = TensorMap()
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(result.address),
        _DATA_TYPES[dtype],
        3,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(n, m, batch),
        (ctypes.c_uint64 * 2)(strides[1] * bytes_of, strides[0] * bytes_of),
        (ctypes.c_uint32 * 3)(cols, rows, 1),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128B,
        _PROMOTION_256B,
        _FILL_ZEROS,
    )
    _check(code, "cuTensorMapEncodeTiled")
    return result


def tensor_map(x: Tensor, rows: int, cols: int) -> TensorMap:
    """Of regions of ``rows`` by ``cols``, of ``(B, m, n)`` of 16-bit elements that descriptors can describe, swizzled in rows
    of 128 bytes. Kept by address, shape and strides."""
    batch_stride = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)
    return _encoded(x.data_ptr(), x.dtype, tuple(x.shape), (batch_stride, x.stride(1)), rows, cols)


class Kernel:
    """A function of compiled machine code, on one device.

    Args:
        machine_code: a cubin for the device's architecture.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        RuntimeError: the driver cannot load it.
    """

    def __init__(self, machine_code: bytes, name: str, device: torch.device, shared_bytes: int) -> None:
        self._device = device
        self._shared_bytes = shared_bytes
        self._function = ctypes.c_void_p()
        module = ctypes.c_void_p()
        with on(device):
            _check(_driver().cuModuleLoadData(ctypes.byref(module), machine_code), "cuModuleLoadData")
            _check(
                _driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()),
                "cuModuleGetFunction",
            )
            _check(
                _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
                "cuFuncSetAttribute",
            )

    def launch(self, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """On the device's current stream.

        Args:
            arguments: every parameter of the kernel in order, ctypes values and :class:`TensorMap`.
        """
        pointers = (ctypes.c_void_p * len(arguments))(
            *(x.address if isinstance(x, TensorMap) else ctypes.addressof(x) for x in arguments)
        )
        with on(self._device):
            stream = ctypes.c_void_p(current_stream(self._device))
            code = _driver().cuLaunchKernel(
                self._function, blocks, 1, 1, threads, 1, 1, self._shared_bytes, stream, pointers, None
            )
        _check(code, "cuLaunchKernel")
