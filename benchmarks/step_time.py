"""Milliseconds of a training step and of its optimizer, on any number of GPUs, beside AdamW and the peers installed.

    torchrun --nproc-per-node 2 benchmarks/step_time.py --layout fsdp2 --optimizers adamw muon soap --json out.json

Random tokens, a Llama of the given size in float32 with bfloat16 compute. For every optimizer the model is built anew, the
first steps are left out, and each figure is the median over steps of the slowest rank:

* ``step``: forward, backward and optimizer, between two barriers;
* ``optimizer``: ``step()`` alone, between two synchronizations;
* ``exposed``: ``step`` less a step without an optimizer, so what overlap could not hide;
* ``peak``: of allocated memory in GiB; ``tokens/s`` of all ranks.

The number of matrices transformed is asserted, so that no figure is of a step that left the matrices out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.bench.timeline import timeline
from hf_emopt.matrix_optimizer import MatrixOptimizer

MODELS: dict[str, dict[str, Any]] = {
    "llama-1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                   "num_key_value_heads": 4},
    "llama-8b-slice": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
                       "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2},
}  # fmt: skip

KRONECKER = {"precondition_frequency": 10, "max_preconditioner_dim": 2048, "matmul_precision": "tf32"}
Maker = Callable[[nn.Module, argparse.Namespace], torch.optim.Optimizer]


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of hidden layers, and the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if hidden else rest).append(parameter)
    return matrices, rest


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__(first.param_groups + second.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def torch_muon(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    matrices, rest = split(model)
    return Both(
        torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-3, fused=True),
    )


def dion_muon(model: nn.Module, options: argparse.Namespace, triton: bool = False) -> torch.optim.Optimizer:
    from dion import Muon  # type: ignore[import-not-found]

    matrices, rest = split(model)
    parameters = next(iter(matrices))
    mesh = getattr(parameters, "device_mesh", None)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]
    where = mesh if mesh is not None else dist.group.WORLD if dist.get_world_size() > 1 else None
    return Muon(groups, distributed_mesh=where, lr=1e-3, nesterov=True, adjust_lr="rms_norm", use_triton=triton)  # type: ignore[no-any-return]


def ours(cls: type, **fixed: Any) -> Maker:
    def make(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
        wire = {} if options.transport is None else {"transport_dtype": options.transport}
        return cls(model, lr=1e-3, weight_decay=0.1, **fixed, **wire)  # type: ignore[no-any-return]

    return make


OPTIMIZERS: dict[str, Maker] = {
    "adamw": lambda model, options: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "torch-muon": torch_muon,
    "dion": dion_muon,
    "dion-triton": lambda model, options: dion_muon(model, options, triton=True),
    "muon": ours(hf_emopt.Muon),
    "muon-overlap": ours(hf_emopt.Muon, overlap_param_gather=True),
    "normuon": ours(hf_emopt.NorMuon),
    "soap": ours(hf_emopt.SOAP, oversize="block", **KRONECKER),
    "shampoo": ours(hf_emopt.Shampoo, **KRONECKER),
    "kl_shampoo": ours(hf_emopt.KLShampoo, **KRONECKER),
}


def build(options: argparse.Namespace, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False,
        **MODELS[options.model],
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.train()
    return model


def wrap(model: nn.Module, options: argparse.Namespace, device: torch.device) -> nn.Module:
    world = dist.get_world_size()
    if options.layout == "ddp" and world > 1:
        return DistributedDataParallel(
            model, device_ids=None if device.type == "cpu" else [device.index], gradient_as_bucket_view=True
        )
    if options.layout in ("fsdp2", "hsdp"):
        shape, names = (
            ((world,), ("shard",)) if options.layout == "fsdp2" else ((2, world // 2), ("replicate", "shard"))
        )
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class Clock:
    """Times between synchronizations and barriers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self, barrier: bool = False) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if barrier and dist.get_world_size() > 1:
            dist.barrier()
        return time.perf_counter()


