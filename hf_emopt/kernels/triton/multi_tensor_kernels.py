"""Elementwise passes over many tensors in one launch: the kernels behind :mod:`hf_emopt.kernels.multi_tensor`.

Addresses of flat spans are in device memory, so one binary serves any number of tensors. A program works on one chunk of a
span. Products and sums come in the order of torch's own foreach functions and are rounded one by one (launched without
contraction into fused multiply-adds), so that a result is the same wherever in memory its tensors are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_emopt.kernels.triton.launching import Prepared, launch, specialization

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Sums are rounded as torch rounds them.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _pointer(addresses, span, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + span).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _chunk(run_of, start_of, numel_of, ALIGNED: tl.constexpr):
    """Flat span of this program, its first element, and how many are left from there."""
    program = tl.program_id(0)
    span = tl.load(run_of + program)
    start = tl.load(start_of + program)
    left = tl.load(numel_of + span) - start
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        left = tl.multiple_of(left, 16)
    return span, start, left


@triton.jit
def momentum_kernel(
    run_of, start_of, numel_of, grads, buffers, outs, ok_ptr, momentum, rest,
    GRAD: tl.constexpr, BUFFER: tl.constexpr, OUT: tl.constexpr, NESTEROV: tl.constexpr, HAS_OK: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``m += (1 - mu) (g - m)``, and ``g + mu (m - g)`` or ``m`` to the output; ``g = m`` where ``ok`` is false."""
    span, start, left = _chunk(run_of, start_of, numel_of, ALIGNED)
    index = tl.arange(0, BLOCK)
    inside = index < left
    buffer_ptr = _pointer(buffers, span, start, BUFFER, ALIGNED) + index
    buffer = tl.load(buffer_ptr, mask=inside, other=0.0)
    grad = tl.load(_pointer(grads, span, start, GRAD, ALIGNED) + index, mask=inside, other=0.0).to(BUFFER)
    if HAS_OK:
        grad = tl.where(tl.load(ok_ptr) != 0, grad, buffer)
    # As torch.lerp, which counts from the nearer end; ``rest`` is 1 - momentum.
    if rest < 0.5:
        new = buffer + rest * (grad - buffer)
    else:
        new = grad - (grad - buffer) * (1.0 - rest)
    tl.store(buffer_ptr, new, mask=inside)
    update = new
    if NESTEROV:
        if momentum < 0.5:
            update = grad + momentum * (new - grad)
        else:
            update = new - (new - grad) * (1.0 - momentum)
    tl.store(_pointer(outs, span, start, OUT, ALIGNED) + index, update.to(OUT), mask=inside)


@triton.jit
def copy_kernel(
    run_of, start_of, numel_of, sources, targets, scales, ok_ptr,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, SCALED: tl.constexpr, HAS_OK: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``target = source``, or ``scale source`` with the product in float32; zeros where ``ok`` is false."""
    span, start, left = _chunk(run_of, start_of, numel_of, ALIGNED)
    index = tl.arange(0, BLOCK)
    inside = index < left
    read = inside
    if HAS_OK:
        read = index < tl.where(tl.load(ok_ptr) != 0, left, 0)
    x = tl.load(_pointer(sources, span, start, SOURCE, ALIGNED) + index, mask=read, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * tl.load(scales + span)
    tl.store(_pointer(targets, span, start, TARGET, ALIGNED) + index, x.to(TARGET), mask=inside)


@triton.jit
def apply_kernel(
    run_of, start_of, numel_of, weights, updates, scales, ok_ptr, lr, decay,
    WEIGHT: tl.constexpr, UPDATE: tl.constexpr, SCALED: tl.constexpr, DECAY: tl.constexpr, HAS_OK: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``p <- decay p - lr u``, the decay before the update (1), after it (2) or not at all (0).

    Cautious (3): ``p <- p - decay p - lr u`` where the update pulls the weight towards zero.
    """
    span, start, left = _chunk(run_of, start_of, numel_of, ALIGNED)
    if HAS_OK:
        left = tl.where(tl.load(ok_ptr) != 0, left, 0)
    index = tl.arange(0, BLOCK)
    inside = index < left
    pointer = _pointer(weights, span, start, WEIGHT, ALIGNED) + index
    weight = tl.load(pointer, mask=inside, other=0.0)
    update = tl.load(_pointer(updates, span, start, UPDATE, ALIGNED) + index, mask=inside, other=0.0).to(WEIGHT)
    if SCALED:
        update = update * tl.load(scales + span)
    if DECAY == 1:
        weight = weight * decay
    if DECAY == 3:
        weight = weight - tl.where(weight * update > 0, weight, 0.0) * decay
    weight = weight + update * (-lr)
    if DECAY == 2:
        weight = weight * decay
    tl.store(pointer, weight, mask=inside)


@triton.jit
def finite_kernel(
    run_of, start_of, numel_of, values, flag_ptr, VALUE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Sets the flag to 0 where a number is infinite or NaN."""
    span, start, left = _chunk(run_of, start_of, numel_of, ALIGNED)
    index = tl.arange(0, BLOCK)
    x = tl.load(_pointer(values, span, start, VALUE, ALIGNED) + index, mask=index < left, other=0.0).to(tl.float32)
    # x - x is 0 for every finite number, and NaN for the others.
    bad = tl.max((x - x != 0.0).to(tl.int32), axis=0)
    if bad != 0:
        tl.store(flag_ptr, 0)


def launch_spans(
    kernel: Any,
    prepared: Prepared,
    lists: Sequence[Sequence[Tensor]],
    arguments: tuple[Tensor | float, ...],
    constants: tuple[Any, ...],
) -> None:
    """Launches a kernel over flat spans of these lists, whose dtypes are its first constants."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    constants = (*(_TYPES[tensors[0].dtype] for tensors in lists), *constants)
    key = (kernel.__name__, *constants, prepared.aligned, prepared.run_of.device, specialization(tensors, ()))
    tables = (prepared.run_of, prepared.start_of, prepared.numel_of, *prepared.addresses)
    every = (*tables, *arguments, *constants, prepared.aligned, prepared.block)
    launch(kernel, key, prepared.programs, every, _OPTIONS, prepared.run_of.device)
