"""DeepSpeed on the CPU, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Before any rank is started.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(tempfile.gettempdir()) / f"hf_emopt-extensions-{os.getpid()}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="deepspeed is not installed; docs/deepspeed.md says how"))


@pytest.fixture(scope="session", autouse=True)
def compiled_operators() -> Iterator[None]:
    """The operator that DeepSpeed compiles for collectives on CPUs, when the first process group is made.

    That takes about as long as a case may, and a rank that is killed meanwhile leaves a lock that all later ones wait for:
    so it is compiled once, here, into a folder of this session alone.
    """
    build = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    subprocess.run([sys.executable, "-c", build], check=True, timeout=600, capture_output=True)
    yield
    shutil.rmtree(os.environ["TORCH_EXTENSIONS_DIR"], ignore_errors=True)
