"""The stored form of a symmetric factor: in full, as one triangle, in 16 bits, or in 8.

``|a_ij| <= sqrt(a_ii a_jj)``, so the 8-bit and 16-bit forms keep the diagonal in float32 and the correlations
``a_ij / sqrt(a_ii a_jj)`` of one triangle in few bits (after S. Wang et al., "4-bit Shampoo", arXiv:2405.18144, and J. Li et
al., "Memory-Efficient 4-bit Preconditioned Stochastic Optimization", arXiv:2412.10663). They are rounded stochastically: a
moving average moves by less than one level a step, and nearest rounding would never let go of the first value.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hf_emopt.formats.master_weights import round_stochastically

FactorStorageName = Literal["float32", "packed", "bfloat16", "float16", "int8"]
FACTOR_STORAGE: tuple[str, ...] = get_args(FactorStorageName)

_LEVELS = 127.0


def bytes_per_element(storage: str) -> float:
    """Bytes for each element of the full ``d x d`` matrix, for large ``d``."""
    return {"float32": 4.0, "packed": 2.0, "bfloat16": 1.0, "float16": 1.0, "int8": 0.5}[storage]


def init_factor(key: str, lead: tuple[int, ...], d: int, storage: str, like: Tensor) -> dict[str, Tensor]:
    """Zero factors ``(*lead, d, d)`` under ``key`` and, where the form needs more than one tensor, ``key`` + suffix.

    ``like`` gives the device and, for ``"float32"`` and ``"packed"``, the dtype.
    """
    if storage == "float32":
        return {key: torch.zeros(*lead, d, d, dtype=like.dtype, device=like.device)}
    if storage == "packed":
        return {key: torch.zeros(*lead, d * (d + 1) // 2, dtype=like.dtype, device=like.device)}
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}[storage]
    return {
        key: torch.zeros(*lead, d * (d - 1) // 2, dtype=kind, device=like.device),
        f"{key}.diagonal": torch.zeros(*lead, d, dtype=torch.float32, device=like.device),
    }


def load_factor(state: dict[str, Tensor], key: str, d: int, storage: str) -> Tensor:
    """Factors ``(*lead, d, d)``: the stored tensor itself for ``"float32"``, a new one otherwise."""
    value = state[key]
    if storage == "float32":
        return value
    if storage == "packed":
        rows, cols = _triangle(d, 0, value.device)
        full = value.new_zeros(*value.shape[:-1], d, d)
    else:
        diagonal = state[f"{key}.diagonal"]
        rows, cols = _triangle(d, -1, value.device)
        scale = _scales(diagonal, rows, cols)
        value = value.float() * (scale / _LEVELS if storage == "int8" else scale)
        full = torch.diag_embed(diagonal)
    full[..., rows, cols] = value
    full[..., cols, rows] = value
    return full


def store_factor(
    state: dict[str, Tensor],
    key: str,
    factor: Tensor,
    storage: str,
    generator: torch.Generator | None = None,
    ok: Tensor | None = None,
) -> None:
    """Stores ``factor`` ``(*lead, d, d)`` in place; the inverse of :func:`load_factor`.

    Args:
        generator: noise of the rounding to 16 and 8 bits; replicas must seed it alike.
        ok: scalar bool on the device. ``False`` leaves rounded entries as they are, to the bit. It is for a ``factor`` that
            is still the result of :func:`load_factor`: dividing by the scales does not always undo multiplying by them.
    """
    value, d = state[key], factor.shape[-1]
    if storage == "float32":
        if value is not factor:
            value.copy_(factor)
        return
    if storage == "packed":
        rows, cols = _triangle(d, 0, factor.device)
        value.copy_(factor[..., rows, cols])
        return
    diagonal = factor.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
    rows, cols = _triangle(d, -1, factor.device)
    correlation = factor[..., rows, cols] / _scales(diagonal, rows, cols).clamp_min(torch.finfo(torch.float32).tiny)
    rounded = _rounded(correlation.clamp_(-1.0, 1.0), storage, generator)
    value.copy_(rounded if ok is None else torch.where(ok, rounded, value))
    state[f"{key}.diagonal"].copy_(diagonal)


def _rounded(correlation: Tensor, storage: str, generator: torch.Generator | None) -> Tensor:
    """Correlations rounded up or down, with the probability that makes the expectation exact, in the stored dtype."""
    if generator is None:
        raise ValueError("rounding stochastically needs a generator of its own")
    if storage == "bfloat16":
        return round_stochastically(correlation.float(), torch.bfloat16, generator)
    noise = torch.rand(correlation.shape, generator=generator, dtype=torch.float32, device=correlation.device)
    if storage == "int8":
        # Just below 1, the sum may round up to a level that does not exist, and would wrap around.
        return (correlation * _LEVELS + noise).floor_().clamp_(-_LEVELS, _LEVELS).to(torch.int8)
    # Spacings of float16: 2**-10 of the power of two below a number, and 2**-24 below 2**-14.
    spacing = torch.exp2((torch.frexp(correlation).exponent.clamp_min(-13) - 11).float())
    return (correlation / spacing + noise).floor_().mul_(spacing).clamp_(-1.0, 1.0).half()


def _scales(diagonal: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    root = diagonal.sqrt()
    return root[..., rows] * root[..., cols]


def _triangle(d: int, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    indices = torch.tril_indices(d, d, offset, device=device)
    return indices[0], indices[1]
