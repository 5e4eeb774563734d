"""The harness itself: results by rank, and every way of failing told apart and survived."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import MOST_GROUPS, RankFailure, World


def total(factor: int) -> tuple[int, torch.Tensor]:
    value = torch.tensor([float(factor * (dist.get_rank() + 1))])
    dist.all_reduce(value)
    return dist.get_rank(), value


def raises_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def makes_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group([0, 1])
    return os.getpid()


def waits_in_vain() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def test_results_come_back_by_rank(two: World) -> None:
    for factor in (1, 10):
        results = two.run(total, factor=factor)
        assert [rank for rank, _ in results] == [0, 1]
        assert all(torch.equal(value, torch.tensor([3.0 * factor])) for _, value in results)


def test_processes_are_kept_between_cases(two: World) -> None:
    first = two.run(os.getpid)
    assert first == two.run(os.getpid)
    assert len({os.getpid(), *first}) == 3


def test_ranks_with_too_many_groups_are_replaced() -> None:
    world = World(2)
    try:
        first = world.run(makes_groups, count=MOST_GROUPS - 1)
        assert world.run(os.getpid) == first, "the world's own group and these are not too many"
        assert world.run(makes_groups, count=1) == first
        assert not set(world.run(os.getpid)) & set(first)
        assert world.starts == 2
    finally:
        world.kill()


def test_failures_are_reported_and_survived() -> None:
    """In a world of its own, whose limits are short."""
    world = World(2, timeout=3.0, grace=1.0)
    try:
        with pytest.raises(RankFailure, match=r"ranks \[1\] of 2(.|\n)*rank 0: returned(.|\n)*rank one is unhappy"):
            world.run(raises_on_one)
        start = time.monotonic()
        with pytest.raises(RankFailure, match=r"ranks \[0\] of 2(.|\n)*waits_in_vain(.|\n)*rank 1: returned"):
            world.run(waits_in_vain)
        assert time.monotonic() - start < 60
        with pytest.raises(RankFailure, match="exit code 3"):
            world.run(dies)
        assert world.run(total, factor=1)[0][1] == 3
        assert world.starts == 4
    finally:
        world.kill()
