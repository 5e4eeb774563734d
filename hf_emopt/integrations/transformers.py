"""Optimizer names for ``TrainingArguments(optim=...)``, and the hooks of a plain ``Trainer``.

transformers has no entry point for optimizers. So ``import hf_emopt`` calls :func:`register`, which adds names, handlers and
a default callback to its tables, and wraps methods of ``Trainer``. Other optimizers are not affected.
"""

from __future__ import annotations

import logging as levels
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import trainer, trainer_optimizer, training_args
from transformers.trainer_callback import TrainerState
from transformers.trainer_optimizer import OptimizerContext
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from hf_emopt.integrations.accelerate import overruled_environment, trainer_environment
from hf_emopt.integrations.callback import MeasuringCallback, level_of_environment
from hf_emopt.integrations.checkpoints import hook_accelerate, hook_trainer, synchronize
from hf_emopt.integrations.deepspeed import load_checkpoint
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.integrations.patching import MARK, patch
from hf_emopt.integrations.refusals import optim_name, refuse_deepspeed, refuse_unsupported
from hf_emopt.integrations.registry import OPTIMIZERS, PREFIX, unwrap_optimizer
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.enum_members import add_string_member
from hf_emopt.optimizers.param_groups import with_model

__all__ = ["OPTIMIZERS", "DefaultCallback", "OptimizerFactory", "register", "register_optimizer", "unwrap_optimizer"]

logger = logging.get_logger("transformers.hf_emopt")  # under transformers' own verbosity and handlers

_warned: set[str] = set()

_models: list[weakref.ref[nn.Module]] = []
"""Models that are trained with one of our optimizers, the newest last."""

Handler = Callable[[OptimizerContext], tuple[Any, dict[str, Any]]]


class OptimizerFactory:
    """The result of a handler, with which ``Trainer`` builds the optimizer on the model and not on its two decay groups.

    ``Trainer`` calls the factory without arguments and the result with ``(model, **kwargs)``. Code that knows no factories
    calls the result of ``get_optimizer_cls_and_kwargs`` with arguments; the factory then acts as the optimizer's class. Lists
    of parameters are routed by the modules of the Trainer's model. Subclasses of ``Trainer`` put theirs among the keyword
    arguments, as ``params`` or ``optimizer_dict``.

    Args:
        model: the model that ``get_optimizer_cls_and_kwargs`` was given, if any. Trainers of sentence-transformers give the
            loss, which has the model and may have parameters of its own.
    """

    def __init__(self, optimizer_cls: type[MatrixOptimizer], model: nn.Module | None = None) -> None:
        self.optimizer_cls, self.__name__, self.model = optimizer_cls, optimizer_cls.__name__, model

    def __call__(self, *params: Any, **options: Any) -> Any:
        return self._build(*params, **options) if params or options else self._build

    def _build(self, *params: Any, **options: Any) -> MatrixOptimizer:
        given = [*params, *(options.pop(key) for key in ("params", "model", "optimizer_dict") if key in options)]
        models = [model for model in (self.model, *(seen() for seen in reversed(_models))) if model is not None]
        made: Any = self.optimizer_cls
        return made(with_model(given[-1], models), **options) if given else made(**options)

    def __repr__(self) -> str:
        return f"OptimizerFactory({self.optimizer_cls.__name__})"


def _remember(model: Any) -> None:
    if isinstance(model, nn.Module):
        _models[:] = [*(seen for seen in _models if seen() not in (None, model)), weakref.ref(model)]


def optimizer_kwargs(args: TrainingArguments, optimizer_cls: type[MatrixOptimizer]) -> dict[str, Any]:
    """Keyword arguments of the optimizer from the fields of ``TrainingArguments``.

    ``learning_rate`` and ``weight_decay`` are the matrix part's and, unless ``optim_args`` says otherwise, the AdamW
    part's; ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon`` are the AdamW part's. The environment
    (``EMOPT_TRANSPORT_DTYPE`` and so on, see :class:`hf_emopt.EmoptPlugin`) is laid over them, and ``optim_args`` over all.
    """
    return {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "aux_betas": (args.adam_beta1, args.adam_beta2),
        "aux_eps": args.adam_epsilon,
        **trainer_environment(optimizer_cls),
        **parse_optim_args(args.optim_args, optimizer_cls),
    }


