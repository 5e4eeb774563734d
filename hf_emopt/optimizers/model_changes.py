"""A model that has other parameters than when its optimizer was built: adapters were added or deleted."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from hf_emopt.checkpoint.gather import keep_owned, materialize
from hf_emopt.checkpoint.state_dict import left_behind
from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.rules.base import Group

if TYPE_CHECKING:
    from hf_emopt.optimizers.interface import Steppable

__all__ = ["refresh", "warn_of_strangers"]


def refresh(optimizer: Steppable, model: nn.Module) -> tuple[list[str], list[str]]:
    """See :meth:`hf_emopt.optimizers.base.MatrixOptimizer.refresh_parameters`."""
    if optimizer._flattened is not None:
        raise UnsupportedLayoutError(
            "DeepSpeed has flattened the parameters that there were: build a new optimizer and engine for this model"
        )
    built, table = optimizer._builder.build(model)
    there = {id(param) for param in model.parameters()}
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    whole = left_behind(optimizer)
    optimizer._engine, optimizer._consolidated, optimizer._planned_for = None, None, ()

    removed: list[str] = []
    for group in optimizer.param_groups:
        kept = [index for index, param in enumerate(group["params"]) if id(param) in there]
        removed += [name for index, name in enumerate(group["param_names"]) if index not in kept]
        for key in ("params", "param_names", "units", "adapters"):
            if key in group:
                group[key] = [group[key][index] for index in kept]
    current = {param for group in optimizer.param_groups for param in group["params"]}
    for param in [param for param in optimizer.state if param not in current]:
        del optimizer.state[param]

    added: list[str] = []
    live = {group["name"]: group for group in optimizer.param_groups}
    for group in built:
        fresh = [index for index, (_, param) in enumerate(group["params"]) if id(param) not in known]
        if not fresh:
            continue
        added += [group["params"][index][0] for index in fresh]
        part = dict(group)
        for key in ("params", "units", "adapters"):
            if key in part:
                part[key] = [part[key][index] for index in fresh]
        target = live.get(group["name"])
        if target is None:
            _add_scheduled(optimizer, part)
            continue
        if ("adapters" in part) != ("adapters" in target):
            part.setdefault("adapters", [()] * len(fresh))
            target.setdefault("adapters", [()] * len(target["params"]))
        target["params"] += [param for _, param in part["params"]]
        target["param_names"] += [name for name, _ in part["params"]]
        for key in ("units", "adapters"):
            if key in part:
                target[key] += part[key]
    gone, new = set(removed), set(added)
    routes = [route for route in optimizer._routes if route.name not in gone]
    optimizer._routes = [*routes, *(route for route in table if route.name in new)]
    if whole is not None:
        engine = optimizer._current_engine()
        if engine.world_size > 1:
            keep_owned(engine, {name: state for name, state in whole.items() if name not in gone})
            materialize(engine)
    return added, removed


def _add_scheduled(optimizer: Steppable, group: Group) -> None:
    """Adds a group of a kind that there was none of, as far along the schedule as the others are."""
    scheduled = [g for g in optimizer.param_groups if float(g.get("initial_lr", 0.0)) > 0.0]
    if scheduled:
        relative = float(scheduled[0]["lr"]) / float(scheduled[0]["initial_lr"])
        group = {**group, "initial_lr": group["lr"], "lr": group["lr"] * relative}
    optimizer.add_param_group(group)
    if scheduled:
        warnings.warn(
            f"the optimizer has got a group {group['name']!r} that it had not: a scheduler knows the groups that there were "
            "when it was made, and torch's stop at another number of them. Make the scheduler anew, with last_epoch as "
            "the old one's",
            stacklevel=4,
        )


def warn_of_strangers(optimizer: Steppable, model: nn.Module) -> None:
    """Warns of parameters of a model that have a gradient and are not the optimizer's: nobody would train them."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strangers = [
        n for n, p in model.named_parameters() if p.requires_grad and p.grad is not None and id(p) not in known
    ]
    if strangers:
        warnings.warn(
            f"{len(strangers)} parameters have a gradient and are not the optimizer's, so it does not train them: "
            f"{', '.join(strangers[:3])}{' ...' if len(strangers) > 3 else ''}. They were added or unfrozen after it was "
            "built; optimizer.refresh_parameters() takes them in",
            stacklevel=4,
        )
