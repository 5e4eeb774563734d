"""Milliseconds of a training step and of its optimizer under DeepSpeed ZeRO, beside AdamW and DeepSpeed's own Muon.

    torchrun --nproc-per-node 2 benchmarks/step_time_deepspeed.py --stages 2 3 --json out.json

Random tokens, a Llama of the given size in bfloat16 with float32 masters, as DeepSpeed keeps them. For every optimizer the
engine is built anew, the first steps are left out, and each figure is the median over steps of the slowest rank:

* ``step``: forward, backward and ``engine.step()``, between two barriers;
* ``optimizer``: ``engine.step()`` alone, between two synchronizations: norm, optimizer, and ZeRO's copies and gathers;
* ``first``: the first step of rank 0, where kernels are compiled; ``peak_gib``: of allocated memory.

Each case runs by itself: one that fails, or takes longer than ``--limit`` seconds, is reported with the reason and does not
take the others with it, and the exit status is 1 then; no case begins once ``--budget`` seconds are over. DeepSpeed's
FusedAdam is compiled when it is first used, which needs nvcc, and its row says so where there is none. The number of matrices
transformed by this package is checked; of DeepSpeed's Muon, that it was given matrices.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from case_workers import Ranks, Unavailable
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.tools.bench.step import Clock, Settings, check_transforms, counted, refresh_schedule, summary
from hf_emopt.tools.bench.step_models import MODELS, build_model
from hf_emopt.tools.bench.step_optimizers import DECAY, LR, MATRIX_OPTIMIZERS
from hf_emopt.tools.bench.step_optimizers import OPTIMIZERS as MAKERS

NATIVE = {"lr": LR, "momentum": 0.95, "weight_decay": DECAY, "torch_adam": True}
OURS = tuple(name for name in MATRIX_OPTIMIZERS if name != "muon-overlap")
OPTIMIZERS = ("adamw", "fused-adam", "native-muon", "native-muon-standard", *OURS)


def make(name: str, model: nn.Module) -> tuple[torch.optim.Optimizer | None, dict[str, Any]]:
    """The client optimizer, or what DeepSpeed's configuration says instead."""
    if name == "fused-adam":
        return None, {"optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}}
    if name.startswith("native-muon"):
        method = "standard" if name.endswith("standard") else "gram"
        return None, {"optimizer": {"type": "Muon", "params": {**NATIVE, "ns_method": method}}}
    return MAKERS[name](model, Settings()), {}


def configuration(stage: int, name: str, sequences: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 3 and name.startswith("native-muon"):
        zero["reduce_scatter"] = False  # DeepSpeed's Muon asks for it
    return {
        "train_micro_batch_size_per_gpu": sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def one_step(engine: Any, tokens: torch.Tensor, device: torch.device) -> tuple[float, float]:
    """Milliseconds of a step and of its optimizer on this rank."""
    clock = Clock(device)
    begin = clock.now(barrier=True)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    middle = clock.now()
    engine.step()
    end = clock.now()
    return 1e3 * (clock.now(barrier=True) - begin), 1e3 * (end - middle)


def initialize(model: nn.Module, stage: int, name: str, sequences: int) -> Any:
    """DeepSpeed's engine.

    Raises:
        Unavailable: where it cannot be built, as where what DeepSpeed compiles cannot be compiled.
    """
    import deepspeed

    try:
        optimizer, extra = make(name, model)
        settings = {**configuration(stage, name, sequences), **extra}
        # DeepSpeed's own optimizers are built of the parameters.
        given: dict[str, Any] = (
            {"model_parameters": model.parameters()} if optimizer is None else {"optimizer": optimizer}
        )
        return deepspeed.initialize(model=model, config=settings, **given)[0]
    except Exception as error:
        raise Unavailable from error


def measure(device: torch.device, stage: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of one optimizer at one stage."""
    import deepspeed

    if device.type == "cpu":  # its own collectives there take minutes to compile; gloo's will do
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    model = build_model(options["model"], device)
    engine = initialize(model, stage, name, options["sequences"])
    generator = torch.Generator().manual_seed(dist.get_rank())
    config: Any = model.config
    shape, vocabulary = (options["sequences"], options["length"]), int(config.vocab_size)
    batches = [torch.randint(0, vocabulary, shape, generator=generator).to(device) for _ in range(4)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first, period = refresh_schedule(engine.basic_optimizer)
    # As in hf_emopt.tools.bench.step: what is compiled and recorded in two periods is left out.
    warmup = max(options["warmup"], first) + (2 * period if period > 1 else 0)
    steps = -(-options["steps"] // period) * period
    times = []
    for index in range(warmup + steps):
        times.append(one_step(engine, batches[index % 4], device))
        if index == 0 and dist.get_rank() == 0:
            print(f"  ZeRO-{stage} {name}: first step {times[0][0]:.0f} ms", flush=True)
    kinds = dict(zip(("step", "optimizer"), map(list, zip(*times[warmup:]))))
    tokens = options["sequences"] * options["length"] * dist.get_world_size()
    result: dict[str, Any] = {**summary(kinds, tokens, device, period > 1), "first": times[0][0]}
    client = engine.basic_optimizer
    if isinstance(client, MatrixOptimizer):
        result |= check_transforms(client, len(times), device)
    elif name.startswith("native"):
        result["class"] = type(client).__name__
        result["matrices"] = sum(bool(getattr(p, "use_muon", False)) for p in model.parameters())
        if not result["matrices"]:
            raise RuntimeError("no parameter is on DeepSpeed's Muon, so the figure would be of AdamW")
    engine.destroy()
    return result


def line(stage: int, name: str, figures: dict[str, Any], seconds: float) -> str:
    """A result as text."""
    head = f"[{seconds:5.0f} s] ZeRO-{stage} {name:22}"
    if "step" not in figures:
        return head + "; ".join(f"{key}: {value}" for key, value in figures.items())
    peak = f", peak {figures['peak_gib']:.1f} GiB" if "peak_gib" in figures else ""
    optimizer = figures["optimizer_mean" if figures.get("scheduled") else "optimizer"]
    return head + f"step {counted(figures):9.2f} ms, optimizer {optimizer:9.2f} ms{peak}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-1.1b")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS,
        default=["adamw", "fused-adam", "native-muon", "native-muon-standard", "muon", "soap"],
    )  # fmt: skip
    parser.add_argument("--sequences", type=int, default=4, help="of each rank")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--budget", type=float, default=300, help="seconds for all cases")
    parser.add_argument("--limit", type=float, default=100, help="seconds for one case")
    parser.add_argument("--json", default=None)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")  # nvcc of another minor version than torch's will do
    given = {key: value for key, value in vars(options).items() if key != "json"}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    found: dict[str, Any] = {"torch": torch.__version__, "commit": commit, **given, "results": []}
    ranks = Ranks(measure, options.budget, options.limit)
    found["world_size"] = ranks.size
    for stage in options.stages:
        for name in options.optimizers:
            begin = time.monotonic()
            figures = ranks.run(stage=stage, name=name, options=given)
            seconds = round(time.monotonic() - begin, 1)
            found["results"].append({"stage": stage, "optimizer_name": name, "seconds": seconds, **figures})
            if ranks.rank == 0:
                print(line(stage, name, figures, ranks.seconds), flush=True)
                if options.json is not None:
                    with open(options.json, "w") as file:
                        json.dump(found, file, indent=1)
    ranks.close()
    if any("failed" in case for case in found["results"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
