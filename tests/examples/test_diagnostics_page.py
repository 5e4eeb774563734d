"""docs/diagnostics.md names every quantity; its commands are executed with those of all pages."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "update_rms",
        "weight_rms",
        "update_ratio",
        "orthogonality_error",
        "momentum_norm",
        "effective_lr",
        "condition_number",
        "refresh_age",
        "failures",
    ],
)
def test_the_page_names_every_quantity(name: str) -> None:
    from hf_emopt.optimizers.diagnostics import QUANTITIES

    assert name in QUANTITIES
    assert f"| `{name}` |" in (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    assert len(QUANTITIES) == 9
