"""State of flattened parameters in checkpoints: each rank saves and loads its own runs, as DeepSpeed's files are by rank.

A rank's ``state_dict`` gives the run of every parameter that the rank has (``spans`` and ``shapes`` in the groups).
:func:`merged` combines the dictionaries of all ranks into the whole ``state_dict``, which every other layout loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_emopt.checkpoint.gather import materialize
from hf_emopt.checkpoint.matching import check_groups, live_names, merged_group
from hf_emopt.distributed.layout import Grid, Partition
from hf_emopt.distributed.plan import Plan
from hf_emopt.distributed.planner import as_first_planned, hyperparameters
from hf_emopt.engine.context import StepContext
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.state.keys import is_count, is_shaped

SPANS, SHAPES, FLATS, OWNED, PRICED = "spans", "shapes", "flats", "owned", "priced"
"""Keys of a saved group, with an entry for each flattened parameter: ``(start, stop)`` of the saved run; the shape; ``(flat,
offset)``, which of this rank's flat tensors has the run of the weight itself, and where; and runs whose matrices this rank
transforms, in the order of their state. ``priced``: the hyperparameters with which the owners of matrices were given out."""


def is_runs(state_dict: dict[str, Any]) -> bool:
    """Whether a ``state_dict`` is one rank's part of flattened parameters."""
    return any(SPANS in group for group in state_dict["param_groups"])


