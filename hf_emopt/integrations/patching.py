"""Wraps functions and methods of transformers, Accelerate and DeepSpeed that have no hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

MARK = "__hf_emopt__"
"""Attribute of every object that this package puts into another one, so that a reload recognizes it. That of a wrapper is the
wrapped function."""

Original = Callable[..., Any]


def patch(holder: Any, name: str, replacement: Callable[..., Any]) -> bool:
    """Makes ``holder.name(...)``, of a class or module, call ``replacement(original, ...)``. Idempotent.

    Returns:
        Whether ``holder`` has the attribute; without it nothing is changed.
    """
    original = getattr(holder, name, None)
    if original is None:
        return False
    original = getattr(original, MARK, original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(wrapper, MARK, original)
    static = isinstance(inspect.getattr_static(holder, name), staticmethod)
    setattr(holder, name, staticmethod(wrapper) if static else wrapper)
    return True
