"""Figures of a step under DeepSpeed, which takes it inside of backward, a group at a time, on flat tensors."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
from harness import World
from trainer_runs import settings, trainer_run

QUANTITIES = ("update_rms", "weight_rms", "update_ratio", "momentum_norm", "effective_lr")


def with_figures(**kwargs: Any) -> list[dict[str, float]]:
    os.environ["EMOPT_DIAGNOSTICS"] = "layers"
    try:
        return trainer_run(**kwargs)["logs"] if "config" in kwargs else ranks.train(**kwargs)["logs"]
    finally:
        del os.environ["EMOPT_DIAGNOSTICS"]


@pytest.mark.parametrize("stage", [2, 3])
def test_figures_are_those_of_one_process(two: World, tmp_path: Path, stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = with_figures(folder=folder, layout="one", world_size=1, max_steps=2)
    found, others = two.run(with_figures, folder=str(tmp_path), config=settings(stage), max_steps=2)
    assert not any(key.startswith("emopt/") for log in others for key in log)
    for here, there in zip(found, wanted, strict=True):
        names = {key for key in there if key.startswith("emopt/")}
        assert names == {key for key in here if key.startswith("emopt/")}
        for name in names:
            if name.rpartition("/")[2] in QUANTITIES:
                assert here[name] == pytest.approx(there[name], rel=2e-3), name
        assert here["emopt/muon/orthogonality_error"] == pytest.approx(
            there["emopt/muon/orthogonality_error"], rel=2e-3
        )
        assert here["emopt/exposed_communication_ms"] > 0.0
