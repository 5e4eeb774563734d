"""Seconds of matrix products and of whole orthogonalizations, from the kernel tables of ``hf_emopt/kernels/triton/tables``.

Sizes that are not in a table are interpolated in operations a second, over the number of elements of the result and the depth
of the product: how the device is filled, and how much of a tile's time is spent on its ends.
"""

from __future__ import annotations

import functools
import math

from hf_emopt.kernels.triton.configs import chosen_table, family, load_table, measured
from hf_emopt.linalg.coefficients import resolve_coefficients
from hf_emopt.linalg.cost import Method, gram_segments
from hf_emopt.linalg.newton_schulz import gram_pays
from hf_emopt.rules.base import Group
from hf_emopt.tools.forecast.hardware import GPUS, LAUNCH_SECONDS, SOFTENING, Gpu

_REFERENCE = GPUS["h200"]
"""The GPU on which the table was measured; an H100 has the same rates."""


@functools.cache
def _points(architecture: int, table: str, symmetric: bool, with_c: bool) -> tuple[tuple[float, float, float], ...]:
    """``(log2 elements of the result, log2 depth, log2 operations a second)`` of each measured product.

    ``table`` is the one that the environment names, so that another one is read when it changes.
    """
    found = {}
    for e in sorted(load_table(architecture), key=lambda e: -e.ms):  # the fastest of a problem last
        if e.with_c == with_c:
            ms = e.ms if symmetric else e.general_ms
            rate = 2 * e.batch * e.m * e.m * e.k / (ms * 1e-3)
            found[e.batch, e.m, e.k] = (math.log2(e.batch * e.m * e.m), math.log2(e.k), math.log2(rate))
    return tuple(found.values())


@functools.lru_cache(maxsize=65536)
def _rate(architecture: int, table: str, symmetric: bool, with_c: bool, elements: float, depth: float) -> float:
    """Operations a second, by inverse square distance."""
    total = weights = 0.0
    for x, y, z in _points(architecture, table, symmetric, with_c):
        distance = (x - elements) ** 2 + (y - depth) ** 2 + SOFTENING
        total += z / distance**2
        weights += 1 / distance**2
    return float(2.0 ** (total / weights))


def has_kernels(gpu: Gpu) -> bool:
    """Whether this package's kernels are measured, and so used, on the GPU's architecture."""
    return family(gpu.architecture) == gpu.architecture and measured(gpu.architecture)


def product_seconds(
    gpu: Gpu, batch: float, m: int, n: int, k: int, *, symmetric: bool = False, with_c: bool = False
) -> float:
    """``batch`` products of 16-bit ``(m, k) x (k, n)``, in half where ``symmetric``, with another matrix added ``with_c``."""
    flops = 2 * batch * m * n * k
    if flops == 0:
        return 0.0
    where = (math.log2(batch * m * n), math.log2(k))
    # Where nothing is measured: general products at the measured card's rates, scaled by datasheets.
    architecture = gpu.architecture if has_kernels(gpu) else _REFERENCE.architecture
    rate = _rate(architecture, chosen_table(), symmetric and has_kernels(gpu), with_c, *where)
    rate *= gpu.bf16 / _REFERENCE.bf16
    return float(max(flops / rate, LAUNCH_SECONDS))


def newton_schulz_seconds(gpu: Gpu, batch: int, m: int, n: int, group: Group, form: Method | None = None) -> float:
    """Products of the orthogonalization of ``(batch, m, n)``, as hyperparameters and GPU have it done.

    ``form`` is that of the iteration, ``None`` for the one that the shape is given.
    """
    short, long = min(m, n), max(m, n)
    steps = int(group["ns_steps"])
    if not _kernels_run(gpu, group):
        wide = 2.0 if group["ns_dtype"] == "float32" else 1.0  # in TF32 at best
        each = product_seconds(gpu, batch, short, short, long)
        each += product_seconds(gpu, batch, short, short, short, with_c=True)
        each += product_seconds(gpu, batch, short, long, short, with_c=True)
        return wide * steps * each
    square = product_seconds(gpu, batch, short, short, short, symmetric=True)
    square_c = product_seconds(gpu, batch, short, short, short, symmetric=True, with_c=True)
    gram = product_seconds(gpu, batch, short, short, long, symmetric=True)
    apply = product_seconds(gpu, batch, short, long, short)
    sixteen = group["ns_dtype"] == "bfloat16"
    if form == "standard" or (form is None and (sixteen or not gram_pays(m, n))):
        second = square_c if sixteen else square
        return steps * (gram + second + apply)
    segments = gram_segments(steps, group["ns_coefficients"])
    return segments * (gram + apply) + steps * square_c + 3 * (steps - segments) * square


def _kernels_run(gpu: Gpu, group: Group) -> bool:
    scale_free = group["compat"] is None and group["eps"] is None
    frobenius = resolve_coefficients(group["ns_coefficients"], group["ns_steps"]).scaling == "frobenius"
    return has_kernels(gpu) and scale_free and frobenius and group["ns_dtype"] in (None, "float16", "bfloat16")
