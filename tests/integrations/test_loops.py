"""Training loops of one's own: Accelerate on one process, DistributedDataParallel on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Worlds
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_emopt

STEPS = 3


class Net(nn.Module):
    """Two matrices of one shape, one of another, and a branch that is off in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        hidden = self.up(x) + (self.side(x) if side else 0.0)
        return self.norm(self.down(torch.tanh(hidden)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, size: int = 8) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(step))


def loss_of(outputs: Tensor) -> Tensor:
    """The mean squared distance from a ramp. A norm's outputs have one length, so their squares alone have no gradient but
    rounding, of which Newton-Schulz would make an update of full size."""
    return (outputs.float() - torch.linspace(-2.0, 2.0, 8)).square().sum(-1).mean()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize("cls", [hf_emopt.Muon, hf_emopt.NorMuon])
@pytest.mark.parametrize("order", ["optimizer before prepare", "optimizer after prepare"])
def test_accelerate_accumulates_clips_saves_and_resumes(cls: Any, order: str, tmp_path: Path) -> None:
    from accelerate import Accelerator

    def build() -> tuple[Any, ...]:
        accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), net()
        if order == "optimizer after prepare":
            model = accelerator.prepare(model)
        optimizer = cls(model, lr=0.05, aux_lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        if order == "optimizer after prepare":
            return accelerator, model, *accelerator.prepare(optimizer, scheduler)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    def go(run: tuple[Any, ...], steps: range) -> None:
        accelerator, model, optimizer, scheduler = run
        for step in steps:
            for micro in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch(10 * step + micro)).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    whole, first, second = build(), build(), build()
    go(whole, range(6))
    assert whole[2].optimizer.transform_count == 6 * 3
    go(first, range(3))
    first[0].save_state(str(tmp_path))
    second[0].load_state(str(tmp_path))
    go(second, range(3, 6))
    assert second[2].optimizer.transform_count == 3 * 3
    for a, b in zip(weights(whole[1]), weights(second[1]), strict=True):
        assert torch.equal(a, b)
    assert [g["lr"] for g in whole[2].param_groups] == [g["lr"] for g in second[2].param_groups]


# ---------------------------------------------------------------------------------------------- two processes


FLOAT = {"lr": 0.05, "aux_lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Muon": ("Muon", "float32", FLOAT),
    "NorMuon": ("NorMuon", "float32", FLOAT),
    "stochastic": ("Muon", "bfloat16", {"lr": 1e-3, "weight_decay": 0.1, "low_precision_weights": "stochastic"}),
}


def side_is_on(step: int, rank: int) -> bool:
    """Off everywhere in step 1, on for one process only in step 2."""
    return step == 0 or (step == 2 and rank == 0)


def replica() -> dict[str, tuple[Any, ...]]:
    """What this rank ends with, by case."""
    torch.manual_seed(100 + dist.get_rank())  # noise must come from the step, not from the process
    return {name: replica_run(dist.get_rank(), *case) for name, case in CASES.items()}


def replica_run(rank: int, cls_name: str, dtype_name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    model = net().to(getattr(torch, dtype_name))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = getattr(hf_emopt, cls_name)(wrapped, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        part = batch(step, 64)[32 * rank : 32 * rank + 32].to(model.up.weight.dtype)
        loss_of(wrapped(part, side_is_on(step, rank))).backward()
        optimizer.step()
    held = sum(
        v.numel() for p in model.parameters() for k, v in optimizer.state[p].items() if k not in ("step", "rounds")
    )
    return weights(model), held, optimizer.transform_count


@pytest.fixture(scope="module")
def replicas(worlds: Worlds) -> list[dict[str, Any]]:
    """What each of two processes ended with, for every case."""
    return worlds[2].run(replica)


@pytest.mark.parametrize("case", CASES)
def test_two_replicas_end_equal(case: str, replicas: list[dict[str, Any]]) -> None:
    """Weights, weight decay and stochastic rounding included; work and state are shared, none is there twice."""
    (first, held, count), (second, other_held, other_count) = (results[case] for results in replicas)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert count + other_count == 3 + 2 + 3
    model = net()
    cls_name, dtype_name, options = CASES[case]
    alone = getattr(hf_emopt, cls_name)(model.to(getattr(torch, dtype_name)), **options)
    loss_of(model(batch(0).to(model.up.weight.dtype), True)).backward()
    alone.step()
    assert held + other_held == sum(
        v.numel() for p in model.parameters() for k, v in alone.state[p].items() if k not in ("step", "rounds")
    )
    start = weights(net().to(first[0].dtype))
    assert all(not torch.equal(a, b) for a, b in zip(first[:2], start[:2], strict=True))


@pytest.mark.parametrize("case", ["Muon", "NorMuon"])
def test_two_replicas_equal_one_process(case: str, replicas: list[dict[str, Any]]) -> None:
    model = net()
    cls_name, _, options = CASES[case]
    optimizer = getattr(hf_emopt, cls_name)(model, **options)
    start = weights(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            part = batch(step, 64)[32 * rank : 32 * rank + 32]
            (loss_of(model(part, side_is_on(step, rank))) / 2).backward()
        optimizer.step()
    for ours, theirs, before in zip(replicas[0][case][0], weights(model), start, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * (theirs - before).norm()
