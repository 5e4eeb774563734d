"""Time of each optimizer step over whole refresh periods, for every refresh policy, on a 4-layer Llama.

    python benchmarks/refresh_cost.py --hidden 256 --out runs/refresh_cpu.json
    python benchmarks/refresh_cost.py --hidden 2048 --device cuda --precision tf32 --out runs/refresh_gpu.json

Gradients are random and of full rank; forward and backward are not run. The first two periods are left out: in the first
each block gets its basis or root from a full decomposition, and kernels are loaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_emopt.integrations.transformers import OPTIMIZERS


def build_model(args: argparse.Namespace) -> Any:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=args.hidden, intermediate_size=int(args.hidden * 2.75), num_hidden_layers=4,
        num_attention_heads=args.hidden // 64, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return model.to(args.device)


def now(args: argparse.Namespace) -> float:
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if args.processor_time else time.perf_counter()


def measure(args: argparse.Namespace, name: str, refresh: str | None) -> dict[str, Any]:
    """Milliseconds of each step in the measured periods."""
    torch.manual_seed(0)
    model = build_model(args)
    if name == "adamw":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    elif refresh is None:
        cls: Any = OPTIMIZERS[name]
        optimizer = cls(model, lr=1e-4)
    else:
        cls = OPTIMIZERS[name]
        extra = {"oversize": "block"} if name == "soap" else {}
        optimizer = cls(
            model, lr=1e-4, refresh=refresh, precondition_frequency=args.frequency, matmul_precision=args.precision,
            max_preconditioner_dim=args.block, **extra,
        )  # fmt: skip
    generator = torch.Generator(args.device).manual_seed(0)
    milliseconds = []
    for step in range(args.frequency * (2 + args.periods)):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, device=args.device)
        started = now(args)
        optimizer.step()
        elapsed = 1000 * (now(args) - started)
        if step >= 2 * args.frequency:
            milliseconds.append(elapsed)
    del optimizer, model
    if args.device == "cuda":
        torch.cuda.empty_cache()
    # The same place in each period, so that a hiccup of the machine is no refresh.
    by_place = [statistics.median(milliseconds[i :: args.frequency]) for i in range(args.frequency)]
    return {
        "optim": name, "refresh": refresh, "ms": milliseconds, "median": statistics.median(by_place),
        "mean": statistics.mean(by_place), "largest": max(by_place),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--block", type=int, default=2048, help="max_preconditioner_dim, sides are cut to it")
    parser.add_argument("--frequency", type=int, default=10)
    parser.add_argument("--periods", type=int, default=5)
    parser.add_argument("--precision", default="highest")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--processor-time", dest="processor_time", action="store_true",
        help="of this process, all threads, where others share the processor",
    )  # fmt: skip
    parser.add_argument("--optim", nargs="+", default=["soap", "shampoo", "kl_shampoo"])
    parser.add_argument("--refresh", nargs="+", default=["synchronous", "staggered"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [measure(args, "adamw", None), measure(args, "muon", None)]
    rows += [measure(args, name, refresh) for name in args.optim for refresh in args.refresh]
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU"
    print(
        f"4 layers of hidden {args.hidden}, blocks of {args.block}, frequency {args.frequency}, {args.precision}, {device}\n"
    )
    print("| optimizer | refresh | median ms | mean ms | largest ms | largest / median |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['optim']} | {row['refresh'] or '-'} | {row['median']:.2f} | {row['mean']:.2f} | {row['largest']:.2f} | "
            f"{row['largest'] / row['median']:.2f} |"
        )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
        args.out.write_text(
            json.dumps({"device": device, "torch": torch.__version__, "settings": settings, "rows": rows})
        )


if __name__ == "__main__":
    main()
