"""Noise for stochastic rounding. It depends on the step alone, so that replicas agree and a resumed run repeats it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def weight_noise(index: int, group: dict[str, Any], device: torch.device, shard: int = 0) -> torch.Generator | None:
    """The generator for the rounding of 16-bit weights; ``None`` where they are rounded to the nearest.

    Args:
        index: index of the bucket or group.
        shard: index of the shard, where ranks hold different parts of the parameters.
    """
    if group["low_precision_weights"] != "stochastic":
        return None
    return torch.Generator(device).manual_seed(_seed(index, group, shard))


def moment_noise(
    index: int, group: dict[str, Any], device: torch.device, shard: int = 0, piece: int = 0
) -> Callable[[], torch.Generator]:
    """Makes the generator for the rounding of moments. Its noise differs from that of :func:`weight_noise`.

    Args:
        piece: index of the state within the bucket or group.
    """
    seed = _seed(index, group, shard) * 1_000_003 + (1 + piece) * 7_919
    seed %= 2**31  # a CPU's generator takes no more bits
    return lambda: torch.Generator(device).manual_seed(seed)


def _seed(index: int, group: dict[str, Any], shard: int) -> int:
    return int(group.get("rounding_seed", 0) * 65_537 + 257 * shard + index)
