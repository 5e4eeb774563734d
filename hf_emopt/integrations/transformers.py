"""Optimizer names for ``TrainingArguments(optim=...)`` and what a plain ``Trainer`` needs to run them well.

transformers has no entry point for optimizers, so :func:`register` (called on ``import hf_emopt``) does three things,
all idempotent and without effect on other optimizers:

1. adds members to ``OptimizerNames`` and handlers to the table that ``Trainer`` looks them up in;
2. wraps ``Trainer.get_optimizer_cls_and_kwargs``: it cuts ``optim_args`` into strings before it asks the handler, and
   dies there of a list, a flag or a mapping with an error that names nothing. Ours are parsed by
   :mod:`hf_emopt.integrations.optim_args` instead;
3. adds :class:`EmoptCallback` to the default callbacks: every group's learning rate in the logs, and the route of the
   parameters once at the start. A callback of the user's would come after those of the loggers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from torch import nn
from transformers import trainer, trainer_optimizer, training_args
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_optimizer import OptimizerContext
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from hf_emopt.integrations.enum_members import add_string_member
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.matrix_optimizer import MatrixOptimizer
from hf_emopt.optimizers import SOAP, KLShampoo, Muon, NorMuon, Shampoo

__all__ = ["OPTIMIZERS", "EmoptCallback", "OptimizerFactory", "register", "register_optimizer", "unwrap_optimizer"]

logger = logging.get_logger("transformers.hf_emopt")  # under transformers' own verbosity and handlers

PREFIX = "emopt_"
OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {
    "muon": Muon,
    "normuon": NorMuon,
    "soap": SOAP,
    "shampoo": Shampoo,
    "kl_shampoo": KLShampoo,
}
"""Name without prefix to optimizer class. A new optimizer is one line here."""

# Marks what this package put into transformers, so that a reload of the package replaces it instead of seeing a rival.
_MARK = "__hf_emopt__"
_warned: set[str] = set()

Handler = Callable[[OptimizerContext], tuple[Any, dict[str, Any]]]


class OptimizerFactory:
    """What a handler returns, so that ``Trainer`` builds the optimizer on the model instead of on its two decay groups.

    ``Trainer`` calls the factory without arguments and the result with ``(model, **kwargs)``.
    """

    def __init__(self, optimizer_cls: type[MatrixOptimizer]) -> None:
        self.optimizer_cls = optimizer_cls

    def __call__(self) -> type[MatrixOptimizer]:
        return self.optimizer_cls

    def __repr__(self) -> str:
        return f"OptimizerFactory({self.optimizer_cls.__name__})"


def optimizer_kwargs(args: TrainingArguments, optimizer_cls: type[MatrixOptimizer]) -> dict[str, Any]:
    """Keyword arguments of the optimizer from the fields of ``TrainingArguments``.

    ``learning_rate`` and ``weight_decay`` are the matrix part's and, unless ``optim_args`` says otherwise, the AdamW
    part's; ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` are the AdamW part's. ``optim_args`` is laid over them.

    Raises:
        ValueError: ``optim_args`` cannot be read; see :func:`hf_emopt.integrations.optim_args.parse_optim_args`.
    """
    return {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "aux_betas": (args.adam_beta1, args.adam_beta2),
        "aux_eps": args.adam_epsilon,
        **parse_optim_args(args.optim_args, optimizer_cls),
    }


def refuse_unsupported(args: TrainingArguments, model: nn.Module | None) -> None:
    """Raises ``ValueError`` for a way of training that would not give the update of a single process.

    Called before the optimizer is built, which is when the model is still whole (or, under FSDP1, already flattened).
    """
    _refuse_deepspeed(args)
    name = f"optim={_name(args)!r}"
    if _fsdp_version(args, model) == 1:
        raise ValueError(
            f"{name} cannot run under FSDP1: it flattens parameters, and no process holds a matrix. {_INSTEAD}; "
            "remove fsdp (or fsdp_config['version'] = 1) from TrainingArguments and from the accelerate configuration."
        )
    if _fsdp_version(args, model) is not None or any(
        _is_dtensor(p) for p in (() if model is None else model.parameters())
    ):
        raise ValueError(
            f"{name} does not run on sharded parameters (FSDP2, tensor or expert parallelism) in this version. "
            f"{_INSTEAD}."
        )


_INSTEAD = "Use DistributedDataParallel (torchrun without FSDP) or one process"


def _refuse_deepspeed(args: TrainingArguments) -> None:
    if getattr(args, "deepspeed_plugin", None) is not None:
        raise ValueError(
            f"optim={_name(args)!r} does not run under DeepSpeed in this version: ZeRO hands the optimizer flat pieces "
            f"in which matrices cannot be seen. {_INSTEAD}, without a DeepSpeed configuration."
        )


def _name(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))  # a plain string where the arguments came from a pickle


def _fsdp_version(args: TrainingArguments, model: nn.Module | None) -> int | None:
    """FSDP version in force, be it by TrainingArguments, ``accelerate launch`` or the user's own wrapper."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if model is not None and any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return 1
    if getattr(args, "fsdp_plugin_args", None):
        return int(args.fsdp_plugin_args.get("fsdp_version", 2))
    # Asking AcceleratorState() for it would create the state where there is no Accelerator yet.
    plugin = AcceleratorState().fsdp_plugin if AcceleratorState._shared_state.get("fsdp_plugin") is not None else None
    return None if plugin is None else int(plugin.fsdp_version)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _make_handler(optimizer_cls: type[MatrixOptimizer]) -> Handler:
    def handler(context: OptimizerContext) -> tuple[Any, dict[str, Any]]:
        refuse_unsupported(context.args, context.model)
        return OptimizerFactory(optimizer_cls), optimizer_kwargs(context.args, optimizer_cls)

    setattr(handler, _MARK, True)
    return handler


