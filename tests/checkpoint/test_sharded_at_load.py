"""EmoptTrainer on models that transformers shards while it loads them: saved, resumed, and logged as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World, Worlds
from ranks import fresh_accelerate
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from zoo import TINY, TINY_EXPERTS, assert_close, weights

import hf_emopt
from hf_emopt.integrations import sharded_checkpoints

STEPS = 4


def fresh(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**TINY))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **TINY_EXPERTS))


def samples() -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 48, (32, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: str, each: int, **options: Any) -> TrainingArguments:
    settings = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": each, "learning_rate": 0.02,
        "use_cpu": True, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "max_grad_norm": 0.5, "weight_decay": 0.1, "lr_scheduler_type": "linear", "save_steps": 2, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(**{**settings, **options})


def trained(model: nn.Module, cls: Any, args: TrainingArguments, resume: bool = False) -> dict[str, Any]:
    trainer = cls(model=model, args=args, train_dataset=samples())
    trainer.explain_at_start = False
    trainer.train(resume_from_checkpoint=resume or None)
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "weights": weights(trainer.model), "norms": [entry["grad_norm"] for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs], "losses": [entry["loss"] for entry in logs],
    }  # fmt: skip


def sharded(folder: str, sizes: dict[str, int]) -> nn.Module:
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))


def resumed(folder: str, out: str, sizes: dict[str, int], each: int, optim: str, optim_args: str) -> dict[str, Any]:
    """All steps at once; and the same again, but for the first two, from the checkpoint after them."""
    options = {"optim": optim, "optim_args": optim_args, "save_strategy": "steps"}
    with fresh_accelerate("sharded"):
        straight = trained(sharded(folder, sizes), hf_emopt.EmoptTrainer, arguments(out, each, **options))
    last = Path(out) / f"checkpoint-{STEPS}"
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (last / "trainer_state.json").unlink()  # so that the newest whole one is the one in the middle
    torch.distributed.barrier()
    with fresh_accelerate("sharded"):
        again = trained(sharded(folder, sizes), hf_emopt.EmoptTrainer, arguments(out, each, **options), resume=True)
    files = sorted(path.name for path in (Path(out) / "checkpoint-2").iterdir())
    return {"straight": straight, "again": again, "files": files}


EXTRA = pytest.mark.second_tier
SAVES = pytest.mark.skipif(not sharded_checkpoints.can_save(), reason="takes transformers 5.20")
CASES = [
    pytest.param("llama", {"tp_size": 2}, "muon", "distributed", id="llama-tp2-muon-distributed"),
    pytest.param("qwen3-moe", {"tp_size": 2}, "normuon", "duplicated", id="qwen3-moe-tp2-normuon-duplicated"),
    pytest.param("qwen3-moe", {"tp_size": 2}, "soap", "auto", id="qwen3-moe-tp2-soap", marks=EXTRA),
    pytest.param("llama", {"tp_size": 2}, "shampoo", "blockwise", id="llama-tp2-shampoo-blockwise"),
    pytest.param("llama", {"tp_size": 2, "fsdp_size": 2}, "normuon", "distributed", id="llama-tp2-fsdp2", marks=EXTRA),
    pytest.param("qwen3-moe", {"fsdp_size": 4, "ep_size": 2}, "muon", "auto", id="qwen3-moe-fsdp2-ep2", marks=EXTRA),
]


@SAVES
@pytest.mark.parametrize(("family", "sizes", "optim", "mode"), CASES)
def test_a_resumed_run_is_the_uninterrupted_one(
    worlds: Worlds, tmp_path: Path, family: str, sizes: dict[str, int], optim: str, mode: str
) -> None:
    fresh(family).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    world, data = sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1), sizes.get("fsdp_size", 1)
    results = worlds[world].run(
        resumed, folder=str(tmp_path / "model"), out=str(tmp_path / "out"), sizes=sizes, each=4 // data, optim=optim,
        optim_args=f"transport_dtype=float32,tensor_parallel={mode}",
    )  # fmt: skip
    for result in results:
        assert_close(result["again"]["weights"], result["straight"]["weights"], 0.0)
        assert result["again"]["rates"] == result["straight"]["rates"]
        assert result["again"]["losses"] == pytest.approx(result["straight"]["losses"], rel=1e-6)
        assert {"model.safetensors", "optimizer_sharded", "scheduler.pt", "trainer_state.json"} <= set(result["files"])


def measured(folder: str, sizes: dict[str, int], each: int) -> dict[str, Any]:
    options = {"optim": "muon", "optim_args": "transport_dtype=float32,ns_dtype=float32"}
    with fresh_accelerate("sharded"):
        return trained(sharded(folder, sizes), Trainer, arguments("unused", each, **options))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param("llama", {"tp_size": 2}, id="llama-tp2", marks=EXTRA),
        pytest.param("qwen3-moe", {"tp_size": 2}, id="qwen3-moe-tp2"),
        pytest.param("llama", {"tp_size": 2, "fsdp_size": 2}, id="llama-tp2-fsdp2", marks=EXTRA),
        pytest.param("qwen3-moe", {"fsdp_size": 4, "ep_size": 2}, id="qwen3-moe-fsdp2-ep2", marks=EXTRA),
    ],
)
def test_the_gradient_norm_counts_every_element_once(
    worlds: Worlds, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    """What a plain Trainer logs, clips by and makes of it is what one process does."""
    fresh(family).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    options = {"optim": "muon", "optim_args": "transport_dtype=float32,ns_dtype=float32"}
    with fresh_accelerate():
        alone = trained(fresh(family), Trainer, arguments(str(tmp_path / "alone"), 4, **options))
    assert min(alone["norms"]) > 0.5  # so that clipping acts
    world, data = sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1), sizes.get("fsdp_size", 1)
    for result in worlds[world].run(measured, folder=str(tmp_path / "model"), sizes=sizes, each=4 // data):
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)


def refused(folder: str, out: str) -> str:
    """What a plain Trainer says to the same request."""
    with fresh_accelerate("sharded"), pytest.raises(ValueError, match="Resuming is not supported") as caught:
        Trainer(model=sharded(folder, {"tp_size": 2}), args=arguments(out, 4, optim="muon", save_strategy="steps"))
    return str(caught.value)


@SAVES
def test_a_plain_trainer_refuses_where_ours_saves(two: World, tmp_path: Path) -> None:
    fresh("llama").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    for message in two.run(refused, folder=str(tmp_path / "model"), out=str(tmp_path / "out")):
        assert "optimizer state cannot be checkpointed" in message


class _Cut(nn.Module):
    """As transformers leaves a model that it has sharded while it loaded it."""

    is_distributed_loading_by_transformers = True


def test_a_transformers_that_cannot_save_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_checkpoints, "can_save", lambda: False)
    with pytest.raises(ValueError, match=r"takes transformers 5\.20 or later.*save_only_model=True"):
        hf_emopt.EmoptTrainer(model=_Cut(), args=arguments(str(tmp_path), 4, optim="muon", save_strategy="steps"))
    with sharded_checkpoints.permitted(_Cut(), arguments(str(tmp_path), 4)):  # saves nothing
        pass
