"""Steps and seconds to a loss: a small Llama from scratch under several optimizers, with a learning-rate sweep of each.

    python benchmarks/convergence.py tokens runs/stdlib.npz          # once: tokenize the standard library
    python benchmarks/convergence.py run runs/stdlib.npz --out runs/convergence.json \\
        --point adamw:1e-3,2e-3,4e-3 --point muon:4e-3,8e-3,1.6e-2 --point soap:1e-3,2e-3,4e-3
    python benchmarks/convergence.py run runs/stdlib.npz --out runs/convergence.json --best-seeds 1 2
    python benchmarks/convergence.py render runs/convergence.json --png docs/convergence.png

Every run has the same initial weights and the same batches for a seed, the same schedule (warm-up, then cosine to a
tenth), and is evaluated on the same held-out blocks at every twentieth of the run. A finished run is written to the JSON at
once, and one that is there under the same settings is not run again. With a matrix optimizer each run checks that every
matrix was transformed once a step. "steps to AdamW" is where the held-out curve of a run first reaches the final loss of
the best AdamW of the same seed, linearly between evaluations: the run's own schedule is longer, so it is an upper bound.
"""

from __future__ import annotations

import argparse
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
from hf_emopt.matrix_optimizer import MatrixOptimizer

SETTINGS = ("data", "steps", "batch", "length", "warmup", "hidden", "layers", "mlp", "weight_decay", "precision")


def make_tokens(out: Path, vocab_size: int) -> None:
    """Trains a byte-level BPE on the standard library and stores its training and held-out tokens as uint16."""
    from text_data import split_documents, stdlib_documents, train_tokenizer

    train, held_out = split_documents(stdlib_documents(), every=50)
    tokenizer = train_tokenizer(("".join(run) for run in train), vocab_size)
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
    """Blocks in a new order each epoch, the order a function of the seed."""
    blocks = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(blocks), generator=generator)
        for start in range(0, len(order) - args.batch + 1, args.batch):
            yield blocks[order[start : start + args.batch]]


class Runner:
    """A model that is compiled once and set back for each run."""

    def __init__(self, args: argparse.Namespace, arrays: Any) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.train = torch.from_numpy(arrays["train"].astype(np.int64))
        held_out = torch.from_numpy(arrays["held_out"].astype(np.int64))
        self.held_out = held_out[: len(held_out) // args.length * args.length].view(-1, args.length)[: args.eval_blocks]
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
            self.forward(next(batches(self.train, self.args, 0)).to(self.device)).backward()
        self.model.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        losses = [self.forward(part.to(self.device)) for part in self.held_out.split(self.args.batch)]
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
            loss = self.forward(next(data).to(self.device, non_blocking=True))
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0 or step == steps:
                elapsed += self._now() - started
                curve.append((step, self.evaluate(), elapsed))
                started = self._now()
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "CPU"
        point = {"optim": name, "lr": lr, "seed": seed, "steps": steps, "curve": curve, "device": device}
        if isinstance(optimizer, MatrixOptimizer):
            expected = optimizer.routes.matrix_count * steps
            if optimizer.transform_count != expected:
                raise RuntimeError(
                    f"{name}: {optimizer.transform_count} transforms in {steps} steps, expected {expected}"
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
    return float(point["curve"][-1][1])


def reach(point: dict[str, Any], target: float) -> tuple[float, float] | None:
    """Steps and seconds at which a curve first comes down to a loss; ``None`` if it never does."""
    for (s0, l0, t0), (s1, l1, t1) in zip(point["curve"], point["curve"][1:]):
        if l1 <= target:
            part = (l0 - target) / (l0 - l1) if l0 > l1 else 1.0
            return s0 + part * (s1 - s0), t0 + part * (t1 - t0)
    return None


def full(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of the longest schedule: the sweep."""
    longest = max(p["steps"] for p in points)
    return [p for p in points if p["steps"] == longest]


def best_rates(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """For each optimizer the learning rate with the lowest final loss, in the mean over the first seed's sweep."""
    first = min(p["seed"] for p in points)
    best: dict[str, dict[str, Any]] = {}
    for p in full(points):
        if (
            p["seed"] == first
            and np.isfinite(final(p))
            and (p["optim"] not in best or final(p) < final(best[p["optim"]]))
        ):
            best[p["optim"]] = p
    return {name: p["lr"] for name, p in best.items()}


def wanted_runs(args: argparse.Namespace, points: Sequence[dict[str, Any]]) -> list[tuple[str, float, int, int]]:
    """(optimizer, learning rate, seed, steps) of the runs asked for."""
    runs = []
    for text in args.point:
        name, rates = text.rsplit(":", 1)
        runs += [(name, float(lr), args.seed, args.steps) for lr in rates.split(",")]
    if args.best_seeds or args.best_steps:
        best = best_rates(points)
        runs += [(name, lr, seed, args.steps) for seed in args.best_seeds for name, lr in best.items()]
        runs += [(name, best[name], args.seed, n) for name in best if name != "adamw" for n in args.best_steps]
    return runs


def run(args: argparse.Namespace) -> None:
    settings = {key: str(getattr(args, key)) if key == "data" else getattr(args, key) for key in SETTINGS}
    settings["data"] = Path(settings["data"]).name
    result: dict[str, Any] = {"settings": settings, "points": []}
    if args.out.exists():
        result = json.loads(args.out.read_text())
        if result["settings"] != settings:
            raise SystemExit(f"{args.out} holds runs of other settings: {result['settings']}; choose another --out")
    result["environment"] = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__, "transformers": transformers.__version__, "hf_emopt": hf_emopt.__version__,
    }  # fmt: skip
    runner: Runner | None = None
    known = {(p["optim"], p["lr"], p["seed"], p["steps"]) for p in result["points"]}
    deadline = time.monotonic() + args.seconds
    for name, lr, seed, steps in wanted_runs(args, result["points"]):
        if (name, lr, seed, steps) in known:
            continue
        if runner is None:
            runner = Runner(args, np.load(args.data))
            runner.warm()
        if time.monotonic() > deadline:
            print("out of time; the rest is left for another call")
            break
        point = runner.run(name, lr, seed, steps)
        result["points"].append(point)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result))
        print(
            f"{name} lr {lr:g} seed {seed}: {final(point):.4f} after {steps} steps, {point['curve'][-1][2]:.1f} s",
            flush=True,
        )


