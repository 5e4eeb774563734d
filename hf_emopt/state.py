"""Optimizer state in and out of its checkpoint form: by parameter name, dtypes kept, nothing half loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_emopt.groups import STRUCTURAL_KEYS
from hf_emopt.rules.base import Group

if TYPE_CHECKING:
    from hf_emopt.matrix_optimizer import MatrixOptimizer

__all__ = ["STATE_VERSION", "load_into", "matched"]

STATE_VERSION = 1
"""Kept in every group as ``state_version``; grows when the meaning of a state entry changes."""


def matched(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The checkpoint's state by live parameter name.

    Parameters are paired by name where both sides know names, by position otherwise.

    Raises:
        ValueError: naming what does not fit (groups, names, shapes); nothing was changed by then.
    """
    saved_groups = state_dict["param_groups"]
    state = state_dict["state"]
    live = {name: p for g in optimizer.param_groups for name, p in zip(g["param_names"], g["params"])}
    newest = max((g.get("state_version", STATE_VERSION) for g in saved_groups), default=STATE_VERSION)
    if newest > STATE_VERSION:
        raise ValueError(
            f"the optimizer state has version {newest}, this hf_emopt reads up to {STATE_VERSION}: upgrade it"
        )
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the optimizer state has {len(saved_groups)} parameter groups, this optimizer {len(optimizer.param_groups)} "
            f"({', '.join(g['name'] for g in optimizer.param_groups)}); were layers frozen or routed differently?"
        )
    by_name: dict[str, dict[str, Any]] = {}
    for saved, group in zip(saved_groups, optimizer.param_groups):
        names = saved.get("param_names") or group["param_names"]
        if len(saved["params"]) != len(group["params"]) or set(names) != set(group["param_names"]):
            missing = sorted(set(group["param_names"]) - set(names))[:5]
            foreign = sorted(set(names) - set(group["param_names"]))[:5]
            raise ValueError(
                f"group {group['name']!r}: the optimizer state is of {len(saved['params'])} parameters, this group has "
                f"{len(group['params'])}; not in the state: {missing}; only in the state: {foreign}"
            )
        for name, index in zip(names, saved["params"]):
            entry = state.get(index, {})
            _check_shapes(name, live[name], entry)
            by_name[name] = entry
    return by_name


def _check_shapes(name: str, param: Tensor, entry: dict[str, Any]) -> None:
    for key in ("momentum_buffer", "exp_avg", "exp_avg_sq", "weight_low_bits", "master_weight", "weight_compensation"):
        value = entry.get(key)
        if torch.is_tensor(value) and value.shape != param.shape:
            raise ValueError(
                f"{name}: the optimizer state's {key} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}"
            )


def load_into(optimizer: MatrixOptimizer, by_name: dict[str, dict[str, Any]], live_groups: list[Group]) -> None:
    """Puts a matched state into the optimizer, whose groups torch has just replaced by the checkpoint's.

    torch's own loader casts state to the parameter's dtype, which turns float32 momentum of bfloat16 weights into
    bfloat16; here every tensor keeps its dtype and only changes device.

    Args:
        optimizer: its ``param_groups`` hold the checkpoint's hyperparameters.
        by_name: what :func:`matched` returned.
        live_groups: the groups as they were before; their structure, and hyperparameters that an older checkpoint did
            not know, are put back.
    """
    optimizer.state.clear()
    for group, live in zip(optimizer.param_groups, live_groups):
        for key in STRUCTURAL_KEYS:
            if key in live:
                group[key] = live[key]
        for key, value in live.items():
            group.setdefault(key, value)
        group["state_version"] = STATE_VERSION
        for name, param in zip(group["param_names"], group["params"]):
            entry = by_name[name]
            if entry:
                optimizer.state[param] = {
                    # What the host reads at every step stays on the host.
                    key: value.detach().to("cpu" if key.startswith(("rounds", "pending")) else param.device, copy=True)
                    for key, value in entry.items()
                }
