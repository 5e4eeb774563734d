"""Every command of docs/diagnostics.md, run: an example with figures, its report, and the doctor."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--max_steps 2 --logging_steps 1 --eval_steps 2 --block_size 32 --vocab_size 300 --max_eval_blocks 4 --use_cpu True "
    "--max_train_blocks 64 --held_out_every 5 "
    "--config_overrides hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,"
    "num_key_value_heads=2,head_dim=16"
)  # fmt: skip


def documented() -> list[str]:
    text = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_each_command_runs(tmp_path: Path) -> None:
    """In the order of the page; output goes to a folder of the test's, and the run is made small."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} a matrix, its update and its norm.\n" for i in range(3000)), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    commands = documented()
    assert [shlex.split(c)[0] for c in commands] == ["EMOPT_DIAGNOSTICS=layers", *["hf-emopt"] * 4]
    for command in commands:
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in words if re.match("[A-Z_]+=", word))
        words = words[len(variables) :]
        if words[0] == "python":
            words = [sys.executable, *words[1:], *shlex.split(SMALL), "--train_file", str(text)]
            words += ["--output_dir", str(tmp_path / "runs" / "clm")]
        else:
            words = [sys.executable, "-m", "hf_emopt.cli", *words[1:]]
            words = [str(tmp_path / w) if w in ("runs/clm", "report.html") else w for w in words]
        done = subprocess.run(
            words, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    content = json.loads(data)
    assert content["heat"]["steps"] == [1, 2]
    layers = content["heat"]["quantities"]["orthogonality_error"]["layers"]
    assert len(layers) == 2 * 7
    assert content["run"] == "clm"


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
    from hf_emopt.diagnostics import QUANTITIES

    assert name in QUANTITIES
    assert f"| `{name}` |" in (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    assert len(QUANTITIES) == 9
