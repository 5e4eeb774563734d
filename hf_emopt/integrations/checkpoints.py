"""Makes parameters current and state whole before transformers and Accelerate read them.

With these hooks ``Trainer`` finishes updates before it saves or evaluates, and gathers the state before it saves the
optimizer; so does ``accelerate.Accelerator`` in ``save_state``. ``Trainer`` resumes from state of any layout and of AdamW.
``resume_from_checkpoint=True`` skips interrupted checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import trainer
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from hf_emopt.checkpoint.deepspeed_files import find_deepspeed
from hf_emopt.checkpoint.files import (
    CheckpointError,
    find_fsdp_weights,
    find_optimizer_state,
    newest_checkpoint,
    read_fsdp_weights,
    read_optimizer_state,
)
from hf_emopt.checkpoint.from_adamw import is_adamw
from hf_emopt.integrations.patching import Original, patch
from hf_emopt.integrations.refusals import optim_name
from hf_emopt.integrations.registry import OPTIMIZERS, PREFIX, unwrap_optimizer

logger = logging.get_logger("transformers.hf_emopt")

SYNCHRONIZED = ("save_model", "evaluate", "predict", "_load_best_model")
CONSOLIDATED = ("_save_optimizer_and_scheduler",)

PATIENCE = timedelta(minutes=9)
"""How long ``save_state`` waits for the other ranks: less than NCCL's ten minutes, after which it ends the process."""
_CALLS = itertools.count()


def synchronize(*optimizers: Any) -> None:
    """Makes parameters current; no effect on other optimizers. No collective."""
    for ours in map(unwrap_optimizer, optimizers):
        if ours is not None:
            ours.synchronize()


def consolidate(optimizer: Any) -> None:
    """Collective: makes ``state_dict()`` whole on the first rank; no effect on other optimizers."""
    ours = unwrap_optimizer(optimizer)
    if ours is not None:
        ours.consolidate_state_dict()


def hook_trainer() -> None:
    """Patches ``Trainer`` to call both, and to load any checkpoint. Idempotent; no effect on other optimizers."""
    for names, action in ((SYNCHRONIZED, synchronize), (CONSOLIDATED, consolidate)):
        for name in names:
            if not patch(trainer.Trainer, name, partial(_preceded, action)):
                logger.warning(
                    f"this version of transformers has no Trainer.{name}: call optimizer.synchronize() before parameters "
                    "are read and optimizer.consolidate_state_dict() on all ranks before the optimizer is saved."
                )
    patch(trainer.Trainer, "_load_optimizer_and_scheduler", _load_optimizer)
    patch(trainer.Trainer, "_load_from_checkpoint", _load_weights)
    patch(trainer.Trainer, "_save_checkpoint", _save)
    patch(trainer.Trainer, "train", _train)


def _preceded(
    action: Callable[[Any], None], original: Original, self: trainer.Trainer, *args: Any, **kwargs: Any
) -> Any:
    action(getattr(self, "optimizer", None))
    return original(self, *args, **kwargs)


def _load_optimizer(original: Original, self: trainer.Trainer, checkpoint: str | None) -> None:
    """``Trainer._load_optimizer_and_scheduler`` for state of any layout, and of AdamW."""
    ours = unwrap_optimizer(self.optimizer)
    if ours is None or checkpoint is None:
        original(self, checkpoint)
        return
    found, state, error = find_optimizer_state(checkpoint), None, None
    if found is None and not self.is_deepspeed_enabled and find_deepspeed(checkpoint) is not None:
        error = (
            f"{checkpoint} was saved under DeepSpeed, whose files have a part for each rank: `hf-emopt convert "
            f"{checkpoint} OUTPUT` makes of it a checkpoint that resumes here"
        )
    if found is not None:
        try:
            # The description suffices: each rank may read its own part of a folder of shards.
            state = read_optimizer_state(found, only_description=True)
        except CheckpointError as caught:
            error = str(caught)
    foreign = state is not None and is_adamw(state)
    own = self.is_fsdp_enabled and state is not None and not foreign and _by_fsdp(found, state)
    seen = all_gather_values((error, own, found is None))
    error = next((e for e, _, _ in seen if e is not None), None)
    if error is not None:  # all ranks raise the error of any rank, so that none waits for it
        raise CheckpointError(error)
    if any(own for _, own, _ in seen) or all(absent for _, _, absent in seen):
        original(self, checkpoint)  # files of this layout: each rank reads its own part
        return
    absent = [rank for rank, (_, _, absent) in enumerate(seen) if absent]
    if absent or state is None or found is None:
        raise CheckpointError(f"ranks {absent} do not see the optimizer's state in {checkpoint}: put it where all do")
    state = read_optimizer_state(found) if found.is_dir() else state
    ours.load_state_dict(_named(self, state) if foreign else state)
    _load_schedule(self, ours, checkpoint, foreign)


def _by_fsdp(found: Path | None, state: dict[str, Any]) -> bool:
    """Whether state was written by FSDP: by name, in the files that Accelerate looks for under FSDP."""
    by_name = all(isinstance(index, str) for group in state["param_groups"] for index in group["params"])
    return found is not None and found.name in ("optimizer.bin", "optimizer_0") and by_name


