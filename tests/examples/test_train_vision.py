"""The vision example, on its own images and tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageClassification, TrainingArguments

pytest.importorskip("sklearn", reason="the images come with scikit-learn")

import train_vision
from hf_emopt import route_parameters
from yaml_args import parse_args

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "train_vision.yaml"
MATRICES = {
    "vit": 2 * 6,  # q, k, v, o and two of the MLP, in two layers
    "resnet": 2 * 2 + 2 * 2 + 1,  # two convolutions a block, and the shortcut between the stages
    "convnext": 2 * 2 + 2 * 2 + 1,  # two pointwise maps a block, and the convolution between the stages
}


@pytest.mark.parametrize("architecture", MATRICES)
def test_the_example_trains(architecture: str, tmp_path: Path) -> None:
    metrics = train_vision.main(
        [
            str(CONFIG), "--architecture", architecture, "--width", "16", "--depth", "2", "--max_steps", "2",
            "--channels_last", str(architecture != "vit"), "--output_dir", str(tmp_path), "--use_cpu", "True",
            "--per_device_train_batch_size", "8", "--eval_strategy", "no", "--disable_tqdm", "True",
        ]
    )  # fmt: skip
    assert metrics["matrix_transforms"] == 2 * MATRICES[architecture]
    assert metrics["eval_images"] == 359
    saved = json.loads((tmp_path / "eval_results.json").read_text())
    assert saved["eval_accuracy"] == metrics["eval_accuracy"]
    assert AutoModelForImageClassification.from_pretrained(tmp_path).config.num_labels == 10


def test_the_first_and_the_depthwise_convolutions_are_aside() -> None:
    arguments = train_vision.VisionArguments(architecture="convnext", width=16, depth=1)
    model = AutoModelForImageClassification.from_config(train_vision.build_config(arguments))
    table = route_parameters(model)
    assert {r.role for r in table.aux if len(r.shape) == 4} == {"embedding", "depthwise"}
    assert all(r.kind == "matrix" for r in table if "downsampling_layer.1.weight" in r.name)


def test_no_image_is_trained_on_and_held_out() -> None:
    train, held_out = train_vision.load_images(every=5, shift=1)
    assert (len(train), len(held_out)) == (1438, 359)
    seen = {row.numpy().tobytes() for row in train.images}
    assert not any(row.numpy().tobytes() in seen for row in held_out.images)
    assert train.images.aminmax() == held_out.images.aminmax() == (-1.0, 1.0)


def test_images_are_moved_within_their_frame() -> None:
    image = np.zeros((1, 8, 8))
    image[0, 4, 4] = 16
    moved = {tuple(torch.nonzero(train_vision.Digits(image, np.array([3]), 1)[0]["pixel_values"][0] == 1)[0].tolist())
             for _ in range(200)}  # fmt: skip
    assert moved == {(i, j) for i in (3, 4, 5) for j in (3, 4, 5)}


def test_the_committed_configuration_parses() -> None:
    vision, training = parse_args((train_vision.VisionArguments, TrainingArguments), [str(CONFIG)])
    assert (vision.architecture, training.optim) == ("vit", "muon")
    assert training.output_dir.startswith("runs/")
