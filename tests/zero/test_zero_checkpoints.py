"""Checkpoints of DeepSpeed: resumed at the same number of ranks, they continue as if nothing had happened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from harness import World, Worlds
from safetensors.torch import load_file
from zero_runs import config, continued, continued_plainly, reference, resumed, saved, saved_again
from zoo import assert_close

from hf_emopt.checkpoint.deepspeed_files import convert, read_deepspeed
from hf_emopt.checkpoint.files import CheckpointError
from hf_emopt.tools.cli import main

SLOW = pytest.mark.second_tier
CASES = [
    ("muon", 0, "fp32"),
    pytest.param("normuon", 0, "bf16", marks=SLOW),
    ("soap", 1, "fp32"),
    ("klshampoo-staggered", 1, "bf16-fp32"),
    ("shampoo", 2, "bf16"),
    pytest.param("muon", 2, "fp32", marks=SLOW),
    ("soap-staggered", 3, "fp32"),
    pytest.param("muon", 3, "bf16", marks=SLOW),
]


@pytest.mark.parametrize(("rule", "stage", "precision"), CASES)
def test_resumed_is_uninterrupted(two: World, tmp_path: Path, rule: str, stage: int, precision: str) -> None:
    for result in two.run(resumed, rule=rule, settings=config(stage, precision), folder=str(tmp_path), steps=(3, 2)):
        for name, value in result["straight"].items():
            assert torch.equal(value, result["resumed"][name]), name
        assert result["different"]


@pytest.mark.parametrize(
    ("rule", "stage", "precision", "other"),
    [
        ("muon", 2, "fp32", 3),
        ("soap-staggered", 3, "fp32", 1),
        pytest.param("shampoo", 1, "bf16-fp32", 0, marks=SLOW),
        pytest.param("normuon", 0, "fp32", 2, marks=SLOW),
    ],
)
def test_converted_continues_everywhere(
    worlds: Worlds, tmp_path: Path, rule: str, stage: int, precision: str, other: int
) -> None:
    source, target = str(tmp_path / "saved"), str(tmp_path / "converted")
    worlds[2].run(saved, rule=rule, settings=config(stage, precision), folder=source, steps=3)
    assert main(["convert", source, target]) == 0
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    wanted = reference(rule, 5, dtype=dtype)
    assert_close(continued_plainly(rule, target, (3, 5)), wanted, 1e-5)
    everywhere = worlds[2].run(continued_plainly, rule=rule, folder=target, steps=(3, 5), layout="fsdp2")
    everywhere += worlds[3].run(continued, rule=rule, settings=config(other), folder=target, steps=(3, 5))
    for found in everywhere:
        assert_close(found, wanted, 1e-5)


def test_what_is_saved_right_after_loading_is_what_was_loaded(two: World, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    two.run(saved, rule="soap", settings=config(2), folder=str(first), steps=1)
    two.run(saved_again, rule="soap", settings=config(2), folder=str(first), again=str(again))
    wanted, found = read_deepspeed(first), read_deepspeed(again)
    assert found["state"].keys() == wanted["state"].keys()
    assert any("." in key for entry in wanted["state"].values() for key in entry)
    for index, entry in wanted["state"].items():
        torch.testing.assert_close(found["state"][index], entry, rtol=0, atol=0)


def test_files_that_are_not_whole_are_named(two: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "saved"
    two.run(saved, rule="muon", settings=config(2), folder=str(folder), steps=1)
    state = read_deepspeed(folder)
    assert {g["rule"] for g in state["param_groups"] if g["kind"] == "matrix"} == {"muon"}
    convert(folder, tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    for group in state["param_groups"]:
        for name, index in zip(group["param_names"], group["params"]):
            key = "momentum_buffer" if group["kind"] == "matrix" else "exp_avg"
            assert state["state"][index][key].shape == weights[name].shape
    described = read_deepspeed(folder, only_description=True)["state"]
    for index, entry in state["state"].items():
        assert {k: (v.shape, v.dtype) for k, v in described[index].items()} == {
            k: (v.shape, v.dtype) for k, v in entry.items()
        }
        assert {k for k, v in described[index].items() if not v.is_meta} == {"step"}
        assert described[index]["step"] == 1
    (files,) = folder.glob("global_step1")
    (files / "zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "aside.pt")
    with pytest.raises(CheckpointError, match="is one of a rank missing"):
        read_deepspeed(folder)
    (tmp_path / "aside.pt").rename(files / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (files / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    assert main(["convert", str(folder), str(tmp_path / "out")]) == 2
    assert "has files of the ranks [1]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is no checkpoint of DeepSpeed" in capsys.readouterr().err


def test_a_pickled_command_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "global_step1"
    folder.mkdir()
    torch.save({"optimizer_state_dict": Command()}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="is no part of a checkpoint"):
        read_deepspeed(folder)


class Command:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("exit 7",))
