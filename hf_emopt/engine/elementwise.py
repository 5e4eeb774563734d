"""The elementwise phases of a bucket: by one launch over all its tensors where kernels run, else by the rule's own functions.

Both do the same sums, to the rounding of float32. A pass writes the momentum straight to where it is wanted, the buffer of an
exchange or the stack of matrices, and reads updates from where they arrived, so nothing is copied between phases.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Arrival, Exchange
from hf_emopt.distributed.layout import local_tensors
from hf_emopt.formats.master_weights import needs_master
from hf_emopt.kernels.multi_tensor import Runs, all_finite, fits, runs_work
from hf_emopt.rules.adamw import decay_factor
from hf_emopt.rules.base import Group, MatrixRule

__all__ = ["Gradients", "Part", "Passes", "finite", "look_at_gradients"]

State = dict[str, Tensor]

_device_of = attrgetter("device")
_is_sparse = attrgetter("is_sparse")


def finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalar bool on the device of all tensors: whether every number is finite."""
    if runs_work(device) and fits(tensors, device):
        return all_finite(tensors)
    # The largest absolute value overflows only where a gradient itself has, unlike a sum of squares.
    largest = torch._foreach_norm(list(tensors), ord=float("inf"))
    return torch.isfinite(torch.stack([n.float() for n in largest])).all()


@dataclass(frozen=True)
class Gradients:
    """What a step finds out about its gradients before anything else.

    Attributes:
        present: names of the parameters that have one.
        finite: for each device, a scalar bool there that says whether all numbers are finite; empty when not checked.
    """

    present: frozenset[str]
    finite: dict[torch.device, Tensor]


def look_at_gradients(groups: Sequence[Group], checks: bool = True) -> Gradients:
    """Whose gradients there are, and a device's look at their numbers, which it has begun when this returns.

    Args:
        groups: parameter groups of the optimizer.
        checks: whether the numbers are looked at.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    given = [
        (name, grad)
        for group in groups
        for name, param in zip(group["param_names"], group["params"])
        if (grad := param.grad) is not None
    ]
    present = frozenset([name for name, _ in given])
    grads = local_tensors([grad for _, grad in given])
    if any(map(_is_sparse, grads)):
        name = next(name for (name, _), grad in zip(given, grads) if grad.is_sparse)
        raise RuntimeError(f"{name} has a sparse gradient; use an embedding with sparse=False")
    if not checks:
        return Gradients(present, {})
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    if len(set(map(_device_of, grads))) == 1 and all(map(Tensor.numel, grads)):
        by_device[grads[0].device] = grads
    else:
        for grad in grads:
            if grad.numel():
                by_device[grad.device].append(grad)
    return Gradients(present, {device: finite(grads, device) for device, grads in by_device.items()})


@dataclass
class Part:
    """What a phase works on: a weight, its gradient and its state, or the same part of all three."""

    weight: Tensor
    grad: Tensor
    state: State


class Passes:
    """The phases before and after the transform.

    Args:
        rule: whose momentum it is.
        parts: what this rank accumulates.
        group: hyperparameters as they are to be applied.
        ok: whether the step counts; scalar on the device, or ``None``.
    """

    def __init__(self, rule: MatrixRule, parts: Sequence[Part], group: Group, ok: Tensor | None) -> None:
        self.rule, self.parts, self.group, self.ok = rule, parts, group, ok

    def messages(self) -> list[Tensor]:
        """What the transform is to see of each part, by the rule's own function."""
        if not self.parts:
            return []
        return self.rule.accumulate(
            [p.weight for p in self.parts],
            [p.grad for p in self.parts],
            [p.state for p in self.parts],
            self.group,
            self.ok,
        )

    def possible(self, runs: Runs | None) -> bool:
        """Whether :meth:`fill` can do it, if the targets are of one dtype and contiguous."""
        if runs is None or not self.parts:
            return False
        device = self.parts[0].weight.device
        if not runs_work(device) or not fits([p.grad for p in self.parts], device):
            return False
        if self.rule.passes_gradients(self.group):
            return True
        if self.rule.momentum_form(self.group) is None:
            return False
        buffers = [p.state["momentum_buffer"] for p in self.parts]
        return buffers[0].dtype is torch.float32 and fits(buffers, device)

    def fill(self, runs: Runs | None, targets: Sequence[Tensor]) -> bool:
        """Accumulates, where it is :meth:`possible`, with the result on the right of ``runs``.

        ``False``, and nothing done, where the targets are of several dtypes.
        """
        if runs is None or not fits(targets, self.parts[0].weight.device):
            return False
        grads = [p.grad for p in self.parts]
        if self.rule.passes_gradients(self.group):
            runs.to_right(grads, targets, ok=self.ok)
            return True
        form = self.rule.momentum_form(self.group)
        if form is None:
            return False
        runs.momentum(grads, [p.state["momentum_buffer"] for p in self.parts], targets, *form, self.ok)
        return True

    def send(self, exchange: Exchange) -> Arrival:
        """Accumulates and starts to bring matrices together."""
        runs = exchange.runs("sent", [p.weight for p in self.parts])
        if self.possible(runs):
            buffer = exchange.room("sent")
            if self.fill(runs, [buffer]):
                return exchange.send_packed(buffer)
        return exchange.send(self.messages())

    def apply(
        self, runs: Runs | None, parts: Sequence[Part], updates: Sequence[Tensor], scales: Sequence[float] | None
    ) -> bool:
        """Steps float32 weights (left) by updates (right); ``False``, and nothing done, where that is not possible."""
        group, lr = self.group, self.group["lr"]
        if runs is None or not parts or isinstance(lr, Tensor) or needs_master(parts[0].weight):
            return False
        if group.get("compat") is not None:  # another implementation's bits need its order of sums
            return False
        device, weights = parts[0].weight.device, [p.weight for p in parts]
        shrink = decay_factor(group, lr)
        if not runs_work(device) or isinstance(shrink, Tensor) or weights[0].dtype is not torch.float32:
            return False
        if not (fits(weights, device) and fits(updates, device)):
            return False
        cautious, after = group.get("cautious_weight_decay", False), group.get("decay_after", False)
        runs.apply(weights, updates, float(lr), float(shrink), self.ok, scales, cautious, after and not cautious)
        return True
