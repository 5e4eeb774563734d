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
from functools import lru_cache

import torch
from torch import Tensor

from hf_emopt.linalg.coefficients import CoefficientSpec, ResolvedCoefficients, hashable, resolve_coefficients
from hf_emopt.linalg.cost import Form, Method, cheapest_form
from hf_emopt.linalg.gram_newton_schulz import (
    find_restart_steps,
    gram_polynomial,
    multiply,
    scales_of,
    start_factor,
)
from hf_emopt.linalg.matmul_precision import matmul_precision
from hf_emopt.linalg.newton_schulz import (
    Normalization,
    add_product,
    check_dtype,
    check_input,
    check_method,
    check_normalization,
    default_dtype,
    gram,
    normalize_scale_free,
    symmetric_polynomial,
)
from hf_emopt.linalg.symmetric_products import symmul_into

Reduce = Callable[[Tensor], Tensor]
"""Reduces a contiguous tensor elementwise over the ranks that share a matrix, in place or not, and returns the result,
which must have the same bits on all of them."""


@dataclass(frozen=True)
class Shard:
    """Which part of a batch of whole matrices a tensor is, and how to reduce over all parts. Nothing in it names a rank.

    Attributes:
        dim: the dimension that is cut: ``-2`` (rows) or ``-1`` (columns), the longer one or either one of a square.
        full_shape: ``(m, n)`` of the whole matrices.
        start, stop: the rows or columns that this part has. Parts may differ in size and be empty; together they are the
            matrix, without overlap.
        sum, max: reductions over all parts; ``max`` is called for ``"scale_free"`` normalization only.
        parts, index: number of ranks that share the matrices, and which part this is, from 0. The number is counted on to
            choose the order of products, not the result.
        method: ``"standard"``, one Gram matrix a step; or ``"gram"``, one at the start and at each restart, in float16 where
            no dtype is given and the device has it.
    """

    dim: int
    full_shape: tuple[int, int]
    start: int
    stop: int
    sum: Reduce
    max: Reduce
    parts: int
    index: int = 0
    method: Method = "standard"


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
@matmul_precision("highest")
def newton_schulz_sharded(
    x: Tensor,
    shard: Shard,
    steps: int | None = 5,
    coefficients: CoefficientSpec = "jordan",
    dtype: torch.dtype | None = None,
    *,
    eps: float | None = None,
    normalization: Normalization = "scale_free",
) -> Tensor:
    """This rank's slice of what :func:`~hf_emopt.linalg.newton_schulz.newton_schulz` makes of the whole matrices.

    A collective: all ranks that share the matrices call it with the same arguments but for their own slice and shard.

    Args:
        x: rows ``(..., m_i, n)`` (``dim=-2``) or columns ``(..., m, n_i)`` (``dim=-1``) of matrices ``(..., m, n)``; any
            real floating dtype, never modified. Slices may be of any size, also empty.
        shard: which slice it is, and the reductions over all slices.
        steps, coefficients: as in ``newton_schulz``.
        dtype: of the products and the result: bfloat16, float16, float32 or float64. ``None``: bfloat16 on CUDA and XPU
            devices, also where ``newton_schulz`` would choose float16 (normalized matrices as large as are worth cutting
            have elements in float16's subnormal range), float32 on others.
        eps, normalization: as in ``newton_schulz``. ``"clamp"`` and ``"add"`` take the norm in float32 and round it to
            ``dtype``: the definition of the programs they are named after, but not their bits.

    Returns:
        The slice of the result, shaped as ``x``, in ``dtype``. As with the whole matrix, zeros give zeros, and a NaN or an
        infinity anywhere makes all of its matrix non-finite, on every rank.

    Per step and rank: the products that :mod:`hf_emopt.linalg.cost` counts; one all-reduce of ``s (s + 1) / 2`` elements
    (the lower triangle of the Gram matrix, in float32, or float64 for that dtype), and where it pays a second one in
    ``dtype``. Once: one number per matrix for the norm and one for the peak; a Gram matrix more for row rescaling. The Gram
    form: the all-reduce at the start and at each restart alone, and once ``2 parts`` numbers per matrix.

    Raises:
        TypeError: ``x`` is not a real floating-point tensor.
        ValueError: arguments that ``newton_schulz`` refuses; a cut along the short side; a slice that does not fit
            ``full_shape``; rows of square matrices with a coefficient set that rescales rows; an index that is
            none of the parts.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2:
        check_input(x)
    full_shape, parts, index, method = shard.full_shape, shard.parts, shard.index, shard.method
    dim = _check_slice(x, shard)
    spec = hashable(coefficients) if isinstance(coefficients, list) else coefficients
    resolved, dtype, floor = _settings(spec, steps, dtype, eps, normalization, method, x.device)
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
        if not 0 <= index < parts:
            raise ValueError(
                f"index={index} must say which of the {parts} parts the slice is, from 0, for method='gram'"
            )
        return _gram_form(matrices, dim == -2, resolved, dtype, shard).reshape(x.shape)
    y = matrices.mT if dim == -2 else matrices
    short, long = min(full_shape), max(full_shape)
    form = _form(short, long, parts)
    part = _Slice(short, long, shard.start, shard.stop, form, shard.sum, shard.max)
    if normalization == "scale_free":
        y = normalize_scale_free(y, resolved, dtype, part.peak, part.frobenius_norm, part.gram)
    else:
        y = y.to(dtype)
        norm = part.frobenius_norm(y).to(dtype) * resolved.safety_factor
        y = y / (norm.clamp(min=floor * resolved.safety_factor) if normalization == "clamp" else norm + floor)
    for a, b, c in resolved.steps:
        y = _step(y, part, a, b, c)
    return (y.mT if dim == -2 else y).reshape(x.shape)


@lru_cache(maxsize=256, typed=True)
def _settings(
    coefficients: CoefficientSpec,
    steps: int | None,
    dtype: torch.dtype | None,
    eps: float | None,
    normalization: Normalization,
    method: Method,
    device: torch.device,
) -> tuple[ResolvedCoefficients, torch.dtype, float]:
    """Coefficients, dtype of the products and floor of the normalization, checked once for each set of arguments."""
    resolved = resolve_coefficients(coefficients, steps)
    check_method(method, dtype, normalization, resolved)
    if dtype is None:
        dtype = torch.float16 if method == "gram" and device.type == "cuda" else default_dtype(device)
    return resolved, check_dtype(dtype), check_normalization(normalization, eps, resolved)


@lru_cache(maxsize=4096)
def _form(short: int, long: int, parts: int) -> Form:
    return cheapest_form(short, long, parts)[0]


def _check_slice(x: Tensor, shard: Shard) -> int:
    dim, full_shape, start = shard.dim, shard.full_shape, shard.start
    if dim not in (-2, -1, x.ndim - 2, x.ndim - 1):
        raise ValueError(f"dim={dim} must be one of the last two dimensions of {tuple(x.shape)}")
    dim = dim if dim < 0 else dim - x.ndim
    other = -3 - dim
    if full_shape[dim] < full_shape[other]:
        raise ValueError(
            f"matrices {tuple(full_shape)} are cut along their short side (dim={dim}), where a Gram matrix needs whole "
            f"rows; cut them along dim={other}"
        )
    if (
        x.shape[other] != full_shape[other]
        or start < 0
        or start + x.shape[dim] > full_shape[dim]
        or shard.stop != start + x.shape[dim]
    ):
        raise ValueError(
            f"a slice {tuple(x.shape)} from {start} on along dim={dim} is not part of matrices {tuple(full_shape)}"
        )
    if shard.parts < 1:
        raise ValueError(f"parts={shard.parts} must be at least 1")
    return dim


def _gram_form(x: Tensor, tall: bool, resolved: ResolvedCoefficients, dtype: torch.dtype, shard: Shard) -> Tensor:
    """The slice of the result by way of Gram matrices; rows are cut where ``tall``, else columns."""
    wide = x if x.dtype == torch.float64 else x.float()
    own_peak, own_square = _own_scale(wide)
    scales = wide.new_zeros(*x.shape[:-2], shard.parts, 2)
    scales[..., shard.index, :] = torch.stack([own_peak, own_square], dim=-1)
    scales = shard.sum(scales)  # each number stands alone in its sum, so that this is a gather
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
        product = _unpack(shard.sum(packed).to(dtype), product.shape[-1])
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
