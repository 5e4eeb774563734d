"""From the list of options to a constructor and to parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_type_hints

import torch
from torch import Tensor

from hf_emopt.distributed.layout import ProcessGroupArgument
from hf_emopt.formats.master_weights import LowPrecisionWeights
from hf_emopt.formats.moments import StateDtype
from hf_emopt.optimizers.param_groups import ParamsArgument
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.rules.options import as_tuple, check_flags
from hf_emopt.state.forms import OffloadState

P = ParamSpec("P")
A = TypeVar("A")
S = TypeVar("S")

_OF_GROUPS = ("aux_lr", "aux_betas", "aux_eps", "aux_weight_decay", "low_precision_weights", "state_dtype")


@dataclass(eq=False)
class Arguments:
    """Arguments of every optimizer, on top of its rule's options; :class:`hf_emopt.Muon` says what each of them means.

    A subclass adds a rule's options (:class:`~hf_emopt.rules.options.Options`) and ``tensor_parallel``.
    """

    params: ParamsArgument
    _: KW_ONLY
    aux_lr: float | Tensor | None = None
    aux_betas: tuple[float, float] = (0.9, 0.95)
    aux_eps: float = 1e-8
    aux_weight_decay: float | None = None
    low_precision_weights: LowPrecisionWeights = "split"
    state_dtype: StateDtype = "float32"
    offload_state: OffloadState | None = None
    aux_modules: str | Sequence[str] | None = None
    per_head: bool = False
    allow_no_matrices: bool = False
    skip_nonfinite: bool = True
    transport_dtype: torch.dtype | str | None = None
    overlap_param_gather: bool = False
    average_gradients: bool = False
    process_group: ProcessGroupArgument = None
    tensor_parallel_modules: str | Sequence[str] | None = None
    lora_lr_ratio: float = 1.0

    def of_optimizer(self, rule: MatrixRule, **more: Any) -> dict[str, Any]:
        """Keyword arguments of :class:`~hf_emopt.optimizers.base.MatrixOptimizer`.

        Args:
            more: hyperparameters of matrices that are no options, or that others replace.
        """
        shared = ("tensor_parallel", "low_precision_weights", "state_dtype")
        matrix = rule.options.group(self) | {name: getattr(self, name) for name in shared} | more
        aux = {
            "lr": matrix["lr"] if self.aux_lr is None else self.aux_lr,
            "weight_decay": matrix["weight_decay"] if self.aux_weight_decay is None else self.aux_weight_decay,
            "betas": as_tuple(self.aux_betas),
            "eps": self.aux_eps,
            "low_precision_weights": self.low_precision_weights,
            "state_dtype": self.state_dtype,
            "compat": matrix.get("compat"),
        }
        given = {f.name: getattr(self, f.name) for f in fields(Arguments) if f.name not in _OF_GROUPS}
        return {"rule": rule, "matrix_defaults": matrix, "aux_defaults": aux, **given}


@dataclass(eq=False, kw_only=True)
class KroneckerArguments(Arguments):
    """Arguments of the optimizers with factors; :class:`hf_emopt.SOAP` says what each of them means."""

    matrix_modules: str | Sequence[str] | None = None
    tensor_parallel: Literal["auto", "layerwise", "blockwise"] = "auto"
    lora_one_sided: bool = True

    def of_optimizer(self, rule: MatrixRule, **more: Any) -> dict[str, Any]:
        check_flags({"lora_one_sided": self.lora_one_sided})
        given = super().of_optimizer(rule, **more)
        longest = given["matrix_defaults"]["max_preconditioner_dim"]
        one_sided = partial(_one_sided, longest) if self.lora_one_sided else None
        return {**given, "matrix_modules": self.matrix_modules, "lora_defaults": one_sided}


def takes(arguments: Callable[P, A]) -> Callable[[Callable[[S, A], None]], Callable[Concatenate[S, P], None]]:
    """Decorator of an ``__init__`` with one argument, a dataclass: it then takes the fields of the dataclass instead.

    The signature, the annotations and the messages for wrong arguments are those of the dataclass.
    """

    def decorated(init: Callable[[S, A], None]) -> Callable[Concatenate[S, P], None]:
        def __init__(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, arguments(*args, **kwargs))

        made: Any = __init__
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = inspect.signature(arguments)
        parameters = [own, *signature.parameters.values()]
        made.__signature__ = signature.replace(parameters=parameters, return_annotation="None")
        made.__annotations__ = get_type_hints(arguments) | {"return": type(None)}
        made.__qualname__, made.__module__ = init.__qualname__, init.__module__
        getattr(arguments, "__init__").__qualname__ = init.__qualname__  # noqa: B009 - in messages of Python
        return __init__

    return decorated


def _one_sided(max_preconditioner_dim: int, rank: int) -> Group:
    """Hyperparameters of LoRA factors of this rank that are preconditioned on the dimension of the rank alone."""
    return {"oversize": "one_sided", "max_preconditioner_dim": min(max_preconditioner_dim, rank)}
