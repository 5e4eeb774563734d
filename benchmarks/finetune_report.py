"""Tables, plots and races of what `finetune_sweep.py` has run."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Held-out metric of each task and whether more of it is better.
METRICS = {"clm": ("eval_loss", False), "classification": ("eval_accuracy", True)}


def race(result: dict[str, Any], optim: str, against: str) -> str:
    """Markdown: for each rate of `optim` the step in which it first had the final held-out loss of `against`.

    That is the loss of `against` at its best rate, seed by seed; a step between two evaluations is interpolated. With a
    schedule that decays, an early step of a long run is a harsher test than a short run of that length.

    Raises:
        ValueError: the run kept no held-out curves, or has no points of one of the two.
    """
    metric, more_is_better = METRICS[result["settings"]["task"]]
    if not result["settings"].get("eval_steps") or more_is_better:
        raise ValueError("a race needs a held-out loss while training: run with --task clm and --eval_steps")
    of = {name: [p for p in result["points"] if p["optim"] == name] for name in (optim, against)}
    if not all(of.values()):
        raise ValueError(f"no points of {', '.join(name for name, points in of.items() if not points)}")
    rates = {p["lr"] for p in of[against]}
    best = min(rates, key=lambda lr: statistics.fmean(p[metric] for p in of[against] if p["lr"] == lr))
    goal = {p["seed"]: p[metric] for p in of[against] if p["lr"] == best}
    steps = result["settings"]["max_steps"]
    lines = [
        f"Final held-out loss of {against} at its best rate {best:g}: {statistics.fmean(goal.values()):.4f} after {steps} "
        f"steps. {optim}:",
        "",
        "| learning rate | final loss | reached in step, by seed | of the steps |",
        "|---|---|---|---|",
    ]
    for lr in sorted({p["lr"] for p in of[optim]}):
        own = sorted((p for p in of[optim] if p["lr"] == lr and p["seed"] in goal), key=lambda p: p["seed"])
        if not own:
            continue
        start = result["before"][metric]
        reached = [_first_step([[0, start], *p["held_out"]], goal[p["seed"]]) for p in own]
        done = [step for step in reached if step is not None]
        share = f"{statistics.fmean(done) / steps:.2f}" if len(done) == len(reached) else "-"
        shown = ", ".join("never" if step is None else f"{step:.0f}" for step in reached)
        lines.append(f"| {lr:g} | {statistics.fmean(p[metric] for p in own):.4f} | {shown} | {share} |")
    return "\n".join(lines)


def _first_step(curve: Sequence[Sequence[float]], goal: float) -> float | None:
    """Where a curve of (step, loss) first comes down to a loss, interpolated."""
    for (step, loss), (later, lower) in itertools.pairwise(curve):
        if lower <= goal < loss:
            return step + (later - step) * (loss - goal) / (loss - lower)
    return None


def table(result: dict[str, Any]) -> str:
    """Markdown: one row a learning rate, one column an optimizer; mean over seeds (lowest to highest), best in bold."""
    metric, more_is_better = METRICS[result["settings"]["task"]]
    points = result["points"]
    optims = list(dict.fromkeys(p["optim"] for p in points))
    cells: dict[tuple[str, float], list[float]] = {}
    for p in points:
        cells.setdefault((p["optim"], p["lr"]), []).append(p[metric])
    means = {key: statistics.fmean(values) for key, values in cells.items()}
    best = {}
    for optim in optims:
        own = [key for key in means if key[0] == optim]
        best[optim] = (max if more_is_better else min)(own, key=lambda key: means[key])
    lines = ["| learning rate | " + " | ".join(optims) + " |", "|---|" + "---|" * len(optims)]
    for lr in sorted({lr for _, lr in cells}):
        row = []
        for optim in optims:
            values = cells.get((optim, lr))
            if values is None:
                row.append("-")
                continue
            text = f"{means[optim, lr]:.4f}"
            text = f"**{text}**" if best[optim] == (optim, lr) else text
            row.append(text + (f" ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else ""))
        lines.append(f"| {lr:g} | " + " | ".join(row) + " |")
    settings, data = result["settings"], result["data"]
    seeds = len({p["seed"] for p in points})
    seconds = {optim: statistics.median(p["train_seconds"] for p in points if p["optim"] == optim) for optim in optims}
    lines += [
        "",
        f"Held-out {metric.removeprefix('eval_')} after {settings['max_steps']} steps of "
        f"{settings['batch_size'] * settings['accumulation']} x {settings['length']} tokens at most, {seeds} seed(s), "
        f"{settings['schedule']} schedule; before training {result['before'][metric]:.4f}. "
        f"{data['train']:,} training and {data['held_out']:,} held-out samples. Training seconds a point, median: "
        + ", ".join(f"{optim} {value:.1f}" for optim, value in seconds.items())
        + f". {result['environment']['device']}, torch {result['environment']['torch']}, "
        f"transformers {result['environment']['transformers']}.",
    ]
    return "\n".join(lines)


def plot(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Metric over learning rate: a line through the means, a point for each seed; a line style for each result."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    metric, more_is_better = METRICS[results[0]["settings"]["task"]]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for result, style in zip(results, ("-", "--", "-.", ":")):
        dtype = result["settings"]["dtype"]
        for index, optim in enumerate(dict.fromkeys(p["optim"] for p in result["points"])):
            own = [p for p in result["points"] if p["optim"] == optim]
            rates = sorted({p["lr"] for p in own})
            means = [statistics.fmean(p[metric] for p in own if p["lr"] == rate) for rate in rates]
            label = optim if len(results) == 1 else f"{optim.partition(':')[0]}, {dtype}"
            axes.plot(rates, means, f"C{index}{style}", label=label)
            axes.plot([p["lr"] for p in own], [p[metric] for p in own], f"C{index}.")
    axes.axhline(results[0]["before"][metric], color="gray", linestyle=":", label="before training")
    if not more_is_better:  # a run that diverged would flatten all others; its line leaves at the top
        lowest, before = min(p[metric] for result in results for p in result["points"]), results[0]["before"][metric]
        axes.set_ylim(top=before + 0.1 * abs(before - lowest))
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"held-out {metric.removeprefix('eval_')}")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
