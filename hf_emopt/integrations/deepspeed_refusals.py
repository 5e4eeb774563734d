"""DeepSpeed configurations that would not give the update of a single process, each refused with what to change.

DeepSpeed and Accelerate replace or step aside for an optimizer without a word in several of them; nothing here falls back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.optimizers.base import MatrixOptimizer

__all__ = [
    "config_problem",
    "refuse_config",
    "refuse_engine",
    "refuse_native_muon",
    "scheduler_problem",
    "unknown_wrapper",
]

WRAPPERS = (
    "stage 0, DeepSpeedZeroOptimizer (ZeRO-1 and 2), BF16_Optimizer, DeepSpeedZeroOptimizer_Stage3 (ZeRO-3) and "
    "FP16_UnfusedOptimizer"
)


def config_problem(config: Mapping[str, Any]) -> str | None:
    """What in a DeepSpeed configuration a matrix optimizer cannot be trained with, and what to write instead.

    Args:
        config: as in the JSON file; ``"auto"`` counts as not given.

    Returns:
        Cause and fix, or ``None``.
    """
    zero = _section(config, "zero_optimization")
    if "optimizer" in config:
        kind = _section(config, "optimizer").get("type", "an optimizer")
        return (
            f"the DeepSpeed configuration names an optimizer of its own, {kind}, and one of the two would be dropped: remove "
            'the "optimizer" block from it'
        )
    return _offload_problem(config, zero) or _precision_problem(config, zero) or _other_problem(config, zero)


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _offload_problem(config: Mapping[str, Any], zero: Mapping[str, Any]) -> str | None:
    offload = _section(zero, "offload_optimizer")
    device = str(offload.get("device", "none"))
    if zero.get("cpu_offload") is True:
        device = "cpu"
    if device == "none" or device == "auto":
        return None
    if device == "nvme":
        return (
            'offload_optimizer with "device": "nvme" is not supported: DeepSpeed swaps one flat tensor of state for each '
            'group in and out, and the state of whole matrices is no part of it. Use "device": "cpu"'
        )
    if float(offload.get("ratio", 1.0)) != 1.0:
        return (
            f'offload_optimizer with "ratio": {offload["ratio"]} steps what stays on the GPU with torch.optim.AdamW, '
            'whatever the optimizer is: remove "ratio"'
        )
    if config.get("zero_force_ds_cpu_optimizer", True) is not False:
        return (
            "with offload_optimizer DeepSpeed and Accelerate replace the optimizer by DeepSpeedCPUAdam unless the DeepSpeed "
            'configuration says "zero_force_ds_cpu_optimizer": false: write that at its top level'
        )
    return None


def _other_problem(config: Mapping[str, Any], zero: Mapping[str, Any]) -> str | None:
    if zero.get("elastic_checkpoint") is True:
        return (
            '"elastic_checkpoint": true saves state as if all of it were flat: remove it. `hf-emopt convert` makes '
            "checkpoints that load at another number of ranks"
        )
    if _number(_section(config, "tensor_parallel").get("autotp_size")) > 1:
        return "DeepSpeed's tensor parallelism (autotp_size) cuts matrices: remove it, or use transformers' DistributedConfig"
    if _number(zero.get("mics_shard_size")) > 0:
        return "MiCS (mics_shard_size) is not supported: remove it, or use HSDP"
    if "zenflow" in zero:
        return "ZenFlow steps parts of the gradient on their own: remove the zenflow block"
    if _section(zero, "offload_optimizer").get("super_offload") is True:
        return 'SuperOffload has an optimizer of its own: remove "super_offload"'
    return None


def _precision_problem(config: Mapping[str, Any], zero: Mapping[str, Any]) -> str | None:
    if _section(config, "fp16").get("enabled") is True and zero.get("stage", 0) == 0:
        return (
            '"fp16" at ZeRO stage 0: DeepSpeed divides gradients there by a loss scale that it has not multiplied the loss '
            'by, so that they underflow, and steps that overflow are not seen. Set "stage": 1, which trains the same'
        )
    autocast = _section(config, "torch_autocast")
    dtype = str(autocast.get("dtype"))
    if autocast.get("enabled") is True and "16" in dtype and "bf" not in dtype:
        return (
            "torch_autocast with float16 scales losses rank by rank, and ranks would skip different steps: use bfloat16, or "
            'the "fp16" block'
        )
    return None


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
    """What in a ``"scheduler"`` block would give groups of different learning rates the same one.

    Args:
        config: as in the JSON file, with numbers where it had ``"auto"``.
        rates: learning rates of the optimizer's groups.

    Returns:
        Cause and fix, or ``None``.
    """
    scheduler = _section(config, "scheduler")
    kind, given = str(scheduler.get("type")), _section(scheduler, "params")
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


def refuse_config(engine: Any, optimizer: MatrixOptimizer) -> None:
    """Refuses a configuration before DeepSpeed wraps anything.

    Raises:
        ValueError: naming the setting and what to write instead.
    """
    problem = config_problem(engine.config)
    if problem is None and not engine.client_lr_scheduler:
        problem = scheduler_problem(engine.config, [float(group["lr"]) for group in optimizer.param_groups])
    if problem is None and optimizer.overlap_param_gather:
        problem = (
            "overlap_param_gather=True puts off updates that DeepSpeed copies to the model right after the step: leave it "
            "out"
        )
    if problem is not None:
        raise ValueError(f"{type(optimizer).__name__} under DeepSpeed: {problem}.")


def refuse_native_muon(engine: Any) -> None:
    """Refuses DeepSpeed's own Muon where it clips the orthogonalized update by a norm that grows with the model.

    Raises:
        ValueError: for ``"type": "Muon"`` with gradient clipping at ZeRO-1, 2 and 3.
    """
    if str(engine.optimizer_name()).lower() != "muon" or engine.zero_optimization_stage() < 1:
        return
    clip = engine.gradient_clipping()
    if clip > 0.0:
        raise ValueError(
            f'DeepSpeed\'s own "type": "Muon" with "gradient_clipping": {clip} divides the orthogonalized update, not the '
            "gradient, by the norm, so that the step shrinks as the model grows: set gradient_clipping (max_grad_norm in "
            'TrainingArguments) to 0, or remove the "optimizer" block and train with optim="muon" of hf_emopt, which gets '
            "clipped gradients"
        )


def refuse_engine(engine: Any, optimizer: MatrixOptimizer) -> None:
    """Refuses parallelism that gives ranks other parameters.

    Raises:
        UnsupportedLayoutError: naming it.
    """
    problem = None
    if type(engine).__name__ == "PipelineEngine":
        problem = "pipeline parallelism"
    elif getattr(engine, "has_moe_layers", False):
        problem = "deepspeed.moe layers, whose experts other ranks hold (transformers' expert modules are supported)"
    elif getattr(engine.mpu, "get_model_parallel_world_size", lambda: 1)() > 1:
        problem = "model parallelism by an mpu object, which cuts matrices"
    if problem is not None:
        raise UnsupportedLayoutError(
            f"{type(optimizer).__name__} does not run under DeepSpeed with {problem}; use ZeRO alone"
        )


def unknown_wrapper(wrapper: Any, optimizer: MatrixOptimizer) -> UnsupportedLayoutError:
    """The error for a wrapper of which it is not known what it hands over."""
    stage = f"{type(wrapper).__module__}.{type(wrapper).__name__}"
    return UnsupportedLayoutError(
        f"{type(optimizer).__name__} does not know what {stage} puts into its parameter groups, and would not see matrices "
        f"there; supported are {WRAPPERS}"
    )
