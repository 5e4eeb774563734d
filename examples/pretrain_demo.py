"""AdamW against Muon at one learning rate: a small Llama on the interpreter's own standard library.

    python examples/pretrain_demo.py                                    # from scratch, a few minutes on two cores
    python examples/pretrain_demo.py --model_name_or_path FOLDER_OR_ID   # fine-tune that model on the same text instead

Every run starts from the same weights and sees the same batches in the same order; only `TrainingArguments(optim=...)`
changes. Prints a loss table and writes `losses.json` and `curves.png` to `--output_dir`.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

import hf_emopt  # noqa: F401  registers "muon" and its kin with TrainingArguments
from hf_emopt.integrations.transformers import unwrap_optimizer
from text_data import BlockDataset, pack_blocks, split_documents, stdlib_documents, text_documents, train_tokenizer

FROM_SCRATCH_LEARNING_RATE = 2e-3
FINE_TUNE_LEARNING_RATE = 5e-5
LABELS = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW (fused)",
    "muon": "Muon",
    "normuon": "NorMuon",
    "soap": "SOAP",
    "shampoo": "Shampoo",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line of the demo; the learning rate's default depends on whether a model is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="Hub id or local folder to fine-tune instead of a fresh Llama")
    parser.add_argument("--train_file", help="text file or folder to train on instead of the standard library")
    parser.add_argument(
        "--optim", default="adamw_torch,muon", help="comma-separated names for TrainingArguments(optim=)"
    )
    parser.add_argument(
        "--learning_rate",
        type=float,
        help=f"one for every optimizer (default {FROM_SCRATCH_LEARNING_RATE}; {FINE_TUNE_LEARNING_RATE} with a model)",
    )
    parser.add_argument("--max_steps", type=int, default=150)
    parser.add_argument("--eval_steps", type=int, help="default: a tenth of the run")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--block_size", type=int, default=128, help="tokens in a training sequence")
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--hidden_size", type=int, default=192)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--eval_blocks", type=int, default=128, help="held-out blocks evaluated each time")
    parser.add_argument(
        "--max_corpus_mb", type=float, default=8.0, help="stop reading text after this many million characters"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", default="demo-out")
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        args.learning_rate = FINE_TUNE_LEARNING_RATE if args.model_name_or_path else FROM_SCRATCH_LEARNING_RATE
    if args.eval_steps is None:
        args.eval_steps = max(1, args.max_steps // 10)
    args.optim = [name.strip() for name in args.optim.split(",") if name.strip()]
    if not args.optim or len(set(args.optim)) != len(args.optim):
        parser.error("--optim needs one or more different names, e.g. --optim adamw_torch,muon")
    return args


def limit(documents: Sequence[str], max_chars: int) -> list[str]:
    """Every k-th document, k the smallest stride that keeps the corpus under `max_chars`: spread over all packages."""
    stride = -(-sum(map(len, documents)) // max_chars)
    return list(documents[::stride])


def fresh_llama(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama with random weights, tied embeddings and heads of 32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=args.num_layers,
        num_attention_heads=max(1, args.hidden_size // 32),
        max_position_embeddings=args.block_size,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def prepare(args: argparse.Namespace) -> tuple[PreTrainedModel, BlockDataset, BlockDataset]:
    """Model, training blocks and held-out blocks; all of it a function of the arguments and the seed."""
    documents = text_documents(args.train_file) if args.train_file else stdlib_documents()
    documents = limit(documents, int(args.max_corpus_mb * 1e6))
    train_runs, held_out_runs = split_documents(documents, every=50)
    set_seed(args.seed)
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        # fp32 weights: AdamW at fine-tuning rates loses most of its steps in bf16 rounding, which would flatter Muon.
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype="float32")
    else:
        tokenizer = train_tokenizer(("".join(run) for run in train_runs), args.vocab_size, max_chars=4_000_000)
        model = fresh_llama(args, tokenizer)
    needed = args.max_steps * args.batch_size
    train = pack_blocks(train_runs, tokenizer, args.block_size, max_blocks=None if needed > 20_000 else 20_000)
    held_out = pack_blocks(held_out_runs, tokenizer, args.block_size)
    # A spread over the whole hold-out rather than its beginning.
    held_out = held_out[:: max(1, len(held_out) // args.eval_blocks)][: args.eval_blocks]
    print(
        f"{len(documents):,} files, {sum(map(len, documents)) / 1e6:.1f} M characters; "
        f"{train.numel() / 1e6:.2f} M training tokens ({len(train):,} blocks of {args.block_size}), "
        f"{held_out.numel():,} held-out tokens; "
        f"{model.num_parameters() / 1e6:.2f} M parameters"
    )
    return model, BlockDataset(train), BlockDataset(held_out)


class LossBar(TrainerCallback):
    """One progress bar a run with the latest losses beside it, instead of a log line per evaluation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses: dict[str, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar = tqdm(total=state.max_steps, desc=self.name, unit="step", mininterval=1.0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        for key, shown in (("loss", "train"), ("eval_loss", "held_out")):
            if logs and key in logs:
                self.losses[shown] = f"{float(logs[key]):.3f}"
        self.bar.set_postfix(self.losses)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()


def train_once(
    optim: str, model: PreTrainedModel, train: BlockDataset, held_out: BlockDataset, args: argparse.Namespace
) -> dict[str, Any]:
    """One run of the plain Trainer; returns its loss curves, `[[step, loss], ...]`, and seconds."""
    training_args = TrainingArguments(
        output_dir=str(Path(args.output_dir) / "trainer" / optim),
        optim=optim,
        learning_rate=args.learning_rate,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.max_steps // 20),
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        eval_on_start=True,
        logging_steps=args.eval_steps,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
        data_seed=args.seed,
        dataloader_pin_memory=False,
        disable_tqdm=True,  # LossBar shows the progress
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        callbacks=[LossBar(LABELS.get(optim, optim))],
    )
    trainer.remove_callback(PrinterCallback)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    history = trainer.state.log_history
    if trainer.state.global_step % args.eval_steps:
        trainer.evaluate()  # the last step, where it is not a multiple of eval_steps
    optimizer = unwrap_optimizer(trainer.optimizer)
    return {
        "optim": optim,
        "seconds": seconds,
        "train": [[row["step"], row["loss"]] for row in history if "loss" in row],
        "held_out": [[row["step"], row["eval_loss"]] for row in history if "eval_loss" in row],
        "matrix_transforms": 0 if optimizer is None else optimizer.transform_count,
    }


def loss_table(runs: Sequence[dict[str, Any]]) -> str:
    """Held-out and training loss of every run by step, as text."""
    names = [LABELS.get(run["optim"], run["optim"]) for run in runs]
    columns = [f"{name} {kind}" for name in names for kind in ("held-out", "train")]
    lines = ["  step  " + "  ".join(f"{column:>16}" for column in columns)]
    curves = [dict(map(tuple, run[kind])) for run in runs for kind in ("held_out", "train")]
    for step in sorted({step for curve in curves for step in curve}):
        cells = [f"{curve[step]:16.4f}" if step in curve else f"{'-':>16}" for curve in curves]
        lines.append(f"{step:6d}  " + "  ".join(cells))
    lines += ["", "training loss: mean since the row above, in nats per token"]
    for name, run in zip(names, runs, strict=True):
        steps = run["train"][-1][0]
        lines.append(
            f"{name}: held-out {run['held_out'][-1][1]:.4f} after {steps} steps, {run['seconds']:.0f} s with evaluation"
            + (f", {run['matrix_transforms']:,} matrices transformed" if run["matrix_transforms"] else "")
        )
    if len(runs) == 2:
        target = runs[0]["held_out"][-1][1]
        first = next((step for step, loss in runs[1]["held_out"] if loss <= target), None)
        if first is None:
            lines.append(f"{names[1]} did not reach {names[0]}'s final held-out loss.")
        else:
            lines.append(f"{names[1]} was at or below {names[0]}'s final held-out loss by step {first}.")
    return "\n".join(lines)


def plot(runs: Sequence[dict[str, Any]], learning_rate: float, path: Path) -> None:
    """Write both curves of every run: held-out solid with points, training dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, run in enumerate(runs):
        name = LABELS.get(run["optim"], run["optim"])
        axes.plot(*zip(*run["held_out"], strict=True), f"C{index}o-", markersize=3, label=f"{name}, held out")
        axes.plot(*zip(*run["train"], strict=True), f"C{index}--", alpha=0.5, label=f"{name}, training")
    axes.set(
        xlabel="step",
        ylabel="loss (nats per token)",
        title=f"Same model, same batches, learning rate {learning_rate:g}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run every optimizer, then print the table and write the files; returns what `losses.json` holds."""
    args = parse(argv)
    output = Path(args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    model, train, held_out = prepare(args)
    initial = copy.deepcopy(model.state_dict())
    runs = []
    for optim in args.optim:
        name = LABELS.get(optim, optim)
        print(f"\n{name}: optim={optim!r}, learning rate {args.learning_rate:g}, {args.max_steps} steps")
        model.load_state_dict(initial)
        runs.append(train_once(optim, model, train, held_out, args))
    result = {"arguments": vars(args), "runs": runs}
    (output / "losses.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(runs, args.learning_rate, output / "curves.png")
    print(f"\n{loss_table(runs)}\n\nwrote {output / 'losses.json'} and {output / 'curves.png'}")
    return result


if __name__ == "__main__":
    main()
