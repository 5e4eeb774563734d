"""What `hf-emopt plan` predicts for every step that is stored in `benchmarks/results`, beside what was measured.

    python benchmarks/forecast_errors.py
    python benchmarks/forecast_errors.py --write

The first prints every step. The second writes them to `benchmarks/results/forecast_errors.md`, and a row for each case and
optimizer between the two marks in `docs/planning.md`.

The constants of the model are fitted on the steps marked so; the others are predictions. Steps that were measured with code
that has since been replaced are marked too: the model is of the code as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.distributed import assignment
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
KRONECKER: dict[str, Any] = {"precondition_frequency": 10, "max_preconditioner_dim": 2048, "matmul_precision": "tf32"}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {}),
    "muon-overlap": (hf_emopt.Muon, {"overlap_param_gather": True}),
    "normuon": (hf_emopt.NorMuon, {}),
    "soap": (hf_emopt.SOAP, {"oversize": "block", **KRONECKER}),
    "shampoo": (hf_emopt.Shampoo, KRONECKER),
    "kl_shampoo": (hf_emopt.KLShampoo, KRONECKER),
}

FITTED = "fitted"
PREDICTED = "predicted"
OLDER = "older code"
EVEN_PLANS = (
    "step_fsdp2_1.1b_2xh200_04b9f57", "step_ddp_1.1b_2xh200_04b9f57", "step_fsdp2_1.1b_2xh200_fc272fa",
    "step_ddp_1.1b_2xh200_fc272fa", "step_single_1.1b_h200_fc272fa", "step_single_1.1b_h200_fc272fa_shampoo",
    "step_fsdp2_1.1b_2xh200_daf71f2", "step_single_1.1b_h200_992685b", "step_single_wide_h200_992685b",
    "step_single_1.1b_h200_595efb8", "step_fsdp2_1.1b_2xh200_595efb8", "step_ddp_1.1b_2xh200_595efb8",
    "step_fsdp2_wide_2xh200_595efb8", "step_fsdp2_1.1b_2xh200_f3a0454",
    "step_fsdp2_1.1b_4xh200_c831ee9", "step_ddp_1.1b_4xh200_c831ee9",
)  # fmt: skip
"""Measured since matrices of one shape are cut evenly; before, buckets were filled one after another. They are of the next
two as well."""
PRESENT_KERNELS = (
    *EVEN_PLANS,
    "step_single_1.1b_h200_5d3ec2d", "step_single_1.1b_h200_5d3ec2d_profile", "kernels_h200_c564af5",
    "kernels_h200_5c660cb", "step_single_1.1b_h200_226d713_shampoo", "step_single_1.1b_h200_3b683fd",
    "step_single_1.1b_h200_02d516b", "step_fsdp2_1.1b_2xh200_d44b7ef", "step_ddp_1.1b_2xh200_d44b7ef",
    "step_fsdp2_wide_2xh200_d44b7ef",
    "step_fsdp2_1.1b_4xh200_fc7c774", "step_ddp_1.1b_4xh200_fc7c774", "step_hsdp_1.1b_4xh200_fc7c774",
    "step_fsdp2_tp_1.1b_4xh200_fc7c774", "step_fsdp2_wide_4xh200_fc7c774", "step_fsdp2_1.1b_2xh200_4052951",
    "step_ddp_1.1b_2xh200_4052951", "step_fsdp2_1.1b_4xh200_4052951", "step_ddp_1.1b_4xh200_4052951",
    "step_fsdp2_1.1b_2xh200_d5c5545", "step_ddp_1.1b_2xh200_d5c5545", "step_fsdp2_1.1b_4xh200_d5c5545",
    "step_ddp_1.1b_4xh200_d5c5545", "step_fsdp2_1.1b_2xh200_6e866b4", "step_ddp_1.1b_2xh200_6e866b4",
    "step_fsdp2_1.1b_4xh200_6e866b4", "step_ddp_1.1b_4xh200_6e866b4", "step_fsdp2_1.1b_4xh200_b79a4c1",
    "step_ddp_1.1b_4xh200_b79a4c1", "step_fsdp2_1.1b_4xh200_bc5484f", "step_ddp_1.1b_4xh200_bc5484f",
    "step_fsdp2_1.1b_2xh200_bc5484f", "step_ddp_1.1b_2xh200_bc5484f", "step_fsdp2_wide_4xh200_bc5484f",
    "step_fsdp2_1.1b_2xh200_8db7954", "step_ddp_1.1b_2xh200_8db7954",
)  # fmt: skip
"""Measured with the kernels as they are, but in one process with products on clusters, which are gone: these
are predicted from ``kernel_table_h200_clusters``, which has the times of both. All others are predicted from
``kernel_table_h200_c800a30``, the table of theirs."""
WITH_EPSILON = ("step_single_1.1b_h200_226d713_shampoo", "step_single_1.1b_h200_3b683fd")
"""Shampoo with a relative epsilon of 1e-3."""
PRESENT_PLANS = (
    *EVEN_PLANS,
    *WITH_EPSILON, "step_single_1.1b_h200_02d516b", "step_fsdp2_1.1b_2xh200_d44b7ef", "step_ddp_1.1b_2xh200_d44b7ef",
    "step_fsdp2_wide_2xh200_d44b7ef",
    "step_fsdp2_1.1b_4xh200_fc7c774", "step_ddp_1.1b_4xh200_fc7c774", "step_hsdp_1.1b_4xh200_fc7c774",
    "step_fsdp2_tp_1.1b_4xh200_fc7c774", "step_fsdp2_wide_4xh200_fc7c774", "step_fsdp2_1.1b_2xh200_4052951",
    "step_ddp_1.1b_2xh200_4052951", "step_fsdp2_1.1b_4xh200_4052951", "step_ddp_1.1b_4xh200_4052951",
    "step_fsdp2_1.1b_2xh200_d5c5545", "step_ddp_1.1b_2xh200_d5c5545", "step_fsdp2_1.1b_4xh200_d5c5545",
    "step_ddp_1.1b_4xh200_d5c5545", "step_fsdp2_1.1b_2xh200_6e866b4", "step_ddp_1.1b_2xh200_6e866b4",
    "step_fsdp2_1.1b_4xh200_6e866b4", "step_ddp_1.1b_4xh200_6e866b4", "step_fsdp2_1.1b_4xh200_b79a4c1",
    "step_ddp_1.1b_4xh200_b79a4c1", "step_fsdp2_1.1b_4xh200_bc5484f", "step_ddp_1.1b_4xh200_bc5484f",
    "step_fsdp2_1.1b_2xh200_bc5484f", "step_ddp_1.1b_2xh200_bc5484f", "step_fsdp2_wide_4xh200_bc5484f",
    "step_fsdp2_1.1b_2xh200_8db7954", "step_ddp_1.1b_2xh200_8db7954",
)  # fmt: skip
"""Measured since matrices of one shape lie together in a plan and one process has buckets of twice the size; products of
factors in float16. Before, a plan followed names among matrices of one cost, and those products were in TF32."""
FITTED_FILES = (
    "step_ddp_1.1b_2xh200", "refresh_2048_h200", "step_fsdp2_1.1b_2xh200_1946bf8", "step_ddp_1.1b_2xh200_1946bf8",
    "step_single_1.1b_h200_5d3ec2d_profile", "step_single_1.1b_h200_226d713_shampoo", "step_fsdp2_tp_1.1b_4xh200_4b21a19",
    "step_fsdp2_1.1b_2xh200_6e866b4", "step_ddp_1.1b_2xh200_6e866b4",
)  # fmt: skip
"""Muon's and AdamW's steps of the first, SOAP's of the second, Shampoo's of the third, the exchange in Muon's of the third
and fourth, Muon's of the fifth (of which the passes alone), Shampoo's of the sixth, Muon's of the seventh (what the host does
for slices), and Muon's (what it does for a matrix) and SOAP's of the last two.
AdamW's host time under FSDP2 is fitted to the three files of that layout; how products slow down to those of ``kernels_h200``
that take longer than 5 ms."""
FITTED_ADAMW = ("step_fsdp2_1.1b_2xh200", "step_fsdp2_1.1b_2xh200_foreach", "step_fsdp2_wide_2xh200")
OLDER_COMMITS = ("be0df71", "0e9c519")
"""Before the elementwise passes over runs and the kernels' tables."""
SLOW_HOST = "591b0b4"
"""Before the host's share of Muon's step was cut and Shampoo's refresh took half of its products."""
NOT_RECORDED = ("4b21a19", "fc7c774")
"""Steps on several GPUs that launched the kernels of Shampoo's roots one by one."""
ONE_BY_ONE = ("c495b4f", "1946bf8", "4b21a19")
"""When the host asked of one tensor after another what is asked of all at once since."""
ONE_STREAM = ("d44b7ef", "fc7c774", "4052951")
"""When most of SOAP's bases were launched kernel by kernel, and all of them on one stream."""
SMALL_BUCKETS = ("0e9c519", "c495b4f")
"""When a bucket of copies had as many elements as a bucket of shards; since then it has twice as many on two ranks."""


