"""``hf-emopt bench kernels``: orthogonalization on this GPU, by this package and by whatever else is installed.

Every implementation computes five steps on the same random float32 matrices and is checked against the polynomial of its own
coefficients in float64 before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels.triton import configs, runtime
from hf_emopt.kernels.triton.configs import Config, Entry
from hf_emopt.linalg.coefficients import ResolvedCoefficients, resolve_coefficients
from hf_emopt.linalg.newton_schulz import newton_schulz
from hf_emopt.tools.bench.products import compare_products, report_products
from hf_emopt.tools.bench.timing import Shape, device_facts, graphed, in_turn, is_short, relative_error, said, time_ms


def parse_shape(text: str) -> Shape:
    """``"8x4096x4096"``, or ``"4096x11008"`` for one matrix."""
    parts = [int(part) for part in text.lower().replace("*", "x").split("x")]
    if len(parts) == 2:
        parts.insert(0, 1)
    if len(parts) != 3 or min(parts) < 1:
        raise ValueError(f"shape {text!r} is not BATCHxMxN or MxN with numbers above 0")
    return parts[0], parts[1], parts[2]


_SHAPES = (
    "12x768x3072 24x1024x4096 2048x2048 16x2048x2048 2048x8192 4096x4096 8x4096x4096 4096x11008 4096x14336 8192x8192 "
    "8192x28672 128x768x2048"
)
SHAPES = tuple(parse_shape(text) for text in _SHAPES.split())
Implementation = Callable[[Tensor], Tensor]
JORDAN = resolve_coefficients("jordan", 5)


def exact(x: Tensor, coefficients: ResolvedCoefficients) -> Tensor:
    """The polynomial in float64, matrix by matrix, in the Gram form with a restart at every step."""
    results = []
    for matrix in x:
        y = matrix.double()
        y = y / (torch.linalg.matrix_norm(y) * coefficients.safety_factor)
        for a, b, c in coefficients.steps:
            gram = y @ y.mT
            y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        results.append(y.float())
    return torch.stack(results)


def _compiled() -> Implementation:
    def standard(x: Tensor) -> Tensor:
        y = x / torch.linalg.matrix_norm(x, keepdim=True)
        y = y.bfloat16()
        for a, b, c in JORDAN.steps:
            gram = y @ y.mT
            y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        return y

    return torch.compile(standard, dynamic=False)


def _torch_muon() -> Implementation:
    from torch.optim._muon import _zeropower_via_newtonschulz

    triple = JORDAN.steps[0]
    return lambda x: torch.stack([_zeropower_via_newtonschulz(matrix, triple, 5, 1e-7) for matrix in x])


def _gram_newton_schulz_package() -> Implementation:
    from gram_newton_schulz import GramNewtonSchulz  # type: ignore[import-not-found]

    steps = [list(step) for step in JORDAN.steps]
    instance = GramNewtonSchulz(ns_coefficients=steps, gram_newton_schulz_reset_iterations=[2])

    def call(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        result: Tensor = instance(x)
        return result

    return call


def _dion() -> Implementation:
    from dion.newton_schulz_triton import newton_schulz_triton  # type: ignore[import-not-found]

    implementation: Implementation = newton_schulz_triton
    return implementation


def _emerging() -> Implementation:
    from emerging_optimizers.orthogonalized_optimizers import muon_utils  # type: ignore[import-not-found]

    def call(x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            raise ValueError("two-dimensional only")
        return muon_utils.newton_schulz(x[0], steps=5, use_syrk=True)[None]

    return call


# name -> module that must be installed, constructor, the coefficients that it uses
PEERS: dict[str, tuple[str, Callable[[], Implementation], str]] = {
    "torch.compile": ("torch", _compiled, "jordan"),
    "torch.optim.Muon": ("torch", _torch_muon, "jordan"),
    "gram-newton-schulz": ("gram_newton_schulz", _gram_newton_schulz_package, "jordan"),
    "dion": ("dion", _dion, "you"),
    "emerging-optimizers": ("emerging_optimizers", _emerging, "jordan"),
}


def bound_ms(shape: Shape) -> float:
    """The smaller of the standard and the Gram form (one restart) at the rate cuBLAS reaches on each product of this shape,
    symmetric products counted at half."""
    batch, m, n = shape
    x = torch.randn(batch, m, n, device="cuda", dtype=torch.bfloat16)
    s = torch.randn(batch, m, m, device="cuda", dtype=torch.bfloat16)
    gram, square, product = (time_ms(f, 30) for f in (lambda: x @ x.mT, lambda: s @ s, lambda: s @ x))
    return min(5 * (gram / 2 + square / 2 + product), 2 * (gram / 2 + product) + 14 * square / 2)


def _checked(implementation: Implementation, x: Tensor, reference: Tensor) -> dict[str, Any]:
    """Its error, or why it has none."""
    try:
        return {"error": relative_error(implementation(x), reference)}
    except Exception as problem:  # another package's failure is a line of the table, not the end of it
        return {"failed": said(problem)}


def compare(shapes: Sequence[Shape], keep: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    """Median times of rounds in which all take their turn, and errors, one row a shape: ``{"shape", "bound",
    "implementations": {name: {"ms", "error"}}}``.

    ``hf_emopt`` is called as the optimizer calls it, launch by launch; ``hf_emopt, graph`` is the replay of one CUDA graph,
    the mode in which gram-newton-schulz runs. ``keep`` is given all rows so far after every shape.
    """
    built = {
        name: (make(), coefficients)
        for name, (module, make, coefficients) in PEERS.items()
        if importlib.util.find_spec(module) is not None
    }
    rows = []
    for shape in shapes:
        torch.manual_seed(0)
        x = torch.randn(shape, device="cuda")
        references = {"jordan": exact(x, JORDAN)}
        names = ["hf_emopt", "hf_emopt, graph", *built]
        row: dict[str, Any] = {"shape": shape, "implementations": {name: {} for name in names}}
        results = row["implementations"]
        calls: dict[str, Callable[[], Any]] = {}
        for name, (implementation, coefficients) in {"hf_emopt": (newton_schulz, "jordan"), **built}.items():
            if coefficients not in references:
                references[coefficients] = exact(x, resolve_coefficients(coefficients, 5))
            results[name] = _checked(implementation, x, references[coefficients])
            if "failed" not in results[name]:
                calls[name] = functools.partial(implementation, x)
        try:
            calls["hf_emopt, graph"] = graphed(functools.partial(newton_schulz, x))
        except torch.OutOfMemoryError as problem:
            results["hf_emopt, graph"] = {"failed": str(problem)[:100]}
        failed: dict[str, str] = {}
        for name, ms in in_turn(calls, 35.0, failed).items():
            results[name]["ms"] = ms
        results.update({name: {"failed": why} for name, why in failed.items()})
        calls.clear()
        row["bound"] = bound_ms(shape)
        cells = [f"{name} {one['ms']:.3f}" if "ms" in one else f"{name} failed" for name, one in results.items()]
        print(f"{' x '.join(map(str, shape))}: {'  '.join(cells)}  bound {row['bound']:.3f}", flush=True)
        rows.append(row)
        keep(rows)
        del references, x
        torch.cuda.empty_cache()
    return rows


def tune(shapes: Sequence[Shape]) -> list[Entry]:
    """The best configuration for the products of every shape: ``X X^T``, the square ``A A``, and ``A A + A``."""
    architecture = runtime.architecture(torch.device("cuda", torch.cuda.current_device()))
    if architecture is None or not runtime.has_copy_engine(torch.device("cuda")):
        raise RuntimeError("tuning needs an NVIDIA GPU of capability 9.0 or higher, and Triton 3.4 or later")
    tried = configs.CANDIDATES[configs.family(architecture)]
    problems = sorted({(b, m, k, c) for b, m, n in shapes for k, c in ((n, False), (m, False), (m, True))})
    entries = []
    for batch, m, k, with_c in problems:
        times = measure_product(batch, m, k, tried, with_c)
        general = times.pop(None)
        config, best = min(times.items(), key=lambda item: item[1])
        assert config is not None
        entries.append(Entry(batch, m, k, with_c, config, best, general))
        print(f"{batch} x {m} x {k}: {best:.4f} ms, general product {general:.4f} ms, {config}", flush=True)
    return entries


def measure_product(
    batch: int, m: int, k: int, candidates: Sequence[Config], with_c: bool
) -> dict[Config | None, float]:
    """Milliseconds of one symmetric product by configuration; ``None`` is the vendor's general product."""
    from hf_emopt.kernels.triton.symmetric_product import symmetric_product

    a = torch.randn(batch, m, k, device="cuda", dtype=torch.float16)
    out = a.new_empty(batch, m, m)
    c = torch.zeros_like(out) if with_c else None
    general = functools.partial(torch.bmm, a, a.mT, out=out)
    if c is not None:
        general = functools.partial(torch.baddbmm, c, a, a.mT, out=out)
    functions: dict[Config | None, Callable[[], Any]] = {None: general}
    for config in candidates:
        functions[config] = functools.partial(symmetric_product, a, a, c, out, alpha=1.0, beta=1.0, config=config)
    if not is_short(batch, m, k):
        return in_turn(functions, 15.0)
    eights = {key: graphed(lambda call=call: [call() for _ in range(8)]) for key, call in functions.items()}  # type: ignore[misc]
    return {key: ms / 8 for key, ms in in_turn(eights, 15.0).items()}


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, and the geometric means of the ratios to every other implementation."""
    names = list(dict.fromkeys(name for row in rows for name in row["implementations"]))
    lines = ["| batch x m x n | " + " | ".join(names) + " | bound |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [row["implementations"].get(name, {}) for name in names]
        times = " | ".join(f"{cell['ms']:.3f}" if "ms" in cell else "-" for cell in cells)
        lines.append(f"| {' x '.join(map(str, row['shape']))} | {times} | {row['bound']:.3f} |")
    lines.append("")
    for ours in (name for name in names if name.startswith("hf_emopt")):
        for other in (name for name in names if not name.startswith("hf_emopt")):
            pairs = [(row["implementations"][ours], row["implementations"].get(other, {})) for row in rows]
            ratios = [a["ms"] / b["ms"] for a, b in pairs if "ms" in a and "ms" in b]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                lines.append(f"{ours} / {other}: {mean:.3f} (geometric mean of {len(ratios)} shapes)")
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Times relative to torch.compile, one group of bars a shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = dict.fromkeys(name for row in rows for name in row["implementations"] if name != "torch.compile")
    figure, axes = plt.subplots(figsize=(max(7.0, 1.2 * len(rows)), 4.0), layout="constrained")
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        times = [
            [row["implementations"].get(n, {}).get("ms", math.nan) for row in rows] for n in (name, "torch.compile")
        ]
        heights = [ours / compiled for ours, compiled in zip(*times)]
        axes.bar([j + i * width for j in range(len(rows))], heights, width, label=name)
    labels = [" x ".join(map(str, row["shape"])) for row in rows]
    axes.set_xticks([j + 0.4 for j in range(len(rows))], labels, rotation=30)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("time / torch.compile's")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run(
    shapes: Sequence[str] | None = None,
    output: str = "kernels.json",
    tune_table: str | None = None,
    make_plot: bool = True,
) -> int:
    """The subcommand: measures, prints, and writes ``output`` and a plot; raises ``ValueError`` without a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA device; torch sees none")
    chosen = SHAPES if not shapes else tuple(parse_shape(text) for text in shapes)
    if tune_table is not None:
        configs.save_table(Path(tune_table), tune(chosen), **device_facts())
        print(f"wrote {tune_table}: set {configs.TABLE_VARIABLE}={tune_table} to use it")
        return 0
    path = Path(output)

    def keep(rows: list[dict[str, Any]], products: Sequence[dict[str, Any]] = ()) -> None:
        path.write_text(json.dumps({**device_facts(), "rows": rows, "products": list(products)}, indent=1) + "\n")

    rows = compare(chosen, keep=keep)  # a run that is cut short keeps its rows so far
    print("\n" + report(rows))
    products = compare_products(chosen)
    print("\nX X^T alone, ms:\n" + report_products(products))
    keep(rows, products)
    if make_plot and importlib.util.find_spec("matplotlib") is not None:
        plot(rows, path.with_suffix(".png"))
    return 0
