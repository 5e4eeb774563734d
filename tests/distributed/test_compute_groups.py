"""Matrices that several ranks transform together, groups of ranks, the order of collectives, and delayed gathers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist
from counter import CollectiveCounter
from harness import World, Worlds
from torch import Tensor
from zoo import assert_close, backward, build, matrices, single, train, weights, wrap, zoo

SHAPES = [(96, 64), (40, 24), (24, 40), (8, 8), (8, 8), (3, 9)]
"""The first costs more than all others together."""

make = functools.partial(matrices, SHAPES)


def trained(rule: str, layout: str, transport_dtype: str = "float32") -> dict[str, Any]:
    model = wrap(make(), layout)
    optimizer = build(model, rule, transport_dtype=transport_dtype)
    train(model, optimizer, 3)
    compute_group = "transformed by several ranks together" in optimizer.explain()
    return {"weights": weights(model), "team": compute_group, "count": optimizer.transform_count}


@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_matrix_shared_by_a_compute_group(worlds: Worlds, rule: str, layout: str, size: int) -> None:
    """The same weights as whole, counted as one transform, and the same bits on all replicas."""
    results = worlds[size].run(trained, rule=rule, layout=layout)
    wanted = single(rule, 3, make)
    for result in results:
        assert result["team"]
        assert_close(result["weights"], wanted, 1e-5)
        assert_close(result["weights"], results[0]["weights"], 0.0)
    assert sum(result["count"] for result in results) == 3 * len(SHAPES)


@pytest.mark.parametrize("rule", ["soap", "shampoo"])
def test_rules_that_need_whole_matrices_have_no_compute_groups(two: World, rule: str) -> None:
    for result in two.run(trained, rule=rule, layout="ddp"):
        assert not result["team"]


def after_other_groups() -> dict[str, Tensor]:
    """Some ranks have made more process groups than others before the optimizer makes its own."""
    if dist.get_rank() < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    model = wrap(make(), "fsdp2")
    train(model, build(model, "muon"), 3)
    return weights(model)


def test_ranks_may_differ_in_the_groups_they_have_made(worlds: Worlds) -> None:
    for _ in range(2):
        for found in worlds[4].run(after_other_groups):
            assert_close(found, single("muon", 3, make), 1e-5)


def collectives(rule: str, layout: str) -> dict[str, Any]:
    """Of the first steps: groups are made in the first of them alone."""
    model = wrap(zoo(), layout)
    optimizer = build(model, rule)
    steps = []
    groups = []
    for step in range(3):
        backward(model, step)
        with CollectiveCounter() as counter:
            optimizer.step()
            optimizer.synchronize()
        optimizer.zero_grad()
        steps.append([(t.name, t.group_size, str(t.dtype)) for t in counter.traffic])
        groups.append(len(dist.distributed_c10d._world.pg_names))
    return {"steps": steps, "groups": groups}


@pytest.mark.parametrize("rule", ["muon", "soap-staggered"])
@pytest.mark.parametrize(("layout", "size"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 2), ("ddp", 4), ("fsdp2", 4)])
def test_all_ranks_issue_the_same_collectives(worlds: Worlds, rule: str, layout: str, size: int) -> None:
    """In the same order, apart from those of a compute group, which only its members issue."""
    results = worlds[size].run(collectives, rule=rule, layout=layout)
    for result in results:
        assert result["groups"][0] == result["groups"][2]
        assert result["steps"][1] == result["steps"][2]
    whole = [[[t for t in step if t[1] == size] for step in result["steps"]] for result in results]
    assert all(ranks == whole[0] for ranks in whole)
    assert whole[0][1]


def delayed_reads() -> dict[str, Any]:
    """Reads parameters in several ways while their updates are still on the way."""
    model = zoo()
    optimizer = build(model, "muon", overlap_param_gather=True)
    wrapped = wrap(model, "ddp")
    found: dict[str, Any] = {}
    for step, how in enumerate(("state_dict", "inner_state_dict", "one_rank", "synchronize", "consolidate")):
        backward(wrapped, step)
        optimizer.step()
        optimizer.zero_grad()
        if how == "state_dict":
            state = {name.removeprefix("module."): v.clone() for name, v in wrapped.state_dict().items()}
            found[how] = {name: state[name] for name, _ in model.named_parameters()}
        elif how == "inner_state_dict":
            block = {f"blocks.square.{name}": v.clone() for name, v in model.blocks["square"].state_dict().items()}
            found[how] = block
        elif how == "one_rank":
            # Saving is the first rank's affair; the others meet their updates in the next forward.
            if dist.get_rank() == 0:
                model.state_dict()
                found[how] = weights(model)
        elif how == "synchronize":
            optimizer.synchronize()
            found[how] = weights(model)
        else:
            optimizer.consolidate_state_dict(to=0)
            found[how] = weights(model)
    return found


def test_whatever_reads_parameters_gets_the_new_ones(two: World) -> None:
    results = two.run(delayed_reads)
    for rank, found in enumerate(results):
        for steps, how in enumerate(("state_dict", "inner_state_dict", "one_rank", "synchronize", "consolidate"), 1):
            if how == "one_rank" and rank == 1:
                continue
            wanted = single("muon", steps)
            assert_close(found[how], {name: wanted[name] for name in found[how]}, 1e-5)
            assert len(found[how]) >= 3


def groups_of_engines(count: int) -> list[int]:
    """Process groups of this job after each of several optimizers that share a matrix among ranks."""
    made = []
    for _ in range(count):
        model = wrap(matrices([(32, 32), (4, 4)]), "ddp")
        optimizer = build(model, "muon")
        train(model, optimizer, 1)
        assert any(b.compute_groups for b in optimizer.current_context().plan.buckets)
        made.append(len(dist.distributed_c10d._world.pg_map))
    return made


def test_groups_are_made_once(two: World) -> None:
    for made in two.run(groups_of_engines, count=3):
        assert len(set(made)) == 1
