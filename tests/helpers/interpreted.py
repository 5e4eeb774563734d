"""Runs test files in Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

__all__ = ["INTERPRETING", "run_in_interpreter", "small_integers"]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def run_in_interpreter(paths: list[str], *arguments: str) -> None:
    """All tests of some files, also those that are defined where ``INTERPRETING``; fails with the output where one does."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *paths],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def small_integers(*shape: int) -> Tensor:
    """float32 from -2 to 2: sums of products of few of them are exact in 16 bits."""
    return torch.randint(-2, 3, shape).float()
