"""A ``Trainer`` for matrix optimizers: overlap between nodes, the plan at the start, metrics in every log."""

from __future__ import annotations

import logging as levels
import os
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from transformers import Trainer
from transformers.training_args import ParallelMode
from transformers.utils import logging

from hf_emopt.integrations.refusals import optim_name
from hf_emopt.integrations.registry import unwrap_optimizer
from hf_emopt.integrations.sharded_checkpoints import is_sharded_at_load, load_optimizer, permitted, save_optimizer
from hf_emopt.integrations.sharded_checkpoints import load_weights as load_sharded_weights
from hf_emopt.integrations.transformers import DefaultCallback, OptimizerFactory, handler_of

logger = logging.get_logger("transformers.hf_emopt")


class EmoptTrainerMixin:
    """Mixes into any ``Trainer``, as the first base: ``class EmoptSFTTrainer(EmoptTrainerMixin, SFTTrainer)``.

    A plain ``Trainer`` trains to the same weights and saves the same checkpoints. The mixin adds:

    * ``overlap_param_gather`` is on between nodes where nothing reads parameters between a step and the next forward pass
      (:meth:`overlap_applies`), unless ``optim_args`` or ``EMOPT_OVERLAP_PARAM_GATHER`` gives another value.
    * The start of training shows routes and the plan (owners, costs and bytes of each rank) at the default verbosity;
      ``explain_at_start = False`` leaves the one line of a plain ``Trainer``.
    * ``log`` itself has the learning rates by group and ``skipped_steps``, so that overrides of ``log`` and all callbacks see
      them.
    * ``trainer.accelerator.save_state`` saves the whole state of the optimizer.
    * Checkpoints of models that transformers shards while it loads them (``DistributedConfig``: tensor and expert
      parallelism) contain the optimizer. A plain ``Trainer`` saves the model alone.
    """

    explain_at_start: ClassVar[bool] = True
    """Show routes and plan at the start of training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model", args[0] if args else None)
        arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
        ours = arguments is not None and handler_of(arguments) is not None
        with permitted(model, arguments) if ours else nullcontext():
            super().__init__(*args, **kwargs)
        trainer = self._trainer()
        given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
        if not given and handler_of(trainer.args) is None:
            logger.warning(
                f"{type(self).__name__} trains with optim={optim_name(trainer.args)!r}, which is none of hf_emopt's; "
                'write optim="muon", for instance.'
            )
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, DefaultCallback) and self.explain_at_start:
                callback.route_level = levels.WARNING

    def _trainer(self) -> Trainer:
        if not isinstance(self, Trainer):
            raise TypeError(
                f"{type(self).__name__} must also derive from transformers.Trainer, after EmoptTrainerMixin"
            )
        return self

    def overlap_applies(self) -> bool:
        """Whether a delayed gather of parameters is both useful and safe.

        It is useful under DistributedDataParallel between nodes, by the launcher's ``LOCAL_WORLD_SIZE``. It is not safe where
        other code than the model's forward pass reads parameters after a step: a compiled model, which runs no hooks of its
        modules, a callback from outside transformers, or vLLM, which generates with copies of the weights.
        """
        trainer = self._trainer()
        args = trainer.args
        return (
            args.parallel_mode == ParallelMode.DISTRIBUTED
            and args.world_size > int(os.environ.get("LOCAL_WORLD_SIZE") or args.world_size)
            and not trainer.is_fsdp_enabled
            and not trainer.is_deepspeed_enabled
            and not is_sharded_at_load(getattr(trainer, "model", None))
            and not args.torch_compile
            and not getattr(args, "use_vllm", False)
            and all(
                type(callback).__module__.partition(".")[0] in ("transformers", "hf_emopt")
                for callback in trainer.callback_handler.callbacks
            )
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """As ``Trainer``'s, with ``overlap_param_gather`` where it applies."""
        trainer, own = self._trainer(), None
        given = trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None
        if not given and handler_of(trainer.args) is not None:
            whole: Any = trainer.model if model is None else model
            own = trainer.get_optimizer_cls_and_kwargs(trainer.args, whole)
            if isinstance(own[0], OptimizerFactory):
                own[1].setdefault("overlap_param_gather", self.overlap_applies())
                trainer.optimizer_cls_and_kwargs = own
        try:
            return super().create_optimizer(model)  # type: ignore[misc]
        finally:
            if own is not None:
                trainer.optimizer_cls_and_kwargs = None

    def _saves_sharded(self) -> bool:
        trainer = self._trainer()
        return is_sharded_at_load(trainer.model) and unwrap_optimizer(trainer.optimizer) is not None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._saves_sharded():
            save_optimizer(self._trainer(), output_dir)
        else:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self._saves_sharded() and load_optimizer(self._trainer(), checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        target: Any = self._trainer().model if model is None else model
        if is_sharded_at_load(target):
            load_sharded_weights(target, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As ``Trainer``'s, with the learning rate of every kind of group and ``skipped_steps`` unless it is 0."""
        trainer = self._trainer()
        optimizer = unwrap_optimizer(trainer.optimizer)
        if optimizer is not None and "learning_rate" in logs:
            known = (c for c in trainer.callback_handler.callbacks if isinstance(c, DefaultCallback))
            logs.update(next(known, DefaultCallback()).metrics(optimizer))
        super().log(logs, start_time)  # type: ignore[misc]


class EmoptTrainer(EmoptTrainerMixin, Trainer):
    """``transformers.Trainer`` with :class:`EmoptTrainerMixin`; the same arguments."""
