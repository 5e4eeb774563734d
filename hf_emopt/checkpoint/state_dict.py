"""What an optimizer does when its state is asked for, and when it is given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_emopt.checkpoint.from_adamw import from_adamw, is_adamw
from hf_emopt.checkpoint.gather import fresh, gathered, has_matrix_state, keep_owned, materialize, sharded_matrix_state
from hf_emopt.checkpoint.matching import PARTIAL, load_into, matched
from hf_emopt.distributed.consensus import control_device
from hf_emopt.distributed.layout import local_gradient

if TYPE_CHECKING:
    from hf_emopt.checkpoint.interface import Checkpointable
    from hf_emopt.engine.engine import Engine

__all__ = ["consolidate", "emitted", "left_behind", "loaded", "only_initializes"]

_LOW_BITS = "weight_low_bits"


def only_initializes(optimizer: Checkpointable, engine: Engine) -> bool:
    """Whether this step asks for nothing but the existence of state, and if so, makes it.

    ``torch.distributed.checkpoint`` has no other way than to call ``step()`` of a fresh optimizer with gradients of zero and
    learning rates of 0, when it saves before the first step and whenever it loads. Counted as a step, it would shift bias
    corrections and schedules of all that follow.
    """
    # Asked of every step, so not by the property, which waits for what is offloaded.
    if any("step" in state for state in vars(optimizer)["state"].values()):
        return False
    if any(float(group["lr"]) != 0.0 for group in optimizer.param_groups):
        return False
    moving = False
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = local_gradient(param)
            moving = moving or (grad is None and param.requires_grad) or (grad is not None and bool(grad.any()))
    if engine.world_size > 1:
        flag = torch.tensor([moving], dtype=torch.uint8, device=control_device(engine.council.group))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=engine.council.group)
        moving = bool(flag)
    if not moving:
        materialize(engine)
    return not moving


def consolidate(optimizer: Checkpointable, to: int | Literal["first"] | None) -> dict[str, dict[str, Any]] | None:
    """Whole state by name on rank ``to`` (or on all), and nothing on others; ``None`` where no state lies with owners.

    Raises:
        ValueError: on all ranks, when ``to`` has no part in it: the state would be nowhere.
    """
    engine = optimizer._current_engine()
    if not engine.has_owned_state:
        return None
    engine.prepare()
    members = dist.get_process_group_ranks(engine.council.group)
    if to == "first":
        to = members[0]
    if to is not None and to not in members:
        raise ValueError(
            f"to={to} is none of the ranks {members} that share this optimizer's parameters, so nobody would have the state: "
            "leave it out for the first of them, or pass one of them, by its rank in the job, or None for all"
        )
    engine.settle()
    return gathered(engine, keep=to is None or dist.get_rank() == to)


def left_behind(optimizer: Checkpointable) -> dict[str, dict[str, Any]] | None:
    """State as the next plan may take it: by name, whole where owners had parts, from the parameters that had it.

    A wrapper that puts other parameters into the groups leaves state under the old ones; it is taken from there.
    """
    engine = optimizer._engine
    if engine is None:
        return None
    engine.settle()
    optimizer._transforms += engine.transform_count
    if not any("step" in state for state in optimizer.state.values()):
        return None
    whole = gathered(engine) if engine.scattered else {}
    names = [name for group in engine.groups for name in group["param_names"]]
    for name, param in zip(names, (p for params in engine.params for p in params)):
        if name not in whole and optimizer.state.get(param):
            whole[name] = optimizer.state[param]
    current = {param for group in optimizer.param_groups for param in group["params"]}
    for param in [param for param in optimizer.state if param not in current]:
        del optimizer.state[param]
    return whole


def emitted(optimizer: Checkpointable, plain_state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The optimizer's ``state_dict``.

    Args:
        plain_state_dict: torch's own.

    Raises:
        RuntimeError: when state lies with owners and has not been consolidated.
    """
    if not any("step" in state for state in optimizer.state.values()):
        return plain_state_dict()
    engine, whole = optimizer._engine, optimizer._consolidated
    unready = whole is None and not optimizer._only_initialized
    # Asked of the plan as it is: to plan anew is a collective, and this may be one rank alone.
    if engine is None or not ((unready or whole is not None) and engine.has_owned_state):
        engine = optimizer._current_engine()
    engine.settle()
    if engine.has_owned_state and whole is None:
        if unready:
            raise RuntimeError(
                "the optimizer's state lies with the owners of its matrices, on several ranks: call "
                "optimizer.consolidate_state_dict() on all ranks first (Trainer and hf_emopt.Accelerator do), then "
                "state_dict() on rank 0; or consolidate_state_dict(to=None) for state_dict() on every rank, which "
                "torch.distributed.checkpoint needs"
            )
        engine.prepare()
        whole = {**fresh(engine), **sharded_matrix_state(engine)}
    if whole is None:
        materialize(engine)
        whole = {}
        if engine.scattered and has_matrix_state(engine):  # else a rank may ask alone, also right after it has loaded
            engine.prepare()
            whole = sharded_matrix_state(engine)
    plain = plain_state_dict()
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in plain["param_groups"] for index in group["params"]]
    owned = engine.has_owned_state
    state: dict[int, Any] = {}
    for index, name, param in zip(indices, names, params):
        # A part of a whole must not stand beside, or in place of, the whole.
        own = {} if owned and not isinstance(param, DTensor) else optimizer.state.get(param, {})
        found = whole.get(name, {})
        if isinstance(param, DTensor):  # what is cut as the parameter is stays where it is
            found = {key: value for key, value in found.items() if not (key in own and isinstance(own[key], DTensor))}
        entry = {**own, **found}
        if isinstance(param, DTensor) and _LOW_BITS in entry:  # no backend gathers int16
            entry[_LOW_BITS] = entry[_LOW_BITS].to(torch.int32)
        if entry:
            state[index] = dict(sorted(entry.items()))  # in one order on all ranks: gathering it is a collective
    if owned and not whole:  # another rank has it
        for group in plain["param_groups"]:
            group[PARTIAL] = True
    return {**plain, "state": state}


def loaded(optimizer: Checkpointable, state_dict: dict[str, Any]) -> None:
    """Puts a whole ``state_dict`` of any layout, or one of AdamW, into the optimizer; each rank keeps its part.

    Raises:
        ValueError: when it does not fit; the optimizer is then as it was.
    """
    by_name, groups = (from_adamw if is_adamw(state_dict) else matched)(optimizer, state_dict)
    for name, entry in by_name.items():
        if _LOW_BITS in entry:
            by_name[name] = {**entry, _LOW_BITS: entry[_LOW_BITS].to(torch.int16)}
    optimizer._forget_plan()
    # Where ranks share parameters, each takes its own part of the state, and no more, to its device.
    shared = any(grid.world_size > 1 for grid in optimizer._grids().values())
    load_into(optimizer, {name: {} for name in by_name} if shared else by_name, groups)
    if any(by_name.values()):  # an engine knows whose state it is when parameters are replaced later
        engine = optimizer._current_engine()
        if shared:
            keep_owned(engine, by_name)
            materialize(engine)
