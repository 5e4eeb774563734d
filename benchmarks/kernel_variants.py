"""Kernel variants against none of them, on this GPU: orthogonalizations, normalizations alone, and tiles for short products.

python benchmarks/kernel_variants.py                        # some 90 s on an H200, half of it compiling in parallel
python benchmarks/kernel_variants.py --part orthogonalization --shapes 12x768x3072

The first of ``--variants`` is what the others are compared with.

Whatever is not faster is to be removed. Medians of rounds that alternate between the variants, L2 cleared between calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.triton import runtime, variants
from hf_emopt.kernels.triton.configs import Config, choose
from hf_emopt.linalg.newton_schulz import newton_schulz
from hf_emopt.linalg.symmetric_products import normalize_cast
from hf_emopt.tools.bench.kernels import JORDAN, SHAPES, exact, geometric_mean, parse_shape, relative_error
from hf_emopt.tools.bench.timing import Shape, device_facts, graphed, in_turn, time_ms

ALL = "estimate,diagonal"
VARIANTS = ("", "estimate", "diagonal", ALL)
ROUNDS = 3
# Three programs a multiprocessor, which takes the registers that `diagonal` saves.
SMALL_TILES = (Config(128, 128, 64, 4, 3), Config(128, 128, 64, 4, 2), Config(128, 128, 32, 4, 4))
SHORT = ((12, 768, 768), (128, 768, 768), (24, 1024, 1024), (128, 768, 2048), (24, 1024, 4096))


def use(chosen: str) -> None:
    os.environ[variants.VARIABLE] = chosen


def show(text: str) -> None:
    print(text, flush=True)


def orthogonalization(shape: Shape, names: Sequence[str], repeat_ms: float) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda")
    reference = exact(x, JORDAN)

    def call(name: str) -> Callable[[], Tensor]:
        def function() -> Tensor:
            use(name)
            return newton_schulz(x)

        return function

    errors, same = {}, {}
    for name in names:
        cuda_graphs.clear()
        results = [call(name)().clone() for _ in range(3)]  # launched, recorded, replayed
        errors[name] = relative_error(results[0], reference)
        same[name] = all(torch.equal(results[0], other) for other in results[1:])
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        for name in names if turn % 2 else tuple(reversed(names)):
            cuda_graphs.clear()
            call(name)()
            call(name)()
            times[name].append(time_ms(call(name), repeat_ms, most=60))
    return {
        "shape": shape,
        "ms": {name: sorted(values)[ROUNDS // 2] for name, values in times.items()},
        "error": errors,
        "repeatable": same,
    }


def normalization(shape: Shape, repeat_ms: float) -> dict[str, float]:
    from hf_emopt.kernels.triton.estimated_launch import estimated_cast

    x = torch.randn(shape, device="cuda")
    out = torch.empty_like(x, dtype=torch.float16)
    correction = torch.empty(shape[0], device="cuda")
    outlier = x.clone()
    outlier[:, 1, 3] = 1e9
    return in_turn(
        {
            "two reads": lambda: normalize_cast(x, torch.float16, 1024.0, out=out),
            "estimate": lambda: estimated_cast(x, 1024.0, out, correction),
            "estimate, cast again": lambda: estimated_cast(outlier, 1024.0, out, correction),
        },
        repeat_ms,
        ROUNDS,
        most=60,
    )


def tile_functions(shape: Shape) -> dict[str, Callable[[], object]]:
    """``A A^T``, and for square ``A`` ``A B^T`` of two matrices, with the table's tile and some others."""
    from hf_emopt.kernels.triton.symmetric_launch import symmetric_product

    batch, m, k = shape
    a = torch.randn(shape, device="cuda", dtype=torch.float16)
    b = a.clone()
    out = a.new_empty(batch, m, m)
    table = choose(runtime.architecture(a.device), batch, m, k)
    candidates = [(f"table, {names or 'none'}", names, table) for names in ("", "diagonal")]
    for config in SMALL_TILES:
        tile = f"{config.block_m}x{config.block_n}x{config.block_k}, {config.num_stages} stages"
        candidates.append((f"{tile}, diagonal", "diagonal", config))
    functions: dict[str, Callable[[], object]] = {}
    for right, label in ((a, "A A^T"), *(((b, "A B^T"),) if m == k else ())):
        for name, names, config in candidates:

            def function(right: Tensor = right, names: str = names, config: Config = config) -> None:
                use(names)
                symmetric_product(a, right, None, out, alpha=1.0, beta=0.0, config=config)

            functions[f"{label} {name}"] = function
    return functions


