"""Shared by all tests: two threads at most, no hub, helpers of several directories importable, process groups, two tiers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from itertools import groupby
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


def pytest_collection_finish() -> None:
    """What was imported stays, so that no collection of garbage needs to go through it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # nothing that outlives the interpreter is then said to have leaked, after pytest's last line


# --- tiers ------------------------------------------------------------------------------------------------------------


_MANY = 4
"""Cases of one test, of which the first tier has no more than it takes for every value of every option to occur."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as ``second_tier`` what ``first_tier`` leaves out, before ``-m`` selects.

    Tests on several ranks, and tests with more than :data:`_MANY` cases, have ``first_tier()`` without saying so.
    """
    for _, cases in groupby(items, key=lambda item: (item.parent, getattr(item, "originalname", item.name))):
        group = [i for i in cases if i.get_closest_marker("second_tier") is i.get_closest_marker("products") is None]
        marker = group[0].get_closest_marker("first_tier") if group else None
        many = len(group) > _MANY or (len(group) > 1 and "worlds" in group[0].fixturenames)  # type: ignore[attr-defined]
        if len(group) > 1 and (marker is not None or many):
            chosen = covering([item.callspec.params for item in group], marker.args if marker else ())  # type: ignore[attr-defined]
            for index, item in enumerate(group):
                if index not in chosen:
                    item.add_marker(pytest.mark.second_tier)


def covering(cases: list[dict[str, object]], wanted: tuple[str, ...]) -> set[int]:
    """Numbers of a few cases that together have every value of every option.

    Args:
        cases: options and their values.
        wanted: names of options, separated by spaces, of which every combination that there is must be had; for example
            ``"layout size"`` and ``"rule"``. Each option on its own by default.
    """
    names = [tuple(text.split()) for text in wanted] or [(name,) for name in cases[0]]
    had = [{(each, repr([case[name] for name in each])) for each in names} for case in cases]
    missing, chosen = set().union(*had), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(had[index] & missing))
        chosen.add(best)
        missing -= had[best]
    return chosen
