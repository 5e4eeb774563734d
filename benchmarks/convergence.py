"""Steps and seconds to a loss: a small Llama from scratch under several optimizers, with a learning-rate sweep of each.

    python benchmarks/convergence.py tokens runs/stdlib.npz          # once: the standard library, or --texts FOLDER
    python benchmarks/convergence.py run runs/stdlib.npz --out runs/convergence.json --seeds 1 2 \\
        --search adamw:400:2e-3 --search muon:180:8e-3 --search soap:200:4e-3 --lengths muon:160,200
    python benchmarks/convergence.py render runs/convergence.json --png docs/convergence.png

Every run has the same initial weights and the same batches for a seed, a schedule of its own length (warm-up, then cosine to
a tenth), and is evaluated on the same held-out blocks at every twentieth of it. A finished run is written to the JSON at
once, and one that is there under the same settings is not run again. With a matrix optimizer each run checks that every
matrix was transformed once a step.

`--search NAME:STEPS:RATE` tries rates on both sides of one, each a factor from the next, until the best of at least five has
a worse one on either side; `--seeds` repeats the best, `--lengths` runs it for other numbers of steps. What is asked: in how
many steps, of a run with a schedule of that length, does an optimizer reach the final loss of the best AdamW at that seed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import hf_emopt
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.integrations.transformers import OPTIMIZERS
from hf_emopt.optimizers.base import MatrixOptimizer

SETTINGS = (
    "data", "batch", "length", "eval_blocks", "warmup", "hidden", "layers", "mlp", "weight_decay", "precision",
)  # fmt: skip


def make_tokens(out: Path, vocab_size: int, texts: Path | None, every: int = 50, piece_chars: int = 4096) -> None:
    """Trains a byte-level BPE on the standard library, or on texts, and stores training and held-out tokens as uint16."""
    from text_data import split_documents, stdlib_documents, text_documents, train_tokenizer

    documents = stdlib_documents() if texts is None else text_documents(texts)
    train, held_out = split_documents(documents, every, piece_chars)
    # A tenth of the runs, evenly: documents stand in alphabetical order, and the tokenizer reads only so many characters.
    tokenizer = train_tokenizer(("".join(run) for run in (train if texts is None else train[::5])), vocab_size)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    arrays = {}
    for name, runs in (("train", train), ("held_out", held_out)):
        ids: list[int] = []
        for run in runs:
            ids += tokenizer("".join(run))["input_ids"] + [end]
        arrays[name] = np.array(ids, dtype=np.uint16)
        print(f"{name}: {len(ids):,} tokens")
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, vocab_size=np.array(len(tokenizer)), train=arrays["train"], held_out=arrays["held_out"])


def build_optimizer(name: str, model: nn.Module, lr: float, weight_decay: float) -> Any:
    """AdamW fused with decay on matrices and embeddings, or one of ours with the same settings for its AdamW part.

    ``name`` is an optimizer's, with its options after an ``@``: ``soap@refresh=synchronous,precondition_frequency=5``.
    """
    if name == "adamw":
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    base, _, options = name.partition("@")
    cls: Any = OPTIMIZERS[base]
    given = parse_optim_args(options or None, cls)
    return cls(model, lr=lr, weight_decay=weight_decay, **{"aux_betas": (0.9, 0.95), **given})


def batches(tokens: torch.Tensor, args: argparse.Namespace, seed: int) -> Iterator[torch.Tensor]:
    """Blocks in a new order each epoch, the order a function of the seed; on the device of the tokens."""
    blocks = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator).to(tokens.device)
        for start in range(0, len(order) - args.batch + 1, args.batch):
            yield blocks[order[start : start + args.batch]].long()


class Runner:
    """A model that is compiled once and set back for each run."""

    def __init__(self, args: argparse.Namespace, arrays: Any) -> None:
        self.args = args
        self.device = torch.device(args.device)
        # On the device from the start: a copy out of pageable memory would make the host wait at every step.
        self.train = torch.from_numpy(arrays["train"].astype(np.int32)).to(self.device)
        held_out = torch.from_numpy(arrays["held_out"].astype(np.int64)).to(self.device)
        held_out = held_out[: len(held_out) // args.length * args.length].view(-1, args.length)
        self.held_out = held_out[:: max(1, len(held_out) // args.eval_blocks)][: args.eval_blocks]
        config = LlamaConfig(
            vocab_size=int(arrays["vocab_size"]), hidden_size=args.hidden, intermediate_size=args.mlp,
            num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, max_position_embeddings=args.length,
            tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        self.model = model.to(self.device)
        self.forward = torch.compile(self.loss) if args.compile else self.loss

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.args.precision == "bf16"):
            logits = self.model(input_ids=ids).logits
        return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

    def reset(self, seed: int) -> None:
        """Initial weights as a function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim >= 2:
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
                else:
                    parameter.fill_(1.0)

    def warm(self) -> None:
        """Compiles and loads what the runs need, so that the first one's seconds are like the others'."""
        for _ in range(2):
            self.evaluate()
            self.forward(next(batches(self.train, self.args, 0))).backward()
        self.model.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        losses = [self.forward(part) for part in self.held_out.split(self.args.batch)]
        sizes = [len(part) for part in self.held_out.split(self.args.batch)]
        return sum(float(x) * n for x, n in zip(losses, sizes)) / sum(sizes)

    def run(self, name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
        """One run: its curve, seconds without evaluation, and optimizer seconds."""
        args = self.args
        self.reset(seed)
        self.model.train()
        optimizer = build_optimizer(name, self.model, lr, args.weight_decay)
        peak = [group["lr"] for group in optimizer.param_groups]
        data = batches(self.train, args, seed)
        every = max(1, steps // 20)
        curve, elapsed, started = [(0, self.evaluate(), 0.0)], 0.0, self._now()
        for step in range(1, steps + 1):
            factor = _schedule(step, steps, args.warmup)
            for group, top in zip(optimizer.param_groups, peak):
                group["lr"] = top * factor
            loss = self.forward(next(data))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0 or step == steps:
                elapsed += self._now() - started
                curve.append((step, self.evaluate(), elapsed))
                if not np.isfinite(curve[-1][1]):
                    break
                started = self._now()
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "CPU"
        point = {"optim": name, "lr": lr, "seed": seed, "steps": steps, "curve": curve, "device": device}
        if isinstance(optimizer, MatrixOptimizer):
            expected = optimizer.routes.matrix_count * step
            if optimizer.transform_count != expected:
                raise RuntimeError(
                    f"{name}: {optimizer.transform_count} transforms in {step} steps, expected {expected}"
                )
            point["transforms"] = optimizer.transform_count
        return point

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _schedule(step: int, steps: int, warmup: int) -> float:
    if step <= warmup:
        return step / warmup
    return 0.1 + 0.45 * (1 + float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup))))


