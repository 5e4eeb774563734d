"""`script.py CONFIG.yaml [--flag value ...]`: an `HfArgumentParser` whose defaults come from a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


def parse_args(dataclasses: Sequence[type], argv: Sequence[str]) -> tuple[Any, ...]:
    """Parse `argv` into one instance of each dataclass; a leading `*.yaml` sets defaults that later flags override.

    `HfArgumentParser.parse_yaml_file` takes a file alone. Here the file's values become the parser's defaults, so
    one YAML per experiment and a flag per variation go together, and a number that YAML reads as text (`2e-3`)
    is converted like a flag's.

    Raises:
        ValueError: the file names an unknown argument (close matches are given) or is not a mapping.
    """
    parser = HfArgumentParser(dataclasses)  # type: ignore[arg-type]  # annotated for one dataclass or a NewType of Any
    arguments = list(argv)
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        path = Path(arguments.pop(0))
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold `argument: value` lines, got {type(values).__name__}.")
        known = {action.dest: action for action in parser._actions}
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=3)
                hint = f" Did you mean {', '.join(close)}?" if close else ""
                raise ValueError(f"{path}: unknown argument '{key}'.{hint}")
            known[key].required = False
        parser.set_defaults(**values)
    return tuple(parser.parse_args_into_dataclasses(args=arguments))
