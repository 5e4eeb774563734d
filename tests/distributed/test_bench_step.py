"""The measuring core of ``hf-emopt bench step``: what it counts, refuses and says. No time is asserted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World
from torch import nn
from torch.distributed.tensor import DTensor

import hf_emopt
from hf_emopt.distributed.assignment import BUCKET_VARIABLE
from hf_emopt.tools.bench.advice import exposed_share, measure_alternatives
from hf_emopt.tools.bench.step import (
    Row,
    Settings,
    add_profiles,
    attempt,
    counted,
    measure,
    measure_all,
    refresh_schedule,
    summary,
)
from hf_emopt.tools.bench.step_models import build_model, check_layout, lay_out
from hf_emopt.tools.bench.step_optimizers import OPTIMIZERS
from hf_emopt.tools.bench.step_report import about, plot, save, table
from hf_emopt.tools.cli import main

TINY = {"model": "tiny", "tokens": 16, "length": 16, "steps": 1, "warmup": 1}
MATRICES = 2 * 7
MATRIX_NUMEL = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160)
EMBEDDING, NORMS = 512 * 64, 5 * 64
NUMEL = MATRIX_NUMEL + 2 * EMBEDDING + NORMS


def figures(name: str, layout: str) -> Row:
    return measure(name, OPTIMIZERS.get(name), Settings(**TINY, layout=layout), torch.device("cpu"))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp2+tp"])
def test_every_matrix_is_counted_and_state_is_weighed(two: World, layout: str) -> None:
    """Momentum of matrices, two moments of the rest: half with either rank, but for what tensor parallelism does not cut."""
    for row in two.run(figures, name="muon", layout=layout):
        assert row["transforms"] == 4 * MATRICES
        assert len(row["step_all"]) == len(row["optimizer_all"]) == 1
        data_ranks = 1 if layout == "fsdp2+tp" else 2
        assert row["tokens_per_second"] == pytest.approx(16 * data_ranks / row["step"] * 1e3)
        whole = EMBEDDING + NORMS if layout == "fsdp2+tp" else 0
        state = 4 * MATRIX_NUMEL / 2 + 8 * ((NUMEL - MATRIX_NUMEL - whole) / 2 + whole)
        assert row["state_gib"] * 2**30 == pytest.approx(state, rel=0.01)


def test_whole_periods_after_the_first_refresh_are_measured(two: World) -> None:
    """Roots are there from step 10 on: ten steps, two periods of ten and one more are left out. Ten of either kind, a period
    each, are measured."""
    for row in two.run(figures, name="shampoo", layout="ddp"):
        assert row["transforms"] == 51 * MATRICES
        assert len(row["step_all"]) == len(row["optimizer_all"]) == 10
        # The slowest rank's mean is at most that of the slowest rank of each step.
        assert 0 < row["step_mean"] <= sum(row["step_all"]) / 10 + 1e-3
        assert row["tokens_per_second"] == pytest.approx(32 / row["step_mean"] * 1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (None, (0, 1)),
        (lambda net: torch.optim.SGD(net.parameters()), (0, 1)),
        (lambda net: hf_emopt.Muon(net), (0, 1)),
        (lambda net: hf_emopt.SOAP(net, precondition_frequency=5), (0, 5)),
        (lambda net: hf_emopt.Shampoo(net, precondition_frequency=4), (4, 4)),
        (lambda net: hf_emopt.Shampoo(net, precondition_frequency=4, start_preconditioning_step=7), (7, 4)),
    ],
)
def test_schedules_of_refreshes(optimizer: Any, schedule: tuple[int, int]) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert refresh_schedule(None if optimizer is None else optimizer(net)) == schedule


def test_steps_that_differ_by_schedule_count_by_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_emopt.tools.bench.step.dist.all_reduce", lambda tensor, op: None)
    times = {"step": [10.0, 10.0, 40.0], "optimizer": [1.0, 1.0, 31.0]}
    bare = {"optimizer_name": "none", **summary({"step": [9.0] * 3, "optimizer": [0.0] * 3}, 60, torch.device("cpu"))}
    plain = {"optimizer_name": "muon", **summary(times, 60, torch.device("cpu"))}
    scheduled = {"optimizer_name": "soap", **summary(times, 60, torch.device("cpu"), scheduled=True)}
    assert (counted(plain), plain["tokens_per_second"]) == (10.0, 6000.0)
    assert (counted(scheduled), scheduled["tokens_per_second"]) == (20.0, 3000.0)
    assert "20.00" in table([bare, plain, scheduled]).splitlines()[-1]
    assert (plain["exposed"], scheduled["exposed"]) == (1.0, 11.0)


def test_adamw_and_a_step_without_an_optimizer(two: World) -> None:
    (row, _) = two.run(figures, name="adamw", layout="ddp")
    assert row["state_gib"] * 2**30 == pytest.approx(8 * NUMEL, rel=1e-4)
    (bare, _) = two.run(figures, name="none", layout="ddp")
    assert "state_gib" not in bare
    assert "transforms" not in bare


class Forgetful(hf_emopt.Muon):
    """Leaves out a step."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls != 2:
            super().step(closure)


