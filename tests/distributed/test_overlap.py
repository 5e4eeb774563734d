"""Updates that arrive behind the next forward pass, and parameters of every number of dimensions under DDP."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from zoo import assert_close, weights

import hf_emopt

LOADERS: dict[str, Callable[[nn.Module, dict[str, Tensor]], Any]] = {
    "model": lambda model, weights: model.load_state_dict(weights),
    "torch": set_model_state_dict,
}


class Net(nn.Module):
    """An embedding, blocks, a head, and a gain without a dimension (as CLIP's ``logit_scale``)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x) * self.scale
        return out


def run(steps: int = 3, overlap: bool = False, tensor_lr: bool = False) -> dict[str, Any]:
    model = Net()
    lr = torch.tensor(0.02) if tensor_lr else 0.02
    optimizer = hf_emopt.Muon(model, lr=lr, ns_dtype="float32", overlap_param_gather=overlap)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    waiting: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: waiting.append(len(optimizer._delayed)))
    embedded = []
    for step in range(steps):
        ids = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(step))
        wrapped(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if tensor_lr:
            optimizer.param_groups[0]["lr"].mul_(0.5)  # as a scheduler does, before the update has arrived
        with torch.no_grad():
            embedded.append(model.embed(ids[:1, :1]).clone())  # a part of the model by itself
    optimizer.synchronize()
    return {"weights": weights(model), "waiting": waiting, "embedded": embedded}


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_everything_reads_the_new_weights(two: World, tensor_lr: bool) -> None:
    alone = run(tensor_lr=tensor_lr)
    for overlap in (False, True):
        for result in two.run(run, overlap=overlap, tensor_lr=tensor_lr):
            assert_close(result["weights"], alone["weights"], 1e-5)
            for found, wanted in zip(result["embedded"], alone["embedded"], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def groups_used(overlap: bool) -> tuple[bool, int]:
    model = Net()
    optimizer = hf_emopt.Muon(model, overlap_param_gather=overlap)
    wrapped = DistributedDataParallel(model)
    handles = []
    for _ in range(2):  # a second optimizer finds the group of the first
        wrapped(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
        assert optimizer.context is not None
        handles += [id(grid.replica_group) for grid in optimizer.context.ranks.grids.values()]
        optimizer = hf_emopt.Muon(model, overlap_param_gather=overlap)
    return id(dist.group.WORLD) in handles, len(set(handles))


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_put_off_has_a_process_group_of_its_own(two: World, overlap: bool) -> None:
    """DDP sends buffers around before a forward pass, in the default group, where they would wait for all that is put off."""
    assert two.run(groups_used, overlap=overlap) == [(not overlap, 1)] * 2


def loaded_between_steps() -> None:
    for load in LOADERS.values():
        model = Net()
        optimizer = hf_emopt.Muon(model, lr=0.05, overlap_param_gather=True)
        wrapped = DistributedDataParallel(model)
        best = {name: value.clone() for name, value in model.state_dict().items()}
        wrapped(torch.zeros(1, 2, dtype=torch.int64)).square().mean().backward()
        optimizer.step()
        assert len(optimizer._delayed)
        load(model, best)
        with torch.no_grad():
            wrapped(torch.zeros(1, 2, dtype=torch.int64))
        optimizer.synchronize()
        for name, value in best.items():
            assert torch.equal(model.state_dict()[name], value), name


def test_weights_that_are_loaded_stay_as_they_are(two: World) -> None:
    """What was put off must not come on top of the best model, which a trainer loads after the last step."""
    two.run(loaded_between_steps)


def with_a_loss_of_its_own(overlap: bool) -> dict[str, Tensor]:
    model, loss = Net(), nn.Linear(16, 16)
    optimizer = hf_emopt.Muon(model, lr=0.05, ns_dtype="float32", overlap_param_gather=overlap)
    optimizer.add_param_group({"params": [("loss.weight", loss.weight)], "kind": "matrix", "name": "loss"})
    optimizer.add_param_group({"params": [("loss.bias", loss.bias)], "kind": "aux", "name": "loss_aux"})
    wrapped, wrapped_loss = DistributedDataParallel(model), DistributedDataParallel(loss)
    for step in range(3):
        ids = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(step))
        wrapped_loss(wrapped(ids)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if overlap:
            assert len(optimizer._delayed)  # what is the model's is still put off
    optimizer.synchronize()
    return {**weights(model), **{f"loss.{name}": value for name, value in weights(loss).items()}}


def test_parameters_outside_the_model_are_not_late(two: World) -> None:
    for late, soon in zip(
        two.run(with_a_loss_of_its_own, overlap=True), two.run(with_a_loss_of_its_own, overlap=False)
    ):
        assert_close(late, soon, 1e-6)


def many_buckets() -> dict[str, Any]:
    os.environ["HF_EMOPT_MAX_BUCKET_NUMEL"] = "200"
    try:
        return run(overlap=True)
    finally:
        del os.environ["HF_EMOPT_MAX_BUCKET_NUMEL"]


def test_blocks_begin_while_later_ones_wait(two: World) -> None:
    for result in two.run(many_buckets):
        assert result["waiting"][0] == 0
        assert all(count > 0 for count in result["waiting"][1:])


def test_a_model_with_hooks_can_be_pickled() -> None:
    model = Net()
    optimizer = hf_emopt.Muon(model, overlap_param_gather=True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    copy = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), model.parameters(), strict=True))


def compiled() -> None:
    model = Net()
    model.compile(backend="eager")
    optimizer = hf_emopt.Muon(model, overlap_param_gather=True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()


def test_compiled_models_are_refused() -> None:
    with pytest.raises(RuntimeError, match="compiled model"):
        compiled()
