"""Where a parameter is computed, and which part of it a rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_emopt.distributed.layout import Partition
from hf_emopt.distributed.plan import OwnedRegion
from hf_emopt.formats.moments import is_scale

__all__ = ["compute_device", "is_offloaded", "part_of"]


def part_of(tensor: Tensor, owned: Sequence[OwnedRegion], key: str = "") -> Tensor | None:
    """The owned regions of a tensor as one, in order, or ``None`` when there are none.

    Args:
        key: of the state entry that the tensor is, if it is one. Scales have a row for each of the parameter's, and
            owned regions of parameters that have scales are rows.
    """
    if not owned:
        return None
    if is_scale(key):
        return torch.cat([tensor[slice(*owned_region.region[0])] for owned_region in owned])
    if owned[0].shape == tuple(tensor.shape):
        return tensor
    parts = [tensor[tuple(slice(a, b) for a, b in s.region)] for s in owned]
    return torch.cat(parts, dim=owned[0].dim) if len(parts) > 1 else parts[0].contiguous()


def compute_device(param: Tensor) -> torch.device:
    """The mesh's accelerator for a shard that is offloaded to the host, and else where the parameter is."""
    if isinstance(param, Partition):
        return param.compute
    if isinstance(param, DTensor):
        kind = param.device_mesh.device_type
        if kind != param.device.type:
            return torch.device(kind, torch.accelerator.current_device_index())
    return param.device


def is_offloaded(param: Tensor) -> bool:
    """Whether a parameter is stepped on copies. Partitions say so, so that it is the same where all is on the CPU."""
    return (isinstance(param, Partition) and param.offloaded) or compute_device(param) != param.device
