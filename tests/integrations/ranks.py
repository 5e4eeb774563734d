"""What each rank does in the tests of several ranks, and the same in one process to compare with."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import fsdp_on_cpu
import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_emopt
from hf_emopt.integrations.registry import unwrap_optimizer

VOCABULARY = 64
LAYERS = 2
MATRICES = 7 * LAYERS  # q, k, v, o, gate, up, down
GLOBAL_BATCH = 8

EXACT = "transport_dtype=float32,ns_dtype=float32,aux_lr=5e-4"


@contextmanager
def fresh_accelerate(layout: str = "one") -> Iterator[None]:
    """Accelerate keeps its state in the class; cases share a process."""
    _reset()
    if layout not in ("one", "ddp"):
        fsdp_on_cpu.enable()
    try:
        yield
    finally:
        fsdp_on_cpu.disable()
        _reset()
        gc.collect()


def _reset() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def tiny_llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def samples(count: int, length: int = 12, seed: int = 1) -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by the names that the unwrapped model has. A collective where the model is sharded."""
    parts = ("_orig_mod.", "_checkpoint_wrapped_module.", "module.")
    found = {}
    for name, parameter in model.named_parameters():
        for part in parts:
            name = name.replace(part, "")
        found[name] = whole(parameter)
    return found


