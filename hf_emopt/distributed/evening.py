"""Owners exchanged among matrices that cost the same, so that every step of a period takes every rank as long.

Owners are given out by what a matrix costs in the mean of a period, and steps within a period without regard to owners, so
that the schedule, and with it every weight, does not depend on the number of ranks. Each is even by itself; together, ranks
can have much more periodic work than their share in one step and less in the next, and wait for each other in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hf_emopt.distributed.plan import Bucket, Plan
from hf_emopt.distributed.segments import Segment
from hf_emopt.distributed.slots import Matrix, matrix_of, plan_slots

__all__ = ["even_out", "evened"]

Work = tuple[tuple[int, int], ...]
"""``(slot, cost)`` of each piece of periodic work."""

Costs = Callable[[int, tuple[int, int]], Sequence[int]]
"""Of the pieces of a matrix, by its group and its shape."""

# Exchanges are tried among so many: beyond, giving out in turn evens out as well.
_MOST_TRIED = 128
_SWEEPS = 4


def evened(
    plan: Plan, groups: Sequence[dict[str, Any]], rule: Any, slots: Mapping[Matrix, Sequence[int]] | None = None
) -> Plan:
    """:func:`even_out` for a rule's periodic work, where it has any that ranks share.

    Args:
        groups: of the plan's parameters.
        slots: ``None`` for :func:`~hf_emopt.distributed.slots.plan_slots`.
    """
    if not rule.scheduled or len(plan.ranks) == 1:
        return plan
    slots = plan_slots(plan, groups, rule) if slots is None else slots
    return even_out(plan, slots, lambda group, shape: rule.periodic_costs(*shape, groups[group]))


def even_out(plan: Plan, slots: Mapping[Matrix, Sequence[int]], costs: Costs) -> Plan:
    """The plan with other owners, none of which has more or less to do in a period than before.

    Only whole matrices of one bucket, one shape and one cost are exchanged; stays as it is where a rank's rows are its own.

    Args:
        slots: of the pieces of every matrix, see :func:`~hf_emopt.distributed.slots.plan_slots`.
        costs: of these pieces.
    """
    loads: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    works = [[_work(bucket, s, slots, costs) for s in bucket.segments] for bucket in plan.buckets]
    alike = [_alike(bucket) for bucket in plan.buckets]
    for bucket, groups, work in zip(plan.buckets, alike, works):
        free = {k for group in groups for k in group}
        for k, segment in enumerate(bucket.segments):
            if k not in free:
                _add(loads[bucket.storage.rank(segment.owner)], work[k])
    buckets = []
    for bucket, groups, work in zip(plan.buckets, alike, works):
        segments = list(bucket.segments)
        for group in groups:
            found = _given_out([segments[k].owner for k in group], [work[k] for k in group], bucket.storage.rank, loads)
            for k, owner in zip(group, found):
                segments[k] = replace(segments[k], owner=owner)
        buckets.append(replace(bucket, segments=tuple(segments)))
    return replace(plan, buckets=tuple(buckets))


def _work(bucket: Bucket, segment: Segment, slots: Mapping[Matrix, Sequence[int]], costs: Costs) -> Work:
    pieces: list[tuple[int, int]] = []
    for u, unit in enumerate(segment.units):
        priced = costs(bucket.group, (unit.shape[1], unit.shape[2]))
        for b in range(unit.shape[0]):
            pieces.extend(zip(slots[matrix_of(bucket, segment, u, b)], priced))
    return tuple(pieces)


def _alike(bucket: Bucket) -> list[list[int]]:
    """Indices of the segments that can be exchanged for one another."""
    if bucket.local or bucket.keeps or bucket.paired:
        return []
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for k, s in enumerate(bucket.segments):
        parameter = bucket.parameters[s.parameter]
        whole = s.shape == parameter.storage.shape and parameter.arrangement is None
        if whole and not (s.team or s.cuts or s.copy or s.gives):
            groups[s.shape, s.cost, s.units].append(k)
    return [group for group in groups.values() if len(group) > 1]


def _given_out(
    owners: Sequence[int], works: Sequence[Work], rank: Callable[[int], int], loads: dict[int, dict[int, int]]
) -> list[int]:
    """One of the owners for each piece of work, each as often as before: in turn to whom it adds least to the sum of squares
    of loads, then exchanged as long as that sum falls. ``loads``, by rank and slot, take the work on."""
    left: dict[int, int] = defaultdict(int)
    for owner in owners:
        left[owner] += 1
    given = []
    for work in works:
        best = min((o for o, count in left.items() if count), key=lambda o: (_met(loads[rank(o)], work), o))
        left[best] -= 1
        _add(loads[rank(best)], work)
        given.append(best)
    for _ in range(_SWEEPS if len(works) <= _MOST_TRIED else 0):
        if not _exchanged(given, works, rank, loads):
            break
    return given


def _exchanged(
    given: list[int], works: Sequence[Work], rank: Callable[[int], int], loads: dict[int, dict[int, int]]
) -> bool:
    """Exchanges every two that are better off so; whether there were any."""
    changed = False
    for i, work in enumerate(works):
        for j in range(i):
            if given[i] == given[j] or work == works[j]:
                continue
            mine, others = loads[rank(given[i])], loads[rank(given[j])]
            before = _squares(mine, work, works[j]) + _squares(others, work, works[j])
            _swap(mine, others, work, works[j])
            if _squares(mine, work, works[j]) + _squares(others, work, works[j]) < before:
                given[i], given[j] = given[j], given[i]
                changed = True
            else:
                _swap(mine, others, works[j], work)
    return changed


def _swap(mine: dict[int, int], others: dict[int, int], work: Work, other: Work) -> None:
    """``work`` from ``mine`` to ``others``, and ``other`` the other way."""
    _add(mine, work, -1)
    _add(others, work)
    _add(others, other, -1)
    _add(mine, other)


def _add(load: dict[int, int], work: Work, sign: int = 1) -> None:
    for slot, cost in work:
        load[slot] += sign * cost


def _met(load: Mapping[int, int], work: Work) -> int:
    """What grows with the sum of squares when the work is added."""
    return sum(load[slot] * cost for slot, cost in work)


def _squares(load: Mapping[int, int], *works: Work) -> int:
    return sum(load[slot] ** 2 for slot in {slot for work in works for slot, _ in work})
