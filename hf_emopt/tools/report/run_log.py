"""Logs of a run: ``trainer_state.json`` of ``Trainer``, or JSON lines of a logger."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_emopt.optimizers.diagnostics import LAYERS, PREFIX

STATE = "trainer_state.json"
_STEPS = ("step", "train/global_step", "global_step", "_step")
_TURN_ON = (
    'train with Trainer(callbacks=[hf_emopt.EmoptCallback("layers")]), or set EMOPT_DIAGNOSTICS=layers in the environment of '
    "an unchanged script"
)


class RunLogError(ValueError):
    """There is no log to report on; the message says how to make one."""


@dataclass(frozen=True)
class RunLog:
    """Entries of a log in the order of steps, each with the numbers logged there by name, and the file they are from."""

    source: Path
    entries: tuple[tuple[int, Mapping[str, float]], ...]

    def names(self) -> list[str]:
        """Every name, in the order in which they appear."""
        return list(dict.fromkeys(name for _, values in self.entries for name in values))

    def series(self, name: str) -> list[tuple[int, float]]:
        """Steps and values of a name; values that are no finite number are left out."""
        pairs = [(step, values[name]) for step, values in self.entries if name in values]
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def layers(self) -> dict[str, list[str]]:
        """Quantities of each parameter, in the order of the log; where that is the alphabet's, layer 2 is before layer 10."""
        found: dict[str, list[str]] = {}
        for name in self.names():
            if name.startswith(LAYERS):
                layer, _, quantity = name.removeprefix(LAYERS).rpartition("/")
                found.setdefault(layer, []).append(quantity)
        # Trainer sorts the keys of its file, and the order of the model is lost.
        return {layer: found[layer] for layer in sorted(found, key=_natural)} if list(found) == sorted(found) else found

    def rules(self) -> dict[str, list[str]]:
        """Quantities of each rule, AdamW's last."""
        found: dict[str, list[str]] = {}
        for name in self.names():
            rule, slash, quantity = name.removeprefix(PREFIX).partition("/")
            if name.startswith(PREFIX) and slash and rule != "layers":
                found.setdefault(rule, []).append(quantity)
        return dict(sorted(found.items(), key=lambda item: item[0] == "adamw"))


def read_log(run: str | Path) -> RunLog:
    """Reads the log of a run.

    Args:
        run: an ``output_dir`` of ``Trainer``, a checkpoint, a ``trainer_state.json``, or a file of JSON lines with a
            ``step`` in each.

    Raises:
        FileNotFoundError: there is no such path.
        RunLogError: no log is there, it cannot be read, or nothing in it is from this package.
    """
    path = Path(run)
    if not path.exists():
        raise FileNotFoundError(f"{run}: no such file or folder")
    source = _in_folder(path) if path.is_dir() else path
    try:
        text = source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunLogError(f"{source} is no text: {error}. {_wanted()}") from None
    entries = [_entry(row, number) for number, row in enumerate(_rows(source, text), start=1)]
    merged: dict[int, dict[str, float]] = {}
    for step, values in entries:
        merged.setdefault(step, {}).update(values)
    log = RunLog(source, tuple(sorted(merged.items())))
    if not log.entries:
        raise RunLogError(f"{source} holds no log entries: was the run ended before its first log? {_wanted()}")
    if not log.rules() and not log.layers():
        raise RunLogError(
            f"{source} holds {len(entries)} log entries, and no figure of hf_emopt ({PREFIX}...): {_TURN_ON}"
        )
    return log


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _wanted() -> str:
    return f'A log is Trainer\'s {STATE}, or JSON lines such as {{"step": 10, "loss": 2.5}}'


def _in_folder(folder: Path) -> Path:
    """The log of an output folder: its own, else that of its last checkpoint, else its only file of JSON lines."""
    if (folder / STATE).is_file():
        return folder / STATE
    numbered = [(path.parent.name.rpartition("-")[2], path) for path in folder.glob(f"checkpoint-*/{STATE}")]
    states = {int(number): path for number, path in numbered if number.isdigit()}
    if states:
        return states[max(states)]
    lines = sorted(folder.glob("*.jsonl"))
    if len(lines) == 1:
        return lines[0]
    if lines:
        names = ", ".join(path.name for path in lines)
        raise RunLogError(f"{folder} has several files of JSON lines ({names}): name the one to report on")
    raise RunLogError(
        f"{folder} has no {STATE}, no checkpoint with one, and no .jsonl file. Trainer writes its log with every checkpoint, "
        "and to the output folder by trainer.save_state() after trainer.train()"
    )


def _rows(source: Path, text: str) -> Iterable[Mapping[str, Any]]:
    """Log entries of either form."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = [_line(source, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if isinstance(content, Mapping):
        content = content.get("log_history", [content] if any(key in content for key in _STEPS) else None)
    if not isinstance(content, list) or not all(isinstance(row, Mapping) for row in content):
        raise RunLogError(f"{source} is JSON, but no log. {_wanted()}")
    return content


def _line(source: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RunLogError(f"{source}, line {number} is no JSON: {error.msg}. {_wanted()}") from None


def _entry(row: Mapping[str, Any], number: int) -> tuple[int, dict[str, float]]:
    step = next((row[key] for key in _STEPS if isinstance(row.get(key), (int, float))), number)
    values = {}
    for key, value in row.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key not in _STEPS:
            # Reporters put "train/" before the names that Trainer logs, and write "eval_loss" as "eval/loss".
            name = str(key).removeprefix("train/")
            values[re.sub("^eval/", "eval_", name) if name == key else name] = float(value)
    return int(step), values
