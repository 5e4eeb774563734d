"""The command line: ``hf-emopt plan`` against an optimizer that has really been stepped, and what every command refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

import hf_emopt
from hf_emopt.tools.cli import main


def tiny_config(**kwargs) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"], **kwargs,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_config().save_pretrained(tmp_path)
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("optim", "cls"),
    [
        ("muon", hf_emopt.Muon),
        ("emopt_normuon", hf_emopt.NorMuon),
        ("soap", hf_emopt.SOAP),
        ("shampoo", hf_emopt.Shampoo),
        ("kl_shampoo", hf_emopt.KLShampoo),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_bytes_and_counts_are_those_of_a_real_step(folder, capsys, optim: str, cls, dtype: str) -> None:
    figures = planned(capsys, folder, "--optim", optim, "--dtype", dtype)
    model = AutoModelForCausalLM.from_config(tiny_config()).to(getattr(torch, dtype))
    optimizer = cls(model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    measured = sum(v.nbytes for entry in optimizer.state.values() for v in entry.values())
    assert figures["matrix_state_bytes"] + figures["aux_state_bytes"] == measured
    assert figures["matrices"] == optimizer.transform_count == 2 * 7
    assert figures["matrix_numel"] + figures["aux_numel"] == sum(p.numel() for p in model.parameters())
    adamw = torch.optim.AdamW(model.parameters())
    adamw.step()
    assert figures["adamw_state_bytes"] == sum(v.nbytes for entry in adamw.state.values() for v in entry.values())


def test_bytes_are_shown_for_every_way_to_keep_factors(folder, capsys) -> None:
    figures = planned(capsys, folder, "--optim", "soap", "--optim_args", "factor_storage=packed")
    choices = figures["bytes_per_parameter_by_factor_storage"]
    numel = figures["matrix_numel"] + figures["aux_numel"]
    assert choices["packed"] * numel == pytest.approx(figures["matrix_state_bytes"] + figures["aux_state_bytes"])
    assert choices["float32"] > choices["packed"] > choices["bfloat16"] > choices["int8"]
    assert planned(capsys, folder, "--optim", "muon")["bytes_per_parameter_by_factor_storage"] == {}


def test_flops_follow_the_formula(folder, capsys) -> None:
    """Five steps of X X^T, (X X^T)^2 and their product with X, two operations a multiply-add."""
    figures = planned(capsys, folder)

    def cost(m: int, n: int) -> int:
        s, long = min(m, n), max(m, n)
        return 5 * (2 * s * s * long + 2 * s**3 + 2 * s * s * long)

    layer = 2 * cost(32, 32) + 2 * cost(16, 32) + 3 * cost(48, 32)
    assert figures["transform_flops"] == 2 * layer


def test_ranks_share_the_work(folder, capsys) -> None:
    figures = planned(capsys, folder, "--world-size", "4")
    assert len(figures["rank_flops"]) == 4
    assert sum(figures["rank_flops"]) == figures["transform_flops"]
    assert figures["imbalance"] == pytest.approx(max(figures["rank_flops"]) * 4 / figures["transform_flops"])


def test_a_config_file_and_a_folder_are_the_same(folder, capsys) -> None:
    by_file = planned(capsys, str(Path(folder) / "config.json"))
    assert by_file | {"model": folder} == planned(capsys, folder)


def test_the_table_is_printed(folder, capsys) -> None:
    assert main(["plan", folder]) == 0
    out = capsys.readouterr().out
    for expected in ("q_proj", "embed_tokens", "AdamW's", "TFLOP"):
        assert expected in out


@pytest.mark.parametrize(("short", "whole"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_dtypes_have_the_names_that_optim_args_takes(folder, capsys, short: str, whole: str) -> None:
    assert planned(capsys, folder, "--dtype", short) == planned(capsys, folder, "--dtype", whole)


def test_every_optimizer_that_is_named_is_planned(folder, capsys) -> None:
    names = ["muon", "soap", "kl_shampoo"]
    found = planned(capsys, folder, "--optim", *names)
    assert list(found["optimizers"]) == names
    for name, figures in found["optimizers"].items():
        assert {"model": folder, "optim": name, **figures} == planned(capsys, folder, "--optim", name)
    assert main(["plan", folder, "--optim", *names]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [f"{name}:" for name in names]
    assert main(["plan", folder, "--optim", "soap"]) == 0
    assert blocks[1] == "soap:\n" + capsys.readouterr().out.rstrip("\n")


def test_tied_embeddings_count_once(tmp_path: Path, capsys) -> None:
    tiny_config(tie_word_embeddings=True).save_pretrained(tmp_path)
    tied = planned(capsys, str(tmp_path))
    tiny_config(tie_word_embeddings=False).save_pretrained(tmp_path)
    untied = planned(capsys, str(tmp_path))
    assert untied["aux_numel"] - tied["aux_numel"] == 64 * 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/config.json"], "does not exist"),
        (["FOLDER", "--optim", "mun"], "did you mean 'muon'"),
        (["FOLDER", "--optim_args", "ns_step=3"], "ns_steps"),
        (["FOLDER", "--world-size", "0"], "--world-size 0"),
        (["FOLDER", "--dtype", "int8"], "--dtype int8"),
    ],
)
def test_bad_input_is_one_line_and_status_2(folder, capsys, arguments: list[str], message: str) -> None:
    assert main(["plan", *[folder if a == "FOLDER" else a for a in arguments]]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_configuration_says_so(tmp_path: Path, capsys) -> None:
    PreTrainedConfig().save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path)]) == 2
    assert "hf-emopt:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{bad", "cannot be read as a configuration"),
        (
            '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 4, "pad_token_id": 9}',
            "cannot be built",
        ),
    ],
)
def test_a_broken_configuration_is_one_line(text: str, message: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert main(["plan", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err


# ---------------------------------------------------------------------- every command


def test_version_and_help(capsys) -> None:
    for flag, words in (("--version", f"hf-emopt {hf_emopt.__version__}\n"), ("--help", "Muon, NorMuon, SOAP")):
        with pytest.raises(SystemExit) as ended:
            main([flag])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert words in out
        assert "``" not in out


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (["plan", "X", "--layot", "ddp"], "usage: hf-emopt plan ", "--layot ddp; did you mean --layout?"),
        (["plan", "X", "--layot=ddp"], "usage: hf-emopt plan ", "--layot=ddp; did you mean --layout?"),
        (
            ["bench", "step", "--model", "tiny", "--lenght", "8"],
            "usage: hf-emopt bench step ",
            "did you mean --length?",
        ),
        (["report", "run", "again"], "usage: hf-emopt report ", "unrecognized arguments: again\n"),
        (["--versoin", "doctor"], "usage: hf-emopt [-h]", "did you mean --version?"),
    ],
)
def test_unknown_options_are_answered_by_their_command(capsys, arguments: list[str], usage: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(usage)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "run", "--out", "FOLDER"], "--out FOLDER is a folder: name a file"),
        (["report", "run", "--out", "FILE/page.html"], "--out FILE/page.html: FILE is a file, and no folder"),
        (["convert", "run", "FILE/sub"], "output FILE/sub: FILE is a file, and no folder"),
        (["bench", "step", "--model", "tiny", "--output", "FOLDER"], "--output FOLDER is a folder: name a file"),
        (["bench", "step", "--model", "tiny", "--output", "FILE/x.json"], "--output FILE/x.json: FILE is a file"),
        (["bench", "step", "--model", "tiny", "--output", "FOLDER/no/x.json"], "no folder FOLDER/no: make it"),
        (["bench", "kernels", "--output", "FOLDER"], "--output FOLDER is a folder: name a file"),
        (["bench", "step", "--model", "tiny", "--output", "x.png"], "name it x.json"),
        (["bench", "kernels", "--tune", "FOLDER"], "--tune FOLDER is a folder: name a file"),
    ],
)
def test_places_that_cannot_be_written_are_found_first(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    """Before a log is read, a checkpoint converted or a step measured: what would be is not there."""

    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr("hf_emopt.tools.commands.bench.subprocess.run", started)
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.touch()

    def placed(text: str) -> str:
        return text.replace("FOLDER", str(folder)).replace("FILE", str(file))

    assert main([placed(a) for a in arguments]) == 2
    assert placed(message) in capsys.readouterr().err


def test_what_the_system_refuses_is_one_line_with_file_and_fix(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "config.yaml"
    for error, message in (
        (PermissionError(13, "Permission denied", str(path)), f"hf-emopt: {path}: Permission denied; name a place"),
        (OSError(28, "No space left on device", str(path)), f"hf-emopt: {path}: No space left on device\n"),
        (OSError("the Hub cannot be reached"), "hf-emopt: the Hub cannot be reached\n"),
    ):

        def refused(config: object, as_json: object, error: OSError = error) -> int:
            raise error

        monkeypatch.setattr("hf_emopt.integrations.doctor.run", refused)
        assert main(["doctor"]) == 2
        assert message in capsys.readouterr().err
