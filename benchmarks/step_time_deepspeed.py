"""Milliseconds of a training step and of its optimizer under DeepSpeed ZeRO, beside AdamW and DeepSpeed's own Muon.

    torchrun --nproc-per-node 2 benchmarks/step_time_deepspeed.py --stages 2 3 --json out.json

Random tokens, a Llama of the given size in bfloat16 with float32 masters, as DeepSpeed keeps them. For every optimizer the
engine is built anew, the first steps are left out, and each figure is the median over steps of the slowest rank:

* ``step``: forward, backward and ``engine.step()``, between two barriers;
* ``optimizer``: ``engine.step()`` alone, between two synchronizations: norm, optimizer, and ZeRO's copies and gathers;
* ``first``: the first step, where kernels are compiled; ``peak``: of allocated memory in GiB.

What cannot be built here is reported with the reason: DeepSpeed's FusedAdam is compiled when it is first used, which needs
nvcc. The number of matrices transformed by this package is asserted; of DeepSpeed's Muon, that it was given matrices.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.matrix_optimizer import MatrixOptimizer

MODELS: dict[str, dict[str, Any]] = {
    "llama-1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                   "num_key_value_heads": 4},
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},
}  # fmt: skip

KRONECKER = {"precondition_frequency": 10, "max_preconditioner_dim": 2048, "matmul_precision": "tf32"}
LR, DECAY = 1e-3, 0.1
NATIVE = {"lr": LR, "momentum": 0.95, "weight_decay": DECAY, "torch_adam": True}

OPTIMIZERS = ("adamw", "fused-adam", "native-muon", "native-muon-standard", "muon", "normuon", "soap", "shampoo")


def make(name: str, model: nn.Module) -> tuple[torch.optim.Optimizer | None, dict[str, Any]]:
    """The client optimizer, or what DeepSpeed's configuration says instead."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True), {}
    if name == "fused-adam":
        return None, {"optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}}}
    if name.startswith("native-muon"):
        method = "standard" if name.endswith("standard") else "gram"
        return None, {"optimizer": {"type": "Muon", "params": {**NATIVE, "ns_method": method}}}
    classes: dict[str, Any] = {
        "muon": hf_emopt.Muon, "normuon": hf_emopt.NorMuon, "soap": hf_emopt.SOAP, "shampoo": hf_emopt.Shampoo,
    }  # fmt: skip
    fixed: dict[str, Any] = KRONECKER if name in ("soap", "shampoo") else {}
    fixed = {**fixed, "oversize": "block"} if name == "soap" else fixed
    return classes[name](model, lr=LR, weight_decay=DECAY, **fixed), {}


def configuration(stage: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    if stage == 3 and name.startswith("native-muon"):
        zero["reduce_scatter"] = False  # DeepSpeed's Muon asks for it
    return {
        "train_micro_batch_size_per_gpu": options.sequences,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value) * 1e3


def one_step(engine: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Milliseconds of a step and of its optimizer, of the slowest rank."""
    synchronize()
    dist.barrier()
    begin = time.perf_counter()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    synchronize()
    middle = time.perf_counter()
    engine.step()
    synchronize()
    end = time.perf_counter()
    dist.barrier()
    return slowest(time.perf_counter() - begin), slowest(end - middle)


def measure(stage: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one optimizer at one stage; ``{"unavailable": reason}`` where it cannot be built."""
    torch.manual_seed(0)
    device = deepspeed.get_accelerator().current_device_name()
    config = LlamaConfig(
        vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False,
        **MODELS[options.model],
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.train()
    try:
        optimizer, extra = make(name, model)
        settings = {**configuration(stage, name, options), **extra}
        # DeepSpeed's own optimizers are built of the parameters.
        given: dict[str, Any] = (
            {"model_parameters": model.parameters()} if optimizer is None else {"optimizer": optimizer}
        )
        engine = deepspeed.initialize(model=model, config=settings, **given)[0]
    except Exception as error:
        return {"unavailable": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (options.sequences, options.length)
    batches = [torch.randint(0, 32000, shape, generator=generator).to(device) for _ in range(4)]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = [one_step(engine, batches[i % 4]) for i in range(options.warmup + options.steps)]
    measured = times[options.warmup :]
    result: dict[str, Any] = {
        "step_ms": statistics.median(t for t, _ in measured),
        "optimizer_ms": statistics.median(t for _, t in measured),
        "optimizer_max_ms": max(t for _, t in measured),
        "optimizer_mean_ms": statistics.mean(t for _, t in measured),
        "first_ms": times[0][0],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
    }
    client = engine.basic_optimizer
    if isinstance(client, MatrixOptimizer):
        result["transforms_per_step"] = count_transforms(client, len(times))
    elif name.startswith("native"):
        result["class"] = type(client).__name__
        result["matrices"] = sum(bool(getattr(p, "use_muon", False)) for p in model.parameters())
        if not result["matrices"]:
            raise RuntimeError("no parameter is on DeepSpeed's Muon, so the figure would be of AdamW")
    engine.destroy()
    return result


def count_transforms(optimizer: MatrixOptimizer, steps: int) -> float:
    """Matrices of all ranks in a step; an error where some were left out."""
    count = torch.tensor([optimizer.transform_count], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(count)
    expected = sum(unit.shape[0] for route in optimizer.routes.matrices for unit in route.units)
    if int(count) != expected * steps:
        raise RuntimeError(f"{int(count)} matrices were transformed in {steps} steps, not {expected} in each")
    return expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-1.1b")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 3])
    parser.add_argument(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=["adamw", "fused-adam", "native-muon", "muon"]
    )
    parser.add_argument("--sequences", type=int, default=4, help="of each rank")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    deepspeed.init_distributed(verbose=False)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "device": name, "world_size": dist.get_world_size(), "torch": torch.__version__,
        "deepspeed": deepspeed.__version__, **{k: v for k, v in vars(options).items() if k != "json"}, "results": [],
    }  # fmt: skip
    for stage in options.stages:
        for optimizer in options.optimizers:
            figures = measure(stage, optimizer, options)
            found["results"].append({"stage": stage, "optimizer": optimizer, **figures})
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(json.dumps(found["results"][-1]), flush=True)
                if options.json is not None:
                    with open(options.json, "w") as file:
                        json.dump(found, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
