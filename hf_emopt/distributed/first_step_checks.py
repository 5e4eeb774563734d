"""What ranks check together before their first step: that they mean the same plan, and hold the same copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.layout import Grid


def control_device(group: Any) -> torch.device:
    """Where small tensors of a group's collectives have to be."""
    if dist.get_backend(group) in ("nccl", "xccl", "hccl"):
        accelerator = torch.accelerator.current_accelerator()
        kind = "cuda" if accelerator is None else accelerator.type
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device("cpu")


def warm_up(grids: Sequence[Grid], consensus: Any) -> None:
    """Opens every connection that a step will use, in the same order on all ranks.

    A backend connects to a peer in the first collective that needs it. Left to the first step, ranks that reach their
    first collective of two groups in different order can wait for each other.
    """
    groups = [consensus] + [g for grid in grids for g in (grid.shard_group, grid.replica_group)]
    seen: set[int] = set()
    for group in groups:
        if group is None or id(group) in seen:
            continue
        seen.add(id(group))
        device, size = control_device(group), dist.get_world_size(group)
        token = torch.zeros(size, device=device)
        dist.all_reduce(token, group=group)
        dist.all_to_all_single(torch.empty_like(token), token, group=group)
        for rank in dist.get_process_group_ranks(group):
            dist.broadcast(token, src=rank, group=group)
    if consensus is not None:
        dist.barrier(group=consensus)


def verify_plan(digests: Sequence[str], group: Any) -> None:
    """Compares the digests of plans across ranks.

    Raises:
        RuntimeError: on all ranks, naming those that differ.
    """
    device = control_device(group)
    words = [int(digest[i : i + 8], 16) for digest in digests for i in range(0, len(digest), 8)]
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    ranks = dist.get_process_group_ranks(group)
    different = [r for r, other in zip(ranks, everyone) if not torch.equal(other, everyone[0])]
    if different:
        raise RuntimeError(
            f"ranks {different} would step other parameters than rank {ranks[0]}: the names, "
            "shapes or hyperparameters that the optimizer was built from differ between ranks. Build the same model with the "
            "same frozen layers on every rank; where each process trains a model of its own, pass process_group='self'"
        )


def verify_replicas(named: Sequence[tuple[str, Tensor]], group: Any, tolerance: float = 1e-5) -> None:
    """Checks that what ranks are taken to hold copies of are copies: plain parameters, and shards of several replicas.

    Args:
        tolerance: on differences, relative to the norm.

    Raises:
        RuntimeError: on all ranks, naming some that differ.
    """
    if not named:
        return
    spread, norms = fingerprints([param.detach() for _, param in named], group)
    apart = (spread > tolerance * norms).nonzero().flatten().tolist()
    if apart:
        names = ", ".join(named[i][0] for i in apart[:5])
        raise RuntimeError(
            f"{len(apart)} of {len(named)} parameters are not the same on all ranks ({names} ...), and the optimizer would "
            "share their updates: wrap the model in DistributedDataParallel (or broadcast its parameters) and reduce its "
            "gradients; where each process trains a model of its own, pass process_group='self' to the optimizer. Replicas "
            "of HSDP and of DTensors have to start alike: seed all ranks alike, or load the same weights on all of them"
        )


def fingerprints(tensors: Sequence[Tensor], group: Any) -> tuple[Tensor, Tensor]:
    """By how much tensors differ between ranks, and their largest norms: both of shape (n,). Collective."""
    prints = torch.stack([_fingerprint(tensor).to(control_device(group)) for tensor in tensors])
    both = torch.stack([prints, -prints])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    return both.sum(dim=0).amax(dim=1), both[0, :, 0]


def _fingerprint(tensor: Tensor) -> Tensor:
    """The norm, which two orthogonal matrices have in common, and a sum with a weight for each place."""
    flat = tensor.float().reshape(-1)
    # Weights are products of two short vectors, so that the largest parameter needs no other as long.
    cols = max(1, math.isqrt(flat.numel()))
    rows = flat.numel() // cols
    across = torch.arange(cols, dtype=flat.dtype, device=flat.device).mul(0.7).add(0.3).cos()
    down = torch.arange(rows + 1, dtype=flat.dtype, device=flat.device).mul(1.3).add(0.1).cos()
    rest = flat[rows * cols :]
    total = down[:rows] @ (flat[: rows * cols].view(rows, cols) @ across) + down[rows] * (rest @ across[: rest.numel()])
    return torch.stack([torch.linalg.vector_norm(flat), total])
