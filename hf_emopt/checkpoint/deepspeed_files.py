"""Checkpoints of DeepSpeed as files: the state of an optimizer of this package, and the float32 weights, made whole.

The files of all ranks are read without DeepSpeed, and no code is run from them (:mod:`hf_emopt.checkpoint.unpickler`).
"""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_emopt.checkpoint.files import CheckpointError, read_safetensors
from hf_emopt.checkpoint.flat_state_dict import FLATS, SHAPES, SPANS, is_runs, merged, whole_of
from hf_emopt.checkpoint.unpickler import PICKLE_MODULE
from hf_emopt.state.keys import is_count

_RANK_FILE = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = "mp_rank_00_model_states.pt"


def _load(path: Path) -> dict[str, Any]:
    """The content of a file, mapped into memory, so that unused tensors are not read."""
    try:
        value: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=False, pickle_module=PICKLE_MODULE, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path} ({path.stat().st_size} bytes) cannot be read: {cause}") from error
    return value


def find_deepspeed(path: str | Path) -> Path | None:
    """The folder with DeepSpeed's files in a checkpoint of ``Trainer``, of Accelerate or of its own, or ``None``."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    latest = folder / "latest"
    candidates = [folder / latest.read_text().strip()] if latest.is_file() else []
    for candidate in (*candidates, folder, folder / "pytorch_model"):
        if (candidate / _MODEL_FILE).is_file() or any(_RANK_FILE.match(p.name) for p in candidate.glob("*.pt")):
            return candidate
    return None


def layout_of(folder: Path) -> tuple[int, str]:
    """By how many ranks DeepSpeed's files were saved (0 where one file has it all), and at which stages."""
    ranks = sum(_RANK_FILE.match(p.name) is not None for p in folder.glob("*.pt"))
    if not ranks:
        return 0, "0"
    return ranks, "1 or 2" if (folder / _MODEL_FILE).is_file() else "3"


def _parts(folder: Path) -> list[dict[str, Any]]:
    """DeepSpeed's optimizer part of every rank's file, in the order of ranks; one of stage 0."""
    files = {int(m[1]): p for p in folder.glob("*.pt") if (m := _RANK_FILE.match(p.name))}
    if not files:
        found = _load(folder / _MODEL_FILE).get("optimizer")
        if found is None:
            raise CheckpointError(
                f"{folder / _MODEL_FILE} has no state of an optimizer, and there is no file of a rank"
            )
        return [found]
    if sorted(files) != list(range(len(files))):
        raise CheckpointError(f"{folder} has files of the ranks {sorted(files)}; others are missing")
    return [_load(files[rank])["optimizer_state_dict"] for rank in sorted(files)]


def _state_of(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    if isinstance(part, dict):
        part = part.get("base_optimizer_state") or part.get("optimizer_state_dict") or part
    if not isinstance(part, dict) or "param_groups" not in part or not any("rule" in g for g in part["param_groups"]):
        raise CheckpointError(f"{folder} was not saved with an optimizer of hf_emopt")
    return part


def read_deepspeed(path: str | Path, only_description: bool = False) -> dict[str, Any]:
    """As :func:`hf_emopt.checkpoint.files.read_optimizer_state`, from DeepSpeed's files."""
    folder = _found(path)
    states = [_state_of(part, folder) for part in _parts(folder)]
    if only_description:
        for state in states:
            state["state"] = {
                index: {key: value if is_count(key) else value.to("meta") for key, value in entry.items()}
                for index, entry in state["state"].items()
            }
    return _whole_state(folder, states)


def _whole_state(folder: Path, states: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        return merged(states) if is_runs(states[0]) else states[0]
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _whole_weights(folder: Path, parts: list[dict[str, Any]], states: list[dict[str, Any]]) -> dict[str, Tensor]:
    groups = states[0]["param_groups"]
    weights: dict[str, Tensor] = {}
    if not is_runs(states[0]):
        if "fp32_groups" in parts[0]:  # copies of parameters
            for group, tensors in zip(groups, parts[0]["fp32_groups"]):
                weights |= dict(zip(group["param_names"], (t.detach() for t in tensors)))
            return weights
        module = _load(folder / _MODEL_FILE)["module"]
        return {name: module[name].float() for group in groups for name in group["param_names"]}
    flats = [p.get("single_partition_of_fp32_groups") or p["fp32_flat_groups"] for p in parts]
    for number, group in enumerate(groups):
        for position, name in enumerate(group["param_names"]):
            pieces = []
            for state, tensors in zip(states, flats):
                saved = state["param_groups"][number]
                start, stop = saved[SPANS][position]
                flat, offset = saved[FLATS][position]
                if start < stop:
                    pieces.append(((start, stop), tensors[flat].detach()[offset : offset + stop - start]))
            try:
                weights[name] = whole_of(name, pieces, group[SHAPES][position])
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from error
    return weights


def _found(path: str | Path) -> Path:
    folder = find_deepspeed(path)
    if folder is None:
        raise CheckpointError(
            f"{path} is no checkpoint of DeepSpeed: expected a file 'latest' with the name of a folder of "
            "*_optim_states.pt or *_model_states.pt, or such a folder"
        )
    return folder


def convert(path: str | Path, output: str | Path) -> list[str]:
    """Makes a checkpoint of DeepSpeed one that every layout resumes from, at any number of ranks.

    Args:
        path: a ``Trainer`` checkpoint, a folder of ``engine.save_checkpoint`` or of Accelerate, or the folder of its files.
        output: a folder that does not exist, or is empty. It gets ``optimizer.pt`` with the whole state,
            ``model.safetensors`` with the weights (trained ones in float32, others as they were saved, but none of these
            where ZeRO-3 has saved no ``model.safetensors``), and what else a ``Trainer`` checkpoint holds,
            ``trainer_state.json`` last.

    Returns:
        Names of the files.

    Raises:
        CheckpointError: naming a file and what is wrong with it, or ``output`` where it is not empty.
    """
    source, target = Path(path), Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty: name another folder")
    folder = _found(source)
    parts = _parts(folder)
    states = [_state_of(part, folder) for part in parts]
    state, weights = _whole_state(folder, states), _whole_weights(folder, parts, states)
    target.mkdir(parents=True, exist_ok=True)
    torch.save(state, target / "optimizer.pt")
    everything = _other_weights(source, folder, weights) | weights
    plain = {name: tensor.contiguous().clone() for name, tensor in everything.items()}
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    if folder != source:
        _copy_rest(source, target)
    return sorted(p.name for p in target.iterdir())


def _other_weights(source: Path, folder: Path, trained: dict[str, Tensor]) -> dict[str, Tensor]:
    """Frozen parameters and buffers: from the model's own file, or from DeepSpeed's."""
    saved = read_safetensors(source)
    if saved:
        return saved
    path = folder / _MODEL_FILE
    module = _load(path)["module"] if path.is_file() else {}
    known = {tensor.data_ptr() for name, tensor in module.items() if name in trained}
    # A weight that shares memory with a trained one is tied to it.
    return {n: t for n, t in module.items() if isinstance(t, Tensor) and t.numel() and t.data_ptr() not in known}


def _copy_rest(source: Path, target: Path) -> None:
    skipped = {"latest", "zero_to_fp32.py", "trainer_state.json", "optimizer.pt", "model.safetensors.index.json"}
    for item in sorted(source.iterdir()):
        if item.is_file() and item.name not in skipped and not item.name.startswith("model"):
            shutil.copy2(item, target / item.name)
    state = source / "trainer_state.json"
    if state.is_file():
        shutil.copy2(state, target / state.name)
