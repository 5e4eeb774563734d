"""What pages of the documentation say of the package, beside the package."""

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


def named_in_the_map() -> list[str]:
    """Modules of the map in docs/design.md, as paths in the package: a line with a folder is of it, and so are the indented
    ones below."""
    block = (ROOT / "docs" / "design.md").read_text().split("## Rooms")[1].split("```")[1]
    folder, found = "", []
    for line in block.strip("\n").splitlines():
        head = re.match(r"(?P<folder>[\w/]+/)?(?P<indent>\s*)(?P<names>\w+\.py(  \w+\.py)*)  +\S", line)
        assert head is not None, f"not a line of the map: {line}"
        if head["folder"] or not head["indent"]:
            folder = head["folder"] or ""
        found += [folder + name for name in head["names"].split()]
    return found


def test_every_module_is_in_the_map() -> None:
    package = ROOT / "hf_emopt"
    modules = [p.relative_to(package).as_posix() for p in package.rglob("*.py") if p.name != "__init__.py"]
    assert sorted(named_in_the_map()) == sorted(modules)
