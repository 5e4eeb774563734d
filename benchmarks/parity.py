"""Weights of every rule under DDP, FSDP2, HSDP and FSDP2 over tensor parallelism against one process, on the GPUs at hand.

``ddp+overlap`` is DDP with ``overlap_param_gather``: updates arrive behind the next forward pass.

    torchrun --nproc-per-node 2 benchmarks/parity.py --json parity.json

HSDP has two replicas; tensor parallelism, over pairs of ranks, is left out where there are fewer than four.

Each rank also steps a whole copy of the model alone (``process_group="self"``), with the gradients that the distributed
model has, brought together. What differs after the steps is the optimizer's doing. With float32 on the wire and in the
transforms the largest difference, relative to the largest weight, must be at most 1e-5; with the defaults (bfloat16 on the
wire and in Newton-Schulz) it is a rounding of the update, and reported beside it. Replicas must be equal bit by bit.

SOAP and Shampoo are compared on float64 weights, with gradients of float32 and float32 on the wire: the factor of a few
gradients is singular, its basis or root turns the rounding of a library's products, which depends on the number of matrices
in a call, into differences of 1e-3, and that is no matter of layouts.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.tools.bench.step_models import slice_matrices

EXACT_NS = {"ns_dtype": "float32", "transport_dtype": "float32"}
EXACT = {"precondition_frequency": 2, "transport_dtype": "float32"}
RULES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, EXACT_NS, {}),
    "normuon": (hf_emopt.NorMuon, EXACT_NS, {}),
    "soap": (hf_emopt.SOAP, {**EXACT, "basis_method": "eigh"}, {"precondition_frequency": 2}),
    "shampoo": (hf_emopt.Shampoo, EXACT, {"precondition_frequency": 2}),
    "kl_shampoo": (hf_emopt.KLShampoo, {**EXACT, "relative_epsilon": 1e-2}, {"precondition_frequency": 2}),
}
STEPS = 5


def build(kind: str, device: torch.device) -> nn.Module:
    """Odd sizes, grouped heads, a fused transposed projection; ``llama-even`` can be cut in two."""
    torch.manual_seed(0)
    model: Any
    odd = int(kind != "llama-even")
    if kind.startswith("llama"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=212 - odd, hidden_size=168, intermediate_size=332 + odd, num_hidden_layers=3,
                num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
            )
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=211, n_embd=132, n_layer=3, n_head=6, n_positions=64))
    model.to(device)
    return model


def wrap(model: nn.Module, layout: str, device: torch.device) -> nn.Module:
    world = dist.get_world_size()
    if layout.startswith("ddp"):
        return DistributedDataParallel(model)
    shape, names = {
        "fsdp2": ((world,), ("shard",)),
        "hsdp": ((2, world // 2), ("replicate", "shard")),
        "fsdp2+tp": ((world // 2, 2), ("shard", "tensor")),
    }[layout]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if layout == "fsdp2+tp":
        slice_matrices(model, mesh["tensor"])
        mesh = mesh["shard"]
    blocks = model.model.layers if hasattr(model, "model") else model.transformer.h  # type: ignore[union-attr]
    for block in blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def case(kind: str, layout: str, rule: str, exact: bool, device: torch.device) -> dict[str, Any]:
    cls, precise, usual = RULES[rule]
    options = {"lr": 0.01, "weight_decay": 0.1, **(precise if exact else usual)}
    kronecker = exact and "muon" not in rule
    dtype = torch.float64 if kronecker else torch.float32
    reference, model = build(kind, device).to(dtype), build(kind, device).to(dtype)
    wrapped = wrap(model, layout, device)
    alone = cls(reference, process_group="self", **options)
    optimizer = cls(model, **options, overlap_param_gather=layout == "ddp+overlap")
    seed = dist.get_rank() // (2 if layout == "fsdp2+tp" else 1)  # ranks that share a matrix see the same tokens
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.randint(0, 211, (4, 33), device=device, generator=generator)
        wrapped(input_ids=ids, labels=ids).loss.backward()
        for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            if theirs.grad is not None:
                theirs.grad = theirs.grad.float().to(dtype)
            mine.grad = None if theirs.grad is None else whole(theirs.grad)
        optimizer.step()
        alone.step()
        model.zero_grad()
    optimizer.synchronize()
    moved = worst = 0.0
    start = dict(build(kind, device).to(dtype).named_parameters())
    for (name, mine), theirs in zip(reference.named_parameters(), model.parameters(), strict=True):
        found = whole(theirs)
        worst = max(worst, float((found - mine).abs().max() / mine.abs().max()))
        moved = max(moved, float((mine - start[name]).abs().max() / mine.abs().max()))
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    sums = (
        torch.stack([p.detach().contiguous().view(torch.int32).to(torch.int64).sum() for p in held if p.numel()])
        .sum()
        .view(1)
    )
    same = _equal_among_replicas(sums, layout, model)
    return {
        "model": kind, "layout": layout, "rule": rule, "exact": exact, "difference": worst, "moved": moved,
        "replicas_equal": same, "transforms": optimizer.transform_count, "alone": alone.transform_count,
    }  # fmt: skip


def _equal_among_replicas(value: Tensor, layout: str, model: nn.Module) -> bool | None:
    if layout in ("fsdp2", "fsdp2+tp"):
        return None
    group: Any = dist.group.WORLD
    if layout == "hsdp":
        group = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh.get_group(0)
    others = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, value, group=group)
    return all(torch.equal(o, value) for o in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rows, bad = [], 0
    for exact in (True, False):
        for layout in ("ddp", "ddp+overlap", "fsdp2", "hsdp", *(("fsdp2+tp",) if dist.get_world_size() >= 4 else ())):
            for rule in options.rules:
                kind = "llama-even" if layout == "fsdp2+tp" else "gpt2" if rule == "normuon" else "llama"
                row = case(kind, layout, rule, exact, device)
                counts = torch.tensor([row["transforms"], row["alone"]], device=device)
                dist.all_reduce(counts)
                row["transforms"], row["alone"] = counts.tolist()
                fine = row["transforms"] * dist.get_world_size() == row["alone"] and row["replicas_equal"] is not False
                row["ok"] = fine and (row["difference"] <= 1e-5 if exact else row["difference"] < row["moved"])
                bad += not row["ok"]
                rows.append(row)
                if dist.get_rank() == 0:
                    wire = "float32" if exact else "default"
                    print(
                        f"{'ok  ' if row['ok'] else 'BAD '}{layout:12}{rule:11}{wire:8} difference {row['difference']:.1e}"
                        f" moved {row['moved']:.1e} replicas equal {row['replicas_equal']} transforms {row['transforms']}",
                        flush=True,
                    )
    if dist.get_rank() == 0 and options.json:
        card = torch.cuda.get_device_name() if cuda else "cpu"
        about = {"card": card, "world_size": dist.get_world_size(), "torch": torch.__version__}
        with open(options.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)
    dist.destroy_process_group()
    if bad:
        raise SystemExit(f"{bad} cases differ")


if __name__ == "__main__":
    main()
