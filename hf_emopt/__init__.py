"""Muon and its kin for Hugging Face Trainer and Accelerate: importing this makes ``optim="muon"`` known to transformers."""

import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_emopt._version import __version__
from hf_emopt.checkpoint.files import CheckpointError, newest_checkpoint
from hf_emopt.linalg.newton_schulz import newton_schulz
from hf_emopt.optimizers import OPTIMIZERS, PREFIX, SOAP, KLShampoo, Muon, NorMuon, Shampoo
from hf_emopt.optimizers.enum_members import add_string_member
from hf_emopt.optimizers.qk_clip import qk_clip
from hf_emopt.routing.route import route_parameters

if TYPE_CHECKING:
    from hf_emopt.integrations.accelerate import Accelerator, EmoptPlugin
    from hf_emopt.integrations.callback import EmoptCallback
    from hf_emopt.integrations.max_logits import MaxLogits
    from hf_emopt.integrations.qk_clip_callback import QKClipCallback
    from hf_emopt.integrations.trainer import EmoptTrainer, EmoptTrainerMixin

__all__ = [
    "SOAP",
    "Accelerator",
    "CheckpointError",
    "EmoptCallback",
    "EmoptPlugin",
    "EmoptTrainer",
    "EmoptTrainerMixin",
    "KLShampoo",
    "MaxLogits",
    "Muon",
    "NorMuon",
    "QKClipCallback",
    "Shampoo",
    "__version__",
    "newest_checkpoint",
    "newton_schulz",
    "qk_clip",
    "route_parameters",
]

_IN_INTEGRATIONS = {
    **dict.fromkeys(("Accelerator", "EmoptPlugin"), "accelerate"),
    **dict.fromkeys(("EmoptTrainer", "EmoptTrainerMixin"), "trainer"),
    "EmoptCallback": "callback",
    "MaxLogits": "max_logits",
    "QKClipCallback": "qk_clip_callback",
    "register": "transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _IN_INTEGRATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.integrations.{_IN_INTEGRATIONS[name]}"), name)


def _add_names() -> None:
    names = sys.modules["transformers.training_args"].OptimizerNames
    for name in (*OPTIMIZERS, *(PREFIX + name for name in OPTIMIZERS)):
        add_string_member(names, name.upper(), name)


def _before_the_first_accelerator() -> None:
    cls = sys.modules["accelerate.accelerator"].Accelerator
    init = cls.__init__

    @functools.wraps(init)
    def first(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__ = init
        __getattr__("register")()
        init(self, *args, **kwargs)

    cls.__init__ = first


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules of others after their import. ``Trainer`` imports PEFT, bitsandbytes and Triton, where they are
    installed: this package does not import it before it is used."""

    is_of_hf_emopt = True

    def __init__(self) -> None:
        self.waiting = {
            "transformers.training_args": _add_names,
            "accelerate.accelerator": _before_the_first_accelerator,
            "transformers.trainer": lambda: __getattr__("register")(),
            "deepspeed.runtime.engine": lambda: importlib.import_module(f"{__name__}.integrations.deepspeed").watch(),
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


_finder = _Finder()
sys.meta_path[:] = [
    _finder,
    *(f for f in sys.meta_path if not hasattr(f, "is_of_hf_emopt")),
]  # not that of another copy
for _name in [name for name in _finder.waiting if name in sys.modules]:
    _finder.waiting.pop(_name)()
