"""Numeric tests once more, computed as other processors would: without vector instructions, and by another path of MKL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/integrations/test_qk_clip_trainer.py::test_logits_stay_under_the_threshold_through_a_run",
    "tests/linalg/test_eigenbasis.py",
    "tests/linalg/test_inverse_root.py",
    "tests/rules/test_lora_joint.py",
    "tests/rules/test_muon_parity.py",
    "tests/rules/test_shampoo.py",
    "tests/rules/test_soap.py",
]


@pytest.mark.second_tier
@pytest.mark.timeout(900)
@pytest.mark.parametrize("environment", [{"ATEN_CPU_CAPABILITY": "default"}, {"MKL_CBWR": "COMPATIBLE"}], ids=str)
def test_numbers_do_not_depend_on_the_processor(environment: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS], cwd=ROOT, env={**kept, **environment},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
