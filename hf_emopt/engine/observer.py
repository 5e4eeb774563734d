"""What a step tells whoever measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.engine.elementwise import Part
from hf_emopt.engine.stopwatch import Stopwatch
from hf_emopt.rules.base import Group

__all__ = ["StepObserver"]


class StepObserver(Protocol):
    """Told of each bucket between its transform and the weights' step. ``engine`` and ``transform`` are those of this
    room."""

    stopwatch: Stopwatch

    def begin(self, engine: Any, ok: Tensor | None, among: frozenset[str] | None) -> None: ...
    def held(
        self, engine: Any, bucket: Bucket, present: Sequence[int], owned: Sequence[OwnedRegion], parts: Sequence[Part]
    ) -> None: ...
    def bucket(
        self,
        engine: Any,
        bucket: Bucket,
        group: Group,
        present: Sequence[int],
        rounds: Sequence[int],
        owned: Sequence[OwnedRegion],
        updates: Sequence[Tensor],
        scales: Sequence[float],
    ) -> None: ...
    def matrices(self, bucket: Bucket, transform: Any, updates: Sequence[Tensor]) -> None: ...
    def matrix_state(self, bucket: Bucket, transform: Any, b: int, state: dict[str, Tensor]) -> None: ...
    def others(self, numels: Sequence[tuple[str, int]], group: Group) -> None: ...
    def adamw(
        self, names: Sequence[str], weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Group
    ) -> AbstractContextManager[None]: ...
    def own(
        self, group: Group, params: Sequence[Tensor], weights: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]]
    ) -> AbstractContextManager[None]: ...
