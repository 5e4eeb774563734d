"""What ranks must agree on: before the first step, that they mean the same; in every step, whether it counts.

In a step there is one collective of a few hundred bytes, on the device, whose result the host does not read unless a
gradient is missing on this rank. It carries whether a gradient is not finite anywhere, and which parameters have one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.layout import Grid, UnsupportedLayoutError

__all__ = ["Agreement", "Council", "control_device", "council_group", "verify_plan", "verify_replicas", "warm_up"]

logger = logging.getLogger("hf_emopt")


def control_device(group: Any) -> torch.device:
    """Where small tensors of a group's collectives have to be."""
    if dist.get_backend(group) in ("nccl", "xccl", "hccl"):
        accelerator = torch.accelerator.current_accelerator()
        return torch.device(
            "cuda" if accelerator is None else accelerator.type, torch.accelerator.current_device_index()
        )
    return torch.device("cpu")


def warm_up(grids: Sequence[Grid], council: Any) -> None:
    """Opens every connection that a step will use, in the same order on all ranks.

    A backend connects to a peer in the first collective that needs it. Left to the first step, ranks that reach their
    first collective of two groups in different order can wait for each other.
    """
    groups = [council] + [g for grid in grids for g in (grid.shard_group, grid.replica_group)]
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
    if council is not None:
        dist.barrier(group=council)


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
    different = [
        r for r, other in zip(dist.get_process_group_ranks(group), everyone) if not torch.equal(other, everyone[0])
    ]
    if different:
        raise RuntimeError(
            f"ranks {different} would step other parameters than rank {dist.get_process_group_ranks(group)[0]}: the names, "
            "shapes or hyperparameters that the optimizer was built from differ between ranks. Build the same model with the "
            "same frozen layers on every rank; where each process trains a model of its own, pass process_group='self'"
        )


def verify_replicas(named: Sequence[tuple[str, Tensor]], group: Any, tolerance: float = 1e-5) -> None:
    """Checks that what ranks are taken to hold copies of are copies: plain parameters, and shards of several replicas.

    Args:
        named: names and tensors.
        tolerance: on differences, relative to the norm.

    Raises:
        RuntimeError: on all ranks, naming some that differ.
    """
    if not named:
        return
    device = control_device(group)
    prints = torch.stack([_fingerprint(p.detach()).to(device) for _, p in named])
    largest, smallest = prints.clone(), prints.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    apart = ((largest - smallest) > tolerance * largest[:, :1]).any(dim=1).nonzero().flatten().tolist()
    if apart:
        names = ", ".join(named[i][0] for i in apart[:5])
        raise RuntimeError(
            f"{len(apart)} of {len(named)} parameters are not the same on all ranks ({names} ...), and the optimizer would "
            "share their updates: wrap the model in DistributedDataParallel (or broadcast its parameters) and reduce its "
            "gradients; where each process trains a model of its own, pass process_group='self' to the optimizer. Replicas "
            "of HSDP and of DTensors have to start alike: seed all ranks alike, or load the same weights on all of them"
        )


def _fingerprint(tensor: Tensor) -> Tensor:
    """The norm, which two orthogonal matrices have in common, and a sum with a weight for each place."""
    flat = tensor.float().reshape(-1)
    # Weights are products of two short vectors, so that the largest parameter needs no other as long.
    cols = max(1, math.isqrt(flat.numel()))
    rows = flat.numel() // cols
    across = torch.arange(cols, device=flat.device).mul(0.7).add(0.3).cos()
    down = torch.arange(rows + 1, device=flat.device).mul(1.3).add(0.1).cos()
    rest = flat[rows * cols :]
    total = down[:rows] @ (flat[: rows * cols].view(rows, cols) @ across) + down[rows] * (rest @ across[: rest.numel()])
    return torch.stack([torch.linalg.vector_norm(flat), total])


@dataclass(frozen=True)
class Agreement:
    """What holds in this step, on every rank.

    Attributes:
        ok: scalar bool on the control device: the step counts. ``None`` where nothing can make it fail.
        present: names of the parameters that have a gradient.
    """

    ok: Tensor | None
    present: frozenset[str]


class Council:
    """The ranks of an optimizer, and what they agree on in a step.

    Args:
        group: all ranks that share any parameter; ``None`` for one process.
        names: parameters that are shared, in the same order on all ranks.
    """

    def __init__(self, group: Any, names: Sequence[str]) -> None:
        self.group = group
        self.names = tuple(names)
        self._templates: dict[tuple[torch.device, bool], Tensor] = {}

    def agree(self, finite: Tensor | None, present: frozenset[str]) -> Agreement:
        """One small collective, or none where there is one process.

        Args:
            finite: scalar bool: this rank's gradients are; ``None`` when not checked.
            present: names of this rank's parameters with a gradient, shared or not.

        Returns:
            The step counts where all gradients are finite and no shared parameter has a gradient on some ranks only.
            Ranks that miss some read the device to find out which are missing everywhere; others are present by
            definition, since one rank has them.
        """
        if self.group is None:
            return Agreement(finite, present)
        device = control_device(self.group)
        missing = [name for name in self.names if name not in present]
        flags = self._flags(device, frozenset(missing))
        if finite is not None:
            flags[:, 0] = ~finite.to(device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        has, misses = flags
        ok = (has & misses).amax() == 0
        if not missing:
            return Agreement(ok, present)
        somewhere = has[1:].tolist()  # waits for the device, on ranks that miss something
        elsewhere = {name for name, there in zip(self.names, somewhere) if there} - (present & set(self.names))
        if elsewhere:
            logger.warning(
                "this step is skipped on all ranks: rank %d has no gradient of %s, and others have. Gradients must be "
                "synchronized (DistributedDataParallel with find_unused_parameters=True does it for unused branches)",
                dist.get_rank(), ", ".join(sorted(elsewhere)[:5]),
            )  # fmt: skip
        return Agreement(ok, present | elsewhere)

    def _flags(self, device: torch.device, missing: frozenset[str]) -> Tensor:
        """Two rows, ``[not finite, has it (n)]`` and ``[not finite, misses it (n)]``: what one rank has and another misses is
        as bad as what is not finite. Made of a template that is kept where nothing is missing."""
        key = (device, False)
        if missing or key not in self._templates:
            has = [name not in missing for name in self.names]
            rows = [[False, *has], [False, *(not h for h in has)]]
            template = torch.tensor(rows, dtype=torch.uint8).to(device)
            if missing:
                return template
            self._templates[key] = template
        return self._templates[key].clone()


def council_group(grids: Sequence[Grid]) -> Any:
    """The process group of all ranks that share any parameter."""
    ranks = sorted({rank for grid in grids for row in grid.ranks for rank in row})
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    for grid in grids:
        for group in (grid.shard_group, grid.replica_group):
            if group is not None and sorted(dist.get_process_group_ranks(group)) == ranks:
                return group
    raise UnsupportedLayoutError(
        f"no process group has all of the ranks {ranks} that share the optimizer's parameters; build the device mesh over "
        "all ranks of the job, or use one optimizer for the parameters of each mesh"
    )
