"""What an optimizer does when its state is asked for, and when it is given some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_emopt.checkpoint.gather import fresh, gathered, has_matrix_state, materialize, sharded_matrix_state
from hf_emopt.checkpoint.matching import PARTIAL
from hf_emopt.distributed.layout import local_gradient
from hf_emopt.engine.context import StepContext
from hf_emopt.rules.base import Group

_LOW_BITS = "weight_low_bits"


def is_state_init_step(context: StepContext, groups: Sequence[Group]) -> bool:
    """Whether a step of an optimizer without state asks for nothing but the existence of state; if so, makes the state.

    ``torch.distributed.checkpoint`` calls ``step()`` of a fresh optimizer with gradients of zero and learning rates of 0 for
    that. Counted as a step, it would shift bias corrections and schedules. Collective where ranks share parameters.
    """
    if any(float(group["lr"]) != 0.0 for group in groups):
        return False
    moves = False
    for group in groups:
        for param in group["params"]:
            grad = local_gradient(param)
            moves = moves or (grad is None and param.requires_grad) or (grad is not None and bool(grad.any()))
    consensus = context.ranks.consensus
    if consensus.group is not None:
        flag = torch.tensor([moves], dtype=torch.uint8, device=consensus.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=consensus.group)
        moves = bool(flag)
    if not moves:
        materialize(context)
    return not moves


def consolidated(context: StepContext, to: int | Literal["first"] | None) -> dict[str, dict[str, Any]] | None:
    """Collective: whole state by name on rank ``to`` (or on all), nothing on others; ``None`` where owners hold no state.

    Raises:
        ValueError: on all ranks, when ``to`` has no part in it: the state would be nowhere.
    """
    if not context.has_owned_state:
        return None
    context.open_ranks()
    members = dist.get_process_group_ranks(context.ranks.consensus.group)
    if to == "first":
        to = members[0]
    if to is not None and to not in members:
        raise ValueError(
            f"to={to} is none of the ranks {members} that share this optimizer's parameters, so nobody would have the state: "
            "leave it out for the first of them, or pass one of them, by its rank in the job, or None for all"
        )
    context.finish_pending()
    return gathered(context, keep=to is None or dist.get_rank() == to)


def left_behind(
    context: StepContext, state: dict[Tensor, Any], groups: Sequence[Group]
) -> dict[str, dict[str, Any]] | None:
    """State of plans that end as the next plan may take it: by name, whole where owners had parts.

    A wrapper that puts other parameters into the groups leaves entries of ``state`` under the old ones; they are deleted.
    """
    if not any("step" in entry for entry in state.values()):
        return None
    whole = gathered(context) if context.is_scattered else {}
    for name, param in context.named():
        if name not in whole and state.get(param):
            whole[name] = state[param]
    current = {param for group in groups for param in group["params"]}
    for param in [param for param in state if param not in current]:
        del state[param]
    return whole


def emitted(
    context: StepContext,
    groups: Sequence[Group],
    whole: Mapping[str, dict[str, Any]] | None,
    unready: bool,
    plain_state_dict: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer that has state.

    Args:
        whole: what :func:`consolidated` has brought here; ``None`` where nothing was consolidated.
        unready: there were steps since, or none was called.
        plain_state_dict: torch's own.

    Raises:
        RuntimeError: state lies with owners and has not been consolidated.
    """
    state = context.store.state
    if context.has_owned_state and whole is None:
        if unready:
            raise RuntimeError(
                "the optimizer's state lies with the owners of its matrices, on several ranks: call "
                "optimizer.consolidate_state_dict() on all ranks first (Trainer and accelerator.save_state() do; an "
                "AcceleratedOptimizer has ours as its .optimizer), then state_dict() on rank 0; or "
                "consolidate_state_dict(to=None) for state_dict() on every rank, which torch.distributed.checkpoint needs"
            )
        context.open_ranks()
        whole = {**fresh(context), **sharded_matrix_state(context)}
    if whole is None:
        materialize(context)
        whole = {}
        # A rank may ask alone otherwise, also right after it has loaded.
        if context.is_scattered and has_matrix_state(context):
            context.open_ranks()
            whole = sharded_matrix_state(context)
    plain, owned = plain_state_dict(), context.has_owned_state
    named = [(name, param) for group in groups for name, param in zip(group["param_names"], group["params"])]
    indices = [index for group in plain["param_groups"] for index in group["params"]]
    entries: dict[int, Any] = {}
    for index, (name, param) in zip(indices, named):
        # A part of a whole must not stand in place of the whole.
        own = {} if owned and not isinstance(param, DTensor) else state.get(param, {})
        found = whole.get(name, {})
        if isinstance(param, DTensor):  # what is cut as the parameter is stays where it is
            found = {key: value for key, value in found.items() if not (key in own and isinstance(own[key], DTensor))}
        entry = {**own, **found}
        if isinstance(param, DTensor) and _LOW_BITS in entry:  # no backend gathers int16
            entry[_LOW_BITS] = entry[_LOW_BITS].to(torch.int32)
        if entry:
            entries[index] = dict(sorted(entry.items()))  # in one order on all ranks: gathering it is a collective
    if owned and not whole:  # another rank has it
        for group in plain["param_groups"]:
            group[PARTIAL] = True
    return {**plain, "state": entries}


def with_low_bits(by_name: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """State of a checkpoint with the low bits of 16-bit weights in int16, which no backend gathers."""
    return {
        name: {**entry, _LOW_BITS: entry[_LOW_BITS].to(torch.int16)} if _LOW_BITS in entry else entry
        for name, entry in by_name.items()
    }
