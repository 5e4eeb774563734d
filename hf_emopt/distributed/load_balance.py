"""Longest processing time first."""

from __future__ import annotations

import heapq

__all__ = ["assign_owners"]


def assign_owners(costs: dict[str, int], world_size: int) -> dict[str, int]:
    """Longest-processing-time-first: the costliest item goes to the least loaded rank, ties by name and rank.

    Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the optimal makespan.

    Raises:
        ValueError: when ``world_size`` is not positive.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    heap = [(0, rank) for rank in range(world_size)]
    owners: dict[str, int] = {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        load, rank = heapq.heappop(heap)
        owners[name] = rank
        heapq.heappush(heap, (load + costs[name], rank))
    return owners
