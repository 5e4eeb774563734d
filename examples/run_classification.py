"""Fine-tune (or train) a text classifier on rows of text and label; accuracy and macro F1 on held-out rows.

    accelerate launch examples/run_classification.py configs/run_classification.yaml
    python examples/run_classification.py --model_name_or_path FOLDER_OR_ID --train_file reviews.csv \\
        --optim muon --learning_rate 1e-4 --output_dir runs/reviews

Files are `.csv`, `.tsv` (with a header) or `.jsonl`; columns `text` and `label` unless named otherwise. Without
`--model_name_or_path` a small BERT with random weights is trained. Metrics go to `OUTPUT_DIR/eval_results.json`.
"""

from __future__ import annotations

import ast
import csv
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_emopt  # noqa: F401  registers "muon" and its kin with TrainingArguments
from hf_emopt.integrations.transformers import unwrap_optimizer
from text_data import stdlib_files, train_tokenizer
from yaml_args import parse_args

Row = tuple[str, str]


@dataclass
class ModelArguments:
    """What to train."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Hub id or local folder to fine-tune."})
    tokenizer_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub id or folder; default: the model's own, or a byte-level BPE trained on the training rows."
        },
    )
    dtype: str = field(default="float32", metadata={"help": "Weights' dtype on loading: float32, bfloat16 or auto."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the BERT trained from scratch."})
    num_layers: int = field(default=2, metadata={"help": "Layers of the BERT trained from scratch."})


@dataclass
class DataArguments:
    """What to train on."""

    dataset: str = field(
        default="stdlib-packages",
        metadata={
            "help": "Which standard library package does a function come from? Eight classes.",
            "choices": ["stdlib-packages"],
        },
    )
    train_file: str | None = field(
        default=None, metadata={"help": "Rows of text and label (.csv, .tsv or .jsonl) instead of --dataset."}
    )
    validation_file: str | None = field(
        default=None, metadata={"help": "Rows to evaluate on; default: every n-th row of the training file."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    label_column: str = field(default="label", metadata={"help": "Column of the label."})
    held_out_every: int = field(default=10, metadata={"help": "Hold out every n-th row."})
    max_length: int = field(default=128, metadata={"help": "Tokens a text is cut to."})
    vocab_size: int = field(default=4096, metadata={"help": "Vocabulary of a tokenizer trained here."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Use at most this many training rows."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Use at most this many held-out rows."})


def read_rows(source: str, text_column: str, label_column: str) -> list[Row]:
    """Rows of a `.csv`, `.tsv` or `.jsonl` file as `(text, label)`, labels as strings.

    Raises:
        ValueError: another suffix, or a row without one of the two columns (the row is named).
    """
    path = Path(source)
    records: list[dict[str, Any]]
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in file if line.strip()]
        elif path.suffix in (".csv", ".tsv"):
            records = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
        else:
            raise ValueError(f"{path}: expected a .csv, .tsv or .jsonl file.")
    rows = []
    for number, record in enumerate(records, start=1):
        for column in (text_column, label_column):
            if record.get(column) is None:
                raise ValueError(
                    f"{path}, record {number}: no '{column}', only {sorted(map(str, record))}. "
                    "Name the columns with --text_column and --label_column."
                )
        rows.append((str(record[text_column]), str(record[label_column])))
    return rows


def outer_functions(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, but none inside another function: its text would stand in two rows, one maybe held out."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from outer_functions(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def stdlib_package_rows(classes: int = 8, per_class: int = 400) -> list[Row]:
    """Functions of the largest standard library packages, labelled by package, classes of equal size.

    Each text is one function's or method's source; duplicates across packages are dropped.
    """
    by_package: dict[str, list[str]] = {}
    root = min((path.parent for path in stdlib_files()), key=lambda folder: len(folder.parts))
    seen: set[str] = set()
    for path in stdlib_files():
        package = path.relative_to(root).parts[0]
        if package.endswith(".py"):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            lines = source.splitlines()
        except (UnicodeDecodeError, SyntaxError):
            continue  # grammar samples of lib2to3 and the like
        for node in outer_functions(tree):
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if text.count("\n") >= 3 and text not in seen:
                seen.add(text)
                by_package.setdefault(package, []).append(text)
    largest = sorted(by_package, key=lambda name: (-len(by_package[name]), name))[:classes]
    size = min(per_class, *(len(by_package[name]) for name in largest))
    return [(text, name) for name in largest for text in by_package[name][:size]]


def split_rows(rows: Sequence[Row], every: int) -> tuple[list[Row], list[Row]]:
    """Hold out each `every`-th row of each label; repeated texts are dropped first, so none is on both sides.

    Raises:
        ValueError: one label alone, or too few rows of every label to hold any out.
    """
    unique = list({text: (text, label) for text, label in rows}.values())
    counts: Counter[str] = Counter()
    train: list[Row] = []
    held_out: list[Row] = []
    for row in unique:
        counts[row[1]] += 1
        (held_out if counts[row[1]] % every == 0 else train).append(row)
    if len(counts) < 2:
        raise ValueError(f"a classifier needs at least two labels, found {sorted(counts)}.")
    if not held_out:
        raise ValueError(f"no label has {every} different texts: lower --held_out_every or give a --validation_file.")
    return train, held_out


class RowDataset(Dataset[dict[str, Any]]):
    """Tokenized rows: `input_ids`, `attention_mask` (and what else the tokenizer returns) and an int `labels`."""

    def __init__(
        self, rows: Sequence[Row], labels: dict[str, int], tokenizer: PreTrainedTokenizerBase, max_length: int
    ) -> None:
        unknown = sorted({label for _, label in rows} - set(labels))
        if unknown:
            raise ValueError(f"labels {unknown} of the held-out rows do not occur in the training rows.")
        self.encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=max_length)
        self.labels = [labels[label] for _, label in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**{key: values[index] for key, values in self.encoded.items()}, "labels": self.labels[index]}


def accuracy_and_f1(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy and the unweighted mean of F1 over the classes that occur in either labels or predictions."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    predicted, labels = np.argmax(logits, axis=-1), np.asarray(prediction.label_ids)
    scores = []
    for label in np.union1d(labels, predicted):
        hits = int(np.sum((predicted == label) & (labels == label)))
        scores.append(2 * hits / int(np.sum(predicted == label) + np.sum(labels == label)))
    return {"accuracy": float(np.mean(predicted == labels)), "f1": float(np.mean(scores))}


def load_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, labels: dict[str, int], max_length: int
) -> PreTrainedModel:
    """A pretrained encoder with a fresh head, or a small BERT with random weights."""
    names = {index: label for label, index in labels.items()}
    if arguments.model_name_or_path:
        return AutoModelForSequenceClassification.from_pretrained(
            arguments.model_name_or_path, dtype=arguments.dtype, num_labels=len(labels), id2label=names, label2id=labels
        )
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=max(1, arguments.hidden_size // 32),
        intermediate_size=4 * arguments.hidden_size,
        max_position_embeddings=max_length,
        pad_token_id=tokenizer.pad_token_id,
        id2label=names,
        label2id=labels,
    )
    return AutoModelForSequenceClassification.from_config(config)


def load_rows(data: DataArguments) -> tuple[list[Row], list[Row]]:
    """Training rows in a fixed shuffled order, and held-out rows."""
    columns = data.text_column, data.label_column
    rows = read_rows(data.train_file, *columns) if data.train_file else stdlib_package_rows()
    if data.validation_file:
        held_out = read_rows(data.validation_file, *columns)
        seen = {text for text, _ in held_out}
        train = [row for row in rows if row[0] not in seen]
    else:
        train, held_out = split_rows(rows, data.held_out_every)
    # Files are often sorted by label; --max_train_rows must not cut whole classes away.
    order = torch.Generator().manual_seed(0)
    train = [train[i] for i in torch.randperm(len(train), generator=order).tolist()]
    held_out = [held_out[i] for i in torch.randperm(len(held_out), generator=order).tolist()]
    return train[: data.max_train_rows], held_out[: data.max_eval_rows]


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, evaluate, save; returns the metrics that `eval_results.json` holds."""
    arguments = (ModelArguments, DataArguments, TrainingArguments)
    model_args, data_args, training_args = parse_args(arguments, sys.argv[1:] if argv is None else argv)
    set_seed(training_args.seed)

    train_rows, held_out_rows = load_rows(data_args)
    labels = {label: index for index, label in enumerate(sorted({label for _, label in train_rows}))}
    name = model_args.tokenizer_name or model_args.model_name_or_path
    tokenizer = (
        AutoTokenizer.from_pretrained(name)
        if name
        else train_tokenizer((text for text, _ in train_rows), data_args.vocab_size, for_classification=True)
    )
    trainer = Trainer(
        model=load_model(model_args, tokenizer, labels, data_args.max_length),
        args=training_args,
        train_dataset=RowDataset(train_rows, labels, tokenizer, data_args.max_length),
        eval_dataset=RowDataset(held_out_rows, labels, tokenizer, data_args.max_length),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy_and_f1,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    metrics["eval_rows"] = len(held_out_rows)
    metrics["global_step"] = trainer.state.global_step
    optimizer = unwrap_optimizer(trainer.optimizer)
    if optimizer is not None:
        metrics["matrix_transforms"] = optimizer.transform_count
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()  # the log, for `hf-emopt report`
    return metrics


if __name__ == "__main__":
    main()
