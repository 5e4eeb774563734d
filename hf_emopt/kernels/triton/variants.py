"""Variants of the kernels that are compared with one another: measured, then made the default or removed.

``HF_EMOPT_KERNEL_VARIANTS`` names those to use, separated by commas (none: empty); unset, it is
``estimate,diagonal,clusters``:

* ``estimate``: the cast of a normalization is scaled by an estimate of the norm, in the pass that finds the norm itself; what
  is left of it goes into the first products (:mod:`hf_emopt.kernels.triton.estimated_kernels`).
* ``diagonal``: a program on the diagonal of ``A A^T`` reads its block once.
* ``clusters``: products of many tiles run on clusters of two multiprocessors (:mod:`hf_emopt.kernels.hopper`). Unless the
  variable is set, only where there is one rank, see :func:`on_clusters`.
"""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias, get_args

import torch

from hf_emopt.kernels.triton.runtime import variable

__all__ = ["VARIABLE", "Variant", "chosen", "enabled", "on_clusters"]

VARIABLE = "HF_EMOPT_KERNEL_VARIANTS"
Variant: TypeAlias = Literal["estimate", "diagonal", "clusters"]
_UNSET = "unset"
# What an unset variable stands for.
_DEFAULT = "estimate,diagonal,clusters"


def chosen() -> frozenset[str]:
    """The variants in use. Read at every call, so that a comparison can change them.

    Raises:
        ValueError: the variable names one that does not exist.
    """
    return _parsed(variable(VARIABLE, _DEFAULT))


def enabled(variant: Variant) -> bool:
    """Whether a variant is in use."""
    return variant in chosen()


def on_clusters() -> bool:
    """Whether products may run on clusters.

    Each cluster has its share of a product from the start. Where collectives of other ranks hold some multiprocessors, the
    shares of clusters that find no place are begun when others have ended theirs, and the product can take twice as long. On
    two H200 that was not seen (steps of Muon took 1 to 2 % less under FSDP2, and as long as without under DDP); with more
    ranks, where collectives take more of a step, it is left to the variable until it is measured.
    """
    if variable(VARIABLE, _UNSET) == _UNSET:
        distributed = torch.distributed
        return not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1
    return enabled("clusters")


@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = names - set(get_args(Variant))
    if unknown:
        raise ValueError(
            f"{VARIABLE} names {', '.join(sorted(unknown))}; there are {', '.join(get_args(Variant))}, separated by commas"
        )
    return names