def register_optimizer(name: str, optimizer_cls: type[MatrixOptimizer]) -> None:
    """Makes ``optim=name`` train with ``optimizer_cls``; a name that transformers itself implements is left alone.

    The class takes a module as first argument; its annotated keyword arguments become the keys of ``optim_args``.
    """
    member, _ = add_string_member(training_args.OptimizerNames, name.upper(), name)
    handlers = trainer_optimizer._OPTIMIZER_HANDLERS
    present = handlers.get(member)
    if present is not None and not hasattr(present, MARK):
        if name not in _warned:
            _warned.add(name)
            logger.warning(
                f"optim={name!r} is transformers' own optimizer in this version and stays so; "
                f"use optim={PREFIX + name!r} for hf_emopt's."
            )
        return

    def handler(context: OptimizerContext) -> tuple[Any, dict[str, Any]]:
        refuse_unsupported(context.args, context.model)
        _remember(context.model)
        return OptimizerFactory(optimizer_cls, context.model), optimizer_kwargs(context.args, optimizer_cls)

    setattr(handler, MARK, True)
    handlers[member] = handler


def register() -> None:
    """Registers every optimizer under its name and under ``emopt_`` + its name, and hooks ``Trainer``. Idempotent."""
    for name, optimizer_cls in OPTIMIZERS.items():
        register_optimizer(PREFIX + name, optimizer_cls)
        register_optimizer(name, optimizer_cls)
    patch(trainer.Trainer, "get_optimizer_cls_and_kwargs", _get_optimizer_cls_and_kwargs)
    patch(trainer.Trainer, "create_optimizer", _create_optimizer)
    patch(trainer, "deepspeed_load_checkpoint", load_checkpoint)
    hook_trainer()
    hook_accelerate()
    callbacks: list[Any] = trainer.DEFAULT_CALLBACKS
    callbacks[:] = [callback for callback in callbacks if not hasattr(callback, MARK)]
    callbacks.append(DefaultCallback)


def handler_of(args: TrainingArguments) -> Handler | None:
    """The handler of ``args.optim`` if it names one of ours."""
    handler = trainer_optimizer._OPTIMIZER_HANDLERS.get(args.optim)
    return handler if hasattr(handler, MARK) else None


def _get_optimizer_cls_and_kwargs(
    original: Callable[..., tuple[Any, Any]], args: TrainingArguments, model: Any = None
) -> tuple[Any, Any]:
    """Shows our handlers ``optim_args`` before transformers cuts it up, which fails on a list, a flag or a mapping."""
    handler = handler_of(args)
    if handler is None:
        return original(args, model)
    return handler(OptimizerContext(args=args, model=model, optimizer_kwargs={}, adam_kwargs={}, optim_args={}))


def _create_optimizer(original: Callable[..., Any], self: trainer.Trainer, *args: Any, **options: Any) -> Any:
    """Passes the model to our classes, and not two lists of parameters, which do not show embeddings and heads."""
    given = getattr(self, "optimizer_cls_and_kwargs", None)
    cls = given[0] if given is not None else None
    if self.optimizer is None and isinstance(cls, type) and issubclass(cls, MatrixOptimizer):
        assert given is not None
        refuse_unsupported(self.args, self.model)
        model = next((m for m in (*args, options.get("model")) if m is not None), self.model)
        decay = {"weight_decay": self.args.weight_decay}
        factory: Any = OptimizerFactory(cls, model)
        self.optimizer_cls_and_kwargs = factory, {**decay, **given[1]}
    return original(self, *args, **options)


