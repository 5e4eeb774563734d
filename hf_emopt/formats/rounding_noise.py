"""Noise for stochastic rounding: a function of the step, so that replicas agree and a resumed run repeats it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["moment_noise", "weight_noise"]


def weight_noise(index: int, group: dict[str, Any], device: torch.device, shard: int = 0) -> torch.Generator | None:
    """For the rounding of 16-bit weights; ``None`` where that is to the nearest.

    Args:
        index: of the bucket or group.
        shard: of the parameters, where ranks hold different ones.
    """
    if group["low_precision_weights"] != "stochastic":
        return None
    return torch.Generator(device).manual_seed(_seed(index, group, shard))


def moment_noise(
    index: int, group: dict[str, Any], device: torch.device, shard: int = 0, piece: int = 0
) -> Callable[[], torch.Generator]:
    """As :func:`weight_noise`, for the rounding of moments, whose noise is none of the weights'.

    Args:
        piece: of state of the same bucket or group.
    """
    seed = _seed(index, group, shard) * 1_000_003 + (1 + piece) * 7_919
    seed %= 2**31  # a CPU's generator takes no more bits
    return lambda: torch.Generator(device).manual_seed(seed)


def _seed(index: int, group: dict[str, Any], shard: int) -> int:
    return int(group.get("rounding_seed", 0) * 65_537 + 257 * shard + index)
