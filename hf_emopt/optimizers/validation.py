"""What an optimizer's arguments and groups must be; every error names the cause and the fix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.layout import ProcessGroupArgument, UnsupportedLayoutError, is_sharded
from hf_emopt.formats.master_weights import LOW_PRECISION_WEIGHTS
from hf_emopt.formats.moments import STATE_DTYPES, require_library
from hf_emopt.routing.route import RouteTable
from hf_emopt.rules.adamw import validate_adamw
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.rules.options import check_choice
from hf_emopt.state.forms import OffloadState


def validate_group(group: Group, rule: MatrixRule, groups: Sequence[Group], defaults: Mapping[str, Any]) -> None:
    """Checks a group that is about to be added, and puts names of one meaning into one form.

    Args:
        group: as the builder made it: complete, parameters with their names.
        groups: those that the optimizer has.
        defaults: the optimizer's, by which a message tells ``lr`` from ``aux_lr``.

    Raises:
        ValueError: for the first thing that is wrong.
        ImportError: 8-bit state without its library.
    """
    for key in ("lr", "weight_decay"):
        value = group[key]
        if not isinstance(value, (Real, Tensor)) or not 0.0 <= float(value) < math.inf:
            prefix = "aux_" if group["kind"] == "aux" and value is not defaults[key] else ""
            raise ValueError(f"{prefix}{key}={value!r} must be a finite number that is not negative")
    known = {name for other in groups for name in other["param_names"]}
    for name, _ in group["params"]:
        if name in known:
            raise ValueError(
                f"two parameters are named {name!r}; names identify state in checkpoints, so make them unique"
            )
    if isinstance(group["state_dtype"], str):
        short = {"8bit": "int8", "bf16": "bfloat16", "fp32": "float32"}
        group["state_dtype"] = short.get(group["state_dtype"], group["state_dtype"])
    check_choice(group, "state_dtype", STATE_DTYPES)
    if group["state_dtype"] == "int8" and any(param.device.type != "meta" for _, param in group["params"]):
        require_library()
    if group["low_precision_weights"] == "stochastic" or group["state_dtype"] == "bfloat16":
        group.setdefault("rounding_seed", 0)  # from the start: torch.distributed.checkpoint knows live keys only
    check_choice(group, "low_precision_weights", LOW_PRECISION_WEIGHTS)
    for name, param in group["params"]:
        check_dtype(name, param)
        if group["low_precision_weights"] == "stochastic" and param.dtype is torch.float16:
            raise ValueError(
                f"{name} is float16, and low_precision_weights='stochastic' rounds to bfloat16; use 'split'"
            )
    if group["kind"] == "matrix":
        if group["tensor_parallel"] not in rule.tensor_parallel_modes:
            raise ValueError(
                f"tensor_parallel={group['tensor_parallel']!r} is none of the modes of {rule.name}: "
                f"{', '.join(rule.tensor_parallel_modes)}"
            )
        rule.validate(group)
        # What the group begins with: decay is relative to it where no scheduler says more.
        group.setdefault("peak_lr", float(group["lr"]))
    else:
        validate_adamw(group)


def check_dtype(name: str, param: Tensor) -> None:
    """Raises ``ValueError`` for a parameter whose numbers cannot be stepped."""
    if param.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} has dtype {param.dtype}; only real floating-point parameters of 16 to 64 bits can be trained: freeze it "
            "(requires_grad=False) or convert it, for example to bfloat16"
        )


def offload_place(place: OffloadState | None) -> OffloadState | None:
    """Where state lies between steps, checked."""
    if place not in (None, "cpu"):
        raise ValueError(f"offload_state={place!r} must be 'cpu', or None for state beside the parameters")
    return place


def check_average(process_group: ProcessGroupArgument, groups: Sequence[Group]) -> None:
    """Refuses ``average_gradients`` where there is nothing to average, or a wrapper reduces gradients."""
    if process_group == "self":
        raise ValueError("average_gradients=True averages over copies of a model, and process_group='self' has none")
    sharded = [n for group in groups for n, p in zip(group["param_names"], group["params"]) if is_sharded(p)]
    if sharded:
        raise UnsupportedLayoutError(
            f"average_gradients=True is for parameters that ranks hold whole, and {sharded[0]} is a DTensor (FSDP2, HSDP, "
            "tensor parallelism) or DeepSpeed's, whose gradients come reduced: leave it out"
        )


def checked_process_group(group: ProcessGroupArgument) -> ProcessGroupArgument:
    """The ranks that hold copies of a parameter, checked."""
    if group is None or (isinstance(group, str) and group == "self") or isinstance(group, dist.ProcessGroup):
        return group
    raise ValueError(
        f"process_group={group!r} must be a ProcessGroup that this rank is in, 'self' where each process trains a model of "
        "its own, or None for all ranks"
    )


def transport_name(dtype: torch.dtype | str | None) -> str | None:
    """The wire's dtype by name, checked."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}.get(name or "", name)
    if name not in (None, "bfloat16", "float32", "float64"):
        raise ValueError(
            f"transport_dtype={dtype!r} must be bfloat16, float32 or float64, or None for the device's default"
        )
    return name


def no_matrices_message(table: RouteTable, rule: str, matrix_option: str) -> str:
    """Why an optimizer of matrices without one is refused, and what to do."""
    shown = "\n".join(f"  {r.name} {r.shape}: {r.reason}" for r in list(table)[:8])
    flat = all(len(r.shape) < 2 for r in table)
    hint = (
        " Every parameter is one-dimensional: FSDP1 and ZeRO flatten parameters; create the optimizer from the model "
        "before it is wrapped, under FSDP2 or DDP."
        if flat
        else ""
    )
    return (
        f"no trainable parameter is a matrix for {rule}, so everything would be trained by AdamW.{hint} Name the matrices "
        f"with {matrix_option}, or pass allow_no_matrices=True if AdamW alone is meant. Trainable parameters:\n{shown}"
    )
