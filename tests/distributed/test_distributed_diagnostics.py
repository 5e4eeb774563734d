"""Figures of a step are those of one process: each rank measures what it holds, and the first one gets it all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist
from counter import CollectiveCounter
from harness import World, Worlds
from zoo import Zoo, backward, build, matrices, steps_of, train, weights, wrap, zoo

RULES = ("muon", "normuon", "soap-staggered", "shampoo", "klshampoo-staggered")
SINGULAR = 1e6
"""Condition numbers from here on are of factors that are singular but for rounding."""


def large() -> Zoo:
    """A matrix that is more than a rank's share of the work, and a small one: the ranks are a compute group."""
    return matrices([(96, 64), (4, 4)])


def measured(rule: str, layout: str, model: str = "zoo") -> tuple[dict[str, float], int, bool]:
    """Figures of the last step, the reductions that they took, and whether weights are those without."""
    make = {"zoo": zoo, "large": large}[model]
    plain, watched = (make() if layout == "one" else wrap(make(), layout) for _ in range(2))
    steps = steps_of(rule)
    train(plain, build(plain, rule), steps)
    optimizer = build(watched, rule)
    train(watched, optimizer, steps - 1)
    backward(watched, steps - 1)
    with CollectiveCounter() as counter, optimizer.diagnostics() as values:
        optimizer.step()
    assert layout == "one" or model == "zoo" or "transformed by several ranks together" in optimizer.explain()
    reduced = [t for t in counter.traffic if t.name == "reduce_"]
    same = all(w.equal(v) for w, v in zip(weights(plain).values(), weights(watched).values()))
    return {name.replace("/module.", "/"): value for name, value in values.items()}, len(reduced), same


@functools.cache
def single(rule: str, model: str) -> dict[str, float]:
    assert not dist.is_initialized()
    values, reductions, same = measured(rule, "one", model)
    assert same
    assert reductions == 0
    return values


def assert_same(found: dict[str, float], wanted: dict[str, float]) -> None:
    whole = {"emopt/imbalance", "emopt/exposed_communication_ms"}
    assert set(found) == set(wanted)
    for name in set(wanted) - whole:
        if name.endswith("condition_number") and wanted[name] > SINGULAR:
            assert found[name] > SINGULAR, name
        else:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name


def two_cases() -> list[Any]:
    """Every rule once in the first tier, under one of the layouts; Muon under both."""
    chosen = {("muon", "ddp"), ("muon", "fsdp2"), *zip(RULES[1:], ("ddp", "fsdp2", "ddp", "fsdp2"))}
    cases = [(rule, layout) for rule in RULES for layout in ("ddp", "fsdp2")]
    return [pytest.param(*case, marks=() if case in chosen else (pytest.mark.second_tier,)) for case in cases]


@pytest.mark.parametrize(("rule", "layout"), two_cases())
def test_figures_are_those_of_one_process(two: World, rule: str, layout: str) -> None:
    (found, reductions, same), (others, _, same_there) = two.run(measured, rule=rule, layout=layout)
    assert same
    assert same_there
    assert reductions == 2  # sums and largest values
    assert others == {}
    assert_same(found, single(rule, "zoo"))
    assert found["emopt/exposed_communication_ms"] > 0.0
    assert found["emopt/imbalance"] >= 1.0


@pytest.mark.second_tier
@pytest.mark.parametrize("layout", ["fsdp2", "hsdp"])
@pytest.mark.parametrize("rule", ["muon", "soap-staggered"])
def test_figures_of_four_ranks(worlds: Worlds, rule: str, layout: str) -> None:
    results = worlds[4].run(measured, rule=rule, layout=layout)
    assert_same(results[0][0], single(rule, "zoo"))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_matrices_that_ranks_transform_together(two: World, layout: str) -> None:
    results = two.run(measured, rule="muon", layout=layout, model="large")
    assert all(same for _, _, same in results)
    assert_same(results[0][0], single("muon", "large"))
