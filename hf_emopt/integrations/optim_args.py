"""``TrainingArguments(optim_args=...)``, typed and checked by the optimizer's signature."""

from __future__ import annotations

import collections.abc
import difflib
import inspect
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union

import torch

ALIASES = {"betas": "aux_betas"}
EXAMPLE = 'optim_args="ns_steps=6, aux_lr=1e-5, betas=0.9:0.95"'

# Arguments that have a field of their own, are filled in, or that no text can say.
ELSEWHERE = {
    "params": "it is the model that is trained",
    "lr": "set TrainingArguments(learning_rate=...) or EmoptPlugin(lr=...)",
    "process_group": "pass it to the optimizer's constructor",
}

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "double"), torch.float64),
}
_BOOLS = {**dict.fromkeys(("true", "1", "yes", "on"), True), **dict.fromkeys(("false", "0", "no", "off"), False)}
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable)
# A text is tried as each member of a union in this order: "0.5" is a number before it is a string.
_UNION_ORDER: tuple[Any, ...] = (type(None), bool, int, float, torch.dtype)


def optimizer_options(optimizer_cls: type) -> dict[str, Any]:
    """Keyword arguments of an optimizer that ``optim_args`` can set, with their resolved annotations.

    ``**kwargs`` of an ``__init__`` stands for the arguments of the next class in the method resolution order.

    Raises:
        TypeError: an argument has no annotation, so that a text could not be given a type.
    """
    options: dict[str, Any] = {}
    for cls in optimizer_cls.__mro__:
        if "__init__" not in cls.__dict__:
            continue
        init = cls.__dict__["__init__"]
        parameters = inspect.signature(init).parameters
        hints = typing.get_type_hints(init)
        for name, parameter in list(parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in ELSEWHERE:
                continue
            if name not in hints:
                raise TypeError(f"{cls.__name__}.__init__: argument {name!r} needs an annotation for optim_args")
            options.setdefault(name, hints[name])
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    return options


def parse_optim_args(optim_args: str | Mapping[str, Any] | None, optimizer_cls: type) -> dict[str, Any]:
    """Turns ``TrainingArguments.optim_args`` into typed keyword arguments of ``optimizer_cls``.

    Args:
        optim_args: ``"key=value, key=value"``, with lists joined by ``:`` or ``/`` (``betas=0.9:0.95``), booleans as
            ``true`` or ``false``, an absent value as ``none`` and dtypes by name (``bfloat16``, ``fp32``); or a mapping
            (a YAML configuration, say); or a mapping written as JSON, which also takes strings that hold a comma or an
            equals sign. ``betas`` stands for ``aux_betas`` where the matrices have none (Muon and NorMuon).
        optimizer_cls: the class whose signature gives the keys and types.

    Raises:
        ValueError: unknown or repeated key, value of the wrong type, entry without ``=`` or with two, empty entry or
            value. The message names the key, what is close to it, the accepted form and all keys.
    """
    options = optimizer_options(optimizer_cls)
    try:
        return _parsed(optim_args, options)
    except ValueError as error:
        problem = str(error)
    aliases = [alias for alias, name in ALIASES.items() if name in options and alias not in options]
    raise ValueError(
        f"optim_args for {optimizer_cls.__name__}: {problem}{'' if problem.endswith('?') else '.'} Accepted form: {EXAMPLE}, "
        f"or a mapping. Keys: {', '.join(sorted([*options, *aliases]))}."
    )


def _parsed(optim_args: str | Mapping[str, Any] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in _entries(optim_args, options):
        name = _named(key, options)
        if name not in options:
            raise ValueError(_unknown_key(key, options))
        if name in result:
            raise ValueError(f"key {key!r} is given twice" + (f" (it means {name!r})" if name != key else ""))
        try:
            result[name] = parse_value(value, options[name])
        except ValueError:
            form = accepted_form(options[name])
            raise ValueError(f"bad value {value!r} for key {key!r}; write {key}={form}") from None
    return result


def parse_value(value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type: a text is read, anything else is checked.

    Raises:
        ValueError: it does not fit; see :func:`accepted_form`.
    """
    is_text = isinstance(value, str)
    members = _members(annotation, is_text)
    if len(members) == 1:
        return _from_text(value, members[0]) if is_text else _checked(value, members[0])
    for member in members:
        try:
            return parse_value(value, member)
        except ValueError:
            continue
    raise ValueError(value)


def accepted_form(annotation: Any) -> str:
    """What a text may be to be read as the annotated type, for an error message: ``none or NUMBER``."""
    return " or ".join(dict.fromkeys(form for member in _members(annotation) if (form := _value_form(member))))


def _entries(optim_args: str | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pairs of key and value, one by one: the first mistake is the one reported, whether of form or of type."""
    if isinstance(optim_args, Mapping):
        yield from ((str(key), value) for key, value in optim_args.items())
        return
    if optim_args is not None and not isinstance(optim_args, str):
        raise ValueError(f"expected a string or a mapping, got {type(optim_args).__name__}")
    if not optim_args or not optim_args.strip():
        return
    if optim_args.lstrip().startswith("{"):
        try:
            yield from json.loads(optim_args).items()
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error})") from None
        return
    for entry in optim_args.split(","):
        key, *values = (part.strip() for part in entry.split("="))
        if problem := _malformed(entry, key, values, optim_args, options):
            raise ValueError(problem)
        yield key, values[0]


def _malformed(entry: str, key: str, values: list[str], whole: str, options: Mapping[str, Any]) -> str:
    """What is wrong with an entry that is not ``key=value``; empty where nothing is."""
    if not key and not values:
        where = "ends with a comma" if whole.rstrip().endswith(",") else "has an empty entry"
        return f"{where}: {whole!r}"
    if not values:
        name = _named(key, options)
        hint = f"write {key}={accepted_form(options[name])}" if name in options else _unknown_key(key, options)
        return f"key {key!r} has no value; {hint}"
    if len(values) > 1:
        return (
            f"entry {entry.strip()!r} has more than one '='; a string that holds one is given in a mapping or as JSON: "
            f"{json.dumps({key: '='.join(values)})}"
        )
    if not key or not values[0]:
        return f"entry {entry.strip()!r} has an empty {'value' if key else 'key'}"
    return ""


def _named(key: str, options: Mapping[str, Any]) -> str:
    """The argument that a key means: its own name first, so that SOAP's and Shampoo's ``betas`` are those of matrices."""
    return key if key in options else ALIASES.get(key, key)


def _unknown_key(key: str, options: Mapping[str, Any]) -> str:
    if key in ELSEWHERE:
        return f"key {key!r} cannot be set here: {ELSEWHERE[key]}"
    close = difflib.get_close_matches(key, dict.fromkeys([*options, *ALIASES]), n=3, cutoff=0.5)
    return f"unknown key {key!r}" + (f"; did you mean {' or '.join(map(repr, close))}?" if close else "")


def _members(annotation: Any, is_text: bool = True) -> Sequence[Any]:
    """The members of a union, for a text the most specific first; the annotation itself where it is none."""
    if typing.get_origin(annotation) not in (Union, types.UnionType):
        return (annotation,)
    if not is_text:
        return typing.get_args(annotation)

    def rank(member: Any) -> int:
        if member in _UNION_ORDER:
            return _UNION_ORDER.index(member)
        return len(_UNION_ORDER) + (1 if member is str else 0)

    members = sorted(typing.get_args(annotation), key=rank)
    if str in members:  # a text is one regular expression, not a list cut at its colons
        members = [m for m in members if not (typing.get_origin(m) in _SEQUENCES and str in typing.get_args(m))]
    return members


def _element_types(annotation: Any, length: int) -> Sequence[Any]:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is not tuple or (len(arguments) == 2 and arguments[1] is Ellipsis):
        return [arguments[0]] * length
    if len(arguments) != length:
        raise ValueError(f"expected {len(arguments)} values, got {length}")
    return arguments


def _from_text(text: str, annotation: Any) -> Any:
    folded = text.lower()
    if annotation is type(None) and folded in ("none", "null"):
        return None
    if annotation is bool and folded in _BOOLS:
        return _BOOLS[folded]
    if annotation is int:
        return int(text)
    if annotation is float and not math.isnan(number := float(text)):
        return number
    if annotation is torch.dtype and folded.removeprefix("torch.") in _DTYPES:
        return _DTYPES[folded.removeprefix("torch.")]
    if annotation is str:
        return text
    origin = typing.get_origin(annotation)
    if origin is Literal:
        for choice in typing.get_args(annotation):
            if str(choice) == text or (choice is None and folded in ("none", "null")):
                return choice
    if origin in _SEQUENCES:
        nested = any(typing.get_origin(a) in _SEQUENCES for a in typing.get_args(annotation))
        parts = text.split("/") if nested else text.replace("/", ":").split(":")
        kinds = _element_types(annotation, len(parts))
        return tuple(parse_value(part.strip(), kind) for part, kind in zip(parts, kinds, strict=True))
    raise ValueError(text)


def _checked(value: Any, annotation: Any) -> Any:
    """A value that is no text (it came in a mapping), made to fit the annotation; ValueError where it does not."""
    if annotation is Any:
        return value
    origin = typing.get_origin(annotation)
    if origin is Literal and value in typing.get_args(annotation):
        return value
    if origin in _SEQUENCES and isinstance(value, Sequence) and not isinstance(value, str):
        kinds = _element_types(annotation, len(value))
        return tuple(parse_value(v, kind) for v, kind in zip(value, kinds, strict=True))
    if isinstance(value, bool) and annotation in (int, float):  # a bool is an int to Python, not to a reader
        raise ValueError(value)
    if annotation is float and isinstance(value, (int, float)) and not math.isnan(value):
        return float(value)
    if origin is None and isinstance(annotation, type) and annotation is not float and isinstance(value, annotation):
        return value
    raise ValueError(value)


def _value_form(annotation: Any) -> str:
    simple = {type(None): "none", bool: "true|false", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    if annotation in simple:
        return simple[annotation]
    if annotation is torch.dtype:
        return "bfloat16|float16|float32|float64"
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return "|".join(str(choice) for choice in typing.get_args(annotation))
    if origin in _SEQUENCES:
        arguments = [a for a in typing.get_args(annotation) if a is not Ellipsis]
        if typing.get_origin(arguments[0]) in _SEQUENCES:
            return "/".join([_value_form(arguments[0])] * 2)
        fixed = origin is tuple and Ellipsis not in typing.get_args(annotation)
        return ":".join(_value_form(a) for a in (arguments if fixed else arguments * 2)) + ("" if fixed else "...")
    return ""  # a tensor, say, which only a mapping can hold
