"""What all optimizers do alike with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hf_emopt.optimizers.param_groups import Derived
from hf_emopt.rules.base import Group

__all__ = ["PEAK_LR", "as_tuple", "aux_defaults", "dtype_name", "one_sided"]


def dtype_name(dtype: torch.dtype | str | None) -> str | None:
    """A dtype by its torch name without ``torch.``, the form kept in groups; ``None`` stays."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    return short.get(name, name)


def as_tuple(value: Any) -> Any:
    """A sequence as a tuple; anything else as it is, for validation to refuse."""
    return tuple(value) if isinstance(value, Sequence) else value


def _peak_of(group: Group) -> Any:
    lr = group["lr"]
    return float(lr) if isinstance(lr, (Real, Tensor)) else lr  # what is no number is for validation to refuse


PEAK_LR = Derived(_peak_of)
"""The learning rate that a group begins with, as a number: what decay is relative to where no scheduler says more."""


def aux_defaults(
    matrix: Group,
    aux_lr: float | Tensor | None,
    aux_betas: tuple[float, float],
    aux_eps: float,
    aux_weight_decay: float | None,
) -> Group:
    """Hyperparameters of the AdamW part; ``None`` takes the matrices' value."""
    return {
        "lr": matrix["lr"] if aux_lr is None else aux_lr,
        "weight_decay": matrix["weight_decay"] if aux_weight_decay is None else aux_weight_decay,
        "betas": as_tuple(aux_betas),
        "eps": aux_eps,
        "low_precision_weights": matrix["low_precision_weights"],
        "state_dtype": matrix["state_dtype"],
        "compat": matrix.get("compat"),
    }


def one_sided(max_preconditioner_dim: int, rank: int) -> Group:
    """Hyperparameters of LoRA factors of this rank that are preconditioned on the side of the rank alone.

    The other side is as long as the layer is wide: its factor alone would be many times the adapter, for a gradient that has
    the rank of the adapter.
    """
    return {"oversize": "one_sided", "max_preconditioner_dim": min(max_preconditioner_dim, rank)}
