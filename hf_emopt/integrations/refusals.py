"""Ways of training that would not give the update of a single process; each is refused with what to use instead.

Everything here is asked before the first step. What is missed here meets ``hf_emopt.distributed.layout`` at the step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.training_args import TrainingArguments

from hf_emopt.integrations.deepspeed_refusals import config_problem

__all__ = [
    "ACCELERATE_FIX",
    "TRAINER_FIX",
    "deepspeed_problem",
    "fsdp1_problem",
    "megatron_problem",
    "optim_name",
    "refuse_accelerator",
    "refuse_deepspeed",
    "refuse_layouts",
    "refuse_unsupported",
    "warn_of_missing_fsdp",
]

TRAINER_FIX = "fsdp_config={'version': 2} in TrainingArguments, or fsdp_version: 2"
ACCELERATE_FIX = "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 (Accelerate's own default is 1)"
_INSTEAD = "Use FSDP2, HSDP, DeepSpeed ZeRO, tensor parallelism, DistributedDataParallel or one process"


def optim_name(args: TrainingArguments) -> str:
    """``args.optim`` as written."""
    return str(getattr(args.optim, "value", args.optim))  # a plain string where the arguments came from a pickle


def refuse_unsupported(args: TrainingArguments, model: nn.Module | None) -> None:
    """Refuses what a ``Trainer`` cannot train rightly with a matrix optimizer.

    Called before the optimizer is built, which is when the model is still whole, or sharded while it was loaded, or
    (FSDP1) already flattened.

    Raises:
        ValueError: for DeepSpeed configurations that would replace the optimizer, for FSDP1, and for parameters that are
            partial sums.
    """
    name = f"optim={optim_name(args)!r}"
    warn_of_missing_fsdp()
    refuse_deepspeed(args)
    if _fsdp_version(args) == 1 or _has_fsdp1(model):
        raise ValueError(fsdp1_problem(name, TRAINER_FIX))
    refuse_layouts(name, model)


def warn_of_missing_fsdp() -> None:
    """Says that Accelerate was asked for FSDP and trains without: it has none on CPUs, and does not say so."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if asked and PartialState().distributed_type == DistributedType.MULTI_CPU:
        warnings.warn(
            "FSDP was asked for, and Accelerate has it for accelerators only: on these CPUs each process has a copy of "
            "the model, as under DistributedDataParallel. On CPUs use fully_shard in a loop of your own",
            stacklevel=2,
        )


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Refuses DeepSpeed configurations that would replace the optimizer, or not show it matrices.

    Raises:
        ValueError: naming the setting of the DeepSpeed configuration and what to write instead.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None:
        _refuse_deepspeed_config(f"optim={optim_name(args)!r}", plugin)


def _refuse_deepspeed_config(name: str, plugin: Any) -> None:
    problem = deepspeed_problem(name, plugin.deepspeed_config)
    if problem is not None:
        raise ValueError(problem)


def deepspeed_problem(name: str, config: Mapping[str, Any]) -> str | None:
    """What in a DeepSpeed configuration is refused where Accelerate or ``Trainer`` use it, and what to write instead.

    Args:
        name: the optimizer, for the message.
        config: as in the JSON file.
    """
    problem = config_problem(config)
    if problem is None and "zero_optimization" not in config:
        problem = 'Accelerate needs a "zero_optimization" block: write "zero_optimization": {"stage": 0} for none'
    return None if problem is None else f"{name} under DeepSpeed: {problem}."


def megatron_problem(name: str) -> str:
    """Why Megatron-LM is refused."""
    return f"{name} does not run under Megatron-LM, which has optimizers of its own. {_INSTEAD}."


def refuse_accelerator(accelerator: Any, name: str) -> None:
    """The same refusals for an ``accelerate.Accelerator``.

    Args:
        accelerator: its state says how models will be wrapped.
        name: the optimizer, for the message.

    Raises:
        ValueError: for Megatron-LM, FSDP1 and DeepSpeed configurations that would replace the optimizer.
    """
    warn_of_missing_fsdp()
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        _refuse_deepspeed_config(name, accelerator.state.deepspeed_plugin)
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(megatron_problem(name))
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and int(plugin.fsdp_version) == 1:
        raise ValueError(fsdp1_problem(name, ACCELERATE_FIX))


def refuse_layouts(name: str, model: nn.Module | None) -> None:
    """Refuses parameters of which no rank holds elements.

    Args:
        name: the optimizer, for the message.
        model: its parameters may be plain, or DTensors that are sharded or replicated over any dimensions of their mesh
            (FSDP2, HSDP, and what transformers' ``DistributedConfig`` makes of ``tp_size``, ``ep_size``, ``fsdp_size``).

    Raises:
        ValueError: for partial sums, and for modules under FSDP1.
    """
    if model is None:
        return
    if _has_fsdp1(model):
        raise ValueError(fsdp1_problem(name, "torch.distributed.fsdp.fully_shard"))
    for parameter_name, parameter in model.named_parameters():
        if (
            parameter.requires_grad
            and isinstance(parameter, DTensor)
            and any(p.is_partial() for p in parameter.placements)
        ):
            raise ValueError(
                f"{name} does not run on parameters laid out as {parameter_name} is, {tuple(parameter.placements)} on a mesh "
                f"{tuple(parameter.device_mesh.shape)}: partial sums are no weights; redistribute the parameter first"
            )


def _has_fsdp1(model: nn.Module | None) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return model is not None and any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _fsdp_version(args: TrainingArguments) -> int | None:
    """FSDP version in force, be it by TrainingArguments or by ``accelerate launch``."""
    if getattr(args, "fsdp_plugin_args", None):
        return int(args.fsdp_plugin_args.get("fsdp_version", 2))
    # Asking AcceleratorState() for it would create the state where there is no Accelerator yet.
    plugin = AcceleratorState().fsdp_plugin if AcceleratorState._shared_state.get("fsdp_plugin") is not None else None
    return None if plugin is None else int(plugin.fsdp_version)


def fsdp1_problem(name: str, fix: str) -> str:
    """Why FSDP1 is refused, and how to have FSDP2."""
    return (
        f"{name} cannot run under FSDP1: it flattens parameters, and no process holds a matrix. Use FSDP2, which keeps "
        f"them: {fix} in the accelerate configuration; or DistributedDataParallel."
    )
