"""Precision of float32 matrix products: exact, or through the reduced-precision units of a GPU.

Errors and times of roots and bases are in docs/roots-and-bases.md.

| name | how | unit roundoff |
|---|---|---|
| ``highest`` | float32 units | 2^-24 |
| ``bf16x3`` | each factor split in two bfloat16 parts, three products | about 2^-16 |
| ``tf32`` | factors cut to TF32 (10 bits) | 2^-10 |
| ``fp16`` | matrices divided by a power of two and rounded to float16, float32 sums | 2^-11 |
| ``tf32_emulated`` | ``tf32`` on any device, for tests and error tables | 2^-10 |

float64 products are always exact float64. The split gives the same numbers on a CPU (exact products of the parts, summed
in float32); ``tf32`` is exact float32 on devices without such units, hence ``tf32_emulated``. A split in TF32 parts is
not offered: the units cut their sums as well, so at d = 1024 it is no better than the split in bfloat16, and slower.

``fp16`` has the mantissa of ``tf32`` at twice its rate, and symmetric results at four times of it
(:mod:`hf_emopt.linalg.symmetric_products`). What it has not is the range: elements of less than 2^-25 of their matrix's
largest are lost, which is far below the rounding of the large ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from hf_emopt.linalg.symmetric_batches import power_of_two_scale
from hf_emopt.linalg.symmetric_products import kernels_pay

# Squares of scales in here are float32 numbers, also times a factor such as 1 - beta; and so is what sums start from where a
# factor of a billion meets a gradient of the least scale.
_LEAST_SCALE, _LARGEST_SCALE = 2.0**-44, 2.0**62

Precision: TypeAlias = Literal["highest", "bf16x3", "tf32", "tf32_emulated", "fp16"]

_UNIT_ROUNDOFF: dict[str, float] = {
    "highest": 2.0**-24,
    "bf16x3": 2.0**-16,
    "tf32": 2.0**-10,
    "tf32_emulated": 2.0**-10,
    "fp16": 2.0**-11,
}


def check_precision(precision: str) -> None:
    """Raises:
    ValueError: ``precision`` is no name of :data:`Precision`.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")


def unit_roundoff(dtype: torch.dtype, precision: Precision) -> float:
    """Largest relative rounding error of a factor in a product of ``dtype`` (float32 or float64) matrices."""
    return 2.0**-53 if dtype == torch.float64 else _UNIT_ROUNDOFF[precision]


# Flags

# Once a program has used the new flags to anything that the old ones (torch.set_float32_matmul_precision) cannot express, the
# old getters raise; the new ones never do, and writing them leaves the old setting alone. So they are used alone.
_FLAGS = (("cuda", "matmul"), ("mkldnn", "matmul"))


@contextlib.contextmanager
def matmul_precision(precision: Precision = "highest") -> Iterator[None]:
    """Within: torch's float32 products run as ``precision`` says, and autocast is off. After, also after an exception:
    all flags as before.

    ``tf32`` allows TF32 in CUDA products, the others forbid it on all devices; the splitting is done by :func:`product`.
    The flags belong to the process, so a thread that multiplies float32 matrices meanwhile sees them too. Nothing is
    written where a flag already says what is wanted, as the default of torch does for ``highest``.

    Only ``fp32_precision`` of ``torch.backends.cuda.matmul`` and ``torch.backends.mkldnn.matmul`` is written. Inside, torch
    may therefore refuse ``torch.get_float32_matmul_precision()`` as ambiguous.

    Raises:
        ValueError: unknown ``precision``.
    """
    check_precision(precision)
    c: Any = torch._C
    undo: list[tuple[str, str, str]] = []
    try:
        for backend, op in _FLAGS:
            current = c._get_fp32_precision_getter(backend, op)
            # On the CPU no product is ever lowered on request: the emulated precisions serve there.
            target = "tf32" if precision == "tf32" and backend == "cuda" else "ieee"
            if current != target and not (target == "ieee" and current == "none"):
                undo.append((backend, op, current))
                c._set_fp32_precision_setter(backend, op, target)
        with c._DisableAutocast():
            yield
    finally:
        # The getter resolves "none" to what the flag above says. Put back "none" if that gives the same answer: a flag that
        # followed the one above goes on doing so.
        for backend, op, value in undo:
            c._set_fp32_precision_setter(backend, op, "none")
            if c._get_fp32_precision_getter(backend, op) != value:
                c._set_fp32_precision_setter(backend, op, value)


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Within, and in what it decorates: no gradients, and neither autocast nor inference mode of the caller, under which
    products come out in 16 bits and state cannot be written to later."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        yield


# Products


