"""Process groups that an optimizer makes: of several mesh dimensions, of compute groups, or of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from hf_emopt.distributed.layout import Grid, UnsupportedLayoutError

__all__ = ["group_of", "open_groups"]


def open_groups(grid: Grid, own: bool = False) -> Grid:
    """The grid with process groups for ranks of several mesh dimensions.

    Args:
        own: copies get a group that nobody else uses in place of the default one. One that a user named is kept.

    All ranks make all groups in one order: a group that only its members make is found by a name that counts the groups made
    before, and ranks that count differently would wait for ever.

    Raises:
        UnsupportedLayoutError: when the mesh has not all ranks of the job.
    """
    if own and grid.replica_group is dist.group.WORLD:
        grid = replace(grid, replica_group=None)
    missing = (grid.shards > 1 and grid.shard_group is None, grid.replicas > 1 and grid.replica_group is None)
    if not any(missing):
        return grid
    if grid.world_size != dist.get_world_size():
        raise UnsupportedLayoutError(
            f"parameters are cut or copied over several mesh dimensions, on {grid.world_size} of the job's "
            f"{dist.get_world_size()} ranks; build the device mesh over all ranks"
        )
    if missing[0]:
        groups = [group_of(row) for row in grid.ranks]
        grid = replace(grid, shard_group=groups[grid.replica])
    if missing[1]:
        groups = [group_of([row[shard] for row in grid.ranks], own) for shard in range(grid.shards)]
        grid = replace(grid, replica_group=groups[grid.shard])
    return grid


_groups: dict[tuple[bool, tuple[int, ...]], Any] = {}
_groups_in: list[Any] = [None]


def group_of(ranks: Sequence[int], own: bool = False) -> Any:
    """The process group of some ranks, made once in a job: all ranks must call it, in one order.

    Args:
        own: not the default group, even of all ranks.
    """
    if dist.group.WORLD is not _groups_in[0]:
        _groups.clear()
        _groups_in[0] = dist.group.WORLD
    key = own, tuple(ranks)
    if key not in _groups:
        everyone = not own and key[1] == tuple(range(dist.get_world_size()))
        _groups[key] = dist.group.WORLD if everyone else dist.new_group(list(ranks))
    return _groups[key]
