"""Files of checkpoints: which are whole, where in a folder the optimizer's state is, and how it is read.

Reading runs no code from a file: ``torch.load`` is called with ``weights_only=True``, and the descriptions that
``torch.distributed.checkpoint`` pickles go through :mod:`hf_emopt.checkpoint.unpickler`.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from hf_emopt.checkpoint.unpickler import SafeUnpickler

_FOLDER = re.compile(r"^checkpoint-(\d+)$")
_METADATA = ".metadata"

_INTERRUPTED = (
    "If the save was interrupted, resume from an older checkpoint; hf_emopt.newest_checkpoint(output_dir) finds the newest "
    "that is whole"
)
_OTHER = "Name a checkpoint's folder, or the file with the optimizer's state in it (optimizer.pt, optimizer.bin)"
_NOT_ALLOWED = re.compile(r"GLOBAL ([\w.]+)")  # torch's unpickler names the class that it does not allow
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class CheckpointError(ValueError):
    """A file of a checkpoint that cannot be read, or has the wrong content; the message names it and the cause."""


def problem_with(folder: str | Path) -> str | None:
    """Why a ``Trainer`` checkpoint is not whole, or ``None`` where it is.

    ``Trainer`` writes ``trainer_state.json`` last, and every file that says how long it is (safetensors, torch's zip files,
    folders of ``torch.distributed.checkpoint``) has to be that long. The contents of tensors are not read.
    """
    folder = Path(folder)
    state = folder / "trainer_state.json"
    if not folder.is_dir():
        return f"{folder} is no folder"
    if not state.is_file():
        return f"{state} is missing, which is written last"
    try:
        json.loads(state.read_text())
    except ValueError as error:
        return f"{state} is cut short: {error}"
    return next(filter(None, map(_problem_with_file, sorted(folder.rglob("*")))), None)


def newest_checkpoint(output_dir: str | Path) -> Path | None:
    """The ``checkpoint-N`` of the highest ``N`` that is whole, or ``None``; folders of interrupted saves are passed over."""
    root = Path(output_dir)
    folders = [p for p in root.iterdir() if p.is_dir() and _FOLDER.match(p.name)] if root.is_dir() else []
    newest_first = sorted(folders, key=lambda p: -int(p.name.rpartition("-")[2]))
    return next((folder for folder in newest_first if problem_with(folder) is None), None)


def _problem_with_file(path: Path) -> str | None:
    if path.name == _METADATA:
        return _problem_with_distributed(path.parent)
    begun = path.name == f"{_METADATA}.tmp" or path.suffix == ".distcp"
    if begun and not (path.parent / _METADATA).exists():
        return f"{path.parent} has no {_METADATA}, which is written last"
    if path.suffix == ".safetensors":
        return _problem_with_safetensors(path)
    if path.suffix in (".pt", ".pth", ".bin") and path.name != "training_args.bin" and not zipfile.is_zipfile(path):
        return f"{path} is cut short: it has no directory at its end"
    return None


def _problem_with_safetensors(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            return f"{path} is cut short: {size} bytes"
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            return f"{path} has a broken header: {error}"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    return None if size >= wanted else f"{path} is cut short: {size} of {wanted} bytes"


def _problem_with_distributed(folder: Path) -> str | None:
    try:
        metadata = _SafeReader(folder).read_metadata()
    except Exception as error:
        return f"{folder / _METADATA} cannot be read: {error}"
    wanted: dict[str, int] = defaultdict(int)
    for info in (metadata.storage_data or {}).values():
        wanted[info.relative_path] = max(wanted[info.relative_path], info.offset + info.length)
    for name, length in sorted(wanted.items()):
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < length:
            return f"{path} is missing" if size < 0 else f"{path} is cut short: {size} of {length} bytes"
    return None


def find_optimizer_state(path: str | Path) -> Path | None:
    """The optimizer's file or folder in a checkpoint of ``Trainer`` or Accelerate, or the path itself if it is one."""
    path = Path(path)
    if path.is_file() or (path / _METADATA).is_file():
        return path
    for name in ("optimizer.pt", "optimizer.bin"):
        if (path / name).is_file():
            return path / name
    return path / "optimizer_0" if (path / "optimizer_0").is_dir() else None


def find_fsdp_weights(folder: Path) -> Path | None:
    """The file or folder with the weights that ``Trainer`` saved under FSDP, or ``None``."""
    file, shards = folder / "pytorch_model_fsdp.bin", folder / "pytorch_model_fsdp_0"
    return file if file.is_file() else shards if shards.is_dir() else None


