"""Launches products of split factors; see :mod:`split_kernels`."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton.configs import family
from hf_emopt.kernels.triton.descriptors import describable, descriptor
from hf_emopt.kernels.triton.half_launch import BLOCK, OPTIONS, programs_of
from hf_emopt.kernels.triton.launching import launch, specialization
from hf_emopt.kernels.triton.runtime import architecture, interpreting
from hf_emopt.kernels.triton.symmetric_launch import tile_table

__all__ = ["LOW", "split", "split_product", "takes"]

LOW = 2.0**-11
"""What the second part of a factor is to be multiplied by."""

# Two sums of 128 x 128 take 128 registers of each thread; three stages of four blocks 192 KiB.
_SIDE, _BLOCK_K = 128, 64
_PRODUCT_OPTIONS = {"num_warps": 8, "num_stages": 3}
_GROUP = 16

_Parts = tuple[Tensor, Tensor]


def takes(*matrices: Tensor) -> bool:
    """Whether the copy engine can read and write all of them, and the device has the shared memory (sm_90)."""
    capability = None if interpreting() else architecture(matrices[0].device)
    return (capability is None or family(capability) == 90) and all(x.numel() and describable(x) for x in matrices)


@functools.lru_cache(maxsize=1024)
def _all_tiles(m: int, block_m: int, block_n: int, group: int, device: torch.device) -> tuple[Tensor, int]:
    """As :func:`tile_table`, of the whole matrix."""
    rows, cols = -(-m // block_m), -(-m // block_n)
    tiles = sorted(itertools.product(range(rows), range(cols)), key=lambda t: (t[0] // group, t[1] // group, *t))
    return torch.tensor(tiles, dtype=torch.int32).to(device), len(tiles)


def split(x: Tensor, scale: float, diagonal: float) -> _Parts:
    """Parts of ``scale X + diagonal I`` of ``(N, d, d)`` contiguous float32."""
    from hf_emopt.kernels.triton.split_kernels import split_kernel

    batch, d = x.shape[:2]
    high, low = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for _ in range(2))
    programs = programs_of(d * d, batch, x.device)
    integers = (d * d, d, programs)
    key = ("split", specialization((x, high, low), integers), x.device)
    arguments = (x, high, low, *integers, scale, diagonal, LOW, BLOCK)
    launch(split_kernel, key, batch * programs, arguments, OPTIONS, x.device)
    return high, low


def split_product(
    a: _Parts,
    b: _Parts,
    alpha: float,
    c: Tensor | _Parts | None,
    beta: float,
    diagonal: float,
    active: Tensor | None,
    wide: bool,
    wide_diagonal: float,
    out: Tensor | None,
    parts: bool,
    trans: tuple[bool, bool] = (False, False),
    symmetric: bool = True,
) -> tuple[Tensor | None, _Parts | None]:
    """See :func:`hf_emopt.linalg.split_products.split_product`; of matrices which :func:`takes`.

    Args:
        trans: whether the transpose of A, and B itself instead of its transpose, is what lies in memory.
        symmetric: of the product one triangle is computed, and mirrored.
    """
    from hf_emopt.kernels.triton.split_kernels import split_product_kernel as kernel

    side, block_k = (32, 32) if interpreting() else (_SIDE, _BLOCK_K)
    like = a[0]
    batch, d = like.shape[:2]
    if wide and out is None:
        out = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    new = (torch.empty_like(like), torch.empty_like(like)) if parts else None
    tiles, count = (tile_table if symmetric else _all_tiles)(d, side, side, _GROUP, like.device)

    def square(x: Tensor | None) -> Any:
        return None if x is None else descriptor(x, side, side)

    added = (c, None) if isinstance(c, Tensor) or c is None else c
    arguments = (
        *(
            descriptor(x, *((block_k, side) if turned else (side, block_k)))
            for factor, turned in zip((a, b), trans)
            for x in factor
        ),
        *(square(x) for x in added),
        square(out),
        *((None, None) if new is None else (square(x) for x in new)),
        active,
        tiles,
        count,
        d,
        alpha,
        beta,
        diagonal,
        wide_diagonal,
        -1 if c is None else 0 if isinstance(c, Tensor) else 1,
        active is not None,
        wide,
        parts,
        *trans,
        symmetric,
        LOW,
        side,
        block_k,
        interpreting(),
    )
    key = (
        "split product",
        arguments[17:24],
        d % 16 == 0,
        d == 1,
        active is None or active.data_ptr() % 16,
        like.device,
    )
    launch(kernel, key, count * batch, arguments, _PRODUCT_OPTIONS, like.device)
    return out, new
