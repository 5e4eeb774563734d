"""Variants of the kernels that are compared with one another: measured, then made the default or removed.

``HF_EMOPT_KERNEL_VARIANTS`` names those to use, separated by commas (none: empty); unset, it is ``estimate,diagonal``:

* ``estimate``: the cast of a normalization is scaled by an estimate of the norm, in the pass that finds the norm itself; what
  is left of it goes into the first products (:mod:`hf_emopt.linalg.triton.estimated_kernels`).
* ``diagonal``: a program on the diagonal of ``A A^T`` reads its block once. Programs that stay do so in any case.
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias, get_args

from hf_emopt.linalg.triton.runtime import variable

__all__ = ["VARIABLE", "Variant", "chosen", "enabled"]

VARIABLE = "HF_EMOPT_KERNEL_VARIANTS"
Variant: TypeAlias = Literal["estimate", "diagonal"]
# What an unset variable stands for.
_DEFAULT = "estimate,diagonal"


def chosen() -> frozenset[str]:
    """The variants in use. Read at every call, so that a comparison can change them.

    Raises:
        ValueError: the variable names one that does not exist.
    """
    return _parsed(variable(VARIABLE, _DEFAULT))


def enabled(variant: Variant) -> bool:
    """Whether a variant is in use."""
    return variant in chosen()


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = names - set(get_args(Variant))
    if unknown:
        raise ValueError(
            f"{VARIABLE} names {', '.join(sorted(unknown))}; there are {', '.join(get_args(Variant))}, separated by commas"
        )
    return names
