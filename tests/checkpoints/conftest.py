"""Process groups, started when first needed; ``tests/distributed/harness.py`` says how."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("distributed", "integrations")]

from harness import Worlds  # noqa: E402 - the path above


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds[n].run(function, **kwargs)`` calls a function on ``n`` ranks."""
    every = Worlds()
    yield every
    every.kill()
