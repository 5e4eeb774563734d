"""One optimizer step, from the gradients to the last update: what is asked first, and in which order buckets go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_emopt.checkpoint.state_dict import only_initializes
from hf_emopt.engine.adamw_bucket import step_aux_bucket, step_own_aux
from hf_emopt.engine.elementwise import look_at_gradients
from hf_emopt.engine.matrix_bucket import step_bucket
from hf_emopt.engine.pipeline import Task, pipeline
from hf_emopt.optimizers.model_changes import warn_of_strangers
from hf_emopt.rules.base import Group

if TYPE_CHECKING:
    from hf_emopt.optimizers.interface import Steppable
from hf_emopt.engine.run import _run, _tasks

__all__ = ["step_together"]


_LOOK_EVERY = 100
"""Steps between two looks at all parameters of the model, which take a host a millisecond or so."""


def step_together(optimizer: Steppable, among: frozenset[str] | None) -> None:
    """A step of the parameters with these names, or of all."""
    checks = optimizer.skip_nonfinite and not (optimizer._flattened is not None and optimizer._flattened.checked)
    # First: a GPU looks at all numbers while the host looks at all parameters.
    gradients = look_at_gradients(optimizer.param_groups, checks)
    engine = optimizer._current_engine()
    engine.prepare()
    optimizer._consolidated = None
    optimizer._only_initialized = among is None and only_initializes(optimizer, engine)
    if optimizer._only_initialized:
        return
    if engine.offload is not None:
        engine.offload.begin()
        optimizer._early.count()
    watch = engine.watch = optimizer._diagnostics.watch
    optimizer._changed.check()
    agreement = engine.begin(gradients, among)
    if watch is not None:
        watch.begin(engine, agreement.ok, among)
    if among is None:
        _warn_of_strangers(optimizer, agreement.present)
    if agreement.ok is not None:
        _count_skipped(optimizer, agreement.ok)
    groups = [_applied(optimizer, group) for group in optimizer.param_groups]
    others = _tasks(engine, engine.aux_plan, step_aux_bucket, groups)
    matrices = _tasks(engine, engine.plan, step_bucket, groups)
    names = agreement.present - engine.shared_aux

    def own() -> list[Task]:
        return [
            task
            for index, group in enumerate(optimizer.param_groups)
            if group["kind"] == "aux"
            for task in step_own_aux(engine, index, group, names)
        ]

    if optimizer._overlaps and engine.world_size > 1:
        pipeline(own())
        tasks = [*others, *matrices]  # the embedding, which a forward pass needs first, is among the others
        optimizer._delayed.begin((task, [engine.parameter(b, i) for i in engine.present(b)]) for task, b in tasks)
    else:
        engine.begin_tasks(undisturbed=watch is None)  # who measures reads the state of each bucket
        # Flat parameters and their state are somebody else's between steps.
        _run(engine, matrices, [task for task, _ in others], own, may_go_on=optimizer._flattened is None)
    engine.finish_copies()


def _applied(optimizer: Steppable, group: Group) -> Group:
    """The group as this step sees it; a scheduler may change the learning rate before a delayed update is applied."""
    if group["low_precision_weights"] == "stochastic" or group["state_dtype"] == "bfloat16":
        group["rounding_seed"] = group.get("rounding_seed", 0) + 1
    if not optimizer._overlaps:
        return group
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


def _warn_of_strangers(optimizer: Steppable, present: frozenset[str]) -> None:
    """When other parameters have gradients than before, and now and then: the model may have parameters that it had not, or
    that were frozen, when the optimizer was built, and of these nothing is seen here."""
    model = optimizer._model() if optimizer._model is not None else None
    if model is None:
        return
    if present != optimizer._last_present or optimizer._since_look == _LOOK_EVERY:
        optimizer._last_present, optimizer._since_look = present, 0
        warn_of_strangers(optimizer, model)
    optimizer._since_look += 1


def _count_skipped(optimizer: Steppable, ok: Tensor) -> None:
    if ok.device not in optimizer._skipped:
        optimizer._skipped[ok.device] = torch.zeros((), device=ok.device)
    optimizer._skipped[ok.device].add_(~ok)
