"""Newton-Schulz on 16-bit symmetric products: the standard iteration, and the iteration on the Gram matrix.

The Gram form (Zhang, Hu, Dao, "Gram Newton-Schulz", dao-lab.ai/blog/2026/gram-newton-schulz) keeps ``R = X X^T`` and the
polynomial ``Q`` of it that ``X`` will be multiplied by, both ``m x m``, and touches the ``m x n`` matrix only at the ends:

.. code-block:: text

    P = a I + b R + c R R;   Q <- Q P;   R <- P R P;      X <- Q X  at the end

Rounding gives ``R`` small negative eigenvalues, which grow by ``a^2`` a step. A *restart* multiplies ``Q`` into ``X`` and
forms ``R`` anew; :func:`find_restart_steps` places as few as keep the result
accurate.

Two powers of two keep float16 away from its subnormal numbers, where a large matrix would otherwise be: ``X`` is held as
``2 ** 10 X`` and ``R`` as ``2 ** 12 R``. They are exact and undone in the scalars of the products.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.triton import variants
from hf_emopt.kernels.triton.runtime import on
from hf_emopt.linalg.coefficients import Triple
from hf_emopt.linalg.symmetric_products import (
    Backend,
    _is_plain,
    _symmul_into,
    _transposed,
    kernels_pay,
    normalize_cast,
)

__all__ = ["ERROR_LIMIT", "find_restart_steps", "gram_flops", "gram_iterate", "iterate", "standard_iterate"]

# How many times the error of the standard form in float16 the Gram form may have; bfloat16 costs the standard form 8 times.
# At 3, singular values were seen to overshoot their band by 0.14, at 2.4 by 0.003.
ERROR_LIMIT = 2.5
_LONGEST_SEGMENT = 3
_X_SCALE = 2.0**10
_R_SCALE = 2.0**12


@functools.cache
def _trial_matrices() -> Tensor:
    """``(24, 64, 96)`` float32, normalized: flat spectra, one and a few large singular values, and a condition of 1e6."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(6, *shape, generator=generator, device="cpu", dtype=torch.float32)

    u, v = torch.linalg.qr(normal(64, 64)).Q, torch.linalg.qr(normal(96, 64)).Q
    decay = torch.logspace(0, -6, 64, device="cpu", dtype=torch.float32)
    low_rank = normal(64, 8) @ normal(8, 96)
    x = torch.cat([normal(64, 96), normal(64, 1) @ normal(1, 96), low_rank + 1e-2 * normal(64, 96), (u * decay) @ v.mT])
    return x / torch.linalg.matrix_norm(x, keepdim=True)


