"""What a step did, measured while it runs: scalars on the device, brought to one rank and read once.

A :class:`StepMetrics` is told of each bucket between its transform and the weights' step, when all there is to know is
at hand: each rank measures what it computes or holds, and nobody else does, so that sums over ranks count everything once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.first_step_checks import control_device
from hf_emopt.distributed.layout import whole_numel
from hf_emopt.distributed.plan import Batch, PlannedParameter
from hf_emopt.engine.bucket_step import BucketStep
from hf_emopt.engine.context import StepContext
from hf_emopt.engine.stopwatch import Stopwatch
from hf_emopt.rules.base import Group, MatrixRule

SUMS = ("update", "weight", "momentum")
"""Squares, added up over what ranks have of a parameter."""

PEAKS = ("orthogonality_error", "condition_number", "failures")
"""The largest of a parameter's matrices; -1 where there is none."""

_CHUNK_NUMEL = 2**24
"""Elements that are brought to float32 at a time."""


@dataclass(frozen=True)
class ParameterFigures:
    """What was measured of one parameter; ``None`` where there is nothing to measure.

    Attributes:
        rule: name of the rule, ``"adamw"`` for the auxiliary parameters.
        numel: elements of the whole parameter.
        lr: learning rate of its group.
        gain: factor by shape on the update, the mean over its matrices; 1 for rules without one.
        moved: the weight was stepped: not in a skipped step, nor in a round of warm-up.
        update, weight, momentum: norms, of the update before the learning rate.
        orthogonality_error, condition_number, failures: the largest of its matrices.
        refresh_age: steps.
    """

    rule: str
    numel: int
    lr: float
    gain: float
    moved: bool
    update: float
    weight: float
    momentum: float | None
    orthogonality_error: float | None
    condition_number: float | None
    failures: int | None
    refresh_age: int | None


@dataclass(frozen=True)
class Figures:
    """What was measured in a step.

    Attributes:
        parameters: by name.
        skipped_steps: so far.
        failures: refreshes that failed, so far, on all ranks.
        waited: seconds that this rank waited for collectives.
        imbalance: planned cost of the busiest rank over the mean.
    """

    parameters: dict[str, ParameterFigures]
    skipped_steps: int
    failures: int | None
    waited: float
    imbalance: float


@dataclass
class _Host:
    """What the host knows of a parameter in the step."""

    rule: str
    group: Group
    numel: int
    gain: float
    moves: bool
    has_momentum: bool
    age: int | None


