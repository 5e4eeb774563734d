"""Resuming a DeepSpeed run from a checkpoint of another layout: weights into its flat tensors, and what ``Trainer`` asks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import trainer

from hf_emopt.checkpoint.deepspeed_files import find_deepspeed, layout_of
from hf_emopt.checkpoint.files import CheckpointError, find_fsdp_weights, read_fsdp_weights, read_safetensors
from hf_emopt.integrations.checkpoints import MARK
from hf_emopt.optimizers.base import MatrixOptimizer

__all__ = ["hook_trainer_resume", "load_weights"]

_NAME = "deepspeed_load_checkpoint"


@torch.no_grad()
def load_weights(engine: Any, weights: Mapping[str, Tensor]) -> None:
    """Whole weights into a DeepSpeed engine: what it trains in float32, and what the forward pass uses. On all ranks.

    Args:
        engine: with an optimizer of this package.
        weights: by the names that the optimizer knows. Names of parameters that are not trained, and of buffers, are
            loaded into the module at stages 0 to 2.

    Raises:
        ValueError: naming trained parameters that are missing, or that have another shape; nothing was changed by then.
    """
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        raise TypeError(f"the engine's optimizer is {type(optimizer).__name__}, none of hf_emopt")
    optimizer.load_weights(weights)  # float32 copies, where DeepSpeed has them
    if not optimizer.is_flattened:
        engine.module.load_state_dict(weights, strict=False)
        return
    if hasattr(wrapper, "update_lp_params"):
        engine.module.load_state_dict(weights, strict=False)
        wrapper.update_lp_params()
        return
    for sub_group in range(len(wrapper.fp16_groups)):  # ZeRO-3, as at the end of its step
        wrapper._reassign_or_swap_out_partitioned_parameters(sub_group)
    if wrapper.persistent_parameters:
        wrapper.persistent_parameters[0].partition(wrapper.persistent_parameters)
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)


def hook_trainer_resume() -> None:
    """Has ``Trainer`` resume a DeepSpeed run from checkpoints that DeepSpeed did not write. Idempotent."""
    original: Callable[..., Any] | None = getattr(trainer, _NAME, None)
    original = getattr(original, MARK, original)
    if original is None:
        return

    @functools.wraps(original)
    def load_checkpoint(engine: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(getattr(engine, "basic_optimizer", None), MatrixOptimizer):
            return original(engine, checkpoint_path, *args, **kwargs)
        folder = find_deepspeed(checkpoint_path)
        if folder is not None:
            _check_layout(engine, folder, checkpoint_path)
            return original(engine, checkpoint_path, *args, **kwargs)
        return load_weights(engine, _weights_of(Path(checkpoint_path)))

    setattr(load_checkpoint, MARK, original)
    setattr(trainer, _NAME, load_checkpoint)


def _weights_of(folder: Path) -> dict[str, Tensor]:
    """Whole weights in a checkpoint of ``Trainer`` under DDP, FSDP2 or one process, or of ``hf-emopt convert``."""
    weights, by_fsdp = read_safetensors(folder), find_fsdp_weights(folder)
    if weights:
        return weights
    if by_fsdp is None:
        raise CheckpointError(f"{folder} has neither files of DeepSpeed nor model.safetensors nor pytorch_model_fsdp")
    return read_fsdp_weights(by_fsdp)


def _check_layout(engine: Any, folder: Path, checkpoint: str) -> None:
    """Refuses files of another stage or number of ranks, which DeepSpeed fails on in ways that name neither."""
    ranks, stages = layout_of(folder)
    stage = int(engine.zero_optimization_stage())
    here = engine.seq_dp_world_size if stage else 0
    if str(stage) not in stages or ranks != here:
        by = f"by {ranks} ranks at ZeRO stage {stages}" if ranks else "at ZeRO stage 0"
        raise CheckpointError(
            f"{checkpoint} was saved {by}, and this run has {engine.seq_dp_world_size} ranks at stage {stage}: `hf-emopt "
            f"convert {checkpoint} OUTPUT` makes of it a checkpoint that resumes at any number of ranks and any stage"
        )
