"""Configuration files of Accelerate, DeepSpeed and ``Trainer``: what a run would refuse in them, before it is launched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from transformers.training_args import OptimizerNames, TrainingArguments

from hf_emopt.integrations.launch import BLOCK, environment_of, split_config
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.integrations.refusals import (
    ACCELERATE_FIX,
    TRAINER_FIX,
    deepspeed_problem,
    fsdp1_problem,
    megatron_problem,
    section,
)
from hf_emopt.integrations.registry import OPTIMIZERS, did_you_mean, optimizer_class
from hf_emopt.integrations.transformers import handler_of

_ACCELERATE = {"compute_environment", "distributed_type", BLOCK}
_DEEPSPEED = {
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "optimizer", "gradient_accumulation_steps",
    "bf16", "fp16", "zero_force_ds_cpu_optimizer",
}  # fmt: skip
_TRAINER = {"output_dir", "optim", "optim_args", "learning_rate", "fsdp", "fsdp_config", "deepspeed", "max_steps"}

CLOSE = 0.88
"""Likeness of a misspelt key. ``lora_target_modules`` and ``num_warmup_steps``, which other classes have, are less like."""

Content = Mapping[str, Any]


def _kind_of(content: Content, path: str | Path) -> str:
    """``"accelerate"``, ``"trainer"`` or ``"deepspeed"``, by the keys."""
    keys = set(content)
    if keys & _ACCELERATE:
        return "accelerate"
    if keys & (_TRAINER - _DEEPSPEED):
        return "trainer"
    if keys & _DEEPSPEED:
        return "deepspeed"
    raise ValueError(
        f"{path} is no configuration of Accelerate (distributed_type: ...), of DeepSpeed (zero_optimization: ...) or of "
        f"TrainingArguments (output_dir: ...); its keys are {', '.join(map(str, content)) or 'none'}"
    )


def problems_of_config(path: str | Path) -> tuple[str, list[str]]:
    """The kind of a configuration file, and each setting that a run would be refused for, with its fix.

    Args:
        path: YAML or JSON.

    Raises:
        FileNotFoundError: there is no such file, or it names one that there is not.
        ValueError: it cannot be read, or is no configuration.
    """
    block, content = split_config(path, "--config")
    kind = _kind_of(content if block is None else {**content, BLOCK: block}, path)
    if kind == "deepspeed":
        return kind, _some(deepspeed_problem("an optimizer of hf_emopt", content))
    if kind == "trainer":
        return kind, _of_trainer(content, path)
    return kind, _of_accelerate(content, block, path)


def _some(problem: str | None) -> list[str]:
    return [] if problem is None else [problem]


def _of_accelerate(content: Content, block: Any, path: str | Path) -> list[str]:
    problems = []
    if block is not None:
        try:
            environment_of(block, str(path))
        except ValueError as error:
            problems.append(str(error))
    optim = block.get("optim") if isinstance(block, Mapping) else None
    name = f"optim={optim!r}" if optim else "an optimizer of hf_emopt"
    distributed = str(content.get("distributed_type", "NO")).upper()
    if distributed == "MEGATRON_LM":
        problems.append(megatron_problem(name))
    if distributed == "FSDP":
        problems += _of_fsdp(name, section(content, "fsdp_config"), ("fsdp_version",), 1, ACCELERATE_FIX)
    if distributed == "DEEPSPEED":
        config = _deepspeed_of_accelerate(section(content, "deepspeed_config"), path)
        problems += _some(deepspeed_problem(name, config))
    return problems


def _deepspeed_of_accelerate(flags: Content, path: str | Path) -> Content:
    """The DeepSpeed configuration that Accelerate reads from a file, or makes of its own keys."""
    if flags.get("deepspeed_config_file"):
        return _named_file(str(flags["deepspeed_config_file"]), path)
    zero: dict[str, Any] = {"stage": flags.get("zero_stage", 2)}
    for name in ("offload_optimizer", "offload_param"):
        device = flags.get(f"{name}_device", "none")
        if device not in (None, "none"):
            zero[name] = {"device": device}
    return {"zero_optimization": zero}


def _of_trainer(content: Content, path: str | Path) -> list[str]:
    name = f"optim={content['optim']!r}" if "optim" in content else "an optimizer of hf_emopt"
    problems = _misspelt_arguments(content) + _optimizer_problems(content)
    fsdp = _given_or_named(content, "fsdp_config", path)
    problems += _of_fsdp(name, fsdp, ("version", "fsdp_version"), 2, TRAINER_FIX)
    if content.get("deepspeed"):
        problems += _some(deepspeed_problem(name, _given_or_named(content, "deepspeed", path)))
    return problems


def _misspelt_arguments(content: Content) -> list[str]:
    """Keys that are nearly those of ``TrainingArguments``; others pass, since scripts read their own from the same file."""
    known = [field.name for field in fields(TrainingArguments)]
    hints = {str(key): did_you_mean(key, known, CLOSE) for key in content if key not in known}
    return [f"TrainingArguments has no argument {key!r}{hint}" for key, hint in hints.items() if hint]


def _optimizer_problems(content: Content) -> list[str]:
    """Problems of ``optim`` and of ``optim_args``, which are parsed as a run parses them for an optimizer of ours."""
    if "optim" not in content:
        return []
    given = content["optim"]
    try:
        member = OptimizerNames(given)
    except ValueError:
        hint = did_you_mean(given, [name.value for name in OptimizerNames])
        return [f"optim={given!r} is no optimizer of hf_emopt ({', '.join(OPTIMIZERS)}) or of transformers{hint}"]
    if handler_of(cast(TrainingArguments, SimpleNamespace(optim=member))) is None:
        return []
    try:
        parse_optim_args(content.get("optim_args"), optimizer_class(str(member.value)))
    except ValueError as error:
        return [str(error)]
    return []


def _of_fsdp(name: str, fsdp: Content, keys: Sequence[str], default: int, fix: str) -> list[str]:
    """Of its version, under the first of ``keys`` that is there."""
    key = next((key for key in keys if key in fsdp), keys[0])
    version = str(fsdp.get(key, default))
    if version == "1":
        return [fsdp1_problem(name, fix)]
    return [] if version == "2" else [f"fsdp_config: {key} {fsdp[key]!r} is no version of FSDP; write {key}: 2"]


def _given_or_named(content: Content, key: str, path: str | Path) -> Content:
    value = content.get(key)
    return _named_file(value, path) if isinstance(value, str) else section(content, key)


def _named_file(name: str, path: str | Path) -> Content:
    """A file that a configuration names, from the working directory as a run would, else from beside the configuration."""
    candidates = [Path(name), Path(path).parent / name, Path(path).parent / Path(name).name]
    found = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
    if found is None:
        raise FileNotFoundError(f"{path} names {name}: no such file")
    return split_config(found, f"{path}:")[1]
