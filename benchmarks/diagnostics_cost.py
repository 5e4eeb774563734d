"""What diagnostics cost: milliseconds of a step without them, of a measured step, and its waits for the device.

python benchmarks/diagnostics_cost.py --device cpu --tiny
torchrun --nproc_per_node 2 benchmarks/diagnostics_cost.py --layers 24 --hidden 2048
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from hf_emopt.tools.commands.plan import build_optimizer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--optim", nargs="*", default=["muon", "normuon", "soap", "shampoo"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="two layers of 32, five steps")
    parser.add_argument("--output", default=None, help="JSON file")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.hidden, args.steps = 2, 32, 5
    return args


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The matrices of a decoder: four of attention and three of a gated perceptron in each layer."""
    torch.manual_seed(0)
    h, f = args.hidden, args.hidden * 8 // 3 // 32 * 32
    shapes = [(h, h)] * 4 + [(f, h), (f, h), (h, f)]
    return nn.ModuleList(nn.Linear(n, m) for _ in range(args.layers) for m, n in shapes).to(device)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator(next(model.parameters()).device).manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, device=p.device)


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def waits(call: Callable[[], object], device: torch.device) -> int | None:
    """How often the host waited for the device, by torch's own count."""
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)


def measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    model = build(args, device)
    optimizer = build_optimizer(name, model, None)
    values: dict[str, float] = {}

    def measured() -> None:
        with optimizer.diagnostics() as found:
            optimizer.step()
        values.update(found)

    off, on = [], []
    for step in range(3):  # compile, allocate, first refresh
        set_gradients(model, step)
        optimizer.step()
        measured()
    for step in range(3, args.steps + 3):
        set_gradients(model, step)
        off.append(milliseconds(optimizer.step, device))
        on.append(milliseconds(measured, device))
        waited_off, waited_on = (waits(call, device) for call in (optimizer.step, measured))
    return {
        "optim": name, "ms_off": statistics.median(off), "ms_measured": statistics.median(on),
        "waits_off": waited_off, "waits_measured": waited_on, "figures": len(values),
        "exposed_communication_ms": values.get("emopt/exposed_communication_ms"),
    }  # fmt: skip


def main() -> None:
    args = parse()
    several = "WORLD_SIZE" in os.environ
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if several:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rows = [measure(name, args, device) for name in args.optim]
    if not several or dist.get_rank() == 0:
        for row in rows:
            print(json.dumps(row))
        if args.output:
            with open(args.output, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
