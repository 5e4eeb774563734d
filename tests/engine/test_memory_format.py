"""Convolutions in ``channels_last``: the same weights, and everything stays in that format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_emopt

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {"ns_dtype": "float32"}),
    "normuon": (hf_emopt.NorMuon, {"ns_dtype": "float32"}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 2, "refresh": "synchronous"}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 2, "refresh": "synchronous"}),
}


def net(memory_format: torch.memory_format, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 6),
    )  # fmt: skip
    return model.to(memory_format=memory_format).to(dtype)


def train(rule: str, memory_format: torch.memory_format, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Five steps on given gradients, laid out as the weights; a reload in the middle."""
    model = net(memory_format, dtype)
    cls, options = RULES[rule]
    optimizer = cls(model, lr=0.02, weight_decay=0.1, **options)
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.grad = torch.empty_like(parameter).copy_(grad)
        optimizer.step()
        if step == 2:
            saved = optimizer.state_dict()
            optimizer = cls(model, lr=0.02, weight_decay=0.1, **options)
            optimizer.load_state_dict(saved)
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_channels_last_is_kept_and_makes_no_difference(rule: str, dtype: torch.dtype) -> None:
    plain, _ = train(rule, torch.contiguous_format, dtype)
    model, optimizer = train(rule, torch.channels_last, dtype)
    strides = {name: parameter.stride() for name, parameter in net(torch.channels_last, dtype).named_parameters()}
    kept = 0
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert parameter.stride() == strides[name], name
        for key, value in optimizer.state[parameter].items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                assert value.stride() == strides[name], (name, key)
                kept += value.dim() == 4
    assert kept >= 4


def test_moments_in_another_format_than_their_weight_are_stepped_alike() -> None:
    """As a checkpoint leaves them that was written in the other format."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        optimizer = hf_emopt.Muon(model, lr=0.1)
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter) * torch.arange(parameter.numel()).view(parameter.shape)
            optimizer.step()
            if step == 0:
                model.to(memory_format=memory_format)
        results.append(model[0].weight.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-7)


def test_a_fused_step_copies_no_weight_of_a_channels_last_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 7, bias=False), nn.Flatten(), nn.Linear(64, 4, bias=False))
    model.to(memory_format=torch.channels_last)
    optimizer = hf_emopt.Muon(model, lr=0.1, muon_modules="2")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weight, state = model[0].weight, optimizer.state[model[0].weight]
    before = [t.data_ptr() for t in (weight, state["exp_avg"], state["exp_avg_sq"])]
    copies = []
    original = torch.Tensor.contiguous

    def contiguous(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        result = original(tensor, **options)
        copies.append(tensor.shape) if result.data_ptr() != tensor.data_ptr() else None
        return result

    torch.Tensor.contiguous = contiguous  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        torch.Tensor.contiguous = original  # type: ignore[method-assign]
    assert [t.data_ptr() for t in (weight, state["exp_avg"], state["exp_avg_sq"])] == before
    assert torch.Size((64, 7, 7, 3)) not in copies
