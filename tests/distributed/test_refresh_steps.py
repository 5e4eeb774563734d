"""When periodic work is done: every piece once, steps even, calls few where a call is dear."""

from __future__ import annotations

import pytest

from hf_emopt.distributed.refresh_steps import assign_refresh_steps


def llama(side: int, wide: int) -> list:
    """Costs of the sides of four layers: square projections, two up, one down."""
    batches = {"attention": (16, (side**3, side**3)), "up": (8, (wide**3, side**3)), "down": (4, (side**3, wide**3))}
    return [([(name, 0, b) for b in range(n)], costs) for name, (n, costs) in batches.items()]


def loads(batches: list, steps_of: dict, period: int, call_cost: int) -> tuple[list[int], int]:
    """Cost of each step, and the number of calls in a period."""
    costs_of = [0] * period
    calls = set()
    for matrices, costs in batches:
        for matrix in matrices:
            assert len(steps_of[matrix]) == len(costs)
            for piece, step in enumerate(steps_of[matrix]):
                costs_of[step] += costs[piece]
                calls.add((step, matrix[0], costs[piece]))
    for step, _, _ in calls:
        costs_of[step] += call_cost
    return costs_of, len(calls)


def test_where_calls_are_cheap_no_step_is_longer_than_the_pieces_force() -> None:
    """Twelve large sides in ten steps: two in the fullest, and everything else beside the others."""
    batches = llama(4, 11)
    steps_of = assign_refresh_steps(batches, 10, call_cost=1)
    steps, calls = loads(batches, steps_of, 10, 1)
    assert sum(steps) == 12 * 11**3 + 44 * 4**3 + calls
    assert max(steps) <= 2 * 11**3 + 2
    assert assign_refresh_steps(batches, 10, call_cost=1) == steps_of


def test_pieces_that_are_many_are_spread_evenly() -> None:
    batches = llama(4, 4)
    steps, _ = loads(batches, assign_refresh_steps(batches, 10, call_cost=1), 10, 1)
    assert max(steps) <= 1.1 * sum(steps) / 10


def test_where_calls_are_dear_there_are_few() -> None:
    """Like pieces then stay together: the two sides of square matrices are one call, others one a side."""
    batches = llama(4, 11)
    _, calls = loads(batches, assign_refresh_steps(batches, 10, call_cost=100 * 11**3), 10, 0)
    assert calls == 5
    steps, calls = loads(batches, assign_refresh_steps(batches, 10, call_cost=8 * 11**3), 10, 8 * 11**3)
    assert calls < 10
    assert max(steps) < 8 * 11**3 + 5 * 11**3  # the eight large sides of one run are parted


@pytest.mark.parametrize("call_cost", [0, 1, 10**9])
def test_one_step_and_no_pieces(call_cost: int) -> None:
    assert set(assign_refresh_steps(llama(2, 3), 1, call_cost).values()) == {(0, 0)}
    assert assign_refresh_steps([([("norm", 0, 0)], ())], 10, call_cost) == {("norm", 0, 0): ()}
    assert assign_refresh_steps([], 10, call_cost) == {}
