"""Launches symmetric products: which tiles, which loads, which strides."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_emopt.kernels.hopper import launch as cluster_launch
from hf_emopt.kernels.triton import configs, variants
from hf_emopt.kernels.triton.configs import Config
from hf_emopt.kernels.triton.descriptors import describable, descriptor
from hf_emopt.kernels.triton.launching import launch, specialization
from hf_emopt.kernels.triton.runtime import architecture, interpreting

__all__ = ["symmetric_product", "tile_table"]

_LARGEST_OFFSET = 2**31 - 1


class _Scalars(NamedTuple):
    """``alpha (A B^T + beta C) + diagonal I``, or with ``last`` ``alpha A B^T + beta C + diagonal I``, times powers of
    numbers in memory; see ``CORRECTED`` of the kernels."""

    alpha: float
    beta: float
    diagonal: float
    correction: Tensor | None
    power: int
    last: bool


class _Form(NamedTuple):
    """What is compiled for a product beside its tiles."""

    trans: bool
    diagonal: int


@functools.lru_cache(maxsize=1024)
def _tiles(m: int, block_m: int, block_n: int, group: int) -> tuple[tuple[int, int], ...]:
    rows, cols = -(-m // block_m), -(-m // block_n)
    touching = [(i, j) for i in range(rows) for j in range(cols) if (i + 1) * block_m > j * block_n]
    side_m, side_n = group * max(block_m, block_n) // block_m, group * max(block_m, block_n) // block_n
    side = min(block_m, block_n)

    def half(tile: tuple[int, int]) -> bool:
        """One of its two squares is above the diagonal: half the work, and last, to fill what the others leave."""
        return block_m != block_n and tile[0] * block_m + (block_m > block_n) * side == tile[1] * block_n

    return tuple(sorted(touching, key=lambda t: (half(t), t[0] // side_m, t[1] // side_n, t[0], t[1])))


@functools.lru_cache(maxsize=1024)
def tile_table(m: int, block_m: int, block_n: int, group: int, device: torch.device) -> tuple[Tensor, int]:
    """``(tiles, 2)`` int32, and their number: row and column of every tile of an ``m x m`` matrix that touches its lower
    triangle, in squares of ``group`` tiles so that programs that run together read the same rows."""
    tiles = _tiles(m, block_m, block_n, group)
    return torch.tensor(tiles, dtype=torch.int32).to(device), len(tiles)


def _as_batch(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.ndim == 2 else x


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
    config: Config | None = None,
    correction: Tensor | None = None,
    power: int = 1,
) -> Tensor:
    """``out = alpha A B^T + beta C + diagonal I``.

    Args:
        a, b: ``(B, m, k)`` or ``(m, k)``, bfloat16 or float16, any strides; ``A B^T`` must be symmetric.
        c, out: ``(B, m, m)`` or ``(m, m)``, rows contiguous. ``c`` may be ``out``.
        config: tiles; ``None`` takes them from the table.
        correction: ``(B,)`` float32 on the device, ``t``: the result is ``t (alpha A B^T + beta C + diagonal I)`` for
            ``power=1``, and ``t^2 alpha A B^T + diagonal I`` for ``power=2``, which takes no ``c``. ``(B, 2)`` for
            ``power=3``, ``t`` and ``b``: ``t^2 alpha A B^T + b C + diagonal I``, whatever ``beta`` is.

    Raises:
        ValueError: strides so long that a tile does not fit in 32-bit offsets, ``alpha`` 0 with a ``beta`` for a 16-bit
            result, a ``c`` with ``power=2``, or none, or a 16-bit result, with ``power=3``.
    """
    last = c is not None and out.dtype == torch.float32
    if alpha == 0.0 and c is not None and beta != 0.0 and not last:
        raise ValueError("alpha must not be 0 with beta C of 16 bits: sums start from beta / alpha C")
    if correction is not None and power == 2 and c is not None:
        raise ValueError("a correction with power=2 belongs to alpha alone: leave out c")
    if correction is not None and power == 3 and (c is None or correction.ndim != 2):
        raise ValueError("a correction with power=3 is (B, 2), the second number for C: give c")
    if correction is not None and power == 3 and not last:
        raise ValueError(f"a correction with power=3 is for float32 results, got {out.dtype}")
    a, b, out = _as_batch(a), _as_batch(b), _as_batch(out)
    c = None if c is None else _as_batch(c)
    chosen = variants.chosen()
    trans = a.stride(-1) != 1
    inputs = (a.mT, b.mT) if trans else (a, b)
    power = 0 if correction is None else power
    config = _configured(config, a, b, c, out, power)
    if config.clusters:
        cluster_launch.cluster_product(
            a, b, c, out, alpha=alpha, beta=beta, diagonal=diagonal, correction=correction, power=power,
            group=config.group, same=_same(a, b),
        )  # fmt: skip
        return out
    others = (out,) if c is None else (c, out)
    form = _Form(trans, diagonal=0 if "diagonal" not in chosen else 2 if _same(a, b) else 1)
    # Sums start from C, or end with it.
    scalars = _Scalars(alpha, beta if last else beta / alpha if beta else 0.0, diagonal, correction, power, last)
    if config.descriptors and all(describable(x) for x in (*inputs, *others)):
        _launch_descriptors(inputs, c, out, scalars, config, form)
    else:
        _launch_pointers(a, b, c, out, scalars, config, form)
    return out


def _configured(config: Config | None, a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, power: int) -> Config:
    """The configuration to launch: the one asked for as far as it can run, or that of the table."""
    batch, m, k = a.shape
    wide = out.dtype == torch.float32

    def on_clusters() -> bool:  # asked where the table names them
        return power < 3 and _clusters_take(a, b, c, out, a.stride(-1) != 1)

    if config is not None:
        if config.clusters and not on_clusters():
            config = replace(config, clusters=False)
        return configs.with_wide_registers(config) if wide and not config.clusters else config
    capability = None if interpreting() else architecture(a.device)
    if wide:
        return configs.choose_wide(capability, batch, m, k, c is not None)
    config = configs.choose(capability, batch, m, k, c is not None, clusters=True)
    if config.clusters and not (variants.on_clusters() and on_clusters()):
        return configs.choose(capability, batch, m, k, c is not None)
    return config


def _clusters_take(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor, trans: bool) -> bool:
    return not trans and cluster_launch.takes(a, b, c, out)


def _same(a: Tensor, b: Tensor) -> bool:
    return b.data_ptr() == a.data_ptr() and b.stride() == a.stride()


def _options(config: Config) -> dict[str, Any]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}


def _launch_descriptors(
    inputs: tuple[Tensor, Tensor],
    c: Tensor | None,
    out: Tensor,
    scalars: _Scalars,
    config: Config,
    form: _Form,
) -> None:
    from hf_emopt.kernels.triton.symmetric_kernels import symmetric_product_descriptor_kernel as kernel

    a, b = inputs
    batch, m = out.shape[:2]
    k = a.shape[1] if form.trans else a.shape[2]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    side = min(block_m, block_n)
    tiles, count = tile_table(m, block_m, block_n, config.group, out.device)
    same = block_m == block_n and _same(a, b)
    longer = b if block_m < block_n else a

    def factor(x: Tensor, rows: int) -> Any:
        return descriptor(x, *((block_k, rows) if form.trans else (rows, block_k)))

    arguments = (
        factor(a, block_m),
        None if same else factor(b, block_n),
        None if block_m == block_n else factor(longer, side),
        None if c is None else descriptor(c, *((side, side) if scalars.last else (block_m, block_n))),
        descriptor(out, side, side),
        scalars.correction,
        tiles,
        count,
        k,
        *scalars[:3],
        c is not None,
        same,
        form.trans,
        block_m,
        block_n,
        block_k,
        interpreting(),
        scalars.power,
        form.diagonal,
        scalars.last,
    )
    special = (k % 16 == 0, k == 1, _special(scalars))
    key = ("descriptors", config, a.dtype, out.dtype, c is None, same, form, special, a.device)
    launch(kernel, key, count * batch, arguments, _options(config), out.device)


def _special(scalars: _Scalars) -> Hashable:
    correction = scalars.correction
    return None if correction is None else (scalars.power, specialization((correction,), ()))


def _launch_pointers(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    scalars: _Scalars,
    config: Config,
    form: _Form,
) -> None:
    from hf_emopt.kernels.triton.symmetric_kernels import symmetric_product_pointer_kernel as kernel

    if config.descriptors:
        config = configs.POINTERS
    longest = max(config.block_m, config.block_n, config.block_k)
    if not all(_fits_pointers(x, longest) for x in (a, b, c, out) if x is not None):
        raise ValueError(
            f"strides of {tuple(a.stride())} are too long for a tile of {longest} rows: call .contiguous()"
        )
    batch, m, k = a.shape
    tiles, count = tile_table(m, config.block_m, config.block_n, config.group, out.device)
    c_like = out if c is None else c
    integers = (m, k, *a.stride(), *b.stride(), *c_like.stride()[:2], *out.stride()[:2])
    arguments = (
        a,
        b,
        c_like,
        out,
        scalars.correction,
        tiles,
        count,
        *integers,
        *scalars[:3],
        c is not None,
        config.block_m,
        config.block_n,
        config.block_k,
        k % config.block_k == 0,
        interpreting(),
        scalars.power,
        scalars.last,
    )
    special = (specialization((a, b, c_like, out), integers), _special(scalars))
    key = ("pointers", config, c is None, k % config.block_k == 0, special, a.device)
    launch(kernel, key, count * batch, arguments, _options(config), out.device)
