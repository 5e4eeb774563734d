"""Optimizers by the names that users write."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from hf_emopt.optimizers import OPTIMIZERS as OPTIMIZERS
from hf_emopt.optimizers import PREFIX as PREFIX
from hf_emopt.optimizers.base import MatrixOptimizer


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'muon'?"`` with the known name nearest to an unknown one; empty where none is near."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def optimizer_class(name: str) -> type[MatrixOptimizer]:
    """The class of ``name``, with or without the prefix ``emopt_``.

    Raises:
        ValueError: for an unknown name; the message has all names and the nearest one.
    """
    optimizer_cls = OPTIMIZERS.get(name.removeprefix(PREFIX))
    if optimizer_cls is None:
        raise ValueError(f"{name!r} is not one of {', '.join(OPTIMIZERS)}{did_you_mean(name, OPTIMIZERS)}")
    return optimizer_cls


def unwrap_optimizer(optimizer: Any) -> MatrixOptimizer | None:
    """The :class:`MatrixOptimizer` under the wrappers of Accelerate and DeepSpeed, or ``None`` where there is none."""
    while optimizer is not None and not isinstance(optimizer, MatrixOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
