"""Time of an optimizer step in each mode of tensor parallelism, beside what the cost model predicts.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --out benchmarks/results/tensor_parallel.json

Matrices of one shape, cut over all processes along the long or the short side, with given gradients. On a machine without
accelerators it runs with gloo, which shows that it runs and nothing else: give it ``--shapes 64x192``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hf_emopt

MODES = ("layerwise", "duplicated", "distributed", "blockwise")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4096x14336", "8192x28672"], help="ROWSxCOLUMNS")
    parser.add_argument("--cuts", nargs="+", default=["long", "short"], choices=["long", "short"])
    parser.add_argument("--modes", nargs="+", default=[*MODES, "auto"], choices=[*MODES, "auto"])
    parser.add_argument("--matrices", type=int, default=2, help="of each shape; layer-wise needs one a rank to be even")
    parser.add_argument("--optimizers", nargs="+", default=["Muon"], choices=["Muon", "NorMuon"])
    parser.add_argument("--dtype", default="bfloat16", help="of weights")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def model_of(shape: tuple[int, int], dim: int, count: int, dtype: torch.dtype, mesh: Any) -> nn.Module:
    """``count`` linear layers whose weights are cut along ``dim``; slices are made where they lie."""
    layers = []
    for number in range(count):
        with torch.device("meta"):
            layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
        size = list(shape)
        size[dim] //= mesh.size()
        torch.manual_seed(100 * number + mesh.get_local_rank())
        for name in ("weight", "grad"):
            local = torch.randn(size, device=mesh.device_type, dtype=dtype) * 0.02
            value = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            if name == "weight":
                layer.weight = nn.Parameter(value)
            else:
                layer.weight.grad = value
        layers.append(layer)
    return nn.ModuleList(layers)


def seconds(optimizer: torch.optim.Optimizer, steps: int, warmup: int, device: str) -> list[float]:
    """Wall time of each step, the slowest rank's."""
    found = []
    for step in range(warmup + steps):
        dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor([time.perf_counter() - start], device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        if step >= warmup:
            found.append(float(spent))
    return found


def measured(
    args: argparse.Namespace, name: str, shape: tuple[int, int], cut: str, mode: str, mesh: Any
) -> dict[str, Any]:
    dim = (0 if shape[0] > shape[1] else 1) if cut == "long" else (1 if shape[0] > shape[1] else 0)
    device = mesh.device_type
    model = model_of(shape, dim, args.matrices, getattr(torch, args.dtype), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # blockwise says that it is another update
        optimizer = getattr(hf_emopt, name)(model, lr=1e-3, tensor_parallel=mode)
        times = seconds(optimizer, args.steps, args.warmup, device)
    choices = optimizer._choices
    estimates = [choice.costs.get(choice.mode) for choice in choices]
    known = [e for e in estimates if e is not None]
    row: dict[str, Any] = {
        "optimizer": name,
        "shape": list(shape),
        "cut": cut,
        "matrices": args.matrices,
        "ranks": mesh.size(),
        "asked": mode,
        "mode": choices[0].mode,
        "median_ms": 1e3 * statistics.median(times),
        "fastest_ms": 1e3 * min(times),
        "predicted_ms": 1e3 * sum(e.seconds for e in known) if known else None,
        "predicted_tflop": sum(e.flops for e in known) / 1e12 if known else None,
        "predicted_mb": sum(e.bytes for e in known) / 1e6 if known else None,
        "predicted_by_mode_ms": {m: 1e3 * args.matrices * e.seconds for m, e in choices[0].costs.items()},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
    }
    del optimizer, model
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return row


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    rows = []
    for name in args.optimizers:
        for text in args.shapes:
            first, _, second = text.partition("x")
            shape = (int(first), int(second))
            for cut in args.cuts:
                for mode in args.modes:
                    row = measured(args, name, shape, cut, mode, mesh)
                    rows.append(row)
                    if dist.get_rank() == 0:
                        predicted = "-" if row["predicted_ms"] is None else f"{row['predicted_ms']:8.2f}"
                        print(
                            f"{name:8} {text:>12} {cut:5} {mode:>11} -> {row['mode']:11} {row['median_ms']:8.2f} ms, "
                            f"predicted {predicted} ms",
                            flush=True,
                        )
                        if args.out is not None:  # after every row: a run that is cut short leaves what it has
                            _write(args.out, rows, device)
    dist.destroy_process_group()


def _write(path: Path, rows: list[dict[str, Any]], device: str) -> None:
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "hf_emopt": hf_emopt.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
