"""Products with a symmetric operand or result, the building blocks of matrix iterations.

Matrices are ``(m, n)`` or batches ``(B, m, n)`` of one floating dtype; nothing is changed in place unless ``out`` says so.
:func:`syrk` and :func:`symmul` compute one triangle and mirror it. They run as Triton kernels where those are shown to pay,
and otherwise in torch with the same rounding points: float32 sums, one rounding at the end, the lower triangle mirrored.
"""

from __future__ import annotations

import functools
import os
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hf_emopt.kernels.triton import configs, runtime

Backend: TypeAlias = Literal["auto", "triton", "torch"]
_HALF = (torch.bfloat16, torch.float16)
_RETIRED_VARIABLE = "HF_EMOPT_KERNEL_VARIANTS"


def kernels_pay(device: torch.device) -> bool:
    """Whether kernels can run on the device and a measured table says where they are faster there.

    Raises:
        ValueError: the environment names variants of kernels, which are gone.
    """
    if device.type == "cpu" and os.environ.keys().isdisjoint(("TRITON_INTERPRET", _RETIRED_VARIABLE)):
        return False
    return _pay(device, runtime.kernels_disabled(), runtime.interpreting(), configs.chosen_table())


@functools.cache
def _pay(device: torch.device, disabled: bool, interpreting: bool, table: str) -> bool:
    if runtime.variable(_RETIRED_VARIABLE):
        raise ValueError(
            f"{_RETIRED_VARIABLE} is no longer read: the variants 'estimate' and 'clusters' are gone, and 'diagonal' is "
            f"always on. Unset it; {runtime.DISABLE_VARIABLE}=1 runs torch's products instead of kernels"
        )
    if disabled or not runtime.has_copy_engine(device):
        return False
    if interpreting:
        return device.type == "cpu"
    capability = runtime.architecture(device)
    return capability is not None and configs.measured(capability)


