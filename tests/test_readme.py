"""What the README and the documentation tell a reader to run exists, and their Python runs."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Every command of the page's shell blocks, continuation lines joined, as words without comments and variables."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    without_variables = [list(itertools.dropwhile(lambda word: re.match("[A-Z_]+=", word), words)) for words in split]
    return [words for words in without_variables if words]


COMMANDS = [(page.name, words) for page in PAGES for words in commands(page)]
SNIPPETS = [(page.name, index, code) for page in PAGES for index, code in enumerate(blocks(page, "python"))]


def test_readme_names_the_two_commands() -> None:
    found = [words for name, words in COMMANDS if name == "README.md"]
    assert ["make", "demo"] in found
    assert ["make", "test"] in found


def test_continuous_integration_ends_with_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [line for line in script.splitlines() if line.strip()][-1] == "make test"


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}:{' '.join(w)[:50]}" for page, w in COMMANDS])
def test_every_command_is_there(page: str, words: list[str]) -> None:
    program = words[0]
    if program == "make":
        # -n resolves the target and every prerequisite without running a recipe.
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert words[1] in re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program in ("python", "accelerate", "torchrun"):
        for word in words:
            if word.startswith(("examples/", "configs/", "benchmarks/")):
                assert (ROOT / word).is_file(), f"{page} names {word}"
        if "-m" in words:
            module = words[words.index("-m") + 1]
            assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file(), f"{page} names module {module}"
    elif program == "hf-emopt":
        done = subprocess.run(
            [sys.executable, "-m", "hf_emopt.cli", words[1], "--help"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    else:
        assert words[:2] == ["pip", "install"], f"{page} has a command that nothing checks: {words}"


@pytest.mark.parametrize(("page", "index", "code"), SNIPPETS, ids=[f"{page}-{index}" for page, index, _ in SNIPPETS])
def test_every_python_snippet_runs(
    page: str, index: int, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"{page}, block {index}", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_local_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_navigation_has_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = {path for entry in navigation for path in entry.values()}
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}
