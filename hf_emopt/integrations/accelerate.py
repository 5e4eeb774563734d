"""Accelerate: an optimizer from a plugin, environment variables or the launcher's YAML.

An :class:`Accelerator` takes the plugin, and ``accelerator.prepare(model, plugin.build(model))`` takes its optimizer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.utils import KwargsHandler  # type: ignore[import-untyped]
from torch import nn

from hf_emopt.integrations.optim_args import accepted_form, parse_optim_args, parse_value
from hf_emopt.integrations.refusals import refuse_accelerator, refuse_layouts
from hf_emopt.integrations.registry import OPTIMIZERS, PREFIX, did_you_mean, optimizer_class
from hf_emopt.optimizers.base import MatrixOptimizer

ENVIRONMENT_PREFIX = "EMOPT_"

_TYPES: dict[str, Any] = {
    **dict.fromkeys(("lr", "aux_lr", "weight_decay"), float),
    "transport_dtype": torch.dtype,
    "overlap_param_gather": bool,
}
"""Fields that are keyword arguments of every optimizer."""

_TRANSPORT = "bfloat16, float32, float64"

_TRAINERS_OWN = {"optim": "optim", "lr": "learning_rate", "weight_decay": "weight_decay"}
"""Fields with a counterpart in ``TrainingArguments``, which always has a value and therefore counts."""


@dataclass
class EmoptPlugin(KwargsHandler):
    """The choice of an optimizer for Accelerate.

    The value of a field is the given one, else that of the environment variable ``EMOPT_<FIELD>`` (``EMOPT_LR``, say) when
    the plugin is made, else the default. ``hf-emopt launch`` sets these variables from an ``emopt_config:`` block.

    Args:
        optim: optimizer name, ``"muon"`` by default; the same names as in ``TrainingArguments(optim=...)``.
        lr: learning rate. Default: the optimizer's.
        aux_lr: learning rate of the AdamW part. Default: ``lr``.
        weight_decay: decoupled weight decay of both parts. Default: the optimizer's.
        transport_dtype: ``"bfloat16"``, ``"float32"`` or ``"float64"``: communication dtype, in which matrices travel between
            ranks. Default: bfloat16 on accelerators, float32 on CPU.
        overlap_param_gather: under DistributedDataParallel, the last gather of updated parameters runs during the next
            forward pass. Code that reads or writes parameters between ``step()`` and a forward pass must then call
            ``optimizer.synchronize()`` first. Default: false.
        optim_args: the optimizer's other keyword arguments, ``"ns_steps=6, betas=0.9:0.95"`` or a mapping.

    Raises:
        ValueError: a value that does not fit; the message names field, environment variable and accepted values.
    """

    optim: str | None = None
    lr: float | None = None
    aux_lr: float | None = None
    weight_decay: float | None = None
    transport_dtype: torch.dtype | str | None = None
    overlap_param_gather: bool | None = None
    optim_args: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = {f.name for f in fields(self) if getattr(self, f.name) is not None}
        for field in fields(self):
            setattr(self, field.name, _resolve(field.name, getattr(self, field.name)))
        self.optim = "muon" if self.optim is None else self.optim
        try:
            kwargs = parse_optim_args(self.optim_args, self.optimizer_cls)
        except ValueError as error:
            raise ValueError(f"EmoptPlugin.optim_args ({_variable('optim_args')}): {error}") from None
        both = sorted(given & set(kwargs)) if "optim_args" in given else []
        if both:
            raise ValueError(f"EmoptPlugin: {both[0]!r} is given both as a field and in optim_args; drop one of them.")
        for name in _TYPES:
            # optim_args of the call have priority over variables of the environment.
            if getattr(self, name) is not None and (name not in kwargs or "optim_args" not in given):
                kwargs[name] = getattr(self, name)
        self._kwargs = kwargs

    @property
    def optimizer_cls(self) -> type[MatrixOptimizer]:
        """The class that ``optim`` names."""
        return optimizer_class(str(self.optim))

    @property
    def optimizer_kwargs(self) -> dict[str, Any]:
        """The given keyword arguments of the optimizer; its defaults apply to the others."""
        return dict(self._kwargs)

    def build(self, model: nn.Module) -> MatrixOptimizer:
        """The optimizer of ``model``, for ``accelerator.prepare(model, optimizer)``.

        Raises:
            ValueError: a hyperparameter is out of range, no parameter is a matrix, or the model is under FSDP1.
        """
        refuse_layouts(f"EmoptPlugin(optim={self.optim!r})", model)
        return self.optimizer_cls(model, **self._kwargs)

    def attach(self, accelerator: accelerate.Accelerator) -> None:
        """Refuses an accelerator under which the optimizer could not train; :class:`hf_emopt.Accelerator` does this itself.

        Raises:
            ValueError: the accelerator is set up for FSDP1, Megatron-LM, or DeepSpeed with settings that would replace the
                optimizer.
        """
        refuse_accelerator(accelerator, f"EmoptPlugin(optim={self.optim!r})")


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` that takes an :class:`EmoptPlugin` among its ``kwargs_handlers``.

    ``emopt_plugin`` is that plugin, or one made from the environment.

    Raises:
        ValueError: more than one plugin, or as :meth:`EmoptPlugin.attach`.
    """

    def __init__(self, *args: Any, kwargs_handlers: list[KwargsHandler] | None = None, **kwargs: Any) -> None:
        handlers = list(kwargs_handlers or [])
        plugins = [handler for handler in handlers if isinstance(handler, EmoptPlugin)]
        if len(plugins) > 1:
            raise ValueError(f"kwargs_handlers holds {len(plugins)} EmoptPlugin objects; pass one.")
        self.emopt_plugin = plugins[0] if plugins else EmoptPlugin()
        others = [handler for handler in handlers if not isinstance(handler, EmoptPlugin)]
        super().__init__(*args, kwargs_handlers=others or None, **kwargs)
        self.emopt_plugin.attach(self)


