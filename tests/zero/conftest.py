"""DeepSpeed on the CPU, where it is installed."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from harness import PRELOADED

HERE = Path(__file__).parent

# Before any rank is started.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        PRELOADED.append("deepspeed")
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(
                pytest.mark.skip(reason="deepspeed is not installed; docs/environments/deepspeed.md says how")
            )
