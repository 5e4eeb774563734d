"""Which way of tensor parallelism each matrix takes: as the user says, or as a model of bytes and operations has it."""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_emopt.distributed.arrangement import MODES, Arrangement, TensorCut
from hf_emopt.distributed.assignment import MAX_BUCKET_NUMEL, bucket_sizes
from hf_emopt.distributed.layout import Grid, takes_all_ranks
from hf_emopt.distributed.plan import PlannedParameter
from hf_emopt.distributed.tensor_parallel import (
    UnavailableModeError,
    blockwise_matrix_views,
    distributed_cuts,
    tensor_cut,
    tensor_dims,
)
from hf_emopt.linalg.newton_schulz_sharded import BYTES_PER_SECOND, FLOPS_PER_SECOND, SECONDS_PER_MESSAGE, Method
from hf_emopt.routing.overrides import Patterns
from hf_emopt.rules.base import Group, MatrixRule

__all__ = ["Choice", "Estimate", "ModeOverrides", "arrange", "arrange_cuts", "describe"]


class ModeOverrides:
    """``tensor_parallel_modules``: modes by regular expressions on dotted names; the first that matches counts.

    Args:
        entries: ``"pattern:mode"``, several of them in one text with ``;`` between, a sequence of these, or a mapping.

    Raises:
        ValueError: an entry without a mode, or with one that does not exist.
    """

    option = "tensor_parallel_modules"

    def __init__(self, entries: str | Sequence[str] | Mapping[str, str] | None, known: Sequence[str] = MODES) -> None:
        if isinstance(entries, Mapping):
            pairs = [(str(pattern), str(mode)) for pattern, mode in entries.items()]
        else:
            texts = [] if entries is None else entries.split(";") if isinstance(entries, str) else entries
            if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{self.option}={entries!r} must be texts of the form PATTERN:MODE, or a mapping")
            pairs = [(pattern.strip(), mode.strip()) for pattern, _, mode in (text.rpartition(":") for text in texts)]
        for pattern, mode in pairs:
            if not pattern or mode not in known:
                raise ValueError(
                    f"{self.option}: {pattern + ':' + mode!r} must be PATTERN:MODE with one of the modes {', '.join(known)}"
                )
        self.patterns = [(Patterns(pattern, self.option), mode) for pattern, mode in pairs]

    def check_matched(self, names: Sequence[str]) -> None:
        """Every pattern must match the name of a matrix."""
        for patterns, _ in self.patterns:
            patterns.check_matched(names)

    def mode(self, name: str, default: str) -> str:
        """The mode of a parameter."""
        return next((mode for patterns, mode in self.patterns if patterns.find([name]) is not None), default)


@dataclass(frozen=True)
class Estimate:
    """What one parameter costs in one mode, as a rank's share of it.

    Attributes:
        flops: operations.
        bytes: received.
        messages: collectives, shared among the parameters that take part in them.
    """

    flops: float
    bytes: float
    messages: float

    @property
    def seconds(self) -> float:
        """On the machine of the model: one H100 a rank, NVLink between them, nothing hidden behind anything."""
        return self.flops / FLOPS_PER_SECOND + self.bytes / BYTES_PER_SECOND + self.messages * SECONDS_PER_MESSAGE


@dataclass(frozen=True)
class Choice:
    """What became of one parameter's request.

    Attributes:
        name: of the parameter.
        shapes: ``(B, m, n)`` of its matrices.
        ranks: of the tensor parallel dimension.
        asked, mode: what was asked for and what is done.
        estimates: by mode, for those that can be.
        reason: why what is done is not what was asked for, or empty.
    """

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    ranks: int
    asked: str
    mode: str
    estimates: Mapping[str, Estimate]
    reason: str = ""


@dataclass(frozen=True)
class _Candidate:
    parameter: PlannedParameter
    together: bool
    cut: TensorCut
    group: Group
    asked: str
    wire_bytes: int


def arrange(
    planned: Sequence[PlannedParameter],
    params: Sequence[Tensor],
    grids: Mapping[str, Grid],
    rule: MatrixRule,
    groups: Sequence[Group],
    overrides: ModeOverrides,
    wire_bytes: int,
) -> tuple[list[PlannedParameter], list[Choice]]:
    """The parameters with an arrangement where tensor parallelism cuts them and whole matrices are not brought to owners.

    Args:
        planned, params: in one order.
        grids: by name.
        wire_bytes: of an element of the messages that carry matrices.

    Raises:
        ValueError: ``"blockwise"`` for a parameter whose slices are not matrices: it would silently be another update.
    """
    dims = tensor_dims(params)
    cuts: list[TensorCut | UnavailableModeError | None] = []
    for p, param in zip(planned, params):
        try:
            cuts.append(tensor_cut(param, grids[p.name], p.storage, dims))
        except UnavailableModeError as error:
            cuts.append(error)
    together = [cut is None or takes_all_ranks(grids[p.name]) for p, cut in zip(planned, cuts)]
    return arrange_cuts(planned, cuts, together, rule, groups, overrides, wire_bytes)


