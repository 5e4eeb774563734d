"""Flat parameters on the host, stepped on copies a bucket at a time: the same weights, fetched early and stored late."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from late_copies import late_copies
from torch import Tensor, nn

import hf_emopt
from hf_emopt.distributed.flat_params import FlatTensor, cut_together
from hf_emopt.distributed.layout import Grid
from hf_emopt.optimizers.base import MatrixOptimizer

STEPS = 4
RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {"ns_dtype": "float32"}),
    "normuon": (hf_emopt.NorMuon, {"ns_dtype": "float32"}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 2}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 2}),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6))


def built(rule: str, device: str = "cpu") -> tuple[nn.Module, MatrixOptimizer]:
    """A model and its optimizer, with two groups of matrices."""
    net = model().to(device)
    cls, options = RULES[rule]
    named = list(net.named_parameters())
    first = [(n, p) for n, p in named if n.startswith("0.")]
    rest = [(n, p) for n, p in named if not n.startswith("0.")]
    groups = [{"params": first, "lr": 1e-2}, {"params": rest, "lr": 3e-2}]
    return net, cls(groups, lr=1e-2, weight_decay=0.1, transport_dtype="float32", **options)


def flatten(optimizer: MatrixOptimizer, device: torch.device, pinned: bool) -> list[Tensor]:
    """Puts one flat tensor into each group, as ZeRO does on one rank, to be computed on ``device``."""
    flats, grid = [], Grid(((0,),), 0, 0)
    for index, group in enumerate(optimizer.param_groups):
        shapes = [tuple(p.shape) for p in group["params"]]
        flat = torch.cat([p.detach().flatten() for p in group["params"]])
        if pinned and device.type != "cpu":
            flat = flat.pin_memory()
        offsets = [0, *accumulate(math.prod(shape) for shape in shapes)][:-1]
        places = cut_together(shapes, offsets, flat.numel(), 1, 0)
        flats.append(FlatTensor(flat, index, places, grid, device, offloaded=True, pinned=pinned))
        group["params"] = [flat]
    optimizer.attach_wrapper(flats)
    return [flat.tensor for flat in flats]


def gradients(step: int, optimizer: MatrixOptimizer) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(p.shape, generator=generator) for p in g["params"]] for g in optimizer.param_groups]


def plain(rule: str, device: str = "cpu") -> list[Tensor]:
    """Flat weights of each group, stepped where they are: on the device that the others are computed on, since two devices
    complete the basis of a singular factor in two ways."""
    _, optimizer = built(rule, device)
    for step in range(STEPS):
        for group, grads in zip(optimizer.param_groups, gradients(step, optimizer)):
            for p, grad in zip(group["params"], grads):
                p.grad = grad.to(device)
        optimizer.step()
    return [torch.cat([p.detach().flatten() for p in g["params"]]).cpu() for g in optimizer.param_groups]


def offloaded(rule: str, device: torch.device, pinned: bool = True) -> tuple[list[Tensor], MatrixOptimizer]:
    _, optimizer = built(rule)
    grads = [[torch.cat([g.flatten() for g in of]) for of in gradients(s, optimizer)] for s in range(STEPS)]
    flats = flatten(optimizer, device, pinned)
    for of_step in grads:
        for flat, grad in zip(flats, of_step):
            flat.grad = grad.pin_memory() if pinned and device.type != "cpu" else grad
        optimizer.step()
    return flats, optimizer


@pytest.mark.parametrize("rule", RULES)
def test_the_same_weights_fetched_early_and_stored_late(rule: str) -> None:
    with late_copies() as late:
        flats, optimizer = offloaded(rule, torch.device("cpu"))
    for found, wanted in zip(flats, plain(rule), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert optimizer.transform_count == 3 * STEPS
    buckets = len(optimizer.param_groups)
    # The next bucket is fetched before this one is waited for, and all are back before the step returns.
    assert late.events[:3] == ["bring", "bring", "arrived"]
    for name in ("bring", "arrived", "take"):
        assert late.events.count(name) == buckets * STEPS
    assert late.events[3 * buckets :: 3 * buckets + 1] == ["synchronize"] * STEPS


@pytest.mark.parametrize("pinned", [False, True])
def test_state_is_pinned_where_the_flat_tensor_is(pinned: bool) -> None:
    with late_copies() as late:
        _, optimizer = offloaded("muon", torch.device("cpu"), pinned)
    with optimizer.as_built():
        kept = [
            value
            for group in optimizer.param_groups
            for p in group["params"]
            for key, value in optimizer.state[p].items()
            if key != "step" or group["kind"] == "aux"
        ]
    assert len(kept) == 3 + 3 * 5
    assert {id(t) for t in late.pinned} == ({id(t) for t in kept} if pinned else set())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies on a stream of their own need a GPU")
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_streams(rule: str, pinned: bool) -> None:
    flats, optimizer = offloaded(rule, torch.device("cuda", torch.cuda.current_device()), pinned)
    for found, wanted in zip(flats, plain(rule, "cuda"), strict=True):
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with optimizer.as_built():
        for group in optimizer.param_groups:
            for p in group["params"]:
                for key, value in optimizer.state[p].items():
                    assert (
                        key in ("step", "rounds")
                        or "." in key
                        or (value.device.type == "cpu" and value.is_pinned() == pinned)
                    )
