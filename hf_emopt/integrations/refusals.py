"""Ways of training that would not give the update of a single process; each is refused with what to use instead.

The refusals come before the first step, from configurations and models. None falls back to another optimizer.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.training_args import TrainingArguments

TRAINER_FIX = "fsdp_config={'version': 2} in TrainingArguments, or fsdp_version: 2"
ACCELERATE_FIX = "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 (Accelerate's own default is 1)"
_INSTEAD = "Use FSDP2, HSDP, DeepSpeed ZeRO, tensor parallelism, DistributedDataParallel or one process"


def optim_name(args: TrainingArguments) -> str:
    """``args.optim`` as written."""
    return str(getattr(args.optim, "value", args.optim))  # a plain string where the arguments came from a pickle


def refuse_unsupported(args: TrainingArguments, model: nn.Module | None) -> None:
    """Refuses what a ``Trainer`` cannot train rightly with a matrix optimizer, before the optimizer is built.

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
    """Warns where Accelerate was asked for FSDP and silently trains without it, as it does on CPUs."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    if asked and PartialState().distributed_type == DistributedType.MULTI_CPU:
        warnings.warn(
            "FSDP was asked for, and Accelerate has it for accelerators only: on these CPUs each process has a copy of "
            "the model, as under DistributedDataParallel. On CPUs use fully_shard in a loop of your own",
            stacklevel=2,
        )


def refuse_deepspeed(args: TrainingArguments) -> None:
    """Refuses DeepSpeed configurations that would replace the optimizer, or not show it matrices."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None:
        _refuse_plugin(f"optim={optim_name(args)!r}", plugin)


def _refuse_plugin(name: str, plugin: Any) -> None:
    problem = deepspeed_problem(name, plugin.deepspeed_config)
    if problem is not None:
        raise ValueError(problem)


def deepspeed_problem(name: str, config: Mapping[str, Any]) -> str | None:
    """The problem of a DeepSpeed configuration under Accelerate or ``Trainer``, with its fix; ``None`` if there is none."""
    problem = config_problem(config)
    if problem is None and "zero_optimization" not in config:
        problem = 'Accelerate needs a "zero_optimization" block: write "zero_optimization": {"stage": 0} for none'
    return None if problem is None else f"{name} under DeepSpeed: {problem}."


def megatron_problem(name: str) -> str:
    """Why Megatron-LM is refused."""
    return f"{name} does not run under Megatron-LM, which has optimizers of its own. {_INSTEAD}."


def refuse_accelerator(accelerator: Any, name: str) -> None:
    """The same refusals for an ``accelerate.Accelerator``.

    Raises:
        ValueError: for Megatron-LM, FSDP1 and DeepSpeed configurations that would replace the optimizer.
    """
    warn_of_missing_fsdp()
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        _refuse_plugin(name, accelerator.state.deepspeed_plugin)
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(megatron_problem(name))
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and int(plugin.fsdp_version) == 1:
        raise ValueError(fsdp1_problem(name, ACCELERATE_FIX))


def refuse_layouts(name: str, model: nn.Module | None) -> None:
    """Refuses partial sums and FSDP1; DTensors may be sharded or replicated over any mesh dimensions.

    Raises:
        ValueError: for partial sums, and for modules under FSDP1.
    """
    if model is None:
        return
    if _has_fsdp1(model):
        raise ValueError(fsdp1_problem(name, "torch.distributed.fsdp.fully_shard"))
    for parameter_name, parameter in model.named_parameters():
        if not (parameter.requires_grad and isinstance(parameter, DTensor)):
            continue
        if any(p.is_partial() for p in parameter.placements):
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


