"""The list of a rule's hyperparameters: name, type, default, accepted values and the form that a parameter group keeps.

Constructors, ``optim_args``, the defaults of parameter groups and the checks of values are made from this list.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

T = TypeVar("T")

Check = Callable[[Mapping[str, Any], str], None]
"""Takes a group and a key, and raises ``ValueError`` for a value that is out of range."""


@dataclass(eq=False)
class Options:
    """Base of the lists: a dataclass with one field for each hyperparameter.

    A field without a check of its own is checked by its type: ``bool``, ``Literal`` or ``Literal | None``.
    """

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for the first value of a group that is out of range."""
        for key, check in _checks(cls):  # type: ignore[arg-type] # a class is hashable
            check(group, key)

    @classmethod
    def group(cls, values: object) -> dict[str, Any]:
        """The hyperparameters as a parameter group keeps them, from an object with an attribute for each of them."""
        found = ((f, getattr(values, f.name)) for f in fields(cls))
        return {f.name: f.metadata["keep"](value) if "keep" in f.metadata else value for f, value in found}


def option(default: T, check: Check | None = None, keep: Callable[[Any], Any] | None = None) -> T:
    """A field of :class:`Options`.

    Args:
        check: refuses values that are out of range, in the form that groups keep.
        keep: makes that form from the user's value; it leaves an unknown value as it is, for the check to refuse.
    """
    given: dict[str, Any] = {"check": check, "keep": keep}
    return field(default=default, metadata={key: value for key, value in given.items() if value is not None})


def option_names(options: type[Options] = Options) -> set[str]:
    """Names of the options of all rules."""
    return {f.name for f in fields(options)}.union(*map(option_names, options.__subclasses__()))


@functools.cache
def _checks(options: type[Options]) -> tuple[tuple[str, Check], ...]:
    """The checks of a list, in its order."""
    found: list[tuple[str, Check]] = []
    hints = get_type_hints(options)
    for f in fields(options):
        members = get_args(hints[f.name]) or (hints[f.name],)
        kinds = [hint for hint in (hints[f.name], *members) if get_origin(hint) is Literal]
        if "check" in f.metadata:
            found.append((f.name, f.metadata["check"]))
        elif hints[f.name] is bool:
            found.append((f.name, check_flags))
        elif kinds:
            found.append((f.name, partial(check_choice, accepted=get_args(kinds[0]), or_none=type(None) in members)))
    return tuple(found)


def as_tuple(value: Any) -> Any:
    """A sequence as a tuple; anything else as it is, for the check to refuse."""
    return tuple(value) if isinstance(value, Sequence) else value


def dtype_name(dtype: torch.dtype | str | None) -> str | None:
    """A dtype by its torch name without ``torch.``, the form kept in groups; ``None`` stays."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    name = str(dtype).removeprefix("torch.")
    return None if dtype is None else short.get(name, name)


def check_flags(options: Mapping[str, Any], *keys: str) -> None:
    """Refuses values of these keys, or of all, other than ``True`` and ``False``: a text such as ``"no"`` would be true."""
    for key in keys or options:
        if not isinstance(options[key], bool):
            raise ValueError(f"{key}={options[key]!r} must be True or False")


def check_choice(options: Mapping[str, Any], key: str, accepted: Collection[str], *, or_none: bool = False) -> None:
    """Refuses values other than the accepted names."""
    value = options[key]
    if (value is None and or_none) or (isinstance(value, str) and value in accepted):
        return
    raise ValueError(f"{key}={value!r} is not one of {', '.join(accepted)}{' or None' if or_none else ''}")


def check_whole(options: Mapping[str, Any], key: str, low: int, high: int | None = None) -> None:
    """Refuses values other than whole numbers from ``low`` to ``high``."""
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
    """Refuses values other than finite numbers from ``low`` on, or ``above`` it, and below ``high``.

    ``or_none`` is the meaning of ``None``, where it is accepted.
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
    """Refuses values other than two numbers in [0, 1); the second may be 1 for ``sums`` that do not decay."""
    value = options[key]
    betas = [_number(b) for b in value] if isinstance(value, (tuple, list)) else []
    if len(betas) != 2 or not (0.0 <= betas[0] < 1.0 and (0.0 <= betas[1] < 1.0 or (sums and betas[1] == 1.0))):
        raise ValueError(
            f"{name or key}={value!r} must be two numbers in [0, 1){', the second also 1' if sums else ''}"
        )


def _number(value: Any) -> float:
    """The value as a number; NaN where it is none. ``True`` and ``False`` are none."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
