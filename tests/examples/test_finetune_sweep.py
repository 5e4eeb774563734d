"""The fine-tuning sweep: points, continuation, the transform check and the table."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import finetune_sweep
import hf_emopt
import text_data


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A sweep over two optimizers and two rates on a tiny Llama and made-up text, without `--out`."""
    folder = tmp_path_factory.mktemp("sweep")
    data = folder / "text.txt"
    data.write_text(" ".join(f"{i} squared is {i * i}." for i in range(12_000)), encoding="utf-8")
    model = folder / "model"
    tokenizer = text_data.train_tokenizer([data.read_text()[:50_000]], vocab_size=300)
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(model)
    return [
        "run", "--task", "clm", "--model", str(model), "--data", str(data), "--optim", "adamw_torch", "muon",
        "--max_steps", "2", "--batch_size", "2", "--accumulation", "2", "--length", "32", "--eval_rows", "3",
        "--optim_args", "muon:ns_steps=3",
    ]  # fmt: skip


def test_sweep_counts_transforms_and_continues(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    finetune_sweep.main([*command, "--lr", "1e-3", "--out", str(out)])
    first = json.loads(out.read_text())
    assert [(p["optim"], p["lr"]) for p in first["points"]] == [("adamw_torch", 1e-3), ("muon", 1e-3)]
    # Accumulation of two micro-batches: still one transform a matrix and step.
    assert [p.get("matrix_transforms") for p in first["points"]] == [None, 7 * 2]
    assert first["points"][0]["eval_loss"] != first["points"][1]["eval_loss"]

    finetune_sweep.main([*command, "--lr", "1e-3", "1e-2", "--out", str(out)])
    second = json.loads(out.read_text())
    assert second["points"][:2] == first["points"]
    assert [p["lr"] for p in second["points"]] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert "7 matrices x 2 steps" in capsys.readouterr().out

    with pytest.raises(ValueError, match="max_steps"):
        finetune_sweep.main([*command, "--lr", "1e-3", "--max_steps", "3", "--out", str(out)])

    png = tmp_path / "result.png"
    finetune_sweep.main(["render", str(out), "--png", str(png)])
    assert png.read_bytes().startswith(b"\x89PNG")


def test_transform_check_refuses_a_step_too_many() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    optimizer = hf_emopt.Muon(torch.nn.Sequential(layer))
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert finetune_sweep.check_transforms(optimizer, 1) == {"matrices": 1, "matrix_transforms": 1}
    with pytest.raises(RuntimeError, match="expected 1 matrices x 2 steps"):
        finetune_sweep.check_transforms(optimizer, 2)


def point(optim: str, lr: float, seed: int, accuracy: float) -> dict[str, Any]:
    return {"optim": optim, "lr": lr, "seed": seed, "steps": 1, "train_seconds": 2.0, "eval_accuracy": accuracy}


def test_table_averages_seeds_and_marks_the_best() -> None:
    result = {
        "settings": {
            "task": "classification", "max_steps": 1, "batch_size": 1, "accumulation": 1, "length": 8,
            "schedule": "linear",
        },
        "environment": {"device": "x", "torch": "2", "transformers": "5"},
        "data": {"train": 10, "held_out": 5},
        "before": {"eval_accuracy": 0.5},
        "points": [
            point("adamw_torch", 1e-4, 0, 0.6), point("adamw_torch", 1e-4, 1, 0.8), point("adamw_torch", 1e-3, 0, 0.65),
            point("muon", 1e-3, 0, 0.9),
        ],
    }  # fmt: skip
    lines = finetune_sweep.table(result).splitlines()
    assert lines[2] == "| 0.0001 | **0.7000** (0.6000 to 0.8000) | - |"
    assert lines[3] == "| 0.001 | 0.6500 | **0.9000** |"


def test_race_finds_the_step_at_which_a_final_loss_is_reached() -> None:
    def run(optim: str, lr: float, seed: int, *losses: float) -> dict[str, Any]:
        curve = [[10 * (k + 1), loss] for k, loss in enumerate(losses)]
        return {"optim": optim, "lr": lr, "seed": seed, "held_out": curve, "eval_loss": losses[-1]}

    result = {
        "settings": {"task": "clm", "max_steps": 20, "eval_steps": 10},
        "before": {"eval_loss": 4.0},
        "points": [
            run("adamw_torch", 1e-4, 0, 3.5, 3.0), run("adamw_torch", 1e-4, 1, 3.5, 3.2),
            run("adamw_torch", 1e-3, 0, 3.9, 3.8),
            run("muon", 1e-4, 0, 3.0, 2.9), run("muon", 1e-4, 1, 3.4, 3.0), run("muon", 1e-3, 0, 3.9, 3.1),
        ],
    }  # fmt: skip
    lines = finetune_sweep.race(result, "muon", "adamw_torch").splitlines()
    assert lines[4] == "| 0.0001 | 2.9500 | 10, 15 | 0.62 |"
    assert lines[5] == "| 0.001 | 3.1000 | never | - |"
    with pytest.raises(ValueError, match="no points of soap"):
        finetune_sweep.race(result, "soap", "adamw_torch")


def test_a_point_that_fails_beside_others_runs_again_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def beside_others(key: tuple[str, float, int]) -> dict[str, Any]:
        if key[0] == "muon":
            raise torch.OutOfMemoryError("no memory")
        return {"optim": key[0], "alone": False}

    monkeypatch.setattr(finetune_sweep, "_worker_point", beside_others)
    monkeypatch.setattr(
        finetune_sweep.concurrent.futures,
        "ProcessPoolExecutor",
        lambda workers, *_: concurrent.futures.ThreadPoolExecutor(workers),
    )
    keys = [("muon", 1e-3, 0), ("adamw_torch", 1e-3, 0)]
    args = argparse.Namespace(processes=2)
    points = finetune_sweep._points(args, None, keys, lambda _, optim, lr, seed: {"optim": optim, "alone": True})  # type: ignore[arg-type]
    assert list(points) == [{"optim": "adamw_torch", "alone": False}, {"optim": "muon", "alone": True}]
    assert "no memory" in capsys.readouterr().out


def test_forms_of_an_optimizer_are_told_apart(tmp_path: Path, command: list[str]) -> None:
    """``NAME:ARGS`` is a column of its own; what ``--optim_args`` says of ``NAME`` holds for all its forms."""
    args = finetune_sweep.parse(
        [*command, "--lr", "1e-3", "--lora_r", "4", "--eval_steps", "1", "--out", str(tmp_path / "r")]
    )
    assert args.lora_alpha == 8
    plain, joint, adamw = (
        finetune_sweep.training_arguments(args, optim, 1e-3, 0, str(tmp_path))
        for optim in ("muon", "muon:lora=joint, lora_max_change=0.3", "adamw_torch")
    )
    assert (plain.optim, plain.optim_args) == ("muon", "ns_steps=3")
    assert (joint.optim, joint.optim_args) == ("muon", "ns_steps=3,lora=joint, lora_max_change=0.3")
    assert adamw.optim_args is None
    assert (joint.eval_strategy, joint.eval_steps) == ("steps", 1)

    args.optim, args.max_steps = ["muon:lora=joint"], 2
    point = finetune_sweep.run_point(finetune_sweep.Task(args), "muon:lora=joint", 1e-3, 0)
    assert (point["matrices"], point["matrix_transforms"]) == (7, 7 * 2)  # a pair is one
    assert [step for step, _ in point["held_out"]][:2] == [1, 2]
    assert point["held_out"][-1][1] == pytest.approx(point["eval_loss"])
