"""The tensor-parallel mode of each matrix: the user's, or the one that is fastest by bytes and operations."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_emopt.distributed.assignment import MAX_BUCKET_NUMEL, bucket_sizes
from hf_emopt.distributed.plan import MODES, PlannedParameter, TensorParallelMode, TensorSlices
from hf_emopt.distributed.tensor_parallel import UnavailableModeError, blockwise_matrix_views, sliced_dims
from hf_emopt.linalg.cost import Cost, Method
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.overrides import Patterns
from hf_emopt.rules.base import Group, MatrixRule


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
        for patterns, _ in self.patterns:
            patterns.check_matched(names)

    def mode(self, name: str, default: str) -> str:
        return next((mode for patterns, mode in self.patterns if patterns.find([name]) is not None), default)


@dataclass(frozen=True)
class Choice:
    """The mode of one parameter.

    Attributes:
        shapes: ``(B, m, n)`` of its matrices.
        ranks: of the tensor parallel dimension.
        asked, mode: the mode that was asked for, and the mode that is used.
        costs: a rank's share of the parameter's cost, by mode, for the modes that are available.
        reason: why another mode is used than was asked for, or empty.
    """

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    ranks: int
    asked: str
    mode: str
    costs: Mapping[str, Cost]
    reason: str = ""


def choose_modes(
    planned: Sequence[PlannedParameter],
    sliced: Sequence[TensorSlices | UnavailableModeError | None],
    rule: MatrixRule,
    groups: Sequence[Group],
    overrides: ModeOverrides,
    bytes_each: int,
) -> tuple[list[PlannedParameter], list[Choice]]:
    """The parameters with their tensor-parallel modes, and what was chosen for each that tensor parallelism slices.

    Args:
        sliced: see :func:`~hf_emopt.distributed.tensor_parallel.tensor_slices`.
        bytes_each: bytes of an element that travels.

    Raises:
        ValueError: ``"blockwise"`` for a parameter whose slices are not matrices: it would silently be another update.
    """
    result, choices = list(planned), []
    total: dict[Any, int] = defaultdict(int)
    largest: dict[Any, int] = defaultdict(int)
    alike: Counter[Any] = Counter()
    for p in planned:
        ranks = p.storage.ranks
        total[ranks] += p.cost
        each = (cost // max(1, u.shape[0]) for u, cost in zip(p.matrix_views, p.costs))
        largest[ranks] = max([largest[ranks], *each])
        alike[ranks, p.storage.shape, p.group] += 1
    for index, (p, slices) in enumerate(zip(planned, sliced)):
        group = groups[p.group]
        asked = overrides.mode(p.name, group["tensor_parallel"])
        if p.pair and asked in ("auto", "layerwise"):
            continue  # both factors go to one owner
        if p.pair:
            raise ValueError(_impossible(p.name, asked, "lora='joint' needs both factors of an adapter whole"))
        if isinstance(slices, UnavailableModeError):
            if asked not in ("auto", "layerwise"):
                raise ValueError(_impossible(p.name, asked, str(slices))) from slices
            continue
        if slices is None:
            continue
        ranks = p.storage.ranks
        slowdown = max(1.0, largest[ranks] * p.storage.world_size / total[ranks])
        candidate = _Candidate(p, slices, rule, group, bytes_each)
        options = candidate.options(slowdown, alike[ranks, p.storage.shape, p.group])
        choice, result[index] = candidate.chosen(asked, options)
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


_Option = tuple[TensorParallelMode | None, Cost] | str
"""A mode and its cost, or why it is unavailable."""


@dataclass(frozen=True)
class _Candidate:
    """A sliced parameter whose mode is to be chosen."""

    parameter: PlannedParameter
    slices: TensorSlices
    rule: MatrixRule
    group: Group
    bytes_each: int

    @property
    def replicas(self) -> int:
        """Sets of ranks that together hold every slice."""
        return self.parameter.storage.world_size // self.slices.size

    def options(self, slowdown: float, alike: int) -> dict[str, _Option]:
        """The modes that give the update of the whole matrix, with the costs of a rank's share.

        Args:
            slowdown: largest load over the mean where every matrix has one owner.
            alike: parameters of this shape, which share the messages of their bucket.
        """
        p, k, replicas = self.parameter, self.slices.size, self.replicas
        world = p.storage.world_size
        if p.is_local:  # whole experts: nothing to choose
            return {"layerwise": (None, Cost(p.cost / world * slowdown, 0.0, 0.0))}
        in_bucket = max(1.0, min(alike, bucket_sizes(alike=2 * MAX_BUCKET_NUMEL).alike * p.storage.shards / p.numel))
        moved = 2 * p.numel / world * (p.storage.shards - 1) / p.storage.shards * self.bytes_each
        options: dict[str, _Option] = {"layerwise": (None, Cost(p.cost / world * slowdown, moved, 2 / in_bucket))}
        collectives = 1 if replicas == 1 else 2
        gathered = p.numel / replicas * (k - 1) / k * self.bytes_each + (0.0 if replicas == 1 else moved / 2)
        duplicated = TensorParallelMode("duplicated", self.slices, p.costs)
        options["duplicated"] = (duplicated, Cost(p.cost / replicas, gathered, collectives / in_bucket))
        try:
            options["distributed"] = self._distributed(in_bucket, moved)
        except UnavailableModeError as error:
            options["distributed"] = str(error)
        return options

    def _distributed(self, in_bucket: float, moved: float) -> tuple[TensorParallelMode, Cost]:
        p, k = self.parameter, self.slices.size
        if not self.rule.can_shard(self.group):
            raise UnavailableModeError(f"{self.rule.name} needs whole matrices with these hyperparameters")
        if not self.slices.whole_job:
            raise UnavailableModeError("the mesh has not all ranks of the job, which a group of some of them needs")
        recut, dims = sliced_dims(p.matrix_views, p.storage.shape, self.slices)
        costs: list[int] = []
        methods: list[Method] = []
        summed, messages = 0, 0
        for matrix_view, whole, dim in zip(p.matrix_views, p.costs, dims):
            batch, m, n = matrix_view.shape
            if dim is None:  # on one rank
                costs.append(whole)
                methods.append("standard")
                continue
            method, work = self.rule.shard_work(m, n, k, dim, self.group)
            methods.append(method)
            costs.append(batch * work.flops)
            summed += batch * work.bytes
            messages = max(messages, work.messages)
        mode = TensorParallelMode("distributed", self.slices, tuple(costs), tuple(methods), recut)
        travels = not mode.is_local(p.storage)
        received = 2 * (k - 1) / k * summed / self.replicas + (moved if travels else 0.0)
        return mode, Cost(sum(costs) / self.replicas, received, (messages + 2 * travels) / in_bucket)

    def chosen(self, asked: str, options: Mapping[str, _Option]) -> tuple[Choice, PlannedParameter]:
        """The mode that was asked for, or the fastest one that the rule allows for ``"auto"``."""
        p, reason = self.parameter, ""
        costs = {mode: option[1] for mode, option in options.items() if not isinstance(option, str)}
        allowed = [mode for mode in costs if mode in self.rule.tensor_parallel_modes]
        if asked == "blockwise" and not p.is_local:
            mode, parameter = "blockwise", self._blockwise()
            costs["blockwise"] = Cost(parameter.cost / p.storage.world_size, 0.0, 0.0)
            allowed.append("blockwise")
        else:
            mode = min(allowed, key=lambda m: costs[m].seconds) if asked == "auto" else asked
            option = options.get(mode, "every rank has whole matrices")
            if isinstance(option, str):
                mode, reason, option = "layerwise", option, options["layerwise"]
            assert not isinstance(option, str)
            parameter = replace(p, tensor_parallel=option[0])
        shapes = tuple(matrix_view.shape for matrix_view in p.matrix_views)
        choice = Choice(p.name, shapes, self.slices.size, asked, mode, {m: costs[m] for m in allowed}, reason)
        return choice, parameter

    def _blockwise(self) -> PlannedParameter:
        p = self.parameter
        try:
            pairs = blockwise_matrix_views(p.matrix_views, p.storage.shape, self.slices)
        except UnavailableModeError as error:
            raise ValueError(_impossible(p.name, "blockwise", str(error))) from error
        matrix_views = tuple(part for part, _ in pairs)
        costs = matrix_costs(self.rule, self.group, matrix_views)
        return replace(
            p,
            matrix_views=matrix_views,
            costs=costs,
            shard_cost=None,
            tensor_parallel=TensorParallelMode("blockwise", self.slices, costs),
            whole_shapes=tuple(matrix_view.shape[1:] for _, matrix_view in pairs),
        )


def matrix_costs(rule: MatrixRule, group: Group, matrix_views: Sequence[MatrixView]) -> tuple[int, ...]:
    """Operations of transforming each matrix view."""
    return tuple(batch * rule.cost(m, n, group) for batch, m, n in (u.shape for u in matrix_views))


def _impossible(name: str, mode: str, reason: str) -> str:
    return (
        f"tensor_parallel={mode!r} cannot be for {name}: {reason}; give it another mode with "
        f"tensor_parallel_modules='{name}:layerwise'"
    )


def describe(choices: Sequence[Choice]) -> str:
    """A line for each kind of matrix: its mode, and what the alternatives would cost."""
    if not choices:
        return ""
    kinds: dict[Any, list[Choice]] = {}
    for c in choices:
        kinds.setdefault((c.shapes, c.ranks, c.asked, c.mode, c.reason), []).append(c)
    lines = ["tensor parallel (predicted for one H100 a rank, NVLink, nothing hidden):"]
    for (shapes, ranks, asked, mode, reason), members in kinds.items():
        counts = Counter(shapes)
        sizes = " + ".join(f"{count * b}x{m}x{n}" for (b, m, n), count in counts.items())
        prices = ", ".join(f"{name} {_time(e.seconds)}" for name, e in members[0].costs.items())
        word = f"{mode} (auto)" if asked == "auto" else mode
        why = f"; {asked} cannot be: {reason}" if reason else ""
        lines.append(f"  {len(members)} x [{sizes}] on {ranks} ranks: {word}; each {prices}{why}")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
