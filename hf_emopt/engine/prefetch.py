"""Offloaded state that is brought before the step: a backward pass that is nearly through says that a step is near.

A hook on one parameter, whose gradient is among the last to be there, calls
:meth:`hf_emopt.state.offload.StateOffload.approach`. So the room that a step has for state is filled behind what is left
of the backward pass, when most activations are gone. Where the hook never runs, state comes when the step begins.
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
"""Of the matrices' elements, those whose gradients are yet to come when a room of up to three buckets is filled.

To fill the two buckets that do not wait on the device already, 1 GB of the float32 state of a 1.1 B model under Muon, takes
20 ms at 50 GB/s. On an H200 its forward and backward pass of 8,192 tokens takes 170 ms, of which a quarter of the backward
pass is 28. With a larger model or batch the quarter takes longer, and the room, which is bounded as buckets are, does not. At
most about a quarter of the activations is left by then, so that the peak at the beginning of the backward pass stays. More
room takes longer to fill, so its part is larger, up to :data:`LARGEST_PART`.
"""

LARGEST_PART = 1 / 2


class EarlyFetch:
    """The hook, and the count of its calls between steps, which says which of several backward passes is the last.

    With gradient accumulation the hook is called several times between steps. It acts on the call that was the last one
    before a step, in the longer of the last two intervals: an epoch that ends with fewer of them does not make it act early
    in the next one, when activations of a whole pass are yet to come. Where there are fewer calls than that, state comes when
    the step begins; where there are more, it is on the device a little longer.

    A copy, also by pickle, is one without a hook, as copies of parameters are.
    """

    def __init__(self) -> None:
        self._offload: StateOffload | None = None
        self._remove: Any = None
        self._calls = 0
        self._intervals = (0, 0)

    def attach(self, context: StepContext | None, names: Sequence[str] = ()) -> None:
        """Puts the hook on a parameter, in place of that of an earlier call; ``None`` for nowhere.

        Args:
            context: whose state is brought; without offloaded state there is no hook.
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
        """At the beginning of each step."""
        self._intervals, self._calls = (self._intervals[1], self._calls), 0

    def called(self) -> None:
        """When the parameter's gradient is there."""
        self._calls += 1
        if self._offload is None or self._calls != max(self._intervals):
            return
        try:
            self._offload.approach()
        except torch.OutOfMemoryError:
            self._offload = None  # a try in every step would empty torch's cache each time
            warnings.warn(
                "no memory for offloaded state during the backward pass: from now on it is brought when the step begins, "
                "which takes longer",
                stacklevel=2,
            )

    def __reduce__(self) -> tuple[type[EarlyFetch], tuple[()]]:
        return EarlyFetch, ()


class _Hook:
    """On the parameter; keeps nothing alive."""

    def __init__(self, early: EarlyFetch) -> None:
        self._early = weakref.ref(early)

    def __call__(self, _: Tensor) -> None:
        early = self._early()
        if early is not None and not torch.compiler.is_compiling():  # compiled autograd would trace it
            early.called()


def late_in_backward(context: StepContext, names: Sequence[str]) -> Tensor | None:
    """The parameter after whose gradient the last part of the backward pass is yet to come; ``None`` if there is none.

    That is :data:`LAST_PART` of the pass, or more where there is room for more than three buckets.

    A backward pass goes through the model from its end. Matrices measure the way, since they take the time: an embedding
    has many elements and is done at once, and a small model's would be chosen by its size, though it is the very last. Not
    among them are parameters on the host: their state comes with them, and FSDP2 makes its copies of gradients to the host
    wait where there is a hook.

    Args:
        context: whose parameters they are.
        names: in the order of the model.
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
