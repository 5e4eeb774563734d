"""Whether Triton kernels can and may run, and small things that every launch needs.

The package works without Triton: this module, :mod:`configs` and :mod:`launching` import it in functions only, and the
modules with kernels are imported where one is launched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from contextlib import AbstractContextManager

import torch

DISABLE_VARIABLE = "HF_EMOPT_DISABLE_TRITON"
_NOTHING: AbstractContextManager[object] = contextlib.nullcontext()


def variable(name: str, default: str = "") -> str:
    """A variable of the environment as it is now, so that a test or a debugging session can change it."""
    # A step asks some hundreds of times, and os.environ.get encodes the name and catches an error each time.
    try:
        found = os.environ._data.get(_encoded(name))  # type: ignore[attr-defined]
    except AttributeError:  # another Python's, or a plain dictionary in its place
        return os.environ.get(name, default)
    return default if found is None else os.environ.decodevalue(found)


@functools.cache
def _encoded(name: str) -> str | bytes:
    return os.environ.encodekey(name)


def kernels_disabled() -> bool:
    """``HF_EMOPT_DISABLE_TRITON`` is set to anything but ``""`` or ``"0"``."""
    return variable(DISABLE_VARIABLE) not in ("", "0")


def interpreting() -> bool:
    """Kernels run on the CPU in Triton's interpreter (``TRITON_INTERPRET=1`` before the first import of Triton)."""
    return variable("TRITON_INTERPRET") == "1"


@functools.cache
def triton_installed() -> bool:
    """Triton 3.4 or later, the first with what the kernels use of tensor descriptors."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version >= (3, 4)


@functools.cache
def architecture(device: torch.device) -> int | None:
    """Compute capability of an NVIDIA device as one number, 90 for sm_90; ``None`` for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors; 1 when interpreting, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a device the current one, where Triton launches and graphs are recorded: a model may be on several."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _NOTHING
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Address of a device's current stream; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device() if device.index is None else device.index)


def supported(device: torch.device) -> bool:
    """Whether kernels can run there: an NVIDIA device of capability 8.0 or higher, or the interpreter."""
    return _supported(device, kernels_disabled(), interpreting())


def has_copy_engine(device: torch.device) -> bool:
    """Whether kernels with tensor descriptors, as products have them, can run there: capability 9.0 or higher, or the
    interpreter."""
    return supported(device) and (interpreting() or (architecture(device) or 0) >= 90)


@functools.cache
def _supported(device: torch.device, disabled: bool, interpreted: bool) -> bool:
    if disabled or not triton_installed():
        return False
    if interpreted:
        return True
    capability = architecture(device)
    return capability is not None and capability >= 80
