"""Keys and values of ``TrainingArguments`` in a file, asked for what a run would refuse, before there is a run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

from transformers.training_args import OptimizerNames, TrainingArguments

from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.integrations.registry import OPTIMIZERS, optimizer_class
from hf_emopt.integrations.transformers import handler_of

__all__ = ["misspelt_arguments", "optimizer_problems"]

CLOSE = 0.88
"""Likeness of a misspelt key. ``lora_target_modules`` and ``num_warmup_steps``, which other classes have, are less like."""


def misspelt_arguments(content: Mapping[str, Any]) -> list[str]:
    """Keys that are nearly those of ``TrainingArguments``.

    Other keys are let pass: scripts read arguments of model and data from the same file.
    """
    known = [field.name for field in fields(TrainingArguments)]
    problems = []
    for key in (str(key) for key in content if key not in known):
        close = difflib.get_close_matches(key, known, n=1, cutoff=CLOSE)
        if close:
            problems.append(f"TrainingArguments has no argument {key!r}; did you mean {close[0]!r}?")
    return problems


def optimizer_problems(content: Mapping[str, Any]) -> list[str]:
    """Of ``optim`` and ``optim_args``, which are parsed as a run parses them where the optimizer is one of ours."""
    if "optim" not in content:
        return []
    given = content["optim"]
    try:
        member = OptimizerNames(given)
    except ValueError:
        close = difflib.get_close_matches(str(given), [name.value for name in OptimizerNames], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return [f"optim={given!r} is no optimizer of hf_emopt ({', '.join(OPTIMIZERS)}) or of transformers{hint}"]
    if handler_of(cast(TrainingArguments, SimpleNamespace(optim=member))) is None:
        return []
    try:
        parse_optim_args(content.get("optim_args"), optimizer_class(str(member.value)))
    except ValueError as error:
        return [str(error)]
    return []