def final(point: dict[str, Any]) -> float:
    """Held-out loss at the end; infinite for a run that left the numbers."""
    loss = float(point["curve"][-1][1])
    return loss if np.isfinite(loss) else float("inf")


def sweep_steps(points: Sequence[dict[str, Any]], name: str) -> int:
    """The number of steps at which most rates of an optimizer were tried."""
    rates: dict[int, set[float]] = {}
    for p in points:
        if p["optim"] == name:
            rates.setdefault(p["steps"], set()).add(p["lr"])
    return max(rates, key=lambda steps: (len(rates[steps]), steps))


def sweep(points: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(learning rate, final loss) of the first seed at that number of steps, by rate."""
    steps = sweep_steps(points, name)
    mine = [p for p in points if p["optim"] == name and p["steps"] == steps]
    first = min(p["seed"] for p in mine)
    return sorted((p["lr"], final(p)) for p in mine if p["seed"] == first)


def best_rate(points: Sequence[dict[str, Any]], name: str) -> float:
    """The learning rate of the sweep with the lowest final loss."""
    return min(sweep(points, name), key=lambda row: row[1])[0]


class Study:
    """The points of one set of settings, in a file; runs what is asked for and not there."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        settings = {key: str(getattr(args, key)) if key == "data" else getattr(args, key) for key in SETTINGS}
        settings["data"] = Path(settings["data"]).name
        self.result: dict[str, Any] = {"settings": settings, "points": []}
        if args.out.exists():
            self.result = json.loads(args.out.read_text())
            if self.result["settings"] != settings:
                raise SystemExit(
                    f"{args.out} holds runs of other settings: {self.result['settings']}; choose another --out"
                )
        self.result["environment"] = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU",
            "torch": torch.__version__, "transformers": transformers.__version__, "hf_emopt": hf_emopt.__version__,
        }  # fmt: skip
        self.points: list[dict[str, Any]] = self.result["points"]
        self.deadline = time.monotonic() + args.seconds
        self.runner: Runner | None = None

    def point(self, name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
        """One run, from the file if it is there.

        Raises:
            SystemExit: the time is up; what is done is in the file.
        """
        key = (name, lr, seed, steps)
        for p in self.points:
            if (p["optim"], p["lr"], p["seed"], p["steps"]) == key:
                return p
        if self.runner is None:
            self.runner = Runner(self.args, np.load(self.args.data))
            self.runner.warm()
        if time.monotonic() > self.deadline:
            raise SystemExit("out of time; the rest is left for another call")
        point = self.runner.run(*key)
        self.points.append(point)
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.args.out.with_suffix(".partial")
        partial.write_text(json.dumps(self.result))
        partial.replace(self.args.out)
        print(
            f"{name} lr {lr:g} seed {seed}: {final(point):.4f} after {steps} steps, {point['curve'][-1][2]:.1f} s",
            flush=True,
        )
        return point

    def search(self, name: str, steps: int, center: float) -> float:
        """The best rate, between worse ones on either side, of at least five a factor apart; given up after nine."""
        seed, rates = self.args.seed, [center]
        losses = {center: final(self.point(name, center, seed, steps))}
        while len(rates) < 9:
            at = rates.index(min(rates, key=lambda lr: losses[lr]))
            if len(rates) >= 5 and 0 < at < len(rates) - 1:
                return rates[at]
            down = at < len(rates) - 1 - at or (at == len(rates) - 1 - at and len(rates) % 2 == 1)
            lr = float(f"{rates[0] / self.args.factor if down else rates[-1] * self.args.factor:.2g}")
            rates.insert(0 if down else len(rates), lr)
            losses[lr] = final(self.point(name, lr, seed, steps))
        return min(rates, key=lambda lr: losses[lr])


def run(args: argparse.Namespace) -> None:
    """What is missing of the points, searches, seeds and lengths asked for, in this order for each optimizer."""
    study = Study(args)
    for text in args.point:
        name, rates = text.rsplit(":", 1)
        for lr in rates.split(","):
            study.point(name, float(lr), args.seed, args.steps)
    lengths = dict(text.rsplit(":", 1) for text in args.lengths)
    for text in args.search:
        name, steps, center = text.rsplit(":", 2)
        best = study.search(name, int(steps), float(center))
        for seed in args.seeds:
            study.point(name, best, seed, int(steps))
        for other in lengths.pop(name, "").split(",") if lengths.get(name) else ():
            study.point(name, best, args.seed, int(other))
    for name, others in lengths.items():
        for other in others.split(","):
            study.point(name, best_rate(study.points, name), args.seed, int(other))


def adamw_losses(points: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Final losses of AdamW's runs at its best rate, as long as those of its sweep; by seed."""
    lr, steps = best_rate(points, "adamw"), sweep_steps(points, "adamw")
    return {p["seed"]: final(p) for p in points if (p["optim"], p["lr"], p["steps"]) == ("adamw", lr, steps)}


def steps_to(points: Sequence[dict[str, Any]], name: str, target: dict[int, float]) -> float | None:
    """Length of a run at the best rate that ends at a loss, between two lengths that were run; ``None`` outside of them.

    Losses are less the target of their seed, and the mean over the seeds of a length.
    """
    lr = best_rate(points, name)
    apart: dict[int, list[float]] = {}
    for p in points:
        if p["optim"] == name and p["lr"] == lr and p["seed"] in target:
            apart.setdefault(p["steps"], []).append(final(p) - target[p["seed"]])
    rows = sorted((steps, statistics.fmean(over)) for steps, over in apart.items())
    for (s0, d0), (s1, d1) in itertools.pairwise(rows):
        if d1 <= 0 <= d0:
            return s0 + (s1 - s0) * (d0 / (d0 - d1) if d0 > d1 else 1.0)
    return None


def table(result: dict[str, Any]) -> str:
    """Markdown: the sweeps, then each optimizer against the best AdamW."""
    points = result["points"]
    names = list(dict.fromkeys(p["optim"] for p in points))
    lines = ["| optimizer | steps | learning rate: final held-out loss |", "|---|---|---|"]
    for name in names:
        best = best_rate(points, name)
        cells = [f"{lr:g}: **{x:.3f}**" if lr == best else f"{lr:g}: {x:.3f}" for lr, x in sweep(points, name)]
        lines.append(f"| {name} | {sweep_steps(points, name)} | {', '.join(cells)} |")
    steps, target = sweep_steps(points, "adamw"), adamw_losses(points)
    per_step = {name: _milliseconds(points, name) for name in names}
    lines += [
        "",
        f"Target: the final loss of AdamW's best learning rate after {steps} steps at the same seed, "
        f"{statistics.mean(target.values()):.3f} in the mean of {len(target)} seed(s).",
        "",
        "| optimizer | lr | steps, and of AdamW's | final loss by seed | reached | ms a step | seconds of AdamW's | "
        "steps to the target, of AdamW's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        best, own = best_rate(points, name), sweep_steps(points, name)
        for length in sorted({p["steps"] for p in points if p["optim"] == name and p["lr"] == best}):
            mine = [
                p for p in points if (p["optim"], p["lr"], p["steps"]) == (name, best, length) and p["seed"] in target
            ]
            if not mine:
                continue
            reached = sum(final(p) <= target[p["seed"]] for p in mine)
            exact = steps_to(points, name, target) if length == own else None
            lines.append(
                f"| {name} | {best:g} | {length}, {length / steps:.2f} | {', '.join(f'{final(p):.3f}' for p in mine)} | "
                f"{reached} of {len(mine)} | {per_step[name]:.1f} | "
                f"{length * per_step[name] / (steps * per_step['adamw']):.2f} | {f'{exact / steps:.2f}' if exact else ''} |"
            )
    return "\n".join(lines)


def _milliseconds(points: Sequence[dict[str, Any]], name: str) -> float:
    """A step of an optimizer, median over its runs: the first one of a process also compiles.

    Runs marked ``beside_others`` shared their machine and count only where there are no others.
    """
    runs = [p for p in points if p["optim"] == name]
    alone = [p for p in runs if not p.get("beside_others")]
    return statistics.median(1000 * p["curve"][-1][2] / p["curve"][-1][0] for p in alone or runs)


def shown_run(points: Sequence[dict[str, Any]], name: str, target: dict[int, float]) -> dict[str, Any]:
    """Of the first seed's runs at the best rate, the shortest that ends at the target or below it; else the longest."""
    lr = best_rate(points, name)
    runs = [p for p in points if p["optim"] == name and p["lr"] == lr]
    mine = [p for p in runs if p["seed"] == min(q["seed"] for q in runs)]
    reached = [p for p in mine if final(p) <= target.get(p["seed"], -np.inf)]
    return min(reached, key=lambda p: p["steps"]) if reached else max(mine, key=lambda p: p["steps"])


def plot(result: dict[str, Any], png: Path) -> None:
    """The sweeps, and over steps and seconds the curve of one run of each optimizer, that of :func:`shown_run`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    points = result["points"]
    names = list(dict.fromkeys(p["optim"] for p in points))
    bases = [name.partition("@")[0] for name in names]
    target = adamw_losses(points)
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.2))
    colors = plt.get_cmap("tab10" if len(names) <= 10 else "tab20")
    for number, (name, base) in enumerate(zip(names, bases)):
        color = colors(number % colors.N)
        short = base if bases.count(base) == 1 else name
        best, own, ms = best_rate(points, name), sweep_steps(points, name), _milliseconds(points, name)
        axes[0].plot(
            *zip(*[row for row in sweep(points, name) if np.isfinite(row[1])]),
            marker="o",
            color=color,
            label=f"{short}: sweep of {own} steps, best lr {best:g}",
        )
        steps, losses, _ = zip(*shown_run(points, name, target)["curve"][1:])
        axes[1].plot(steps, losses, color=color)
        axes[2].plot([step * ms / 1000 for step in steps], losses, color=color)
    for axis, label in zip(axes, ("learning rate", "steps", "seconds")):
        axis.set_xlabel(label)
        axis.set_ylabel("held-out loss")
        axis.grid(alpha=0.3)
    for axis in axes[1:]:  # how they begin would flatten how they end
        axis.axhline(target[min(target)], color="gray", linestyle=":")
        axis.set_ylim(top=min(p["curve"][0][1] for p in points) * 0.55)
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes[0].xaxis.set_minor_formatter(NullFormatter())
    # Below the panels: inside them it would hide points.
    columns = 3 if max(len(line.get_label()) for line in axes[0].lines) < 60 else 2
    figure.legend(loc="lower center", ncol=columns, fontsize="small")
    figure.tight_layout(rect=(0, 0.03 + 0.04 * -(-len(names) // columns), 1, 1))
    figure.savefig(png, dpi=110)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens", help="tokenize the standard library, or texts")
    tokens.add_argument("data", type=Path)
    tokens.add_argument("--texts", type=Path, help="a text file or a folder of them")
    tokens.add_argument("--vocab_size", type=int, default=8192)
    tokens.add_argument("--held_out_every", type=int, default=50, help="pieces")
    tokens.add_argument("--piece_chars", type=int, default=4096)
    runs = commands.add_parser("run", help="run what is missing")
    runs.add_argument("data", type=Path)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--point", action="append", default=[], metavar="OPTIM[@OPTIONS]:LR,LR", help="runs of --steps")
    runs.add_argument("--search", action="append", default=[], metavar="OPTIM[@OPTIONS]:STEPS:LR", help="the best rate")
    runs.add_argument("--factor", type=float, default=1.6, help="between neighbouring rates of a search")
    runs.add_argument("--seeds", type=int, nargs="*", default=[], help="more seeds at the best rate of a search")
    runs.add_argument(
        "--lengths",
        action="append",
        default=[],
        metavar="OPTIM[@OPTIONS]:STEPS,STEPS",
        help="other lengths at that rate",
    )
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--steps", type=int, default=400)
    runs.add_argument("--batch", type=int, default=16)
    runs.add_argument("--length", type=int, default=1024)
    runs.add_argument("--eval_blocks", type=int, default=128)
    runs.add_argument("--warmup", type=int, default=20)
    runs.add_argument("--hidden", type=int, default=512)
    runs.add_argument("--layers", type=int, default=6)
    runs.add_argument("--mlp", type=int, default=1408)
    runs.add_argument("--weight_decay", type=float, default=0.1)
    runs.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    runs.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    runs.add_argument("--compile", action="store_true", help="torch.compile the forward and backward")
    runs.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this")
    render = commands.add_parser("render", help="print the tables, draw the curves")
    render.add_argument("json", type=Path)
    render.add_argument("--png", type=Path)
    render.add_argument("--only", nargs="*", metavar="OPTIM[@OPTIONS]", help="these, in this order")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == "tokens":
        make_tokens(args.data, args.vocab_size, args.texts, args.held_out_every, args.piece_chars)
    elif args.command == "run":
        run(args)
    else:
        result = json.loads(args.json.read_text())
        if args.only:
            result["points"] = [p for name in args.only for p in result["points"] if p["optim"] == name]
        print(table(result))
        if args.png:
            plot(result, args.png)


if __name__ == "__main__":
    main()
