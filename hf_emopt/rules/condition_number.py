"""Condition numbers of factors, from the root or basis that a rule has: without a decomposition."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST_CONDITION = 1e12
"""Condition numbers are reported up to this, so that they stay numbers where a factor is singular."""

_ITERATIONS = 24
_CHUNK_NUMEL = 2**24


def condition_of_spectrum(eigenvalues: Tensor) -> Tensor:
    """Largest over smallest eigenvalue of ``(N, d)``, at most :data:`LARGEST_CONDITION`: ``(N,)``. It is 1 for zeros."""
    largest = eigenvalues.amax(-1)
    ratio = largest / eigenvalues.amin(-1).clamp_min(largest / LARGEST_CONDITION)
    return torch.where(largest > 0, ratio, 1.0)


def condition_in_basis(factor: Tensor, basis: Tensor) -> Tensor:
    """Condition numbers ``(N,)`` of factors ``(N, d, d)``, with the diagonal of ``Q^T A Q`` as their eigenvalues.

    They are exact for the factors that the basis was computed from, and too small for later ones.
    """
    ratios = []
    for a, q in _chunks(factor, basis):
        q = q.to(a.dtype)
        ratios.append(condition_of_spectrum(((a @ q) * q).sum(-2)))
    return torch.cat(ratios)


def condition_of_root(factor: Tensor, root: Tensor, exponent: float) -> Tensor:
    """Condition numbers ``(N,)`` of ``A + eps I``, from ``A`` and ``R = (A + eps I)^(-exponent)``, both ``(N, d, d)``.

    They are ``lambda_max(A) lambda_max(R)^(1 / exponent)``, by power iteration, which makes them a little too small.
    """
    ratios = []
    for a, r in _chunks(factor, root):
        inverse = (largest_eigenvalue(r.to(a.dtype)) ** (1.0 / exponent)).clamp(max=1e36)  # zeros times it are zeros
        ratios.append((largest_eigenvalue(a) * inverse).clamp(1.0, LARGEST_CONDITION))
    return torch.cat(ratios)


def largest_eigenvalue(a: Tensor) -> Tensor:
    """The largest eigenvalues ``(N,)`` of positive semidefinite ``(N, d, d)``, by power iteration from a fixed vector."""
    d = a.shape[-1]
    # No random numbers: a run is the same with and without them.
    x = torch.sin(torch.arange(1, d + 1, device=a.device, dtype=a.dtype) * 12.9898).expand(a.shape[0], d).unsqueeze(-1)
    tiny = torch.finfo(a.dtype).tiny
    for _ in range(_ITERATIONS):
        x = a @ (x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(tiny))
    return torch.linalg.vector_norm(x, dim=(-2, -1))


def _chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in chunks of bounded size."""
    blocks = max(1, _CHUNK_NUMEL // max(1, first.shape[-1] ** 2))
    yield from zip(first.split(blocks), second.split(blocks))