class StepMetrics:
    """Measures the steps that are taken while it is a step's observer."""

    def __init__(self) -> None:
        self.stopwatch = Stopwatch()
        self._clear()

    def _clear(self) -> None:
        self._context: StepContext | None = None
        self._known: dict[str, _Host] = {}
        self._sums: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._peaks: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self._ok: Tensor | None = None
        self._rates: list[float | Tensor] = []

    # ------------------------------------------------------------------ while a step runs

    def begin(self, context: StepContext, ok: Tensor | None, among: frozenset[str] | None) -> None:
        """A step begins, of all parameters or of those with these names; what they had before is forgotten."""
        if self._context is not context or among is None:
            self._clear()
        for found in (self._sums, self._peaks):
            for key in [k for k in found if among is not None and k[0] in among]:
                del found[key]
        self._context, self._ok = context, ok
        # As they are now: a scheduler may move on before the figures are read.
        rates = [group["lr"] for group in context.groups]
        self._rates = [rate.detach().clone().float() if isinstance(rate, Tensor) else float(rate) for rate in rates]

    def accumulated(self, bucket_step: BucketStep) -> None:
        """Weights before the step, and momentum that is kept with them, after it took the gradient in."""
        members, slices = bucket_step.members, bucket_step.slices
        names = [p.name for p in members.bucket.parameters]
        if not members.sharded:
            held = [names[s.parameter] for s in members.owned]
        else:  # copies of a shard are measured once
            held = [names[i] for i in members.present] if members.grid.replica == 0 else []
        slices = slices[: len(held)]
        weights, momenta = [s.weight for s in slices], [s.state.get("momentum_buffer") for s in slices]
        for what, tensors in (("weight", weights), ("momentum", momenta)):
            there = [(name, t) for name, t in zip(held, tensors) if t is not None]
            for (name, _), norm in zip(there, _norms([t for _, t in there])):
                self._sums[name, what].append(norm.square())

    def transformed(self, bucket_step: BucketStep, updates: Sequence[Tensor]) -> None:
        """A bucket of matrices, between its transform and the weights' step.

        Args:
            updates: of the owned regions, or of ``members.stacks``; still to be multiplied by the bucket step's scales.
        """
        members, scales = bucket_step.members, bucket_step.scales
        if members.stacks is not None and not members.bucket.paired:
            updates = members.stacks.split(updates)
        names = [p.name for p in members.bucket.parameters]
        self._note_bucket(bucket_step)
        mine = [k for k, owned_region in enumerate(members.owned) if not owned_region.copy]
        for k, norm in zip(mine, _norms([updates[k] for k in mine])):
            self._sums[names[members.owned[k].parameter], "update"].append((norm * scales[k]).square())
        if not members.bucket.paired:
            for b, batch in enumerate(members.batches):
                if members.jobs[b] and not batch.copy:
                    self._orthogonality(bucket_step, b, updates)

    def _note_bucket(self, bucket_step: BucketStep) -> None:
        rule, members, group = bucket_step.rule, bucket_step.members, bucket_step.group
        bucket, schedule = members.bucket, bucket_step.context.schedule
        for i, now in zip(members.present, bucket_step.param_steps):
            parameter, age = bucket.parameters[i], None
            if rule.scheduled:
                steps = [
                    schedule.of(bucket, owned_region, u, b)
                    for owned_region in bucket.owned_regions
                    if owned_region.parameter == i
                    for u, matrix_view in enumerate(owned_region.matrix_views)
                    for b in range(matrix_view.shape[0])
                ]
                ages = [rule.refresh_age(now, s, group) for s in steps]
                age = max((a for a in ages if a is not None), default=None)
            gain, moves = _gain(rule, parameter, group), now > rule.warmup_steps(group)
            self._known[parameter.name] = _Host(
                rule.name, group, parameter.numel, gain, moves, rule.has_momentum(group), age
            )

    def batch_state(self, bucket_step: BucketStep, b: int, state: dict[str, Tensor]) -> None:
        """State of the matrices of a batch, all of them, after its transform."""
        members = bucket_step.members
        batch = members.batches[b]
        if batch.copy:
            return
        found = bucket_step.rule.measure(state, batch.shape, bucket_step.group)
        offset = 0
        for (i, _), size in zip(batch.jobs, batch.sizes):
            rows, offset = slice(offset, offset + size), offset + size
            if i not in members.owned_at:
                continue
            name = members.bucket.parameters[members.every[i].parameter].name
            for what, values in found.items():
                if what == "momentum":
                    self._sums[name, what].append(values[rows].sum())
                else:
                    self._peaks[name, what].append(values[rows].amax())

    def _orthogonality(self, bucket_step: BucketStep, b: int, updates: Sequence[Tensor]) -> None:
        """How far the updates of a batch are from orthogonal."""
        members = bucket_step.members
        batch = members.batches[b]
        whole = batch.shape if batch.slicing is None else batch.slicing.full_shape
        gain = bucket_step.rule.update_gain(*whole, bucket_step.group)
        if gain is None:
            return
        total = None
        if batch.slicing is not None and batch.slicing.compute_group:
            shard = members.shards[b]
            assert shard is not None
            total = self.stopwatch.reduction(shard.sum)
        for k, matrix_view, _ in members.jobs[b]:
            parameter = members.bucket.parameters[members.owned[k].parameter]
            scale = bucket_step.scales[k] / (gain * parameter.scale)
            error = _orthogonality_error(matrix_view.extract(updates[k]), scale, batch, total)
            if error is not None:
                self._peaks[parameter.name, "orthogonality_error"].append(error)

    def others(self, numels: Sequence[tuple[str, int]], group: Group) -> None:
        """Parameters that AdamW steps, on this rank or another, and their elements."""
        for name, numel in numels:
            self._known[name] = _Host("adamw", group, numel, 1.0, True, True, None)

    @contextmanager
    def adamw(
        self, names: Sequence[str], weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Group
    ) -> Iterator[None]:
        """Around a step of AdamW on this rank's parts of parameters; its update follows from the moments afterwards."""
        for name, norm in zip(names, _norms(weights)):
            self._sums[name, "weight"].append(norm.square())
        yield
        for name, state, norm in zip(names, states, _norms([state["exp_avg"] for state in states])):
            self._sums[name, "momentum"].append(norm.square())
            self._sums[name, "update"].append(_adamw_square(state, group))

    @contextmanager
    def own(
        self, group: Group, params: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> Iterator[None]:
        """:meth:`adamw` of a group's parameters that this rank steps by itself; copies of a shard are measured once."""
        assert self._context is not None
        known = {id(p): name for name, p in zip(group["param_names"], group["params"])}
        names = [known[id(p)] for p in params]
        self.others([(name, whole_numel(p)) for name, p in zip(names, params)], group)
        first = [k for k, name in enumerate(names) if self._context.ranks.grids[name].replica == 0]
        with self.adamw([names[k] for k in first], [weights[k] for k in first], [states[k] for k in first], group):
            yield

    # ------------------------------------------------------------------ reading

    @property
    def measured(self) -> bool:
        """Whether a step was taken since the last :meth:`read`."""
        return self._context is not None

    def read(self, skipped: Mapping[torch.device, Tensor], by_wrapper: int = 0) -> Figures | None:
        """Brings what was measured to the first rank, and reads it there: one transfer from the device, and no other.

        Collective where ranks share parameters.

        Args:
            skipped: number of skipped steps, by device.
            by_wrapper: those that a wrapper has skipped beside.

        Returns:
            ``None`` on the other ranks.
        """
        context = self._context
        assert context is not None, "nothing was measured"
        names = [name for group in context.groups for name in group["param_names"]]
        zero, none = self._constants(context)
        sums = [_total(self._sums.get((n, w)), zero) for n in names for w in SUMS]
        sums.append(torch.full_like(zero, float(getattr(context.rule, "failures", 0))))
        peaks = [_largest(self._peaks.get((n, w)), none) for n in names for w in PEAKS]
        peaks.append(zero if self._ok is None else (~self._ok).float())
        peaks += [_largest(list(skipped.values()), none), *(r for r in self._rates if isinstance(r, Tensor))]
        values = _brought_together(sums, peaks, zero.device, context.ranks.consensus.group)
        figures = None if values is None else self._figures(context, names, values, len(sums), by_wrapper)
        self._clear()
        return figures

    def _constants(self, context: StepContext) -> tuple[Tensor, Tensor]:
        """Zero and -1 where figures are gathered."""
        group = context.ranks.consensus.group
        found = next(iter(self._sums.values()), None)
        device = control_device(group) if group is not None else found[0].device if found else torch.device("cpu")
        zero = torch.zeros((), dtype=torch.float32, device=device)
        return zero, zero - 1.0

    def _figures(
        self, context: StepContext, names: Sequence[str], values: list[float], count: int, by_wrapper: int
    ) -> Figures:
        sums, peaks = values[:count], values[count:]
        skipped_now, skipped = peaks[len(PEAKS) * len(names) :][:2]
        tensor_rates = iter(peaks[len(PEAKS) * len(names) + 2 :])
        rates = {
            name: rate
            for group, known in zip(context.groups, self._rates)
            for rate in [next(tensor_rates) if isinstance(known, Tensor) else known]
            for name in group["param_names"]
        }
        parameters = {}
        for index, name in enumerate(names):
            if name not in self._known:
                continue
            square = dict(zip(SUMS, sums[index * len(SUMS) :]))
            peak = dict(zip(PEAKS, peaks[index * len(PEAKS) :]))
            parameters[name] = _parameter(self._known[name], rates[name], square, peak, skipped_now > 0.0, context.rule)
        return Figures(
            parameters,
            int(max(skipped, 0.0)) + by_wrapper,
            int(sums[-1]) if hasattr(context.rule, "failures") else None,
            self.stopwatch.take(),
            context.plan.imbalance,
        )


def _gain(rule: MatrixRule, parameter: PlannedParameter, group: Group) -> float:
    """Factor by shape on the update, the mean over the parameter's matrices."""
    if parameter.pair:  # of the two factors of an adapter together there is none
        return 1.0
    shapes = parameter.whole_shapes or tuple(
        (matrix_view.shape[1], matrix_view.shape[2]) for matrix_view in parameter.matrix_views
    )
    gains = [rule.update_gain(*shape, group) for shape in shapes]
    counts = [matrix_view.shape[0] for matrix_view in parameter.matrix_views]
    total = sum((1.0 if g is None else g) * count for g, count in zip(gains, counts))
    return parameter.scale * total / max(1, sum(counts))


def _parameter(
    known: _Host, lr: float, square: dict[str, float], peak: dict[str, float], skipped: bool, rule: MatrixRule
) -> ParameterFigures:
    def there(what: str) -> float | None:
        return None if peak[what] < 0.0 else peak[what]

    failures, age = there("failures"), known.age
    if age is not None and failures:  # a side whose refresh failed waits for another period
        age += int(failures) * rule.period(known.group)
    moved = known.moves and not skipped
    return ParameterFigures(
        rule=known.rule,
        numel=known.numel,
        lr=lr,
        gain=known.gain,
        moved=moved,
        update=math.sqrt(square["update"]) if moved and square["update"] >= 0.0 else 0.0 if not moved else math.nan,
        weight=math.sqrt(square["weight"]) if square["weight"] >= 0.0 else math.nan,
        momentum=math.sqrt(square["momentum"]) if known.has_momentum and square["momentum"] >= 0.0 else None,
        orthogonality_error=None if skipped else there("orthogonality_error"),
        condition_number=None if known.age is None else there("condition_number"),  # of what has been refreshed
        failures=None if failures is None else int(failures),
        refresh_age=age,
    )


def _brought_together(sums: list[Tensor], peaks: list[Tensor], device: torch.device, group: Any) -> list[float] | None:
    """Sums and maxima over ranks as numbers, on the group's first rank; the only look at the device."""
    added = torch.stack([t.to(device, torch.float32, non_blocking=device.type != "cpu") for t in sums])
    largest = torch.stack([t.to(device, torch.float32, non_blocking=device.type != "cpu") for t in peaks])
    if group is not None:
        first = dist.get_process_group_ranks(group)[0]
        dist.reduce(added, dst=first, op=dist.ReduceOp.SUM, group=group)
        dist.reduce(largest, dst=first, op=dist.ReduceOp.MAX, group=group)
        if dist.get_rank() != first:
            return None
    return torch.cat([added, largest]).tolist()  # type: ignore[no-any-return]


def _total(values: list[Tensor] | None, zero: Tensor) -> Tensor:
    if not values:
        return zero
    return values[0] if len(values) == 1 else torch.stack([v.to(values[0].device) for v in values]).sum()


def _largest(values: list[Tensor] | None, none: Tensor) -> Tensor:
    if not values:
        return none
    return values[0] if len(values) == 1 else torch.stack([v.to(values[0].device) for v in values]).amax()


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Frobenius norms, summed in float32 or wider."""
    if not tensors:
        return []
    if len({(t.dtype, t.device) for t in tensors}) == 1:
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        return list(torch._foreach_norm(list(tensors), 2, dtype=wide))
    return [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def _orthogonality_error(x: Tensor, scale: float, batch: Batch, total: Any) -> Tensor | None:
    """Largest of ``|G - I|_F / sqrt(s)`` over matrices ``(B, m, n)``, ``G`` the smaller Gram matrix, of side ``s``.

    Args:
        scale: what the matrices are to be multiplied by first.
        batch: whether they are slices of whole ones.
        total: adds up over the ranks that have the slices of a matrix.

    Returns:
        ``None`` where slices along the shorter side have no Gram matrix to add up.
    """
    m, n = batch.shape if batch.slicing is None or not batch.slicing.compute_group else batch.slicing.full_shape
    side = min(m, n)
    if side == 0:
        return None
    if total is not None and batch.slicing is not None and side == (m if batch.slicing.dim == -2 else n) and m != n:
        return None
    columns = n < m if total is None or m != n else batch.slicing is not None and batch.slicing.dim == -2
    errors = []
    for part in x.split(max(1, _CHUNK_NUMEL // (m * n))):
        wide = part.to(torch.promote_types(part.dtype, torch.float32)) * scale
        gram = (wide.mT @ wide if columns else wide @ wide.mT).contiguous()
        if total is not None:
            gram = total(gram)
        gram.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        errors.append(torch.linalg.vector_norm(gram, dim=(-2, -1)).amax())
    return _largest(errors, errors[0]) / math.sqrt(side)


def _adamw_square(state: Mapping[str, Tensor], group: Group) -> Tensor:
    """Squared norm of the update that AdamW's moments give, a bounded number of elements at a time."""
    beta1, beta2 = group["betas"]
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    steps = state["step"].to(mean.device).clamp_min(1.0)
    first, root = 1.0 - beta1**steps, (1.0 - beta2**steps).sqrt()
    total = torch.zeros((), dtype=mean.dtype, device=mean.device)
    if mean.ndim == 0:
        mean, square = mean.view(1), square.view(1)
    rows = max(1, _CHUNK_NUMEL // max(1, mean[:1].numel()))
    for m, v in zip(mean.split(rows), square.split(rows)):
        if group["compat"] == "moonlight":
            update = m / (group["eps"] + v.sqrt()) * (root / first)
        else:
            update = m / first / (v.sqrt() / root + group["eps"])
        total = total + update.square().sum()
    return total
