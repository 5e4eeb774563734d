"""What would not be the update of one process, or not the user's optimizer, is an error that says what to write."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import World
from torch import nn
from zero_runs import config, initialized

import hf_emopt
from hf_emopt.integrations.deepspeed_refusals import config_problem

CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}
FREE = {"zero_force_ds_cpu_optimizer": False}

TABLE: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"zero_optimization": {}}, None),
    *[({"zero_optimization": {"stage": stage}}, None) for stage in (0, 1, 2, 3)],
    ({"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "none"}}}, None),
    *[({"zero_optimization": {"stage": stage, **CPU}}, "zero_force_ds_cpu_optimizer") for stage in (1, 2, 3)],
    *[({"zero_optimization": {"stage": stage, **CPU}, **FREE}, None) for stage in (1, 2, 3)],
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "zero_force_ds_cpu_optimizer"),
    ({"zero_optimization": {"stage": 3, **NVME}, **FREE}, "nvme"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}, **FREE}, "ratio"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "MiCS"),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
    ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "elastic_checkpoint"),
    ({"optimizer": {"type": "AdamW"}}, 'remove the "optimizer" block'),
    ({"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}}, 'remove the "optimizer" block'),
    ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "float16"),
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None),
]


@pytest.mark.parametrize(("settings", "expected"), TABLE, ids=str)
def test_table_of_configurations(settings: dict[str, Any], expected: str | None) -> None:
    problem = config_problem(settings)
    assert (problem is None) == (expected is None)
    assert expected is None or expected in str(problem)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()


def refused(case: str) -> str:
    """The error of a way to go wrong."""
    import deepspeed

    model, settings = small(), config(2)
    optimizer: Any = hf_emopt.Muon(model, overlap_param_gather=case == "overlap")
    if case == "own optimizer":
        settings["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3}}
    elif case == "offload":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif case.startswith("native"):
        optimizer = None
        settings["optimizer"] = {"type": "Muon", "params": {"lr": 1e-3}}
        settings["gradient_clipping"] = 1.0
    elif case == "frozen later":
        model[0].weight.requires_grad_(False)
    elif case == "unknown wrapper":
        known = deepspeed.runtime.engine.DeepSpeedZeroOptimizer
        deepspeed.runtime.engine.DeepSpeedZeroOptimizer = type("Other", (known,), {})
    try:
        with initialized(model, optimizer, settings, by_module=False) as engine:
            if case == "not attached":
                optimizer._flattened = None
            if case == "second engine":
                twin = small()
                other = deepspeed.initialize(model=twin, optimizer=hf_emopt.Muon(twin), config=config(2))[0]
                optimizer._flattened = other.basic_optimizer._flattened
            step(engine)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if case == "unknown wrapper":
            deepspeed.runtime.engine.DeepSpeedZeroOptimizer = known
    return "no error"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "own optimizer",
            'ValueError: Muon under DeepSpeed: .*names an optimizer of its own, Adam.*remove the "optimizer"',
        ),
        ("offload", 'ValueError: Muon under DeepSpeed: .*"zero_force_ds_cpu_optimizer": false'),
        ("overlap", "ValueError: Muon under DeepSpeed: overlap_param_gather=True"),
        ("native with clipping", "ValueError: DeepSpeed's own .*Muon.*gradient_clipping.*to 0"),
        ("frozen later", "UnsupportedLayoutError: group 'matrix' was built of 2 .* Freeze layers first"),
        ("unknown wrapper", r"UnsupportedLayoutError: Muon does not know what .*Other puts .*ZeRO-1 and 2"),
        ("not attached", "UnsupportedLayoutError: .*DeepSpeed.*import hf_emopt before"),
        ("second engine", "UnsupportedLayoutError: .*build a new optimizer for every deepspeed.initialize"),
    ],
)
def test_refused(two: World, case: str, message: str) -> None:
    for error in two.run(refused, case=case):
        assert re.search(message, error), error
