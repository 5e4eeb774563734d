"""Compares what `hf-emopt plan` predicts with every step that `benchmarks/results` holds.

    python benchmarks/forecast_errors.py
    python benchmarks/forecast_errors.py --write

The first prints every step. The second writes them to `benchmarks/results/forecast_errors.md`, and a row for each case and
optimizer between the two marks in `docs/planning.md`.

The model describes the code as it is. Steps of older code, marked so, were measured before a change that made them faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.kernels.triton import configs
from hf_emopt.kernels.triton.configs import TABLE_VARIABLE
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.tools.bench.step_models import MODELS
from hf_emopt.tools.forecast.hardware import EFFICIENCY, GPUS, NETWORKS, Gpu
from hf_emopt.tools.forecast.layouts import Layout
from hf_emopt.tools.forecast.products import newton_schulz_seconds
from hf_emopt.tools.forecast.step import Forecast, Machine, forecast

RESULTS = Path(__file__).parent / "results"
LONG = RESULTS / "forecast_errors.md"
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
MARKS = ("<!-- by benchmarks/forecast_errors.py --write -->", "<!-- end -->")
TWO = Machine(GPUS["h200"], NETWORKS["nvlink"])
KRONECKER: dict[str, Any] = {"precondition_frequency": 10, "max_preconditioner_dim": 2048, "matmul_precision": "fp16"}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {}),
    "muon-overlap": (hf_emopt.Muon, {"overlap_param_gather": True}),
    "normuon": (hf_emopt.NorMuon, {}),
    "soap": (hf_emopt.SOAP, {"oversize": "block", **KRONECKER}),
    "shampoo": (hf_emopt.Shampoo, KRONECKER),
    "kl_shampoo": (hf_emopt.KLShampoo, KRONECKER),
}

PREDICTED = "predicted"
OLDER = "older code"
ROLES = {
    ("refresh_2048_h200", "muon"): OLDER,
    ("refresh_2048_h200", "soap"): OLDER,
    ("refresh_2048_h200", "shampoo"): OLDER,
    ("refresh_512_h200", "muon"): OLDER,
    ("refresh_512_h200", "soap"): OLDER,
    ("refresh_512_h200", "shampoo"): OLDER,
    ("step_hsdp_1.1b_4xh200", "shampoo"): OLDER,
    ("step_hsdp_1.1b_4xh200", "soap"): OLDER,
    ("step_fsdp2_tp_1.1b_4xh200", "shampoo"): OLDER,
}
"""Steps of older code, which launched the kernels of a refresh one by one; ``refresh_*.json`` followed other plans too."""


@dataclass(frozen=True)
class Point:
    """One measured step, milliseconds: the median, or the mean where steps differ by schedule.

    Attributes:
        commit: of the code that was measured, in short.
        optim: its name, ``precision`` that of a rule's factors: ``"tf32"`` or ``"fp16"``, or empty.
        role: ``"predicted"`` or ``"older code"``.
    """

    file: str
    commit: str
    what: str
    optim: str
    role: str
    measured: float
    predicted: float
    precision: str = ""

    @property
    def name(self) -> str:
        """The optimizer, with the precision of its factors."""
        return f"{self.optim}, {self.precision}" if self.precision else self.optim

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@contextlib.contextmanager
def kernels_as_measured(clusters: bool) -> Iterator[None]:
    """Predicts from the kernels that a step was measured with.

    Args:
        clusters: the step ran in one process, where products of many tiles ran on clusters of two multiprocessors, by kernels
            that the package no longer has.
    """
    before = os.environ.get(TABLE_VARIABLE)
    if clusters:
        os.environ[TABLE_VARIABLE] = str(RESULTS / "kernel_table_h200_clusters.json")
    configs.choose.cache_clear()
    try:
        yield
    finally:
        configs.choose.cache_clear()
        if clusters:
            os.environ.pop(TABLE_VARIABLE)
        if before is not None:
            os.environ[TABLE_VARIABLE] = before


def llama(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{"tie_word_embeddings": False, **sizes}))


def whole_steps(path: Path) -> Iterator[Point]:
    """Of `step_time.py`."""
    content = json.loads(path.read_text())
    about = content["about"]
    if about["card"] != "NVIDIA H200" or about["layout"] not in ("single", "ddp", "fsdp2", "fsdp2+tp", "hsdp"):
        return
    world, commit = about["world_size"], str(about["commit"])
    model = llama(**{"vocab_size": 32000, **MODELS[about["model"]]})
    name = "ddp" if about["layout"] == "single" else about["layout"]
    layout = Layout(name, world, world // about.get("replicas", 2) or 1, about.get("tp_size", 2))
    made: Forecast | None = None
    for row in content["rows"]:
        optim = row["optimizer_name"]
        if optim not in OPTIMIZERS or "optimizer" not in row:
            continue
        cls, options = OPTIMIZERS[optim]
        with kernels_as_measured(about["layout"] == "single"):
            made = forecast(cls(model, **options), layout, TWO, model)
        scheduled = optim in ("soap", "shampoo", "kl_shampoo")
        measured = row["optimizer_mean" if scheduled else "optimizer"]
        what = f"{about['model']}, {about['layout']}, {world} GPUs"
        kind, precision = ROLES.get((path.stem, optim), PREDICTED), options.get("matmul_precision", "")
        yield Point(path.stem, commit[:7], what, optim, kind, measured, 1e3 * made.seconds, precision)
    adamw = [r for r in content["rows"] if r["optimizer_name"] == "adamw" and "optimizer" in r]
    for row in adamw if made is not None else []:
        what = f"{about['model']}, {about['layout']}, {world} GPUs"
        predicted = 1e3 * made.adamw.seconds  # type: ignore[union-attr]
        yield Point(path.stem, commit[:7], what, "adamw", PREDICTED, row["optimizer"], predicted)


def slices(path: Path) -> Iterator[Point]:
    """Of `tensor_parallel.py`: two matrices in 16 bits, each cut over two ranks."""
    content = json.loads(path.read_text())
    for row in content["rows"]:
        rows, columns = row["shape"]
        with torch.device("meta"):
            layers = [nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for _ in range(row["matrices"])]
        model = nn.ModuleList(layers)
        long = 0 if rows > columns else 1
        dim = long if row["cut"] == "long" else 1 - long
        model.config = SimpleNamespace(base_model_tp_plan={"*": ("colwise", "rowwise")[dim]})  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # blockwise says that it is another update
            optimizer = getattr(hf_emopt, row["optimizer"])(model, tensor_parallel=row["asked"])
            made = forecast(optimizer, Layout("fsdp2+tp", row["ranks"], tp_size=row["ranks"]), TWO, model)
        what = f"2 x {rows} x {columns} cut along the {row['cut']} side, {row['asked']}"
        commit = str(content["about"]["commit"])
        name = row["optimizer"].lower()
        yield Point(path.stem, commit[:7], what, name, PREDICTED, row["median_ms"], 1e3 * made.seconds)


def periods(path: Path) -> Iterator[Point]:
    """Of `refresh_cost.py`: four layers on one GPU."""
    content = json.loads(path.read_text())
    settings = content["settings"]
    if settings["device"] != "cuda":
        return
    hidden, commit = int(settings["hidden"]), str(content["commit"])
    model = llama(
        vocab_size=1024, hidden_size=hidden, intermediate_size=int(hidden * 2.75), num_hidden_layers=4,
        num_attention_heads=hidden // 64, tie_word_embeddings=True,
    )  # fmt: skip
    for row in content["rows"]:
        optim = row["optim"]
        what = f"4 layers of hidden {hidden}, 1 GPU" + (f", {row['refresh']}" if row["refresh"] else "")
        if optim == "adamw":
            made = forecast(hf_emopt.Muon(model), Layout("ddp", 1), TWO)
            predicted = 1e3 * made.adamw.seconds
            yield Point(path.stem, commit[:7], what, optim, PREDICTED, row["median"], predicted)
            continue
        cls, options = OPTIMIZERS[optim]
        if row["refresh"]:
            options = {**options, "refresh": row["refresh"], "matmul_precision": settings["precision"]}
        optimizer: MatrixOptimizer = cls(model, **options)
        made = forecast(optimizer, Layout("ddp", 1), TWO)
        kind, precision = ROLES.get((path.stem, optim), PREDICTED), options.get("matmul_precision", "")
        yield Point(path.stem, commit[:7], what, optim, kind, row["mean"], 1e3 * made.seconds, precision)


def points() -> list[Point]:
    """Every stored step that the model speaks of."""
    found: list[Point] = []
    for pattern, read in (
        ("step_*.json", whole_steps),
        ("tensor_parallel_*.json", slices),
        ("refresh_*.json", periods),
    ):
        for path in sorted(RESULTS.glob(pattern)):
            if read is not whole_steps or "about" in json.loads(path.read_text()):
                found += read(path)
    return found


def kernels(card: str) -> list[Point]:
    """Single orthogonalizations of `kernel_times.py`, the pass before them included."""
    return list(_orthogonalizations(RESULTS / f"kernels_{card}.json", GPUS[card]))


def _orthogonalizations(path: Path, gpu: Gpu) -> Iterator[Point]:
    content = json.loads(path.read_text())
    commit = str(content.get("commit") or "")
    group = {"ns_steps": 5, "ns_coefficients": "jordan", "ns_dtype": None, "compat": None, "eps": None}
    for row in content["rows"]:
        batch, m, n = row["shape"]
        results = row["implementations"]
        measured = min(results[name]["ms"] for name in ("hf_emopt", "hf_emopt, graph") if name in results)
        normalize = 8 * batch * m * n / Machine(gpu, NETWORKS["nvlink"]).bandwidth
        with kernels_as_measured(clusters=True):
            products = newton_schulz_seconds(gpu, batch, m, n, group)
        products += EFFICIENCY.sustained * max(0.0, products - EFFICIENCY.boost_seconds)
        predicted = products + normalize
        what = f"{batch} x {m} x {n}"
        yield Point(path.stem, commit[:7], what, "newton_schulz", PREDICTED, measured, 1e3 * predicted)


def table(found: list[Point]) -> str:
    """Every step, as Markdown."""
    lines = [
        "| file | commit | step | optimizer | | measured ms | predicted ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for p in found:
        cells = (p.file, p.commit, p.what, p.name, p.role, f"{p.measured:.2f}", f"{p.predicted:.2f}", f"{p.ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(found: list[Point]) -> str:
    """A row for each case and optimizer, as Markdown: how many steps have a role, and their smallest and largest ratio."""
    cases: dict[tuple[str, str], dict[str, list[float]]] = {}
    for p in found:
        cases.setdefault((p.what, p.name), {}).setdefault(p.role, []).append(p.ratio)
    roles = (PREDICTED, OLDER)
    lines = [f"| step | optimizer | {' | '.join(roles)} |", "|---|---|---|---|"]
    places = list(dict.fromkeys(what for what, _ in cases))
    for (what, name), by_role in sorted(cases.items(), key=lambda case: (places.index(case[0][0]), case[0][1])):
        lines.append(f"| {what} | {name} | {' | '.join(_spread(by_role.get(r, [])) for r in roles)} |")
    return "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return ""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{len(ratios)}: {low}" + (f" to {high}" if high != low else "")


def write(steps: list[Point], single: list[Point]) -> None:
    """All of them to a file of their own, and their summary into the page."""
    head = "# Predicted and measured steps\n\nMade by `python benchmarks/forecast_errors.py --write`; columns and roles"
    LONG.write_text(f"{head} are explained in docs/planning.md.\n\n{table(steps)}\n\n{table(single)}\n")
    before, rest = PAGE.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{summary(steps + single)}\n\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write both tables instead of printing the long one")
    options = parser.parse_args()
    steps, single = points(), kernels("h200")
    if options.write:
        write(steps, single)
    else:
        print(f"{table(steps)}\n\n{table(single)}")


if __name__ == "__main__":
    main()
