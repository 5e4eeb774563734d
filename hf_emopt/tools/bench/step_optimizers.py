"""The optimizers that ``hf-emopt bench step`` times: this package's and torch's own."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.muon import Muon, NorMuon
from hf_emopt.optimizers.shampoo import KLShampoo, Shampoo
from hf_emopt.optimizers.soap import SOAP
from hf_emopt.tools.bench.step import Maker, Settings

LR, DECAY = 1e-3, 0.1
# Frequency and blocks of the published comparisons.
KRONECKER: dict[str, Any] = {"precondition_frequency": 10, "max_preconditioner_dim": 2048, "matmul_precision": "fp16"}


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters, ``parts``, as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of hidden layers, and the rest."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if hidden else rest).append(parameter)
    return matrices, rest


def by_mesh(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups of one device mesh each: torch's fused functions take no lists over several."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        alike[getattr(parameter, "device_mesh", None)].append(parameter)
    return [{"params": members} for members in alike.values()]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """``torch.optim.AdamW``, fused."""
    return torch.optim.AdamW(by_mesh(parameters), lr=LR, weight_decay=DECAY, fused=True)


def _torch_muon(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    matrices, rest = split(model)
    return Several(torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"), adamw(rest))


def _ours(cls: type[MatrixOptimizer], **fixed: Any) -> Maker:
    accepted = frozenset(inspect.signature(cls).parameters)

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        unknown = sorted(set(settings.options) - accepted)
        if unknown:
            raise ValueError(f"{cls.__name__} has no option {', '.join(unknown)}")
        return cls(model, **{"lr": LR, "weight_decay": DECAY, **fixed, **settings.options})  # type: ignore[arg-type]

    return make


OPTIMIZERS: dict[str, Maker] = {
    "adamw": lambda model, settings: adamw(model.parameters()),
    "torch-muon": _torch_muon,
    "muon": _ours(Muon),
    "muon-overlap": _ours(Muon, overlap_param_gather=True),
    "normuon": _ours(NorMuon),
    "soap": _ours(SOAP, oversize="block", **KRONECKER),
    "shampoo": _ours(Shampoo, **KRONECKER),
    "kl_shampoo": _ours(KLShampoo, **KRONECKER),
}
"""By name; each takes a laid out module."""

MATRIX_OPTIMIZERS = ("muon", "muon-overlap", "normuon", "soap", "shampoo", "kl_shampoo")
