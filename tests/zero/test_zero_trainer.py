"""Plain ``Trainer`` with a DeepSpeed configuration."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from harness import World, Worlds
from ranks import MATRICES
from trainer_runs import accelerate_run, example_run, settings, trainer_run

import hf_emopt
from hf_emopt.checkpoint.files import problem_with
from hf_emopt.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.second_tier


@functools.cache
def one_process(**kwargs: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return ranks.train(folder, "one", 1, **kwargs)


@pytest.mark.parametrize(
    ("stage", "zero_init"),
    [(0, False), pytest.param(1, False, marks=SLOW), (2, False), pytest.param(3, False, marks=SLOW), (3, True)],
    ids=str,
)
def test_weights_of_trainer_are_those_of_one_process(two: World, tmp_path: Path, stage: int, zero_init: bool) -> None:
    wanted = one_process()
    routes = {r.name: (r.kind, r.shape) for r in hf_emopt.route_parameters(ranks.tiny_llama())}
    results = two.run(trainer_run, folder=str(tmp_path), config=settings(stage), zero_init=zero_init)
    for result in results:
        assert result["routes"] == routes
        assert ("Stage3" in result["wrapper"]) == (stage == 3)
        assert ("ZeroOptimizer" in result["wrapper"]) == (stage > 0)
        for name, value in wanted["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=2e-5 * float(value.abs().max()))
    assert sum(r["transforms"] for r in results) == 4 * MATRICES
    assert [e["learning_rate"] for e in results[0]["logs"]] == [e["learning_rate"] for e in wanted["logs"]]
    assert [e["lr/aux"] for e in results[0]["logs"]] == [e["lr/aux"] for e in wanted["logs"]]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=SLOW) for stage in (0, 1, 2)), 3])
def test_accelerate_saves_and_loads(two: World, tmp_path: Path, stage: int) -> None:
    straight = two.run(accelerate_run, stage=stage, folder=str(tmp_path / "straight"), steps=range(4))
    parts = str(tmp_path / "parts")
    two.run(accelerate_run, stage=stage, folder=parts, steps=range(2))
    resumes = two.run(accelerate_run, stage=stage, folder=parts, steps=range(2, 4), load=True)
    for whole, resumed in zip(straight, resumes):
        assert whole["kinds"][0] == whole["kinds"][1]
        for name, value in whole["weights"].items():
            assert torch.equal(value, resumed["weights"][name]), name
    assert sum(r["transforms"] for r in straight) == 4 * MATRICES


def test_trainer_resumes_here_and_elsewhere(worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps at ZeRO-2, then two more: at ZeRO-2 from DeepSpeed's files, and at ZeRO-3 and under DDP from what `convert`
    makes of them."""
    folder = str(tmp_path / "straight")
    config = {"per_device_train_batch_size": 4, "logging_strategy": "no"}
    straight = worlds[2].run(
        trainer_run, folder=folder, config=settings(2), save_strategy="steps", save_steps=2, **config
    )
    checkpoint = f"{folder}/checkpoint-2"
    for whole, resumed in zip(
        straight,
        worlds[2].run(trainer_run, folder=str(tmp_path / "same"), config=settings(2), resume=checkpoint, **config),
    ):
        for name, value in whole["weights"].items():
            assert torch.equal(value, resumed["weights"][name]), name
    with pytest.raises(
        AssertionError,
        match=r"saved by 2 ranks at ZeRO stage 1 or 2, and this run has 3 ranks at stage 3: `hf-emopt convert",
    ):
        worlds[3].run(trainer_run, folder=str(tmp_path / "three"), config=settings(3), resume=checkpoint, **config)
    with pytest.raises(AssertionError, match=r"was saved under DeepSpeed, .*`hf-emopt convert"):
        worlds[2].run(
            ranks.train, folder=str(tmp_path / "ddp"), layout="ddp", world_size=2, resume=checkpoint, **config
        )
    assert main(["inspect", checkpoint]) == 0
    report = capsys.readouterr().out
    assert report.count("momentum_buffer float32") == MATRICES
    assert report.count("step 2 ") == len(straight[0]["weights"])
    target = str(tmp_path / "checkpoint-2")
    assert main(["convert", checkpoint, target]) == 0
    assert problem_with(target) is None
    elsewhere = worlds[2].run(trainer_run, folder=str(tmp_path / "zero3"), config=settings(3), resume=target, **config)
    elsewhere += worlds[2].run(
        ranks.train, folder=str(tmp_path / "ddp"), layout="ddp", world_size=2, resume=target, **config
    )
    for found in elsewhere:
        for name, value in straight[0]["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=2e-5 * float(value.abs().max()))


@pytest.mark.parametrize(("layout", "stage"), [pytest.param("ddp", 2, marks=SLOW), ("fsdp2", 3)])
def test_checkpoints_of_other_layouts_resume_here(two: World, tmp_path: Path, layout: str, stage: int) -> None:
    folder = str(tmp_path / layout)
    wanted = two.run(ranks.train, folder=folder, layout=layout, world_size=2, save_strategy="steps", save_steps=2)
    checkpoint = f"{folder}/checkpoint-2"
    for result in two.run(trainer_run, folder=str(tmp_path / "zero"), config=settings(stage), resume=checkpoint):
        for name, value in wanted[0]["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=2e-5 * float(value.abs().max()))


SCRIPT = [
    str(ROOT / "configs" / "run_clm.yaml"), "--use_cpu", "--max_steps", "2", "--per_device_train_batch_size", "2",
    "--per_device_eval_batch_size", "2", "--max_train_blocks", "16", "--max_eval_blocks", "4", "--block_size", "16",
    "--vocab_size", "300", "--eval_strategy", "no", "--logging_steps", "1", "--disable_tqdm", "true",
    "--config_overrides",
    "hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=2",
    "--held_out_every", "4", "--piece_chars", "400",
]  # fmt: skip
CONFIGS = sorted((ROOT / "configs").glob("deepspeed_*.json"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text("".join(f"line {j} of file {i}\n" for j in range(200)))
    return folder


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if "zero2_off" in p.stem else SLOW, id=p.stem) for p in CONFIGS],
)
def test_example_runs_with_each_configuration(two: World, tmp_path: Path, text: Path, path: Path) -> None:
    script = [*SCRIPT, "--train_file", str(text), "--output_dir", str(tmp_path / "out")]
    results = two.run(example_run, config=str(path), script=script)
    assert [r["global_step"] for r in results] == [2, 2]
    assert sum(r["matrix_transforms"] for r in results) == 2 * 7