def read_fsdp_weights(path: Path) -> dict[str, Tensor]:
    """The weights at a path from :func:`find_fsdp_weights`, whole and on the host."""
    state = read_file(path) if path.is_file() else read_distributed(path)
    weights: dict[str, Tensor] = state.get("model", state)
    return weights


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Weights from ``model.safetensors`` or the files that it was cut into; empty where there are none."""
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def read_optimizer_state(path: str | Path, only_description: bool = False) -> dict[str, Any]:
    """An optimizer's state from any form of checkpoint, whole and on the host.

    Args:
        path: a ``Trainer`` or Accelerate checkpoint, a file of ``torch.save``, or a folder of
            ``torch.distributed.checkpoint``.
        only_description: tensors other than counts come without their contents, on the meta device.

    Returns:
        ``{"state": ..., "param_groups": ...}``, as ``optimizer.load_state_dict`` takes it. Files are mapped into memory, so
        that unused tensors are not read.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    found = find_optimizer_state(path)
    if found is None or not found.exists():
        raise CheckpointError(
            f"{path} has no state of an optimizer: expected optimizer.pt, optimizer.bin or optimizer_0 in a folder, a file, "
            "or a folder with .metadata"
        )
    state = read_distributed(found, only_description) if found.is_dir() else read_file(found)
    if "optimizer" in state and "param_groups" not in state:
        state = state["optimizer"]
    if "param_groups" not in state and any(str(key).startswith("param_groups.") for key in state):
        state = _unflattened(state)
    if not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{found} is no state of an optimizer: it holds {', '.join(map(str, list(state)[:5]))}")
    return state


def read_file(path: Path) -> dict[str, Any]:
    """A dictionary that ``torch.save`` wrote, mapped into memory."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {_why_unreadable(path, error)}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is no state of an optimizer: it holds a {type(value).__name__}")
    return value


def _why_unreadable(path: Path, error: Exception) -> str:
    """Cause and fix in place of torch's messages, which recommend to run code from the file or are a bare number."""
    with path.open("rb") as file:
        head = file.read(64)
    foreign = _NOT_ALLOWED.search(str(error))
    if not head:
        return f"it is empty. {_INTERRUPTED}"
    if foreign is not None:
        return f"it holds an object of {foreign[1]}, and no code is run from a file. {_OTHER}"
    if zipfile.is_zipfile(path):
        first = next(iter(_COLOURS.sub("", str(error)).strip().splitlines()), type(error).__name__)
        return f"it is damaged, or a zip file that torch.save has not written ({first}). {_INTERRUPTED}"
    if head.startswith(b"PK"):
        return f"it is cut short: it has no directory at its end. {_INTERRUPTED}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return f"it is a file of safetensors, which holds weights and no state of an optimizer. {_OTHER}"
    if head.startswith(b"\x80"):
        return f"it is a pickle that torch.save has not written, or is cut short. {_INTERRUPTED}"
    kind = "a text, and" if _is_text(head) else "no file of safetensors and"
    return f"it is {kind} no file of torch.save. {_OTHER}"


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the head may end within a character
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character in "\t\r\n" for character in text)


class _SafeReader(FileSystemReader):
    """A reader that runs no code from the folder's description."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / _METADATA
        metadata: Metadata = SafeUnpickler(io.BytesIO(path.read_bytes())).load()
        return metadata


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_distributed(path: Path, only_description: bool = False) -> dict[str, Any]:
    """A folder of ``torch.distributed.checkpoint``, whole and on the host."""
    found = _problem_with_distributed(path) if (path / _METADATA).is_file() else f"{path / _METADATA} is missing"
    if found is not None:
        raise CheckpointError(f"{found}; the save was interrupted: resume from an older checkpoint")
    reader = _SafeReader(path)
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            device = "meta" if only_description and len(entry.size) else "cpu"
            tensor = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
            (described if device == "meta" else wanted)[key] = tensor
        elif isinstance(entry, BytesStorageMetadata):
            wanted[key] = None
    try:
        load_distributed(
            wanted,
            storage_reader=reader,
            planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).strip().splitlines()[-1]}") from error
    nested: dict[Any, Any] = {}
    paths = metadata.planner_data or {}
    for key, value in (wanted | described).items():
        where = paths.get(key) or (key,)
        node = nested
        for part in where[:-1]:
            node = node.setdefault(part, {})
        node[where[-1]] = value
    return {key: _lists(value) for key, value in nested.items()}


def _lists(value: Any) -> Any:
    """Dictionaries whose keys are all positions, as the lists that they were."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(v) for key, v in value.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _unflattened(flat: dict[str, Any]) -> dict[str, Any]:
    """``state.<parameter>.<key>`` and ``param_groups.<parameter>.<option>`` as state by name and groups."""
    options: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        if key.startswith("param_groups."):
            name, option = key.removeprefix("param_groups.").rsplit(".", 1)
            options[name][option] = value
    state: dict[str, dict[str, Any]] = {name: {} for name in options}
    for key, value in flat.items():
        if key.startswith("state."):
            rest = key.removeprefix("state.")
            owner = next((rest[:i] for i in range(len(rest)) if rest[i] == "." and rest[:i] in options), None)
            if owner is None:
                raise CheckpointError(f"{key} is state of a parameter that no group has")
            state[owner][rest[len(owner) + 1 :]] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, values in options.items():
        group = groups.setdefault(repr(sorted(values.items())), {**values, "params": []})
        group["params"].append(name)
    return {"state": state, "param_groups": list(groups.values())}
