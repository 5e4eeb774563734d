"""Process groups for the tests of this directory, started when first needed and kept for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
