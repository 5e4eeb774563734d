"""Launches symmetric products: which tiles, which loads, which strides."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_emopt.linalg.triton import configs
from hf_emopt.linalg.triton.configs import Config
from hf_emopt.linalg.triton.runtime import architecture, interpreting

__all__ = ["symmetric_product", "tile_table"]

_LARGEST_OFFSET = 2**31 - 1


@functools.lru_cache(maxsize=1024)
def _tiles(m: int, block_m: int, block_n: int, group: int) -> tuple[tuple[int, int], ...]:
    rows, cols = -(-m // block_m), -(-m // block_n)
    touching = [(i, j) for i in range(rows) for j in range(cols) if (i + 1) * block_m > j * block_n]
    side_m, side_n = group * max(block_m, block_n) // block_m, group * max(block_m, block_n) // block_n
    return tuple(sorted(touching, key=lambda t: (t[0] // side_m, t[1] // side_n, t[0], t[1])))


@functools.lru_cache(maxsize=1024)
def tile_table(m: int, block_m: int, block_n: int, group: int, device: torch.device) -> Tensor:
    """``(tiles, 2)`` int32: row and column of every tile of an ``m x m`` matrix that touches its lower triangle, in
    squares of ``group`` tiles so that programs that run together read the same rows."""
    return torch.tensor(_tiles(m, block_m, block_n, group), dtype=torch.int32).to(device)


def _as_batch(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.ndim == 2 else x


def _describable(x: Tensor) -> bool:
    """Whether the copy engine can read it: unit stride inside, the other strides and the address multiples of 16 bytes."""
    size = x.element_size()
    outer = (x.stride(-2), *((x.stride(0),) if x.shape[0] > 1 else ()))
    return (
        x.stride(-1) == 1
        and x.data_ptr() % 16 == 0
        and all(stride > 0 and stride * size % 16 == 0 for stride in outer)
        and all(size < 2**31 for size in x.shape)
    )


def _descriptor(x: Tensor, rows: int, cols: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch_stride = x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.stride(1)
    return TensorDescriptor(x, list(x.shape), [batch_stride, x.stride(1), 1], [1, rows, cols])


def _fits_pointers(x: Tensor, block: int) -> bool:
    return block * max(abs(x.stride(-1)), abs(x.stride(-2))) <= _LARGEST_OFFSET


def symmetric_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    *,
    alpha: float,
    beta: float,
    diagonal: float = 0.0,
    second: Tensor | None = None,
    second_diagonal: float = 0.0,
    config: Config | None = None,
    pdl: bool = False,
) -> Tensor:
    """``out = alpha A B^T + beta C + diagonal I``, and ``second`` the same with its own diagonal.

    Args:
        a, b: ``(B, m, k)`` or ``(m, k)``, bfloat16 or float16, any strides; ``A B^T`` must be symmetric.
        c, out, second: ``(B, m, m)`` or ``(m, m)``, rows contiguous; ``out`` and ``second`` of one dtype. ``c`` may be ``out``.
        config: tiles; ``None`` takes them from the table.

    Raises:
        ValueError: strides so long that a tile does not fit in 32-bit offsets, which :mod:`hf_emopt.linalg.symmetric`
            checks before it comes here.
    """
    a, b, out = _as_batch(a), _as_batch(b), _as_batch(out)
    c = None if c is None else _as_batch(c)
    second = None if second is None else _as_batch(second)
    batch, m, k = a.shape
    if config is None:
        config = configs.choose(None if interpreting() else architecture(a.device), batch, m, k, required=True)
    assert config is not None
    if out.dtype == torch.float32 and config.block_m * config.block_n >= 128 * 128 and config.num_warps < 8:
        config = replace(config, num_warps=8)  # the accumulator and its mirror image, both 32 bits wide
    trans = a.stride(-1) != 1
    inputs = (a.mT, b.mT) if trans else (a, b)
    others = tuple(x for x in (c, out, second) if x is not None)
    if config.descriptors and all(_describable(x) for x in (*inputs, *others)):
        _launch_descriptors(inputs, c, out, second, (alpha, beta, diagonal, second_diagonal), config, trans, pdl)
    else:
        _launch_pointers(a, b, c, out, second, (alpha, beta, diagonal, second_diagonal), config, pdl)
    return out


def _launch_descriptors(
    inputs: tuple[Tensor, Tensor],
    c: Tensor | None,
    out: Tensor,
    second: Tensor | None,
    scalars: tuple[float, float, float, float],
    config: Config,
    trans: bool,
    pdl: bool,
) -> None:
    from hf_emopt.linalg.triton.symmetric_kernels import symmetric_product_descriptor_kernel as kernel

    a, b = inputs
    batch, m = out.shape[:2]
    k = a.shape[1] if trans else a.shape[2]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    side = min(block_m, block_n)
    tiles = tile_table(m, block_m, block_n, config.group, out.device)
    d = _descriptor(out, side, side)
    a_desc = _descriptor(a, *((block_k, block_m) if trans else (block_m, block_k)))
    same = b is a or (b.data_ptr() == a.data_ptr() and b.stride() == a.stride())
    b_desc = (
        a_desc
        if same and block_m == block_n
        else _descriptor(b, *((block_k, block_n) if trans else (block_n, block_k)))
    )
    kernel[(tiles.shape[0] * batch,)](
        a_desc,
        b_desc,
        d if c is None else _descriptor(c, block_m, block_n),
        d,
        d if second is None else _descriptor(second, side, side),
        tiles,
        tiles.shape[0],
        k,
        *scalars,
        HAS_C=c is not None,
        HAS_E=second is not None,
        TRANS=trans,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        UPCAST=interpreting(),
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )


def _launch_pointers(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    second: Tensor | None,
    scalars: tuple[float, float, float, float],
    config: Config,
    pdl: bool,
) -> None:
    from hf_emopt.linalg.triton.symmetric_kernels import symmetric_product_pointer_kernel as kernel

    if config.descriptors:
        config = configs._POINTERS
    longest = max(config.block_m, config.block_n, config.block_k)
    if not all(_fits_pointers(x, longest) for x in (a, b, c, out, second) if x is not None):
        raise ValueError(f"strides of {tuple(a.stride())} are too long for a tile of {longest} rows: call .contiguous()")
    batch, m, k = a.shape
    tiles = tile_table(m, config.block_m, config.block_n, config.group, out.device)
    c_like = out if c is None else c
    e = out if second is None else second
    kernel[(tiles.shape[0] * batch,)](
        a,
        b,
        c_like,
        out,
        e,
        tiles,
        tiles.shape[0],
        m,
        k,
        *a.stride(),
        *b.stride(),
        c_like.stride(0),
        c_like.stride(1),
        out.stride(0),
        out.stride(1),
        e.stride(0),
        e.stride(1),
        *scalars,
        HAS_C=c is not None,
        HAS_E=second is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN_K=k % config.block_k == 0,
        UPCAST=interpreting(),
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
