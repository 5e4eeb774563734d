"""DeepSpeed configurations that would not give the update of a single process, each refused with what to change."""

from __future__ import annotations

from typing import Any

from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.matrix_optimizer import MatrixOptimizer

__all__ = ["refuse_config", "refuse_engine", "unknown_wrapper"]


def refuse_config(engine: Any, client_optimizer: Any) -> None:
    """Refuses a configuration before DeepSpeed wraps anything."""


def refuse_engine(engine: Any, optimizer: MatrixOptimizer) -> None:
    """Refuses parallelism that cuts parameters."""


def unknown_wrapper(wrapper: Any, optimizer: MatrixOptimizer) -> UnsupportedLayoutError:
    return UnsupportedLayoutError(type(wrapper).__name__)
