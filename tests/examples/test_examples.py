"""The examples, run as a user runs them, on tiny models and text made here."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import pretrain_demo
import run_classification
import run_clm
import text_data
from yaml_args import parse_args

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = (
    "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,head_dim=16"
)
LLAMA_MATRICES_PER_LAYER = 7  # q, k, v, o, gate, up, down


def words(count: int, seed: int) -> str:
    """Text without long repeats: numbered sentences of words drawn from a small vocabulary."""
    draw = np.random.default_rng(seed)
    vocabulary = ["matrix", "gradient", "momentum", "update", "weight", "layer", "rank", "norm", "batch", "token"]
    return " ".join(f"{i} {vocabulary[draw.integers(10)]} {vocabulary[draw.integers(10)]}." for i in range(count))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for index in range(4):
        (folder / f"{index}.txt").write_text(words(4000, index), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    """A Llama with an untied head and random weights, saved with its tokenizer like any checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = text_data.train_tokenizer(text_data.text_documents(text_folder), vocab_size=400)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def rows_file(path: Path, count: int = 60) -> Path:
    """Rows of two labels with different texts, as JSON lines."""
    lines = [
        json.dumps({"text": f"{'fine' if i % 2 else 'poor'} {words(5, i)}", "label": "up" if i % 2 else "down"})
        for i in range(count)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def launch(script: str, config: str, *arguments: str) -> None:
    """`accelerate launch` on the CPU, in a process of its own; its output is shown when it fails."""
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu",
        "--config_file", str(ROOT / "configs" / "accelerate_single.yaml"),
        str(ROOT / "examples" / script), str(ROOT / "configs" / config), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


# ---------------------------------------------------------------- text


def test_hold_out_keeps_every_character_once() -> None:
    documents = [words(900, 0), words(50, 1), words(700, 2)]
    train, held_out = text_data.split_documents(documents, every=7, piece_chars=100)
    pieces = [piece for runs in (train, held_out) for run in runs for piece in run]
    expected = [d[i : i + 100] for d in documents for i in range(0, len(d), 100)]
    assert sorted(pieces) == sorted(expected)
    assert [run[0] for run in held_out] == expected[6::7]
    assert all(len(run) == 1 for run in held_out)
    # No run joins text from both sides of a held-out piece, or of two documents.
    joined = "\0".join("".join(run) for run in train)
    assert all("".join(run) in joined and any("".join(run) in d for d in documents) for run in train)


def test_hold_out_of_a_text_that_is_too_short_names_the_fix() -> None:
    with pytest.raises(ValueError, match="held_out_every"):
        text_data.split_documents(["short"], every=50)


def test_blocks_hold_the_text_with_end_tokens_between_runs() -> None:
    runs = [[words(40, 0)[:200], "tail"], [words(40, 1)[:300]]]
    tokenizer = text_data.train_tokenizer(("".join(run) for run in runs), vocab_size=300)
    blocks = text_data.pack_blocks(runs, tokenizer, block_size=8)
    stream = [i for run in runs for i in [*tokenizer("".join(run))["input_ids"], tokenizer.eos_token_id]]
    assert blocks.shape == (len(stream) // 8, 8)
    assert blocks.flatten().tolist() == stream[: blocks.numel()]
    assert tokenizer.decode(stream).split(tokenizer.eos_token)[:2] == ["".join(run) for run in runs]
    assert torch.equal(text_data.pack_blocks(runs, tokenizer, 8, max_blocks=2), blocks[:2])
    with pytest.raises(ValueError, match="less than one block"):
        text_data.pack_blocks([["a"]], tokenizer, block_size=512)


def test_standard_library_corpus_has_no_third_party_code() -> None:
    files = text_data.stdlib_files()
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"site-packages", "test", "idle_test"} & set(path.parts) for path in files)
    assert len(files) == len(set(files))


# ---------------------------------------------------------------- arguments


