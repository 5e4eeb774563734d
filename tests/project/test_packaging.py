"""The wheel holds what the package needs, and works where it is installed without the repository beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KINDS = {".py", ".json", ".css", ".js", ".typed"}  # Path("py.typed").suffix is ".typed"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    # Without what earlier builds left behind, which setuptools would pack again.
    files = subprocess.run(
        ["git", "ls-files", "hf_emopt", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in files:
        if not (ROOT / name).exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_has_every_module_and_what_lies_beside_them(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "hf_emopt").rglob("*") if path.suffix in KINDS}
    assert {Path(name).suffix for name in wanted} == KINDS
    assert wanted <= packed
    assert not [name for name in packed if name.startswith(("tests/", "benchmarks/", "examples/", "docs/"))]


def test_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import hf_emopt, torch; from hf_emopt.kernels.triton import configs; assert configs.load_table(90); "
        "model = torch.nn.Linear(8, 4); optimizer = hf_emopt.Muon(model, lr=1e-3); "
        "model(torch.ones(1, 8)).sum().backward(); optimizer.step(); assert optimizer.transform_count == 1; "
        "print(hf_emopt.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)


def test_citation_and_hooks_are_well_formed() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]] == ["ruff-check", "ruff-format", "mypy"]