def table(result: dict[str, Any]) -> str:
    """Markdown: the sweep, then the best of each optimizer against AdamW's best."""
    points = full(result["points"])
    names = list(dict.fromkeys(p["optim"] for p in points))
    best = best_rates(result["points"])
    first = min(p["seed"] for p in points)
    lines = ["| optimizer | learning rate: final held-out loss |", "|---|---|"]
    for name in names:
        row = sorted((p["lr"], final(p)) for p in points if p["optim"] == name and p["seed"] == first)
        cells = [f"{lr:g}: **{x:.3f}**" if lr == best.get(name) else f"{lr:g}: {x:.3f}" for lr, x in row]
        lines.append(f"| {name} | {', '.join(cells)} |")
    adamw = [p for p in points if p["optim"] == "adamw" and p["lr"] == best["adamw"]]
    target = {p["seed"]: final(p) for p in adamw}
    seconds: dict[str, list[float]] = {}  # by device: seconds compare on one alone
    for p in adamw:
        seconds.setdefault(p.get("device", ""), []).append(p["curve"][-1][2])
    lines += [
        "",
        f"Target: the final loss of AdamW's best learning rate at the same seed, {statistics.mean(target.values()):.3f} in "
        f"the mean of {len(adamw)} seed(s).",
        "",
        "| optimizer | lr | final loss by seed | ms a step | steps to target / AdamW's | seconds to target / AdamW's |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        mine = [p for p in points if p["optim"] == name and p["lr"] == best.get(name) and p["seed"] in target]
        reached = [r for r in (reach(p, target[p["seed"]]) for p in mine) if r is not None]
        ratios = [
            r[1] / statistics.mean(seconds[p.get("device", "")])
            for p, r in zip(mine, reached)
            if p.get("device", "") in seconds
        ]
        losses = ", ".join(f"{final(p):.3f}" for p in mine)
        ms = 1000 * statistics.mean(p["curve"][-1][2] / p["steps"] for p in mine)
        ratio, took = "not reached", "-"
        if len(reached) == len(mine):
            ratio = f"{statistics.mean(r[0] for r in reached) / mine[0]['steps']:.2f}"
            took = f"{statistics.mean(ratios):.2f}" if ratios else "other device"
        lines.append(f"| {name} | {best.get(name):g} | {losses} | {ms:.1f} | {ratio} | {took} |")
    short = [p for p in result["points"] if p["steps"] < points[0]["steps"]]
    if short:
        lines += ["", "Shorter runs at the same learning rate, each with its own schedule:", ""]
        lines += [f"- {p['optim']}, {p['steps']} steps: {final(p):.3f}" for p in short]
    return "\n".join(lines)


def plot(result: dict[str, Any], png: Path) -> None:
    """The sweep and the best curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points, best = full(result["points"]), best_rates(result["points"])
    first = min(p["seed"] for p in points)
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5))
    for name in dict.fromkeys(p["optim"] for p in points):
        row = sorted((p["lr"], final(p)) for p in points if p["optim"] == name and p["seed"] == first)
        axes[0].plot(*zip(*row), marker="o", label=name)
        run_ = next(p for p in points if p["optim"] == name and p["lr"] == best[name] and p["seed"] == first)
        steps, losses, seconds = zip(*run_["curve"][1:])
        axes[1].plot(steps, losses, label=f"{name}, lr {best[name]:g}")
        axes[2].plot(seconds, losses, label=name)
    for axis, label in zip(axes, ("learning rate", "steps", "seconds")):
        axis.set_xlabel(label)
        axis.set_ylabel("held-out loss")
        axis.legend()
    axes[0].set_xscale("log")
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tokens = commands.add_parser("tokens", help="tokenize the standard library")
    tokens.add_argument("data", type=Path)
    tokens.add_argument("--vocab_size", type=int, default=8192)
    runs = commands.add_parser("run", help="run what is missing")
    runs.add_argument("data", type=Path)
    runs.add_argument("--out", type=Path, required=True)
    runs.add_argument("--point", action="append", default=[], metavar="OPTIM[@OPTIONS]:LR,LR", help="a sweep")
    runs.add_argument(
        "--best-seeds", dest="best_seeds", type=int, nargs="*", default=[], help="more seeds at the best rates"
    )
    runs.add_argument(
        "--best-steps", dest="best_steps", type=int, nargs="*", default=[], help="shorter runs at the best rates"
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
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.command == "tokens":
        make_tokens(args.data, args.vocab_size)
    elif args.command == "run":
        run(args)
    else:
        result = json.loads(args.json.read_text())
        print(table(result))
        if args.png:
            plot(result, args.png)


if __name__ == "__main__":
    main()
