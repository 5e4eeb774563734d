"""Ways of training that would not give the update of a single process; each is refused with what to use instead.

Everything here is asked before the first step. What is missed here meets ``hf_emopt.distributed.layout`` at the step.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.training_args import TrainingArguments

__all__ = ["optim_name", "refuse_accelerator", "refuse_deepspeed", "refuse_layouts", "refuse_unsupported"]

_INSTEAD = "Use FSDP2, HSDP, tensor parallelism, DistributedDataParallel or one process"


def optim_name(args: TrainingArguments) -> str:
    """``args.optim`` as written."""
    return str(getattr(args.optim, "value", args.optim))  # a plain string where the arguments came from a pickle


def refuse_unsupported(args: TrainingArguments, model: nn.Module | None) -> None:
    """Refuses what a ``Trainer`` cannot train rightly with a matrix optimizer.

    Called before the optimizer is built, which is when the model is still whole, or sharded while it was loaded, or
    (FSDP1) already flattened.

    Raises:
        ValueError: for DeepSpeed, FSDP1, and for parameters that are partial sums.
    """
    name = f"optim={optim_name(args)!r}"
    refuse_deepspeed(args)
    if _fsdp_version(args) == 1 or _has_fsdp1(model):
        raise ValueError(_fsdp1_message(name, "fsdp_config={'version': 2} in TrainingArguments, or fsdp_version: 2"))
    refuse_layouts(name, model)


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Refuses DeepSpeed.

    Raises:
        ValueError: ``args`` holds a DeepSpeed configuration.
    """
    if getattr(args, "deepspeed_plugin", None) is not None:
        raise ValueError(_deepspeed_message(f"optim={optim_name(args)!r}"))


def refuse_accelerator(accelerator: Any, name: str) -> None:
    """The same refusals for an ``accelerate.Accelerator``.

    Args:
        accelerator: its state says how models will be wrapped.
        name: the optimizer, for the message.

    Raises:
        ValueError: for DeepSpeed, Megatron-LM and FSDP1.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise ValueError(_deepspeed_message(name))
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(f"{name} does not run under Megatron-LM, which has optimizers of its own. {_INSTEAD}.")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and int(plugin.fsdp_version) == 1:
        fix = "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 (Accelerate's own default is 1)"
        raise ValueError(_fsdp1_message(name, fix))


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
        raise ValueError(_fsdp1_message(name, "torch.distributed.fsdp.fully_shard"))
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


def _fsdp1_message(name: str, fix: str) -> str:
    return (
        f"{name} cannot run under FSDP1: it flattens parameters, and no process holds a matrix. Use FSDP2, which keeps "
        f"them: {fix} in the accelerate configuration; or DistributedDataParallel."
    )


def _deepspeed_message(name: str) -> str:
    return (
        f"{name} does not run under DeepSpeed in this version: ZeRO hands the optimizer flat pieces in which matrices "
        f"cannot be seen. {_INSTEAD}, without a DeepSpeed configuration."
    )