def forgetful() -> Row:
    return attempt("muon", lambda model, _: Forgetful(model), Settings(**TINY, layout="ddp"), torch.device("cpu"))


def test_a_step_that_leaves_matrices_out_is_no_figure(two: World) -> None:
    for row in two.run(forgetful):
        assert (
            row["error"]
            == f"TransformCountError: {3 * MATRICES} matrices were transformed in 4 steps, {4 * MATRICES} were to be"
        )
        assert "step" not in row


def placements(layout: str, **sizes: int) -> dict[str, str]:
    torch.manual_seed(0)
    laid = lay_out(build_model("tiny", torch.device("cpu")), layout, torch.device("cpu"), **sizes)
    found = {}
    for name, p in laid.raw.named_parameters():
        assert isinstance(p, DTensor)
        found[name] = f"{tuple(p.device_mesh.shape)} {len(p.placements)}"
    return found


@pytest.mark.second_tier
def test_meshes_of_four_ranks(worlds: Any) -> None:
    (hsdp, *_) = worlds[4].run(placements, layout="hsdp", replicas=2)
    assert set(hsdp.values()) == {"(2, 2) 2"}
    (sliced, *_) = worlds[4].run(placements, layout="fsdp2+tp", tp_size=2)
    assert sliced["model.layers.0.mlp.up_proj.weight"] == "(2, 2) 2"
    assert sliced["model.layers.0.input_layernorm.weight"] == "(2,) 1"


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ("zero", 2, "not one of single, ddp"),
        ("single", 2, "use ddp or fsdp2"),
        ("hsdp", 2, "at least 4, not 2"),
        ("hsdp", 3, "multiple of 2 ranks"),
        ("fsdp2+tp", 3, "2 on 3 do not fit"),
    ],
)
def test_layouts_that_do_not_fit(layout: str, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(layout, world, 2, 2)


def test_settings_and_models_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no whole sequence of 32"):
        Settings(tokens=16, length=32)
    with pytest.raises(ValueError, match="has no option ns_step"):
        OPTIMIZERS["muon"](nn.Linear(4, 4), Settings(**TINY, options={"ns_step": 3}))
    from transformers import ViTConfig

    ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="no causal language model"):
        build_model(str(tmp_path), torch.device("cpu"))


def made(name: str, step: float, optimizer: float) -> Row:
    return {
        "optimizer_name": name, "step": step, "optimizer": optimizer, "optimizer_mean": optimizer,
        "optimizer_max": optimizer, "tokens_per_second": 16 / step * 1e3, "state_gib": 0.5,
    }  # fmt: skip


def test_table_json_and_plot(tmp_path: Path) -> None:
    rows = [made("none", 10.0, 0.0), made("adamw", 12.0, 2.5), made("muon", 16.0, 7.0)]
    rows += [{"optimizer_name": "dion", "unavailable": "not installed"}]
    text = table(rows)
    assert rows[2]["exposed"] == 6.0
    assert text.splitlines()[3].split() == ["muon", "16.00", "7.00", "7.00", "7.00", "6.00", "1000", "0.750", "0.50"]
    assert text.splitlines()[4].split(maxsplit=1) == ["dion", "not measured: not installed"]
    facts = about(Settings(**TINY), 2)
    save(tmp_path / "s.json", facts, rows)
    loaded = json.loads((tmp_path / "s.json").read_text())
    assert loaded["about"]["world_size"] == 2
    assert [r["optimizer_name"] for r in loaded["rows"]] == ["none", "adamw", "muon", "dion"]
    plot(tmp_path / "s.png", facts, rows)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def advised(layout: str) -> tuple[list[Any], dict[str, dict[int, float]], list[Row]]:
    device, settings = torch.device("cpu"), Settings(**{**TINY, "steps": 2}, layout=layout)
    rows = measure_all(["none", "muon"], OPTIMIZERS, settings, device)
    verdicts = measure_alternatives(rows, OPTIMIZERS, settings, 2, device)
    return verdicts, exposed_share(rows, OPTIMIZERS, settings, device), rows


