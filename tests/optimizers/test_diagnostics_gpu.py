"""Diagnostics on a GPU: one wait for the device in a measured step, none of theirs in another, and the same weights."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import hf_emopt
from hf_emopt.optimizers.base import MatrixOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(cls: type[MatrixOptimizer]) -> tuple[nn.Module, MatrixOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Linear(256, 256)).cuda()
    return model, cls(model, lr=1e-3)


def step(model: nn.Module, optimizer: MatrixOptimizer, measured: bool) -> int:
    """One step; how often the host waited for the device."""
    model(torch.ones(8, 256, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            if measured:
                with optimizer.diagnostics() as values:
                    optimizer.step()
                assert values["emopt/layers/0.weight/update_rms"] > 0.0
            else:
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    optimizer.zero_grad()
    return sum("synchronizing CUDA operation" in str(w.message) for w in caught)


@pytest.mark.parametrize("cls", [hf_emopt.Muon, hf_emopt.NorMuon, hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo])
def test_one_wait_and_the_same_weights(cls: type[MatrixOptimizer]) -> None:
    plain, watched = build(cls), build(cls)
    for index in range(6):
        step(*watched, measured=index % 2 == 1)
        step(*plain, measured=False)
    for mine, theirs in zip(plain[0].parameters(), watched[0].parameters()):
        assert torch.equal(mine, theirs)
    # The same steps of the schedule, so that what refreshes wait for is in both.
    assert step(*watched, measured=True) == step(*plain, measured=False) + 1
