"""Lets Accelerate use FSDP on CPU ranks, which it enables for devices that it calls MULTI_GPU and the like only."""

from __future__ import annotations

from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType

_original = PartialState.__init__


def enable() -> None:
    """Has Accelerate take several CPU ranks for several devices. Use it with ``cpu=True``, which chooses gloo."""
    PartialState.__init__ = _as_devices  # type: ignore[method-assign]


def disable() -> None:
    """Undoes :func:`enable`: DistributedDataParallel on such devices would be given their numbers."""
    PartialState.__init__ = _original  # type: ignore[method-assign]


def _as_devices(self: PartialState, *args: Any, **kwargs: Any) -> None:
    _original(self, *args, **kwargs)
    if self.__dict__.get("distributed_type") == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = self.__dict__["distributed_type"] = DistributedType.MULTI_GPU