def measure(name: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Figures of one optimizer, or with ``"none"`` of a step without one."""
    model = build(options, device)
    raw = model
    model = wrap(model, options, device)
    optimizer = None if name == "none" else OPTIMIZERS[name](raw, options)
    clock = Clock(device)
    ids = torch.randint(0, 32000, (options.tokens // options.length, options.length), device=device)
    times: dict[str, list[float]] = {"step": [], "optimizer": [], "forward_backward": []}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(options.warmup + 2 * options.steps):
        isolated = step >= options.warmup + options.steps
        start = clock.now(barrier=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.layout not in ("fsdp2", "hsdp")):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        middle = clock.now(barrier=True) if isolated else start
        if optimizer is not None:
            optimizer.step()
        after = clock.now() if isolated else start
        model.zero_grad(set_to_none=True)
        end = clock.now()
        if step < options.warmup:
            continue
        if isolated:
            times["forward_backward"].append(1e3 * (middle - start))
            times["optimizer"].append(1e3 * (after - middle))
        else:
            times["step"].append(1e3 * (end - start))
    if isinstance(optimizer, MatrixOptimizer):
        optimizer.synchronize()
    figures: dict[str, Any] = {"optimizer_name": name, "loss": float(loss.detach())}
    if isinstance(optimizer, MatrixOptimizer):
        count = torch.tensor([optimizer.transform_count], device=device)
        dist.all_reduce(count)
        wanted = 7 * MODELS[options.model]["num_hidden_layers"] * (options.warmup + 2 * options.steps)
        if options.layout == "single":
            wanted *= dist.get_world_size()
        assert int(count) == wanted, f"{name}: {int(count)} matrices transformed, {wanted} expected"
        assert optimizer.skipped_steps == 0
        figures["transforms"] = int(count)
        figures["imbalance"] = optimizer._current_engine().plan.imbalance
    if options.profile and optimizer is not None:
        figures["profile"] = profile(model, optimizer, ids, options, device)
    slowest = torch.tensor([times["step"], times["optimizer"], times["forward_backward"]], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for key, row in zip(times, slowest.tolist()):
        figures[key] = statistics.median(row)
        figures[f"{key}_all"] = [round(t, 3) for t in row]
        figures[f"{key}_mean"] = statistics.fmean(row)
        figures[f"{key}_max"] = max(row)
    figures["tokens_per_second"] = options.tokens * dist.get_world_size() / figures["step"] * 1e3
    if device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def profile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    options: argparse.Namespace,
    device: torch.device,
) -> str:
    """Where one optimizer step spends its time, by kernel and by operator."""
    with torch.autocast(device.type, torch.bfloat16, enabled=options.layout not in ("fsdp2", "hsdp")):
        model(input_ids=ids, labels=ids).loss.backward()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    host = trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60)
    return f"{timeline(trace)}\n{host}"


def table(rows: list[dict[str, Any]]) -> str:
    """Figures as text; ``exposed`` needs the row without an optimizer."""
    bare = next((r["step"] for r in rows if r["optimizer_name"] == "none"), None)
    adamw = next((r["tokens_per_second"] for r in rows if r["optimizer_name"] == "adamw"), None)
    lines = [
        f"{'':14}{'step':>9}{'optim.':>9}{'mean':>9}{'max':>9}{'exposed':>9}{'tokens/s':>11}{'of AdamW':>9}{'peak GiB':>9}"
    ]
    for r in rows:
        r["exposed"] = None if bare is None else r["step"] - bare
        exposed = "" if bare is None else f"{r['exposed']:9.2f}"
        share = "" if adamw is None else f"{r['tokens_per_second'] / adamw:9.3f}"
        lines.append(
            f"{r['optimizer_name']:14}{r['step']:9.2f}{r['optimizer']:9.2f}{r['optimizer_mean']:9.2f}"
            f"{r['optimizer_max']:9.2f}{exposed:>9}{r['tokens_per_second']:11.0f}{share:>9}{r.get('peak_gib', 0):9.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-1.1b")
    parser.add_argument("--layout", choices=("single", "ddp", "fsdp2", "hsdp"), default="fsdp2")
    parser.add_argument("--optimizers", nargs="+", default=["none", "adamw", "muon"], choices=["none", *OPTIMIZERS])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank in a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--transport", default=None, help="transport_dtype of our optimizers")
    parser.add_argument("--profile", action="store_true", help="add a profile of one step to the JSON")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl" if cuda else "gloo")
    rows = []
    for name in options.optimizers:
        try:
            rows.append(measure(name, options, device))
        except Exception as error:  # the other rows are still wanted, and the error is in the result
            rows.append({"optimizer_name": name, "error": f"{type(error).__name__}: {error}"})
        if cuda:
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(name, rows[-1].get("error", "done"), flush=True)
    if dist.get_rank() == 0:
        print(f"{options.model}, {options.layout}, {dist.get_world_size()} ranks, {options.tokens} tokens a rank")
        print(table([r for r in rows if "error" not in r]))
        if options.json:
            commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
            about = {
                **vars(options), "world_size": dist.get_world_size(), "torch": torch.__version__, "commit": commit,
                "card": torch.cuda.get_device_name() if cuda else "cpu",
            }  # fmt: skip
            with open(options.json, "w") as file:
                json.dump({"about": about, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
