"""The core files once more on another path of MKL and of torch's own kernels, which round products in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = (
    "rules/test_muon_parity.py",
    "rules/test_soap.py",
    "rules/test_shampoo.py",
    "optimizers/test_weight_decay.py",
    "integrations/test_qk_clip.py",
)


@pytest.mark.second_tier
def test_core_files_where_products_round_in_another_order() -> None:
    """What fails here and not elsewhere rests on the last bits of a product: state the test anew, without a wider bound."""
    path = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / name) for name in FILES)],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
