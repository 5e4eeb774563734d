"""Orthogonalization by the Newton-Schulz iteration.

For ``X = U S V^T`` the result approximates the polar factor ``U V^T`` with matrix products only: after normalisation,
``A = X X^T``, ``B = b A + c A A``, ``X <- a X + B X`` applies ``s -> a s + b s^3 + c s^5`` to every singular value.
The coefficients drive all of them towards 1 (Jordan et al., kellerjordan.github.io/posts/muon; Bernstein and Newhouse,
arXiv 2409.20325). Directions whose singular value is zero stay zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from hf_emopt.linalg.coefficients import CoefficientSpec, ResolvedCoefficients, resolve_coefficients
from hf_emopt.linalg.gram_newton_schulz import find_restart_steps, iterate
from hf_emopt.linalg.matmul_precision import matmul_precision
from hf_emopt.linalg.symmetric_products import kernels_pay

Method: TypeAlias = Literal["auto", "standard", "gram"]
Normalization: TypeAlias = Literal["scale_free", "clamp", "add"]

_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# The floor that torch.optim.Muon, KellerJordan/Muon and Moonlight put under the norm.
_REFERENCE_EPS = 1e-7
# Long side over short side from which the Gram form is used.
_GRAM_RATIO = 1.5


def default_dtype(device: torch.device) -> torch.dtype:
    """Compute dtype when none is asked for: bfloat16 on CUDA and XPU devices, float32 elsewhere."""
    return torch.bfloat16 if device.type in ("cuda", "xpu") else torch.float32


def newton_schulz_flops(m: int, n: int, steps: int = 5) -> int:
    """FLOPs (multiply and add counted as two) to orthogonalise one ``(m, n)`` matrix, normalisation left out.

    Per step, with ``s = min(m, n)`` and ``l = max(m, n)``: two products of ``2 s s l`` and one of ``2 s^3``, general
    (not symmetric) products throughout.
    """
    short, long = min(m, n), max(m, n)
    return steps * (4 * short * short * long + 2 * short**3)


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    steps: int | None = 5,
    coefficients: CoefficientSpec = "jordan",
    dtype: torch.dtype | None = None,
    *,
    eps: float | None = None,
    normalization: Normalization = "scale_free",
    method: Method = "auto",
) -> Tensor:
    """Approximate polar factor of each matrix in ``x``.

    Args:
        x: ``(..., m, n)``, any number of leading batch dimensions, any real floating dtype; never modified.
        steps: number of iterations; ``None`` for the default of the coefficient set.
        coefficients: a name in ``NS_COEFFICIENTS``, ``(a, b, c)`` for all steps, or one ``(a, b, c)`` per step; see
            :func:`~hf_emopt.linalg.coefficients.resolve_coefficients`.
        dtype: dtype of the matrix products and of the result: bfloat16, float16, float32 or float64. ``None``: float16
            where this package's kernels run (below) and in the Gram form on CUDA, else bfloat16 on CUDA and XPU devices,
            float32 on others, whatever the dtype of ``x``.
        eps: floor of the norm, for ``"clamp"`` and ``"add"`` only (default 1e-7).
        normalization: how a matrix is brought to Frobenius norm 1 (times the set's ``safety_factor``).

            * ``"scale_free"``: in float32 (float64 for float64 input) divide by the largest magnitude, then by the
              norm, and cast last. The result does not depend on the scale of ``x`` anywhere in the normal range of
              float32: there is no floor, and no norm overflows or vanishes.
            * ``"clamp"``: cast, then divide by ``max(norm, eps)`` taken in ``dtype``; the operations of
              ``torch.optim.Muon`` (2.13), bit for bit when there is one matrix.
            * ``"add"``: cast, then divide by ``norm + eps`` taken in ``dtype``, with products and sums rounded one by
              one; the operations of KellerJordan/Muon and Moonlight, bit for bit.

            The last two exist to reproduce those programs. They are not scale-free: a matrix whose norm is near or
            below ``eps`` is not orthogonalised, and float16 overflows.
        method: ``"standard"``, the iteration above; ``"gram"``, which iterates on ``X X^T`` and costs less the longer the
            matrix (:mod:`hf_emopt.linalg.gram_newton_schulz`); or ``"auto"``: on devices where the kernels are measured to
            pay, in float16 by shape and in bfloat16 the standard form; elsewhere the standard form.

    Returns:
        ``(..., m, n)`` in ``dtype``, on the device of ``x``; for tall matrices perhaps a transposed view. Not differentiable.
        Zero matrices and empty tensors give zeros and empty tensors. A NaN or infinity makes all of its matrix
        non-finite and leaves the others in the batch alone: to skip such a step is up to the caller.

    The iteration runs on the short side (a tall matrix is transposed), so Gram matrices are ``min(m, n)`` square. A
    batch is one batched product per operation; a batch of one runs as a plain matrix. Float16 has three more bits than
    bfloat16; outside the kernels its small entries lose them again once ``m * n`` exceeds about 1e8.

    The kernels run ``"scale_free"`` in float16 and bfloat16. Without Triton, with ``HF_EMOPT_DISABLE_TRITON=1``, and on
    devices without measurements, torch's general products do the same sums.

    Raises:
        TypeError: ``x`` is not a real floating-point tensor.
        ValueError: fewer than two dimensions, another ``dtype``, unknown coefficients, normalization or method, ``eps``
            where it has no meaning, or the Gram form in bfloat16 or with a normalization or set it does not have.
    """
    check_input(x)
    arguments = (coefficients, steps, dtype, eps, normalization, method)
    resolved, floor = (_checked if torch.compiler.is_compiling() else _checked_once)(*arguments)
    kernels = normalization == "scale_free" and resolved.scaling == "frobenius" and _kernels_pay(x.device)
    if dtype is None:
        half = x.device.type == "cuda" and (kernels or method == "gram")
        dtype = torch.float16 if half else default_dtype(x.device)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)

    shape = x.shape
    batch = math.prod(shape[:-2])
    # One matrix runs through mm and addmm: faster than a batch of one, and what the reference programs do.
    matrices = x.reshape(shape[-2:]) if batch == 1 else x.reshape(batch, *shape[-2:])
    kernels = kernels and dtype in (torch.float16, torch.bfloat16)
    with _modes(x.device, dtype):
        if kernels or method == "gram":
            use_gram = method == "gram" or (method == "auto" and dtype == torch.float16 and gram_pays(*shape[-2:]))
            restarts = _restarts(resolved.steps) if use_gram else None
            return iterate(matrices, resolved.steps, restarts, resolved.safety_factor, dtype).reshape(shape)
        tall = shape[-2] > shape[-1]
        if tall:
            matrices = matrices.mT
        if normalization == "scale_free":
            y = _iterate(normalize_scale_free(matrices, resolved, dtype), resolved)
        elif normalization == "clamp":
            y = _iterate(_normalize_clamp(matrices, resolved.safety_factor, dtype, floor), resolved)
        else:
            y = _iterate_unfused(_normalize_add(matrices, resolved.safety_factor, dtype, floor), resolved)
        return (y.mT if tall else y).reshape(shape)


def _modes(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Products are of ``dtype`` whatever autocast and, for float32, the flags for TF32 say."""
    if torch.compiler.is_compiling():  # which knows the one of the three
        return torch.autocast(device.type, enabled=False)
    return matmul_precision("highest") if dtype == torch.float32 else torch._C._DisableAutocast()


def _checked(
    coefficients: CoefficientSpec,
    steps: int | None,
    dtype: torch.dtype | None,
    eps: float | None,
    normalization: Normalization,
    method: Method,
) -> tuple[ResolvedCoefficients, float]:
    """The coefficients and the floor of the norm, of arguments that are right."""
    if dtype is not None:
        check_dtype(dtype)
    resolved = resolve_coefficients(coefficients, steps)
    floor = check_normalization(normalization, eps, resolved)
    check_method(method, dtype, normalization, resolved)
    return resolved, floor


_remembered = functools.lru_cache(maxsize=256, typed=True)(_checked)


def _checked_once(*arguments: Any) -> tuple[ResolvedCoefficients, float]:
    """As :func:`_checked`, which an optimizer asks the same in every step."""
    try:
        return _remembered(*arguments)
    except TypeError:  # a list of coefficients, or a wrong argument, which the message is to name
        return _checked(*arguments)


def check_input(x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(f"newton_schulz needs a real floating-point tensor, got {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"newton_schulz needs matrices (..., m, n), got shape {tuple(x.shape)}")


def check_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _COMPUTE_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _COMPUTE_DTYPES)
        raise ValueError(f"newton_schulz computes in {names}, not in {dtype}")
    return dtype


def check_method(method: str, dtype: torch.dtype | None, normalization: str, resolved: ResolvedCoefficients) -> None:
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    if method != "gram":
        return
    if dtype == torch.bfloat16:
        raise ValueError(
            "the Gram form needs more bits than bfloat16 has: use dtype=torch.float16 (or leave dtype out), or "
            "method='standard'"
        )
    if normalization != "scale_free" or resolved.scaling != "frobenius":
        raise ValueError(
            f"method='gram' has no normalization={normalization!r} and no coefficient set that rescales rows "
            f"(got {resolved.name!r}): use method='standard'"
        )


def _restarts(steps: tuple[tuple[float, float, float], ...]) -> tuple[int, ...]:
    return find_restart_steps(steps)


def _kernels_pay(device: torch.device) -> bool:
    return kernels_pay(device)


# torch.compile takes these two as values and does not trace them. torch.compiler.assume_constant_result sets the same
# attribute, and imports the compiler and Triton.
for _function in (_restarts, _kernels_pay):
    vars(_function)["_dynamo_marked_constant"] = True


def gram_pays(m: int, n: int) -> bool:
    """Whether the Gram form is the faster one for an ``(m, n)`` matrix (docs/kernels.md)."""
    return max(m, n) >= _GRAM_RATIO * min(m, n)


def check_normalization(normalization: str, eps: float | None, resolved: ResolvedCoefficients) -> float:
    if normalization not in get_args(Normalization):
        raise ValueError(f"normalization must be one of {', '.join(get_args(Normalization))}, got {normalization!r}")
    if normalization == "scale_free":
        if eps is not None:
            raise ValueError(
                f"eps={eps} has no meaning for normalization='scale_free', which has no floor: leave it out, or choose "
                "'clamp' or 'add' to reproduce an implementation that has one"
            )
        return 0.0
    if resolved.scaling != "frobenius":
        raise ValueError(
            f"coefficient set {resolved.name!r} rescales rows, which normalization={normalization!r} does not: "
            "use normalization='scale_free'"
        )
    if eps is None:
        return _REFERENCE_EPS
    if not (eps >= 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be a finite number >= 0, got {eps}")
    return eps


def _frobenius_norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm


def _peak(x: Tensor) -> Tensor:
    peak: Tensor = torch.linalg.vector_norm(x, ord=math.inf, dim=(-2, -1), keepdim=True)
    return peak


def gram(x: Tensor) -> Tensor:
    """``X X^T``: ``(..., m, n) -> (..., m, m)``, symmetric positive semidefinite up to rounding."""
    return x @ x.mT


def normalize_scale_free(
    x: Tensor,
    resolved: ResolvedCoefficients,
    dtype: torch.dtype,
    peak_of: Callable[[Tensor], Tensor] = _peak,
    norm_of: Callable[[Tensor], Tensor] = _frobenius_norm,
    gram_of: Callable[[Tensor], Tensor] = gram,
) -> Tensor:
    """``x`` ``(..., s, l)`` in ``dtype`` with the norm that the iteration starts from. Slices of matrices are given functions
    of the whole ones: largest magnitude and Frobenius norm ``(..., 1, 1)``, and Gram matrix ``(..., s, s)``."""
    wide = x if x.dtype == torch.float64 else x.float()
    peak = peak_of(wide)
    y = wide / peak.masked_fill(peak == 0, 1.0)  # a new tensor, which may be changed from here on
    # The largest entry is 1 now, so the norm of a matrix that is not zero is at least 1: the floor acts on zero only.
    y.div_(norm_of(y).clamp_(min=1.0).mul_(resolved.safety_factor))
    if resolved.scaling == "aol":  # float16 would flush the squared norms of small rows to zero
        product = gram_of(y if dtype == torch.float16 else y.to(dtype))
        sums = torch.promote_types(product.dtype, y.dtype)
        row_sum: Tensor = torch.linalg.vector_norm(product, ord=1, dim=-1, keepdim=True, dtype=sums)
        y = y * row_sum.rsqrt().masked_fill(row_sum == 0, 0.0)
    return y.to(dtype)


def _normalize_clamp(x: Tensor, safety_factor: float, dtype: torch.dtype, eps: float) -> Tensor:
    y = x.to(dtype)
    norm = _frobenius_norm(y).clamp(min=eps)
    return y / (norm if safety_factor == 1 else norm * safety_factor)


def _normalize_add(x: Tensor, safety_factor: float, dtype: torch.dtype, eps: float) -> Tensor:
    y = x.to(dtype)
    norm = _frobenius_norm(y)
    return y / ((norm if safety_factor == 1 else norm * safety_factor) + eps)


def symmetric_polynomial(a: Tensor, b: float, c: float) -> Tensor:
    """``b A + c A A`` for symmetric ``A`` ``(..., m, m)``, rounded once."""
    if c == 0:  # torch.baddbmm on the CPU ignores beta for bfloat16 when alpha is 0 (torch 2.13)
        return b * a
    product = torch.addmm if a.ndim == 2 else torch.baddbmm
    return product(a, a, a, beta=b, alpha=c)


def add_product(a: float, b: Tensor, x: Tensor) -> Tensor:
    """``a X + B X`` for symmetric ``B`` ``(..., m, m)`` and ``X`` ``(..., m, n)``, rounded once."""
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    return product(x, b, x, beta=a)


def _iterate(y: Tensor, resolved: ResolvedCoefficients) -> Tensor:
    for a, b, c in resolved.steps:
        y = add_product(a, symmetric_polynomial(gram(y), b, c), y)
    return y


def _iterate_unfused(y: Tensor, resolved: ResolvedCoefficients) -> Tensor:
    """The same steps with every product and sum rounded to the dtype, in the order of KellerJordan/Muon."""
    for a, b, c in resolved.steps:
        product = y @ y.mT
        polynomial = b * product + c * product @ product
        y = a * y + polynomial @ y
    return y
