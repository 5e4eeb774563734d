"""Sharing items of known cost among ranks (or among steps): longest first, with compute groups for large items.

The arithmetic is on names and whole numbers only, so the result is the same on every rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

ShardCost = Callable[[str, int], int]
"""``shard_cost(name, k)``: operations of an item on each of ``k`` ranks that share it."""

# Slicing moves bytes that costs do not count. So nothing is sliced for less than a tenth of the largest load, and of the
# assignments this close to the best the one that slices least wins.
_WHOLE_PERCENT = 10
_SLACK_PERCENT = 1
# Limits tried, in sixteenths of a rank's fair share: below an eighth nothing gets more even, and nothing above four shares
# has to be sliced.
_LIMITS = (2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 48, 64)
_SWEEPS = 2
_MULTIFIT_STEPS = 10


class _Option(NamedTuple):
    """A size of compute group, and what each of its ranks computes."""

    size: int
    part: int


class _Placement(NamedTuple):
    """Largest load, and the first rank and number of ranks of each item."""

    makespan: int
    starts: dict[str, tuple[int, int]]


_Item = tuple[str, _Option]


def assign(
    costs: dict[str, int],
    world_size: int,
    shard_cost: ShardCost | None = None,
    loads: Sequence[int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """The ranks of each item: one rank, or a compute group of consecutive ranks.

    Without ``shard_cost``, longest processing time first: the costliest item goes to the least loaded rank, ties by name
    and rank. The largest load is at most 4/3 of the optimum (Graham, "Bounds on multiprocessing timing anomalies", 1969).
    With ``shard_cost``, items that are too large for a rank's share get compute groups. For each of several limits, an
    item gets the fewest ranks that bring its part below the limit; then better sizes are searched, one kind of item at a
    time. Each choice is packed by longest time first and by MULTIFIT (Coffman, Garey and Johnson, "An application of
    bin-packing to multiprocessor scheduling", 1978), compute groups before single ranks.

    Args:
        costs: operations of each item on one rank, at least 0.
        shard_cost: see :data:`ShardCost`; called with divisors ``k > 1`` of ``world_size``. A ``k`` that does not lower the
            cost is not used, so an item that has to stay whole answers its whole cost.
        loads: operations that each rank has already; zeros by default.

    Returns:
        For each name, in the order of ``costs``, its ranks: ``(r,)`` for a whole item, or ``(j k, ..., j k + k - 1)``.

    Raises:
        ValueError: ``world_size`` below 1, ``loads`` of another length, or a negative cost or load.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1")
    initial = [0] * world_size if loads is None else list(loads)
    if len(initial) != world_size:
        raise ValueError(f"loads has {len(initial)} entries for {world_size} ranks; give one for each rank")
    negative = [name for name, cost in costs.items() if cost < 0] + [f"load {x}" for x in initial if x < 0]
    if negative:
        raise ValueError(f"costs and loads must be at least 0, and these are not: {', '.join(negative)}")
    order = sorted(costs, key=lambda name: (-costs[name], name))
    if shard_cost is None or world_size == 1:
        placed = _longest_first([(name, _Option(1, costs[name])) for name in order], initial)
    else:
        placed = _Search(costs, order, shard_cost, initial).best()
    compute_groups = ((name, *placed.starts[name]) for name in costs)
    return {name: tuple(range(start, start + size)) for name, start, size in compute_groups}


class _Search:
    """Sizes of compute groups by kind of item; items of one kind have the same options and get the same size."""

    def __init__(self, costs: dict[str, int], order: Sequence[str], shard_cost: ShardCost, loads: list[int]) -> None:
        self.loads = loads
        self.world_size = len(loads)
        sizes = [k for k in range(2, self.world_size + 1) if self.world_size % k == 0]
        kinds: dict[tuple[_Option, ...], list[str]] = {}
        for name in order:
            options = [_Option(1, costs[name])]
            for k in sizes:
                if (part := shard_cost(name, k)) < options[-1].part:
                    options.append(_Option(k, part))
            kinds.setdefault(tuple(options), []).append(name)
        self.kinds = list(kinds.items())  # costliest first, as the names are
        self.work = sum(costs.values()) + sum(loads)
        self.tried: dict[tuple[int, ...], _Placement] = {}

    def best(self) -> _Placement:
        share = self.work // self.world_size
        for limit in (share * sixteenths // 16 for sixteenths in _LIMITS):
            self.place(tuple(self._fewest_below(options, limit) for options, _ in self.kinds))
        whole = (0,) * len(self.kinds)
        self.place(whole)
        best = min(self.tried, key=self._rank)
        for _ in range(_SWEEPS):
            for index, (options, _names) in enumerate(self.kinds):
                for choice in range(len(options)):
                    sizes = (*best[:index], choice, *best[index + 1 :])
                    if self._may_be_better(sizes, best):
                        self.place(sizes)
                        best = min(best, sizes, key=self._rank)
        least = self.tried[best].makespan
        if self.tried[whole].makespan * 100 <= least * (100 + _WHOLE_PERCENT):
            return self.tried[whole]
        close = [s for s, placed in self.tried.items() if placed.makespan * 100 <= least * (100 + _SLACK_PERCENT)]
        return self.tried[min(close, key=lambda sizes: (self._in_compute_groups(sizes), self._rank(sizes)))]

    def _may_be_better(self, sizes: tuple[int, ...], best: tuple[int, ...]) -> bool:
        bound, makespan = self._bound(sizes), self.tried[best].makespan
        if self._in_compute_groups(sizes) < self._in_compute_groups(best):
            return bound < makespan
        return bound * (100 + _SLACK_PERCENT) < makespan * 100

    def place(self, sizes: tuple[int, ...]) -> None:
        """Packs the items with these sizes, once."""
        if sizes in self.tried:
            return
        items = [(name, options[c]) for c, (options, names) in zip(sizes, self.kinds) for name in names]
        items.sort(key=lambda item: (item[1].size == 1, -item[1].part, -item[1].size))
        self.tried[sizes] = _multifit(items, self.loads, self._bound(sizes), _longest_first(items, self.loads))

    def _rank(self, sizes: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        return self.tried[sizes].makespan, self._in_compute_groups(sizes), sizes

    def _in_compute_groups(self, sizes: tuple[int, ...]) -> int:
        chosen = ((options[c].size, len(names)) for c, (options, names) in zip(sizes, self.kinds))
        return sum(size * count for size, count in chosen if size > 1)

    def _bound(self, sizes: tuple[int, ...]) -> int:
        """No packing of these sizes has a smaller largest load."""
        chosen = [(options[c], len(names)) for c, (options, names) in zip(sizes, self.kinds)]
        work = sum(self.loads) + sum(option.size * option.part * count for option, count in chosen)
        return max([-(-work // self.world_size), max(self.loads), *(option.part for option, _ in chosen)])

    @staticmethod
    def _fewest_below(options: Sequence[_Option], limit: int) -> int:
        return next((i for i, option in enumerate(options) if option.part <= limit), len(options) - 1)


def _longest_first(items: Iterable[_Item], initial: Sequence[int]) -> _Placement:
    """Each item in turn to the aligned block with the least largest load, ties to the first block."""
    loads = list(initial)
    starts: dict[str, tuple[int, int]] = {}
    size, heap = 0, [(0, 0)]
    for name, option in items:
        if option.size != size:
            size = option.size
            heap = [(max(loads[first : first + size]), first) for first in range(0, len(loads), size)]
            heapq.heapify(heap)
        load, start = heap[0]
        heapq.heapreplace(heap, (load + option.part, start))
        _add(loads, start, option)
        starts[name] = (start, size)
    return _Placement(max(loads), starts)


def _multifit(items: Sequence[_Item], initial: Sequence[int], bound: int, known: _Placement) -> _Placement:
    """Bisects for the smallest capacity that first-fit packing meets; ``known`` if none is below its makespan."""
    low, best = bound, known
    for _ in range(_MULTIFIT_STEPS):
        if low * 1000 >= best.makespan * 999:
            break
        capacity = (low + best.makespan) // 2
        found = _first_fit(items, initial, capacity)
        if found is None:
            low = capacity + 1
        else:
            best = found
    return best


def _first_fit(items: Sequence[_Item], initial: Sequence[int], capacity: int) -> _Placement | None:
    """Each item in turn to the first aligned block that stays within the capacity; ``None`` when one has none."""
    loads = list(initial)
    starts: dict[str, tuple[int, int]] = {}
    start, before = 0, None
    for name, option in items:
        if option != before:  # what was too full for an equal item is so still
            start, before = 0, option
        while start < len(loads) and max(loads[start : start + option.size]) + option.part > capacity:
            start += option.size
        if start >= len(loads):
            return None
        _add(loads, start, option)
        starts[name] = (start, option.size)
    return _Placement(max(loads), starts)


def _add(loads: list[int], start: int, option: _Option) -> None:
    if option.size == 1:
        loads[start] += option.part
    else:
        stop = start + option.size
        loads[start:stop] = [load + option.part for load in loads[start:stop]]
