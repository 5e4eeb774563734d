"""``hf-emopt launch``: ``accelerate launch`` with an ``emopt_config:`` block in its YAML.

Accelerate refuses keys that it does not know. So the block is taken out, checked and exported as ``EMOPT_*`` variables,
which :class:`hf_emopt.EmoptPlugin` and ``Trainer`` read, and Accelerate's own launcher gets the rest of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import default_config_file  # type: ignore[import-untyped]
from accelerate.commands.launch import launch_command, launch_command_parser  # type: ignore[import-untyped]
from accelerate.utils import patch_environment  # type: ignore[import-untyped]

from hf_emopt.integrations.accelerate import ENVIRONMENT_PREFIX, EmoptPlugin
from hf_emopt.integrations.registry import did_you_mean

BLOCK = "emopt_config"
_USAGE = "hf-emopt launch [--config_file FILE] [options of accelerate launch] SCRIPT [its arguments]"
_DESCRIPTION = (
    f"accelerate launch, and a block `{BLOCK}:` in its YAML file, which names the optimizer (`optim: muon`) and its options "
    "for EmoptPlugin and Trainer. The block is checked before anything starts. All options below are Accelerate's own."
)


def launch(arguments: Sequence[str]) -> int:
    """Runs ``accelerate launch`` with ``arguments``: its options, the script, the script's arguments.

    Returns:
        The exit status of a script that was run in one process; several processes that fail raise what torch raises.

    Raises:
        ValueError: the block has an unknown key or a bad value; the message names the file.
        FileNotFoundError: there is no such configuration.
    """
    parser = launch_command_parser()
    parser.prog, parser.usage, parser.description = "hf-emopt launch", _USAGE, _DESCRIPTION
    options = parser.parse_args(list(arguments))
    path = options.config_file or (default_config_file if os.path.isfile(default_config_file) else None)
    block, rest = (None, {}) if path is None else split_config(path)
    if block is None:
        return _run(options)
    environment = environment_of(block, str(path))
    for variable in sorted(set(environment) & set(os.environ)):
        if os.environ[variable] != environment[variable]:
            print(f"hf-emopt: {variable}={os.environ[variable]} of the environment overrides {path}", file=sys.stderr)
        del environment[variable]
    with tempfile.TemporaryDirectory(prefix="hf_emopt") as folder:
        plain = Path(folder) / "accelerate.yaml"
        plain.write_text(yaml.safe_dump(rest), encoding="utf-8")
        options.config_file = str(plain)
        with patch_environment(**environment):
            return _run(options)


def _run(options: Any) -> int:
    try:
        launch_command(options)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


def split_config(path: str | Path, flag: str = "--config_file") -> tuple[Any, dict[str, Any]]:
    """The ``emopt_config`` block (or ``None``) of a YAML or JSON file that a user gave by ``flag``, and the rest of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, no text, or not a mapping.
    """
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder: give a file")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{flag} {path}: no such file")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML too
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} is no text: give a file of YAML or JSON") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {type(content).__name__}")
    for key in content:
        if key != BLOCK and (hint := did_you_mean(key, [BLOCK], cutoff=0.8)):
            raise ValueError(f"{path}: unknown key {key!r}{hint}")
    return content.get(BLOCK), {key: value for key, value in content.items() if key != BLOCK}


def environment_of(block: Any, path: str) -> dict[str, str]:
    """The block of the file ``path`` as environment variables, checked; a field that is null is left out.

    Raises:
        ValueError: unknown key, with the nearest known one; bad value, with what is accepted.
    """
    known = [field.name for field in fields(EmoptPlugin)]
    if not isinstance(block, Mapping):
        raise ValueError(f"{path}: {BLOCK} must be a mapping of {', '.join(known)}; got {type(block).__name__}")
    for key in block:
        if key not in known:
            hint = did_you_mean(key, known, cutoff=0.4)
            raise ValueError(f"{path}: {BLOCK} has no key {key!r}{hint} Known: {', '.join(known)}.")
    given = {key: value for key, value in block.items() if value is not None}
    try:
        EmoptPlugin(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {BLOCK}: {error}") from None
    texts = {key: json.dumps(v) if isinstance(v, (Mapping, bool)) else str(v) for key, v in given.items()}
    return {ENVIRONMENT_PREFIX + key.upper(): text for key, text in texts.items()}
