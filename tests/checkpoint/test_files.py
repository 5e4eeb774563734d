"""Files: cut short, foreign, hostile; which checkpoint is whole; and what ``hf-emopt inspect`` says."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import Worlds
from ranks import fresh_accelerate, make_trainer
from saved_runs import FROZEN, RULE_NAMES, make, save, saved_run, train
from torch import nn

import hf_emopt
from hf_emopt.checkpoint.files import find_optimizer_state, problem_with, read_optimizer_state
from hf_emopt.checkpoint.inspection import inspect_checkpoint
from hf_emopt.tools.cli import main


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a ``Trainer``."""
    folder = tmp_path_factory.mktemp("run")
    with fresh_accelerate():
        make_trainer(str(folder), "one", 1, save_strategy="steps", save_steps=2).train()
    return folder


FILES = ("optimizer.pt", "model.safetensors", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.5, 0.98])
def test_newest_is_the_newest_that_is_whole(run_folder: Path, tmp_path: Path, name: str, part: float) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    assert hf_emopt.newest_checkpoint(root) == root / "checkpoint-4"
    path = root / "checkpoint-4" / name
    os.truncate(path, int(path.stat().st_size * part))
    problem = problem_with(root / "checkpoint-4")
    assert problem is not None
    assert str(path) in problem
    assert hf_emopt.newest_checkpoint(root) == root / "checkpoint-2"
    shutil.rmtree(root / "checkpoint-2")
    assert hf_emopt.newest_checkpoint(root) is None


def test_a_checkpoint_that_is_written_over_is_not_whole_meanwhile(run_folder: Path, tmp_path: Path) -> None:
    """Otherwise new weights beside the old optimizer state would look like a checkpoint if the save died."""
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    with fresh_accelerate():
        trainer = make_trainer(str(root), "one", 1, save_strategy="steps", save_steps=4)

        def dies(*_: Any) -> None:
            raise KeyboardInterrupt

        trainer._save_rng_state = dies
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert hf_emopt.newest_checkpoint(root) == root / "checkpoint-2"