def layout_settings(layout: str) -> dict[str, Any]:
    """Fields of ``TrainingArguments`` for one process or DDP (nothing), FSDP2, FSDP1 or HSDP."""
    if layout in ("one", "ddp"):
        return {}
    version = 1 if layout == "fsdp1" else 2
    settings: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": version, "state_dict_type": "FULL_STATE_DICT"}}
    if layout == "fsdp1":
        settings["fsdp_config"]["sync_module_states"] = False  # asks for an accelerator
    if layout == "fsdp2_sharded_checkpoint":
        settings["fsdp_config"]["state_dict_type"] = "SHARDED_STATE_DICT"
    if layout == "hsdp":
        settings["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return settings


def trainer_class(name: str) -> Any:
    if name == "SFT":
        from trl import SFTTrainer

        class EmoptSFTTrainer(hf_emopt.EmoptTrainerMixin, SFTTrainer):
            pass

        return EmoptSFTTrainer
    return hf_emopt.EmoptTrainer if name == "EmoptTrainer" else Trainer


class Evaluations(TrainerCallback):
    """Losses on the evaluation set, which depend on whether parameters were current."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
        self.losses.append(metrics["eval_loss"])


def make_trainer(
    folder: str, layout: str, world_size: int, trainer: str = "Trainer", model: Any = None, **kwargs: Any
) -> Any:
    settings: dict[str, Any] = {
        "optim": "muon",
        "optim_args": EXACT,
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "max_steps": 4,
        "per_device_train_batch_size": GLOBAL_BATCH // world_size,
        "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "linear",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **layout_settings(layout),
        **kwargs,
    }
    data: Any = samples(64)
    extra: dict[str, Any] = {}
    args_cls: Any = TrainingArguments
    if trainer == "SFT":
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig

        args_cls = SFTConfig
        settings["bf16"] = False
        data = Dataset.from_list([{"input_ids": s["input_ids"].tolist()} for s in data])
        vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
        extra["processing_class"] = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="<eos>",
        )
    if kwargs.get("eval_strategy"):
        extra["eval_dataset"] = samples(16, seed=2) if trainer != "SFT" else data
    return trainer_class(trainer)(
        model=tiny_llama() if model is None else model,
        args=args_cls(output_dir=folder, **settings),
        train_dataset=data,
        **extra,
    )


def train(
    folder: str,
    layout: str,
    world_size: int,
    resume: str | None = None,
    save_to: str | None = None,
    nodes: int = 1,
    **kwargs: Any,
) -> dict[str, Any]:
    """Trains a small Llama with ``Trainer``; ``layout`` says how, and every rank calls it. ``nodes``: of the job.

    Returns:
        Whole weights, logs, evaluation losses, matrices transformed on this rank, state bytes on this rank.
    """
    with fresh_accelerate(layout):
        trainer = make_trainer(folder, layout, world_size, **kwargs)
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world_size // nodes)):
            trainer.train(resume_from_checkpoint=resume)
        optimizer = unwrap_optimizer(trainer.optimizer)
        assert optimizer is not None
        if save_to is not None:
            trainer.save_model(save_to)
        held = sum(
            (v.to_local() if isinstance(v, DTensor) else v).nbytes
            for entry in optimizer.state.values()
            for key, v in entry.items()
            if key == "momentum_buffer"
        )
        return {
            "weights": weights(trainer.model),
            "logs": [entry for entry in trainer.state.log_history if "learning_rate" in entry],
            "evaluations": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
            "transforms": optimizer.transform_count,
            "momentum_bytes": held,
            "explain": optimizer.explain(),
            "overlap": getattr(optimizer, "overlap_param_gather", None),
        }


def refusal(folder: str, layout: str, world_size: int, **kwargs: Any) -> tuple[str, str]:
    """What a trainer was at when it was refused, and the message."""
    stage = "making"
    with fresh_accelerate(layout):
        try:
            trainer = make_trainer(folder, layout, world_size, **kwargs)
            stage = "training"
            trainer.train()
        except (ValueError, RuntimeError) as error:
            return stage, f"{type(error).__name__}: {error}"
        return "finished", ""


def poisoned(folder: str, world_size: int) -> list[dict[str, float]]:
    """Logs of a run in which one rank has a gradient that is not finite in the second step."""

    class Poison(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 1 and args.process_index == world_size - 1:
                next(p for n, p in model.named_parameters() if "q_proj" in n).grad.fill_(float("nan"))

    with fresh_accelerate("ddp"):
        trainer = make_trainer(folder, "ddp", world_size, "EmoptTrainer", max_grad_norm=0.0)
        trainer.add_callback(Poison)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "learning_rate" in entry]


# ---------------------------------------------------------------------------------------------- Accelerate


def make_accelerator(
    layout: str, compiled: bool = False, checkpointed: bool = False, plain: bool = False, **plugin: Any
) -> Any:
    """Ours with a plugin, or Accelerate's own where ``plain``."""
    options: dict[str, Any] = {}
    if layout in ("fsdp1", "fsdp2", "hsdp"):
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=1 if layout == "fsdp1" else 2,
            auto_wrap_policy="transformer_based_wrap",
            activation_checkpointing=checkpointed,
            state_dict_type="FULL_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )
    if layout == "hsdp":
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    if compiled:
        options["dynamo_backend"] = "aot_eager"
    if plain:
        return Accelerator(cpu=True, **options)
    handler = hf_emopt.EmoptPlugin(**{"optim": "muon", "lr": 2e-3, "optim_args": "ns_dtype=float32", **plugin})
    return hf_emopt.Accelerator(cpu=True, kwargs_handlers=[handler], **options)


def accelerate_steps(
    layout: str,
    rank: int,
    world_size: int,
    steps: range,
    load: str | None = None,
    save: str | None = None,
    tied: bool = False,
    gradient_checkpointing: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A loop of its own with :class:`hf_emopt.Accelerator`.

    Returns:
        Names in the order of the model, whole weights before and after, matrices transformed on this rank.
    """
    with fresh_accelerate(layout):
        accelerator = make_accelerator(layout, **options)
        model = tiny_llama(tied)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        before = weights(model)
        optimizer = accelerator.emopt_plugin.build(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        if load is not None:
            accelerator.load_state(load)
        data, share = samples(64), GLOBAL_BATCH // world_size
        for step in steps:
            start = GLOBAL_BATCH * step + share * rank
            batch = torch.stack([s["input_ids"] for s in data[start : start + share]])
            optimizer.zero_grad()
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if save is not None:
            accelerator.save_state(save)
        ours = unwrap_optimizer(optimizer)
        assert ours is not None
        ours.synchronize()
        return {
            "before": before,
            "weights": weights(model),
            "state": {k: whole(v) for k, v in accelerator.get_state_dict(model).items()},
            "transforms": ours.transform_count,
            "kinds": {n: g["kind"] for g in ours.param_groups for n in g["param_names"]},
        }


def distributed_accelerate_steps(layout: str, world_size: int, **kwargs: Any) -> dict[str, Any]:
    """:func:`accelerate_steps` as the harness calls it."""
    return accelerate_steps(layout, torch.distributed.get_rank(), world_size, **kwargs)


def accelerate_refusal(layout: str) -> str:
    with fresh_accelerate(layout):
        try:
            make_accelerator(layout)
        except ValueError as error:
            return str(error)
        return "no error"


def mesh_of_context_parallel(world_size: int) -> dict[str, Any]:
    """A mesh (replicate, shard, context) whose shard and context dimensions are one dimension for parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "cp"))
    flat = mesh[("dp", "cp")]._flatten("dp_cp")
    results = {}
    for name, chosen in (("flat", flat), ("replicate and shard", mesh)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 6, bias=False))
        fully_shard(model, mesh=chosen)
        optimizer = hf_emopt.Muon(model, lr=0.1, ns_dtype="float32", transport_dtype="float32", aux_lr=0.1)
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        results[name] = {"weights": weights(model), "transforms": optimizer.transform_count}
    return results