def register_optimizer(name: str, optimizer_cls: type[MatrixOptimizer]) -> None:
    """Makes ``optim=name`` train with ``optimizer_cls``; a name that transformers itself implements is left alone.

    Args:
        name: lower-case name, as written in ``TrainingArguments(optim=...)``.
        optimizer_cls: takes a module as first argument; its annotated keyword arguments become the keys of
            ``optim_args``.
    """
    member, _ = add_string_member(training_args.OptimizerNames, name.upper(), name)
    handlers = trainer_optimizer._OPTIMIZER_HANDLERS
    present = handlers.get(member)
    if present is not None and not hasattr(present, _MARK):
        if name not in _warned:
            _warned.add(name)
            logger.warning(
                f"optim={name!r} is transformers' own optimizer in this version and stays so; "
                f"use optim={PREFIX + name!r} for hf_emopt's."
            )
        return
    handlers[member] = _make_handler(optimizer_cls)


def register() -> None:
    """Registers every optimizer under its name and under ``emopt_`` + its name, and hooks ``Trainer``. Idempotent."""
    for name, optimizer_cls in OPTIMIZERS.items():
        register_optimizer(PREFIX + name, optimizer_cls)
        register_optimizer(name, optimizer_cls)
    _wrap_get_optimizer()
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks[:] = [callback for callback in callbacks if not hasattr(callback, _MARK)]
    callbacks.append(EmoptCallback)


def _ours(args: TrainingArguments) -> Handler | None:
    handler = trainer_optimizer._OPTIMIZER_HANDLERS.get(args.optim)
    return handler if hasattr(handler, _MARK) else None


def _wrap_get_optimizer() -> None:
    """Lets our handlers see ``optim_args`` before transformers cuts it up."""
    original = trainer.Trainer.get_optimizer_cls_and_kwargs
    original = getattr(original, _MARK, original)

    @functools.wraps(original)
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        handler = _ours(args)
        if handler is None:
            return original(args, model)
        return handler(OptimizerContext(args=args, model=model, optimizer_kwargs={}, adam_kwargs={}, optim_args={}))

    setattr(get_optimizer_cls_and_kwargs, _MARK, original)
    trainer.Trainer.get_optimizer_cls_and_kwargs = staticmethod(get_optimizer_cls_and_kwargs)  # type: ignore[method-assign]