@dataclass(frozen=True)
class Point:
    """One measured step, milliseconds: the median, or the mean where steps differ by schedule.

    Attributes:
        commit: of the code that was measured, in short.
        optim: its name, ``precision`` that of a rule's factors: ``"tf32"`` or ``"fp16"``, or empty.
        role: ``"fitted"``, ``"predicted"`` or ``"older code"``.
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


def role(file: str, commit: str, optim: str) -> str:
    """What a stored step is to the model."""
    if file == FITTED_FILES[0] or (optim == "adamw" and file in FITTED_ADAMW):
        return FITTED
    if (file in (FITTED_FILES[4], FITTED_FILES[6]) and optim == "muon") or (
        file == FITTED_FILES[5] and optim == "shampoo"
    ):
        return FITTED
    fitted: dict[str, tuple[str, ...]] = {FITTED_FILES[1]: ("soap",), FITTED_FILES[2]: ("shampoo",)}
    fitted |= dict.fromkeys(FITTED_FILES[7:], ("muon", "soap"))
    if optim in fitted.get(file, ()):
        return FITTED
    replaced = file == FITTED_FILES[1] and optim == "shampoo"
    replaced |= commit.startswith(SLOW_HOST) and optim in ("muon", "shampoo")
    replaced |= commit.startswith(NOT_RECORDED) and optim == "shampoo"
    replaced |= commit.startswith(ONE_BY_ONE) and optim.startswith("muon") and file.startswith("step_")
    replaced |= commit.startswith(ONE_STREAM) and optim == "soap"
    return OLDER if replaced or commit.startswith(OLDER_COMMITS) else PREDICTED


def llama(**sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{"tie_word_embeddings": False, **sizes}))


def _in_order_of_names(parameter: Any) -> tuple[Any, ...]:
    return parameter.group, -parameter.cost, parameter.name


def _one_after_another(
    chunks: Callable[..., Any], most: int, members: Any, sizes: assignment.BucketSizes, by_shape: bool = True
) -> Any:
    """Buckets that are filled whatever their matrices' shapes."""
    return chunks(members, assignment.BucketSizes(min(sizes.together, most), most), by_shape=False)


