"""Experts that get no tokens on one rank: their state is asked for, saved and loaded all the same, with one set of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import World
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from zoo import backward, build, full, wrap, zoo


def state_of(model: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Whole state by parameter and key; a collective."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    return {name: {key: full(state[name][key]) for key in sorted(state[name])} for name in sorted(state)}


def saved(rule: str, folder: str) -> dict[str, dict[str, Tensor]]:
    model = wrap(zoo(), "fsdp2")
    optimizer = build(model, rule)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        for name, parameter in model.named_parameters():
            if "experts" in name and dist.get_rank() == 1:
                parameter.grad = None
        optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    return state_of(model, optimizer)


def loaded(rule: str, folder: str) -> dict[str, dict[str, Tensor]]:
    model = wrap(zoo(), "fsdp2")
    optimizer = build(model, rule)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return state_of(model, optimizer)


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap"])
def test_keys_are_the_same_on_all_ranks_and_nothing_is_lost(two: World, tmp_path: Path, rule: str) -> None:
    before = two.run(saved, rule=rule, folder=str(tmp_path / "state"))
    after = two.run(loaded, rule=rule, folder=str(tmp_path / "state"))
    names = {name: set(entry) for name, entry in before[0].items()}
    assert all({name: set(entry) for name, entry in run.items()} == names for run in (*before, *after))
    assert any("experts" in name for name in names)
    for name, entry in before[0].items():
        for key, value in entry.items():
            if key in ("step", "rounds") and "experts" in name:
                continue  # each rank counts the steps of the experts that it holds
            assert all(torch.equal(run[name][key], value) for run in (*before, *after)), (name, key)
