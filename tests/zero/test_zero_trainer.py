"""Plain ``Trainer`` with a DeepSpeed configuration."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from harness import World
from ranks import MATRICES
from trainer_runs import settings, trainer_run


@functools.cache
def one_process(**kwargs: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return ranks.train(folder, "one", 1, **kwargs)


@pytest.mark.parametrize(("stage", "zero_init"), [(0, False), (1, False), (2, False), (3, False), (3, True)], ids=str)
def test_weights_of_trainer_are_those_of_one_process(two: World, tmp_path: Path, stage: int, zero_init: bool) -> None:
    wanted = one_process()
    results = two.run(trainer_run, folder=str(tmp_path), config=settings(stage), zero_init=zero_init)
    for result in results:
        for name, value in wanted["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=2e-5 * float(value.abs().max()))
    assert sum(r["transforms"] for r in results) == 4 * MATRICES
    assert [e["learning_rate"] for e in results[0]["logs"]] == [e["learning_rate"] for e in wanted["logs"]]
    assert [e["lr/aux"] for e in results[0]["logs"]] == [e["lr/aux"] for e in wanted["logs"]]
