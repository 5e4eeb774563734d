"""Input checks, bounds, and cheap checks of a result for symmetric batches ``(N, d, d)``, without a synchronisation."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Checks run on this many columns in float64 at a time: 512 MiB of temporaries.
_CHECK_NUMEL = 64 * 2**20


def check_batch(a: Tensor, name: str, caller: str) -> None:
    """Raises TypeError where not float32 or float64, and ValueError where not ``(N, d, d)``."""
    if a.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{caller} computes in float32 or float64, got {name} in {a.dtype}: convert it first")
    if a.ndim != 3 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"{caller} needs a batch {name} of square matrices (N, d, d), got shape {tuple(a.shape)}")


def finite_blocks(*tensors: Tensor) -> Tensor:
    """``(N,)`` bool: every number of a block, in every tensor ``(N, ...)``, is finite."""
    first, *rest = (largest_entry(x) < math.inf for x in tensors)  # false for NaN
    return functools.reduce(torch.logical_and, rest, first)


def largest_entry(x: Tensor) -> Tensor:
    """``(N,)``: the largest absolute value of each block ``(N, ...)``, NaN if there is one; 0 for blocks without entries."""
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    # One pass, where abs() and amax() would be three.
    return torch.linalg.vector_norm(flat, math.inf, dim=-1) if flat.shape[-1] else flat.new_zeros(flat.shape[0])


def eye_like(a: Tensor) -> Tensor:
    """The identity ``(d, d)`` in the dtype and on the device of ``a`` ``(..., d, d)``."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)


def identity_where_not(finite: Tensor, a: Tensor) -> Tensor:
    """``a`` ``(N, d, d)`` with the identity in place of blocks that are not ``finite``, which factorizations refuse."""
    return torch.where(finite.reshape(-1, 1, 1), a, eye_like(a))


def power_of_two_scale(peak: Tensor) -> Tensor:
    """``(N, 1, 1)`` powers of two of the size of the largest entries ``(N,)``; 1 for zero, infinity and NaN.

    Division by it is exact, and after it no square of a significant entry over- or underflows.
    """
    # The exponent's bits alone are the power of two at or below a number.
    single = peak.dtype == torch.float32
    kind, mask, highest = (torch.int32, 0x7F800000, 126) if single else (torch.int64, 0x7FF << 52, 1022)
    peak = peak.nan_to_num(nan=0.0, posinf=0.0)
    scale = (peak.view(kind) & mask).view(peak.dtype).clamp(torch.finfo(peak.dtype).tiny, 2.0**highest)
    return scale.masked_fill(peak == 0, 1.0).reshape(-1, 1, 1)


def spectral_bound(a: Tensor) -> Tensor:
    """``(N, 1, 1)``: an upper bound on the largest eigenvalue of symmetric blocks, the smaller of the Frobenius norm (tight
    for low rank) and the largest absolute row sum (tight near a multiple of the identity)."""
    frobenius = torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True)
    row_sum = torch.linalg.vector_norm(a, ord=1, dim=-1, keepdim=True).amax(-2, keepdim=True)
    return torch.minimum(frobenius, row_sum)


@functools.cache  # recorded graphs read them at their address
def _probes(d: int, count: int, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(d)
    signs = torch.randint(0, 2, (d, count), generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)
    return signs.to(device)


def random_probes(a: Tensor, count: int = 8) -> Tensor:
    """``(d, count)`` columns of signs in float64, the same for one ``d`` in every process.

    ``|R v|`` over such ``v`` estimates ``|R|_F`` of a matrix ``R`` that is never formed: the mean of ``|R v|^2`` is
    ``|R|_F^2``, with a relative deviation of at most ``sqrt(2 / count)`` (Hutchinson).
    """
    return _probes(a.shape[-1], count, a.device)


def relative_norm(r: Tensor, reference: Tensor) -> Tensor:
    """``(N,)``: ``|R|_F / |reference|_F`` of batches ``(N, m, k)``, infinite where not finite, 0 for 0 / 0."""
    size = torch.linalg.vector_norm(r, dim=(-2, -1))
    quotient = size / torch.linalg.vector_norm(reference, dim=(-2, -1))
    return torch.where(size == 0, 0.0, quotient).nan_to_num(nan=math.inf, posinf=math.inf)


def block_chunks(n: int, d: int) -> list[slice]:
    """Slices of the batch whose float64 copies stay small."""
    size = max(1, _CHECK_NUMEL // max(1, d * d))
    return [slice(start, start + size) for start in range(0, n, size)]