@contextlib.contextmanager
def as_measured(path: Path) -> Iterator[None]:
    """The kernels and the plan that a stored file was measured with."""
    before, place, chunks = os.environ.get(TABLE_VARIABLE), assignment._order, assignment._chunks
    if path.stem not in PRESENT_KERNELS:
        os.environ[TABLE_VARIABLE] = str(RESULTS / "kernel_table_h200_c800a30.json")
    elif "single" in path.stem or path.stem.startswith("kernels"):
        os.environ[TABLE_VARIABLE] = str(RESULTS / "kernel_table_h200_clusters.json")
    if path.stem not in PRESENT_PLANS:
        assignment._order = _in_order_of_names
    if path.stem not in EVEN_PLANS:
        large = path.stem in PRESENT_PLANS
        assignment._chunks = functools.partial(_one_after_another, chunks, assignment.MAX_BUCKET_NUMEL * (1 + large))
    # What was chosen from one table is not what the other has.
    configs.choose.cache_clear()
    try:
        yield
    finally:
        configs.choose.cache_clear()
        assignment._order, assignment._chunks = place, chunks
        os.environ.pop(TABLE_VARIABLE, None)
        if before is not None:
            os.environ[TABLE_VARIABLE] = before


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
    numel = 2**25 if commit.startswith(SMALL_BUCKETS) and name == "ddp" else None
    made: Forecast | None = None
    for row in content["rows"]:
        optim = row["optimizer_name"]
        if optim not in OPTIMIZERS or "optimizer" not in row:
            continue
        cls, options = OPTIMIZERS[optim]
        if path.stem in PRESENT_PLANS and "matmul_precision" in options:
            options = {**options, "matmul_precision": "fp16"}
            options |= {"relative_epsilon": 1e-3} if optim == "shampoo" and path.stem in WITH_EPSILON else {}
        made = forecast(cls(model, **options), layout, TWO, model, max_bucket_numel=numel)
        scheduled = optim in ("soap", "shampoo", "kl_shampoo")
        measured = row["optimizer_mean" if scheduled else "optimizer"]
        what = f"{about['model']}, {about['layout']}, {world} GPUs"
        kind, precision = role(path.stem, commit, optim), options.get("matmul_precision", "")
        yield Point(path.stem, commit[:7], what, optim, kind, measured, 1e3 * made.seconds, precision)
    adamw = [r for r in content["rows"] if r["optimizer_name"] == "adamw" and "optimizer" in r]
    for row in adamw if made is not None else []:
        kind = role(path.stem, commit, "adamw")
        kind = PREDICTED if kind == OLDER else kind  # torch's own code
        what = f"{about['model']}, {about['layout']}, {world} GPUs"
        predicted = 1e3 * made.adamw.seconds  # type: ignore[union-attr]
        yield Point(path.stem, commit[:7], what, "adamw", kind, row["optimizer"], predicted)


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
        kind = role(path.stem, commit, name)
        yield Point(path.stem, commit[:7], what, name, kind, row["median_ms"], 1e3 * made.seconds)


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
        kind, precision = role(path.stem, commit, optim), options.get("matmul_precision", "")
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
                with as_measured(path):
                    found += read(path)
    return found


