"""Signatures for the reference page: griffe reads source code, and the constructors are made from lists of options."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class ConstructorSignatures(griffe.Extension):
    """Gives an ``__init__`` under ``@takes(...)`` the parameters that it has at run time."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        if not isinstance(init, griffe.Function) or not any("takes(" in str(d.value) for d in init.decorators):
            return
        made = getattr(importlib.import_module(cls.module.path), cls.name)
        init.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    p.name,
                    kind=griffe.ParameterKind(p.kind.description),
                    annotation=None if p.annotation is p.empty else p.annotation,
                    default=None if p.default is p.empty else repr(p.default),
                )
                for p in inspect.signature(made.__init__).parameters.values()
            )
        )
