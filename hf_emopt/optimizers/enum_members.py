"""Adds a member to a string enum that is already defined.

``OptimizerNames`` of transformers is a closed enum, so the member is written into the enum's own tables, whose names are the
same from Python 3.10 to 3.14. The module imports the standard library alone, so that tests can run it under each interpreter.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar, cast

E = TypeVar("E", bound=Enum)


def add_string_member(enum: type[E], name: str, value: str) -> tuple[E, bool]:
    """Returns the member of ``enum`` with ``value``, adding it where there is none.

    Equality, hash, lookup by value and by name, iteration and ``in`` work as for a member written in the class body.
    An added member pickles as the plain string, which equals it: the default (a reference to ``enum.NAME``) could be
    loaded only where this package has been imported, and it ends up in every ``training_args.bin``.

    ``EMOPT_`` is put before a name that another member has.

    Returns:
        The member, and whether it was added.

    Raises:
        TypeError: ``enum`` is not a string enum.
    """
    if not (issubclass(enum, str) and issubclass(enum, Enum)):
        raise TypeError(f"{enum.__name__} must derive from str and Enum")
    tables = cast(Any, enum)
    if value in tables._value2member_map_:
        return tables._value2member_map_[value], False
    if name in tables._member_map_:
        name = f"EMOPT_{name}"
    member: Any = str.__new__(enum, value)
    member._name_, member._value_, member.__objclass__ = name, value, enum
    member._sort_order_ = len(tables._member_names_)
    member.__reduce_ex__ = lambda protocol: (str, (value,))
    member.__deepcopy__ = lambda memo: member  # Python 3.10 would copy through __reduce_ex__
    type.__setattr__(enum, name, member)  # the enum's own __setattr__ refuses a name that is a member
    tables._member_names_.append(name)
    tables._member_map_[name] = member
    tables._value2member_map_[value] = member
    hashable = enum.__dict__.get("_hashable_values_")  # what `in` reads since Python 3.13
    if hashable is not None and value not in hashable:
        hashable.append(value)
    return member, True
