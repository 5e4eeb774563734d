"""Launches of the passes over runs; see :mod:`hf_emopt.kernels.multi_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton import multi_tensor_kernels as run_kernels
from hf_emopt.kernels.triton.launching import launch, specialization

if TYPE_CHECKING:
    from hf_emopt.kernels.multi_tensor_table import Prepared

__all__ = ["launch_apply", "launch_copy", "launch_finite", "launch_momentum"]

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Sums are rounded as torch rounds them.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def _launch(kernel: Any, prepared: Prepared, arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    key = (kernel.__name__, *constants, prepared.aligned, prepared.run_of.device, specialization(tensors, ()))
    tables = (prepared.run_of, prepared.start_of, prepared.numel_of, *prepared.addresses)
    every = (*tables, *arguments, *constants, prepared.aligned, prepared.block)
    launch(kernel, key, prepared.count, every, _OPTIONS, prepared.run_of.device)


def _flag(ok: Tensor | None, otherwise: Tensor) -> Tensor:
    return otherwise if ok is None else ok.view(torch.uint8)


def launch_momentum(
    prepared: Prepared,
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    outs: Sequence[Tensor],
    momentum: float,
    nesterov: bool,
    ok: Tensor | None,
) -> None:
    """See :meth:`~hf_emopt.kernels.multi_tensor.Runs.momentum`."""
    types = tuple(_TYPES[tensors[0].dtype] for tensors in (grads, buffers, outs))
    arguments = (_flag(ok, prepared.run_of.view(torch.uint8)), momentum, 1.0 - momentum)
    _launch(run_kernels.momentum_kernel, prepared, arguments, (*types, nesterov, ok is not None))


def launch_copy(
    prepared: Prepared,
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    scales: Tensor | None,
    ok: Tensor | None = None,
) -> None:
    """See :meth:`~hf_emopt.kernels.multi_tensor.Runs.to_right`."""
    types = (_TYPES[source[0].dtype], _TYPES[target[0].dtype])
    arguments = (prepared.numel_of if scales is None else scales, _flag(ok, prepared.run_of.view(torch.uint8)))
    _launch(run_kernels.copy_kernel, prepared, arguments, (*types, scales is not None, ok is not None))


def launch_apply(
    prepared: Prepared,
    weights: Sequence[Tensor],
    updates: Sequence[Tensor],
    scales: Tensor | None,
    lr: float,
    shrink: float,
    decay: int,
    ok: Tensor | None,
) -> None:
    """See :meth:`~hf_emopt.kernels.multi_tensor.Runs.apply`."""
    types = (_TYPES[weights[0].dtype], _TYPES[updates[0].dtype])
    factors = prepared.numel_of if scales is None else scales
    arguments = (factors, _flag(ok, prepared.run_of.view(torch.uint8)), lr, shrink if decay == 3 else 1.0 - shrink)
    constants = (*types, scales is not None, decay, ok is not None)
    _launch(run_kernels.apply_kernel, prepared, arguments, constants)


def launch_finite(prepared: Prepared, tensors: Sequence[Tensor], flag: Tensor) -> None:
    """See :func:`~hf_emopt.kernels.multi_tensor.all_finite`."""
    _launch(run_kernels.finite_kernel, prepared, (flag,), (_TYPES[tensors[0].dtype],))
