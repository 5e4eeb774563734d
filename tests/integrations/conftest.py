"""What the package logs, for the tests of this directory."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def messages() -> Iterator[list[logging.LogRecord]]:
    """Records of the integrations' logger, at info level and above."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.hf_emopt")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)
