"""``hf-emopt doctor``: what it finds here, and each setting of a configuration that would be refused."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import DistributedType

from hf_emopt.integrations import doctor
from hf_emopt.integrations.refusals import config_problem, refuse_accelerator
from hf_emopt.kernels.triton import runtime
from hf_emopt.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[dict[str, str]]]:
    status = main(["doctor", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (status == 0)
    return status, answer["findings"]


def of(findings: list[dict[str, str]], section: str) -> dict[str, dict[str, str]]:
    return {f["name"]: f for f in findings if f["section"] == section}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status, findings = examined(capsys)
    assert status == 0
    versions = of(findings, "versions")
    assert versions["torch"]["text"].startswith(torch.__version__)
    assert {"torch", "transformers", "accelerate", "deepspeed", "peft", "triton"} <= set(versions)
    assert list(of(findings, "backends")) == [
        "one process", "DDP", "FSDP2", "HSDP", "FSDP1", "tensor parallel", "DeepSpeed"
    ]  # fmt: skip
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("no problem found\n")
    assert "environment:\n" in out


def test_versions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"torch": "2.13.0+cpu", "transformers": "4.57.1", "accelerate": "1.99", "numpy": "2.0"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    wanted = ["torch>=2.6", "transformers>=5.0", "accelerate>=1.10", "numpy", "pyyaml", 'peft>=0.18; extra == "peft"']
    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    status, findings = examined(capsys)
    versions = of(findings, "versions")
    assert status == 1
    assert versions["transformers"]["text"] == "4.57.1 is outside >=5.0: pip install 'transformers>=5.0'"
    assert versions["pyyaml"]["text"] == "not installed: pip install 'pyyaml'"
    assert {n for n, f in versions.items() if f["status"] == "problem"} == {"transformers", "pyyaml"}
    assert "newer than the newest tested, 1.15" in versions["accelerate"]["text"]
    assert versions["peft"]["status"] == "note"
    assert "pip install 'peft>=0.18'" in versions["peft"]["text"]
    assert of(findings, "backends")["DeepSpeed"]["status"] == "note"


@pytest.mark.parametrize(
    ("capability", "triton", "variables", "expected"),
    [
        (90, True, {}, ["on for cuda:0", "sm_90.json has"]),
        (80, True, {}, ["on for cuda:0", "no table for sm_80: orthogonalization runs in torch"]),
        (75, True, {}, ["they need compute capability 8.0, and this GPU has 7.5"]),
        (90, False, {}, ["they need Triton 3.4 or later"]),
        (90, True, {"HF_EMOPT_DISABLE_TRITON": "1"}, ["HF_EMOPT_DISABLE_TRITON=1 in the environment; unset it"]),
        (None, True, {}, ["they need an NVIDIA GPU"]),
        (None, True, {"TRITON_INTERPRET": "1"}, ["on for cpu (interpreter)"]),
    ],
)
def test_kernels(
    capability: int | None,
    triton: bool,
    variables: dict[str, str],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if capability is None else 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(capability or 0, 10))
    monkeypatch.setattr(runtime, "triton_installed", lambda: triton)
    monkeypatch.setattr(runtime, "architecture", lambda device: capability if device.type == "cuda" else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    runtime._supported.cache_clear()
    try:
        texts = [finding.text for finding in doctor._kernels()]
    finally:
        runtime._supported.cache_clear()
    assert len(texts) == len(expected)
    for text, part in zip(texts, expected, strict=True):
        assert part in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_the_configurations_of_this_repository_pass(path: Path) -> None:
    assert [(f.status, f.name) for f in doctor._config(path)] == [("ok", str(path))]


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("content", "cause", "fix"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "FSDP1", "fsdp_version: 2"),
        ({"distributed_type": "FSDP", "fsdp_config": {}}, "FSDP1", "fsdp_version: 2"),
        ({"distributed_type": "MEGATRON_LM"}, "Megatron-LM", "Use FSDP2"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
            "DeepSpeedCPUAdam", '"zero_force_ds_cpu_optimizer": false',
        ),
        ({"distributed_type": "NO", "emopt_config": {"overlap": True}}, "overlap", "overlap_param_gather"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}, "AdamW", 'remove the "optimizer" block'),
        ({"zero_optimization": OFFLOAD}, "DeepSpeedCPUAdam", '"zero_force_ds_cpu_optimizer": false'),
        ({"train_batch_size": 8}, "zero_optimization", '"zero_optimization": {"stage": 0}'),
        ({"output_dir": "out", "optim": "soap", "fsdp": True, "fsdp_config": {"version": 1}}, "optim='soap'", "'version': 2"),
        ({"output_dir": "out", "deepspeed": {"zero_optimization": OFFLOAD}}, "DeepSpeedCPUAdam", "false"),
        ({"output_dir": "out", "optim": "moun"}, "optim='moun' is no optimizer of hf_emopt", "did you mean 'muon'"),
        ({"output_dir": "out", "optim": "adamw_troch"}, "or of transformers", "did you mean 'adamw_torch'"),
        ({"output_dir": "out", "optim": "muon", "optim_args": "ns_stepz=6"}, "unknown key 'ns_stepz'", "'ns_steps'"),
        ({"output_dir": "out", "optim": "emopt_muon", "optim_args": {"ns_steps": "x"}}, "bad value 'x'", "INTEGER"),
        ({"output_dir": "out", "lerning_rate": 1e-3}, "'lerning_rate'", "did you mean 'learning_rate'"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": "two"}}, "fsdp_version 'two'", "fsdp_version: 2"),
        ({"output_dir": "out", "fsdp": True, "fsdp_config": {"version": None}}, "version None", "version: 2"),
    ],
)  # fmt: skip
def test_refused_settings(content: Any, cause: str, fix: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    status, findings = examined(capsys, "--config", str(path))
    assert status == 1
    (finding,) = of(findings, "config").values()
    assert cause in finding["text"]
    assert fix in finding["text"]


def test_arguments_of_scripts_beside_those_of_the_trainer(tmp_path: Path) -> None:
    """Other dataclasses read the same file, and transformers' own optimizers their own options."""
    content = {
        "output_dir": "out", "optim": "adamw_torch", "optim_args": "anything=1", "model_name_or_path": "x",
        "dataset_name": "y", "max_seq_length": 8, "label_smoothing": 0.1, "lora_target_modules": "all-linear",
        "num_warmup_steps": 3,
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    assert [f.status for f in doctor._config(path)] == ["ok"]


def test_the_words_are_those_of_the_refusals(tmp_path: Path) -> None:
    """What the doctor says is what a run would raise."""
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n", encoding="utf-8")
    (finding,) = doctor._config(path)
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP, state=state)
    with pytest.raises(ValueError, match="FSDP1") as raised:
        refuse_accelerator(accelerator, "an optimizer of hf_emopt")
    assert finding.text == str(raised.value)
    config = {"zero_optimization": {"stage": 3, "elastic_checkpoint": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    (finding,) = doctor._config(path)
    assert config_problem(config) in finding.text  # type: ignore[operator]


def test_a_file_beside_the_configuration(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion"}}')
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n")
    status, findings = examined(capsys, "--config", str(path))
    assert status == 1
    assert "Lion" in of(findings, "config")[str(path)]["text"]
    (tmp_path / "ds.json").unlink()
    assert main(["doctor", "--config", str(path)]) == 2
    assert "names ds.json: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--config PATH: no such file"),
        ("folder", "--config PATH is a folder: give a file"),
        (b"\x80\x02\xff", "--config PATH is no text: give a file of YAML or JSON"),
        ("a: [", "is not valid YAML"),
        ("- 1\n", "must hold `key: value` lines"),
        ("hidden_size: 8\n", "is no configuration of Accelerate"),
    ],
)
def test_what_is_no_configuration(text: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.yaml"
    if text == "folder":
        path.mkdir()
    elif isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        path.write_text(text)
    assert main(["doctor", "--config", str(path)]) == 2
    assert message.replace("PATH", str(path)) in capsys.readouterr().err


def test_environment_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EMOPT_TRANSPORT_DTYPE", "float16")
    monkeypatch.setenv("EMOPT_DIAGNOSTICS", "all")
    status, findings = examined(capsys)
    assert status == 1
    problems = [f["text"] for f in findings if f["status"] == "problem"]
    assert len(problems) == 2
    assert "EMOPT_TRANSPORT_DTYPE" in problems[0]
    assert "EMOPT_DIAGNOSTICS='all' is not one of summary, layers" in problems[1]