def syrk(
    a: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    trans: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``alpha A A^T + beta C + diagonal I``, or ``alpha A^T A + ...``, symmetric bit for bit.

    Args:
        a: ``(m, k)`` or ``(B, m, k)``; with ``trans`` ``(k, m)`` or ``(B, k, m)``. Any strides; neither form is copied.
        c: ``(m, m)`` or ``(B, m, m)``, symmetric, of the result's dtype; only its lower triangle is used. May be ``out``.
        out_dtype: dtype of the result, default that of ``out``, of ``c``, or of ``a``. bfloat16 and float16 factors may
            give a float32 result, which then accumulates without rounding: ``syrk(g, l, alpha=1 - b, beta=b, out=l)``.
        out: where the result goes, of the result's shape and dtype, rows contiguous.
        backend: ``"auto"`` takes the kernel where it is measured to be faster; ``"triton"`` insists; ``"torch"`` never.

    Raises:
        ValueError: shapes or dtypes that do not fit, or ``backend="triton"`` where no kernel can run.
    """
    a = a.mT if trans else a
    return symmul(a, a, c, alpha=alpha, beta=beta, diagonal=diagonal, out_dtype=out_dtype, out=out, backend=backend)


def symmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """``alpha A B^T + beta C + diagonal I`` for factors whose product ``A B^T`` is symmetric.

    The product of symmetric matrices is symmetric when they commute, as polynomials of one matrix do. Half of it is never
    computed, so nothing checks that. Arguments as for :func:`syrk`; ``b`` has the shape of ``a``.
    """
    dtype = _result_dtype(a, c, out_dtype, out)
    _check_product(a, b, c, out, dtype)
    if not is_plain(a, b, c, out) and out is None:
        return torch.ops.hf_emopt.symmul(a, b, c, alpha, beta, diagonal, dtype, backend)
    out = a.new_empty((*a.shape[:-1], a.shape[-2]), dtype=dtype) if out is None else out
    return symmul_into(a, b, c, out, alpha=alpha, beta=beta, diagonal=diagonal, backend=backend)


def accumulate_gram(
    c: Tensor, a: Tensor, scale: Tensor, alpha: float, beta: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """``C <- beta C + alpha s^2 A A^T`` in place, of matrices ``s A`` held in 16 bits as ``A``; symmetric bit for bit.

    Args:
        c: ``(B, m, m)`` float32, symmetric; its lower triangle counts.
        a: ``(B, m, k)`` bfloat16 or float16, any strides.
        scale: ``(B,)`` float32, ``s``, such that neither ``alpha s^2`` nor its inverse leaves float32; or 0 for a matrix that
            is zero, and then ``C`` is exactly ``beta C``.
        beta: ``(B,)`` float32.
    """
    if _on_kernels(a, a, c, c, backend):
        from hf_emopt.kernels.triton.symmetric_product import symmetric_product

        symmetric_product(a, a, c, c, alpha=alpha, beta=1.0, scales=torch.stack((scale, beta), dim=1))
        return c
    value = _wide_product(a, a).mul_((alpha * scale.square()).view(-1, 1, 1))
    return c.copy_(mirrored(value.add_(c * beta.view(-1, 1, 1))))


def is_plain(*tensors: Tensor | None) -> bool:
    """Neither tracing nor a subclass: then a kernel may be launched here; otherwise the dispatcher has to see an operator."""
    if torch.compiler.is_compiling():
        return False
    return all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def _result_dtype(a: Tensor, c: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    given = {x.dtype for x in (c, out) if x is not None} | ({out_dtype} if out_dtype else set())
    if len(given) > 1:
        names = ", ".join(sorted(str(x).removeprefix("torch.") for x in given))
        raise ValueError(f"c, out and out_dtype must agree on the result's dtype, got {names}")
    return given.pop() if given else a.dtype


def _check_product(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None, dtype: torch.dtype) -> None:
    if a.ndim not in (2, 3) or a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(
            f"factors must be (m, k) or (B, m, k) of one dtype, got {tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        )
    if dtype != a.dtype and not (a.dtype in _HALF and dtype == torch.float32):
        raise ValueError(f"{a.dtype} factors give {a.dtype} or, for bfloat16 and float16, float32 results, not {dtype}")
    shape = (*a.shape[:-1], a.shape[-2])
    for name, x in (("c", c), ("out", out)):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} must have the result's shape {shape}, got {tuple(x.shape)}")


def _on_kernels(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, backend: Backend) -> bool:
    """Whether a product runs on the kernel, or on torch."""
    if backend == "torch":
        return False
    able = a.dtype in _HALF and a.numel() > 0 and runtime.has_copy_engine(a.device)
    if backend == "triton" and not able:
        raise ValueError(
            f"backend='triton' needs bfloat16 or float16 factors on an NVIDIA GPU of capability 9.0 or higher and Triton 3.4 "
            f"or later, without {runtime.DISABLE_VARIABLE}; got {a.dtype} on {a.device}: use backend='auto'"
        )
    if not able or not (backend == "triton" or kernels_pay(a.device)):
        return False
    from hf_emopt.kernels.triton.symmetric_product import takes

    taken = takes(a, b, c, out)
    if backend == "triton" and not taken:
        raise ValueError(
            f"backend='triton' needs rows or columns that are contiguous, and other strides of a multiple of 16 bytes; got "
            f"factors {tuple(a.shape)} with strides {a.stride()}: use backend='auto'"
        )
    return taken


def symmul_into(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    out: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    diagonal: float = 0.0,
    backend: Backend = "auto",
) -> Tensor:
    """:func:`symmul` without its checks, on plain tensors. Without ``out`` the result has the dtype of the factors."""
    out = a.new_empty((*a.shape[:-1], a.shape[-2])) if out is None else out
    # With alpha 0 no product is asked for.
    if (alpha != 0.0 or backend == "triton") and _on_kernels(a, b, c, out, backend):
        from hf_emopt.kernels.triton.symmetric_product import symmetric_product

        symmetric_product(a, b, c, out, alpha=alpha, beta=beta, diagonal=diagonal)
        return out
    if a.is_cuda and a.dtype in _HALF and out.dtype == a.dtype and alpha != 0.0:
        # One general product with the same sums; only the lower triangle of it counts.
        return out.copy_(mirrored(general_into(a, b.mT, out, alpha, c, beta), diagonal))
    value = _wide_product(a, b).mul_(alpha)
    if c is not None:
        value.add_(c, alpha=beta)
    return out.copy_(mirrored(value, diagonal, out.dtype))


def general_into(
    a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0, c: Tensor | None = None, beta: float = 0.0
) -> Tensor:
    """``out = alpha A B + beta C``, by torch."""
    if c is None and alpha == 1.0:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out=out)
    product = torch.addmm if a.ndim == 2 else torch.baddbmm
    return product(out if c is None else c, a, b, beta=0.0 if c is None else beta, alpha=alpha, out=out)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``A B^T`` in float32 (float64 for float64), before any rounding to 16 bits."""
    if a.dtype not in _HALF:
        return a @ b.mT
    if a.is_cuda:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b.mT, out_dtype=torch.float32)
    return a.float() @ b.float().mT


