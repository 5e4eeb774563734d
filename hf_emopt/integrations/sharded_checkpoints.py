"""Checkpoints of models that transformers shards while it loads them (``DistributedConfig``), which ``Trainer`` refuses.

The weights are ``Trainer``'s own, whole in ``model.safetensors``, and are read back by ``from_pretrained``, since a family
may store other tensors than it computes with. The optimizer's state goes through transformers'
``save_optimizer_distributed``, which gives strided shards the form that ``torch.distributed.checkpoint`` can describe.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import SaveStrategy

from hf_emopt.checkpoint.files import CheckpointError
from hf_emopt.integrations.checkpoints import all_gather_values
from hf_emopt.integrations.registry import unwrap_optimizer

FOLDER = "optimizer_sharded"  # inside a checkpoint, what torch.distributed.checkpoint writes
_SCHEDULER = "scheduler.pt"


def is_sharded_at_load(model: Any) -> bool:
    """Whether ``from_pretrained(distributed_config=...)`` has sharded the model."""
    if getattr(model, "is_distributed_loading_by_transformers", False):
        return True
    # transformers 5.17 does not mark such models.
    return not can_save() and any(isinstance(p, DTensor) for p in getattr(model, "parameters", tuple)())


def can_save() -> bool:
    """Whether this transformers can write the optimizer's state of such a model: 5.20 and later."""
    return importlib.util.find_spec("transformers.distributed.checkpoint") is not None


@contextmanager
def permitted(model: Any, args: Any) -> Iterator[None]:
    """A context in which ``Trainer`` accepts a sharded model whose optimizer is to be saved as well."""
    refused = is_sharded_at_load(model) and args is not None and not args.save_only_model
    if not refused or args.save_strategy == SaveStrategy.NO:
        yield
        return
    if not can_save():
        raise ValueError(
            "saving the optimizer of a model that was sharded while it was loaded takes transformers 5.20 or later, and "
            f"this is {transformers.__version__}: upgrade it, or set save_strategy='no' or save_only_model=True"
        )
    args.save_only_model = True
    try:
        yield
    finally:
        args.save_only_model = False


def save_optimizer(trainer: Any, folder: str | Path) -> None:
    """Saves optimizer and schedule into a checkpoint. All ranks must call it."""
    from transformers.distributed.checkpoint import save_optimizer_distributed

    ours = unwrap_optimizer(trainer.optimizer)
    assert ours is not None
    ours.consolidate_state_dict(to=None)  # owners hold the state of plain parameters
    save_optimizer_distributed(trainer.model, ours, str(Path(folder) / FOLDER))
    if trainer.args.should_save:
        torch.save(trainer.lr_scheduler.state_dict(), Path(folder) / _SCHEDULER)
    dist.barrier()


def load_optimizer(trainer: Any, folder: str | Path) -> bool:
    """Loads optimizer and schedule from a checkpoint, and returns whether it has them. All ranks must call it."""
    from transformers.distributed.checkpoint import load_optimizer_distributed

    ours = unwrap_optimizer(trainer.optimizer)
    assert ours is not None
    path = Path(folder) / FOLDER
    seen = all_gather_values(path.is_dir())
    missing = [rank for rank, found in enumerate(seen) if not found]
    if not any(seen):
        return False
    if missing:
        raise CheckpointError(f"ranks {missing} do not see {path}: put the checkpoint where all do")
    load_optimizer_distributed(trainer.model, ours, str(path))
    if (Path(folder) / _SCHEDULER).is_file():
        trainer.lr_scheduler.load_state_dict(torch.load(Path(folder) / _SCHEDULER, weights_only=True))
    return True


@torch.no_grad()
def load_weights(model: Any, folder: str | Path) -> None:
    """Loads this rank's part of whole weights that ``save_pretrained`` has written. All ranks must call it."""
    config = model.config.distributed_config
    other = type(model).from_pretrained(str(folder), distributed_config=config, dtype=model.dtype)
    read = dict(other.named_parameters()) | dict(other.named_buffers())
    for name, target in [*model.named_parameters(), *model.named_buffers()]:
        source = read.get(name)
        if source is None or source.shape != target.shape:
            raise CheckpointError(f"{folder} has no weight {name} of shape {tuple(target.shape)}")
        pair = [t.to_local() if isinstance(t, DTensor) else t for t in (target, source)]
        pair[0].copy_(pair[1])
