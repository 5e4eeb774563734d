"""Symmetric products and whole orthogonalizations on this GPU: what docs/kernels.md reports.

python benchmarks/kernel_times.py --output benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse

from hf_emopt.tools.bench.kernels import SHAPES, run, tune


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="kernels.json")
    parser.add_argument("--products", action="store_true", help="also every tile on every symmetric product")
    options = parser.parse_args()
    if options.products:
        tune(SHAPES)
    return run(output=options.output)


if __name__ == "__main__":
    raise SystemExit(main())