def arrange_cuts(
    planned: Sequence[PlannedParameter],
    cuts: Sequence[TensorCut | UnavailableModeError | None],
    together: Sequence[bool],
    rule: MatrixRule,
    groups: Sequence[Group],
    overrides: ModeOverrides,
    wire_bytes: int,
) -> tuple[list[PlannedParameter], list[Choice]]:
    """As :func:`arrange`, for slices that are known, which no process has to hold.

    Args:
        cuts: of each parameter: its slices, ``None`` where it is not cut, or why they are none.
        together: whether all ranks of the job share the parameter.
    """
    result, choices = list(planned), []
    total: dict[Any, int] = defaultdict(int)
    largest: dict[Any, int] = defaultdict(int)
    alike: Counter[Any] = Counter()
    for p in planned:
        ranks = p.storage.ranks
        total[ranks] += p.cost
        largest[ranks] = max(
            [largest[ranks], *(cost // max(1, u.shape[0]) for u, cost in zip(p.matrix_views, p.costs))]
        )
        alike[ranks, p.storage.shape, p.group] += 1
    for index, (p, cut, all_ranks) in enumerate(zip(planned, cuts, together)):
        group = groups[p.group]
        asked = overrides.mode(p.name, group["tensor_parallel"])
        if p.pair and asked in ("auto", "layerwise"):
            continue  # both factors go to one owner
        if p.pair:
            raise ValueError(_impossible(p.name, asked, "lora='joint' needs both factors of an adapter whole"))
        if isinstance(cut, UnavailableModeError):
            if asked not in ("auto", "layerwise"):
                raise ValueError(_impossible(p.name, asked, str(cut))) from cut
            continue
        if cut is None:
            continue
        ranks = p.storage.ranks
        candidate = _Candidate(p, all_ranks, cut, group, asked, wire_bytes)
        slowdown = max(1.0, largest[ranks] * p.storage.world_size / total[ranks])
        options = _options(candidate, rule, slowdown, alike[ranks, p.storage.shape, p.group])
        choice, result[index] = _chosen(candidate, rule, options)
        choices.append(choice)
    blockwise = [c for c in choices if c.mode == "blockwise"]
    if blockwise:
        warnings.warn(
            f"tensor_parallel='blockwise': the slices of {len(blockwise)} parameters on {blockwise[0].ranks} ranks are "
            "transformed as matrices of their own; the updates are not those of one process and change with the number of "
            "ranks",
            stacklevel=2,
        )
    return result, choices


_Option = tuple[Arrangement | None, Estimate] | str
"""An arrangement and its price, or why there is none."""


def _options(c: _Candidate, rule: MatrixRule, slowdown: float, alike: int) -> dict[str, _Option]:
    """The exact modes."""
    p, k = c.parameter, c.cut.size
    world = p.storage.world_size
    columns = world // k
    in_bucket = max(1.0, min(alike, bucket_sizes(alike=2 * MAX_BUCKET_NUMEL).alike * p.storage.shards / p.numel))
    moved = 2 * p.numel / world * (p.storage.shards - 1) / p.storage.shards * c.wire_bytes
    if p.is_local:  # whole experts: nothing to choose
        moved, in_bucket = 0.0, math.inf
    options: dict[str, _Option] = {"layerwise": (None, Estimate(p.cost / world * slowdown, moved, 2 / in_bucket))}
    if p.is_local:
        return options
    collectives = 1 if columns == 1 else 2
    gathered = p.numel / columns * (k - 1) / k * c.wire_bytes + (0.0 if columns == 1 else moved / 2)
    duplicated = Arrangement("duplicated", c.cut, p.costs)
    options["duplicated"] = (duplicated, Estimate(p.cost / columns, gathered, collectives / in_bucket))
    try:
        options["distributed"] = _distributed(c, rule, in_bucket, moved)
    except UnavailableModeError as error:
        options["distributed"] = str(error)
    return options


def _distributed(c: _Candidate, rule: MatrixRule, in_bucket: float, moved: float) -> tuple[Arrangement, Estimate]:
    p, k = c.parameter, c.cut.size
    if not rule.can_shard(c.group):
        raise UnavailableModeError(f"{rule.name} needs whole matrices with these hyperparameters")
    if not c.together:
        raise UnavailableModeError("the mesh has not all ranks of the job, which a group of some of them needs")
    recut, dims = distributed_cuts(p.matrix_views, p.storage.shape, c.cut)
    costs: list[int] = []
    methods: list[Method] = []
    sent, messages = 0, 0
    for matrix_view, whole, dim in zip(p.matrix_views, p.costs, dims):
        batch, m, n = matrix_view.shape
        if dim is None:  # on one rank
            costs.append(whole)
            methods.append("standard")
            continue
        method, work = rule.shard_work(m, n, k, dim, c.group)
        methods.append(method)
        costs.append(batch * work.flops)
        sent += batch * work.bytes
        messages = max(messages, work.messages)
    columns = p.storage.world_size // k
    arrangement = Arrangement("distributed", c.cut, tuple(costs), tuple(methods), recut)
    travels = not arrangement.is_local(p.storage)
    received = 2 * (k - 1) / k * sent / columns + (moved if travels else 0.0)
    estimate = Estimate(sum(costs) / columns, received, (messages + 2 * travels) / in_bucket)
    return arrangement, estimate


def _chosen(c: _Candidate, rule: MatrixRule, options: Mapping[str, _Option]) -> tuple[Choice, PlannedParameter]:
    p, asked, reason = c.parameter, c.asked, ""
    estimates = {mode: option[1] for mode, option in options.items() if not isinstance(option, str)}
    allowed = [mode for mode in estimates if mode in rule.tensor_parallel_modes]
    if asked == "blockwise" and not p.is_local:
        mode, parameter = "blockwise", _blockwise(c, rule)
        estimates["blockwise"] = Estimate(parameter.cost / p.storage.world_size, 0.0, 0.0)
        allowed.append("blockwise")
    else:
        mode = min(allowed, key=lambda m: estimates[m].seconds) if asked == "auto" else asked
        option = options.get(mode, "every rank has whole matrices")
        if isinstance(option, str):
            mode, reason, option = "layerwise", option, options["layerwise"]
        assert not isinstance(option, str)
        parameter = replace(p, arrangement=option[0])
    shapes = tuple(matrix_view.shape for matrix_view in p.matrix_views)
    return Choice(p.name, shapes, c.cut.size, asked, mode, {m: estimates[m] for m in allowed}, reason), parameter


def _blockwise(c: _Candidate, rule: MatrixRule) -> PlannedParameter:
    p, shape = c.parameter, c.parameter.storage.shape
    try:
        pairs = blockwise_matrix_views(p.matrix_views, shape, c.cut)
    except UnavailableModeError as error:
        raise ValueError(_impossible(p.name, "blockwise", str(error))) from error
    matrix_views = tuple(part for part, _ in pairs)
    costs = tuple(matrix_view.shape[0] * rule.cost(*matrix_view.shape[1:], c.group) for matrix_view in matrix_views)
    arrangement = Arrangement("blockwise", c.cut, costs)
    return replace(
        p,
        matrix_views=matrix_views,
        costs=costs,
        shard_cost=None,
        arrangement=arrangement,
        whole_shapes=tuple(matrix_view.shape[1:] for _, matrix_view in pairs),
    )


def _impossible(name: str, mode: str, reason: str) -> str:
    return (
        f"tensor_parallel={mode!r} cannot be for {name}: {reason}; give it another mode with "
        f"tensor_parallel_modules='{name}:layerwise'"
    )


def describe(choices: Sequence[Choice]) -> str:
    """A line for each kind of matrix: what is done, and what the alternatives would cost."""
    if not choices:
        return ""
    kinds: dict[Any, list[Choice]] = {}
    for c in choices:
        kinds.setdefault((c.shapes, c.ranks, c.asked, c.mode, c.reason), []).append(c)
    lines = ["tensor parallel (predicted for one H100 a rank, NVLink, nothing hidden):"]
    for (shapes, ranks, asked, mode, reason), members in kinds.items():
        counts = Counter(shapes)
        sizes = " + ".join(f"{count * b}x{m}x{n}" for (b, m, n), count in counts.items())
        prices = ", ".join(f"{name} {_time(e.seconds)}" for name, e in members[0].estimates.items())
        word = f"{mode} (auto)" if asked == "auto" else mode
        why = f"; {asked} cannot be: {reason}" if reason else ""
        lines.append(f"  {len(members)} x [{sizes}] on {ranks} ranks: {word}; each {prices}{why}")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
