"""Launches symmetric products on clusters of two multiprocessors: which problems, and with which arguments.

For sm_90, factors whose rows are contiguous, and results of their dtype.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from hf_emopt.kernels.hopper import compile
from hf_emopt.kernels.hopper.driver import Kernel, tensor_map
from hf_emopt.kernels.hopper.schedule import table
from hf_emopt.kernels.triton.descriptors import describable
from hf_emopt.kernels.triton.runtime import architecture, interpreting, multiprocessors

__all__ = ["cluster_product", "takes"]

# As in symmetric_product.cu.
_BLOCK_K = 64
_BOX_ROWS = 128
_PATCH = 64
_THREADS = 384
_SHARED_BYTES = compile.STAGES * (3 * _BOX_ROWS * _BLOCK_K * 2 + 16) + 4 * _PATCH * _PATCH * 2


@functools.cache
def _able(device: torch.device) -> bool:
    return not interpreting() and architecture(device) == 90 and compile.available()


def takes(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor) -> bool:
    """Whether a product can be computed so: on sm_90 with NVRTC, factors ``(B, m, k)`` that descriptors can read, and ``c``
    and ``out`` of their dtype."""
    return (
        a.dtype == out.dtype
        and out.element_size() == 2
        and _able(out.device)
        and all(describable(x) for x in ((a, b, out) if c is None else (a, b, c, out)))
    )


@functools.cache
def _kernel(dtype: torch.dtype, same: bool, added: bool, device: torch.device) -> Kernel:
    machine_code, _ = compile.compiled(dtype, same, added)
    return Kernel(machine_code, "symmetric_product", device, _SHARED_BYTES)


def cluster_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float,
    beta: float,
    diagonal: float,
    correction: Tensor | None,
    power: int,
    group: int,
    same: bool,
) -> None:
    """``out = alpha A B^T + beta C + diagonal I`` on clusters.

    Args:
        a, b, c, out: for which :func:`takes` is true. ``c`` may be ``out``.
        correction, power: as for :func:`~hf_emopt.kernels.triton.symmetric_launch.symmetric_product`; power 0 without one.
        group: tiles are computed in squares of ``group`` by ``group`` pairs.
        same: B is A.

    Raises:
        RuntimeError: the kernel cannot be compiled or launched.
    """
    batch, m, k = a.shape
    clusters = multiprocessors(out.device) // 2
    work = table(m, batch, clusters, group, out.device)
    arguments = (
        tensor_map(a, _BOX_ROWS, _BLOCK_K),
        tensor_map(b, _BOX_ROWS, _BLOCK_K),
        tensor_map(out if c is None else c, _BOX_ROWS, _PATCH),
        tensor_map(out, _PATCH, _PATCH),
        ctypes.c_void_p(work.data_ptr()),
        ctypes.c_int(work.shape[1]),
        ctypes.c_int(k),
        ctypes.c_float(alpha),
        ctypes.c_float(beta),
        ctypes.c_float(diagonal),
        ctypes.c_void_p(0 if correction is None else correction.data_ptr()),
        ctypes.c_int(power),
    )
    _kernel(out.dtype, same, c is not None, out.device).launch(2 * clusters, _THREADS, arguments)
