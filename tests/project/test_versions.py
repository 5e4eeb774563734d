"""The versions that are installed are supported ones, and the lower bounds are those that `make test-minimum` installs."""

from __future__ import annotations

import os
import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from hf_emopt.integrations.doctor import examine

ROOT = Path(__file__).resolve().parents[2]
PINNED = ("transformers", "accelerate")


def supported() -> dict[str, Requirement]:
    """What pyproject.toml requires, by name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, flags=re.MULTILINE | re.DOTALL)
    return {r.name: r for r in map(Requirement, re.findall(r'"([^"]+)"', block))}


def minimum(name: str) -> str:
    (bound,) = (s.version for s in supported()[name].specifier if s.operator == ">=")
    return bound


@pytest.mark.parametrize("name", ["torch", *PINNED])
def test_installed_version_is_supported(name: str) -> None:
    assert supported()[name].specifier.contains(Version(version(name)).base_version)


def test_doctor_finds_no_version_outside_its_range() -> None:
    if not {str(r) for r in supported().values()} <= {str(Requirement(r)) for r in requires("hf-emopt") or []}:
        pytest.skip("hf-emopt was installed before pyproject.toml changed: pip install -e .")
    found = {f.name: f for f in examine() if f.section == "versions"}
    assert {"torch", *PINNED} <= found.keys()
    assert [f for f in found.values() if f.status == "problem"] == []
    for name in ("torch", *PINNED):
        assert f">={minimum(name)}" in found[name].text


def test_minimum_versions_are_those_of_the_package() -> None:
    lines = (ROOT / "tests" / "minimum.txt").read_text(encoding="utf-8").splitlines()
    for name in PINNED:
        (pinned,) = (line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))
        assert Version(pinned) == Version(minimum(name))


@pytest.mark.skipif("HF_EMOPT_MINIMUM" not in os.environ, reason="for the environment of make test-minimum")
@pytest.mark.parametrize("name", PINNED)
def test_the_environment_has_the_minimum(name: str) -> None:
    assert Version(version(name)) == Version(minimum(name))
