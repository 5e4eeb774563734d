"""Tables, JSON and plots of the figures of :mod:`hf_emopt.tools.bench.step`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_emopt._version import __version__
from hf_emopt.tools.bench.step import Row, Settings, counted, reason


def table(rows: Sequence[Row]) -> str:
    """Figures as text, in ms; ``exposed`` needs the row without an optimizer, which is added to each row."""
    done = [r for r in rows if "step" in r]
    by_name = {r["optimizer_name"]: r for r in done}
    bare, adamw = by_name.get("none", {}).get("step"), by_name.get("adamw", {}).get("tokens_per_second")
    heads = ("step", "optim.", "mean", "max", "exposed", "tokens/s", "of AdamW", "peak GiB", "reserved", "state GiB")
    lines = [f"{'':20}" + "".join(f"{h:>10}" for h in heads)]
    for r in done:
        r["exposed"] = None if bare is None else counted(r) - bare
        cells = [f"{counted(r):.2f}", *(f"{r[key]:.2f}" for key in ("optimizer", "optimizer_mean", "optimizer_max"))]
        cells.append("" if bare is None else f"{r['exposed']:.2f}")
        cells.append(f"{r['tokens_per_second']:.0f}")
        cells.append("" if adamw is None else f"{r['tokens_per_second'] / adamw:.3f}")
        cells += [f"{r[key]:.2f}" if key in r else "" for key in ("peak_gib", "reserved_gib", "state_gib")]
        lines.append(f"{r['optimizer_name']:20}" + "".join(f"{c:>10}" for c in cells))
    for r in (r for r in rows if "step" not in r):
        lines.append(f"{r['optimizer_name']:20}not measured: {reason(r)}")
    return "\n".join(lines)


def about(settings: Settings, world_size: int) -> dict[str, Any]:
    """Facts of a measurement: settings, versions, card, and the commit of the working directory if it is a repository."""
    commit = None
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = run.stdout.strip() or None
    except OSError:  # no git here
        pass
    return {
        **asdict(settings),
        "world_size": world_size,
        "torch": torch.__version__,
        "hf_emopt": __version__,
        "commit": commit,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def save(path: Path, facts: dict[str, Any], rows: Sequence[Row], **more: Any) -> None:
    """Writes JSON: ``about``, ``rows`` and all other arguments."""
    path.write_text(json.dumps({"about": facts, "rows": list(rows), **more}, indent=1) + "\n")


def plot(path: Path, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    """Bars for each row: the step without an optimizer with the optimizer's addition on top, and ``step()`` alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = [r for r in rows if "step" in r and r["optimizer_name"] != "none"]
    bare = next((r["step"] for r in rows if r["optimizer_name"] == "none" and "step" in r), 0.0)
    places = range(len(done))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.1 * len(done)), 4.0), layout="constrained")
    axes.bar(places, [min(bare, counted(r)) for r in done], 0.45, label="forward and backward alone", color="tab:gray")
    axes.bar(places, [max(0.0, counted(r) - bare) for r in done], 0.45, bottom=[min(bare, counted(r)) for r in done],
             label="added by the optimizer" if bare else "step", color="tab:orange")  # fmt: skip
    axes.bar([p + 0.38 for p in places], [r["optimizer"] for r in done], 0.25, label="step() alone", color="tab:blue")
    axes.set_xticks(list(places), [r["optimizer_name"] for r in done], rotation=30, ha="right")
    axes.set_ylabel("ms")
    axes.set_title(
        f"{Path(facts['model']).name}, {facts['layout']} on {facts['world_size']} x {facts['card']}, "
        f"{facts['tokens']} tokens a rank", fontsize="medium",
    )  # fmt: skip
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
