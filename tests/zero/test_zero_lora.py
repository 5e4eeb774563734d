"""LoRA pairs under DeepSpeed: both factors of an adapter come to one owner out of flat tensors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from adapters_zoo import MODES, PAIRS, adapters_zoo
from harness import World
from torch import Tensor
from zero_runs import SAMPLES, config, initialized, train
from zoo import Zoo, assert_close, build, coefficients, full

STEPS = 3


def called_adapters() -> Zoo:
    """Without the embedding's, whose factors are in a ``ParameterDict``, which cannot be called."""
    model = adapters_zoo()
    del model.blocks["moe"].embedding
    return model


def adapters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters() if "lora_" in name}


@functools.cache
def reference() -> dict[str, Tensor]:
    model = called_adapters()
    optimizer = build(model, MODES["muon"])
    for step in range(STEPS):
        model(coefficients(model, step, range(SAMPLES), 1 / 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapters(model)


def trained(stage: int) -> dict[str, Any]:
    import deepspeed

    model = called_adapters()
    optimizer = build(model, MODES["muon"])
    with initialized(model, optimizer, config(stage)) as engine:
        train(engine, called_adapters(), range(STEPS))
        found = {}
        for name, p in engine.module.named_parameters():
            if "lora_" in name:
                with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                    found[name] = p.detach().clone()
    return {"weights": found, "transforms": optimizer.transform_count}


@pytest.mark.parametrize("stage", [2, 3])
def test_pairs_are_those_of_one_process(two: World, stage: int) -> None:
    results = two.run(trained, stage=stage)
    for result in results:
        assert_close(result["weights"], reference(), 1e-5)
    assert sum(result["transforms"] for result in results) == (PAIRS - 1) * STEPS
