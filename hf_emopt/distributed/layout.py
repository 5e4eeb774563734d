"""How a parameter is stored: what an optimizer may assume about the tensor it is handed at ``step()``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hf_emopt.routing.unit import Unit

__all__ = ["UnsupportedLayoutError", "check_layout"]


class UnsupportedLayoutError(RuntimeError):
    """A parameter is laid out so that its matrices cannot be stepped correctly; the message says what to use."""


def check_layout(name: str, param: Tensor, units: Sequence[Unit]) -> None:
    """Accepts a parameter that this process holds whole (one process, or replicated by DDP); refuses any other.

    Raises:
        UnsupportedLayoutError: for a DTensor (FSDP2, tensor parallel), for a parameter whose size is no longer the one
            it was routed with (flattened or emptied by FSDP1 or ZeRO), and for sparse or quantized storage.
    """
    if type(param).__name__ == "DTensor" or type(getattr(param, "data", param)).__name__ == "DTensor":
        raise UnsupportedLayoutError(
            f"{name} is a DTensor (FSDP2 or tensor parallel), which this version does not step; train it on one process or "
            "under DDP"
        )
    expected = math.prod(units[0].view) if units else None
    if expected is not None and param.numel() != expected:
        raise UnsupportedLayoutError(
            f"{name} was a parameter of {expected:,} elements when it was routed and now has shape {tuple(param.shape)}: a "
            "wrapper (FSDP1, DeepSpeed ZeRO) has flattened or partitioned it, so its matrices are gone; train it on one "
            "process or under DDP"
        )
    if param.layout.__str__() != "torch.strided":
        raise UnsupportedLayoutError(f"{name} has layout {param.layout}; only dense parameters can be stepped")