def _run(steps: Sequence[Triple], restarts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    x = (_trial_matrices().to(torch.float64) * _scales(dtype)[0]).to(dtype)
    if restarts is None:
        polynomial, x = standard_iterate(x, steps, False, "torch")
    else:
        polynomial, x = gram_iterate(x, steps, restarts, False, "torch")
    return _apply(polynomial, x, False, 1.0 / _scales(dtype)[0]).double()


def _worst_ratio(steps: Sequence[Triple], places: Sequence[Sequence[int]]) -> list[float]:
    """For each placement the largest error on the trial matrices in float16, in units of the standard form's there."""
    exact = _run(steps, None, torch.float64)
    unit = (_run(steps, None, torch.float16) - exact).flatten(1).norm(dim=1).clamp_min(1e-3)
    ratios = [(_run(steps, choice, torch.float16) - exact).flatten(1).norm(dim=1) / unit for choice in places]
    return [ratio.nan_to_num(math.inf).max().item() for ratio in ratios]


def _longest(places: Sequence[int], count: int) -> int:
    return max(end - start for start, end in zip([0, *places], [*places, count]))


@functools.lru_cache(maxsize=256)
def find_restart_steps(
    steps: tuple[Triple, ...], restarts: int | None = None, limit: float = ERROR_LIMIT
) -> tuple[int, ...]:
    """Steps before which the Gram iteration starts anew, found by trying.

    Scalar models of the rounding misjudge some coefficient sets badly, so every placement is run, in the arithmetic of the
    kernels, on small matrices of four kinds; the one with the smallest worst error wins. Takes a fraction of a second, once
    for each set of coefficients.

    Args:
        steps: ``(a, b, c)`` of every step.
        restarts: how many; ``None`` for as few as leave at most three steps together and keep the worst error at or below
            ``limit``, or, where two numbers of restarts do not, the better of those.
        limit: in units of the standard form's error in float16 on the same matrix.

    Returns:
        Increasing step numbers in ``1 .. len(steps) - 1``.

    Raises:
        ValueError: more restarts than there are places.
    """
    count = len(steps)
    if restarts is not None and not 0 <= restarts < max(count, 1):
        raise ValueError(f"{restarts} restarts do not fit between {count} steps: give 0 to {count - 1}")
    fewest = -(-count // _LONGEST_SEGMENT) - 1
    numbers = range(fewest, min(count, fewest + 2)) if restarts is None else (restarts,)
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for number in numbers:
        choices = list(itertools.combinations(range(1, count), number))
        if restarts is None:
            choices = [places for places in choices if _longest(places, count) <= _LONGEST_SEGMENT]
        best = min([best, *zip(_worst_ratio(steps, choices), choices)])
        if best[0] <= limit:
            break
    return best[1]


def gram_flops(m: int, n: int, steps: int, restarts: int) -> int:
    """FLOPs of the Gram form for one ``(m, n)`` matrix, a symmetric product counted at half of a general one."""
    short, long = min(m, n), max(m, n)
    owned_regions = restarts + 1
    square = (
        steps + (steps - owned_regions) + 2 * (steps - owned_regions)
    )  # Z of each step; Q and R where an owned region goes on
    return owned_regions * 3 * short * short * long + square * short**3


def _product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    diagonal: float,
    backend: Backend,
    correction: Tensor | None = None,
    power: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """``alpha A B + beta C + diagonal I`` of commuting symmetric matrices, into a new tensor or ``out``. With a
    ``correction`` always on the kernels; see :func:`~hf_emopt.kernels.triton.symmetric_launch.symmetric_product`."""
    out = a.new_empty((*a.shape[:-1], a.shape[-2])) if out is None else out
    if correction is None:
        _symmul_into(a, b, c, out, alpha, beta, diagonal, backend)
        return out
    from hf_emopt.kernels.triton.symmetric_launch import symmetric_product

    symmetric_product(a, b, c, out, alpha=alpha, beta=beta, diagonal=diagonal, correction=correction, power=power)
    return out


def _apply(q: Tensor, x: Tensor, tall: bool, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``alpha Q X``, or ``alpha X Q`` for tall matrices, into a new tensor or ``out``."""
    left, right = (x, q) if tall else (q, x)
    out = torch.empty_like(x) if out is None else out
    if alpha == 1.0:
        return (torch.mm if x.ndim == 2 else torch.bmm)(left, right, out=out)
    product = torch.addmm if x.ndim == 2 else torch.baddbmm
    return product(out, left, right, beta=0.0, alpha=alpha, out=out)


def _scales(dtype: torch.dtype) -> tuple[float, float]:
    # Other dtypes have exponents enough.
    return (_X_SCALE, _R_SCALE) if dtype == torch.float16 else (1.0, 1.0)


def start_factor(dtype: torch.dtype, safety_factor: float) -> float:
    """What a matrix of Frobenius norm 1 has to be multiplied by before the iterations below."""
    return _scales(dtype)[0] / safety_factor


def standard_iterate(
    x: Tensor,
    steps: Sequence[Triple],
    tall: bool,
    backend: Backend = "auto",
    correction: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The standard form up to the last product: ``B`` and ``X``, of which the result is ``B X / scale``.

    The square is completed, so that no product reads a second matrix: with ``A = X X^T + b/(2c) I``,
    ``b X X^T + c (X X^T)^2 + a I = c A A + (a - b^2/(4c)) I``. Diagonals are added in float32 before rounding. In float16 the
    result is as accurate as with the sums written out; in bfloat16 it is not, and they are.

    Args:
        x: ``(m, n)`` or ``(B, m, n)``, scaled by :func:`start_factor`.
        tall: rows are the long side: ``X^T X``, and ``X <- X B``.
        correction: ``(B,)`` float32, what ``x`` is still to be multiplied by; on the kernels alone, and not with ``c`` = 0 in
            the first step.
        out: where both are written, where given; the ``X`` of a single step is the input.
    """
    shrink = 1.0 / _scales(x.dtype)[0] ** 2
    polynomial = x
    for number, (a, b, c) in enumerate(steps):
        into = (None, None) if out is None or number < len(steps) - 1 else out
        if number > 0:
            x = _apply(polynomial, x, tall, out=into[1])
        rows = x.mT if tall else x
        left = correction if number == 0 else None
        if c == 0.0:
            assert left is None
            polynomial = _product(rows, rows, None, b * shrink, 0.0, a, backend, out=into[0])
        elif x.dtype == torch.bfloat16:
            square = _product(rows, rows, None, shrink, 0.0, 0.0, backend, left, power=2)
            polynomial = _product(square, square, square, c, b, a, backend, left, out=into[0])
        else:
            square = _product(rows, rows, None, shrink, 0.0, b / (2 * c), backend, left, power=2)
            polynomial = _product(square, square, None, c, 0.0, a - b * b / (4 * c), backend, left, out=into[0])
    return polynomial, x


def gram_iterate(
    x: Tensor,
    steps: Sequence[Triple],
    restarts: Sequence[int],
    tall: bool,
    backend: Backend = "auto",
    correction: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The Gram form up to the last product: ``Q`` and ``X``. Arguments as for :func:`standard_iterate`, and the steps to
    restart before; without any, ``X`` is the input."""
    scale, gram_scale = _scales(x.dtype)
    q = x
    for start, end in zip([0, *restarts], [*restarts, len(steps)]):
        into = (None, None) if out is None or end < len(steps) else out
        if start > 0:
            x = _apply(q, x, tall, out=into[1])
        rows = x.mT if tall else x
        left = correction if start == 0 else None
        r = _product(rows, rows, None, gram_scale / scale**2, 0.0, 0.0, backend, left, power=2)
        q = _owned_region(r, steps[start:end], gram_scale, backend, left, into[0])
    return q, x


def _owned_region(
    r: Tensor,
    steps: Sequence[Triple],
    scale: float,
    backend: Backend,
    correction: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``Q`` after ``steps`` for ``R / scale``: ``P = a I + b R + c R R``, ``Q <- Q P``, ``R <- P (R P)``; in the end times
    ``correction``. Into ``out`` where given, but for a single linear step."""
    q: Tensor | None = None
    for number, (a, b, c) in enumerate(steps):
        last, into = (correction, out) if number == len(steps) - 1 else (None, None)
        if c == 0.0:
            assert q is not None or last is None
            p = (r.float() if r.dtype == torch.float16 else r) * (b / scale)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            p = p.to(r.dtype)
        else:
            first = (last, into) if q is None else (None, None)
            p = _product(r, r, r, c / scale**2, b / scale, a, backend, first[0], out=first[1])
        q = p if q is None else _product(q, p, None, 1.0, 0.0, 0.0, backend, last, out=into)
        if number < len(steps) - 1:
            r = _product(p, _product(r, p, None, 1.0, 0.0, 0.0, backend), None, 1.0, 0.0, 0.0, backend)
    assert q is not None
    return q


def iterate(
    x: Tensor,
    steps: Sequence[Triple],
    restarts: Sequence[int] | None,
    safety_factor: float,
    dtype: torch.dtype,
    backend: Backend = "auto",
) -> Tensor:
    """Normalizes and orthogonalizes: the Gram form with ``restarts``, or the standard form for ``None``.

    Args:
        x: ``(m, n)`` or ``(B, m, n)``, any floating dtype.
        dtype: of products and result.
    """
    if not _is_plain(x):
        flat = [number for step in steps for number in step]
        places = None if restarts is None else list(restarts)
        return torch.ops.hf_emopt.newton_schulz(x, flat, places, safety_factor, dtype, backend)
    return _iterate(x, tuple(steps), None if restarts is None else tuple(restarts), safety_factor, dtype, backend)


def _iterate(
    x: Tensor,
    steps: tuple[Triple, ...],
    restarts: tuple[int, ...] | None,
    safety_factor: float,
    dtype: torch.dtype,
    backend: Backend,
) -> Tensor:
    form = _form_of(
        x.shape, x.stride(), x.dtype, x.device, steps, restarts, safety_factor, dtype, backend, kernels_pay(x.device),
        variants.chosen(),
    )  # fmt: skip
    with on(x.device):
        return _iterate_there(x, form)


# Up to here a copy of the input costs a GPU less than two launches of the normalization cost a host: both become part of
# the graph.
_COPIED_ELEMENTS = 2**23
# Fewer matrices leave most of a device idle when each has one program.
_SMALL_BATCH = 16


@dataclass(frozen=True, eq=False)
class _Form:
    """How inputs of one shape, layout and dtype are orthogonalized. Worked out once: a host has no time for it in every
    step. What it works out to is its identity, by which graphs are found again.

    Attributes:
        factor: of the normalization, see :func:`start_factor`.
        likes: what is normalized into, without memory, and a correction for each matrix where the norm is estimated first.
        copy: where a graph begins with a copy of the input, what is copied into, without memory.
        one_program: each matrix has one program of one launch.
    """

    steps: tuple[Triple, ...]
    restarts: tuple[int, ...] | None
    safety_factor: float
    backend: Backend
    factor: float
    batch: int
    tall: bool
    likes: tuple[Tensor, ...]
    copy: Tensor | None
    one_program: bool

    def work(
        self, y: Tensor, correction: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """All between the normalization and the last product."""
        if self.restarts is None:
            return standard_iterate(y, self.steps, self.tall, self.backend, correction, out)
        return gram_iterate(y, self.steps, self.restarts, self.tall, self.backend, correction, out)

    def whole(self, x: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The same with the normalization."""
        y, *correction = self.started(x)
        return self.work(y, correction[0] if correction else None, out)

    def started(self, x: Tensor) -> list[Tensor]:
        """``x`` normalized, and its corrections where there are any."""
        outs = [torch.empty_like(like, device=x.device) for like in self.likes]
        _start(x, self.factor, self.backend, *outs)
        return outs


@functools.lru_cache(maxsize=1024)
def _form_of(
    shape: torch.Size,
    strides: tuple[int, ...],
    given: torch.dtype,
    device: torch.device,
    steps: tuple[Triple, ...],
    restarts: tuple[int, ...] | None,
    safety_factor: float,
    dtype: torch.dtype,
    backend: Backend,
    pays: bool,
    chosen: frozenset[str],
) -> _Form:
    """The form of an input with these ``shape``, ``strides`` and dtype, where kernels pay or not and some variants are on."""
    like = torch.empty_strided(shape, strides, dtype=given, device="meta")
    batch = shape[0] if len(shape) == 3 else 1
    kernels = pays and backend != "torch"
    narrow = given in (torch.float32, torch.bfloat16, torch.float16)
    one_program = kernels and narrow and min(shape[-2:]) <= 64 and batch >= _SMALL_BATCH
    estimates = kernels and narrow and "estimate" in chosen and bool(steps) and steps[0][2] != 0.0
    likes = [_dense(like, dtype)]
    if estimates and dtype in (torch.bfloat16, torch.float16):
        likes.append(torch.empty(batch, dtype=torch.float32, device="meta"))
    return _Form(
        steps, restarts, safety_factor, backend, start_factor(dtype, safety_factor), batch, shape[-2] > shape[-1],
        tuple(likes), _dense(like, given) if like.numel() <= _COPIED_ELEMENTS else None,
        one_program and restarts is not None and dtype == torch.float16,
    )  # fmt: skip


def _iterate_there(x: Tensor, form: _Form) -> Tensor:
    if form.one_program:
        from hf_emopt.kernels.triton.small_launch import small_gram_newton_schulz

        assert form.restarts is not None
        out = torch.empty_like(form.likes[0], device=x.device)
        batched = (x, out) if x.ndim == 3 else (x[None], out[None])
        flat = [number for step in form.steps for number in step]
        small_gram_newton_schulz(batched[0], flat, list(form.restarts), form.safety_factor, batched[1])
        return out
    if not cuda_graphs.usable(form.batch, min(x.shape[-2:]), max(x.shape[-2:]), x.device):
        polynomial, y = form.whole(x)
    elif form.copy is not None:
        polynomial, y = cuda_graphs.recorded(form, [form.copy], x.device, lambda copy: copy.copy_(x), form.whole)
    else:
        polynomial, y = cuda_graphs.recorded(
            form, form.likes, x.device, lambda *outs: _start(x, form.factor, form.backend, *outs), form.work
        )
    return _apply(polynomial, y, form.tall, 1.0 / _scales(y.dtype)[0])


def _start(x: Tensor, factor: float, backend: Backend, out: Tensor, correction: Tensor | None = None) -> None:
    """``factor X / ||X||`` into ``out``; where there is a ``correction`` that is left to be multiplied by, into it."""
    if correction is None:
        normalize_cast(x, out.dtype, factor, out=out, backend=backend)
        return
    from hf_emopt.kernels.triton.estimated_launch import estimated_cast

    if _transposed(x):
        x, out = x.mT, out.mT
    x = x.contiguous()
    estimated_cast(*((x, factor, out) if x.ndim == 3 else (x[None], factor, out[None])), correction)


def _dense(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without memory that has the shape and strides of a normalized ``x``."""
    if _transposed(x):
        return torch.empty(x.mT.shape, dtype=dtype, device="meta").mT
    return torch.empty(x.shape, dtype=dtype, device="meta")


@torch.library.custom_op("hf_emopt::newton_schulz", mutates_args=())
def _iterate_op(
    x: Tensor,
    coefficients: list[float],
    restarts: list[int] | None,
    safety_factor: float,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    steps = tuple(zip(coefficients[::3], coefficients[1::3], coefficients[2::3], strict=True))
    return _iterate(x, steps, None if restarts is None else tuple(restarts), safety_factor, dtype, backend)  # type: ignore[arg-type]


@_iterate_op.register_fake
def _(
    x: Tensor,
    coefficients: list[float],
    restarts: list[int] | None,
    safety_factor: float,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    if x.stride(-1) != 1 and x.mT.is_contiguous():
        return torch.empty_like(x.mT, dtype=dtype).mT
    return x.new_empty(x.shape, dtype=dtype)
