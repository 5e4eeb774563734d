"""Wraps functions and methods of transformers, Accelerate and DeepSpeed where they offer no hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

MARK = "__hf_emopt__"
"""Attribute of everything that this package puts into another one, by which a reload of the package knows its own work. The
attribute of a wrapper is the function that it wraps."""

Original = Callable[..., Any]


def patch(holder: Any, name: str, replacement: Callable[..., Any]) -> bool:
    """Has calls of ``holder.name(...)``, of a class or module, run ``replacement(original, ...)``. Idempotent.

    Returns:
        Whether ``holder`` has the attribute; nothing is changed where it has not.
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