def trainer_environment(optimizer_cls: type[MatrixOptimizer]) -> dict[str, Any]:
    """Keyword arguments from the environment for a ``Trainer``'s optimizer, without those that ``TrainingArguments`` has."""
    try:
        kwargs = parse_optim_args(_resolve("optim_args", None), optimizer_cls)
    except ValueError as error:
        raise ValueError(f"environment variable {_variable('optim_args')}: {error}") from None
    for name in _TYPES:
        if name not in _TRAINERS_OWN and (value := _resolve(name, None)) is not None:
            kwargs[name] = value
    return kwargs


def overruled_environment(arguments: Any) -> list[str]:
    """One sentence for each environment variable that a field of ``TrainingArguments`` overrules with another value."""
    sentences = []
    for name, field in _TRAINERS_OWN.items():
        value = _resolve(name, None)
        used = getattr(arguments, field)
        used = str(getattr(used, "value", used)) if name == "optim" else used
        if value is not None and value != used:
            sentences.append(
                f"{_variable(name)}={value} is not used: a Trainer takes TrainingArguments.{field}, which is {used}."
            )
    return sentences


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _resolve(name: str, value: Any) -> Any:
    """A field's value with its type, as given or from the environment; ``None`` where neither has one."""
    variable, field = f"environment variable {_variable(name)}", f"EmoptPlugin.{name}"
    where = f"{field} ({variable})"
    if value is None:
        where = f"{variable} ({field})"
        value = os.environ.get(_variable(name), "").strip()
        if not value:
            return None
    try:
        return _typed(name, value)
    except ValueError as error:
        raise ValueError(f"{where}: bad value {value!r}; accepted: {error}") from None


def _typed(name: str, value: Any) -> Any:
    """``value`` as the field's type; ``ValueError`` says what is accepted."""
    if name == "optim_args":
        return value  # read as a whole, once the optimizer is known
    if name == "optim":
        if not isinstance(value, str) or value.removeprefix(PREFIX) not in OPTIMIZERS:
            raise ValueError(", ".join(OPTIMIZERS) + did_you_mean(value, OPTIMIZERS))
        return value
    try:
        typed = parse_value(value, _TYPES[name])
    except ValueError:
        typed = None
    if typed is None or typed is torch.float16:  # the range of float16 does not hold what a gradient may be
        raise ValueError(_TRANSPORT if name == "transport_dtype" else accepted_form(_TYPES[name]))
    if isinstance(typed, float) and not 0.0 <= typed < math.inf:
        raise ValueError("a finite NUMBER that is not negative")
    return typed
