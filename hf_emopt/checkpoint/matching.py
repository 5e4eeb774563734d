"""Optimizer state in and out of its checkpoint form: by parameter name, dtypes kept, nothing half loaded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.layout import whole_numel, whole_shape
from hf_emopt.formats.master_weights import WEIGHT_STATE
from hf_emopt.formats.moments import coded_names, converted, scale_shape
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.packing import STRUCTURAL_KEYS, unpack_matrix_views
from hf_emopt.rules.base import Group, MatrixRule, state_dtype
from hf_emopt.state.forms import copied, elementwise_state, is_foreign, is_weight_state, matrix_state

STATE_VERSION = 1
"""Kept in every group as ``state_version``; grows when the meaning of a state entry changes."""

PARTIAL = "consolidated_elsewhere"
"""Set in groups that a rank emits whose state was consolidated on another one, so that it is never taken for the whole."""

# Components of a name that say how a module was wrapped, not which parameter it is.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def check_groups(rule: MatrixRule, groups: Sequence[Group], saved_groups: Sequence[Group]) -> None:
    """Refuses groups of a newer version, of another rule or of another number."""
    newest = max((g.get("state_version", STATE_VERSION) for g in saved_groups), default=STATE_VERSION)
    if newest > STATE_VERSION:
        raise ValueError(
            f"the optimizer state has version {newest}, this hf_emopt reads up to {STATE_VERSION}: upgrade it"
        )
    rules = {g["rule"] for g in saved_groups if "rule" in g} - {rule.name}
    if rules:
        raise ValueError(
            f"another optimizer saved it: the optimizer state is of {', '.join(sorted(rules))}, this optimizer is "
            f"{rule.name}"
        )
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the optimizer state has {len(saved_groups)} parameter groups, this optimizer {len(groups)} "
            f"({', '.join(g['name'] for g in groups)}); were layers frozen or routed differently?"
        )


def matched(
    rule: MatrixRule,
    groups: Sequence[Group],
    state_dict: dict[str, Any],
    views_of_slices: Callable[[], dict[str, tuple[MatrixView, ...]]],
) -> tuple[dict[str, dict[str, Any]], list[Group]]:
    """The checkpoint's state by live parameter name, and its groups.

    Parameters are paired by name where both sides know names, by position otherwise. Names may differ in what DDP,
    ``torch.compile`` and checkpoint wrappers add to them.

    Args:
        state_dict: whole, of any layout.
        views_of_slices: gives, for parameters whose slices are matrices of their own, these matrices.

    Raises:
        ValueError: naming what does not fit (groups, names, shapes, state of another optimizer).
    """
    saved_groups = state_dict["param_groups"]
    state = state_dict["state"]
    live = {name: p for g in groups for name, p in zip(g["param_names"], g["params"])}
    if any(g.get(PARTIAL) for g in saved_groups):
        raise ValueError(
            "this optimizer state comes from a rank other than the one that consolidate_state_dict() had brought it to, and "
            "is empty: save state_dict() of that rank (0, unless told otherwise), or consolidate with to=None"
        )
    if any("spans" in g for g in saved_groups):
        raise ValueError(
            "this optimizer state is one rank's part of a DeepSpeed ZeRO checkpoint: `hf-emopt convert CHECKPOINT OUTPUT` "
            "makes of all ranks' files one that every layout loads"
        )
    if len(saved_groups) == sum(bool(g["param_names"]) for g in groups):  # groups of nothing were left out once
        saved = iter(saved_groups)
        saved_groups = [next(saved) if g["param_names"] else {**g, "params": []} for g in groups]
    check_groups(rule, groups, saved_groups)
    saved_groups = _in_live_order(saved_groups, groups)
    by_name: dict[str, dict[str, Any]] = {}
    parts = views_of_slices()
    for saved, group in zip(saved_groups, groups):
        names = live_names(saved_names(saved) or group["param_names"], group["param_names"])
        if len(saved["params"]) != len(group["params"]) or set(names) != set(group["param_names"]):
            missing = sorted(set(group["param_names"]) - set(names))[:5]
            foreign = sorted(set(names) - set(group["param_names"]))[:5]
            raise ValueError(
                f"group {group['name']!r}: the optimizer state is of {len(saved['params'])} parameters, this group has "
                f"{len(group['params'])}; not in the state: {missing}; only in the state: {foreign}"
            )
        positions = {name: position for position, name in enumerate(group["param_names"])}
        for name, index in zip(names, saved["params"]):
            param = live[name]
            entry = converted(state.get(index, {}), group["state_dtype"], whole_shape(param), state_dtype(param))
            _check_shapes(name, param, entry)
            packed = group["units"][positions[name]] if "units" in group else ()
            matrix_views = parts.get(name) or unpack_matrix_views(packed)
            _check_kinds(rule, name, param, entry, merged_group(group, saved), matrix_views)
            by_name[name] = entry
    return by_name, saved_groups


def _in_live_order(saved: list[Group], live: Sequence[Group]) -> list[Group]:
    """The saved groups as the live ones follow each other, where their names say which is which."""
    order = []
    for group in live:
        wanted = {_canonical(name) for name in group["param_names"]}
        order += [g for g in saved if {_canonical(name) for name in saved_names(g) or ()} == wanted]
    return order if len(order) == len(saved) else saved


def saved_names(saved: Group) -> list[str] | None:
    """Names in the order of ``params``, which torch.distributed.checkpoint makes the names themselves."""
    if saved["params"] and all(isinstance(index, str) for index in saved["params"]):
        return list(saved["params"])
    return saved.get("param_names")


def _canonical(name: str) -> str:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[0] == "module" else parts)


def live_names(saved: list[str], live: list[str]) -> list[str]:
    """The saved names as this process spells them, where wrappers are all that they differ in."""
    spelled = {_canonical(name): name for name in live}
    if set(saved) == set(live) or len(spelled) != len(live) or {_canonical(name) for name in saved} != set(spelled):
        return saved
    return [spelled[_canonical(name)] for name in saved]


def merged_group(live: Group, saved: Group) -> Group:
    """A group after loading: the checkpoint's hyperparameters, the live structure, and what the checkpoint lacks."""
    kept = {key: copy.deepcopy(value) for key, value in saved.items() if key not in STRUCTURAL_KEYS}
    return {**live, **kept, "state_version": STATE_VERSION}


