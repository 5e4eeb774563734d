"""DeepSpeed: finds parameters in the flat tensors that ZeRO puts into the optimizer's groups, and refuses other settings.

ZeRO-1 and 2 and ``BF16_Optimizer`` concatenate a group's parameters and cut the result in equal parts, ZeRO-3 cuts each
parameter, and stage 0 leaves parameters whole. The class of DeepSpeed's wrapper names the case.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import accelerate.accelerator  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.checkpoint.deepspeed_files import find_deepspeed, layout_of
from hf_emopt.checkpoint.files import CheckpointError, find_fsdp_weights, read_fsdp_weights, read_safetensors
from hf_emopt.distributed.flat_params import FlatTensor, cut_each, cut_together
from hf_emopt.distributed.layout import Grid, UnsupportedLayoutError
from hf_emopt.integrations.patching import Original, patch
from hf_emopt.integrations.refusals import config_problem, scheduler_problem
from hf_emopt.optimizers.base import MatrixOptimizer

ENGINE_MODULE = "deepspeed.runtime.engine"
WRAPPERS = (
    "stage 0, DeepSpeedZeroOptimizer (ZeRO-1 and 2), BF16_Optimizer, DeepSpeedZeroOptimizer_Stage3 (ZeRO-3) and "
    "FP16_UnfusedOptimizer"
)


def attach(engine: Any) -> None:
    """Gives the client optimizer of a ``DeepSpeedEngine``, one of this package, the layout of its parameters.

    Raises:
        UnsupportedLayoutError: an unknown wrapper, or parallelism that cuts parameters in another way.
    """
    optimizer, wrapper = _optimizer_of(engine), engine.optimizer
    refuse_engine(engine, optimizer)
    optimizer.process_group = engine.seq_data_parallel_group
    if wrapper is not optimizer:
        optimizer.attach_wrapper(skipped_steps=lambda: int(engine.skipped_steps))
    if wrapper is optimizer or _is(wrapper, "fp16.unfused_optimizer", "FP16_UnfusedOptimizer"):
        # Parameters are whole, and owners hold the state of matrices, as under DistributedDataParallel.
        patch(engine, "save_checkpoint", partial(_save_checkpoint, optimizer))
        return
    if _is(wrapper, "zero.stage_1_and_2", "DeepSpeedZeroOptimizer"):
        flats = _of_stage_1_and_2(wrapper, optimizer)
        if optimizer.skip_nonfinite:
            wrapper.check_grad_overflow = True  # DeepSpeed's default for bfloat16 lets groups skip one by one
    elif _is(wrapper, "bf16_optimizer", "BF16_Optimizer"):
        flats = _of_bf16_optimizer(wrapper, optimizer)
    elif _is(wrapper, "zero.stage3", "DeepSpeedZeroOptimizer_Stage3"):
        flats = _of_stage_3(wrapper, optimizer)
    else:
        name = f"{type(wrapper).__module__}.{type(wrapper).__name__}"
        raise UnsupportedLayoutError(
            f"{type(optimizer).__name__} does not know what {name} puts into its parameter groups, and would not see "
            f"matrices there; supported are {WRAPPERS}"
        )
    # All these wrappers check the gradients, or their norm, before the first group's step.
    optimizer.attach_wrapper(flats)


def _optimizer_of(engine: Any) -> MatrixOptimizer:
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        raise TypeError(f"the engine's optimizer is {type(optimizer).__name__}, none of hf_emopt")
    return optimizer


def _is(wrapper: Any, module: str, name: str) -> bool:
    """Whether an object is of exactly this class; a subclass may fill the groups in another way."""
    return type(wrapper).__module__ == f"deepspeed.runtime.{module}" and type(wrapper).__name__ == name


def _grid(group: Any, known: dict[int, Grid]) -> Grid:
    """The one grid of a process group."""
    if id(group) not in known:
        ranks = tuple(dist.get_process_group_ranks(group))
        known[id(group)] = Grid((ranks,), 0, dist.get_rank(group), group if len(ranks) > 1 else None)
    return known[id(group)]


def _of_stage_1_and_2(wrapper: Any, optimizer: MatrixOptimizer) -> list[FlatTensor]:
    grids: dict[int, Grid] = {}
    flats = []
    for index, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        grid = _grid(wrapper.real_dp_process_group[index], grids)
        count = len(wrapper.bit16_groups[index])
        _check_complete(optimizer, index, count)
        where = wrapper.round_robin_bit16_indices[index]  # round_robin_gradients puts parameters in another order
        order = [where[position] for position in range(count)]
        shapes = [tuple(wrapper.round_robin_bit16_meta[index][k].shape) for k in order]
        offsets = [int(wrapper.round_robin_bit16_offsets[index][k]) for k in order]
        places = cut_together(shapes, offsets, flat.numel(), grid.shards, grid.shard)
        compute = _device_of(wrapper.bit16_groups_flat[index])
        pinned = wrapper.cpu_offload and wrapper.cpu_offload_pin_memory
        flats.append(FlatTensor(flat, index, places, grid, compute, wrapper.cpu_offload, pinned))
    return flats


def _of_bf16_optimizer(wrapper: Any, optimizer: MatrixOptimizer) -> list[FlatTensor]:
    grids: dict[int, Grid] = {}
    flats = []
    for index, flat in enumerate(wrapper.fp32_groups_flat_partition):
        grid = _grid(wrapper.real_dp_process_group[index], grids)
        members = wrapper.bf16_groups[index]
        _check_complete(optimizer, index, len(members))
        shapes = [tuple(param.shape) for param in members]
        offsets = [0, *accumulate(math.prod(shape) for shape in shapes)][:-1]
        places = cut_together(shapes, offsets, flat.numel(), grid.shards, grid.shard)
        flats.append(FlatTensor(flat, index, places, grid, flat.device))
    return flats


def _of_stage_3(wrapper: Any, optimizer: MatrixOptimizer) -> list[FlatTensor]:
    from deepspeed.accelerator import get_accelerator

    grids: dict[int, Grid] = {}
    flats = []
    first = [0] * len(optimizer.param_groups)
    for sub_group, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        index = wrapper.sub_group_to_group_id[sub_group]
        members = wrapper.fp16_groups[sub_group]
        grid = _grid(wrapper.sub_group_process_groups[sub_group], grids)
        shapes = [tuple(param.ds_shape) for param in members]
        places = cut_each(shapes, grid.shards, grid.shard, first[index])
        for param, place in zip(members, places):
            size = param.partition_numel()
            start, stop = place.spans[grid.shard]
            if size != -(-param.ds_numel // grid.shards) or stop - start > size:
                raise UnsupportedLayoutError(
                    f"ZeRO-3 holds {size} elements of a parameter of {param.ds_numel} on each of {grid.shards} ranks, "
                    "which is not how it was cut when this version of hf_emopt was written"
                )
        offloaded, pinned = wrapper.offload_optimizer, wrapper.offload_optimizer_pin_memory
        if offloaded and pinned:  # at this stage DeepSpeed pins gradients only
            flat.data = get_accelerator().pin_memory(flat.data)
        flats.append(FlatTensor(flat, index, places, grid, _device_of(members[0]), offloaded, pinned))
        first[index] += len(members)
    for index, count in enumerate(first):
        _check_complete(optimizer, index, count)
    return flats


def _device_of(tensor: torch.Tensor) -> torch.device:
    """The device of the forward pass; parameters may be offloaded from it."""
    if tensor.device.type == "cpu" and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type != "cpu":
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return tensor.device


def _check_complete(optimizer: MatrixOptimizer, index: int, count: int) -> None:
    group = optimizer.param_groups[index]
    if len(group["param_names"]) != count:
        raise UnsupportedLayoutError(
            f"group {group['name']!r} was built of {len(group['param_names'])} parameters, and DeepSpeed trains {count} of "
            "them: some were frozen in between, or have no elements. Freeze layers first, then build the optimizer"
        )


def _refuse_config(engine: Any, optimizer: MatrixOptimizer) -> None:
    """Refuses a configuration before DeepSpeed wraps anything."""
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
    """Refuses DeepSpeed's own Muon at ZeRO-1, 2 and 3 where it clips the orthogonalized update by the update's norm."""
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
    """Refuses parallelism that gives ranks other parameters."""
    problem = None
    if type(engine).__name__ == "PipelineEngine":
        problem = "pipeline parallelism"
    elif getattr(engine, "has_moe_layers", False):
        problem = "deepspeed.moe layers, whose experts other ranks hold (transformers' expert modules are supported)"
    elif getattr(engine.mpu, "get_model_parallel_world_size", lambda: 1)() > 1:
        problem = "model parallelism by an mpu object, which cuts matrices"
    elif optimizer.average_gradients:
        problem = "average_gradients=True (leave it out: the engine averages gradients)"
    if problem is not None:
        raise UnsupportedLayoutError(
            f"{type(optimizer).__name__} does not run under DeepSpeed with {problem}; use ZeRO alone"
        )


def watch() -> None:
    """Patches DeepSpeed's engine to attach optimizers of this package, and Accelerate not to replace them. Idempotent."""
    patch(accelerate.accelerator, "map_pytorch_optim_to_deepspeed", _map_optimizer)
    patch(sys.modules[ENGINE_MODULE].DeepSpeedEngine, "_configure_optimizer", _configure_optimizer)


