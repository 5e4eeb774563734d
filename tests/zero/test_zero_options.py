"""What DeepSpeed's options change in where things lie, and must not change in what comes out."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import World
from torch import Tensor
from zero_runs import SCALE, STAGES, bad_step, config, reference, scaled_steps, trained, trained_late
from zoo import assert_close, steps_of, zoo

import hf_emopt

MATRICES = 20 + 5 * 3


@functools.cache
def wanted(rule: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return reference(rule, steps_of(rule), 0.0, dtype)


SLOW = pytest.mark.second_tier
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


@pytest.mark.parametrize(
    ("rule", "stage", "precision", "zero"),
    [
        pytest.param("muon", 1, "bf16", PINNED, marks=SLOW),
        ("soap", 2, "fp32", OFFLOAD),
        ("muon", 3, "fp32", PINNED),
        ("muon", 3, "bf16", {"offload_param": {"device": "cpu"}, **OFFLOAD}),
        ("normuon", 2, "fp32", {"round_robin_gradients": True}),
        pytest.param("muon", 1, "fp32", {"contiguous_gradients": False, "reduce_scatter": False}, marks=SLOW),
        pytest.param("shampoo", 2, "fp32", {"overlap_comm": True}, marks=SLOW),
        ("muon", 2, "fp32", {"parameter_alignment": True}),
        ("soap-staggered", 3, "fp32", {"sub_group_size": 500}),
        pytest.param("muon", 3, "fp32", {"stage3_param_persistence_threshold": 0}, marks=SLOW),
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(
    two: World, rule: str, stage: int, precision: str, zero: dict[str, Any]
) -> None:
    settings = {**config(stage, precision, **zero), "zero_force_ds_cpu_optimizer": False}
    run = trained_late if "offload_optimizer" in zero else trained
    results = two.run(run, rule=rule, settings=settings, steps=steps_of(rule))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    # DeepSpeed's own view of float32 weights does not follow round_robin_gradients.
    which = "model" if "round_robin_gradients" in zero else "weights"
    for result in results:
        assert_close(result[which], wanted(rule, dtype), 1e-5)
    assert sum(r["transforms"] for r in results) == MATRICES * steps_of(rule)


USUAL = {(0, "bf16"), (1, "bf16"), (1, "bf16-fp32"), (2, "fp32"), (3, "bf16")}


@pytest.mark.parametrize(
    ("stage", "precision"),
    [pytest.param(s, p, marks=() if (s, p) in USUAL else SLOW, id=f"{s}-{p}") for p, s in STAGES],
)
def test_a_gradient_that_is_not_finite_skips_the_step_for_all_groups(two: World, stage: int, precision: str) -> None:
    for result in two.run(bad_step, settings=config(stage, precision)):
        assert result["unchanged"] == result["parameters"]
        assert result["moved"] == result["parameters"]
        assert result["skipped"] == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping_leaves_the_size_of_the_first_update(two: World, stage: int) -> None:
    """Of the gradient it changes only a scale, which orthogonalization does not see; of the update it would be the step."""
    weights = [
        two.run(trained, rule="muon", settings=config(stage, clip=clip), steps=1)[0]["weights"] for clip in (0, 1)
    ]
    matrices = [r.name for r in hf_emopt.route_parameters(zoo()) if r.kind == "matrix"]
    assert_close({n: weights[1][n] for n in matrices}, {n: weights[0][n] for n in matrices}, 1e-5)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), pytest.param(1, marks=SLOW), 2, 3])
def test_micro_batches_are_transformed_once_together(two: World, stage: int) -> None:
    whole, parts = (
        two.run(trained, rule="muon", settings=config(stage, accumulation=count), steps=2) for count in (1, 4)
    )
    assert sum(r["transforms"] for r in parts) == sum(r["transforms"] for r in whole) == 2 * MATRICES
    assert_close(parts[0]["weights"], whole[0]["weights"], 1e-5)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(1, "fp16-dynamic"), (2, "fp16"), pytest.param(2, "fp16-dynamic", marks=SLOW), (3, "fp16-dynamic")],
)
def test_gradients_are_unscaled_before_momentum(two: World, stage: int, precision: str) -> None:
    """In powers of two a scale changes no bit of a gradient: weights are those of a step without one."""
    steps = 3
    results = two.run(trained, rule="muon", settings=config(stage, precision, 1.0), steps=steps)
    target = reference("muon", steps, 1.0, torch.float16)
    for result in results:
        assert_close(result["weights"], target, 1e-5)
    assert sum(r["transforms"] for r in results) == MATRICES * steps


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(1, "fp16-dynamic"), (2, "fp16"), pytest.param(2, "fp16-dynamic", marks=SLOW), (3, "fp16-dynamic")],
)
def test_an_overflow_skips_the_step_and_the_scale_recovers(two: World, stage: int, precision: str) -> None:
    for result in two.run(scaled_steps, settings=config(stage, precision)):
        every = result["parameters"]
        assert result["moved"] == [every, every, 0, every, every, every, every]
        assert result["skipped"] == [0, 0, 1, 1, 1, 1, 1]
        scales = result["scales"]
        if precision == "fp16":
            assert scales == [SCALE] * 7
        else:
            assert scales[2] == scales[1] / 2
            assert scales[-1] >= 2 * scales[2]
