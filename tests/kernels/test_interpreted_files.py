"""Runs the files whose tests need Triton's interpreter: in one process, since its start costs more than its tests."""

from pathlib import Path

import pytest
from interpreted import INTERPRETING, run_in_interpreter

TESTS = Path(__file__).parents[1]
KERNELS = [str(TESTS / "kernels" / name) for name in ("test_triton_interpreter.py", "test_multi_tensor.py")]
STEPS = [
    str(TESTS / name)
    for name in ("engine/test_passes.py", "linalg/test_half_passes.py", "linalg/test_split_products.py")
]

if not INTERPRETING:

    def test_kernels_in_the_interpreter() -> None:
        run_in_interpreter(KERNELS)

    @pytest.mark.second_tier
    def test_every_case_in_the_interpreter() -> None:
        run_in_interpreter([*KERNELS, *STEPS], "-m", "not products")
