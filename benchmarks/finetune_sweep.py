"""Learning-rate sweeps of several optimizers side by side on one model and one data set, through the plain Trainer.

    python benchmarks/realdata.py runs/data
    python benchmarks/finetune_sweep.py run --task clm --model ~/.cache/hf_emopt_realdata/smollm2-135m \\
        --data runs/data/state_of_the_union --optim adamw_torch muon --lr 1e-5 3e-5 1e-4 --seeds 0 1 \\
        --max_steps 60 --out runs/smollm2.json
    python benchmarks/finetune_sweep.py render runs/smollm2.json --png runs/smollm2.png

An optimizer may be tried in several forms, each a column of its own: `--optim muon "muon:lora=joint"` is `muon` as it is
and with `optim_args="lora=joint"`. `--processes` runs that many points at a time on one device, `--eval_steps` keeps the
held-out curve of every point, and `race` says in which step one optimizer reached another's final loss.

Every point starts from the same checkpoint; points of one seed see the same batches in the same order (and, for
classification, the same fresh head). Data is tokenized once. A finished point is written to the JSON at once, and a
point that the JSON already holds under the same settings is not run again. With a matrix optimizer each point checks
that every matrix was transformed exactly once per optimizer step.

`--task clm` takes text (`--data` FILE or FOLDER) and reports held-out loss in nats per token; `--task classification`
takes rows (`.csv`, `.tsv`, `.jsonl` with columns text and label) and reports held-out accuracy. Both need `torch`,
`transformers`, `accelerate`; `render --png` needs `matplotlib`; `--lora_r` needs `peft`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import hf_emopt
from finetune_report import METRICS, plot, race, table
from hf_emopt.integrations.transformers import unwrap_optimizer
from run_classification import RowDataset, accuracy_and_f1, read_rows, split_rows
from text_data import BlockDataset, pack_blocks, split_documents, text_documents

# What makes two points comparable; a JSON holds points of one such setting only.
SETTINGS = (
    "task", "model", "data", "max_steps", "batch_size", "accumulation", "length", "schedule", "warmup_steps",
    "weight_decay", "adam_beta2", "max_grad_norm", "dtype", "bf16", "lora_r", "lora_alpha", "eval_rows", "train_rows",
    "eval_steps",
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the points and print the table")
    run.add_argument("--task", choices=sorted(METRICS), required=True)
    run.add_argument("--model", required=True, help="checkpoint folder or Hub id")
    run.add_argument("--data", required=True, help="text file or folder (clm), file of rows (classification)")
    run.add_argument("--optim", nargs="+", default=["adamw_torch", "muon"], help="NAME, or NAME:ARGS with optim_args")
    run.add_argument("--lr", nargs="+", type=float, required=True, help="learning rates tried by every optimizer")
    run.add_argument("--seeds", nargs="+", type=int, default=[0])
    run.add_argument("--optim_args", action="append", default=[], metavar="OPTIM:ARGS", help="e.g. muon:ns_steps=6")
    run.add_argument("--max_steps", type=int, required=True)
    run.add_argument("--batch_size", type=int, default=8)
    run.add_argument("--accumulation", type=int, default=1)
    run.add_argument("--length", type=int, default=256, help="tokens in a block, or a text is cut to")
    run.add_argument("--schedule", default="cosine")
    run.add_argument("--warmup_steps", type=int, help="default: a tenth of the steps")
    run.add_argument("--weight_decay", type=float, default=0.01)
    run.add_argument("--adam_beta2", type=float, default=0.999)
    run.add_argument("--max_grad_norm", type=float, default=1.0)
    run.add_argument("--dtype", default="float32", help="dtype of the weights")
    run.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    run.add_argument(
        "--lora_r", type=int, default=0, help="rank of adapters on all linear layers; 0 trains every weight"
    )
    run.add_argument("--lora_alpha", type=int, help="LoRA scale; default 2 x rank")
    run.add_argument("--eval_rows", type=int, help="held-out blocks or rows, spread evenly; default all")
    run.add_argument("--train_rows", type=int, help="training blocks or rows; default all")
    run.add_argument("--eval_steps", type=int, help="evaluate this often while training too; default only after it")
    run.add_argument("--processes", type=int, default=1, help="points that share the device at a time")
    run.add_argument("--out", type=Path, required=True, help="JSON file, continued if it exists")
    render = commands.add_parser("render", help="print the table of a JSON, and draw it")
    render.add_argument("json", type=Path, nargs="+", help="several are drawn together, by the dtype of their weights")
    render.add_argument("--png", type=Path)
    race = commands.add_parser("race", help="steps in which one optimizer reaches another's final held-out loss")
    race.add_argument("json", type=Path, help="result of a run with --eval_steps")
    race.add_argument("--optim", required=True, help="whose steps are counted, as in the run")
    race.add_argument("--against", default="adamw_torch", help="whose final loss, at its best rate, is to be reached")
    args = parser.parse_args(argv)
    if args.command == "run" and args.warmup_steps is None:
        args.warmup_steps = args.max_steps // 10
    if args.command == "run" and args.lora_r and args.lora_alpha is None:
        args.lora_alpha = 2 * args.lora_r
    return args


class Task:
    """Tokenized data of a task, and how a fresh model is made; both shared by all points."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(args.model)
        self.labels: dict[str, int] = {}
        train, held_out = self._blocks() if args.task == "clm" else self._rows()
        self.train: Dataset[Any] = train
        self.held_out: Dataset[Any] = held_out

    def _blocks(self) -> tuple[Dataset[Any], Dataset[Any]]:
        args = self.args
        train_runs, held_out_runs = split_documents(text_documents(args.data), every=50)
        held_out = pack_blocks(held_out_runs, self.tokenizer, args.length)
        if args.eval_rows:
            held_out = held_out[:: max(1, len(held_out) // args.eval_rows)][: args.eval_rows]
        train = pack_blocks(train_runs, self.tokenizer, args.length)
        if args.train_rows:
            train = train[:: max(1, len(train) // args.train_rows)][: args.train_rows]
        return BlockDataset(train), BlockDataset(held_out)

    def _rows(self) -> tuple[Dataset[Any], Dataset[Any]]:
        args = self.args
        train, held_out = split_rows(read_rows(args.data, "text", "label"), every=10)
        if args.eval_rows:
            held_out = held_out[:: max(1, len(held_out) // args.eval_rows)][: args.eval_rows]
        if args.train_rows:
            train = train[:: max(1, len(train) // args.train_rows)][: args.train_rows]
        self.labels = {label: index for index, label in enumerate(sorted({label for _, label in train}))}
        return (
            RowDataset(train, self.labels, self.tokenizer, args.length),
            RowDataset(held_out, self.labels, self.tokenizer, args.length),
        )

    def model(self, seed: int) -> Any:
        """The checkpoint, anew; what it lacks (a classifier's head, adapters) is drawn from `seed`."""
        set_seed(seed)
        args = self.args
        if args.task == "clm":
            model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(
                args.model, dtype=args.dtype, num_labels=len(self.labels)
            )
        if args.lora_r:
            from peft import LoraConfig, get_peft_model

            kind = "CAUSAL_LM" if args.task == "clm" else "SEQ_CLS"
            config = LoraConfig(task_type=kind, r=args.lora_r, lora_alpha=args.lora_alpha, target_modules="all-linear")
            model = get_peft_model(model, config)
        return model


def training_arguments(
    args: argparse.Namespace, optim: str, learning_rate: float, seed: int, folder: str
) -> TrainingArguments:
    """The one difference between two points of a seed is `optim` (with its `optim_args`) and the learning rate."""
    shared = dict(item.split(":", 1) for item in args.optim_args)
    name, _, own = optim.partition(":")
    return TrainingArguments(
        output_dir=folder,
        optim=name,
        optim_args=",".join(part for part in (shared.get(name), own) if part) or None,
        learning_rate=learning_rate,
        lr_scheduler_type=args.schedule,
        warmup_steps=args.warmup_steps,
        weight_decay=args.weight_decay,
        adam_beta2=args.adam_beta2,
        max_grad_norm=args.max_grad_norm,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        # Logits of a vocabulary in float32 take more than the training step.
        per_device_eval_batch_size=args.batch_size if args.task == "clm" else 4 * args.batch_size,
        prediction_loss_only=args.task == "clm",
        gradient_accumulation_steps=args.accumulation,
        bf16=args.bf16,
        logging_steps=max(1, args.max_steps // 10),
        save_strategy="no",
        eval_strategy="steps" if args.eval_steps else "no",
        eval_steps=args.eval_steps,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        data_seed=seed,
        dataloader_pin_memory=torch.cuda.is_available(),
    )


def check_transforms(optimizer: Any, steps: int) -> dict[str, int]:
    """Number of matrices and of their transforms, checked: one transform a matrix and step; empty for other optimizers.

    Raises:
        RuntimeError: the count is another.
    """
    optimizer = unwrap_optimizer(optimizer)
    if optimizer is None:
        return {}
    matrices = optimizer.routes.matrix_count
    if optimizer.transform_count != matrices * steps or optimizer.skipped_steps:
        raise RuntimeError(
            f"{optimizer.transform_count} transforms and {optimizer.skipped_steps} skipped steps, "
            f"expected {matrices} matrices x {steps} steps = {matrices * steps}."
        )
    return {"matrices": matrices, "matrix_transforms": optimizer.transform_count}


def run_point(task: Task, optim: str, learning_rate: float, seed: int) -> dict[str, Any]:
    """Train and evaluate one point; seconds are the training loop's, without loading and evaluation."""
    args = task.args
    classification = args.task == "classification"
    trainer = Trainer(
        model=task.model(seed),
        args=training_arguments(args, optim, learning_rate, seed, str(args.out.with_suffix("")) + "-trainer"),
        train_dataset=task.train,
        eval_dataset=task.held_out,
        processing_class=task.tokenizer,
        data_collator=DataCollatorWithPadding(task.tokenizer) if classification else default_data_collator,
        compute_metrics=accuracy_and_f1 if classification else None,
    )
    trainer.remove_callback(PrinterCallback)  # one line a point is printed instead
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    metric, _ = METRICS[args.task]
    point = {
        "optim": optim,
        "lr": learning_rate,
        "seed": seed,
        "steps": trainer.state.global_step,
        "train_seconds": round(seconds, 3),
        "train_loss": [[row["step"], row["loss"]] for row in trainer.state.log_history if "loss" in row],
        "held_out": [[row["step"], row[metric]] for row in trainer.state.log_history if metric in row],
        **check_transforms(trainer.optimizer, trainer.state.global_step),
        **{key: value for key, value in trainer.evaluate().items() if key.startswith("eval_") and "_per_" not in key},
    }
    if torch.cuda.is_available():
        point["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    return point


def before_training(task: Task, seed: int) -> dict[str, float]:
    """Held-out metrics of the model as it starts."""
    args = training_arguments(task.args, "adamw_torch", 0.0, seed, str(task.args.out.with_suffix("")) + "-trainer")
    classification = task.args.task == "classification"
    trainer = Trainer(
        model=task.model(seed),
        args=args,
        eval_dataset=task.held_out,
        processing_class=task.tokenizer,
        data_collator=DataCollatorWithPadding(task.tokenizer) if classification else default_data_collator,
        compute_metrics=accuracy_and_f1 if classification else None,
    )
    return {key: value for key, value in trainer.evaluate().items() if key.startswith("eval_") and "_per_" not in key}


def environment() -> dict[str, str]:
    """What a reader needs to place the numbers."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "device": device,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_emopt": hf_emopt.__version__,
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Replace the file in one step, so that an interrupted sweep leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def open_result(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON so far, or a new one.

    Raises:
        ValueError: the file holds points of other settings.
    """
    settings = {key: getattr(args, key) for key in SETTINGS} | {"optim_args": sorted(args.optim_args)}
    if not args.out.exists():
        return {"settings": settings, "environment": environment(), "points": []}
    result: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8"))
    differing = {
        key: (result["settings"].get(key), value)
        for key, value in settings.items()
        if result["settings"].get(key) != value
    }
    if differing:
        raise ValueError(f"{args.out} holds points of other settings (file, now): {differing}. Give another --out.")
    return result


def run(args: argparse.Namespace, point: Callable[..., dict[str, Any]] = run_point) -> dict[str, Any]:
    """Run every point that the JSON lacks."""
    result = open_result(args)
    done = {(p["optim"], p["lr"], p["seed"]) for p in result["points"]}
    wanted = [(optim, lr, seed) for seed in args.seeds for lr in args.lr for optim in args.optim]
    missing = [key for key in wanted if key not in done]
    if not missing:
        return result
    args.optim = list(dict.fromkeys(args.optim))
    task = Task(args)
    result["data"] = {"train": len(task.train), "held_out": len(task.held_out)}  # type: ignore[arg-type]
    if "before" not in result:
        result["before"] = before_training(task, args.seeds[0])
    metric, _ = METRICS[args.task]
    for number, last in enumerate(_points(args, task, missing, point), start=1):
        result["points"].append(last)
        write(args.out, result)
        print(
            f"[{number}/{len(missing)}] {last['optim']} lr {last['lr']:g} seed {last['seed']}: {metric} {last[metric]:.4f}, "
            f"{last['train_seconds']:.1f} s"
            + (f", {last['matrices']} matrices x {last['steps']} steps" if "matrices" in last else ""),
            flush=True,
        )
    return result


def _points(
    args: argparse.Namespace, task: Task, missing: list[tuple[str, float, int]], point: Callable[..., dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The missing points as they are done, several at a time where asked for.

    What fails beside others (they share the device's memory) is run once more by itself; what fails there ends the run.
    """
    alone = missing
    if args.processes > 1:
        alone = []
        workers = min(args.processes, len(missing))
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (args, workers)) as pool:
            running = {pool.submit(_worker_point, key): key for key in missing}
            for done in concurrent.futures.as_completed(running):
                problem = done.exception()
                if problem is None:
                    yield done.result()
                    continue
                print(
                    f"{running[done]} failed beside others, again later: {type(problem).__name__}: {problem}"[:300],
                    flush=True,
                )
                alone.append(running[done])
    for key in alone:
        yield point(task, *key)
        gc.collect()


_WORKER: dict[str, Task] = {}


def _start_worker(args: argparse.Namespace, workers: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    args.out = args.out.with_name(f"{args.out.stem}-{os.getpid()}{args.out.suffix}")  # names the trainer's own folder
    _WORKER["task"] = Task(args)


def _worker_point(key: tuple[str, float, int]) -> dict[str, Any]:
    gc.collect()
    return run_point(_WORKER["task"], *key)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == "run":
        print(table(run(args)))
        return
    if args.command == "race":
        print(race(json.loads(args.json.read_text(encoding="utf-8")), args.optim, args.against))
        return
    results = [json.loads(path.read_text(encoding="utf-8")) for path in args.json]
    if len({result["settings"]["task"] for result in results}) > 1:
        raise SystemExit("results of different tasks have no axis in common: render them one by one")
    print("\n\n".join(table(result) for result in results))
    if args.png:
        plot(results, args.png)


if __name__ == "__main__":
    main()
