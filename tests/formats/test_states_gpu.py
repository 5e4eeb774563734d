"""State in fewer bits and on the host, where there is a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from test_state_dtypes import OPTIMIZERS, make
from torch import nn

import hf_emopt
from hf_emopt.formats import moments
from hf_emopt.formats.moments import packed_like, unpacked, update_packed
from hf_emopt.state.offload import budget_in_buckets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
INT8 = pytest.param(
    "int8",
    marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", INT8])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_offload_changes_no_bit(rule: str, state_dtype: str) -> None:
    """Gradients are the same numbers, since a backward pass on a GPU is not the same twice."""
    ends = []
    for offload in (None, "cpu"):
        with torch.device("cuda"):
            model, optimizer = make(rule, state_dtype, offload_state=offload)
        for step in range(6):
            generator = torch.Generator("cuda").manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends))
    engine = optimizer.current_context()
    assert 0 < engine.store.offload.resident_bytes <= engine.store.offload.largest_bytes
    held = [(k, v) for s in optimizer.state.values() for k, v in s.items() if k not in ("step", "rounds")]
    assert all(v.device.type == "cpu" and (v.is_pinned() or k.startswith("pending")) for k, v in held)
    assert engine.store.offload.resident_bytes == 0  # state was asked for
    assert engine.store.offload.peak_bytes <= budget_in_buckets() * engine.store.offload.largest_bytes


def test_codes_are_the_nearest_on_a_gpu_too() -> None:
    pytest.importorskip("bitsandbytes")
    device = torch.device("cuda")
    values = torch.linspace(-1, 1, 4096, device=device).view(16, 256) ** 5
    values[:, 7] = 0.0
    state = packed_like({"momentum_buffer": torch.zeros(16, 256, device=device)}, "int8", (16, 256))
    update_packed(state, {"momentum_buffer": values}, None, None)
    known = moments._map(True, device)
    relative = values / values.abs().amax(1, keepdim=True)
    nearest = (relative.unsqueeze(-1) - known).abs().amin(-1)
    found = (known[state["momentum_buffer_codes"].long()] - relative).abs()
    assert (found <= nearest + 1e-7).all()
    assert (unpacked(state, torch.float32)["momentum_buffer"][:, 7] == 0.0).all()


@pytest.mark.parametrize("state_dtype", ["bfloat16", INT8])
def test_resumed_equals_uninterrupted(state_dtype: str) -> None:
    def run(optimizer, model, steps: range) -> None:
        for step in steps:
            generator = torch.Generator("cuda").manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            optimizer.step()

    with torch.device("cuda"):
        model, optimizer = make("muon", state_dtype)
        other, resumed = make("muon", state_dtype, offload_state="cpu")
    run(optimizer, model, range(3))
    resumed.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    run(optimizer, model, range(3, 6))
    run(resumed, other, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters()))


def in_motion(device: str, size: int, **options: Any) -> list[torch.Tensor]:
    """Weights after steps that the host queues without waiting, each behind work that takes as long as copies do."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(3 * size, size), *(nn.Linear(size, size) for _ in range(8)))
        optimizer = hf_emopt.Muon(model, lr=1e-2, weight_decay=0.1, **options)
    params = list(model.parameters())
    grads = [torch.randn_like(p) for p in params]
    for step in range(12):
        work = grads[0]
        for _ in range(4):
            work = work @ grads[1]  # a forward and backward pass
        for i, (p, grad) in enumerate(zip(params, grads)):
            p.grad = None if step in (4, 5) and i % 3 == 1 else torch.roll(grad, step, 0)
        optimizer.step()
        if step in (3, 8):  # by a user, between steps
            optimizer.state[params[1]]["momentum_buffer"].mul_(0.5)
            optimizer.state[params[3]]["momentum_buffer"].data.zero_()
        if step == 9:
            state = optimizer.state_dict()
            optimizer = hf_emopt.Muon(model, lr=1e-2, weight_decay=0.1, **options)
            optimizer.load_state_dict(state)
    return [p.detach().clone() for p in params]


def test_pieces_in_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pieces: what is asked for is still on its way, and so is what leaves when its memory is wanted."""
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", str(2 * 2048**2))
    plain, moved = (in_motion("cuda", 2048, offload_state=place) for place in (None, "cpu"))
    assert all(torch.equal(a, b) for a, b in zip(plain, moved))
