"""Shared by all tests: two threads at most, no hub, helpers of several directories importable, and process groups."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_DISABLED", "true")
# On some processors MKL rounds a small matrix product by where the matrix lies in memory, so that a matrix of a batch of four
# and the same one of a batch of two differ in their last bits. Where a factor has not full rank, as in the first steps of a
# matrix that is not square, such bits choose its eigenbasis and its root: SOAP and Shampoo part by more than a percent.
# What is compared here is this package, so MKL is to compute alike everywhere.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import torch

if TYPE_CHECKING:
    from harness import World, Worlds

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / name) for name in ("helpers", "distributed", "formats", "integrations", "zero")]
# pytest adds this directory, where every folder would be found as a package: transformers asks whether there is `kernels`.
sys.path[:] = [folder for folder in sys.path if folder != str(HERE)]
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds[n].run(function, **kwargs)`` calls a function on ``n`` ranks; ``tests/distributed/harness.py`` says how."""
    from harness import Worlds

    every = Worlds()
    yield every
    every.kill()


@pytest.fixture
def two(worlds: Worlds) -> World:
    """Two ranks."""
    return worlds[2]
