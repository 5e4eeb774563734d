"""The content of a checkpoint: rules, steps, dtypes and bytes, parameter by parameter. Reads descriptions, not tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_emopt.checkpoint.deepspeed_files import find_deepspeed, read_deepspeed
from hf_emopt.checkpoint.files import find_optimizer_state, problem_with, read_optimizer_state
from hf_emopt.checkpoint.matching import saved_names


@dataclass(frozen=True)
class ParameterReport:
    """State of one parameter.

    Attributes:
        name: as it was saved; its number where the checkpoint has no names.
        step: steps counted, ``None`` where it has never been stepped.
        entries: dtype and shape of every tensor, by key; ``bytes`` is their sum.
    """

    name: str
    group: str
    step: int | None
    entries: dict[str, str]
    bytes: int


@dataclass(frozen=True)
class CheckpointReport:
    """The optimizer's state in a checkpoint.

    Attributes:
        path: file or folder of the state.
        rules: update rules of its matrices; ``["adamw"]`` for a checkpoint of AdamW.
        version: of the state's form; ``None`` where another optimizer saved it.
        groups: for each, its name, kind, number of parameters and plain hyperparameters.
        incomplete: what is wrong with a ``Trainer`` checkpoint around it, ``None`` if nothing.
    """

    path: str
    rules: list[str]
    version: int | None
    groups: list[dict[str, Any]]
    parameters: list[ParameterReport]
    incomplete: str | None = None

    @property
    def bytes(self) -> int:
        """Of all state."""
        return sum(p.bytes for p in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {**asdict(self), "bytes": self.bytes}

    def __str__(self) -> str:
        lines = [f"{self.path}: {', '.join(self.rules)}, state version {self.version}, {self.bytes:,} bytes of state"]
        if self.incomplete:
            lines.append(f"NOT WHOLE: {self.incomplete}")
        for group in self.groups:
            shown = ", ".join(f"{k} {v}" for k, v in group.items() if k in ("lr", "weight_decay", "betas", "momentum"))
            lines.append(f"group {group['name']} ({group['kind']}): {group['parameters']} parameters, {shown}")
        width = max((len(p.name) for p in self.parameters), default=0)
        for p in self.parameters:
            step = "no step yet" if p.step is None else f"step {p.step}"
            entries = ", ".join(f"{key} {what}" for key, what in sorted(p.entries.items()))
            lines.append(f"  {p.name:<{width}}  {p.group}  {step}  {p.bytes:,} B  {entries}")
        return "\n".join(lines)


def inspect_checkpoint(path: str | Path) -> CheckpointReport:
    """Describes the optimizer's state in a checkpoint.

    Args:
        path: a ``Trainer`` or Accelerate checkpoint, a file of ``torch.save``, a folder of
            ``torch.distributed.checkpoint``, or of DeepSpeed's files.

    Raises:
        hf_emopt.checkpoint.files.CheckpointError: a ``ValueError`` that names the file and what is wrong with it.
    """
    by_rank = find_deepspeed(path)
    state = (read_deepspeed if by_rank else read_optimizer_state)(path, only_description=True)
    groups, parameters = [], []
    for number, group in enumerate(state["param_groups"]):
        label = str(group.get("name", f"group {number}"))
        plain = {k: v for k, v in group.items() if isinstance(v, (str, int, float, bool, type(None)))}
        plain |= {k: list(v) for k, v in group.items() if k == "betas"}
        kind = group.get("kind", "adamw" if "betas" in group else "unknown")
        groups.append({**plain, "name": label, "kind": kind, "parameters": len(group["params"])})
        for name, index in zip(saved_names(group) or group["params"], group["params"]):
            parameters.append(_describe(str(name), label, state["state"].get(index, {})))
    versions = [g["state_version"] for g in state["param_groups"] if "state_version" in g]
    rules = sorted({g["rule"] for g in state["param_groups"] if "rule" in g})
    if not rules:
        rules = ["adamw"] if any("betas" in g for g in state["param_groups"]) else ["unknown"]
    folder = Path(path)
    of_trainer = (folder / "trainer_state.json").exists() or (folder.is_dir() and folder.name.startswith("checkpoint-"))
    source = str(by_rank or find_optimizer_state(path))
    incomplete = problem_with(path) if of_trainer else None
    return CheckpointReport(source, rules, max(versions, default=None), groups, parameters, incomplete)


def _describe(name: str, group: str, entry: dict[str, Any]) -> ParameterReport:
    step = entry.get("step")
    tensors = {key: value for key, value in entry.items() if torch.is_tensor(value)}
    return ParameterReport(
        name,
        group,
        None if step is None or int(step) == 0 else int(step),
        {key: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for key, t in tensors.items() if t.ndim},
        sum(t.numel() * t.element_size() for t in tensors.values()),
    )
