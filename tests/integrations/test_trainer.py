"""A plain Trainer with optim="muon": what reaches the optimizer, what a step does, what is logged and saved."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from ranks import LAYERS, MATRICES, VOCABULARY, samples, tiny_llama
from safetensors.torch import load_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_emopt
from hf_emopt.integrations import refusals
from hf_emopt.integrations.transformers import unwrap_optimizer
from hf_emopt.optimizers.base import MatrixOptimizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order, so that equal runs are equal to the bit
    yield
    torch.set_num_threads(threads)


def make_trainer(
    folder: Path,
    model: nn.Module | None = None,
    *,
    trainer_cls: type[Trainer] = Trainer,
    args_cls: type[TrainingArguments] = TrainingArguments,
    data: Any = None,
    trainer_kwargs: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Trainer:
    settings: dict[str, Any] = {
        "optim": "muon",
        "learning_rate": 2e-3,
        "weight_decay": 0.1,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **kwargs,
    }
    args = args_cls(output_dir=str(folder), **settings)
    return trainer_cls(
        model=tiny_llama() if model is None else model,
        args=args,
        train_dataset=samples(16) if data is None else data,
        **(trainer_kwargs or {}),
    )


def optimizer_of(trainer: Trainer) -> MatrixOptimizer:
    optimizer = unwrap_optimizer(trainer.optimizer)
    assert optimizer is not None
    return optimizer


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def is_matrix(name: str) -> bool:
    return "_proj" in name


def step_logs(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "learning_rate" in entry]


# ---------------------------------------------------------------------------------------------- arguments and groups


@pytest.mark.parametrize("optim", ["muon", "emopt_muon", "normuon", "emopt_normuon"])
def test_name_gives_its_optimizer_and_transforms_each_matrix_once_a_step(optim: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, optim=optim, max_steps=3)
    before = weights(trainer.model)
    trainer.train()
    optimizer = optimizer_of(trainer)
    assert type(optimizer) is (hf_emopt.NorMuon if "nor" in optim else hf_emopt.Muon)
    assert optimizer.transform_count == 3 * MATRICES
    assert {route.name for route in optimizer.routes.matrices} == {name for name in before if is_matrix(name)}
    assert all(not torch.equal(before[name], now) for name, now in weights(trainer.model).items())


def test_arguments_reach_the_groups_with_their_types(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
        optim_args="ns_steps=6,aux_lr=1e-5,momentum=0.9,nesterov=false,aux_weight_decay=0.02,adjust_lr_fn=original",
    )
    optimizer = unwrap_optimizer(trainer.create_optimizer())
    assert optimizer is not None
    assert optimizer.defaults["lr"] == 2e-3
    matrix = next(g for g in optimizer.param_groups if g["kind"] == "matrix")
    aux = next(g for g in optimizer.param_groups if g["kind"] == "aux")
    wanted = {
        "lr": 2e-3,
        "weight_decay": 0.1,
        "ns_steps": 6,
        "momentum": 0.9,
        "nesterov": False,
        "adjust_lr_fn": "original",
    }
    assert {key: matrix[key] for key in wanted} == wanted
    assert {key: aux[key] for key in ("lr", "weight_decay", "betas", "eps")} == {
        "lr": 1e-5,
        "weight_decay": 0.02,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
    }
    assert optimizer.param_groups[0] is matrix, "the first group's rate is what Trainer logs as learning_rate"


def test_optim_args_win_and_transformers_defaults_keep_their_meaning(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, optim_args={"betas": [0.7, 0.8], "aux_eps": "1e-5"}, weight_decay=0.0)
    optimizer = unwrap_optimizer(trainer.create_optimizer())
    assert optimizer is not None
    aux = next(g for g in optimizer.param_groups if g["kind"] == "aux")
    assert (aux["betas"], aux["eps"], aux["weight_decay"]) == ((0.7, 0.8), 1e-5, 0.0)
    plain = unwrap_optimizer(make_trainer(tmp_path).create_optimizer())
    assert plain is not None
    aux = next(g for g in plain.param_groups if g["kind"] == "aux")
    assert (aux["lr"], aux["betas"], aux["eps"], aux["weight_decay"]) == (2e-3, (0.9, 0.999), 1e-8, 0.1)


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_llama().config
    config.attention_bias = True
    trainer = make_trainer(tmp_path, LlamaForCausalLM(config))
    optimizer = unwrap_optimizer(trainer.create_optimizer())
    assert optimizer is not None
    decay = {name: g["weight_decay"] for g in optimizer.param_groups for name in g["param_names"]}
    assert set(decay) == set(weights(trainer.model))
    without = {name for name in decay if name.endswith("bias") or "norm" in name}
    assert len(without) == 4 * LAYERS + 2 * LAYERS + 1
    assert {name for name, value in decay.items() if value == 0.0} == without
    assert {value for name, value in decay.items() if name not in without} == {0.1}


def test_aux_learning_rate_of_zero_moves_matrices_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, optim_args="aux_lr=0")
    before = weights(trainer.model)
    trainer.train()
    moved = {name for name, now in weights(trainer.model).items() if not torch.equal(now, before[name])}
    assert moved == {name for name in before if is_matrix(name)}


# ---------------------------------------------------------------------------------------------- schedules and logs

SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"warmup_steps": 4},
    "cosine": {"warmup_steps": 4},
    "polynomial": {"lr_scheduler_kwargs": {"lr_end": 1e-4, "power": 2.0}},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr": 2e-4}},
    "warmup_stable_decay": {"warmup_steps": 4, "lr_scheduler_kwargs": {"num_decay_steps": 8}},
    "constant_with_warmup": {"warmup_steps": 4},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_learning_rates_keep_their_ratio_and_are_logged(schedule: str, tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, lr_scheduler_type=schedule, max_steps=20, optim_args="aux_lr=5e-4", **SCHEDULES[schedule]
    )
    seen: list[list[float]] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
            seen.append([g["lr"] for g in optimizer.param_groups if g["kind"] == "matrix"][:1])
            seen[-1] += [g["lr"] for g in optimizer.param_groups if g["kind"] == "aux"]

    trainer.add_callback(Watch)
    trainer.train()
    logs = step_logs(trainer)
    assert len(logs) == len(seen) == 20
    for entry, (matrix, *aux) in zip(logs, seen, strict=True):
        assert entry["lr/matrix"] == entry["learning_rate"] == matrix
        assert aux == [entry["lr/aux"]] * len(aux)
        assert len(aux) == 2
        assert entry["lr/aux"] == pytest.approx(0.25 * matrix, rel=1e-9, abs=1e-15)
    rates = [entry["lr/matrix"] for entry in logs]
    assert max(rates) == pytest.approx(2e-3)
    assert min(rates) < 1.5e-3
    assert rates.count(max(rates)) < 20
    if schedule == "polynomial":  # this one and the next read defaults["lr"]
        assert rates[-1] == pytest.approx(1e-4 + (2e-3 - 1e-4) * (1 / 20) ** 2)
    if schedule == "cosine_with_min_lr":
        assert 2e-4 < rates[-1] < 2.2e-4


def test_loggers_get_every_rate_and_other_optimizers_are_left_alone(tmp_path: Path) -> None:
    class Logger(TrainerCallback):
        def __init__(self) -> None:
            self.keys: set[str] = set()

        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            self.keys |= {key for key in logs if key.startswith("lr/")}

    for optim, keys in (("muon", {"lr/matrix", "lr/aux"}), ("adamw_torch", set())):
        logger = Logger()
        trainer = make_trainer(tmp_path, optim=optim, max_steps=1, trainer_kwargs={"callbacks": [logger]})
        trainer.train()
        assert logger.keys == keys
        assert {key for entry in trainer.state.log_history for key in entry if key.startswith("lr/")} == keys


def test_start_of_training_says_once_what_is_trained_how(messages: list[logging.LogRecord], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, optim_args="aux_lr=5e-4")
    trainer.train()
    (line,) = [r.getMessage() for r in messages if r.levelno == logging.WARNING]
    (table,) = [r.getMessage() for r in messages if r.levelno == logging.INFO]
    matrix_numel = sum(p.numel() for n, p in trainer.model.named_parameters() if is_matrix(n))
    total = sum(p.numel() for p in trainer.model.parameters())
    for part in (
        f"Muon: {MATRICES} matrices in {MATRICES} parameters ({100 * matrix_numel / total:.1f} % of {total:,}",
        f"AdamW for {2 + 2 * LAYERS + 1} other parameters",
        "matrix lr 0.002, aux lr 0.0005",
        "match_rms_adamw",
        "0.2",
    ):
        assert part in line
    for name, _ in trainer.model.named_parameters():
        assert re.sub(r"layers\.\d", "layers.{0,1}", name) in table


# ---------------------------------------------------------------------------------------------- steps


def test_accumulated_micro_batches_make_one_step(tmp_path: Path) -> None:
    results = []
    for micro, accumulation in ((8, 1), (2, 4)):
        trainer = make_trainer(tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
        trainer.train()
        assert optimizer_of(trainer).transform_count == 2 * MATRICES
        results.append(weights(trainer.model))
    start = weights(tiny_llama())
    for name, whole in results[0].items():
        assert (whole - start[name]).abs().max() > 1e-4, name
        torch.testing.assert_close(results[1][name], whole, rtol=0, atol=1e-6)


def test_clipping_the_gradient_does_not_change_a_matrix_update(tmp_path: Path) -> None:
    start, moves, norms = weights(tiny_llama()), [], []
    for limit in (0.0, 1.0, 0.01):
        trainer = make_trainer(tmp_path, max_grad_norm=limit, max_steps=1)
        trainer.train()
        norms.append(step_logs(trainer)[0]["grad_norm"])
        moves.append({name: now - start[name] for name, now in weights(trainer.model).items() if is_matrix(name)})
    assert norms[-1] > 0.1, "the limit of 0.01 must have clipped"
    for other in moves[1:]:
        for name, move in moves[0].items():
            # 1e-5 relative: Newton-Schulz rounds in float32, the weights' own spacing adds 1e-8 to a move of 4e-4.
            assert (other[name] - move).norm() <= 1e-4 * move.norm(), name


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    # transformers 5.24 renamed "gradient checkpointing".
    word = "activation" if hasattr(TrainingArguments, "activation_checkpointing") else "gradient"
    runs = []
    for on in (False, True):
        trainer = make_trainer(tmp_path, **{f"{word}_checkpointing": on})
        trainer.train()
        assert getattr(trainer.model, f"is_{word}_checkpointing") is on
        assert optimizer_of(trainer).transform_count == 2 * MATRICES
        runs.append(weights(trainer.model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # traces and wraps the model as inductor does
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(
                not os.environ.get("EMOPT_SLOW_TESTS"), reason="two minutes of C++ compilation; set EMOPT_SLOW_TESTS=1"
            ),
        ),
    ],
)
def test_compiled_model_trains_the_same_matrices(backend: str, tmp_path: Path) -> None:
    runs = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": backend}):
        trainer = make_trainer(tmp_path, **options)
        trainer.train()
        optimizer = optimizer_of(trainer)
        assert optimizer.transform_count == 2 * MATRICES
        assert {route.name for route in optimizer.routes.matrices} == {n for n in weights(tiny_llama()) if is_matrix(n)}
        runs.append(weights(trainer.model))
    assert runs[0].keys() == runs[1].keys()
    for name, plain in runs[0].items():
        torch.testing.assert_close(runs[1][name], plain, rtol=0, atol=2e-6)


def test_only_norms_trainable_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    model = tiny_llama()
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name)
    trainer = make_trainer(tmp_path, model)
    with pytest.raises(ValueError, match="allow_no_matrices"):
        trainer.train()
    trainer = make_trainer(tmp_path, model, optim_args="allow_no_matrices=true")
    before = weights(model)
    trainer.train()
    assert optimizer_of(trainer).transform_count == 0
    assert {n for n, now in weights(model).items() if not torch.equal(now, before[n])} == {
        n for n in before if "norm" in n
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_kind_of_matrix_trainable(tmp_path: Path) -> None:
    model = tiny_llama()
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name)
    before = weights(model)
    trainer = make_trainer(tmp_path, model)
    trainer.train()
    assert optimizer_of(trainer).transform_count == 2 * LAYERS
    assert {n for n, now in weights(model).items() if not torch.equal(now, before[n])} == {
        n for n in before if "q_proj" in n
    }
    assert set(step_logs(trainer)[0]) >= {"lr/matrix"}
    assert "lr/aux" not in step_logs(trainer)[0]


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("optim", ["muon", "normuon"])
def test_resumed_run_equals_an_uninterrupted_one(optim: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optim": optim,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "linear",
        "optim_args": "aux_lr=5e-4",
        "data": samples(32),
    }
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert resumed.state.global_step == 6
    assert optimizer_of(resumed).transform_count == 3 * MATRICES
    finished, again = weights(whole.model), weights(resumed.model)
    assert [n for n in finished if not torch.equal(finished[n], again[n])] == []
    assert [e["lr/aux"] for e in step_logs(whole)][3:] == [e["lr/aux"] for e in step_logs(resumed)][3:]
    kept, loaded = optimizer_of(whole), optimizer_of(resumed)
    names = dict(zip(weights(whole.model), whole.model.parameters(), strict=True))
    others = dict(resumed.model.named_parameters())
    for name, p in names.items():
        assert kept.state[p].keys() == loaded.state[others[name]].keys()
        for key, value in kept.state[p].items():
            assert torch.equal(value, loaded.state[others[name]][key]), (name, key)


def test_load_best_model_at_end(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        max_steps=4,
        learning_rate=2e-2,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst, so that it is not simply the last
        trainer_kwargs={"eval_dataset": samples(8)},
    )
    trainer.train()
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = max(losses, key=losses.__getitem__)
    assert Path(trainer.state.best_model_checkpoint or "").name == f"checkpoint-{best}"
    assert best != 4
    saved = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(saved[name], now) for name, now in weights(trainer.model).items())


# ---------------------------------------------------------------------------------------------- other trainers


def test_seq2seq_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config)
    trainer = make_trainer(tmp_path, model, trainer_cls=Seq2SeqTrainer, args_cls=Seq2SeqTrainingArguments)
    before = weights(model)
    trainer.train()
    matrices = {
        n
        for n in before
        if n.endswith((".q.weight", ".k.weight", ".v.weight", ".o.weight", ".wi.weight", ".wo.weight"))
    }
    assert len(matrices) == 4 * 3 + 2 * 2
    optimizer = optimizer_of(trainer)
    assert {route.name for route in optimizer.routes.matrices} == matrices
    assert optimizer.transform_count == 2 * len(matrices)
    assert all(not torch.equal(before[n], p) for n, p in model.named_parameters() if n in matrices)


def test_sft_trainer(tmp_path: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    data = Dataset.from_dict({"text": [" ".join(f"w{2 + (7 * i + j) % 60}" for j in range(10)) for i in range(8)]})
    trainer = make_trainer(
        tmp_path,
        trainer_cls=SFTTrainer,
        args_cls=SFTConfig,
        data=data,
        optim_args="aux_lr=5e-4",
        bf16=False,
        trainer_kwargs={"processing_class": processing},
    )
    trainer.train()
    assert optimizer_of(trainer).transform_count == 2 * MATRICES
    assert [(e["lr/matrix"], e["lr/aux"]) for e in step_logs(trainer)] == [(2e-3, 5e-4)] * 2


# ---------------------------------------------------------------------------------------------- refusals


def test_deepspeed_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    trainer.args.deepspeed_plugin = SimpleNamespace(deepspeed_config=config)  # TrainingArguments sets this
    with pytest.raises(ValueError, match=r"optim='muon' under DeepSpeed: .* names an optimizer of its own, AdamW"):
        trainer.create_optimizer()
    # transformers would never have asked for ours.
    trainer.callback_handler.optimizer = torch.optim.SGD(trainer.model.parameters())
    with pytest.raises(ValueError, match='remove the "optimizer" block'):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp1_is_refused_and_fsdp2_is_not(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)

    def check() -> None:
        if version == 2:
            assert unwrap_optimizer(trainer.create_optimizer()) is not None
            trainer.optimizer = None
            return
        with pytest.raises(ValueError, match=r"cannot run under FSDP1: it flattens.*Use FSDP2.*version"):
            trainer.create_optimizer()

    trainer.args.fsdp_plugin_args = {"fsdp_version": version}
    check()
    trainer.args.fsdp_plugin_args = None
    # As `accelerate launch` sets it, without a word in TrainingArguments.
    monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", SimpleNamespace(fsdp_version=version))
    check()


def test_parameters_that_are_partial_sums_are_refused(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

    from hf_emopt.integrations.refusals import refuse_layouts

    # Ranks that exist in name only: placements are looked at, nothing is sent.
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        with pytest.raises(ValueError, match="optim='muon' cannot run under FSDP1"):
            refuse_layouts("optim='muon'", FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))

        def model(shape: tuple[int, ...], placements: list[Placement]) -> nn.Module:
            layer = nn.Linear(8, 8)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
            local = distribute_tensor(layer.weight.detach(), mesh, placements, src_data_rank=None)
            layer.weight = nn.Parameter(local)
            return layer

        good: list[tuple[tuple[int, ...], list[Placement]]] = [
            ((4,), [Shard(0)]),
            ((2, 2), [Replicate(), Shard(0)]),
            ((2, 2), [Shard(0), Shard(1)]),
            ((2, 2), [Shard(0), Replicate()]),
        ]
        for layout in good:
            refuse_layouts("optim='muon'", model(*layout))
        layer = nn.Linear(8, 8)
        mesh = init_device_mesh("cpu", (4,))
        layer.weight = nn.Parameter(DTensor.from_local(torch.zeros(8, 8), mesh, [Partial()]))
        with pytest.raises(ValueError, match=r"optim='muon' does not run on .* as weight is, .*Partial"):
            refuse_layouts("optim='muon'", layer)
        layer.weight.requires_grad_(False)
        refuse_layouts("optim='muon'", layer)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_handed_to_the_trainer_is_named(messages: list[logging.LogRecord], tmp_path: Path) -> None:
    model = tiny_llama()
    own = torch.optim.SGD(model.parameters(), lr=1e-3)
    make_trainer(tmp_path, model, max_steps=1, trainer_kwargs={"optimizers": (own, None)}).train()
    assert any("optim='muon' is not used" in r.getMessage() for r in messages)


def test_a_class_of_ours_gets_the_model(tmp_path: Path) -> None:
    """Trainer would give it two lists of parameters, in which embeddings and heads look like matrices."""
    options = {"lr": 2e-3, "aux_betas": (0.9, 0.999)}
    given = {"optimizer_cls_and_kwargs": (hf_emopt.Muon, options)}
    by_class = make_trainer(tmp_path, trainer_kwargs=given, weight_decay=0.3)
    by_name = make_trainer(tmp_path, weight_decay=0.3)
    for made in (by_class, by_name):
        made.train()
    ours = unwrap_optimizer(by_class.optimizer)
    assert ours is not None
    assert sum(len(g["params"]) for g in ours.param_groups if g["kind"] == "matrix") == MATRICES
    for one, two in zip(by_class.model.parameters(), by_name.model.parameters()):
        assert torch.equal(one, two)
    assert {g["name"]: g["weight_decay"] for g in ours.param_groups} == {"matrix": 0.3, "aux": 0.3, "aux_no_decay": 0.0}
    assert set(options) == {"lr", "aux_betas"}


def test_what_transformers_gives_is_called_as_a_class_too(tmp_path: Path) -> None:
    model = tiny_llama()
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], optim="muon", learning_rate=2e-3)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = cls(model, **options)
    assert isinstance(optimizer, hf_emopt.Muon)
    assert optimizer.param_groups[0]["lr"] == 2e-3
    assert isinstance(cls()(model, **options), hf_emopt.Muon)


# ---------------------------------------------------------------------------------------------- trainers with a loss


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, 16)
        self.dense = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.dense(self.embeddings(input_ids))).mean(1)


class SoftmaxLoss(nn.Module):
    """As sentence-transformers': it has the model, and parameters of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.hidden = nn.Linear(16, 24)
        self.classifier = nn.Linear(24, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = self.classifier(self.hidden(self.model(input_ids)))
        return nn.functional.cross_entropy(logits, input_ids[:, 0] % 3)


class SentenceTrainer(Trainer):
    """What trainers of sentence-transformers do to the optimizer; ``learning_rate_mapping`` is one of their arguments."""

    asks_for_loss = True

    def __init__(
        self, *args: Any, loss: Any, learning_rate_mapping: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        self.loss, self.learning_rate_mapping = loss, learning_rate_mapping or {}
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        return sum(loss(inputs["input_ids"]) for loss in losses)

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        loss_model = nn.Sequential(OrderedDict(self.loss)) if isinstance(self.loss, dict) else self.loss
        optimizer_cls, kwargs = super().get_optimizer_cls_and_kwargs(args, loss_model if self.asks_for_loss else model)
        decay = self.get_decay_parameter_names(loss_model)
        named = [(n, p) for n, p in loss_model.named_parameters() if p.requires_grad]
        if not {"params", "model", "optimizer_dict"} & set(kwargs):
            kwargs["optimizer_dict"] = [
                {"params": [p for n, p in named if n in decay], "weight_decay": self.args.weight_decay},
                {"params": [p for n, p in named if n not in decay], "weight_decay": 0.0},
            ]
        for pattern, rate in self.learning_rate_mapping.items():
            matching = {n: p for n, p in named if re.search(pattern, n)}
            for group in kwargs["optimizer_dict"]:
                group["params"] = [p for p in group["params"] if all(p is not other for other in matching.values())]
            for wanted, weight_decay in ((True, self.args.weight_decay), (False, 0.0)):
                chosen = [p for n, p in matching.items() if (n in decay) is wanted]
                if chosen:
                    kwargs["optimizer_dict"].append({"params": chosen, "lr": rate, "weight_decay": weight_decay})
        return optimizer_cls, kwargs


class EmoptSentenceTrainer(hf_emopt.EmoptTrainerMixin, SentenceTrainer):
    pass


def sentence_trainer(
    folder: Path, cls: Any = SentenceTrainer, count: int = 1, optim: str = "muon", **kwargs: Any
) -> Any:
    model = Encoder()
    losses = {f"loss{i}": SoftmaxLoss(model) for i in range(count)}
    loss = losses if count > 1 else losses["loss0"]
    trainer = make_trainer(
        folder,
        model,
        trainer_cls=cls,
        optim=optim,
        remove_unused_columns=False,
        trainer_kwargs={"loss": loss, **kwargs},
    )
    return trainer, list(losses.values())


@pytest.mark.parametrize("cls", [SentenceTrainer, EmoptSentenceTrainer])
@pytest.mark.parametrize("optim", ["muon", "soap"])
def test_the_parameters_of_a_loss_are_trained_by_name(optim: str, cls: Any, tmp_path: Path) -> None:
    for count in (1, 2):
        trainer, losses = sentence_trainer(tmp_path, cls, count, optim)
        before = [weights(loss) for loss in losses]
        trainer.train()
        for loss, old in zip(losses, before):
            assert all(not torch.equal(p, old[n]) for n, p in loss.named_parameters() if n != "model.embeddings.weight")
        table = optimizer_of(trainer).routes.by_name
        lead = "loss0." if count == 2 else ""
        assert table[f"{lead}model.dense.weight"].kind == table[f"{lead}hidden.weight"].kind == "matrix"
        assert table[f"{lead}model.embeddings.weight"].kind == "aux"
        decays = {n: g["weight_decay"] for g in optimizer_of(trainer).param_groups for n in g["param_names"]}
        assert (decays[f"{lead}hidden.weight"], decays[f"{lead}hidden.bias"], decays[f"{lead}model.norm.weight"]) == (
            0.1,
            0,
            0,
        )


def test_a_mapping_of_learning_rates_holds_and_follows_the_schedule(tmp_path: Path) -> None:
    trainer, (loss,) = sentence_trainer(tmp_path, learning_rate_mapping={"hidden": 5e-4, "classifier": 0.0})
    old = weights(loss)
    trainer.train()
    groups = optimizer_of(trainer).param_groups
    rates = {n: (g["lr"], g["kind"]) for g in groups for n in g["param_names"]}
    assert rates["hidden.weight"] == (5e-4, "matrix")
    assert rates["hidden.bias"] == (5e-4, "aux")
    assert rates["model.dense.weight"] == (2e-3, "matrix")
    assert sorted(rates) == sorted(n for n, _ in loss.named_parameters())
    assert all(len(g.get("units", g["params"])) == len(g["params"]) == len(g["param_names"]) > 0 for g in groups)
    moved = {n for n, p in loss.named_parameters() if not torch.equal(p, old[n])}
    assert not moved & {"classifier.weight", "classifier.bias"}
    assert {"hidden.weight", "hidden.bias", "model.dense.weight"} <= moved


def test_parameters_that_the_trainer_adds_without_a_module_and_those_it_leaves_out(tmp_path: Path) -> None:
    class Blind(SentenceTrainer):
        asks_for_loss = False

    trainer, (loss,) = sentence_trainer(tmp_path, Blind)
    old = weights(loss)
    trainer.train()
    assert all(not torch.equal(p, old[n]) for n, p in loss.named_parameters() if n != "model.embeddings.weight")
    names = [n for g in optimizer_of(trainer).param_groups for n in g["param_names"]]
    own = {n for n, _ in trainer.model.named_parameters()}
    assert own < set(names)
    assert [n.partition(".")[0] for n in names if n not in own] == ["param"] * 4
    for key in ("params", "optimizer_dict"):
        model = Encoder()
        listed = [model.embeddings.weight, model.dense.weight]
        given = {"optimizer_cls_and_kwargs": (hf_emopt.Muon, {"lr": 1e-3, key: listed})}
        made = make_trainer(tmp_path, model, trainer_kwargs=given).create_optimizer()
        assert {n: g["kind"] for g in made.param_groups for n in g["param_names"]} == {
            "embeddings.weight": "aux",
            "dense.weight": "matrix",
        }
    loss = SoftmaxLoss(model)
    given = {"optimizer_cls_and_kwargs": (hf_emopt.Muon, {"lr": 1e-3, "model": loss})}
    made = make_trainer(tmp_path, model, trainer_kwargs=given).create_optimizer()
    assert "hidden.weight" in {n for g in made.param_groups for n in g["param_names"]}


class _OwnGroups(Trainer):
    """Groups of its own, as many trainers of others make them: from the class, and without the model."""

    def create_optimizer(self, model: Any = None) -> Any:
        cls, options = Trainer.get_optimizer_cls_and_kwargs(self.args)
        members = list(self.model.parameters())
        groups = [{"params": members[::2]}, {"params": members[1::2], "lr": 1e-3}]
        self.optimizer = cls(groups if self.positional else members, **options)
        return self.optimizer

    positional = True


@pytest.mark.parametrize("optim", ["muon", "soap"])
def test_lists_that_a_trainer_makes_are_routed_by_its_model(optim: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*parameters without names.*")
        trainer = make_trainer(tmp_path, trainer_cls=_OwnGroups, optim=optim, optim_args="aux_modules=q_proj")
        trainer.train()
        ours = optimizer_of(trainer)
        named = {n: g["kind"] for g in ours.param_groups for n in g["param_names"]}
        wanted = {n: "matrix" if is_matrix(n) and "q_proj" not in n else "aux" for n in weights(trainer.model)}
        assert named == wanted
        assert {g["lr"] for g in ours.param_groups} == {2e-3, 1e-3}
        trainer.positional = False
        assert trainer.create_optimizer().routes.matrix_count == MATRICES - LAYERS


def test_fused_and_transposed_weights_of_a_list_are_taken_apart(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=16))
    trainer = make_trainer(tmp_path, model=model, trainer_cls=_OwnGroups)
    assert str(trainer.create_optimizer().routes).count("transposed") == str(hf_emopt.Muon(model).routes).count(
        "transposed"
    )
    views = {r.name: r.matrix_views for r in hf_emopt.Muon(model).routes}
    assert {r.name: r.matrix_views for r in optimizer_of(trainer).routes} == views


@pytest.mark.parametrize("optim", ["muon", "soap"])
def test_adapters_of_a_list_are_known_by_its_trainer(optim: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    from peft.optimizers import create_loraplus_optimizer

    class LoraPlus(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            cls, options = self.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = create_loraplus_optimizer(self.model, cls, loraplus_lr_ratio=16, **options)
            return self.optimizer

    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    trainer = make_trainer(tmp_path, model=model, trainer_cls=LoraPlus, optim=optim)
    ours = trainer.create_optimizer()
    whole = type(ours)(model, lora_lr_ratio=16.0, lr=2e-3)
    assert ours.user_groups == ((0,), (1,), (2,), (3,))

    def told(optimizer: MatrixOptimizer) -> dict[str, Any]:
        keys = ("lr", "adapters", "max_preconditioner_dim", "oversize")
        return {n: [g.get(key) for key in keys[:1] + keys[2:]] + [g["adapters"][i]] for g in optimizer.param_groups
                for i, n in enumerate(g["param_names"])}  # fmt: skip

    assert told(ours) == told(whole)


def test_fsdp_that_accelerate_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    monkeypatch.setattr(refusals, "PartialState", lambda: state)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.warns(UserWarning, match="Accelerate has it for accelerators only"):
        refusals.warn_of_missing_fsdp()
    state.distributed_type = DistributedType.FSDP
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusals.warn_of_missing_fsdp()
        state.distributed_type = DistributedType.MULTI_CPU
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
        refusals.warn_of_missing_fsdp()
