"""Train a small image classifier from random weights: a vision transformer or a convolutional net on handwritten digits.

    accelerate launch examples/train_vision.py configs/train_vision.yaml
    python examples/train_vision.py configs/train_vision.yaml --architecture resnet --optim adamw_torch --learning_rate 2e-3

The images are scikit-learn's 1,797 scans of 8 x 8 pixels (`pip install scikit-learn`), which come with the package; every
n-th is held out. Metrics go to `OUTPUT_DIR/eval_results.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForImageClassification,
    ConvNextConfig,
    EvalPrediction,
    PreTrainedConfig,
    ResNetConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
    set_seed,
)

import hf_emopt  # noqa: F401  registers "muon" and its kin with TrainingArguments
from hf_emopt.integrations.transformers import unwrap_optimizer
from yaml_args import parse_args

SIZE, CLASSES = 8, 10


@dataclass
class VisionArguments:
    """What to train, and on what."""

    architecture: str = field(
        default="vit", metadata={"help": "Model to build.", "choices": ["vit", "resnet", "convnext"]}
    )
    width: int = field(default=64, metadata={"help": "Hidden size, or channels of the first stage."})
    depth: int = field(default=4, metadata={"help": "Layers of a transformer, or blocks of each of the two stages."})
    channels_last: bool = field(default=False, metadata={"help": "Keep images and convolutions in channels_last."})
    held_out_every: int = field(default=5, metadata={"help": "Hold out every n-th image."})
    shift: int = field(default=1, metadata={"help": "Move training images by up to so many pixels; 0 for not at all."})


def build_config(arguments: VisionArguments) -> PreTrainedConfig:
    """A configuration for images of 8 x 8 grey pixels."""
    width, depth = arguments.width, arguments.depth
    common: dict[str, Any] = {"num_channels": 1, "num_labels": CLASSES}
    if arguments.architecture == "vit":
        return ViTConfig(
            hidden_size=width, num_hidden_layers=depth, num_attention_heads=max(1, width // 16), intermediate_size=4 * width,
            image_size=SIZE, patch_size=2, **common,
        )  # fmt: skip
    stages: dict[str, Any] = {"hidden_sizes": [width, 2 * width], "depths": [depth, depth]}
    if arguments.architecture == "resnet":
        return ResNetConfig(embedding_size=width, layer_type="basic", **stages, **common)
    return ConvNextConfig(num_stages=2, patch_size=2, image_size=SIZE, **stages, **common)


class Digits(Dataset[dict[str, Any]]):
    """`pixel_values` of shape (1, 8, 8), scaled to [-1, 1], and `labels`.

    Args:
        images: (count, 8, 8), 0 to 16.
        labels: (count,).
        shift: images are moved by up to so many pixels in both directions, anew each time.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, shift: int = 0) -> None:
        self.images = torch.from_numpy(images).float()[:, None] / 8 - 1
        self.labels, self.shift = [int(label) for label in labels], shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.images[index]
        if self.shift:
            padded = torch.nn.functional.pad(image, [self.shift] * 4, value=-1.0)
            down, right = torch.randint(2 * self.shift + 1, (2,)).tolist()
            image = padded[:, down : down + SIZE, right : right + SIZE]
        return {"pixel_values": image, "labels": self.labels[index]}


def load_images(every: int, shift: int) -> tuple[Digits, Digits]:
    """Training and held-out images, which none is both of."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, SIZE, SIZE)
    held_out = np.arange(len(labels)) % every == every - 1
    return Digits(images[~held_out], labels[~held_out], shift), Digits(images[held_out], labels[held_out])


def collator(channels_last: bool) -> Callable[[list[dict[str, Any]]], dict[str, Tensor]]:
    """Batches in the memory format of the model's convolutions."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        pixels = torch.stack([row["pixel_values"] for row in rows]).to(memory_format=memory_format)
        return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}

    return collate


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Fraction of images whose label has the largest logit."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float(np.mean(np.argmax(logits, axis=-1) == np.asarray(prediction.label_ids)))}


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; returns the metrics that `eval_results.json` holds."""
    vision, training_args = parse_args((VisionArguments, TrainingArguments), sys.argv[1:] if argv is None else argv)
    set_seed(training_args.seed)

    train, held_out = load_images(vision.held_out_every, vision.shift)
    model: Any = AutoModelForImageClassification.from_config(build_config(vision))
    if vision.channels_last:
        model.to(memory_format=torch.channels_last)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collator(vision.channels_last),
        compute_metrics=accuracy,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    metrics["eval_images"] = len(held_out)
    metrics["global_step"] = trainer.state.global_step
    optimizer = unwrap_optimizer(trainer.optimizer)
    if optimizer is not None:
        metrics["matrix_transforms"] = optimizer.transform_count
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    return metrics


if __name__ == "__main__":
    main()
