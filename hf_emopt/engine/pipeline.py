"""Runs the buckets' generators so that each collective hides behind other buckets' mathematics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

__all__ = ["Task", "pipeline"]


Task = Iterator[None]
_AHEAD = 2
"""Tasks that begin before fillers are made: the second's bytes are on their way when the first has its products queued."""


def pipeline(tasks: Sequence[Task], fillers: Callable[[], Sequence[Task]] = tuple) -> None:
    """Runs tasks so that each collective has the mathematics of other buckets to hide behind.

    A task begins, then those begun before it go on by one stage each, latest first: so the next bucket's bytes are on
    their way before this bucket's products are queued.

    Args:
        tasks: begin in this order.
        fillers: makes tasks that keep a host for longer than a GPU. They are made, and begin, as soon as the GPU has the
            products of a task to do, and bring forward no others, since a next task's bytes are to be on their way before.
            Then they go on after each task.
    """
    begun: deque[Task] = deque()
    waiting: deque[Task] = deque()
    for number, task in enumerate(tasks):
        begun.appendleft(task)
        _advance(begun)
        _advance(waiting)
        if number == _AHEAD - 1:
            waiting = _begun(fillers())
    if len(tasks) < _AHEAD:
        waiting = _begun(fillers())
    while begun or waiting:
        _advance(begun)
        _advance(waiting)


def _begun(tasks: Sequence[Task]) -> deque[Task]:
    begun = deque(tasks)
    _advance(begun)
    return begun


def _advance(begun: deque[Task]) -> None:
    for task in list(begun):
        if next(task, StopIteration) is StopIteration:
            begun.remove(task)
