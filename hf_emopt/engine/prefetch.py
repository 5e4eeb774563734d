"""Prefetch of offloaded state: the end of the backward pass announces the step.

A hook on one parameter, whose gradient is among the last of a backward pass, calls
:meth:`hf_emopt.state.offload.StateOffload.approach`. So copies of state fill the budget of the step during the rest of the
backward pass, when most activations are freed. If the hook never runs, the copies begin with the step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.layout import is_offloaded
from hf_emopt.engine.context import StepContext
from hf_emopt.state.offload import StateOffload

LAST_PART = 1 / 4
"""The share of the matrices' elements whose gradients come after the hook, for a budget of up to three buckets.

One bucket is on the device already. The copies of the other two, 1 GB of the float32 state of a 1.1 B model under Muon, take
20 ms at 50 GB/s. On an H200 a quarter of the backward pass of 8,192 tokens takes 28 ms. A larger model or batch lengthens the
quarter and not the copies, since buckets are bounded. At most about a quarter of the activations is left by then, so the peak
of memory, at the beginning of the backward pass, does not grow. A larger budget has a larger share, up to
:data:`LARGEST_PART`.
"""

LARGEST_PART = 1 / 2


class EarlyFetch:
    """The hook, and the count of its calls between steps, by which it finds the last of several backward passes.

    With gradient accumulation the hook runs several times between steps. It acts at the call whose number was the last one in
    the longer of the last two intervals between steps. So a short interval at the end of an epoch does not make it act early
    in the next epoch, when a whole pass still needs memory for activations. In an interval with fewer calls the copies begin
    with the step; in one with more they are on the device a little longer.

    A copy, also by pickle, has no hook, as copies of parameters have none.
    """

    def __init__(self) -> None:
        self._offload: StateOffload | None = None
        self._remove: Any = None
        self._calls = 0
        self._intervals = (0, 0)

    def attach(self, context: StepContext | None, names: Sequence[str] = ()) -> None:
        """Puts the hook on a parameter of a context with offloaded state, and removes the hook of an earlier call.

        Args:
            context: of the plans; ``None`` only removes.
            names: of parameters, in the order of the model.
        """
        if self._remove is not None:
            self._remove()
        self._offload = self._remove = None
        param = None if context is None or context.store.offload is None else late_in_backward(context, names)
        if param is None or context is None:
            return
        self._offload = context.store.offload
        handle: Any = param.register_post_accumulate_grad_hook(_Hook(self))  # type: ignore[no-untyped-call]
        self._remove = weakref.finalize(self, handle.remove)  # the model may outlive the optimizer
        self._remove.atexit = False

    def count(self) -> None:
        """Called at the beginning of each step."""
        self._intervals, self._calls = (self._intervals[1], self._calls), 0

    def called(self) -> None:
        """Called when the parameter has its gradient."""
        self._calls += 1
        if self._offload is None or self._calls != max(self._intervals):
            return
        try:
            self._offload.approach()
        except torch.OutOfMemoryError:
            self._offload = None  # a failure in every step would empty torch's cache each time
            warnings.warn(
                "no memory for offloaded state during the backward pass: from now on it is brought when the step begins, "
                "which takes longer",
                stacklevel=2,
            )

    def __reduce__(self) -> tuple[type[EarlyFetch], tuple[()]]:
        return EarlyFetch, ()


class _Hook:
    """The hook on the parameter; it keeps nothing alive."""

    def __init__(self, early: EarlyFetch) -> None:
        self._early = weakref.ref(early)

    def __call__(self, _: Tensor) -> None:
        early = self._early()
        if early is not None and not torch.compiler.is_compiling():  # compiled autograd would trace it
            early.called()


def late_in_backward(context: StepContext, names: Sequence[str]) -> Tensor | None:
    """The parameter whose gradient marks the last part of the backward pass (:data:`LAST_PART`); ``None`` if there is none.

    A backward pass goes through the model from its end. The elements of matrices measure its progress, since they take its
    time: an embedding has many elements and takes none, and a small model's embedding, the very last, would be chosen by its
    size. Parameters on the host are left out: their state comes with them, and a hook would make FSDP2's copies of gradients
    to the host wait.

    Args:
        context: of the plans.
        names: of parameters, in the order of the model.
    """
    order = {name: index for index, name in enumerate(names)}
    placed = [
        (order.get(name, len(order)), group["kind"] == "matrix", param)
        for group, params in zip(context.groups, context.params)
        for name, param in zip(group["param_names"], params)
        if param.requires_grad and param.is_leaf and param.numel() and not is_offloaded(param)
    ]
    matrices = [entry for entry in placed if entry[1]]
    chosen = sorted(matrices or placed, key=lambda entry: entry[0])
    buckets = 3.0 if context.store.offload is None else context.store.offload.buckets
    part = min(LAST_PART * max(1.0, (buckets - 1) / 2), LARGEST_PART)
    left = part * sum(param.numel() for _, _, param in chosen)
    for _, _, param in chosen:
        left -= param.numel()
        if left <= 0:
            return param
    return None
