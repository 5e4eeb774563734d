"""``hf-emopt launch``: what it exports, what it hands on, what it refuses; and the example configurations."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

import hf_emopt
from hf_emopt.integrations import launch as launcher
from hf_emopt.integrations.launch import environment_of, split_config
from hf_emopt.tools.cli import main

ROOT = Path(hf_emopt.__file__).parents[1]
CONFIGS = sorted(p for p in (ROOT / "configs").glob("*.yaml") if "distributed_type" in p.read_text())
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith(("EMOPT_", "ACCELERATE_", "FSDP_"))},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
    "GLOO_SOCKET_IFNAME": "lo",
}

SINGLE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
BLOCK = {
    "optim": "soap",
    "lr": "1e-3",
    "weight_decay": 0,
    "overlap_param_gather": True,
    "transport_dtype": "float32",
    "aux_lr": None,
    "optim_args": {"betas": [0.9, 0.95]},
}
EXPORTED = {
    "EMOPT_OPTIM": "soap",
    "EMOPT_LR": "1e-3",
    "EMOPT_WEIGHT_DECAY": "0",
    "EMOPT_OVERLAP_PARAM_GATHER": "true",
    "EMOPT_TRANSPORT_DTYPE": "float32",
    "EMOPT_OPTIM_ARGS": '{"betas": [0.9, 0.95]}',
}
SHOW = """
import json, os, sys
import hf_emopt
kwargs = {key: str(value) for key, value in hf_emopt.EmoptPlugin().optimizer_kwargs.items()}
shown = {key: value for key, value in os.environ.items() if key.startswith("EMOPT_")}
json.dump([sys.argv[1:], shown, kwargs], open(sys.argv[1], "w"))
sys.exit(int(sys.argv[2]))
"""


def write(folder: Path, block: Any, **rest: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**SINGLE, "emopt_config": block, **rest}))
    return str(path)


def test_block_becomes_environment_and_the_rest_accelerates(tmp_path: Path) -> None:
    path = write(tmp_path, BLOCK)
    block, rest = split_config(path)
    assert environment_of(block, path) == EXPORTED
    assert rest == SINGLE


@pytest.mark.second_tier  # two starts of Python that import everything
@pytest.mark.parametrize("status", [0, 3])
def test_script_gets_arguments_environment_and_gives_its_status(status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHOW)
    out = tmp_path / "out.json"
    command = [sys.executable, "-c", "import sys; from hf_emopt.tools.cli import main; sys.exit(main())", "launch"]
    arguments = [
        "--config_file",
        write(tmp_path, BLOCK),
        str(tmp_path / "script.py"),
        str(out),
        str(status),
        "--flag=1",
    ]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [*command, *arguments],
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    argv, environment, kwargs = json.loads(out.read_text())
    assert argv == [str(out), str(status), "--flag=1"]
    assert environment == EXPORTED
    assert kwargs == {
        "lr": "0.001",
        "weight_decay": "0.0",
        "overlap_param_gather": "True",
        "transport_dtype": "torch.float32",
        "betas": "(0.9, 0.95)",
    }
    assert list(temporary.glob("hf_emopt*")) == []


def test_accelerate_gets_a_file_that_it_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def launch_command(options: Any) -> None:
        seen["config"] = load_config_from_file(options.config_file)
        seen["options"] = options
        seen["environment"] = {key: value for key, value in os.environ.items() if key.startswith("EMOPT_")}

    monkeypatch.setattr(launcher, "launch_command", launch_command)
    path = write(tmp_path, BLOCK, mixed_precision="bf16")
    with pytest.raises(ValueError, match="unknown keys"):  # why the block has to be taken out
        load_config_from_file(path)
    assert main(["launch", "--config_file", path, "--num_processes", "3", "script.py", "--lr", "1"]) == 0
    assert seen["config"].mixed_precision == "bf16"
    assert seen["environment"] == EXPORTED
    options = seen["options"]
    assert (options.num_processes, options.training_script) == (3, "script.py")
    assert options.training_script_args == ["--lr", "1"]
    assert not Path(options.config_file).exists()
    assert not any(key.startswith("EMOPT_") for key in os.environ)


def test_environment_overrides_the_file_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(launcher, "launch_command", lambda options: seen.update(os.environ))
    monkeypatch.setenv("EMOPT_OPTIM", "muon")
    monkeypatch.setenv("EMOPT_LR", "1e-3")
    path = write(tmp_path, {"optim": "normuon", "lr": "1e-3"})
    assert main(["launch", "--config_file", path, "script.py"]) == 0
    assert seen["EMOPT_OPTIM"] == "muon"
    assert capsys.readouterr().err == f"hf-emopt: EMOPT_OPTIM=muon of the environment overrides {path}\n"


def test_help_tells_of_the_block_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: hf-emopt launch [--config_file FILE]")
    assert out.index("emopt_config") < out.index("--num_processes")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"overlap_param_gatter": True}, r"has no key 'overlap_param_gatter'; did you mean 'overlap_param_gather'\?"),
        ({"learning_rate": 1}, r"has no key 'learning_rate'.*Known: optim, lr, aux_lr, weight_decay"),
        ({"lr": "fast"}, r"EmoptPlugin\.lr .*EMOPT_LR.*bad value 'fast'; accepted: NUMBER"),
        ({"optim": "muom"}, r"did you mean 'muon'\?"),
        ({"optim_args": {"ns_step": 5}}, r"unknown key 'ns_step'"),
        (["optim"], "must be a mapping of optim, lr"),
    ],
)
def test_mistakes_in_the_block_are_one_line_that_names_the_file(
    block: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, block)
    assert main(["launch", "--config_file", path, "script.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hf-emopt: {path}: emopt_config")
    assert re.search(message, line), line


def test_mistakes_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    for text, message in (
        ("emopt_confg: {}\n", "unknown key 'emopt_confg'; did you mean 'emopt_config'?"),
        ("- 1\n", "must hold `key: value` lines, got list"),
        ("a: [\n", "is not valid YAML"),
    ):
        bad.write_text(text)
        assert main(["launch", "--config_file", str(bad), "script.py"]) == 2
        assert message in capsys.readouterr().err
    assert main(["launch", "--config_file", str(tmp_path), "script.py"]) == 2
    assert f"--config_file {tmp_path} is a folder: give a file" in capsys.readouterr().err
    assert main(["launch", "--config_file", str(tmp_path / "none.yaml"), "script.py"]) == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_example_configurations_are_read_by_accelerate(path: Path, tmp_path: Path) -> None:
    block, rest = split_config(path)
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(rest))
    config = load_config_from_file(str(plain))
    assert config.num_processes == (4 if path.stem == "hsdp" else 1 if "single" in path.stem else 2)
    if block is not None:
        assert environment_of(block, str(path))["EMOPT_TRANSPORT_DTYPE"] == "bfloat16"
    assert {"ddp", "fsdp2", "hsdp"} <= {p.stem for p in CONFIGS}