def test_yaml_sets_defaults_and_flags_override(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(f"learning_rate: 2e-3\noptim: muon\nmax_steps: 7\noutput_dir: {tmp_path}\nreport_to: none\n")
    (arguments,) = parse_args((TrainingArguments,), [str(config), "--max_steps", "3"])
    assert (arguments.learning_rate, arguments.optim, arguments.max_steps) == (2e-3, "muon", 3)


def test_yaml_with_an_unknown_argument_names_the_close_one(tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("learning_rat: 2e-3\n")
    with pytest.raises(ValueError, match=r"'learning_rat'.*learning_rate"):
        parse_args((TrainingArguments,), [str(config)])


@pytest.mark.parametrize(
    ("config", "classes"),
    [
        ("run_clm.yaml", (run_clm.ModelArguments, run_clm.DataArguments)),
        ("run_classification.yaml", (run_classification.ModelArguments, run_classification.DataArguments)),
    ],
)
def test_committed_configs_parse_and_train_with_muon(config: str, classes: tuple[type, ...]) -> None:
    training = parse_args((*classes, TrainingArguments), [str(ROOT / "configs" / config)])[-1]
    assert training.optim == "muon"
    assert training.output_dir.startswith("runs/")


# ---------------------------------------------------------------- demo

DEMO = [
    "--max_steps", "4", "--eval_steps", "2", "--batch_size", "2", "--block_size", "32", "--vocab_size", "400",
    "--hidden_size", "32", "--num_layers", "2", "--eval_blocks", "4", "--max_corpus_mb", "1",
]  # fmt: skip


def test_demo_gives_both_optimizers_the_same_start_and_the_same_batches(
    tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batches: list[list[int]] = []

    class Recorder(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            batches.append(inputs["input_ids"].flatten().tolist())
            return super().training_step(model, inputs, *args, **kwargs)

    monkeypatch.setattr(pretrain_demo, "Trainer", Recorder)
    arguments = [*DEMO, "--train_file", str(text_folder), "--output_dir", str(tmp_path)]
    adamw, muon = pretrain_demo.main(arguments)["runs"]

    assert len(batches) == 8
    assert batches[:4] == batches[4:]
    assert len({tuple(batch) for batch in batches}) == 4
    assert adamw["held_out"][0] == muon["held_out"][0]  # before the first step: equal weights, equal text
    assert adamw["train"][0] == muon["train"][0]
    assert adamw["held_out"][-1][1] != muon["held_out"][-1][1]
    assert [step for step, _ in muon["held_out"]] == [0, 2, 4]
    assert (adamw["matrix_transforms"], muon["matrix_transforms"]) == (0, 2 * LLAMA_MATRICES_PER_LAYER * 4)

    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "losses.json").read_text())["runs"] == [adamw, muon]
    table = capsys.readouterr().out
    assert f"{muon['held_out'][-1][1]:16.4f}" in table
    assert "AdamW held-out" in table


def test_demo_fine_tunes_a_local_checkpoint(tmp_path: Path, checkpoint: Path, text_folder: Path) -> None:
    arguments = ["--model_name_or_path", str(checkpoint), "--optim", "muon", "--train_file", str(text_folder)]
    result = pretrain_demo.main([*arguments, *DEMO, "--output_dir", str(tmp_path)])
    assert result["arguments"]["learning_rate"] == pretrain_demo.FINE_TUNE_LEARNING_RATE
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    _, held_out = text_data.split_documents(text_data.text_documents(text_folder))
    blocks = text_data.pack_blocks(held_out, tokenizer, 32)
    blocks = blocks[:: max(1, len(blocks) // 4)][:4]
    with torch.no_grad():
        loss = model(input_ids=blocks, labels=blocks).loss.item()
    assert result["runs"][0]["held_out"][0][1] == pytest.approx(loss, rel=1e-5)


# ---------------------------------------------------------------- causal LM


@pytest.mark.second_tier
def test_run_clm_under_accelerate_launch(tmp_path: Path, text_folder: Path) -> None:
    launch(
        "run_clm.py", "run_clm.yaml", "--train_file", str(text_folder), "--config_overrides", TINY_LLAMA,
        "--vocab_size", "400", "--block_size", "32", "--held_out_every", "5", "--max_eval_blocks", "6",
        "--max_steps", "3", "--per_device_train_batch_size", "2", "--output_dir", str(tmp_path),
    )  # fmt: skip
    metrics = json.loads((tmp_path / "eval_results.json").read_text())
    assert metrics["global_step"] == 3
    assert metrics["matrix_transforms"] == 3 * 2 * LLAMA_MATRICES_PER_LAYER
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))

    # What was saved is what was evaluated.
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    _, held_out = text_data.split_documents(text_data.text_documents(text_folder), every=5)
    blocks = text_data.pack_blocks(held_out, tokenizer, 32, max_blocks=6)
    with torch.no_grad():
        assert model(input_ids=blocks, labels=blocks).loss.item() == pytest.approx(metrics["eval_loss"], rel=1e-5)


def test_run_clm_lora_transforms_adapters_and_not_the_saved_head(
    tmp_path: Path, checkpoint: Path, text_folder: Path
) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    metrics = run_clm.main(
        [
            str(ROOT / "configs" / "run_clm.yaml"), "--model_name_or_path", str(checkpoint),
            "--train_file", str(text_folder), "--lora_r", "4", "--modules_to_save", "lm_head", "--block_size", "32",
            "--held_out_every", "5", "--max_eval_blocks", "2", "--max_steps", "2", "--per_device_train_batch_size", "2",
            "--output_dir", str(tmp_path), "--disable_tqdm", "true", "--use_cpu", "true",
        ]
    )  # fmt: skip
    adapters = 2 * 2 * LLAMA_MATRICES_PER_LAYER  # A and B beside every projection of two layers
    assert metrics["matrix_transforms"] == 2 * adapters
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    head = next(value for name, value in adapter.items() if "lm_head" in name)
    before = AutoModelForCausalLM.from_pretrained(checkpoint).lm_head.weight
    assert head.shape == before.shape
    assert not torch.equal(head, before)
    assert sum("lora_" in name for name in adapter) == adapters


def test_run_clm_refuses_a_config_beside_a_checkpoint(tmp_path: Path, checkpoint: Path, text_folder: Path) -> None:
    with pytest.raises(ValueError, match="config_overrides"):
        run_clm.main(
            ["--model_name_or_path", str(checkpoint), "--train_file", str(text_folder), "--held_out_every", "5"]
            + ["--config_overrides", TINY_LLAMA, "--output_dir", str(tmp_path), "--report_to", "none"]
        )


# ---------------------------------------------------------------- classification


@pytest.mark.second_tier
def test_run_classification_under_accelerate_launch(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl")
    launch(
        "run_classification.py", "run_classification.yaml", "--train_file", str(data), "--hidden_size", "32",
        "--num_layers", "1", "--vocab_size", "400", "--max_length", "32", "--max_steps", "3",
        "--eval_strategy", "no", "--output_dir", str(tmp_path / "out"),
    )  # fmt: skip
    metrics = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    bert_layer = 6  # query, key, value, attention output, intermediate, output
    assert metrics["matrix_transforms"] == 3 * (bert_layer + 1)  # and the pooler; the classifier is a head
    assert metrics["eval_rows"] == 6
    assert metrics["eval_accuracy"] * 6 == pytest.approx(round(metrics["eval_accuracy"] * 6))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "down", "1": "up"}


def test_rows_are_read_alike_from_all_three_formats(tmp_path: Path) -> None:
    rows = [("a, b\tc", "1"), ('quote " and\nnewline', "0")]
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        with (tmp_path / f"rows{suffix}").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, delimiter=delimiter).writerows([("body", "stars"), *rows])
    lines = [json.dumps({"body": text, "stars": int(label)}) for text, label in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    for suffix in (".csv", ".tsv", ".jsonl"):
        assert run_classification.read_rows(str(tmp_path / f"rows{suffix}"), "body", "stars") == rows
    with pytest.raises(ValueError, match=r"no 'text'.*body"):
        run_classification.read_rows(str(tmp_path / "rows.csv"), "text", "stars")


def test_row_hold_out_is_per_label_and_without_repeats() -> None:
    rows = [(f"text {i}", "ab"[i % 2]) for i in range(40)] + [("text 3", "b")] * 9
    train, held_out = run_classification.split_rows(rows, every=5)
    assert sorted(train + held_out) == sorted(set(rows))
    assert sorted(label for _, label in held_out) == ["a"] * 4 + ["b"] * 4
    with pytest.raises(ValueError, match="at least two labels"):
        run_classification.split_rows([("x", "a"), ("y", "a")], every=2)


def test_accuracy_and_macro_f1_by_hand() -> None:
    # labels 0 0 0 1 1 2, predicted 0 0 1 1 1 0: F1 of 0 is 4/6, of 1 is 4/5, of 2 is 0.
    logits = np.eye(3)[[0, 0, 1, 1, 1, 0]]
    scores = run_classification.accuracy_and_f1(EvalPrediction(logits, np.array([0, 0, 0, 1, 1, 2])))
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["f1"] == pytest.approx((4 / 6 + 4 / 5 + 0) / 3)


def test_built_in_classification_rows_are_balanced_and_apart() -> None:
    rows = run_classification.stdlib_package_rows(classes=3, per_class=20)
    labels = [label for _, label in rows]
    assert sorted(labels.count(label) for label in set(labels)) == [20, 20, 20]
    texts = [text for text, _ in rows]
    assert len(set(texts)) == 60
    assert all(text.lstrip().startswith(("def ", "async def ")) for text in texts)
