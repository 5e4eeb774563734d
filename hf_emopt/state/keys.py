"""The kind of an entry of optimizer state, by its key."""

from __future__ import annotations


def is_count(key: str) -> bool:
    """Whether a state entry counts steps."""
    return key in ("step", "rounds")


def is_shaped(key: str) -> bool:
    """Whether a state entry has its parameter's shape: it is neither a count nor state of a matrix view (``name.index``)."""
    return "." not in key and not is_count(key)
