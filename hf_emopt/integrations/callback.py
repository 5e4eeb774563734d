"""Diagnostics in the logs of ``Trainer``: only steps that will be logged are measured."""

from __future__ import annotations

import math
import os
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from hf_emopt.integrations.registry import unwrap_optimizer
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.diagnostics import Level, check_level

logger = logging.get_logger("transformers.hf_emopt")

VARIABLE = "EMOPT_DIAGNOSTICS"


def level_of_environment() -> Level | None:
    """The level that ``EMOPT_DIAGNOSTICS`` asks for; ``ValueError`` for a value that is no level."""
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return None
    check_level(value, f"environment variable {VARIABLE}")
    return value  # type: ignore[return-value]


def add_to_log(logs: dict[str, Any], state: TrainerState, metrics: dict[str, Any]) -> None:
    """Adds to a log on its way to the loggers, and to the history, which already has a copy of the log."""
    logs.update(metrics)
    if state.log_history:
        state.log_history[-1].update(metrics)


class MeasuringCallback(TrainerCallback):
    """Measures an optimizer with a level; base of every ``Trainer``'s default callback and of :class:`EmoptCallback`."""

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        # Right before the optimizer's step would be too late: DeepSpeed steps inside of backward.
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None and optimizer.diagnostics_state.level is not None:
            optimizer.diagnostics_state.values = {}
            if _will_log(args, state, kwargs.get("train_dataloader")):
                optimizer.diagnostics_state.start()

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        # Reading is a collective, and a Trainer's log() may run on some ranks only.
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None and optimizer.diagnostics_state.observer is not None:
            level = optimizer.diagnostics_state.level
            assert level is not None
            optimizer.read_diagnostics(level)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        logs, optimizer = kwargs.get("logs"), unwrap_optimizer(kwargs.get("optimizer"))
        if logs is not None and "learning_rate" in logs and optimizer is not None:
            add_to_log(logs, state, self.metrics(optimizer))

    def metrics(self, optimizer: MatrixOptimizer) -> dict[str, float]:
        """The figures for the log of the last step."""
        return optimizer.diagnostics_state.values


class EmoptCallback(MeasuringCallback):
    """Measures the optimizer, and puts the figures into the logs of ``Trainer``.

    With ``Trainer(callbacks=[hf_emopt.EmoptCallback()])`` every reporter (TensorBoard, W&B, trackio, ...) and
    ``trainer_state.json`` get them. Only steps that are logged are measured: on the device, with one transfer to the host.
    Every rank measures what it holds; the first rank logs. The environment variable ``EMOPT_DIAGNOSTICS`` (``summary`` or
    ``layers``) does the same for a script that is not edited. :mod:`hf_emopt.optimizers.diagnostics` lists the figures.

    Args:
        level: ``"summary"``: figures by rule, and of the whole; ``"layers"``: those of every parameter too, which fill the
            console as well.

    Raises:
        ValueError: for another level.
    """

    def __init__(self, level: Level = "summary") -> None:
        check_level(level, "EmoptCallback: level")
        self.level: Level = level

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Sets the level of the optimizer; warns where the optimizer is none of ours."""
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None:
            optimizer.diagnostics_state.level = self.level
            return
        logger.warning(
            "EmoptCallback measures optimizers of hf_emopt, and this run trains with "
            f'{type(kwargs.get("optimizer")).__name__}: write optim="muon", for instance, or leave the callback out.'
        )


def _will_log(args: TrainingArguments, state: TrainerState, dataloader: Any) -> bool:
    """Whether the step that begins will be logged, as ``DefaultFlowCallback`` decides after it."""
    coming = state.global_step + 1
    if coming == 1 and args.logging_first_step:
        return True
    if args.logging_strategy == IntervalStrategy.STEPS:
        return bool(coming % max(1, int(state.logging_steps)) == 0)
    if args.logging_strategy == IntervalStrategy.EPOCH:
        try:
            steps = max(1, math.ceil(len(dataloader) / args.gradient_accumulation_steps))
        except TypeError:  # a stream has no length: its epoch ends where the run does
            steps = state.max_steps
        return coming % steps == 0 or coming == state.max_steps
    return False
