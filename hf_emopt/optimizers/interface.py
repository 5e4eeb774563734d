"""What the parts of an optimizer ask of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_emopt.checkpoint.interface import Checkpointable
from hf_emopt.engine.delayed_gather import DelayedUpdates
from hf_emopt.engine.prefetch import EarlyFetch
from hf_emopt.optimizers.changed_groups import ChangedGroups
from hf_emopt.optimizers.param_groups import GroupBuilder
from hf_emopt.routing.table import ParameterRoute
from hf_emopt.rules.base import Group

__all__ = ["Steppable"]


class Steppable(Checkpointable, Protocol):
    """The part of ``MatrixOptimizer`` that a step, its diagnostics and changes of the model read and write."""

    skip_nonfinite: bool
    _builder: GroupBuilder
    _changed: ChangedGroups
    _delayed: DelayedUpdates
    _early: EarlyFetch
    _diagnostics: Any
    _last_present: frozenset[str] | None
    _planned_for: tuple[Any, ...]
    _routes: list[ParameterRoute]
    _since_look: int
    _skipped: dict[torch.device, Tensor]
    _skipped_by_wrapper: Callable[[], int] | None

    @property
    def _overlaps(self) -> bool: ...
    def add_param_group(self, param_group: Group) -> None: ...
