"""Newton-Schulz on 16-bit symmetric products: the standard iteration, and the iteration on the Gram matrix.

The Gram form (Zhang, Hu, Dao, "Gram Newton-Schulz", dao-lab.ai/blog/2026/gram-newton-schulz) keeps ``R = X X^T`` and a
polynomial ``Q`` of it. A step is ``P = a I + b R + c R R; Q <- Q P; R <- P R P``, and the last product is ``X <- Q X``.
Rounding gives ``R`` small negative eigenvalues, which grow by ``a^2`` a step. A *restart* multiplies ``Q`` into ``X`` and
forms ``R`` again.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.triton.runtime import on
from hf_emopt.linalg.coefficients import Triple
from hf_emopt.linalg.symmetric_products import (
    Backend,
    general_into,
    is_plain,
    kernels_pay,
    normalize_cast,
    normalized_like,
    symmul_into,
)

# How many times the error of the standard form in float16 the Gram form may have. At 3, singular values were seen to
# overshoot their band by 0.14, at 2.4 by 0.003.
ERROR_LIMIT = 2.5
_MOST_STEPS_TOGETHER = 3


@functools.cache
def _trial_matrices() -> Tensor:
    """``(24, 64, 96)`` float32, normalized: flat spectra, one and a few large singular values, and a condition of 1e6."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(6, *shape, generator=generator, device="cpu", dtype=torch.float32)

    u, v = torch.linalg.qr(normal(64, 64)).Q, torch.linalg.qr(normal(96, 64)).Q
    decay = torch.logspace(0, -6, 64, device="cpu", dtype=torch.float32)
    low_rank = normal(64, 8) @ normal(8, 96)
    x = torch.cat([normal(64, 96), normal(64, 1) @ normal(1, 96), low_rank + 1e-2 * normal(64, 96), (u * decay) @ v.mT])
    return x / torch.linalg.matrix_norm(x, keepdim=True)