def group_learning_rates(optimizer: MatrixOptimizer, peak: bool = False) -> dict[str, float]:
    """Learning rates by kind of group, ``{"lr/matrix": ..., "lr/aux": ...}``, now or, with ``peak``, as the user gave them.

    Groups of one kind with the same rates are one entry; any other is added under its own name.
    """
    rates: dict[str, float] = {}
    starts: dict[str, float] = {}
    for index, group in enumerate(optimizer.param_groups):
        key, rate, start = f"lr/{group['kind']}", float(group["lr"]), float(group.get("initial_lr", group["lr"]))
        if not group["param_names"] or (key in rates and (rates[key], starts[key]) == (rate, start)):
            continue
        if key in rates:
            key = f"lr/{group['name']}"
        if key in rates:
            key = f"{key}.{index}"
        rates[key], starts[key] = rate, start
    return starts if peak else rates


class DefaultCallback(MeasuringCallback):
    """Describes a matrix optimizer in the logs; silent for every other optimizer.

    The start of training shows one line at warning level and the whole route of the parameters at info level. Each training
    log gets ``lr/matrix`` and ``lr/aux``, ``skipped_steps`` after a skipped step, and the requested diagnostics. It is a
    default callback, since a user's callback would run after those of the loggers.
    """

    route_level = levels.INFO
    """Level at which the route and the plan are logged."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def metrics(self, optimizer: MatrixOptimizer) -> dict[str, float]:
        """The figures for a training log: rates of the last step, skipped steps if there are any, and diagnostics."""
        measured = super().metrics(optimizer)
        # A measured count spares a second transfer from the device.
        skipped = measured.get("emopt/skipped_steps")
        skipped = optimizer.skipped_steps if skipped is None else skipped
        rates = self._rates or group_learning_rates(optimizer)
        return {**rates, **({"skipped_steps": skipped} if skipped else {}), **measured}

    def on_init_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Refuses before models are wrapped."""
        if handler_of(args) is not None and kwargs.get("optimizer") is None:
            refuse_unsupported(args, kwargs.get("model"))
            _remember(kwargs.get("model"))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Logs the route; refuses a configuration of DeepSpeed that chose the optimizer instead of ``args.optim``."""
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is None:
            if handler_of(args) is not None:
                refuse_deepspeed(args)
                logger.warning(
                    f"optim={optim_name(args)!r} is not used: the Trainer was given the optimizer "
                    f"{type(kwargs.get('optimizer')).__name__}."
                )
            return
        self._rates = group_learning_rates(optimizer)
        if optimizer.diagnostics_state.level is None:
            optimizer.diagnostics_state.level = level_of_environment()
        plan = optimizer.explain()  # on every rank, since ranks compare their plans when one is made
        if state.is_world_process_zero:
            logger.warning(summary(optimizer))
            logger.log(self.route_level, plan)
            for sentence in overruled_environment(args):
                logger.warning(sentence)

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        # By the time of the log the scheduler has moved on; the log's `learning_rate` is the one of this step.
        optimizer = unwrap_optimizer(kwargs.get("optimizer"))
        if optimizer is not None:
            self._rates = group_learning_rates(optimizer)

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Leaves current parameters behind."""
        synchronize(kwargs.get("optimizer"))


setattr(DefaultCallback, MARK, True)


def summary(optimizer: MatrixOptimizer) -> str:
    """One line: how much of the model is trained as matrices, by which rule, at which learning rates."""
    routes = optimizer.routes
    total = routes.matrix_numel + routes.aux_numel
    share = 100.0 * routes.matrix_numel / max(total, 1)
    # A scheduler that warms up has set the rates to zero by now; "initial_lr" is what it warms up to.
    rates = ", ".join(f"{key[3:]} lr {rate:.3g}" for key, rate in group_learning_rates(optimizer, peak=True).items())
    rule = next((optimizer.rule.describe(g) for g in optimizer.param_groups if g["kind"] == "matrix"), "no matrix rule")
    return (
        f"{type(optimizer).__name__}: {routes.matrix_count} matrices in {len(routes.matrices)} parameters ({share:.1f} % of "
        f"{total:,} trainable elements), AdamW for {len(routes.aux)} other parameters; {rates}; {rule}"
    )
