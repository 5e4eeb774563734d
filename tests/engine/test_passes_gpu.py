"""On a GPU: the passes over runs against the rule's own functions, from the same start, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_emopt
from hf_emopt.kernels.multi_tensor import MultiTensorTable, kernels_run_on
from hf_emopt.kernels.triton import runtime

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if not kernels_run_on(torch.device("cuda")):
    pytest.skip("needs Triton", allow_module_level=True)


class Model(nn.Module):
    """Odd and even sizes, a stack of convolutions, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(96, 256), nn.Linear(256, 96), nn.Linear(97, 33)
        self.conv = nn.Conv2d(6, 8, 3)


def trained(monkeypatch: pytest.MonkeyPatch, disabled: bool, steps: int, cls: type, **options: Any) -> dict[str, Any]:
    monkeypatch.setenv(runtime.DISABLE_VARIABLE, "1" if disabled else "0")
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = cls(model, lr=0.05, weight_decay=0.1, **options)
    for step in range(steps):
        generator = torch.Generator("cuda").manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
        if step == 2:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        optimizer.step()
    return {
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "skipped": optimizer.skipped_steps,
        "count": optimizer.transform_count,
    }


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (hf_emopt.Muon, {}),
        (hf_emopt.Muon, {"nesterov": False, "momentum": 0.3}),
        (hf_emopt.Muon, {"cautious_weight_decay": True}),
        (hf_emopt.NorMuon, {}),
        (hf_emopt.SOAP, {"precondition_frequency": 2}),
    ],
)
def test_same_weights_with_and_without_kernels(
    monkeypatch: pytest.MonkeyPatch, cls: type, options: dict[str, Any]
) -> None:
    if cls is not hf_emopt.SOAP:
        options = {**options, "ns_dtype": "float32"}
    launched: list[str] = []
    for name in ("momentum", "apply"):
        plain = getattr(MultiTensorTable, name)

        def counted(self: MultiTensorTable, *args: Any, _plain: Any = plain, _name: str = name) -> None:
            launched.append(_name)
            _plain(self, *args)

        monkeypatch.setattr(MultiTensorTable, name, counted)
    without = trained(monkeypatch, True, 5, cls, **options)
    assert not launched
    with_kernels = trained(monkeypatch, False, 5, cls, **options)
    assert "apply" in launched
    assert ("momentum" in launched) == (cls is not hf_emopt.SOAP)
    assert without["skipped"] == with_kernels["skipped"] == 1
    assert without["count"] == with_kernels["count"]
    for name, weight in without["weights"].items():
        torch.testing.assert_close(with_kernels["weights"][name], weight, rtol=1e-4, atol=1e-5)


def test_many_tensors_of_every_alignment() -> None:
    sizes = [(33, 7), (4096,), (5000,), (64, 64), (1,)]
    runs, offset = [], 1
    for k, size in enumerate(sizes):
        count = torch.Size(size).numel()
        runs.append((k, 0, 0, offset, count))
        offset += count
    grads = [torch.randn(size, device="cuda") for size in sizes]
    buffers = [torch.randn(size, device="cuda") for size in sizes]
    wanted = [b.lerp(g, 0.05) for g, b in zip(grads, buffers)]
    sent = [g.lerp(w, 0.95) for g, w in zip(grads, wanted)]
    buffer = torch.full((offset + 5,), float("nan"), device="cuda", dtype=torch.bfloat16)
    MultiTensorTable(runs).momentum(
        grads, buffers, [buffer], 0.95, True, torch.ones((), dtype=torch.bool, device="cuda")
    )
    for (_, _, _, start, count), w, b, s in zip(runs, wanted, buffers, sent):
        torch.testing.assert_close(b, w, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(buffer[start : start + count].float(), s.reshape(-1), rtol=8e-3, atol=1e-6)
    assert int(buffer.isnan().sum()) == 6, "nothing else is written"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_a_device_that_is_not_the_current_one() -> None:
    weights = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 256)).to(device)
        optimizer = hf_emopt.Muon(model, lr=0.05)
        for step in range(4):  # recorded, then replayed
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            optimizer.step()
        assert torch.cuda.current_device() == 0
        weights.append([p.detach().cpu() for p in model.parameters()])
    for one, other in zip(*weights):
        assert torch.equal(one, other)


def test_tables_of_addresses_do_not_wait_behind_a_busy_link() -> None:
    """Other addresses at every call, while large copies keep the link to the device busy and memory is used again."""
    sizes = (4096, 160, 33)
    runs = MultiTensorTable([(k, 0, k, 0, size) for k, size in enumerate(sizes)])
    big, there = torch.ones(2**26).pin_memory(), torch.empty(2**26, device="cuda")
    link = torch.cuda.Stream()
    ends = []
    for call in range(40):
        with torch.cuda.stream(link):
            there.copy_(big, non_blocking=True)
        sources = [torch.full((size,), float(call * 10 + k), device="cuda") for k, size in enumerate(sizes)]
        targets = [torch.full((size,), -1.0, device="cuda") for size in sizes]
        runs.to_right(sources, targets)
        ends.append([t.amin() + t.amax() for t in targets])  # all else is freed, and its memory is the next call's
    link_was_busy = not link.query()
    link.synchronize()  # its copies write into memory that the next test would be given
    assert [[float(e) for e in row] for row in ends] == [
        [2.0 * (call * 10 + k) for k in range(3)] for call in range(40)
    ]
    assert link_was_busy
