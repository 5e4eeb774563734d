"""Unpickling that runs no code from a file: only names that checkpoints of optimizers are made of are resolved."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

ALLOWED: dict[str, frozenset[str]] = {
    # Containers and paths of the standard library, which do nothing when they are made.
    "builtins": frozenset({"set"}),
    "collections": frozenset({"OrderedDict", "defaultdict"}),
    "pathlib": frozenset({"PosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
    # Tensors and parameters as torch.save writes them; `torch` also has dtypes and storages, see below.
    "torch": frozenset({"Size", "Tensor", "device"}),
    "torch._tensor": frozenset({"Tensor", "_rebuild_from_type_v2"}),
    "torch._utils": frozenset({"_rebuild_device", "_rebuild_parameter", "_rebuild_tensor_v2"}),
    "torch.nn.parameter": frozenset({"Parameter"}),
    "torch.serialization": frozenset({"_get_layout"}),
    # The description of a folder of torch.distributed.checkpoint.
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        }
    ),
}  # fmt: skip
"""Names by module. None of these functions and classes calls, opens or imports anything that a file names."""


class _Shell:
    """Stands in for an object of DeepSpeed, whose contents no reader here needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class SafeUnpickler(pickle.Unpickler):
    """An unpickler that resolves :data:`ALLOWED`, torch's dtypes and storages, and DeepSpeed's classes as empty shells.

    Raises:
        pickle.UnpicklingError: for every other name.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The class or function of an allowed name."""
        if module.split(".")[0] == "deepspeed":
            return _Shell
        of_torch = name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype)
        if name in ALLOWED.get(module, ()) or (module == "torch" and of_torch):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint of an optimizer")


PICKLE_MODULE = SimpleNamespace(
    __name__="pickle", Unpickler=SafeUnpickler, load=lambda file, **kwargs: SafeUnpickler(file, **kwargs).load()
)
"""What ``torch.load(weights_only=False, pickle_module=...)`` takes."""
