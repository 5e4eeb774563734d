"""Makes the optimizers known to transformers, Accelerate and DeepSpeed once these are imported, and imports none of them.

``Trainer`` imports PEFT, bitsandbytes and Triton, where they are installed. ``import hf_emopt`` takes none of that time, and
prints nothing of theirs. ``hf_emopt.integrations`` imports ``Trainer``, so this module reaches it by name alone.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from hf_emopt.optimizers import OPTIMIZERS, PREFIX
from hf_emopt.optimizers.enum_members import add_string_member

_INTEGRATIONS = "hf_emopt.integrations"
_MODULES = {
    "Accelerator": "accelerate",
    "EmoptPlugin": "accelerate",
    "EmoptTrainer": "trainer",
    "EmoptTrainerMixin": "trainer",
    "EmoptCallback": "callback",
    "MaxLogits": "max_logits",
    "QKClipCallback": "qk_clip_callback",
    "register": "transformers",
}
"""Public names of ``hf_emopt``, and the file of the integrations that has each."""


def public_name(name: str) -> Any:
    """``__getattr__`` of ``hf_emopt``: a public name of the integrations, which are imported now.

    Raises:
        AttributeError: there is no such name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module 'hf_emopt' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_INTEGRATIONS}.{_MODULES[name]}"), name)


def register_when_imported() -> None:
    """Registers with each library now, if it is imported, or after its import. Idempotent."""
    finder = _Finder()
    others = [f for f in sys.meta_path if not hasattr(f, "is_of_hf_emopt")]  # not that of another copy
    sys.meta_path[:] = [finder, *others]
    for name in [name for name in finder.waiting if name in sys.modules]:
        finder.waiting.pop(name)()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are waited for, and calls a function after the import of each."""

    is_of_hf_emopt = True

    def __init__(self) -> None:
        self.waiting = {
            "accelerate.accelerator": _register_before_an_accelerator,
            "transformers.training_args": _add_names,
            "transformers.trainer": lambda: public_name("register")(),
            "deepspeed.runtime.engine": lambda: importlib.import_module(f"{_INTEGRATIONS}.deepspeed").watch(),
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in self.waiting else None
        if spec is not None and spec.loader is not None:
            run: Any = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.waiting.pop(name)()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _add_names() -> None:
    names = sys.modules["transformers.training_args"].OptimizerNames
    for name in (*OPTIMIZERS, *(PREFIX + name for name in OPTIMIZERS)):
        add_string_member(names, name.upper(), name)


def _register_before_an_accelerator() -> None:
    """Registers when the first accelerator is made: ``Trainer`` imports Accelerate, and cannot be imported in the middle of
    that."""
    cls = sys.modules["accelerate.accelerator"].Accelerator
    init = cls.__init__

    @functools.wraps(init)
    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = init
        public_name("register")()
        init(self, *args, **kwargs)

    cls.__init__ = first
