"""Gradients of what ranks hold copies of: whether they are the same on all ranks, and their mean where they are not yet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.assignment import MAX_BUCKET_NUMEL
from hf_emopt.distributed.first_step_checks import fingerprints
from hf_emopt.distributed.layout import local_gradient

Copies = Sequence[tuple[Any, Sequence[tuple[str, Tensor]]]]
"""Process groups, each with the parameters, by name, that its ranks hold copies of."""

TOLERANCE = 1e-2
"""On differences, relative to the gradient's norm: a reduction may round to 16 bits."""

NEGLIGIBLE = 1e-4
"""Differences that are ignored, relative to the largest norm: a gradient that is zero but for rounding (of a key's bias, say)
may differ between tensor-parallel ranks."""


class GradientComparison:
    """Whether gradients of copies are the same on all ranks, each of which steps what it owns by its own. Collective.

    Args:
        step: number of the step.
        ok: scalar bool: the step counts. In another one gradients may differ.

    Attributes:
        due: the step in which all ranks read the result: two later on an accelerator, by when it is on the host.
    """

    def __init__(self, step: int, group: Any, members: Sequence[tuple[str, Tensor]], ok: Tensor) -> None:
        grads = [local_gradient(param) for _, param in members]
        spread, norms = fingerprints([torch.zeros(()) if grad is None else grad for grad in grads], group)
        apart = (spread > TOLERANCE * norms + NEGLIGIBLE * norms.amax()) & ok.to(norms.device)
        self._step, self._names, self._apart, self._arrived = step, [name for name, _ in members], apart, None
        self.due = step
        if apart.device.type != "cpu":
            self._arrived, self.due = torch.Event(apart.device), step + 2
            self._apart = torch.empty_like(apart, device="cpu", pin_memory=True).copy_(apart, non_blocking=True)
            self._arrived.record()

    def check(self) -> None:
        """Raises ``RuntimeError`` where gradients differ, on all ranks."""
        if self._arrived is not None:
            self._arrived.synchronize()
        names = [name for name, apart in zip(self._names, self._apart.tolist()) if apart]
        if names:
            raise RuntimeError(
                f"in step {self._step} ranks had other gradients of {len(names)} of {len(self._names)} parameters that they "
                f"hold copies of ({', '.join(names[:5])} ...), and all but one rank's would be dropped: wrap the model in "
                "DistributedDataParallel (accelerator.prepare does), let the last backward pass before a step reduce them "
                "(outside of no_sync, with no communication hook that leaves them as they are), and do not change them on "
                "single ranks; or pass average_gradients=True to the optimizer, which averages those of plain parameters. "
                "Where each process trains a model of its own, pass process_group='self'"
            )


def average_gradients(copies: Copies, present: frozenset[str]) -> frozenset[str]:
    """Makes the gradients of copies their mean over ranks, as DistributedDataParallel does. Collective.

    Args:
        present: names of this rank's parameters with a gradient. A missing one counts as zeros.

    Returns:
        Names of those that any rank has a gradient of. A rank that has not all waits for the device to know.
    """
    found, chunks, sizes = set(present), defaultdict[Any, list[tuple[str, Tensor]]](list), Counter[Any]()
    for group, members in copies:
        for name, param in members:
            kind = group, param.device, getattr(param, "grad_dtype", None) or param.dtype
            sizes[kind] += param.numel()
            chunks[(*kind, sizes[kind] // MAX_BUCKET_NUMEL)].append((name, param))
    for (group, device, dtype, _), chunk in chunks.items():
        # Behind the gradients, how many ranks have each of them.
        flat = torch.zeros(sum(p.numel() + 1 for _, p in chunk), dtype=dtype, device=device)
        *parts, ranks = flat.split([*(p.numel() for _, p in chunk), len(chunk)])
        views = [part.view(p.shape) for part, (_, p) in zip(parts, chunk)]
        mine = [(g, view, has) for (_, p), view, has in zip(chunk, views, ranks) if (g := p.grad) is not None]
        grads, inside, counts = ([each[k] for each in mine] for k in range(3))
        if mine:
            torch._foreach_copy_(inside, grads)
            flat.div_(dist.get_world_size(group))
            torch._foreach_add_(counts, 1)
        dist.all_reduce(flat, group=group)
        if mine:
            torch._foreach_copy_(grads, inside)
        if len(mine) < len(chunk):
            for (name, param), view, having in zip(chunk, views, ranks.tolist()):
                if param.grad is None and having:
                    param.grad = view.clone()
                    found.add(name)
    return frozenset(found)