def test_resume_from_checkpoint_true_passes_over_what_died(run_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    os.truncate(root / "checkpoint-4" / "optimizer.pt", 1000)
    (root / "checkpoint-4" / "trainer_state.json").unlink()
    with fresh_accelerate():
        trainer = make_trainer(str(root), "one", 1, max_steps=6)
        trainer.train(resume_from_checkpoint=True)
        steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert trainer.optimizer.optimizer.transform_count == 4 * 14, "steps 3 to 6"


def test_truncated_file_names_itself_and_changes_nothing(run_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(run_folder, root)
    path = root / "checkpoint-4" / "optimizer.pt"
    with fresh_accelerate():
        trainer = make_trainer(str(root / "on"), "one", 1)
        trainer.train()
        optimizer = trainer.optimizer.optimizer
        before = copy.deepcopy(optimizer.state_dict())
        for size in (0, 10, 1000, path.stat().st_size // 2, path.stat().st_size - 30):
            os.truncate(path, size)
            with pytest.raises(hf_emopt.CheckpointError, match=rf"{path} \({size} bytes\) cannot be read: ."):
                trainer._load_optimizer_and_scheduler(str(root / "checkpoint-4"))
        assert_same_state(optimizer.state_dict(), before)
        shutil.copy(root / "checkpoint-4" / "scheduler.pt", path)
        with pytest.raises(hf_emopt.CheckpointError, match=r"no state of an optimizer: it holds"):
            trainer._load_optimizer_and_scheduler(str(root / "checkpoint-4"))
        assert_same_state(optimizer.state_dict(), before)


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for index, entry in a["state"].items():
        assert entry.keys() == b["state"][index].keys()
        assert all(torch.equal(value, b["state"][index][key]) for key, value in entry.items())


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_no_code_is_run_from_a_strangers_checkpoint(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    file = tmp_path / "optimizer.pt"
    torch.save({"state": {0: Harm(mark)}, "param_groups": []}, file)
    with pytest.raises(hf_emopt.CheckpointError, match=r"optimizer\.pt .*cannot be read"):
        read_optimizer_state(file)
    folder = tmp_path / "optimizer_0"
    dcp.save({"optimizer": {"state": {"w": {"step": torch.zeros(())}}, "param_groups": []}}, checkpoint_id=folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(mark)))
    with pytest.raises(hf_emopt.CheckpointError, match=r"\.metadata cannot be read: .*no part of"):
        read_optimizer_state(folder)
    assert not mark.exists()


TEXT = "it is a text, and no file of torch.save. Name a checkpoint's folder"
DAMAGED = "If the save was interrupted, resume from an older checkpoint"
WHOLE = b"PK\x03\x04" + bytes(60)


@pytest.mark.parametrize(
    ("content", "cause", "fix"),
    [
        (b"", "it is empty", DAMAGED),
        (b"some notes\n", TEXT, "optimizer.pt"),
        (b'{\n "epoch": 1.0,\n "log_history": []\n}', TEXT, "optimizer.pt"),
        ("\u00e9".encode() * 33, TEXT, "optimizer.pt"),
        (bytes(range(1, 255)), "it is no file of safetensors and no file of torch.save", "optimizer.pt"),
        (WHOLE, "it is cut short: it has no directory at its end", DAMAGED),
        (pickle.dumps({"state": 1}), "it is a pickle that torch.save has not written, or is cut short", DAMAGED),
    ],
    ids=["empty", "text", "json", "cut within a letter", "bytes", "cut short", "pickle"],
)
def test_what_is_no_checkpoint_is_told_by_its_kind(
    content: bytes, cause: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "optimizer.pt"
    path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path} ({len(content)} bytes) cannot be read: {cause}" in said
    assert fix in said


@pytest.mark.parametrize("zipped", [True, False])
def test_classes_are_named_and_running_them_is_not_recommended(
    zipped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": nn.Linear(2, 2)}, path, _use_new_zipfile_serialization=zipped)
    assert main(["inspect", str(path)]) == 2
    said = capsys.readouterr().err
    assert "it holds an object of torch.nn.modules.linear.Linear, and no code is run from a file" in said
    assert "weights_only" not in said
    assert "\x1b" not in said


# ---------------------------------------------------------------------------------------------- inspect


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("how", ["file", "full", "sharded", "flat"])
@pytest.mark.first_tier
def test_inspect_tells_what_is_there(tmp_path: Path, rule: str, how: str) -> None:
    model, optimizer = make(rule, "single")
    train(model, optimizer, range(3))
    save(model, optimizer, tmp_path, how)
    path = tmp_path / ("state.pt" if how in ("file", "full") else "state")
    report = inspect_checkpoint(path)
    assert report.rules == [optimizer.rule.name]
    named = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"])}
    assert {p.name for p in report.parameters} == set(named) == {n for n, _ in model.named_parameters()} - set(FROZEN)
    for p in report.parameters:
        state = optimizer.state[named[p.name]]
        assert p.step == (int(state["step"]) or None)
        assert p.bytes == sum(v.nbytes for v in state.values())
        assert p.entries == {k: f"{str(v.dtype)[6:]}{list(v.shape)}" for k, v in state.items() if v.ndim}
    assert sum(p.step is None for p in report.parameters) == 2, "those that never had a gradient"


def test_inspect_on_the_command_line(run_folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    checkpoint = run_folder / "checkpoint-4"
    assert main(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert "optimizer.pt: muon, state version 1" in text
    assert "model.layers.1.mlp.down_proj.weight" in text
    assert "NOT WHOLE" not in text
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (entry,) = [p for p in report["parameters"] if p["name"] == "model.layers.0.mlp.down_proj.weight"]
    assert entry["step"] == 4
    assert entry["entries"] == {"momentum_buffer": "float32[32, 48]"}
    assert entry["bytes"] == 32 * 48 * 4 + 4
    assert [g["kind"] for g in report["groups"]] == ["matrix", "aux", "aux"]
    assert report["bytes"] == sum(p["bytes"] for p in report["parameters"])
    assert main(["inspect", str(tmp_path)]) == 2
    assert f"{tmp_path} has no state of an optimizer" in capsys.readouterr().err


def test_inspect_knows_adamw(tmp_path: Path) -> None:
    layer = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    report = inspect_checkpoint(tmp_path)
    assert report.rules == ["adamw"]
    assert [(p.name, p.step, p.bytes) for p in report.parameters] == [("0", 1, 2 * 48 + 4), ("1", 1, 2 * 16 + 4)]


# ---------------------------------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
@pytest.mark.parametrize("rule", ["muon", "soap-staggered", "shampoo-staggered"])
def test_saving_before_the_first_step_is_as_if_never_saved(
    worlds: Worlds, tmp_path: Path, layout: str, ranks: int, rule: str
) -> None:
    """torch makes state by a step on zeros; counted as one it would shift bias corrections and schedules."""
    kwargs = {"rule": rule, "layout": layout, "folder": str(tmp_path / "a"), "how": "sharded"}
    runs = [saved_run(at=0, **kwargs)] if ranks == 1 else worlds[ranks].run(saved_run, at=0, **kwargs)
    model, optimizer = make(rule, layout) if ranks == 1 else (None, None)
    if model is not None and optimizer is not None:
        train(model, optimizer, range(5))
        assert all(torch.equal(p, runs[0]["weights"][n]) for n, p in model.named_parameters())
        return
    plain = worlds[ranks].run(never_saved, rule=rule, layout=layout)
    for a, b in zip(runs, plain, strict=True):
        assert [n for n in b if not torch.equal(a["weights"][n], b[n])] == []


def never_saved(rule: str, layout: str) -> dict[str, Any]:
    from zoo import weights

    model, optimizer = make(rule, layout)
    train(model, optimizer, range(5))
    return weights(model)


def test_a_real_first_step_at_a_rate_of_zero_counts() -> None:
    """Schedules with warm-up begin at 0: gradients are not zero then, and momentum begins."""
    model, optimizer = make("muon", "single", frozen=False)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(1))
    assert optimizer.transform_count > 0
    name, weight = next((n, p) for n, p in model.named_parameters() if n == "blocks.linears.a.weight")
    assert int(optimizer.state[weight]["step"]) == 1, name
    assert optimizer.state[weight]["momentum_buffer"].any()


def test_a_rank_without_the_whole_says_so(worlds: Worlds, tmp_path: Path) -> None:
    for rank, message in enumerate(worlds[2].run(load_the_other_ranks)):
        assert ("consolidate_state_dict" in message) == (rank == 1)


def load_the_other_ranks() -> str:
    model, optimizer = make("muon", "ddp")
    train(model, optimizer, range(1))
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()
    try:
        make("muon", "single")[1].load_state_dict({**state, "param_groups": bare(state["param_groups"])})
    except ValueError as error:
        return str(error)
    return ""


def bare(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**g, "param_names": [n.removeprefix("module.") for n in g["param_names"]]} for g in groups]


def test_state_follows_parameters_that_a_wrapper_replaces() -> None:
    """A loaded optimizer whose groups are given other parameters before its first step."""
    model, optimizer = make("soap", "single", frozen=False)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    twin, other = make("soap", "single", frozen=False)
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(saved)
    for module in twin.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    new = dict(twin.named_parameters())
    for group in other.param_groups:
        group["params"] = [new[name] for name in group["param_names"]]
    train(model, optimizer, range(2, 5))
    train(twin, other, range(2, 5))
    assert set(other.state) <= set(new.values())
    assert [n for n, p in model.named_parameters() if not torch.equal(p, new[n])] == []


def test_find_optimizer_state(tmp_path: Path) -> None:
    assert find_optimizer_state(tmp_path) is None
    (tmp_path / "optimizer_0").mkdir()
    assert find_optimizer_state(tmp_path) == tmp_path / "optimizer_0"
    (tmp_path / "optimizer.bin").touch()
    assert find_optimizer_state(tmp_path) == tmp_path / "optimizer.bin"
