"""The convergence study: what it runs, what it runs again, and the arithmetic of its table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convergence


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npz"
    ids = np.random.default_rng(0).integers(0, 32, size=2000).astype(np.uint16)
    np.savez_compressed(path, vocab_size=np.array(32), train=ids, held_out=ids[:200])
    return path


def fake_run(self: Any, name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """A loss that is least at a rate of 4e-3 and falls with the steps; AdamW's falls at half the speed."""
    speed = 0.5 if name == "adamw" else 1.0
    loss = 5 - speed * steps / 100 + abs(math.log(lr / 4e-3)) + 0.01 * seed
    return {
        "optim": name,
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "curve": [(0, 5.0, 0.0), (steps, loss, 0.01 * steps)],
    }


def command(data: Path, out: Path, *more: str) -> list[str]:
    sizes = "--hidden 64 --layers 1 --mlp 64 --length 16 --batch 2 --eval_blocks 4 --warmup 1"
    return ["run", str(data), "--out", str(out), "--device", "cpu", "--precision", "fp32", *sizes.split(), *more]


@pytest.mark.parametrize("center", [4e-3, 1e-3, 1.6e-2])
def test_search_ends_between_worse_rates(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, center: float
) -> None:
    monkeypatch.setattr(convergence.Runner, "run", fake_run)
    monkeypatch.setattr(convergence.Runner, "warm", lambda self: None)
    out = tmp_path / "out.json"
    convergence.main(command(data, out, "--search", f"muon:40:{center}", "--factor", "2", "--seeds", "1", "2"))
    points = json.loads(out.read_text())["points"]
    rows = convergence.sweep(points, "muon")
    losses = [loss for _, loss in rows]
    at = losses.index(min(losses))
    assert len(rows) >= 5
    assert 0 < at < len(rows) - 1
    assert rows[at][0] == pytest.approx(4e-3, rel=0.05)
    assert sorted(p["seed"] for p in points if p["lr"] == rows[at][0]) == [0, 1, 2]


def test_table_finds_the_length_that_reaches_adamw(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(convergence.Runner, "run", fake_run)
    monkeypatch.setattr(convergence.Runner, "warm", lambda self: None)
    out = tmp_path / "out.json"
    asked = ["--search", "adamw:400:4e-3", "--search", "muon:180:4e-3", "--seeds", "1", "--lengths", "muon:160,240"]
    convergence.main(command(data, out, *asked))
    points = json.loads(out.read_text())["points"]
    target = {p["seed"]: p["curve"][-1][1] for p in points if p["optim"] == "adamw" and p["lr"] == 4e-3}
    assert convergence.steps_to(points, "muon", target) == pytest.approx(200)  # twice the speed of 400 steps
    convergence.main(["render", str(out), "--png", str(tmp_path / "plot.png")])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| muon | 0.004 | 180"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == ["180, 0.45", "3.200, 3.210", "0 of 2", "10.0", "0.45", "0.50"]
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert convergence.adamw_losses(points) == target
    assert convergence.shown_run(points, "muon", target)["steps"] == 240, "180 steps end above AdamW"
    assert convergence.shown_run(points, "muon", {0: 0.0})["steps"] == 240, "the longest where none gets there"
    assert convergence.shown_run(points, "muon", {0: 4.0})["steps"] == 160, "the shortest of all that get there"


def test_seconds_of_runs_beside_others_count_only_without_others() -> None:
    def run(ms: float, **more: Any) -> dict[str, Any]:
        return {"optim": "muon", "curve": [(0, 5.0, 0.0), (10, 4.0, ms / 100)], **more}

    shared = [run(9.0, beside_others=True), run(8.0, beside_others=True), run(7.0, beside_others=True)]
    assert convergence._milliseconds([run(2.0), run(4.0), *shared], "muon") == pytest.approx(3.0)
    assert convergence._milliseconds(shared, "muon") == pytest.approx(8.0)


def test_points_are_run_once_and_counted(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    convergence.main(command(data, out, "--steps", "3", "--point", "adamw:1e-3", "--point", "muon:1e-3"))
    points = json.loads(out.read_text())["points"]
    assert [(p["optim"], p.get("transforms")) for p in points] == [("adamw", None), ("muon", 7 * 3)]
    assert points[0]["curve"][0] == points[1]["curve"][0], "another start"
    capsys.readouterr()
    convergence.main(command(data, out, "--steps", "3", "--point", "adamw:1e-3", "--point", "muon:1e-3"))
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="other settings"):
        convergence.main([*command(data, out, "--point", "adamw:1e-3"), "--weight_decay", "0.2"])