def emitted_runs(
    context: StepContext | None,
    where: Callable[[Partition], tuple[int, int]],
    groups: Sequence[Group],
    cost_snapshot: Sequence[Group],
    has_state: bool,
    plain_state_dict: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """This rank's ``state_dict``. No collective.

    Args:
        context: of the plans; ``None`` where there was no step.
        where: gives the number of the flat tensor that a partition is in, and its offset there.
        cost_snapshot: hyperparameters with which owners were assigned.
        plain_state_dict: torch's own.
    """
    if has_state and context is not None:
        context.finish_pending()
        materialize(context)
    owned = {} if context is None else owned_runs(context.plan, context.ranks.grids)
    plain = plain_state_dict()
    prices = hyperparameters(as_first_planned(groups, cost_snapshot))
    for saved, group, priced in zip(plain["param_groups"], groups, prices):
        saved[FLATS] = [list(where(part)) for part in group["params"]]
        saved[OWNED] = [owned.get(name, []) for name in group["param_names"]]
        saved[PRICED] = priced
        saved[SPANS] = [list(part.span) for part in group["params"]]
        saved[SHAPES] = [list(part.full_shape) for part in group["params"]]
    # Entries that another rank owns are empty tensors.
    state = {
        index: {key: entry[key] for key in sorted(entry) if is_count(key) or is_shaped(key) or entry[key].numel()}
        for index, entry in plain["state"].items()
    }
    return {**plain, "state": state}


def owned_runs(plan: Plan, grids: dict[str, Grid]) -> dict[str, list[list[int]]]:
    """Runs of each matrix parameter that this rank transforms."""
    found: dict[str, list[list[int]]] = {}
    for bucket in plan.buckets:
        for owned_region in bucket.owned(grids[bucket.parameters[0].name].position):
            found.setdefault(bucket.parameters[owned_region.parameter].name, []).append(list(owned_region.region[0]))
    return found


@dataclass(frozen=True)
class MatchedRuns:
    """One rank's saved part of flattened parameters, checked against the parameters that there are."""

    by_name: dict[str, dict[str, Any]]
    """State by live parameter name."""
    groups: list[Group]
    """The checkpoint's, without keys of this form."""
    owned: dict[str, list[list[int]]]
    """Runs whose matrices the rank transformed, by name."""
    cost_snapshot: list[Group]
    """Hyperparameters with which owners were assigned."""

    @property
    def has_state(self) -> bool:
        """Whether any parameter has state."""
        return any("step" in entry for entry in self.by_name.values())


def matched_runs(rule: MatrixRule, groups: Sequence[Group], state_dict: dict[str, Any]) -> MatchedRuns:
    """This rank's :func:`emitted_runs`, for parameters that are cut as they were.

    Raises:
        ValueError: it is of other parameters, of another optimizer, or of parameters that were cut in another way.
    """
    saved_groups = [dict(group) for group in state_dict["param_groups"]]
    check_groups(rule, groups, saved_groups)
    by_name: dict[str, dict[str, Any]] = {}
    owned: dict[str, list[list[int]]] = {}
    # Before files said with which, owners followed from the hyperparameters that were saved.
    live = [merged_group(group, saved) for group, saved in zip(groups, saved_groups)]
    priced = [saved.pop(PRICED, now) for saved, now in zip(saved_groups, hyperparameters(live))]
    for saved, group in zip(saved_groups, groups):
        names = live_names(saved["param_names"], group["param_names"])
        if names != group["param_names"]:
            raise ValueError(
                f"group {group['name']!r}: the checkpoint is of {len(names)} parameters ({', '.join(names[:3])} ...), this "
                f"group of {len(group['params'])} ({', '.join(group['param_names'][:3])} ...)"
            )
        del saved[FLATS]
        owned |= dict(zip(names, saved.pop(OWNED)))
        cut = list(zip(names, saved.pop(SPANS), saved.pop(SHAPES), group["params"]))
        for name, span, shape, part in cut:
            if tuple(shape) != part.full_shape:
                raise ValueError(f"{name}: the checkpoint has shape {tuple(shape)}, the parameter {part.full_shape}")
            if tuple(span) != part.span:
                raise ValueError(
                    f"{name}: the checkpoint has elements {span[0]} to {span[1]}, this rank holds {part.span[0]} to "
                    f"{part.span[1]}: it was saved by another number of ranks, at another stage or with other round-robin "
                    "or alignment settings. `hf-emopt convert` makes of all ranks' files one that every layout loads"
                )
        for name, index in zip(names, saved["params"]):
            by_name[name] = state_dict["state"].get(index, {})
    return MatchedRuns(by_name, saved_groups, owned, priced)


def check_owned_runs(saved: dict[str, list[list[int]]], planned: dict[str, list[list[int]]]) -> None:
    """Refuses to transform other matrices on this rank than those whose state it saved."""
    for name, runs in saved.items():
        if [list(run) for run in runs] != planned.get(name, []):
            raise ValueError(
                f"{name}: the checkpoint of this rank has the state of the matrices in elements {runs or 'none'}, and by "
                f"this version's plan and options it transforms those in {planned.get(name, []) or 'none'}. `hf-emopt "
                "convert` makes one of all ranks' files that every plan loads"
            )


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole ``state_dict`` of all ranks' :func:`emitted_runs`, in any order.

    Raises:
        ValueError: naming a parameter with missing elements.
    """
    first = parts[0]
    state: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(first["param_groups"]):
        for position, index in enumerate(group["params"]):
            name, shape = group["param_names"][position], tuple(group[SHAPES][position])
            mine = [(p["param_groups"][number], p["state"].get(index, {})) for p in parts]
            runs = [_Run(tuple(g[SPANS][position]), g[OWNED][position], entry) for g, entry in mine]
            state[index] = _merged_entry(name, shape, runs)
    own_keys = {SPANS, SHAPES, FLATS, OWNED, PRICED}
    groups = [{key: group[key] for key in group if key not in own_keys} for group in first["param_groups"]]
    return {**first, "state": {index: entry for index, entry in state.items() if entry}, "param_groups": groups}


class _Run(NamedTuple):
    """The part of a parameter that one rank saved."""

    span: tuple[int, ...]
    owned: Sequence[Sequence[int]]
    entry: dict[str, Any]


def _merged_entry(name: str, shape: tuple[int, ...], runs: Sequence[_Run]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key in sorted({key for run in runs for key in run.entry}):
        having = [run for run in runs if key in run.entry]
        if is_count(key):
            entry[key] = max((run.entry[key] for run in having), key=int)
        elif is_shaped(key):
            pieces = [(run.span, run.entry[key]) for run in having if run.span[0] < run.span[1]]
            entry[key] = whole_of(name, pieces, shape)
        else:
            rows = [piece for run in having for piece in _state_by_run(run.owned, run.entry[key])]
            entry[key] = torch.cat([value for _, value in sorted(rows, key=lambda row: row[0])])
            if sum(stop - start for (start, stop), _ in rows) != math.prod(shape):
                raise ValueError(f"{name}: {key} of some matrices is in none of the files; is one of a rank missing?")
    return entry


def _state_by_run(owned: Sequence[Sequence[int]], value: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
    """State of matrices, one row each, for each of the runs that they are in."""
    total = sum(stop - start for start, stop in owned)
    sizes = [value.shape[0] * (stop - start) // total for start, stop in owned]
    return [((start, stop), rows) for (start, stop), rows in zip(owned, value.split(sizes))]


def whole_of(name: str, pieces: Sequence[tuple[tuple[int, ...], Tensor]], shape: Sequence[int]) -> Tensor:
    """A tensor from its runs, each with ``(start, stop)``; ``ValueError`` when they leave a gap."""
    end = 0
    pieces = sorted(pieces, key=lambda piece: piece[0])
    for (start, stop), value in pieces:
        if start != end or value.numel() != stop - start:
            raise ValueError(f"{name}: elements {end} to {start} are in none of the files; is one of a rank missing?")
        end = stop
    numel = math.prod(shape)
    if end != numel:
        raise ValueError(f"{name}: {end} of {numel} elements are in the files; is one of a rank missing?")
    return torch.cat([value.flatten() for _, value in pieces]).view(*shape)
