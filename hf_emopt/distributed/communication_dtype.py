"""The dtype in which matrices travel between ranks."""

from __future__ import annotations

import torch

__all__ = ["communication_dtype"]


def communication_dtype(param_dtype: torch.dtype, device_type: str, transport_dtype: str | None) -> torch.dtype:
    """The communication dtype of a parameter's matrices.

    Args:
        param_dtype: of the parameter.
        device_type: of the device on which it is stepped.
        transport_dtype: the user's choice by name; ``None`` for bfloat16 on accelerators, float32 on the CPU, and float64 for
            parameters in float64.
    """
    if transport_dtype is not None:
        return getattr(torch, transport_dtype)  # type: ignore[no-any-return]
    if param_dtype is torch.float64:
        return torch.float64
    return torch.float32 if device_type == "cpu" else torch.bfloat16