def config_problem(config: Mapping[str, Any]) -> str | None:
    """The first problem of DeepSpeed's JSON for a matrix optimizer, with its fix; ``"auto"`` counts as not given."""
    return next(_config_problems(config), None)


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    zero = section(config, "zero_optimization")
    if "optimizer" in config:
        kind = section(config, "optimizer").get("type", "an optimizer")
        yield (
            f"the DeepSpeed configuration names an optimizer of its own, {kind}, and one of the two would be dropped: remove "
            'the "optimizer" block from it'
        )
    offload = section(zero, "offload_optimizer")
    device = "cpu" if zero.get("cpu_offload") is True else str(offload.get("device", "none"))
    if device == "nvme":
        yield (
            'offload_optimizer with "device": "nvme" is not supported: DeepSpeed swaps one flat tensor of state for each '
            'group in and out, and the state of whole matrices is no part of it. Use "device": "cpu"'
        )
    if device not in ("none", "auto"):
        if float(offload.get("ratio", 1.0)) != 1.0:
            yield (
                f'offload_optimizer with "ratio": {offload["ratio"]} steps what stays on the GPU with torch.optim.AdamW, '
                'whatever the optimizer is: remove "ratio"'
            )
        if config.get("zero_force_ds_cpu_optimizer", True) is not False:
            yield (
                "with offload_optimizer DeepSpeed and Accelerate replace the optimizer by DeepSpeedCPUAdam unless the "
                'DeepSpeed configuration says "zero_force_ds_cpu_optimizer": false: write that at its top level'
            )
    if section(config, "fp16").get("enabled") is True and zero.get("stage", 0) == 0:
        yield (
            '"fp16" at ZeRO stage 0: DeepSpeed divides gradients there by a loss scale that it has not multiplied the loss '
            'by, so that they underflow, and steps that overflow are not seen. Set "stage": 1, which trains the same'
        )
    autocast = section(config, "torch_autocast")
    dtype = str(autocast.get("dtype"))
    if autocast.get("enabled") is True and "16" in dtype and "bf" not in dtype:
        yield (
            "torch_autocast with float16 scales losses rank by rank, and ranks would skip different steps: use bfloat16, or "
            'the "fp16" block'
        )
    if zero.get("elastic_checkpoint") is True:
        yield (
            '"elastic_checkpoint": true saves state as if all of it were flat: remove it. `hf-emopt convert` makes '
            "checkpoints that load at another number of ranks"
        )
    if _number(section(config, "tensor_parallel").get("autotp_size")) > 1:
        yield "DeepSpeed's tensor parallelism (autotp_size) cuts matrices: remove it, or use transformers' DistributedConfig"
    if _number(zero.get("mics_shard_size")) > 0:
        yield "MiCS (mics_shard_size) is not supported: remove it, or use HSDP"
    if "zenflow" in zero:
        yield "ZenFlow steps parts of the gradient on their own: remove the zenflow block"
    if offload.get("super_offload") is True:
        yield 'SuperOffload has an optimizer of its own: remove "super_offload"'


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A mapping inside of a configuration, empty where there is none."""
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


_ABSOLUTE: dict[str, dict[str, float]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
    "OneCycle": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.0},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3},
    "OneCycleLR": {"max_lr": 0.0},
    "CyclicLR": {"base_lr": 0.0, "max_lr": 0.0},
    "CosineAnnealingLR": {"eta_min": 0.0},
    "CosineAnnealingWarmRestarts": {"eta_min": 0.0},
}
"""Parameters of schedulers of DeepSpeed and torch that are learning rates themselves, not factors, with their defaults. One
number is that of all groups; a list has one for each. Zero keeps every ratio."""


def scheduler_problem(config: Mapping[str, Any], rates: Sequence[float]) -> str | None:
    """The setting of a ``"scheduler"`` block that would give groups with different ``rates`` the same one, with its fix."""
    scheduler = section(config, "scheduler")
    kind, given = str(scheduler.get("type")), section(scheduler, "params")
    if len(set(rates)) < 2:
        return None
    for key, default in _ABSOLUTE.get(kind, {}).items():
        value = _number(given.get(key, default))
        if value:
            return (
                f'the "scheduler" block, {kind}, has "{key}": {value:g} for all groups, whose learning rates are '
                f"{', '.join(f'{rate:g}' for rate in rates)}, and their ratio (learning_rate to aux_lr) would be lost: "
                'remove the "scheduler" block. Schedulers of Trainer (lr_scheduler_type) multiply each group\'s own rate'
            )
    return None
