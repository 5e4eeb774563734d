"""The Newton-Schulz iteration on a matrix that is cut along its long side, without ever putting it together.

With ``X`` as ``(s, l)``, short side first, and columns ``X_i`` on rank ``i``, the Gram matrix ``A = sum_i X_i X_i^T`` is
one all-reduce of ``s x s``, and everything after it acts on each rank's columns alone: ``X_i <- a X_i + (b A + c A A)
X_i``. Only sums over ranks are asked of the caller, so nothing here knows of processes or devices.

In the Gram form (:mod:`hf_emopt.linalg.gram_newton_schulz`) the matrix is touched at the restarts and at the end only, so
that five steps with one restart need two such all-reduces instead of five.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_emopt.linalg.coefficients import CoefficientSpec, ResolvedCoefficients, resolve_coefficients
from hf_emopt.linalg.gram_newton_schulz import (
    find_restart_steps,
    gram_polynomial,
    multiply,
    scales_of,
    start_factor,
)
from hf_emopt.linalg.newton_schulz import (
    Normalization,
    check_dtype,
    check_input,
    check_method,
    check_normalization,
    default_dtype,
)
from hf_emopt.linalg.symmetric_products import add_product, gram, symmetric_polynomial, symmul_into

__all__ = [
    "Method",
    "Reduce",
    "ShardedCost",
    "newton_schulz_sharded",
    "newton_schulz_sharded_flops",
    "sharded_cost",
    "sharded_seconds",
]

Reduce = Callable[[Tensor], Tensor]
"""Reduces a contiguous tensor elementwise over the ranks that share a matrix, in place or not, and returns the result,
which must have the same bits on all of them."""

Form = Literal["polynomial", "gram_twice", "shared_polynomial"]

Method = Literal["standard", "gram"]
"""The iteration on the matrix, or on its Gram matrix."""

# An element of an s x s exchange has to save this many operations: on an H100, 600 TFLOP/s of products against
# 300 GB/s of all-reduce make two bytes, of which half travel and travel twice, worth about 4,000.
_EXCHANGE_FLOPS = 4096


def _cheapest_form(short: int, long: int, parts: int) -> tuple[Form, int]:
    """How a step is done, and its operations on the rank with the longest slice; depends on whole shapes only.

    With ``l`` columns on the rank, the Gram matrix is ``2 s^2 l`` in each of

    * ``"polynomial"``: ``b A + c A A`` on every rank and one product: ``2 s^3 + 2 s^2 l``;
    * ``"gram_twice"``: ``(b X + c A X)`` and ``A`` times that: ``4 s^2 l``, which falls with ``l`` alone;
    * ``"shared_polynomial"``: each rank computes its part of the rows of ``b A + c A A``, which are exchanged:
      ``2 s^3 / k + 2 s^2 l``, where the saving is worth the exchange: on 1,024 ranks it brings the longest rank's operations
      for a model of 70 B from 1.26 of the mean to less than 1.1.
    """
    columns, rows = -(-long // parts), -(-short // parts)
    base = 2 * short * short * columns
    flops: dict[Form, int] = {
        "polynomial": base + 2 * short**3 + base,
        "gram_twice": base + 2 * base,
        "shared_polynomial": base + 2 * short * short * rows + base,
    }
    price = {"shared_polynomial": _EXCHANGE_FLOPS * short * short}
    form = min(flops, key=lambda name: flops[name] + price.get(name, 0))
    return form, flops[form]


def newton_schulz_sharded_flops(m: int, n: int, parts: int, steps: int = 5) -> int:
    """FLOPs of each of ``parts`` ranks (of the one with the longest slice) to orthogonalize one ``(m, n)`` matrix.

    Counted as :func:`~hf_emopt.linalg.newton_schulz.newton_schulz_flops` counts, and equal to it for one part. Square
    matrices scale as ``1 / parts``; others up to half as much again is spent, or an exchange more.
    """
    return steps * _cheapest_form(min(m, n), max(m, n), parts)[1]


@dataclass(frozen=True)
class ShardedCost:
    """What one rank computes and what it adds up with the others, for one matrix.

    Attributes:
        flops: of the rank with the longest slice.
        reductions: elements of each all-reduce of float32 numbers (float64 for that dtype), apart from the exchange below.
        exchanged: elements of each all-reduce in the dtype of the products.
    """

    flops: int
    reductions: tuple[int, ...]
    exchanged: tuple[int, ...] = ()

    @property
    def messages(self) -> int:
        return len(self.reductions) + len(self.exchanged)

    @property
    def bytes(self) -> int:
        """In the buffers of all-reduces, with products in 16 bits."""
        return 4 * sum(self.reductions) + 2 * sum(self.exchanged)


def sharded_cost(
    m: int, n: int, parts: int, steps: int = 5, coefficients: CoefficientSpec = "jordan", method: Method = "standard"
) -> ShardedCost:
    """What :func:`newton_schulz_sharded` costs for one ``(m, n)`` matrix with ``"scale_free"`` normalization.

    Products are counted as general ones, also where kernels compute half of a symmetric result.
    """
    short, long = min(m, n), max(m, n)
    triangle = short * (short + 1) // 2
    if method == "standard":
        form, flops = _cheapest_form(short, long, parts)
        exchanged = (triangle,) * steps if form == "shared_polynomial" else ()
        return ShardedCost(steps * flops, (1, 1) + (triangle,) * steps, exchanged)
    resolved = resolve_coefficients(coefficients, steps)
    segments = len(find_restart_steps(resolved.steps)) + 1
    square = steps + 3 * (steps - segments)  # P of each step; Q and R where no restart follows
    flops = segments * 4 * short * short * -(-long // parts) + 2 * square * short**3
    return ShardedCost(flops, (2 * parts,) + (triangle,) * segments)


# One H100 with NVLink: products in 16 bits, bytes of an all-reduce as they leave a rank, and the start of a message.
FLOPS_PER_SECOND = 600e12
BYTES_PER_SECOND = 300e9
SECONDS_PER_MESSAGE = 2e-5


def sharded_seconds(cost: ShardedCost, parts: int) -> float:
    """Time of one matrix: its operations, the bytes of its all-reduces (each number leaves and returns), and their start."""
    travel = 2 * (parts - 1) / parts * cost.bytes / BYTES_PER_SECOND
    return cost.flops / FLOPS_PER_SECOND + travel + SECONDS_PER_MESSAGE * cost.messages


@dataclass(frozen=True)
class _Slice:
    """Columns ``start`` to ``stop`` of matrices ``(s, l)``, short side first, and the sums over all slices."""

    short: int
    long: int
    start: int
    stop: int
    form: Form
    sum: Reduce
    max: Reduce

    def frobenius_norm(self, y: Tensor) -> Tensor:
        """Of the whole matrices, ``(..., 1, 1)``, at least in float32."""
        wide = torch.promote_types(y.dtype, torch.float32)
        part: Tensor = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True, dtype=wide)
        return self.sum(part.square()).sqrt()

    def peak(self, y: Tensor) -> Tensor:
        """Largest magnitude in the whole matrices, ``(..., 1, 1)``."""
        if y.shape[-1] == 0:
            return self.max(y.new_zeros(*y.shape[:-2], 1, 1))
        return self.max(torch.linalg.vector_norm(y, ord=math.inf, dim=(-2, -1), keepdim=True))

    def gram(self, y: Tensor) -> Tensor:
        """Gram matrices of the whole: exactly symmetric, and bit-equal on all ranks."""
        # Half of a symmetric matrix travels, so float32 sums cost no more bytes than all of it in 16 bits would.
        part = _pack(gram(y))
        return _unpack(self.sum(part.to(torch.promote_types(y.dtype, torch.float32))).to(y.dtype), self.short)

    def polynomial(self, a: Tensor, b: float, c: float) -> Tensor:
        """``b A + c A A``, of which each rank computes the rows that correspond to its columns of the matrix."""
        first, last = (bound * self.short // self.long for bound in (self.start, self.stop))
        part = torch.zeros_like(a)
        if last > first:
            rows = a[..., first:last, :]
            product = torch.addmm if a.ndim == 2 else torch.baddbmm
            part[..., first:last, :] = product(rows, rows, a, beta=b, alpha=c)
        return _unpack(self.sum(_pack(part)), self.short)  # sums with zeros: exact in every dtype


@torch.no_grad()
def newton_schulz_sharded(
    x: Tensor,
    dim: int,
    all_reduce: Reduce,
    full_shape: tuple[int, int],
    steps: int | None = 5,
    coefficients: CoefficientSpec = "jordan",
    dtype: torch.dtype | None = None,
    *,
    all_reduce_max: Reduce,
    start: int,
    parts: int,
    eps: float | None = None,
    normalization: Normalization = "scale_free",
    method: Method = "standard",
    index: int | None = None,
) -> Tensor:
    """This rank's slice of what :func:`~hf_emopt.linalg.newton_schulz.newton_schulz` makes of the whole matrices.

    A collective: all ranks that share the matrices call it with the same arguments but ``x`` and ``start``.

    Args:
        x: rows ``(..., m_i, n)`` (``dim=-2``) or columns ``(..., m, n_i)`` (``dim=-1``) of matrices ``(..., m, n)``; any
            real floating dtype, never modified. Slices may be of any size, also empty.
        dim: the dimension that is cut: the longer one, or either one of square matrices.
        all_reduce: sums over the ranks, see :data:`Reduce`.
        full_shape: ``(m, n)``.
        steps, coefficients: as in ``newton_schulz``.
        dtype: of the products and the result: bfloat16, float16, float32 or float64. ``None``: bfloat16 on CUDA and XPU
            devices, also where ``newton_schulz`` would choose float16 (normalized matrices as large as are worth cutting
            have elements in float16's subnormal range), float32 on others.
        all_reduce_max: largest value over the ranks; called for ``"scale_free"`` only.
        start: index of the slice's first row or column. The slices together are the matrix, without overlap.
        parts: ranks that share the work evenly enough to be counted; it chooses the order of products, not the result.
        eps, normalization: as in ``newton_schulz``. ``"clamp"`` and ``"add"`` take the norm in float32 and round it to
            ``dtype``: the definition of the programs they are named after, but not their bits.
        method: ``"standard"``, one Gram matrix a step; or ``"gram"``, one at the start and at each restart, in float16
            where ``dtype`` is ``None`` and the device has it.
        index: which of the ``parts`` this slice is; for ``"gram"``, where the norm and the peak are one message.

    Returns:
        The slice of the result, shaped as ``x``, in ``dtype``. As with the whole matrix, zeros give zeros, and a NaN or an
        infinity anywhere makes all of its matrix non-finite, on every rank.

    Per step and rank: the products of :func:`newton_schulz_sharded_flops`; one all-reduce of ``s (s + 1) / 2`` elements
    (the lower triangle of the Gram matrix, in float32, or float64 for that dtype), and where it pays a second one in
    ``dtype``. Once: one number per matrix for the norm and one for the peak; a Gram matrix more for row rescaling. The Gram
    form: the all-reduce at the start and at each restart alone, and once ``2 parts`` numbers per matrix.

    Raises:
        TypeError: ``x`` is not a real floating-point tensor.
        ValueError: arguments that ``newton_schulz`` refuses; a cut along the short side; a slice that does not fit
            ``full_shape``; rows of square matrices with a coefficient set that rescales rows; the Gram form without
            ``index``.
    """
    check_input(x)
    dim = _check_slice(x, dim, full_shape, start, parts)
    resolved = resolve_coefficients(coefficients, steps)
    check_method(method, dtype, normalization, resolved)
    if dtype is None:
        dtype = torch.float16 if method == "gram" and x.device.type == "cuda" else default_dtype(x.device)
    dtype = check_dtype(dtype)
    floor = check_normalization(normalization, eps, resolved)
    if resolved.scaling == "aol" and dim == -2 and full_shape[0] == full_shape[1]:
        raise ValueError(
            f"coefficient set {resolved.name!r} rescales rows of square matrices, which are whole only when these are cut "
            "along columns: use dim=-1"
        )
    batch = math.prod(x.shape[:-2])
    if batch == 0 or 0 in full_shape:  # the same on all ranks, so none waits for another
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    matrices = x.reshape(x.shape[-2:]) if batch == 1 else x.reshape(batch, *x.shape[-2:])
    if method == "gram":
        if index is None or not 0 <= index < parts:
            raise ValueError(
                f"index={index} must say which of the {parts} parts the slice is, from 0, for method='gram'"
            )
        return _gram_form(matrices, dim == -2, resolved, dtype, all_reduce, parts, index).reshape(x.shape)
    y = matrices.mT if dim == -2 else matrices
    short, long = min(full_shape), max(full_shape)
    form = _cheapest_form(short, long, parts)[0]
    part = _Slice(short, long, start, start + x.shape[dim], form, all_reduce, all_reduce_max)
    if normalization == "scale_free":
        y = _normalize_scale_free(y, part, resolved, dtype)
    else:
        y = y.to(dtype)
        norm = part.frobenius_norm(y).to(dtype) * resolved.safety_factor
        y = y / (norm.clamp(min=floor * resolved.safety_factor) if normalization == "clamp" else norm + floor)
    for a, b, c in resolved.steps:
        y = _step(y, part, a, b, c)
    return (y.mT if dim == -2 else y).reshape(x.shape)


def _check_slice(x: Tensor, dim: int, full_shape: tuple[int, int], start: int, parts: int) -> int:
    if dim not in (-2, -1, x.ndim - 2, x.ndim - 1):
        raise ValueError(f"dim={dim} must be one of the last two dimensions of {tuple(x.shape)}")
    dim = dim if dim < 0 else dim - x.ndim
    other = -3 - dim
    if full_shape[dim] < full_shape[other]:
        raise ValueError(
            f"matrices {tuple(full_shape)} are cut along their short side (dim={dim}), where a Gram matrix needs whole "
            f"rows; cut them along dim={other}"
        )
    if x.shape[other] != full_shape[other] or start < 0 or start + x.shape[dim] > full_shape[dim]:
        raise ValueError(
            f"a slice {tuple(x.shape)} from {start} on along dim={dim} is not part of matrices {tuple(full_shape)}"
        )
    if parts < 1:
        raise ValueError(f"parts={parts} must be at least 1")
    return dim


def _normalize_scale_free(x: Tensor, part: _Slice, resolved: ResolvedCoefficients, dtype: torch.dtype) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    peak = part.peak(wide)
    y = wide / peak.masked_fill(peak == 0, 1.0)  # a new tensor, which may be changed from here on
    y.div_(part.frobenius_norm(y).clamp_(min=1.0).mul_(resolved.safety_factor))
    if resolved.scaling == "aol":
        product = part.gram(y if dtype == torch.float16 else y.to(dtype))
        sums = torch.promote_types(product.dtype, y.dtype)
        row_sum: Tensor = torch.linalg.vector_norm(product, ord=1, dim=-1, keepdim=True, dtype=sums)
        y = y * row_sum.rsqrt().masked_fill(row_sum == 0, 0.0)
    return y.to(dtype)


def _gram_form(
    x: Tensor,
    tall: bool,
    resolved: ResolvedCoefficients,
    dtype: torch.dtype,
    all_reduce: Reduce,
    parts: int,
    index: int,
) -> Tensor:
    """The slice of the result by way of Gram matrices; rows are cut where ``tall``, else columns."""
    wide = x if x.dtype == torch.float64 else x.float()
    own_peak, own_square = _own_scale(wide)
    scales = wide.new_zeros(*x.shape[:-2], parts, 2)
    scales[..., index, :] = torch.stack([own_peak, own_square], dim=-1)
    scales = all_reduce(scales)  # each number stands alone in its sum, so that this is a gather
    peaks, squares = scales.unbind(-1)
    peak = peaks.amax(-1, keepdim=True)
    safe = peak.masked_fill(peak == 0, 1.0)
    norm = ((peaks / safe).square() * squares).sum(-1, keepdim=True).sqrt().clamp(min=1.0)
    divisor = (norm / start_factor(dtype, resolved.safety_factor))[..., None]
    y = (wide / safe[..., None]).div_(divisor).to(dtype)
    scale, gram_scale = scales_of(dtype)
    restarts = find_restart_steps(resolved.steps)
    q = y
    for first, last in zip([0, *restarts], [*restarts, len(resolved.steps)]):
        if first > 0:
            y = multiply(q, y, tall)
        rows = y.mT if tall else y
        if rows.shape[-1]:
            product = symmul_into(rows, rows, alpha=gram_scale / scale**2)
        else:  # an empty slice, of which no kernel is asked
            product = rows.new_zeros(*rows.shape[:-1], rows.shape[-2])
        packed = _pack(product).to(torch.promote_types(dtype, torch.float32))
        product = _unpack(all_reduce(packed).to(dtype), product.shape[-1])
        q = gram_polynomial(product, resolved.steps[first:last], gram_scale)
    return multiply(q, y, tall, 1.0 / scale)


def _own_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitude of each matrix, and the sum of squares in units of it."""
    if 0 in x.shape[-2:]:
        zero = x.new_zeros(x.shape[:-2])
        return zero, zero
    peak: Tensor = torch.linalg.vector_norm(x, ord=math.inf, dim=(-2, -1), keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(x / peak.masked_fill(peak == 0, 1.0), dim=(-2, -1))
    return peak[..., 0, 0], norm.square()


def _step(y: Tensor, part: _Slice, a: float, b: float, c: float) -> Tensor:
    product = part.gram(y)
    if part.form == "polynomial" or c == 0:
        return add_product(a, symmetric_polynomial(product, b, c), y)
    if part.form == "shared_polynomial":
        return add_product(a, part.polynomial(product, b, c), y)
    multiply = torch.addmm if y.ndim == 2 else torch.baddbmm
    return multiply(y, product, multiply(y, product, y, beta=b, alpha=c), beta=a)


def _pack(a: Tensor) -> Tensor:
    """Lower triangle of ``(..., s, s)`` as ``(..., s (s + 1) / 2)``, in large pieces and without index tensors.

    The two triangles on the diagonal fit together into one rectangle; the square below the first of them follows.
    """
    s = a.shape[-1]
    h = (s + 1) // 2
    r = s - h
    triangles = a.new_zeros(*a.shape[:-2], h, r + 1)
    triangles[..., :h].copy_(a[..., :h, :h].tril())
    triangles[..., :r, 1:] += a[..., h:, h:].mT.triu()
    return torch.cat([triangles.flatten(-2), a[..., h:, :h].flatten(-2)], dim=-1)


def _unpack(packed: Tensor, s: int) -> Tensor:
    """The symmetric matrices of which :func:`_pack` took the lower triangles."""
    h = (s + 1) // 2
    r = s - h
    batch = packed.shape[:-1]
    triangles = packed[..., : h * (r + 1)].unflatten(-1, (h, r + 1))
    a = packed.new_empty(*batch, s, s)
    first, last = triangles[..., :h].tril(), triangles[..., :r, 1:].triu()
    a[..., :h, :h] = first + first.tril(-1).mT
    a[..., h:, h:] = last + last.triu(1).mT
    if r:
        below = packed[..., h * (r + 1) :].unflatten(-1, (r, h))
        a[..., h:, :h] = below
        a[..., :h, h:] = below.mT
    return a
