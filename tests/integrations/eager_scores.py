"""Logits as a model's own eager attention computes them: what it hands to softmax, seen from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_softmax = functional.softmax


@contextmanager
def scores(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Largest masked logit of every head by module, ``(heads,)``, of the eager forward passes inside.

    Args:
        modules: attention modules by name.
    """
    found: dict[str, Tensor] = {}
    running: list[str] = []
    hooks: list[Any] = []
    for name, module in modules.items():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))

    def softmax(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if running and logits.dim() == 4:
            best = logits.detach().double().amax(dim=(0, 2, 3))
            known = found.get(running[-1])
            found[running[-1]] = best if known is None else torch.maximum(known, best)
        return _softmax(logits, *args, **kwargs)

    functional.softmax = softmax
    try:
        yield found
    finally:
        functional.softmax = _softmax
        for hook in hooks:
            hook.remove()
