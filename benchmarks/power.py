"""Orthogonalizations of random and of predictable numbers, one after another: what a card's power limit costs.

    python benchmarks/power.py --json power.json

Multiplying zeros takes as many instructions as multiplying anything else, and less power. Where the clock is what holds
random numbers up, neither better filled waves nor fewer bytes are of much use; fewer operations are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_emopt.linalg import newton_schulz

SHAPES = [(22, 5632, 2048), (11, 5632, 2048), (5, 5632, 2048), (22, 2048, 2048)]
CARD = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
QUERY = ["nvidia-smi", "-i", CARD, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]


def made(kind: str, batch: int, m: int, n: int) -> Tensor:
    """Normal numbers, or matrices of a single one."""
    if kind == "random":
        return torch.randn(batch, m, n, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros(batch, m, n, device="cuda", dtype=torch.bfloat16)
    x[:, 0, 0] = 1.0
    return x


def measure(x: Tensor, seconds: float) -> dict[str, Any]:
    """Milliseconds of the first five calls and of the last twenty, and what the card says in the second half."""
    for _ in range(3):
        newton_schulz(x, dtype=torch.float16)
    torch.cuda.synchronize()
    time.sleep(1.0)  # cool
    said: list[tuple[float, float]] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(0.2):
            clock, power = subprocess.run(QUERY, check=True, capture_output=True, text=True).stdout.split(",")
            said.append((float(clock), float(power)))

    asking = threading.Thread(target=ask)
    asking.start()
    times: list[float] = []
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        newton_schulz(x, dtype=torch.float16)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    ended.set()
    asking.join()
    if not said:
        raise RuntimeError(f"{' '.join(QUERY)} said nothing within {seconds} s: see its own message above")
    later = said[len(said) // 2 :]
    return {
        "first_ms": statistics.median(times[:5]),
        "ms": statistics.median(times[-20:]),
        "mhz": statistics.median(clock for clock, _ in later),
        "watts": statistics.median(power for _, power in later),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit}
    rows = []
    for batch, m, n in SHAPES:
        for kind in ("random", "zeros"):
            row = {"batch": batch, "m": m, "n": n, "kind": kind, **measure(made(kind, batch, m, n), args.seconds)}
            rows.append(row)
            print(
                f"{batch:3} x {m} x {n} {kind:7} first {row['first_ms']:6.2f} ms, then {row['ms']:6.2f} "
                f"({row['ms'] / batch:.3f} each) at {row['mhz']:.0f} MHz and {row['watts']:.0f} W", flush=True,
            )  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