def _check_kinds(
    rule: MatrixRule,
    name: str,
    param: Tensor,
    entry: dict[str, Any],
    group: Group,
    matrix_views: Sequence[MatrixView],
) -> None:
    """Refuses state that another optimizer wrote, or this one with other matrices in the parameter."""
    if whole_numel(param) == 0:
        return
    meta = torch.empty(whole_shape(param), dtype=param.dtype, device="meta")
    fresh = elementwise_state(rule, group, meta, meta.shape)
    wanted = {key: tuple(value.shape) for key, value in fresh.items() if not is_weight_state(key)}
    if group["kind"] == "matrix":
        for index, matrix_view in enumerate(matrix_views):
            state = matrix_state(rule, group, matrix_view.shape, meta)
            wanted |= {f"{key}.{index}": tuple(value.shape) for key, value in state.items()}
    missing = sorted(set(wanted) - set(entry)) if "step" in entry else []
    wrong = sorted(k for k, shape in wanted.items() if torch.is_tensor(entry.get(k)) and entry[k].shape != shape)
    # State of matrices, which ours are not.
    foreign = sorted(k for k in entry if "." in k and k not in wanted and not is_foreign(rule, group, k))
    if missing or wrong or foreign:
        what = (
            f"has another shape of {', '.join(f'{key} {tuple(entry[key].shape)}, not {wanted[key]}' for key in wrong)}"
            if wrong
            else f"{', '.join(foreign)} is none of this optimizer's"
        )
        what = f"has no {', '.join(missing)}" if missing else what
        raise ValueError(
            f"{name}: the optimizer state holds {', '.join(sorted(entry))} and {what}: another optimizer saved it, or this "
            f"one ({rule.name}) with other options such as per_head, or with tensor_parallel='blockwise' on "
            "another number of ranks; load it with those"
        )


def _check_shapes(name: str, param: Tensor, entry: dict[str, Any]) -> None:
    whole = whole_shape(param)
    shapes = dict.fromkeys(("momentum_buffer", "exp_avg", "exp_avg_sq", *WEIGHT_STATE), whole)
    for moment in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
        codes, scale = coded_names(moment)
        shapes[codes] = whole
        if scale in entry:  # of a shape that has 8 bits
            shapes[scale] = scale_shape(whole)
    for key, shape in shapes.items():
        value = entry.get(key)
        if torch.is_tensor(value) and tuple(value.shape) != shape:
            of = "the parameter" if shape == whole else f"scales of the parameter's {whole} have"
            raise ValueError(f"{name}: the optimizer state's {key} has shape {tuple(value.shape)}, {of} {shape}")


def loaded_state(
    rule: MatrixRule, groups: Sequence[Group], by_name: dict[str, Any], saved_groups: Sequence[Group], offloads: bool
) -> dict[str, Any]:
    """The argument of ``Optimizer.__setstate__``: the state of :func:`matched`, and groups with the checkpoint's values.

    torch's own loader casts state to the parameter's dtype, which turns float32 momentum of bfloat16 weights into bfloat16;
    here every tensor keeps its dtype and only changes device. With ``offloads``, state stays on the host.
    """
    merged = [merged_group(live, saved) for live, saved in zip(groups, saved_groups)]
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group in merged:
        for name, param in zip(group["param_names"], group["params"]):
            entry = by_name[name]
            if entry:
                # The host reads rounds at every step.
                own = {key for key in entry if not is_foreign(rule, group, key)}
                on_host = {key for key in own if key == "rounds" or (offloads and key != "step")}
                host = torch.device("cpu")
                state[param] = {key: copied(v, host if key in on_host else param.device) for key, v in entry.items()}
    return {"state": state, "param_groups": merged}
