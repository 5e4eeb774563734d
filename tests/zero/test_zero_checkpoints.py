"""Checkpoints of DeepSpeed: resumed at the same number of ranks, they continue as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import World
from zero_runs import config, resumed

CASES = [
    ("muon", 0, "fp32"),
    ("normuon", 0, "bf16"),
    ("soap", 1, "fp32"),
    ("klshampoo-staggered", 1, "bf16-fp32"),
    ("shampoo", 2, "bf16"),
    ("muon", 2, "fp32"),
    ("soap-staggered", 3, "fp32"),
    ("muon", 3, "bf16"),
]


@pytest.mark.parametrize(("rule", "stage", "precision"), CASES)
def test_resumed_is_uninterrupted(two: World, tmp_path: Path, rule: str, stage: int, precision: str) -> None:
    for result in two.run(resumed, rule=rule, settings=config(stage, precision), folder=str(tmp_path), steps=(3, 2)):
        for name, value in result["straight"].items():
            assert torch.equal(value, result["resumed"][name]), name
        assert result["different"]