def _run(steps: Sequence[Triple], restarts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    x = (_trial_matrices().to(torch.float64) * scales_of(dtype)[0]).to(dtype)
    if restarts is None:
        polynomial, x = standard_iterate(x, steps, False, "torch")
    else:
        polynomial, x = gram_iterate(x, steps, restarts, False, "torch")
    return multiply(polynomial, x, False, 1.0 / scales_of(dtype)[0]).double()


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
    """Steps before which the Gram iteration restarts, found by trying every placement in float16 on small matrices of four
    kinds. The placement with the smallest worst error wins. Takes a fraction of a second for each set of coefficients.

    Args:
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
    fewest = -(-count // _MOST_STEPS_TOGETHER) - 1
    numbers = range(fewest, min(count, fewest + 2)) if restarts is None else (restarts,)
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for number in numbers:
        choices = list(itertools.combinations(range(1, count), number))
        if restarts is None:
            choices = [places for places in choices if _longest(places, count) <= _MOST_STEPS_TOGETHER]
        best = min([best, *zip(_worst_ratio(steps, choices), choices)])
        if best[0] <= limit:
            break
    return best[1]


def multiply(q: Tensor, x: Tensor, tall: bool, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``alpha Q X``, or ``alpha X Q`` for tall matrices, into a new tensor or ``out``."""
    left, right = (x, q) if tall else (q, x)
    return general_into(left, right, torch.empty_like(x) if out is None else out, alpha)


def scales_of(dtype: torch.dtype) -> tuple[float, float]:
    """The powers of two by which ``X`` and ``R`` are multiplied, exactly, to stay out of the subnormal numbers of float16."""
    return (2.0**10, 2.0**12) if dtype == torch.float16 else (1.0, 1.0)


def start_factor(dtype: torch.dtype, safety_factor: float) -> float:
    """The factor of a matrix of Frobenius norm 1 before the iterations below."""
    return scales_of(dtype)[0] / safety_factor


def standard_iterate(
    x: Tensor, steps: Sequence[Triple], tall: bool, backend: Backend = "auto", out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The standard form up to the last product: ``B`` and ``X``; the result is ``B X / scale``.

    The square is completed, so that no product reads a second matrix: with ``A = X X^T + b/(2c) I``,
    ``b X X^T + c (X X^T)^2 + a I = c A A + (a - b^2/(4c)) I``. Diagonals are added in float32 before rounding. In float16
    the result is as accurate as with the sums written out; in bfloat16 it is not, and they are.

    Args:
        x: ``(m, n)`` or ``(B, m, n)``, scaled by :func:`start_factor`.
        tall: rows are the long side: ``X^T X``, and ``X <- X B``.
        out: takes both, where given; the ``X`` of a single step is the input.
    """
    shrink = 1.0 / scales_of(x.dtype)[0] ** 2
    polynomial = x
    for number, (a, b, c) in enumerate(steps):
        into = (None, None) if out is None or number < len(steps) - 1 else out
        if number > 0:
            x = multiply(polynomial, x, tall, out=into[1])
        rows = x.mT if tall else x
        if c == 0.0:
            polynomial = symmul_into(rows, rows, out=into[0], alpha=b * shrink, diagonal=a, backend=backend)
        elif x.dtype == torch.bfloat16:
            square = symmul_into(rows, rows, alpha=shrink, backend=backend)
            polynomial = symmul_into(square, square, square, into[0], alpha=c, beta=b, diagonal=a, backend=backend)
        else:
            square = symmul_into(rows, rows, alpha=shrink, diagonal=b / (2 * c), backend=backend)
            rest = a - b * b / (4 * c)
            polynomial = symmul_into(square, square, out=into[0], alpha=c, diagonal=rest, backend=backend)
    return polynomial, x


def gram_iterate(
    x: Tensor,
    steps: Sequence[Triple],
    restarts: Sequence[int],
    tall: bool,
    backend: Backend = "auto",
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The Gram form up to the last product: ``Q`` and ``X``. Arguments as for :func:`standard_iterate`, and the steps to
    restart before; without any, ``X`` is the input."""
    scale, gram_scale = scales_of(x.dtype)
    q = x
    for start, end in zip([0, *restarts], [*restarts, len(steps)]):
        into = (None, None) if out is None or end < len(steps) else out
        if start > 0:
            x = multiply(q, x, tall, out=into[1])
        rows = x.mT if tall else x
        r = symmul_into(rows, rows, alpha=gram_scale / scale**2, backend=backend)
        q = gram_polynomial(r, steps[start:end], gram_scale, backend, into[0])
    return q, x


def gram_polynomial(
    r: Tensor, steps: Sequence[Triple], scale: float, backend: Backend = "auto", out: Tensor | None = None
) -> Tensor:
    """``Q`` after ``steps`` for ``R / scale``, in ``out`` where given, but for a single linear step."""
    q: Tensor | None = None
    for number, (a, b, c) in enumerate(steps):
        into = out if number == len(steps) - 1 else None
        if c == 0.0:
            p = (r.float() if r.dtype == torch.float16 else r) * (b / scale)
            p.diagonal(dim1=-2, dim2=-1).add_(a)
            p = p.to(r.dtype)
        else:
            first = into if q is None else None
            p = symmul_into(r, r, r, first, alpha=c / scale**2, beta=b / scale, diagonal=a, backend=backend)
        q = p if q is None else symmul_into(q, p, out=into, backend=backend)
        if number < len(steps) - 1:
            r = symmul_into(p, symmul_into(r, p, backend=backend), backend=backend)
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
    """Normalizes and orthogonalizes ``(m, n)`` or ``(B, m, n)`` of any floating dtype: the Gram form with ``restarts``, or
    the standard form for ``None``. Products and result have ``dtype``."""
    if not is_plain(x):
        flat = [number for step in steps for number in step]
        places = None if restarts is None else list(restarts)
        return torch.ops.hf_emopt.newton_schulz(x, flat, places, safety_factor, dtype, backend)
    return _iterate(
        x, _Settings(tuple(steps), None if restarts is None else tuple(restarts), safety_factor, dtype, backend)
    )


def _iterate(x: Tensor, settings: _Settings) -> Tensor:
    form = _form_of(settings, x.shape, x.stride(), x.dtype, x.device, kernels_pay(x.device))
    with on(x.device):
        return form.run(x)


# Up to here a copy of the input costs a GPU less than the two launches of the normalization cost a host.
_COPIED_ELEMENTS = 2**23
# Fewer matrices leave most of a device idle when each has one program.
_SMALL_BATCH, _SMALL_SIDE = 16, 64


class _Settings(NamedTuple):
    steps: tuple[Triple, ...]
    restarts: tuple[int, ...] | None
    safety_factor: float
    dtype: torch.dtype
    backend: Backend


@dataclass(frozen=True, eq=False)
class _Form:
    """How inputs of one shape, layout and dtype are orthogonalized. A form is made once; its identity is the key of graphs.

    Attributes:
        tall: rows are the long side.
        like: a normalized input, without memory.
        copy: the copy of the input with which a graph begins, without memory; ``None`` where none does.
        one_program: each matrix has one program of one launch.
    """

    settings: _Settings
    batch: int
    tall: bool
    like: Tensor
    copy: Tensor | None
    one_program: bool

    def run(self, x: Tensor) -> Tensor:
        if self.one_program:
            return self._by_one_program(x)
        if not cuda_graphs.usable(self.batch, min(x.shape[-2:]), max(x.shape[-2:]), x.device):
            polynomial, y = self.whole(x)
        elif self.copy is not None:
            polynomial, y = cuda_graphs.recorded(self, [self.copy], x.device, lambda copy: copy.copy_(x), self.whole)
        else:
            polynomial, y = cuda_graphs.recorded(
                self, [self.like], x.device, lambda out: self._normalize(x, out), self.work
            )
        return multiply(polynomial, y, self.tall, 1.0 / scales_of(y.dtype)[0])

    def work(self, y: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Everything between the normalization and the last product."""
        steps, restarts, _, _, backend = self.settings
        if restarts is None:
            return standard_iterate(y, steps, self.tall, backend, out)
        return gram_iterate(y, steps, restarts, self.tall, backend, out)

    def whole(self, x: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        return self.work(self._normalize(x, torch.empty_like(self.like, device=x.device)), out)

    def _normalize(self, x: Tensor, out: Tensor) -> Tensor:
        factor = start_factor(out.dtype, self.settings.safety_factor)
        return normalize_cast(x, out.dtype, factor, out=out, backend=self.settings.backend)

    def _by_one_program(self, x: Tensor) -> Tensor:
        from hf_emopt.kernels.triton.small_matrices import small_gram_newton_schulz

        steps, restarts, safety_factor, _, _ = self.settings
        assert restarts is not None
        out = torch.empty_like(self.like, device=x.device)
        flat = [number for step in steps for number in step]
        batched = (x, out) if x.ndim == 3 else (x[None], out[None])
        small_gram_newton_schulz(batched[0], flat, restarts, safety_factor, batched[1])
        return out


@functools.lru_cache(maxsize=1024)
def _form_of(
    settings: _Settings,
    shape: torch.Size,
    strides: tuple[int, ...],
    given: torch.dtype,
    device: torch.device,
    pays: bool,
) -> _Form:
    like = torch.empty_strided(shape, strides, dtype=given, device="meta")
    batch = shape[0] if len(shape) == 3 else 1
    one_program = (
        pays
        and settings.backend != "torch"
        and given in (torch.float32, torch.bfloat16, torch.float16)
        and min(shape[-2:]) <= _SMALL_SIDE
        and batch >= _SMALL_BATCH
        and settings.restarts is not None
        and settings.dtype == torch.float16
    )
    copy = normalized_like(like, given) if like.numel() <= _COPIED_ELEMENTS else None
    return _Form(settings, batch, shape[-2] > shape[-1], normalized_like(like, settings.dtype), copy, one_program)


@torch.library.custom_op("hf_emopt::newton_schulz", mutates_args=())
def _iterate_op(
    x: Tensor, coefficients: list[float], restarts: list[int] | None, factor: float, dtype: torch.dtype, backend: str
) -> Tensor:
    steps = tuple(zip(coefficients[::3], coefficients[1::3], coefficients[2::3], strict=True))
    places = None if restarts is None else tuple(restarts)
    return _iterate(x, _Settings(steps, places, factor, dtype, backend))  # type: ignore[arg-type]


_iterate_op.register_fake(lambda x, coefficients, restarts, factor, dtype, backend: normalized_like(x, dtype))
