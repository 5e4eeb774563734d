"""Counts what collectives bring to a rank, below Python's wrappers, so that no way of calling them escapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CollectiveCounter", "Traffic"]

CONTROL_NUMEL = 16
"""Floating-point numbers up to which a message is none of weights or updates, as integers never are."""


@dataclass(frozen=True)
class Traffic:
    """One collective as one rank saw it.

    Attributes:
        name: of the operator in ``torch.ops.c10d``.
        received: elements that arrive here; of an all-gather, without the rank's own; of an all-to-all, with them.
        dtype: of the elements.
        group_size: ranks that take part.
    """

    name: str
    received: int
    dtype: torch.dtype
    group_size: int

    @property
    def control(self) -> bool:
        return not self.dtype.is_floating_point or self.received <= CONTROL_NUMEL

    @property
    def bytes(self) -> int:
        return self.received * self.dtype.itemsize


class CollectiveCounter(TorchDispatchMode):
    """While active, notes every collective of this thread in ``traffic``."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic: list[Traffic] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        operator = name.partition(".")[0]
        if namespace == "_c10d_functional" and operator != "wait_tensor":
            raise NotImplementedError(f"how much does {operator} bring? Teach CollectiveCounter about it")
        if namespace == "c10d" and operator not in ("barrier", "monitored_barrier_"):
            self._note(operator, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        # The first boxed object is the group; the second, where there is one, the operation of a reduction.
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        first = _tensors(args[0])
        output, dtype = sum(t.numel() for t in first), first[0].dtype if first else torch.float32
        if name in ("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"):
            output -= sum(t.numel() for t in _tensors(args[1]))
        elif name == "broadcast_":
            output = 0 if group.rank() == args[2] else output
        elif name in ("send", "gather_"):
            output = 0
        elif name not in RECEIVING:
            raise NotImplementedError(f"how much does {name} bring? Teach CollectiveCounter about it")
        self.traffic.append(Traffic(name, output, dtype, group.size()))

    def received(self, dtype: torch.dtype | None = None) -> int:
        """Elements of weights and updates that arrived, control messages apart."""
        return sum(t.received for t in self.traffic if not t.control and dtype in (None, t.dtype))

    def control(self) -> list[Traffic]:
        return [t for t in self.traffic if t.control]


RECEIVING = frozenset(
    {
        "alltoall_base_", "alltoall_", "recv_", "recv_any_source_", "allreduce_", "allreduce_coalesced_", "scatter_",
        "_reduce_scatter_base_", "reduce_scatter_", "reduce_",
    }
)  # fmt: skip
"""Operators whose first argument is what arrives."""


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
