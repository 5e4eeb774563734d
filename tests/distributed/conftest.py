"""Process groups for the tests of this directory, started when first needed and kept for the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "integrations"))  # fsdp_on_cpu

from harness import World, Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds[n].run(function, **kwargs)`` calls a function on ``n`` ranks."""
    every = Worlds()
    yield every
    every.kill()


@pytest.fixture
def two(worlds: Worlds) -> World:
    """Two ranks."""
    return worlds[2]
