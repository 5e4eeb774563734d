"""``X X^T`` alone: this package's kernel, the vendor's general product, and the symmetric kernels of others."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_emopt.linalg.symmetric_products import syrk
from hf_emopt.tools.bench.timing import Shape, graphed, in_turn, is_short, relative_error, said

Product = Callable[[Tensor], Tensor]
_LARGEST_ERROR = 1e-2
"""Relative, of a right result: rounding to bfloat16 is 2e-3. Who is off by more has computed something else."""


def _general() -> Product:
    return lambda x: torch.bmm(x, x.mT)


def _quack() -> Product:
    from quack.gemm_interface import gemm_symmetric  # type: ignore[import-not-found]

    def call(x: Tensor) -> Tensor:
        found = gemm_symmetric(x, x.mT) if x.shape[0] > 1 else gemm_symmetric(x[0], x[0].mT)
        result: Tensor = found if isinstance(found, Tensor) else found[1]  # it is said to be a pair, and is none in 0.5
        return result.reshape(x.shape[0], x.shape[1], x.shape[1])

    return call


def _dion() -> Product:
    from dion.newton_schulz_triton import ns_line_1  # type: ignore[import-not-found]

    product: Product = ns_line_1
    return product


def _emerging() -> Product:
    from emerging_optimizers.triton_kernels import batched_tsyrk_ex, tsyrk_ex  # type: ignore[import-not-found]

    def call(x: Tensor) -> Tensor:
        result: Tensor = tsyrk_ex(x[0])[None] if x.shape[0] == 1 else batched_tsyrk_ex(x)
        return result

    return call


# name -> module that must be installed, constructor
_PEERS: dict[str, tuple[str, Callable[[], Product]]] = {
    "cuBLAS, general": ("torch", _general),
    "QuACK": ("quack", _quack),
    "dion": ("dion", _dion),
    "emerging-optimizers": ("emerging_optimizers", _emerging),
}


def _checked(product: Product, x: Tensor, reference: Tensor) -> dict[str, Any]:
    """Its error and a function that takes its time (``call``; ``calls`` of the product each), or why it has none."""
    try:
        error = relative_error(product(x), reference)
        if not error <= _LARGEST_ERROR:
            raise ValueError(f"the result is off by {error:.2g} of its norm")
        if is_short(*x.shape):
            return {"error": error, "calls": 8, "call": graphed(lambda: [product(x) for _ in range(8)])}
        return {"error": error, "calls": 1, "call": lambda: product(x)}
    except Exception as problem:  # another package's failure is a line of the table, not the end of it
        return {"failed": said(problem)}


def compare_products(shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Median ms of ``X X^T`` in bfloat16, L2 cleared between calls of long ones, of all implementations in turn.
    ``{"shape", "implementations": {name: {"ms", "error"}}}`` a row."""
    peers = {name: make() for name, (module, make) in _PEERS.items() if importlib.util.find_spec(module) is not None}
    everyone: dict[str, Product] = {"hf_emopt": syrk, **peers}
    rows = []
    for shape in shapes:
        torch.manual_seed(0)
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        reference = x.float() @ x.float().mT
        found = {name: _checked(product, x, reference) for name, product in everyone.items()}
        calls = {name: one.pop("call") for name, one in found.items() if "call" in one}
        failed: dict[str, str] = {}
        for name, ms in in_turn(calls, 30.0, failed).items():
            found[name]["ms"] = ms / found[name].pop("calls")
        found.update({name: {"failed": why} for name, why in failed.items()})
        rows.append({"shape": shape, "implementations": found})
        del x, reference, calls
    return rows


def report_products(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; the last column is our time in units of the best other's."""
    names = list(dict.fromkeys(name for row in rows for name in row["implementations"]))
    lines = ["| batch x m x k | " + " | ".join(names) + " | of the best other |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        times = {name: cell["ms"] for name, cell in row["implementations"].items() if "ms" in cell}
        cells = " | ".join(f"{times[name]:.4f}" if name in times else "-" for name in names)
        others = [ms for name, ms in times.items() if name != "hf_emopt"]
        ratio = f"{times['hf_emopt'] / min(others):.2f}" if others and "hf_emopt" in times else "-"
        lines.append(f"| {' x '.join(map(str, row['shape']))} | {cells} | {ratio} |")
    return "\n".join(lines)
