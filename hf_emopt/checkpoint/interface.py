"""What saving and loading ask of an optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

from torch import Tensor

from hf_emopt.distributed.layout import Grid
from hf_emopt.distributed.plan import Plan
from hf_emopt.engine.engine import Engine
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.rules.base import Group, MatrixRule

__all__ = ["Checkpointable"]


class Checkpointable(Protocol):
    """The part of ``MatrixOptimizer`` that this room reads and writes."""

    rule: MatrixRule
    param_groups: list[Group]
    offload_state: Any
    _engine: Engine | None
    _flattened: Any
    _model: Any
    _consolidated: dict[str, dict[str, Any]] | None
    _only_initialized: bool
    _priced: list[Group]
    _transforms: int

    @property
    def state(self) -> defaultdict[Tensor, Any]: ...
    def _current_engine(self) -> Engine: ...
    def _forget_plan(self) -> None: ...
    def _grids(self) -> dict[str, Grid]: ...
    def _plan_anew(self) -> Plan: ...
    def matrix_views_of_slices(self) -> dict[str, tuple[MatrixView, ...]]: ...
    def __setstate__(self, state: dict[str, Any]) -> None: ...
