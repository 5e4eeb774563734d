"""``Trainer`` and Accelerate under DeepSpeed on several ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin
from ranks import GLOBAL_BATCH, make_trainer, samples, tiny_llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config
from zero_runs import imported

import hf_emopt
from hf_emopt.integrations.registry import unwrap_optimizer


def settings(stage: int, auto: bool = True) -> dict[str, Any]:
    """A DeepSpeed configuration for ``Trainer``, which fills in what is ``"auto"``."""
    return {
        "train_batch_size": "auto" if auto else GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": "auto" if auto else GLOBAL_BATCH // dist.get_world_size(),
        "gradient_accumulation_steps": "auto" if auto else 1,
        "gradient_clipping": "auto" if auto else 1.0,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }


@contextmanager
def fresh_deepspeed() -> Iterator[None]:
    """Accelerate and transformers keep what they know of DeepSpeed in globals; cases share a process."""
    imported().init_distributed(dist_backend="gloo", verbose=False)
    _reset()
    # ACCELERATE_USE_DEEPSPEED and its like stay set, and would make the next run one of these.
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        _reset()
        gc.collect()


def _reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights that the forward pass uses, by the names of the unwrapped model."""
    import deepspeed

    found = {}
    for name, p in model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name.removeprefix("module.")] = p.detach().float().clone()
    return found


def trainer_run(
    folder: str, config: dict[str, Any], resume: str | None = None, zero_init: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """Trains a small Llama with a plain ``Trainer``.

    Args:
        folder: of output.
        config: DeepSpeed's.
        resume: a checkpoint.
        zero_init: build the model under ``zero.Init``, as ``from_pretrained`` does with ZeRO-3.
        kwargs: of ``make_trainer``.
    """
    with fresh_deepspeed():
        if zero_init:
            config = settings(config["zero_optimization"]["stage"], auto=False)
        model = None
        if zero_init:
            known = HfDeepSpeedConfig(config)  # kept alive while the model is loaded
            if dist.get_rank() == 0:
                tiny_llama().save_pretrained(f"{folder}/pretrained")
            dist.barrier()
            model = LlamaForCausalLM.from_pretrained(f"{folder}/pretrained")
            assert known.is_zero3()
            assert all(p.shape == (0,) for p in model.parameters())
        trainer = make_trainer(folder, "ddp", dist.get_world_size(), model=model, deepspeed=config, **kwargs)
        trainer.train(resume_from_checkpoint=resume)
        optimizer = unwrap_optimizer(trainer.optimizer)
        assert optimizer is not None
        result = {
            "weights": whole_weights(trainer.model),
            "logs": [entry for entry in trainer.state.log_history if "learning_rate" in entry],
            "transforms": optimizer.transform_count,
            "wrapper": type(trainer.deepspeed.optimizer).__name__,
            "routes": {route.name: (route.kind, route.shape) for route in optimizer.routes},
        }
        trainer.deepspeed.destroy()
        return result


def example_run(config: str, script: list[str]) -> dict[str, float]:
    """``examples/run_clm.py`` with a DeepSpeed configuration."""
    import run_clm

    with fresh_deepspeed():
        return run_clm.main([*script, "--deepspeed", config])


def accelerate_run(stage: int, folder: str, steps: range, load: bool = False) -> dict[str, Any]:
    """A loop of its own with ``hf_emopt.Accelerator`` and a DeepSpeed plugin; saved at the end.

    Args:
        stage: of ZeRO.
        folder: of ``save_state``.
        steps: numbers of the steps, which choose the samples.
        load: start from ``folder``.
    """
    with fresh_deepspeed():
        plugin = DeepSpeedPlugin(hf_ds_config=settings(stage, auto=False))
        handler = hf_emopt.EmoptPlugin(optim="soap", lr=2e-3, optim_args="precondition_frequency=2,aux_lr=5e-4")
        accelerator = hf_emopt.Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[handler])
        model = tiny_llama()
        optimizer = handler.build(model)
        before = {n: g["kind"] for g in optimizer.param_groups for n in g["param_names"]}
        model, wrapped = accelerator.prepare(model, optimizer)
        if load:
            accelerator.load_state(folder)
        data, share = samples(64), GLOBAL_BATCH // dist.get_world_size()
        for step in steps:
            start = GLOBAL_BATCH * step + share * dist.get_rank()
            batch = torch.stack([s["input_ids"] for s in data[start : start + share]])
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            wrapped.step()
            wrapped.zero_grad()
        accelerator.save_state(folder)
        ours = unwrap_optimizer(wrapped)
        assert ours is optimizer
        result = {
            "weights": whole_weights(model),
            "transforms": optimizer.transform_count,
            "kinds": (before, {n: g["kind"] for g in optimizer.param_groups for n in g["param_names"]}),
        }
        model.destroy()
        return result