def unwrap_optimizer(optimizer: Any) -> MatrixOptimizer | None:
    """The :class:`MatrixOptimizer` under Accelerate's wrapper, or ``None`` where there is none."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer if isinstance(optimizer, MatrixOptimizer) else None


def group_learning_rates(optimizer: MatrixOptimizer, peak: bool = False) -> dict[str, float]:
    """Learning rates by kind of parameter group, ``{"lr/matrix": ..., "lr/aux": ...}``, as they are now.

    With ``peak``, as the user gave them: what a scheduler warms up to.

    Groups of one kind that started from the same rate and still have it (with and without weight decay, say) are one
    entry; any other is added under its own name.
    """
    rates: dict[str, float] = {}
    starts: dict[str, float] = {}
    for index, group in enumerate(optimizer.param_groups):
        key, rate, start = f"lr/{group['kind']}", float(group["lr"]), float(group.get("initial_lr", group["lr"]))
        if key in rates and (rates[key], starts[key]) == (rate, start):
            continue
        if key in rates:
            key = f"lr/{group['name']}"
        if key in rates:
            key = f"{key}.{index}"
        rates[key], starts[key] = rate, start
    return starts if peak else rates


class EmoptCallback(TrainerCallback):
    """Shows what a matrix optimizer does; silent for every other optimizer.

    At the start of training: one line at warning level (so that it is seen under the default verbosity) and the whole
    route of the parameters at info level. In each training log: ``lr/matrix`` and ``lr/aux`` beside ``learning_rate``,
    which is the first group's alone.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Logs the route.

        Raises:
            ValueError: ``args.optim`` names one of ours, but DeepSpeed's own configuration chose the optimizer.
        """
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is None:
            if _ours(args) is not None:
                _refuse_deepspeed(args)
                logger.warning(
                    f"optim={_name(args)!r} is not used: the Trainer was given the optimizer "
                    f"{type(kwargs.get('optimizer')).__name__}."
                )
            return
        self._rates = group_learning_rates(optimizer)
        if state.is_world_process_zero:
            logger.warning(summary(optimizer))
            logger.info(optimizer.explain())

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # By the time of the log the scheduler has moved on; the log's `learning_rate` is the one of this step.
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None:
            self._rates = group_learning_rates(optimizer)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "learning_rate" not in logs or unwrap_optimizer(kwargs.get("optimizer")) is None:
            return
        # `logs` goes on to the loggers, which come later in the list; the history already holds a copy of it.
        logs.update(self._rates)
        if state.log_history:
            state.log_history[-1].update(self._rates)


setattr(EmoptCallback, _MARK, True)


def summary(optimizer: MatrixOptimizer) -> str:
    """One line: how much of the model is trained as matrices, by which rule, at which learning rates."""
    routes = optimizer.routes
    total = routes.matrix_numel + routes.aux_numel
    share = 100.0 * routes.matrix_numel / max(total, 1)
    # A scheduler that warms up has set the rates to zero by now; "initial_lr" is what it warms up to.
    rates = ", ".join(f"{key[3:]} lr {rate:.3g}" for key, rate in group_learning_rates(optimizer, peak=True).items())
    rule = next((optimizer.rule.describe(g) for g in optimizer.param_groups if g["kind"] == "matrix"), "no matrix rule")
    units = sum(unit.shape[0] for route in routes.matrices for unit in route.units)
    return (
        f"{type(optimizer).__name__}: {units} matrices in {len(routes.matrices)} parameters ({share:.1f} % of "
        f"{total:,} trainable elements), AdamW for {len(routes.aux)} other parameters; {rates}; {rule}"
    )
