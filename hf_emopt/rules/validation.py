"""Hyperparameters that are out of range are refused, with their name, their value and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any

__all__ = ["check_betas", "check_choice", "check_flags", "check_number", "check_whole"]


def check_flags(options: Mapping[str, Any], *keys: str) -> None:
    """Each of the keys, or of all, is ``True`` or ``False``: a text such as ``"no"`` would count as true."""
    for key in keys or options:
        if not isinstance(options[key], bool):
            raise ValueError(f"{key}={options[key]!r} must be True or False")


def check_choice(options: Mapping[str, Any], key: str, accepted: Collection[str], *, or_none: bool = False) -> None:
    """One of the names; what is not a name is compared to none of them."""
    value = options[key]
    if (value is None and or_none) or (isinstance(value, str) and value in accepted):
        return
    raise ValueError(f"{key}={value!r} is not one of {', '.join(accepted)}{' or None' if or_none else ''}")


def check_whole(options: Mapping[str, Any], key: str, low: int, high: int | None = None) -> None:
    """A whole number of at least ``low``, and of at most ``high``."""
    value = options[key]
    if not isinstance(value, Integral) or isinstance(value, bool) or not low <= int(value) <= (high or int(value)):
        ends = f", at least {low}" if high is None else f" from {low} to {high}"
        raise ValueError(f"{key}={value!r} must be a whole number{ends}")


def check_number(
    options: Mapping[str, Any],
    key: str,
    low: float = 0.0,
    high: float = math.inf,
    *,
    above: bool = False,
    or_none: str | None = None,
) -> None:
    """A finite number from ``low`` on, or ``above`` it, and below ``high``.

    Args:
        or_none: what ``None`` stands for, where it is accepted.
    """
    value = options[key]
    if value is None and or_none is not None:
        return
    number = _number(value)
    if not ((low < number if above else low <= number) and number < high):  # no comparison holds for NaN
        if high < math.inf:
            accepted = f"in {'(' if above else '['}{low:g}, {high:g})"
        else:
            accepted = f"{'above' if above else 'at least'} {low:g}, and finite"
        more = "" if or_none is None else f", or None {or_none}"
        raise ValueError(f"{key}={value!r} must be {accepted}{more}")


def check_betas(options: Mapping[str, Any], key: str = "betas", *, name: str | None = None, sums: bool = False) -> None:
    """Two numbers in [0, 1).

    Args:
        name: in the message, where it is not the key.
        sums: the second may be 1, for a sum that does not decay.
    """
    value = options[key]
    betas = [_number(b) for b in value] if isinstance(value, (tuple, list)) else []
    if len(betas) != 2 or not (0.0 <= betas[0] < 1.0 and (0.0 <= betas[1] < 1.0 or (sums and betas[1] == 1.0))):
        raise ValueError(
            f"{name or key}={value!r} must be two numbers in [0, 1){', the second also 1' if sums else ''}"
        )


def _number(value: Any) -> float:
    """NaN for what is no number, ``True`` and ``False`` among it."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
