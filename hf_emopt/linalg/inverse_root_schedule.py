"""Polynomials of coupled inverse Newton iterations, chosen on the host for the bounds of a spectrum.

A step multiplies ``M`` by ``P(M)^p``, so an eigenvalue becomes ``f(m) = m P(m)^p``. Newton's own ``P = ((p + 1) - m) / p``
lifts a small one by ``(1 + 1/p)^p < e``. Of all ``P`` of a degree for which ``f`` stays below 1, the one here lifts it most
while no other falls below the lifted one, nor below 1/2: the idea of Polar Express (arXiv 2505.16932), with a floor. Steps
that leave the identity where it is finish. A ``P`` of the second degree holds a product, whose rounding does not commute
with ``M``, so it is for products that are more exact than the root has to be.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

Polynomial: TypeAlias = "tuple[float, ...]"
"""``P(M)`` by its coefficients, lowest first."""

MatrixT = TypeVar("MatrixT")

_FLOOR = 0.5
# The error that the last steps start from: they are worth little above.
_NEAR = 0.1


def finishes(polynomial: Polynomial, p: int) -> bool:
    """Whether a step of a schedule is one of those at the end, which square or cube the error."""
    slope = sum(k * c for k, c in enumerate(polynomial))
    return abs(sum(polynomial) - 1.0) < 1e-9 and abs(slope + 1 / p) < 1e-9


def power_deviation(
    d: MatrixT, n: int, add: Callable[[MatrixT, MatrixT], Any], times: Callable[..., MatrixT]
) -> MatrixT:
    """``(I + D)^n - I`` by squaring. ``times`` takes ``(A, B, C, beta)`` to ``A B + beta C``; ``C`` may come from ``add``."""
    result: MatrixT | None = None
    while True:
        if n & 1:
            result = d if result is None else times(result, d, add(result, d), 1.0)
        n >>= 1
        if n == 0:
            assert result is not None
            return result
        d = times(d, d, d, 2.0)


@functools.lru_cache(maxsize=256)
def newton_schedule(p: int, lowest: float, unit: float, degree: int = 1) -> tuple[Polynomial, ...]:
    """``P`` of every step, for ``M_0`` with its spectrum in ``[lowest, 1]`` and products of unit roundoff ``unit``. The steps
    before the last ones have degree 1 or 2."""
    return (_first_degree if degree == 1 else _second_degree)(p, lowest, unit)


def _first_degree(p: int, lowest: float, unit: float) -> tuple[Polynomial, ...]:
    steps: list[Polynomial] = []
    error = (1 - lowest) / (1 + lowest)
    # From there on the steps below halve it at least, for any p.
    near = min(1 / 19, 1 / (p + 1))
    while error > near:
        t = _steepest_line(p, lowest)
        peak = (p / (p + 1)) ** p / ((p + 1) * t)  # of m (1 - t m)^p, at m = 1 / ((p + 1) t)
        lowest = min(lowest * (1 - t * lowest) ** p, (1 - t) ** p) / peak
        error = (1 - lowest) / (1 + lowest)
        centre = 1.0 if error > near else 2 / (1 + lowest)  # the last of these steps puts 1 in the middle
        a = (centre / peak) ** (1 / p)
        steps.append((a, -a * t))
    while error > unit:
        steps.append(((p + 1) / p, -1 / p))
        error = 0.5 * (p + 1) * error * error
    return (*steps, ((p + 1) / p, -1 / p))


def _steepest_line(p: int, lowest: float) -> float:
    """The largest ``t`` for which ``m (1 - t m)^p`` at 1 is at least its value at ``lowest`` and half its peak."""
    low, high = 1 / (p + 1), 1.0  # the peak is at 1 for the former, and the value at 1 is 0 for the latter
    for _ in range(60):
        t = 0.5 * (low + high)
        peak = (p / (p + 1)) ** p / ((p + 1) * t)
        fits = (1 - t) ** p >= max(lowest * (1 - t * lowest) ** p, _FLOOR * peak if lowest < _FLOOR else 0.0)
        low, high = (t, high) if fits else (low, t)
    return low


def _second_degree(p: int, lowest: float, unit: float) -> tuple[Polynomial, ...]:
    steps: list[Polynomial] = []
    error = (1 - lowest) / (1 + lowest)
    while error > _NEAR:
        sigma, t, peak, lowest = _steepest(p, lowest)
        error = (1 - lowest) / (1 + lowest)
        centre = 1.0 if error > _NEAR else 2 / (1 + lowest)
        a = (centre * t / peak) ** (1 / p)
        steps.append((a, -a * t, a * sigma * t * t))
    return (*steps, *_finish(p, error, unit))


def _finish(p: int, error: float, unit: float) -> tuple[Polynomial, ...]:
    """The cheapest steps that leave the identity alone, of second and of third order, and one of second order at the end.
    Before it the error is far below the root of ``unit``, and then it is its square."""
    second: Polynomial = ((p + 1) / p, -1 / p)
    # I + E / p + (p + 1) E^2 / (2 p^2), E = I - M: three terms of the series of (I - E)^(-1/p).
    one, two = 1 / p, (p + 1) / (2 * p * p)
    third: Polynomial = (1 + one + two, -one - 2 * two, two)
    target = math.sqrt(unit) / 32

    def after(choice: tuple[Polynomial, ...]) -> float:
        value = error
        for step in choice:
            value = (p + 1) / (2 * p) * value**2 if step is second else (p + 1) * (2 * p + 1) / (6 * p * p) * value**3
        return value

    choices = [c for count in range(6) for c in itertools.product((third, second), repeat=count) if after(c) <= target]
    # A step of third order has a product more than one of second order, which has one for each squaring, and two.
    cost = 2 + math.ceil(math.log2(p))
    best = min(choices, key=lambda c: (sum(cost + (step is third) for step in c), after(c)))
    return (*best, second)


def _steepest(p: int, lowest: float) -> tuple[float, float, float, float]:
    """``sigma`` and ``t`` of ``P = a (1 - t m + sigma t^2 m^2)``, the peak of ``h``, and the least of ``f`` with peak 1.

    In ``u = t m``, ``h(u) = u (1 - u + sigma u^2)^p`` has a peak, a dip and a rise. The dip is as deep as allowed, and ``t``
    such that at ``m = 1`` the curve has come back to its peak.
    """

    def shape(floor: float) -> tuple[float, float, float, float]:
        sigma = _bisect(
            lambda s: _extrema(p, s)[1] >= floor * _extrema(p, s)[0], 0.25, (p + 1) ** 2 / (4 * (2 * p + 1))
        )
        peak, _, dip_at = _extrema(p, sigma)
        top = 2 * dip_at
        while _h(p, sigma, top) < peak:
            top *= 2
        t = _bisect(lambda u: _h(p, sigma, u) >= peak, dip_at, top)
        return sigma, t, peak, _h(p, sigma, t * lowest) / peak

    low = shape(_FLOOR)
    if low[3] < _FLOOR:
        return low
    floor = _bisect(lambda x: shape(x)[3] <= x, _FLOOR, 1 - 1e-6)
    found = shape(floor)
    return (*found[:3], min(floor, found[3]))


def _h(p: int, sigma: float, u: float) -> float:
    return u * (1 - u + sigma * u * u) ** p


def _extrema(p: int, sigma: float) -> tuple[float, float, float]:
    """Values of ``h`` at its peak and its dip, and where the dip is."""
    root = math.sqrt(max(0.0, (p + 1) ** 2 - 4 * (2 * p + 1) * sigma))
    at, dip_at = ((p + 1 + sign * root) / (2 * (2 * p + 1) * sigma) for sign in (-1, 1))
    return _h(p, sigma, at), _h(p, sigma, dip_at), dip_at


def _bisect(holds, low: float, high: float) -> float:  # type: ignore[no-untyped-def]
    """Where a condition begins to hold that does at ``high``."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
