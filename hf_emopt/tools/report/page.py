"""The page: numbers of a run as JSON inside one HTML file, with the script that draws them and no request to anywhere."""

from __future__ import annotations

import html
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_emopt._version import __version__
from hf_emopt.optimizers.diagnostics import LAYERS, PREFIX, QUANTITIES
from hf_emopt.tools.report.run_log import RunLog, read_log

MOST_COLUMNS = 800
"""Steps that the heat map shows; of more, every second, third, and so on. It has fewer pixels."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style></head>
<body><main id="page"></main>
<noscript>The plots of this page are drawn by a script inside it.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script></body></html>
"""


def write_report(run: str | Path, out: str | Path = "report.html") -> Path:
    """Writes the page of a run's log.

    Args:
        run: see :func:`hf_emopt.tools.report.read_log`.
        out: file to write.

    Raises:
        FileNotFoundError, RunLogError: see :func:`hf_emopt.tools.report.read_log`.
    """
    page = build_page(read_log(run))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def build_page(log: RunLog) -> str:
    """The page as text."""
    here = files("hf_emopt.tools.report")
    # "</script>" inside of a string would end the element.
    data = json.dumps(_content(log), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return _PAGE.format(
        title=html.escape(f"{_run_name(log)}: hf-emopt report"),
        style=(here / "report.css").read_text(encoding="utf-8"),
        data=data,
        script=(here / "report.js").read_text(encoding="utf-8"),
    )


def _run_name(log: RunLog) -> str:
    folder = log.source.resolve().parent
    return folder.parent.name if folder.name.startswith("checkpoint-") else folder.name


def _content(log: RunLog) -> dict[str, Any]:
    steps = [step for step, _ in log.entries]
    return {
        "run": _run_name(log),
        "source": str(log.source),
        "version": __version__,
        "steps": [steps[0], steps[-1]],
        "logs": len(steps),
        "events": _events(log),
        "charts": _charts(log),
        "rules": _rules(log),
        "heat": _heat(log),
        "quantities": QUANTITIES,
    }


def _charts(log: RunLog) -> list[dict[str, Any]]:
    """Line charts: loss, learning rates, gradient norm and exposed communication."""
    rates = sorted((name for name in log.names() if name.startswith("lr/")), key=lambda name: "aux" in name)
    rates = rates or ["learning_rate"]
    wanted = [
        ("Loss", "nats", [("train", "loss"), ("held-out", "eval_loss")], "linear"),
        ("Learning rates", "", [(rate.removeprefix("lr/"), rate) for rate in rates], "linear"),
        ("Gradient norm", "before clipping", [("gradient norm", "grad_norm")], "log"),
        ("Exposed communication", "ms a step", [("exposed", f"{PREFIX}exposed_communication_ms")], "linear"),
    ]
    charts = []
    for title, unit, members, scale in wanted:
        series = [{"name": label, "points": _points(log, name)} for label, name in members]
        series = _merged([s for s in series if s["points"]])
        if title == "Exposed communication" and not any(y for s in series for _, y in s["points"]):
            continue  # one process
        if series:
            charts.append({"title": title, "unit": unit, "series": series, "scale": scale})
    return charts


def _merged(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines that would hide one another as one line."""
    names: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for one in series:
        names.setdefault(tuple(map(tuple, one["points"])), []).append(one["name"])
    return [{"name": ", ".join(same), "points": points} for points, same in names.items()]


def _rules(log: RunLog) -> dict[str, dict[str, list[list[float]]]]:
    return {
        rule: {quantity: _points(log, f"{PREFIX}{rule}/{quantity}") for quantity in quantities}
        for rule, quantities in log.rules().items()
    }


def _heat(log: RunLog) -> dict[str, Any]:
    """For each quantity a row of numbers for each layer that has it; ``null`` where there is none."""
    entries = [(step, values) for step, values in log.entries if any(name.startswith(LAYERS) for name in values)]
    stride = max(1, math.ceil(len(entries) / MOST_COLUMNS))
    shown = entries[::stride]
    found: dict[str, Any] = {}
    for quantity in QUANTITIES:
        rows = {
            layer: [_short(values.get(f"{LAYERS}{layer}/{quantity}")) for _, values in shown]
            for layer, quantities in log.layers().items()
            if quantity in quantities
        }
        if rows:
            found[quantity] = {"layers": list(rows), "rows": list(rows.values())}
    return {"steps": [step for step, _ in shown], "stride": stride, "quantities": found}


def _events(log: RunLog) -> list[dict[str, Any]]:
    """Log entries since whose predecessor a step was skipped or a refresh failed."""
    events = []
    counters = dict.fromkeys(("skipped_steps", f"{PREFIX}skipped_steps"), "step skipped: a gradient was not finite")
    for rule in log.rules():
        counters[f"{PREFIX}{rule}/failures"] = f"refresh of {rule} failed: it keeps its preconditioner"
    before = dict.fromkeys(counters, 0.0)
    previous = 0
    for step, values in log.entries:
        told: set[str] = set()
        for name, text in counters.items():
            if name not in values:
                continue
            new, before[name] = int(values[name] - before[name]), values[name]
            if new > 0 and text not in told:
                told.add(text)
                events.append({"step": step, "after": previous, "count": new, "text": text})
        for name, value in values.items():
            if name in ("loss", "eval_loss", "grad_norm") and not math.isfinite(value):
                events.append({"step": step, "after": previous, "count": 1, "text": f"{name} is {value}"})
        if any(name in values for name in counters):
            previous = step
    return events


def _points(log: RunLog, name: str) -> list[list[float]]:
    return [[step, number] for step, value in log.series(name) if (number := _short(value)) is not None]


def _short(value: float | None) -> float | None:
    """Six digits, which is more than a plot shows."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
