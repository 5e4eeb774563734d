"""Installing DeepSpeed without a CUDA toolkit, by the documentation's line, which continuous integration uses too."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = "DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 pip install -e '.[deepspeed]'"


@pytest.mark.parametrize("page", ["README.md", "docs/environments/deepspeed.md"])
def test_the_line_is_what_continuous_integration_does(page: str) -> None:
    assert LINE in (ROOT / page).read_text(encoding="utf-8")
    words = shlex.split(LINE)
    given = dict(word.split("=") for word in words[: words.index("pip")])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    exported = dict(re.findall(r"^export (DS_\w+) \?= (\w+)$", makefile, flags=re.MULTILINE))
    assert exported == given
    extras = dict(
        re.findall(r"^(\w+) = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE | re.DOTALL)
    )
    assert "deepspeed" in extras["deepspeed"]
    assert re.search(r"hf-emopt\[[^]]*deepspeed", extras["test"])


def test_nothing_was_compiled() -> None:
    files = importlib.metadata.files("deepspeed")
    assert files
    assert [str(f) for f in files if f.suffix in (".so", ".pyd")] == []