class Failing(torch.optim.SGD):
    """Fails after the steps that are measured."""

    def step(self, closure: Any = None) -> None:
        if self.state.setdefault("steps", 0) >= 4:
            raise RuntimeError("no more steps")
        self.state["steps"] += 1


def test_a_profile_that_fails_leaves_what_was_measured(two: World) -> None:
    for rows in two.run(profiled):
        assert rows[0]["step"] > 0
        assert rows[0]["profile_error"] == "RuntimeError: no more steps"
        assert rows[1]["profile"]


def profiled() -> list[Row]:
    makers = {"failing": lambda model, settings: Failing(model.parameters()), "adamw": OPTIMIZERS["adamw"]}
    device, settings = torch.device("cpu"), Settings(**TINY, layout="ddp")
    rows = measure_all(list(makers), makers, settings, device)
    add_profiles(rows, makers.get, Settings(**{**TINY, "warmup": 4}, layout="ddp"), device)
    return rows


def test_alternatives_are_measured(two: World) -> None:
    """Each on both ranks, and twice the tokens for what the optimizer adds."""
    for verdicts, shares, rows in two.run(advised, layout="ddp"):
        assert [v.setting for v in verdicts] == [
            "HF_EMOPT_MAX_BUCKET_NUMEL=67108864", "HF_EMOPT_MAX_BUCKET_NUMEL=268435456", "overlap_param_gather=True",
            "layout fsdp2",
        ]  # fmt: skip
        assert [v.error for v in verdicts] == ["makes the same plan"] * 2 + [""] * 2  # all matrices are in one bucket
        assert [v.word for v in verdicts[:2]] == ["not measured"] * 2
        assert all(v.before == rows[1]["step"] and (v.error or v.after > 0) for v in verdicts)
        assert list(shares["muon"]) == [16, 32]


def replanned(numel: int) -> tuple[Row, Row]:
    device, settings = torch.device("cpu"), Settings(**TINY, layout="ddp")
    first = measure("muon", OPTIMIZERS["muon"], settings, device)
    other = replace(settings, environment={BUCKET_VARIABLE: str(numel)})
    return first, attempt("muon", OPTIMIZERS["muon"], other, device, unlike=first["plan"])


def test_other_buckets_are_measured_where_they_make_another_plan(two: World) -> None:
    for first, second in two.run(replanned, numel=4096):
        assert second["step"] > 0
        assert second["plan"] != first["plan"]
    for _, second in two.run(replanned, numel=2**28):
        assert "step" not in second
        assert second["unavailable"] == "makes the same plan"


@pytest.mark.second_tier
def test_the_command_starts_processes_and_writes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    size = ["--tokens", "16", "--length", "16", "--steps", "1", "--warmup", "1"]
    assert main(["bench", "step", "--model", "tiny", "--nproc", "1", "--optim", "muon", *size, "--no-alternatives",
                 "--optim_args", "ns_steps=3", "--profile", "--output", str(path)]) == 0  # fmt: skip
    assert "tiny, ddp, 1 ranks, 16 tokens a rank" in capfd.readouterr().out
    content = json.loads(path.read_text())
    assert [r["optimizer_name"] for r in content["rows"]] == ["none", "muon"]
    assert content["rows"][1]["transforms"] == 4 * MATRICES
    assert "Optimizer.step" in content["rows"][1]["profile"]
    assert "profile" not in content["rows"][0]
    assert (content["about"]["world_size"], content["about"]["options"]) == (1, {"ns_steps": 3})
    assert path.with_suffix(".png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere/config.json"], "does not exist"),
        (["--model", "tiny", "--optim", "muno"], "--optim muno is not one of adamw"),
        (["--model", "tiny", "--layout", "single", "--nproc", "2"], "use ddp or fsdp2"),
        (["--model", "tiny", "--nproc", "0"], "--nproc 0"),
        (["--model", "tiny", "--optim_args", "ns_step=3"], "ns_steps"),
        (["--model", "tiny", "--optim", "adamw", "--optim_args", "ns_steps=3"], "--optim names none"),
        (["--model", "tiny", "--tokens", "8"], "no whole sequence"),
        (["--model", "tiny", "--tokens", "100", "--length", "64"], "64 or 128 tokens are"),
    ],
)
def test_bad_input_is_found_before_processes_start(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *arguments]) == 2
    assert message in capsys.readouterr().err
