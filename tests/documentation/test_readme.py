"""The README and the documentation: their Python runs, and their links lead somewhere.

Their commands are executed by ``tests/documentation/test_commands.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


SNIPPETS = [
    (str(page.relative_to(ROOT)), index, code) for page in PAGES for index, code in enumerate(blocks(page, "python"))
]


def test_readme_names_the_two_commands() -> None:
    found = "".join(blocks(ROOT / "README.md", "bash")).splitlines()
    assert {"make demo", "make test"} <= set(found)


def test_continuous_integration_ends_with_the_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [line for line in script.splitlines() if line.strip()][-1].startswith("make test-all ")


@pytest.mark.parametrize(("page", "index", "code"), SNIPPETS, ids=[f"{page}-{index}" for page, index, _ in SNIPPETS])
def test_every_python_snippet_runs(
    page: str, index: int, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page}, block {index}", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_local_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def pages_of(navigation: list[Any]) -> list[str]:
    """Paths of a navigation, whose entries are a page or a list of them."""
    values = [value for entry in navigation for value in entry.values()]
    return [path for value in values for path in (pages_of(value) if isinstance(value, list) else [value])]


def test_navigation_has_every_page_once() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = pages_of(navigation)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))
