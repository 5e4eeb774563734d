"""The dtype in which matrices travel between ranks."""

from __future__ import annotations

import torch


def communication_dtype(param_dtype: torch.dtype, device_type: str, transport_dtype: str | None) -> torch.dtype:
    """The dtype of momenta and updates that ranks exchange.

    Args:
        param_dtype: of the parameter.
        device_type: of the device that computes its step, such as ``"cuda"``.
        transport_dtype: the optimizer's option by name, or ``None``.

    Returns:
        ``transport_dtype`` where it is given. Else float64 for float64 parameters, float32 on the CPU, and bfloat16 on
        accelerators.
    """
    if transport_dtype is not None:
        dtype: torch.dtype = getattr(torch, transport_dtype)
        return dtype
    if param_dtype is torch.float64:
        return torch.float64
    return torch.float32 if device_type == "cpu" else torch.bfloat16
