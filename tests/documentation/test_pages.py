"""Compares statements of the documentation with the package."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from commands import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.tools.estimate import estimate

BLOCKS = {"max_preconditioner_dim": 2048}
ROWS: list[tuple[str, list[tuple[type, dict[str, Any]]]]] = [
    ("Muon, NorMuon", [(hf_emopt.Muon, {}), (hf_emopt.NorMuon, {})]),
    ("SOAP at its defaults", [(hf_emopt.SOAP, {})]),
    ("Shampoo, KL-Shampoo at their defaults", [(hf_emopt.Shampoo, {}), (hf_emopt.KLShampoo, {})]),
    (
        'SOAP with `oversize="block"`, Shampoo and KL-Shampoo, all with `max_preconditioner_dim=2048`',
        [(hf_emopt.SOAP, {"oversize": "block", **BLOCKS}), (hf_emopt.Shampoo, BLOCKS), (hf_emopt.KLShampoo, BLOCKS)],
    ),
]


@pytest.mark.parametrize(("label", "optimizers"), ROWS, ids=[label.split(",")[0] for label, _ in ROWS])
def test_bytes_a_parameter(label: str, optimizers: list[tuple[type, dict[str, Any]]]) -> None:
    """The table of docs/memory.md, and the row below with factors in 8 bits, by the planner."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **sizes, tie_word_embeddings=False))
    lines = (ROOT / "docs" / "memory.md").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {label} |"))
    for cls, options in optimizers:
        for line, more in ((lines[at], {}), (lines[at + 1], {"factor_storage": "int8"})):
            if more and "factor_storage" not in line:
                continue
            for cell, dtype in zip(line.strip("|").split("|")[1:], ("float32", "bfloat16", "int8")):
                said = str(estimate(cls(model, state_dtype=dtype, **options, **more)))
                assert f"({cell.strip()} bytes a parameter)" in said, (cls, dtype, more)


def named_in_the_picture() -> list[str]:
    """Packages in the picture of docs/design.md, from top to bottom."""
    picture = (ROOT / "docs" / "design.md").read_text().split("## Packages")[1].split("```")[1]
    lines = picture.splitlines()[1:]
    assert all(re.match(r"\w+  +\S", line) for line in lines)
    return [line.split()[0] for line in lines]


def test_every_package_is_in_the_picture() -> None:
    packages = [path.parent.name for path in (ROOT / "hf_emopt").glob("*/__init__.py")]
    assert sorted(named_in_the_picture()) == sorted(packages)


def test_packages_import_only_those_below_them_in_the_picture() -> None:
    """As `docs/design.md` draws them; imports in functions and under ``TYPE_CHECKING`` count."""
    named = named_in_the_picture()
    upward = []
    for path in (ROOT / "hf_emopt").glob("*/**/*.py"):
        package = path.relative_to(ROOT / "hf_emopt").parts[0]
        for other in re.findall(r"^\s*(?:from|import) hf_emopt\.(\w+)", path.read_text(), flags=re.MULTILINE):
            if other in named and named.index(other) < named.index(package):
                upward.append(f"{path.relative_to(ROOT)} imports hf_emopt.{other}")
    assert not upward
