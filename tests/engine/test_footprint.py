"""A step that one can follow: how many functions of the package one step calls, and in how many files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from harness import World
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_emopt

ROOT = str(Path(hf_emopt.__file__).parent)
ANONYMOUS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(32, 16),
            "up": nn.Linear(16, 32),
            "down": nn.Linear(32, 16),
            "norm": nn.LayerNorm(16),
            "wide": nn.Linear(16, 32, bias=False),
            "head": nn.Linear(32, 8),
        }
    )


def functions_of_a_step(name: str, sharded: bool) -> set[tuple[str, str, int]]:
    """File, name and line of every function of the package that a step calls when nothing is new to it."""
    layers = model()
    if sharded:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in layers.values():
            fully_shard(layer, mesh=mesh)
    optimizer = getattr(hf_emopt, name)(layers, lr=1e-2)
    called: set[tuple[str, str, int]] = set()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name not in ANONYMOUS:
            called.add((code.co_filename, code.co_name, code.co_firstlineno))

    for step in range(4):
        hidden = layers["embedding"](torch.arange(32).view(4, 8))
        hidden = layers["norm"](hidden + layers["down"](torch.relu(layers["up"](hidden))))
        layers["head"](layers["wide"](hidden)).square().mean().backward()
        if step == 3:
            sys.setprofile(profile)
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    return called


def check(called: set[tuple[str, str, int]], functions: int, files: int) -> None:
    assert len(called) <= functions, sorted(called)
    assert len({file for file, _, _ in called}) <= files, sorted({file for file, _, _ in called})
    # It was really a step, and it was really seen.
    assert {"accumulate", "transform", "apply"} <= {name for _, name, _ in called}


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage takes the place of the profile")
def test_one_process() -> None:
    check(functions_of_a_step("Muon", sharded=False), functions=80, files=14)


@pytest.mark.parametrize(("name", "functions", "files"), [("Muon", 90, 14), ("SOAP", 110, 18)])
def test_fsdp2_on_two_ranks(two: World, name: str, functions: int, files: int) -> None:
    run: Callable[..., Any] = two.run
    for called in run(functions_of_a_step, name=name, sharded=True):
        check(called, functions, files)