def _save_checkpoint(optimizer: MatrixOptimizer, original: Original, *args: Any, **kwargs: Any) -> Any:
    """``engine.save_checkpoint`` of all ranks, after the owners' state has been gathered."""
    optimizer.consolidate_state_dict(to=None)
    return original(*args, **kwargs)


def _map_optimizer(original: Original, optimizer: Any) -> Any:
    """Accelerate's silent replacement of optimizers by DeepSpeedCPUAdam, which is refused for optimizers of this package."""
    if isinstance(optimizer, MatrixOptimizer):
        problem = config_problem({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
        raise ValueError(f"{type(optimizer).__name__} under DeepSpeed: {problem}.")
    return original(optimizer)


def _configure_optimizer(original: Original, engine: Any, client_optimizer: Any, model_parameters: Any) -> None:
    """``DeepSpeedEngine._configure_optimizer``: refuses before DeepSpeed wraps, attaches after it."""
    if client_optimizer is None:
        refuse_native_muon(engine)
    with ExitStack() as stack:

        def checked(optimizer: Any) -> Any:
            if isinstance(optimizer, MatrixOptimizer):
                _refuse_config(engine, optimizer)
                stack.enter_context(_without_steps(optimizer))
            return optimizer

        client = checked(client_optimizer)
        if callable(client):  # a function that makes the optimizer
            client = lambda parameters: checked(client_optimizer(parameters))  # noqa: E731
        original(engine, client, model_parameters)
    if isinstance(engine.basic_optimizer, MatrixOptimizer):
        attach(engine)


@contextmanager
def _without_steps(optimizer: MatrixOptimizer) -> Iterator[None]:
    """Disables ``step()``: ``FP16_UnfusedOptimizer`` makes state by a step on zero gradients, which would decay weights and
    count."""
    kept = optimizer.__dict__.get("step")  # a scheduler's wrapper
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.step
        if kept is not None:
            optimizer.step = kept  # type: ignore[method-assign]


@torch.no_grad()
def load_weights(engine: Any, weights: Mapping[str, Tensor]) -> None:
    """Loads whole weights into a DeepSpeed engine, in float32 for training and in the dtype of the forward pass.

    All ranks must call it. Parameters that are not trained, and buffers, are loaded at stages 0 to 2.

    Raises:
        ValueError: naming trained parameters that are missing, or that have another shape; nothing was changed by then.
    """
    optimizer, wrapper = _optimizer_of(engine), engine.optimizer
    optimizer.load_weights(weights)  # float32 copies, where DeepSpeed has them
    if not optimizer.is_flattened or hasattr(wrapper, "update_lp_params"):
        engine.module.load_state_dict(weights, strict=False)
        if optimizer.is_flattened:
            wrapper.update_lp_params()
        return
    for sub_group in range(len(wrapper.fp16_groups)):  # ZeRO-3, as at the end of its step
        wrapper._reassign_or_swap_out_partitioned_parameters(sub_group)
    if wrapper.persistent_parameters:
        wrapper.persistent_parameters[0].partition(wrapper.persistent_parameters)
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)


def load_checkpoint(original: Original, engine: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
    """``Trainer``'s function that resumes a DeepSpeed run, also for checkpoints of other wrappers."""
    if not isinstance(getattr(engine, "basic_optimizer", None), MatrixOptimizer):
        return original(engine, checkpoint_path, *args, **kwargs)
    folder = find_deepspeed(checkpoint_path)
    if folder is None:
        return load_weights(engine, _weights_of(Path(checkpoint_path)))
    _check_layout(engine, folder, checkpoint_path)
    return original(engine, checkpoint_path, *args, **kwargs)


def _weights_of(folder: Path) -> dict[str, Tensor]:
    """Whole weights in a checkpoint of ``Trainer`` under DDP, FSDP2 or one process, or of ``hf-emopt convert``."""
    weights, by_fsdp = read_safetensors(folder), find_fsdp_weights(folder)
    if weights:
        return weights
    if by_fsdp is None:
        raise CheckpointError(f"{folder} has neither files of DeepSpeed nor model.safetensors nor pytorch_model_fsdp")
    return read_fsdp_weights(by_fsdp)


def _check_layout(engine: Any, folder: Path, checkpoint: str) -> None:
    """Refuses files of another stage or number of ranks. DeepSpeed's own errors name neither."""
    ranks, stages = layout_of(folder)
    stage = int(engine.zero_optimization_stage())
    if str(stage) not in stages or ranks != (engine.seq_dp_world_size if stage else 0):
        by = f"by {ranks} ranks at ZeRO stage {stages}" if ranks else "at ZeRO stage 0"
        raise CheckpointError(
            f"{checkpoint} was saved {by}, and this run has {engine.seq_dp_world_size} ranks at stage {stage}: `hf-emopt "
            f"convert {checkpoint} OUTPUT` makes of it a checkpoint that resumes at any number of ranks and any stage"
        )