def _cut_to_tf32(x: Tensor) -> Tensor:
    """The 10 leading bits of the mantissa, the rest dropped: what the units do with float32 input, at worst."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.to(torch.bfloat16)
    # The difference is taken in float32 and rounded as it is written, in one pass.
    return high, torch.sub(x, high, out=torch.empty_like(high))


def _split_both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a1, a2 = _split(a)
    if b is a:
        return a1, a2, a1, a2
    if _is_transpose(a, b):
        return a1, a2, a1.mT, a2.mT
    return a1, a2, *_split(b)


def scaled_half(x: Tensor, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``X / s`` in float16, contiguous, and ``s``: a power of two for each matrix that brings its largest entry to 1 to 2.

    Args:
        x: ``(m, n)``, ``(N, m, n)``, or ``(N, count, m, n)`` for batches of blocks; float32 or 16 bits, any strides.
        peak: ``(N * count,)`` float32, for the largest entries, where they are known.

    Returns:
        The rounded matrices, all blocks as one batch, and ``(N, 1, 1)`` (``(1, 1)`` for one matrix) in float32. ``s`` is from
        2^-44 to 2^62, so that squares of it stay in range; infinities and NaN stay what they are.
    """
    if x.ndim == 2:
        half, scale = scaled_half(x[None], peak)
        return half[0], scale[0]
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16) and kernels_pay(x.device):
        from hf_emopt.kernels.triton import half_precision

        if half_precision.takes(x):
            half, scale = half_precision.scaled_half(x, _LEAST_SCALE, _LARGEST_SCALE, peak)
            return half, scale.view(-1, 1, 1)
    x = x.flatten(0, -3)
    if peak is None:
        peak = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1)) if x.numel() else x.new_zeros(x.shape[0])
    scale = power_of_two_scale(peak.float()).clamp_(_LEAST_SCALE, _LARGEST_SCALE)
    half = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return torch.div(x, scale if x.dtype == torch.float32 else scale.to(x.dtype), out=half), scale


def multiply_16(a: Tensor, b: Tensor, *, wide: bool = True) -> Tensor:
    """Factors of one 16-bit dtype, sums in float32. The result is float32, or the factors' with ``wide=False``, and then on a
    GPU the sums are what ``torch.backends.cuda.matmul`` allows."""
    if a.is_cuda and not wide:
        return a @ b
    if a.is_cuda and a.ndim == 3:
        return torch.bmm(a, b, out_dtype=torch.float32)
    with matmul_precision("tf32"):  # numbers of 16 bits are TF32 numbers
        value = a.float() @ b.float()
    return value if wide else value.to(a.dtype)


def _multiply_half(a: Tensor, b: Tensor) -> Tensor:
    a16, scale_a = scaled_half(a)
    if b is a:
        b16, scale_b = a16, scale_a
    elif _is_transpose(a, b):
        b16, scale_b = a16.mT, scale_a
    else:
        b16, scale_b = scaled_half(b)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return multiply_16(a16, b16).mul_(scale_a * scale_b).view(*batch, a.shape[-2], b.shape[-1])


def _is_transpose(a: Tensor, b: Tensor) -> bool:
    """Whether ``B`` is ``A^T`` by its address and strides, so that the product is a Gram matrix."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.mT.shape and a.stride() == b.mT.stride()


def product(a: Tensor, b: Tensor, precision: Precision = "highest") -> Tensor:
    """``A B`` for matrices or batches ``(..., m, k)``, ``(..., k, n)`` of one dtype, float32 or float64.

    In the split ``A = A1 + A2 + ...`` the product is ``A1 B1 + (A1 B2 + A2 B1)``; the product that is left out is of the size
    of the unit roundoff. Infinities and NaN spread as in a plain product (an infinity may become a NaN).
    """
    if a.dtype == torch.float64 or precision in ("highest", "tf32"):
        with matmul_precision(precision):
            return a @ b
    if precision == "tf32_emulated":
        with matmul_precision("highest"):
            return _cut_to_tf32(a) @ _cut_to_tf32(b)
    if precision == "fp16":
        return _multiply_half(a, b)
    a1, a2, b1, b2 = _split_both(a, b)
    return multiply_16(a1, b2).add_(multiply_16(a2, b1)).add_(multiply_16(a1, b1))


def add_product(c: Tensor, a: Tensor, b: Tensor, precision: Precision = "highest", *, beta: float = 1.0) -> Tensor:
    """``beta C + A B`` for batches ``(N, m, n)``, ``(N, m, k)``, ``(N, k, n)``, in a tensor of its own.

    Only the factors are cut to ``precision``. ``C`` is added in full, so a small correction loses a small part of itself.
    """
    if a.dtype == torch.float64 or precision in ("highest", "tf32"):
        with matmul_precision(precision):
            return torch.baddbmm(c, a, b, beta=beta)
    return product(a, b, precision).add_(c, alpha=beta)
