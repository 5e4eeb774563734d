"""The state of ``torch.optim.AdamW`` as the start of a matrix optimizer.

The auxiliary parameters keep AdamW's moments, which have the same meaning here. Matrices begin with fresh momentum: a first
moment of AdamW is no momentum of an orthogonalized or preconditioned step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_emopt.checkpoint.matching import live_names, saved_names
from hf_emopt.distributed.layout import whole_shape
from hf_emopt.formats.master_weights import init_weight_state
from hf_emopt.formats.moments import converted
from hf_emopt.routing.route import NO_DECAY
from hf_emopt.rules.base import Group, MatrixRule, state_dtype

_KEYS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def is_adamw(state_dict: dict[str, Any]) -> bool:
    """Whether this is a ``state_dict`` of ``torch.optim.AdamW`` (or Adam) and not of a matrix optimizer."""
    groups, entries = state_dict["param_groups"], [e for e in state_dict["state"].values() if e]
    if any("rule" in g or "state_version" in g or "kind" in g for g in groups):
        return False
    return any("betas" in g for g in groups) and all(set(entry) <= _KEYS for entry in entries)


def from_adamw(
    rule: MatrixRule, live_groups: Sequence[Group], state_dict: dict[str, Any], model: nn.Module | None
) -> tuple[dict[str, dict[str, Any]], list[Group]]:
    """State by live parameter name, and groups, from a checkpoint of AdamW.

    Hyperparameters stay the optimizer's own. Learning rates are scaled as the checkpoint's were by its schedule
    (``lr / initial_lr``), where the live groups have a schedule too. The order of the model that the optimizer was built from
    names parameters that have no names.

    Raises:
        ValueError: when it cannot be told which saved moments are whose, or shapes differ.
    """
    state = _by_name(live_groups, state_dict, model)
    by_name: dict[str, dict[str, Any]] = {}
    kept = fresh = 0
    for group in live_groups:
        for name, param in zip(group["param_names"], group["params"]):
            entry = state[name]
            by_name[name] = {}
            fresh += group["kind"] == "matrix"
            if group["kind"] == "aux" and entry:
                kept += 1
                by_name[name] = _moments(entry, param, group)
    warnings.warn(
        f"the optimizer state was saved by AdamW: {fresh} matrices start with fresh {rule.name} state, and the "
        f"AdamW moments of {kept} auxiliary parameters are kept. Hyperparameters are this optimizer's own."
        f"{_unknown_schedule(live_groups, state_dict['param_groups'])}",
        stacklevel=5,
    )
    # How far a schedule had taken the learning rate from its peak.
    scheduled = [g for g in state_dict["param_groups"] if float(g.get("initial_lr", 0.0)) > 0.0]
    scale = float(scheduled[0]["lr"]) / float(scheduled[0]["initial_lr"]) if scheduled else 1.0
    return by_name, [{**g, "lr": g["initial_lr"] * scale} if "initial_lr" in g else g for g in live_groups]


def _moments(entry: dict[str, Any], param: Tensor, group: Group) -> dict[str, Any]:
    step = entry["step"]
    step = (
        step.detach().float() if torch.is_tensor(step) else torch.tensor(float(step), dtype=torch.float32, device="cpu")
    )
    wide = state_dtype(param)
    moments = {"exp_avg": entry["exp_avg"].to(wide), "exp_avg_sq": entry["exp_avg_sq"].to(wide)}
    return {
        **init_weight_state(param, group["low_precision_weights"]),
        "step": step,
        **converted(moments, group["state_dtype"], whole_shape(param), wide),
    }


def _unknown_schedule(live_groups: Sequence[Group], groups: Sequence[Group]) -> str:
    """A warning for a checkpoint without its peak learning rate, as under ``ReduceLROnPlateau``; else empty."""
    saved, live = float(groups[0]["lr"]), float(live_groups[0]["lr"])
    if saved == live or any("initial_lr" in group for group in groups):
        return ""
    return (
        f" The checkpoint's learning rate was {saved:g} when it was saved, and it does not say of which peak (as under "
        f"ReduceLROnPlateau): this optimizer goes on at {live:g}, so lower it if a schedule had."
    )


def _by_name(
    live_groups: Sequence[Group], state_dict: dict[str, Any], model: nn.Module | None
) -> dict[str, dict[str, Any]]:
    """The saved entries by live parameter name, each checked against the parameter's shape."""
    live = {name: p for g in live_groups for name, p in zip(g["param_names"], g["params"])}
    groups = state_dict["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    known = [saved_names(group) for group in groups if group["params"]]
    if None in known:
        names = _by_order(model, [len(group["params"]) for group in groups])
    else:
        names = [name for members in known for name in members or ()]
    names = live_names(names, list(live))
    if len(names) != len(indices) or set(names) != set(live):
        missing, foreign = sorted(set(live) - set(names))[:5], sorted(set(names) - set(live))[:5]
        raise ValueError(
            f"the AdamW state is of {len(indices)} parameters, this optimizer trains {len(live)}; not in the state: "
            f"{missing}; only in the state: {foreign}. Train the same parameters, or start without the optimizer's state"
        )
    entries = {name: state_dict["state"].get(index, {}) for name, index in zip(names, indices)}
    for name, entry in entries.items():
        for key in ("exp_avg", "exp_avg_sq"):
            found = tuple(entry[key].shape) if key in entry else None
            if entry and ("step" not in entry or found != whole_shape(live[name])):
                raise ValueError(
                    f"{name}: the AdamW state's {key} has shape {found}, the parameter {whole_shape(live[name])}: it was "
                    "saved for other parameters, or its groups hold them in another order. Save it with param_names in its "
                    "groups (pass named_parameters() to AdamW), or start without the optimizer's state"
                )
    return entries


def _by_order(model: nn.Module | None, sizes: list[int]) -> list[str]:
    """Names for a state that has none: the model's order, in one group or in Trainer's two."""
    if model is not None:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if sizes == [len(trained)]:
            return trained
        norms = tuple(f"{prefix}." for prefix, module in model.named_modules() if isinstance(module, nn.LayerNorm))
        # Trainer's two groups: those that its default rule decays, and the others.
        groups: tuple[list[str], list[str]] = [], []
        for name in trained:
            groups[bool(NO_DECAY.search(name.lower())) or name.startswith(norms)].append(name)
        if sizes == [len(groups[0]), len(groups[1])]:
            return groups[0] + groups[1]
    raise ValueError(
        f"the AdamW state has groups of {sizes} parameters and no param_names, and these are neither all of a model's "
        "parameters in their order nor Trainer's two groups (with and without decay), so it cannot be told whose moments "
        "they are. Add 'param_names' to each of its param_groups, or start without the optimizer's state"
    )