def mirrored(value: Tensor, diagonal: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """The lower triangle of ``value + diagonal I``, mirrored, in ``dtype``. ``value`` ``(..., m, m)`` is overwritten."""
    if diagonal != 0.0:
        value.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    rounded = value.to(dtype or value.dtype)
    return rounded.tril() + rounded.tril(-1).mT


def normalize_cast(
    x: Tensor, dtype: torch.dtype, factor: float = 1.0, *, out: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """``factor X / ||X||_F`` of each matrix in ``dtype``; zeros for a zero matrix.

    The norm is taken in float32 on numbers scaled by a power of two: the result is the same for ``X`` and ``2 ** k X`` in all
    the normal range of float32, deterministic, and no host sees it. A NaN or an infinity makes its matrix NaN.

    Args:
        x: ``(m, n)`` or ``(B, m, n)``, float32, bfloat16 or float16 (others through torch).
        dtype: of the result, which is contiguous unless ``x`` is the transpose of a contiguous tensor.
        out: takes the result, with the strides that it would have.
    """
    if x.ndim not in (2, 3):
        raise ValueError(f"normalize_cast needs (m, n) or (B, m, n), got {tuple(x.shape)}")
    if not is_plain(x) and out is None:
        return torch.ops.hf_emopt.normalize_cast(x, dtype, factor, backend)
    return _normalize_cast_into(x, factor, normalized_like(x, dtype) if out is None else out, backend)


def _is_transposed(x: Tensor) -> bool:
    return x.stride(-1) != 1 and x.mT.is_contiguous()


def normalized_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a normalized ``x``: contiguous, or the transpose of a contiguous tensor where ``x`` is one."""
    return torch.empty_like(x.mT, dtype=dtype).mT if _is_transposed(x) else x.new_empty(x.shape, dtype=dtype)


def _normalize_cast_into(x: Tensor, factor: float, out: Tensor, backend: Backend) -> Tensor:
    given = out
    if _is_transposed(x):
        x, out = x.mT, out.mT
    fits = x.dtype in (torch.float32, *_HALF) and out.dtype in (torch.float32, *_HALF) and x.numel() > 0
    if backend == "triton" and not (fits and runtime.supported(x.device)):
        raise ValueError(f"backend='triton' cannot normalize {x.dtype} on {x.device}: use backend='auto'")
    if backend != "torch" and fits and out.is_contiguous() and (backend == "triton" or kernels_pay(x.device)):
        from hf_emopt.kernels.triton.normalize import normalize_cast as launch

        source = x.contiguous()
        launch(*((source, factor, out) if x.ndim == 3 else (source[None], factor, out[None])))
        return given
    wide = x if x.dtype == torch.float64 else x.float()
    peak: Tensor = torch.linalg.vector_norm(wide, ord=float("inf"), dim=(-2, -1), keepdim=True)
    # A power of two, so that dividing by it is exact.
    scale = torch.exp2(torch.floor(torch.log2(peak.masked_fill(peak == 0, 1.0))))
    y = wide / scale
    norm: Tensor = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    norm.masked_fill_(norm.isinf(), float("nan")).masked_fill_(norm == 0, 1.0)
    out.copy_(y * (factor / norm))
    return given


# Operators for torch.compile and for tensor subclasses


@torch.library.custom_op("hf_emopt::symmul", mutates_args=())
def _symmul_op(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diagonal: float, dtype: torch.dtype, backend: str
) -> Tensor:
    out = a.new_empty((*a.shape[:-1], a.shape[-2]), dtype=dtype)
    return symmul_into(a, b, c, out, alpha=alpha, beta=beta, diagonal=diagonal, backend=backend)  # type: ignore[arg-type]


_symmul_op.register_fake(
    lambda a, b, c, alpha, beta, diagonal, dtype, backend: a.new_empty((*a.shape[:-1], a.shape[-2]), dtype=dtype)
)


@torch.library.custom_op("hf_emopt::normalize_cast", mutates_args=())
def _normalize_cast_op(x: Tensor, dtype: torch.dtype, factor: float, backend: str) -> Tensor:
    return _normalize_cast_into(x, factor, normalized_like(x, dtype), backend)  # type: ignore[arg-type]


_normalize_cast_op.register_fake(lambda x, dtype, factor, backend: normalized_like(x, dtype))