def tiles(shape: Shape, repeat_ms: float) -> dict[str, float]:
    """ms of a launch, in graphs of eight."""

    def eight(one: Callable[[], object]) -> Callable[[], Any]:
        return graphed(lambda: [one() for _ in range(8)])

    eights = {name: eight(one) for name, one in tile_functions(shape).items()}
    return {name: ms / 8 for name, ms in in_turn(eights, repeat_ms, ROUNDS, most=60).items()}


def compile_all(shapes: Sequence[Shape], parts: Sequence[str], names: Sequence[str]) -> None:
    """Fills Triton's cache, by a process for each shape and one for the tiles."""
    command = [sys.executable, __file__, "--warm", "--variants", *names]
    jobs = [["--shapes", "x".join(map(str, shape))] for shape in shapes if "orthogonalization" in parts]
    jobs += [["--part", "tiles"]] * ("tiles" in parts)
    codes = [process.wait() for process in [subprocess.Popen([*command, *job]) for job in jobs]]
    if any(codes):
        raise RuntimeError(f"processes that compile failed, exit codes {codes}; their errors are above")


def warm(shapes: Sequence[Shape], parts: Sequence[str], names: Sequence[str]) -> None:
    os.environ[cuda_graphs.DISABLE_VARIABLE] = "1"
    if "orthogonalization" not in parts:
        for functions in [tile_functions(shape) for shape in SHORT]:
            for function in functions.values():
                function()
        shapes = ()
    for shape in shapes:
        x = torch.randn(shape, device="cuda")
        for name in names:
            use(name)
            newton_schulz(x)
    torch.cuda.synchronize()


def report(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0]["ms"])
    show(
        f"\n| batch x m x n | {names[0] or 'none'}, ms | "
        + " | ".join(names[1:])
        + " |\n"
        + "|---" * (len(names) + 1)
        + "|"
    )
    for row in rows:
        base = row["ms"][names[0]]
        cells = " | ".join(f"{row['ms'][name] / base:.3f}" for name in names[1:])
        show(f"| {' x '.join(map(str, row['shape']))} | {base:.3f} | {cells} |")
    means = [geometric_mean([row["ms"][name] / row["ms"][names[0]] for row in rows]) for name in names[1:]]
    show("| geometric mean | | " + " | ".join(f"**{mean:.4f}**" for mean in means) + " |")
    for row in rows:
        worst = max(row["error"].values()) / row["error"][names[0]]
        flags = "" if all(row["repeatable"].values()) else f"  NOT REPEATABLE {row['repeatable']}"
        show(f"{row['shape']}: error {row['error'][names[0]]:.5f}, largest of the variants {worst:.3f} of that{flags}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", help="BATCHxMxN; default: the twelve of docs/kernels.md")
    parser.add_argument("--part", choices=("orthogonalization", "normalization", "tiles"), nargs="*")
    parser.add_argument(
        "--variants", nargs="*", default=VARIANTS, help="what orthogonalizations run with, as the variable"
    )
    parser.add_argument("--repeat-ms", type=float, default=40.0)
    parser.add_argument("--no-warm", action="store_true", help="do not compile in parallel beforehand")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = tuple(parse_shape(text) for text in options.shapes) if options.shapes else SHAPES
    parts = options.part or ("orthogonalization", "normalization", "tiles")
    if options.warm:
        warm(shapes, parts, options.variants)
        return 0
    started = time.perf_counter()
    results: dict[str, Any] = device_facts()
    show(f"{results}")
    if not options.no_warm:
        compile_all(shapes, parts, options.variants)
        show(f"compiled after {time.perf_counter() - started:.0f} s")
    if "orthogonalization" in parts:
        results["rows"] = []
        for shape in shapes:
            row = orthogonalization(shape, options.variants, options.repeat_ms)
            show(f"{shape}: " + "  ".join(f"{name or 'none'} {ms:.4f}" for name, ms in row["ms"].items()))
            results["rows"].append(row)
            cuda_graphs.clear()
            torch.cuda.empty_cache()
        report(results["rows"])
        show(f"after {time.perf_counter() - started:.0f} s")
    others = (("normalization", normalization, shapes), ("tiles", tiles, SHORT))
    for part, function, problems in others:
        if part not in parts:
            continue
        use("")
        results[part] = []
        for shape in problems if part == "normalization" or not options.shapes else shapes:
            times = function(shape, options.repeat_ms / 2)
            show(f"{part} {shape}: " + "  ".join(f"[{name}] {ms:.4f}" for name, ms in times.items()))
            results[part].append({"shape": shape, "ms": times})
            torch.cuda.empty_cache()
        show(f"after {time.perf_counter() - started:.0f} s")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