def kernels(card: str) -> list[Point]:
    """Single orthogonalizations of `kernel_times.py`, the pass before them included."""
    found: list[Point] = []
    for path in (
        RESULTS / f"kernels_{card}.json",
        *(p for p in sorted(RESULTS.glob(f"kernels_{card}_*")) if p.stem in PRESENT_KERNELS),
    ):
        with as_measured(path):
            found += _orthogonalizations(path, GPUS[card])
    return found


def _orthogonalizations(path: Path, gpu: Gpu) -> Iterator[Point]:
    content = json.loads(path.read_text())
    commit = str(content.get("commit") or "")
    group = {"ns_steps": 5, "ns_coefficients": "jordan", "ns_dtype": None, "compat": None, "eps": None}
    for row in content["rows"]:
        batch, m, n = row["shape"]
        results = row["implementations"]
        measured = min(results[name]["ms"] for name in ("hf_emopt", "hf_emopt, graph") if name in results)
        normalize = 8 * batch * m * n / Machine(gpu, NETWORKS["nvlink"]).bandwidth
        products = newton_schulz_seconds(gpu, batch, m, n, group)
        products += EFFICIENCY.sustained * max(0.0, products - EFFICIENCY.boost_seconds)
        predicted = products + normalize
        kind = FITTED if path.stem == "kernels_h200" and 1e-3 * measured > EFFICIENCY.boost_seconds else PREDICTED
        what = f"{batch} x {m} x {n}" + (", on clusters" if path.stem in PRESENT_KERNELS else "")
        yield Point(path.stem, commit[:7], what, "newton_schulz", kind, measured, 1e3 * predicted)


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
    roles = (FITTED, PREDICTED, OLDER)
    lines = [f"| step | optimizer | {' | '.join(roles)} |", "|---|---|---|---|---|"]
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
    head = (
        "# Predicted steps beside measured ones\n\nBy `python benchmarks/forecast_errors.py --write`; columns and roles"
    )
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