def all_gather_values(value: Any) -> list[Any]:
    """The value of each rank; one value without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _is_ours(self: trainer.Trainer) -> bool:
    return unwrap_optimizer(self.optimizer) is not None or optim_name(self.args).removeprefix(PREFIX) in OPTIMIZERS


def _load_weights(original: Original, self: trainer.Trainer, resume_from_checkpoint: str, model: Any = None) -> None:
    """``Trainer._load_from_checkpoint`` for weights of FSDP in a run without it, and for plain weights in a run with it."""
    folder = Path(resume_from_checkpoint)
    by_fsdp = find_fsdp_weights(folder)
    plain = folder / "model.safetensors"
    target: Any = self.model if model is None else model
    own = (by_fsdp is not None) == self.is_fsdp_enabled
    if not _is_ours(self) or own or not (by_fsdp or plain.is_file()):
        original(self, resume_from_checkpoint, model)
    elif by_fsdp is not None:
        strict = not getattr(target, "_tied_weights_keys", None)
        target.load_state_dict(read_fsdp_weights(by_fsdp), strict=strict)
    else:
        weights: dict[str, Any] = load_file(plain, device="cpu")
        set_model_state_dict(target, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def _named(self: trainer.Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """State of AdamW with parameter names, from ``Trainer``'s two groups: with and without decay."""
    groups = state["param_groups"]
    model: Any = self.model
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    chosen = set(self.get_decay_parameter_names(model))
    names = [[n for n in trained if n in chosen], [n for n in trained if n not in chosen]]
    named = any("param_names" in g or any(isinstance(index, str) for index in g["params"]) for g in groups)
    if named or [len(g["params"]) for g in groups] != [len(n) for n in names]:
        return state
    return {**state, "param_groups": [{**g, "param_names": n} for g, n in zip(groups, names)]}


def _load_schedule(self: trainer.Trainer, ours: Any, checkpoint: str, foreign: bool) -> None:
    scheduler: Any = self.lr_scheduler
    if not (file := Path(checkpoint) / "scheduler.pt").is_file():
        return
    saved = torch.load(file, weights_only=True)
    if foreign:  # its lists are of AdamW's groups
        rates = [group["lr"] for group in ours.param_groups]
        kept = {key: value for key, value in saved.items() if not isinstance(value, (list, tuple))}
        saved = {**scheduler.state_dict(), **kept, "_last_lr": rates}
    scheduler.load_state_dict(saved)


def _save(original: Original, self: trainer.Trainer, model: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
    """``Trainer._save_checkpoint``, which first removes the mark of a whole folder, ``trainer_state.json``."""
    if _is_ours(self) and self.args.should_save:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        (folder / "trainer_state.json").unlink(missing_ok=True)
    return original(self, model, trial, *args, **kwargs)


def _train(
    original: Original,
    self: trainer.Trainer,
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``Trainer.train`` that resumes from the newest whole checkpoint."""
    if resume_from_checkpoint is True and _is_ours(self):
        output_dir: Any = self.args.output_dir
        newest, whole = get_last_checkpoint(output_dir), newest_checkpoint(output_dir)
        if whole is not None and newest is not None and Path(newest) != whole:
            logger.warning(f"{newest} was not saved to its end; training goes on from {whole}.")
            resume_from_checkpoint = str(whole)
    return original(self, resume_from_checkpoint, *args, **kwargs)


def hook_accelerate() -> None:
    """Has every ``accelerate.Accelerator`` do both where they are due. Idempotent; without effect on other optimizers."""
    for name, action in (("save_state", _complete), ("load_state", synchronize), ("get_state_dict", synchronize)):
        patch(accelerate.Accelerator, name, partial(_for_each, action))


def _for_each(
    action: Callable[[Any], None], original: Original, self: accelerate.Accelerator, *args: Any, **kwargs: Any
) -> Any:
    for optimizer in self._optimizers:
        action(optimizer)
    return original(self, *args, **kwargs)


def _complete(optimizer: Any) -> None:
    if unwrap_optimizer(optimizer) is not None:
        synchronize(optimizer)
        _wait_for_all_ranks()
        consolidate(optimizer)


def _wait_for_all_ranks() -> None:
    """Returns when every rank has called it. A rank that saves alone gets an error instead of waiting for the others.

    Raises:
        RuntimeError: some rank has not called it within :data:`PATIENCE`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    store, key = dist.distributed_c10d._get_default_store(), f"hf_emopt/save_state/{next(_CALLS)}"
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/all", "here")
    try:
        store.wait([f"{key}/all"], PATIENCE)
    except RuntimeError:
        raise RuntimeError(
            f"accelerator.save_state() was called on rank {dist.get_rank()} and, within {PATIENCE}, not on all ranks. The "
            "optimizer's state has parts on each of them: call save_state() on every process, outside of "
            "`if accelerator.is_main_process:`"
        ) from None
