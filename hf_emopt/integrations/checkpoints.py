"""Keeps parameters current and state whole where transformers and Accelerate read them.

Two things about a distributed optimizer are not as its callers assume. With ``overlap_param_gather`` the last updates may
still be on their way when ``step()`` returns; and under DistributedDataParallel a rank holds the state of its own
matrices only, while ``Trainer`` asks rank 0 alone for the state. So a ``Trainer`` finishes the first
(``optimizer.synchronize()``) before it saves or evaluates, and gathers the second
(``optimizer.consolidate_state_dict()``, a collective of all ranks) before it saves the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import trainer
from transformers.utils import logging

from hf_emopt.integrations.registry import unwrap_optimizer

__all__ = ["MARK", "attach_checkpoint_hooks", "consolidate", "hook_trainer", "synchronize"]

logger = logging.get_logger("transformers.hf_emopt")

# Marks what this package put into transformers, so that a reload of the package replaces it instead of seeing a rival.
MARK = "__hf_emopt__"

SYNCHRONIZED = ("save_model", "evaluate", "predict", "_load_best_model")
CONSOLIDATED = ("_save_optimizer_and_scheduler",)


def synchronize(optimizer: Any) -> None:
    """Makes parameters current; without effect on an optimizer that is not ours. No collective."""
    ours = unwrap_optimizer(optimizer)
    if ours is not None:
        ours.synchronize()


def consolidate(optimizer: Any) -> None:
    """Makes ``state_dict()`` whole on rank 0; without effect on an optimizer that is not ours. All ranks must call."""
    ours = unwrap_optimizer(optimizer)
    if ours is not None:
        ours.consolidate_state_dict(to=0)


def hook_trainer() -> None:
    """Has every ``Trainer`` do both where they are due. Idempotent; without effect on other optimizers."""
    for names, action in ((SYNCHRONIZED, synchronize), (CONSOLIDATED, consolidate)):
        for name in names:
            original = getattr(trainer.Trainer, name, None)
            if original is None:
                logger.warning(
                    f"this version of transformers has no Trainer.{name}: call optimizer.synchronize() before parameters "
                    "are read and optimizer.consolidate_state_dict() on all ranks before the optimizer is saved."
                )
                continue
            setattr(trainer.Trainer, name, _preceded(getattr(original, MARK, original), action))


def _preceded(original: Callable[..., Any], action: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: trainer.Trainer, *args: Any, **kwargs: Any) -> Any:
        action(getattr(self, "optimizer", None))
        return original(self, *args, **kwargs)

    setattr(method, MARK, original)
    return method


def attach_checkpoint_hooks(accelerator: Any) -> None:
    """The same for ``save_state`` and ``load_state`` of an ``accelerate.Accelerator``. Idempotent."""
    if getattr(accelerator, MARK, False):
        return

    def before_saving(models: Any, weights: Any, output_dir: Any) -> None:
        # The weights are references to the parameters, so bringing these up to date is in time.
        for optimizer in accelerator._optimizers:
            synchronize(optimizer)
            consolidate(optimizer)

    def before_loading(models: Any, input_dir: Any) -> None:
        # An update that arrives after the weights have been loaded would overwrite them.
        for optimizer in accelerator._optimizers:
            synchronize(optimizer)

    accelerator.register_save_state_pre_hook(before_saving)
    accelerator.register_load_state_pre_hook(before_loading)
    setattr(accelerator, MARK, True)
