"""One batch gives one run, however its sum is rounded: whole, in two accumulated halves, or shared by ranks.

The matrices are not square, so their first factors are singular, and no eigenbasis of a null space is better than another.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Worlds
from torch import Tensor, nn
from zoo import weights, wrap

import hf_emopt

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "soap": (hf_emopt.SOAP, {}),
    "soap-often": (hf_emopt.SOAP, {"precondition_frequency": 2}),
    "soap-kl": (hf_emopt.SOAP, {"kl": True}),
    "shampoo": (hf_emopt.Shampoo, {}),
    "shampoo-first": (hf_emopt.Shampoo, {"start_preconditioning_step": 1, "root_solver": "coupled_newton"}),
    "kl_shampoo": (hf_emopt.KLShampoo, {}),
    "kl_shampoo-first": (hf_emopt.KLShampoo, {"start_preconditioning_step": 1, "root_solver": "coupled_newton"}),
}
LIMITS = {torch.float32: 1e-3, torch.float64: 1e-8}
# KL-Shampoo's roots of one or two gradients whiten by a thousand, in which float32 is felt. With ten refreshes in twenty
# steps a column of SOAP's basis may cross the edge of a power of 256 in one run alone: 1.0e-3 on four ranks.
FELT = {("kl_shampoo-first", torch.float32), ("soap-often", torch.float32)}
PAIRS = [(case, dtype) for case in CASES for dtype in LIMITS if (case, dtype) not in FELT]


def moved(case: str, steps: int, dtype: torch.dtype, layout: str | None = None, halves: bool = False) -> Tensor:
    """How far the weights are from where they started, as one vector."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(24, 90), nn.Tanh(), nn.Linear(90, 40), nn.Tanh(), nn.Linear(40, 16)).to(dtype)
    model = plain if layout is None else wrap(plain, layout)
    before = weights(model)
    rule, options = CASES[case]
    exact = {"transport_dtype": "float32"} if dtype == torch.float32 else {}
    optimizer = rule(model, **exact, **options)
    generator = torch.Generator().manual_seed(1)
    map_ = torch.randn(24, 16, generator=generator)
    for _ in range(steps):
        x = torch.randn(120, 24, generator=generator)
        y, x = (x @ map_).argmax(-1), x.to(dtype)
        if layout is not None:
            rank, size = dist.get_rank(), dist.get_world_size()
            x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        for part, wanted in zip(x.chunk(2), y.chunk(2)) if halves else [(x, y)]:
            (nn.functional.cross_entropy(model(part), wanted) / (2 if halves else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    after = weights(model)
    return torch.cat([(after[name] - before[name]).double().flatten() for name in after])


@functools.cache
def whole(case: str, steps: int, dtype: torch.dtype) -> Tensor:
    return moved(case, steps, dtype)


def check(found: Tensor, case: str, steps: int, dtype: torch.dtype) -> None:
    wanted = whole(case, steps, dtype)
    assert (found - wanted).norm() <= LIMITS[dtype] * wanted.norm()


@pytest.mark.parametrize(("case", "dtype"), PAIRS, ids=str)
def test_halves_are_the_whole(case: str, dtype: torch.dtype) -> None:
    for steps in (3, 20):
        check(moved(case, steps, dtype, halves=True), case, steps, dtype)


def several(steps: int, layout: str, cases: list[tuple[str, torch.dtype]]) -> list[Tensor]:
    return [moved(case, steps, dtype, layout) for case, dtype in cases]


@pytest.mark.second_tier
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_are_the_whole(worlds: Worlds, size: int, layout: str) -> None:
    for steps in (3, 20):
        for result in worlds[size].run(several, steps=steps, layout=layout, cases=PAIRS):
            for (case, dtype), found in zip(PAIRS, result):
                check(found, case, steps, dtype)
