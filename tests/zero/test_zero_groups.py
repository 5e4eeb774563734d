"""Groups as a user gives them under DeepSpeed, one of them with nothing to train."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import World
from torch import Tensor, nn
from zero_runs import SAMPLES, config, initialized, train
from zoo import assert_close, coefficients, full, zoo

import hf_emopt

STEPS = 2


def grouped(model: nn.Module) -> hf_emopt.Muon:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 2e-3}, {"params": []}, {"params": params[1::2], "lr": 5e-3}]
    return hf_emopt.Muon((model, groups), ns_dtype="float32", transport_dtype="float32")


@functools.cache
def reference() -> dict[str, Tensor]:
    model = zoo()
    optimizer = grouped(model)
    for step in range(STEPS):
        model(coefficients(model, step, range(SAMPLES), 1 / 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(p) for name, p in model.named_parameters()}


def trained(stage: int) -> dict[str, Any]:
    import deepspeed

    model = zoo()
    optimizer = grouped(model)
    with initialized(model, optimizer, config(stage)) as engine:
        train(engine, zoo(), range(STEPS))
        found = {}
        for name, p in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                found[name] = p.detach().clone()
    return {"weights": found, "positions": optimizer.user_groups}


@pytest.mark.second_tier
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_empty_group_keeps_its_place(two: World, stage: int) -> None:
    for result in two.run(trained, stage=stage):
        assert result["positions"] == ((0, 1), (2,), (3, 4))
        assert_close(result["weights"], reference(), 1e-5)
        assert all(torch.isfinite(w).all() for w in result["weights"].values())
