"""What would not be the update of one process, or not the user's optimizer, is an error that says what to write."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import accelerate.accelerator
import pytest
import torch
from harness import World
from torch import nn
from zero_runs import config, imported, initialized

import hf_emopt
from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.integrations.deepspeed import refuse_engine, refuse_native_muon
from hf_emopt.integrations.refusals import config_problem, scheduler_problem

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
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}, **FREE},
        "Super",
    ),
    *[({"fp16": {"enabled": True}, "zero_optimization": {"stage": stage}}, None) for stage in (1, 2, 3)],
    ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}}, 'Set "stage": 1'),
    ({"fp16": {"enabled": True}}, 'Set "stage": 1'),
    ({"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 0}}, None),
]


@pytest.mark.parametrize(("settings", "expected"), TABLE, ids=str)
def test_table_of_configurations(settings: dict[str, Any], expected: str | None) -> None:
    problem = config_problem(settings)
    assert (problem is None) == (expected is None)
    assert expected is None or expected in str(problem)


@pytest.mark.parametrize(
    ("kind", "params", "key"),
    [
        ("WarmupLR", {"warmup_max_lr": 2e-4}, "warmup_max_lr"),
        ("WarmupLR", {}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_max_lr": [2e-4, 1e-5]}, None),
        ("WarmupLR", {"warmup_max_lr": [2e-4, 1e-5], "warmup_min_lr": 1e-6}, "warmup_min_lr"),
        ("WarmupDecayLR", {"warmup_max_lr": 2e-4, "total_num_steps": 10}, "warmup_max_lr"),
        ("WarmupCosineLR", {"total_num_steps": 10, "cos_min_ratio": 0.1}, None),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-3}, "cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": [0.0, 0.0], "cycle_max_lr": [1e-3, 1e-4]}, None),
        ("LRRangeTest", {}, "lr_range_test_min_lr"),
        ("OneCycleLR", {"max_lr": 1e-3, "total_steps": 10}, "max_lr"),
        ("CosineAnnealingLR", {"T_max": 10}, None),
        ("CosineAnnealingLR", {"T_max": 10, "eta_min": 1e-6}, "eta_min"),
        ("LinearLR", {}, None),
    ],
)
def test_schedulers_that_would_lose_the_ratio_of_learning_rates(
    kind: str, params: dict[str, Any], key: str | None
) -> None:
    settings = {"scheduler": {"type": kind, "params": params}}
    assert scheduler_problem(settings, [2e-4, 2e-4]) is None
    problem = scheduler_problem(settings, [2e-4, 1e-5])
    assert (problem is None) == (key is None)
    assert key is None or re.search(f'"{key}": .* are 0.0002, 1e-05, .*remove the "scheduler" block', str(problem))


class PipelineEngine(SimpleNamespace):
    """By its class's name, as it is looked up."""


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (SimpleNamespace(has_moe_layers=False, mpu=None), None),
        (SimpleNamespace(has_moe_layers=False, mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 1)), None),
        (SimpleNamespace(has_moe_layers=False, mpu=SimpleNamespace(get_model_parallel_world_size=lambda: 2)), "mpu"),
        (SimpleNamespace(has_moe_layers=True, mpu=None), "deepspeed.moe"),
        (PipelineEngine(has_moe_layers=False, mpu=None), "pipeline"),
    ],
    ids=("zero", "mpu of one", "mpu", "moe", "pipeline"),
)
def test_parallelism_beside_zero(engine: Any, expected: str | None) -> None:
    optimizer = hf_emopt.Muon(small())
    if expected is None:
        refuse_engine(engine, optimizer)
        return
    with pytest.raises(
        UnsupportedLayoutError, match=rf"Muon does not run under DeepSpeed with .*{expected}.*ZeRO alone"
    ):
        refuse_engine(engine, optimizer)


@pytest.mark.parametrize("name", ["Muon", "AdamW", None])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_muon_of_deepspeed_is_refused_where_it_clips_the_update(name: str | None, stage: int, clip: float) -> None:
    engine = SimpleNamespace(
        optimizer_name=lambda: name, zero_optimization_stage=lambda: stage, gradient_clipping=lambda: clip
    )
    if name == "Muon" and stage and clip:
        with pytest.raises(
            ValueError, match=r"gradient_clipping \(max_grad_norm .* to 0, or remove the .optimizer. block"
        ):
            refuse_native_muon(engine)
    else:
        refuse_native_muon(engine)


def test_accelerate_does_not_replace_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is refused; every other goes to Accelerate's own function, which makes an Adam of it."""
    model = small()
    # A stand-in for the class: to build it would compile an operator.
    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", lambda groups, **options: (groups, options))
    with pytest.raises(
        ValueError, match=r'Muon under DeepSpeed: .*DeepSpeedCPUAdam.*"zero_force_ds_cpu_optimizer": false'
    ):
        accelerate.accelerator.map_pytorch_optim_to_deepspeed(hf_emopt.Muon(model))
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    groups, options = accelerate.accelerator.map_pytorch_optim_to_deepspeed(other)
    assert groups is other.param_groups
    assert options == {"lr": 0.1, "weight_decay": 0.01, "adamw_mode": True}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()


def refused(case: str) -> str:
    """The error of a way to go wrong."""
    deepspeed = imported()
    model, settings = small(), config(2)
    optimizer: Any = hf_emopt.Muon(model, overlap_param_gather=case == "overlap")
    if case == "own optimizer":
        settings["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3}}
    elif case == "scheduler":
        optimizer = hf_emopt.Muon(model, lr=2e-4, aux_lr=1e-5)
        settings["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-4, "warmup_num_steps": 2}}
    elif case == "fp16":
        settings["fp16"] = {"enabled": True}
        settings["zero_optimization"]["stage"] = 0
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
        ("scheduler", 'ValueError: Muon under DeepSpeed: .*WarmupLR.*0.0002, 1e-05.*remove the "scheduler" block'),
        ("fp16", 'ValueError: Muon under DeepSpeed: .*Set "stage": 1'),
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
