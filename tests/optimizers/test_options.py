"""The list of options: the constructors, groups and docstrings that are made from it, or held against it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_emopt

OPTIMIZERS: list[Any] = [hf_emopt.Muon, hf_emopt.NorMuon, hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo]
PROMISED = Path(__file__).with_name("constructor_signatures.txt")


def signature_lines(cls: Any) -> list[str]:
    """The positional arguments in their order, then the others by name."""
    lines = [
        f"{cls.__name__} {'positional' if p.kind is p.POSITIONAL_OR_KEYWORD else 'keyword'} {p}"
        for p in inspect.signature(cls).parameters.values()
    ]
    positional = [line for line in lines if " positional " in line]
    return positional + sorted(set(lines) - set(positional))


def test_constructors_take_what_they_always_took() -> None:
    """Names, order, types and defaults. A new option is a new line in the file; a changed line breaks somebody's script."""
    found = [line for cls in OPTIMIZERS for line in signature_lines(cls)]
    assert found == PROMISED.read_text().splitlines()


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_every_option_of_the_rule_is_in_its_groups(cls: Any) -> None:
    optimizer = cls([nn.Parameter(torch.zeros(4, 4))])
    names = {field.name for field in dataclasses.fields(optimizer.rule.options)}
    assert names
    assert names <= set(optimizer.param_groups[0])
    assert names <= set(inspect.signature(cls).parameters)


@pytest.mark.parametrize("cls", [hf_emopt.Muon, hf_emopt.SOAP, hf_emopt.Shampoo])
def test_every_argument_has_an_entry_in_the_docstring(cls: Any) -> None:
    text = cls.__doc__.partition("Args:\n")[2].partition("Raises:")[0]
    entries = re.findall(r"^        (\w[\w, ]*):", text, re.MULTILINE)
    assert {name for entry in entries for name in entry.split(", ")} == set(inspect.signature(cls).parameters)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, r"Muon.__init__\(\) missing 1 required positional argument: 'params'"),
        (([],), {"momentun": 0.9}, r"Muon.__init__\(\) got an unexpected keyword argument 'momentun'"),
        (([],) * 10, {}, r"Muon.__init__\(\) takes from 2 to 10 positional arguments but 11 were given"),
    ],
)
def test_wrong_arguments_are_named_as_python_does(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        hf_emopt.Muon(*arguments, **options)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_a_subclass_and_copies_keep_their_options(cls: Any) -> None:
    class Own(cls):  # type: ignore[misc]
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=0.5, **options)

    param = nn.Parameter(torch.zeros(4, 4))
    group = Own([param], weight_decay=0.25).param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    optimizer = cls(params=[param], lr=0.5)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for ours, theirs in zip(optimizer.param_groups, other.param_groups):
            assert {k: v for k, v in ours.items() if k != "params"} == {
                k: v for k, v in theirs.items() if k != "params"
            }
