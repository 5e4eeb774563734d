"""Figures of a step under the names that logs have: by rule, by layer, and of the whole.

``emopt/<rule>/<quantity>``, where the rule of the auxiliary parameters is ``adamw``; ``emopt/layers/<parameter>/<quantity>``;
and figures of the whole model. docs/diagnostics.md defines all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_emopt.engine.step_metrics import Figures, ParameterFigures, StepMetrics

Level = Literal["summary", "layers"]

PREFIX = "emopt/"
LAYERS = PREFIX + "layers/"

QUANTITIES: dict[str, str] = {
    "update_rms": "RMS of the update, before the learning rate",
    "weight_rms": "RMS of the weight",
    "update_ratio": "relative size of a step: lr × update RMS / weight RMS",
    "orthogonality_error": "distance of the update from orthogonal",
    "momentum_norm": "norm of the momentum",
    "effective_lr": "learning rate × factor by shape",
    "condition_number": "condition number of the factors, largest",
    "refresh_age": "steps since the statistics of the preconditioner",
    "failures": "refreshes that failed in a row",
}
"""Quantities of a layer, and what they are."""


class Diagnostics:
    """Whether an optimizer's steps are measured, and the figures of the last one that was.

    Attributes:
        observer: measures the next steps; ``None`` while nobody wants to know.
        values: the last figures by name; empty on all ranks but the first.
        level: of the figures that a ``Trainer`` logs; ``None`` for none.
    """

    def __init__(self) -> None:
        self.observer: StepMetrics | None = None
        self.values: dict[str, float] = {}
        self.level: Level | None = None
        self._metrics = StepMetrics()

    def start(self) -> None:
        """The next steps are measured."""
        self.observer = self._metrics

    def stop(self) -> None:
        """The next steps are not measured; what was measured since the last :meth:`read` is forgotten."""
        if self.observer is not None:
            self.observer, self._metrics = None, StepMetrics()

    def read(self, level: Level, skipped: Mapping[torch.device, Tensor], skipped_by_wrapper: int) -> bool:
        """Reads what was measured into :attr:`values`, and measures no more; ``False`` when no step was. Collective.

        Args:
            skipped: number of skipped steps so far, by device.
            skipped_by_wrapper: those that a wrapper has skipped by itself.
        """
        self.observer, self.values = None, {}
        if not self._metrics.measured:
            return False
        figures = self._metrics.read(skipped, skipped_by_wrapper)
        if figures is not None:
            self.values = named(figures, level)
        return True


def check_level(level: object, where: str) -> None:
    """Raises ``ValueError`` for a level that there is not."""
    if level not in get_args(Level):
        raise ValueError(f"{where}={level!r} is not one of {', '.join(get_args(Level))}")


def named(figures: Figures, level: Level) -> dict[str, float]:
    """Figures by the names that logs have."""
    values: dict[str, float] = {}
    rules: dict[str, list[ParameterFigures]] = {}
    for figure in figures.parameters.values():
        rules.setdefault(figure.rule, []).append(figure)
    for rule, members in rules.items():
        failures = figures.failures if any(f.failures is not None for f in members) else None
        values.update(_keyed(f"{PREFIX}{rule}/", _of_rule(members, failures)))
    values[f"{PREFIX}skipped_steps"] = figures.skipped_steps
    values[f"{PREFIX}imbalance"] = figures.imbalance
    values[f"{PREFIX}exposed_communication_ms"] = 1e3 * figures.waited
    if level == "layers":
        for name, figure in figures.parameters.items():
            values.update(_keyed(f"{LAYERS}{name}/", _of_parameter(figure)))
    return values


def _keyed(prefix: str, found: dict[str, float | None]) -> dict[str, float]:
    return {prefix + key: value for key, value in found.items() if value is not None}


def _of_parameter(f: ParameterFigures) -> dict[str, float | None]:
    root = math.sqrt(max(1, f.numel))
    return {
        "update_rms": f.update / root,
        "weight_rms": f.weight / root,
        "update_ratio": _ratio(f),
        "orthogonality_error": f.orthogonality_error,
        "momentum_norm": f.momentum,
        "effective_lr": _effective(f),
        "condition_number": f.condition_number,
        "refresh_age": f.refresh_age,
        "failures": f.failures,
    }


def _of_rule(members: list[ParameterFigures], failures: int | None) -> dict[str, float | None]:
    numel = max(1, sum(f.numel for f in members))
    update, weight = _together(f.update for f in members), _together(f.weight for f in members)
    step = _together(f.lr * f.update for f in members)
    momenta = [f.momentum for f in members if f.momentum is not None]

    def largest(what: Callable[[ParameterFigures], Any]) -> Any:
        return max((x for f in members if (x := what(f)) is not None), default=None)

    return {
        "update_rms": update / math.sqrt(numel),
        "weight_rms": weight / math.sqrt(numel),
        "update_ratio": step / weight if weight else None,
        "update_ratio_max": largest(_ratio),
        "orthogonality_error": largest(lambda f: f.orthogonality_error),
        "momentum_norm": _together(momenta) if momenta else None,
        "effective_lr": sum(_effective(f) * f.numel for f in members) / numel,
        "condition_number": largest(lambda f: f.condition_number),
        "refresh_age": largest(lambda f: f.refresh_age),
        "failures": failures,
    }


def _ratio(f: ParameterFigures) -> float | None:
    return f.lr * f.update / f.weight if f.weight else None


def _effective(f: ParameterFigures) -> float:
    return f.lr * f.gain if f.moved else 0.0


def _together(norms: Iterable[float]) -> float:
    return math.sqrt(sum(n * n for n in norms))
