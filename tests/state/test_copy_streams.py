"""State that leaves a device gives others their turn on the link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_emopt.state import host_transfer as copy_streams
from hf_emopt.state.host_transfer import _DeviceCopyStream


class FakeDevice:
    """An accelerator's module that computes at once and keeps what was queued: (stream, what), in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.streams: dict[str, int] = {}
        self.now = FakeStream(self, "main")

    def Stream(self, device: torch.device, priority: int = 0) -> FakeStream:
        name = ("bringing", "taking", "pausing")[len(self.streams)]
        self.streams[name] = priority
        return FakeStream(self, name)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.now

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.now = self.now, stream
        with Operations(self):
            yield
        self.now = before


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: FakeEvent) -> None:
        self.device.log.append((self.name, event))


class FakeEvent:
    """Attributes: after: how much had been queued when it was recorded; of: by which stream."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.after, self.of = device, -1, ""

    def record(self, stream: FakeStream) -> None:
        self.after, self.of = len(self.device.log), stream.name


class Operations(TorchDispatchMode):
    """Logs copies with their bytes, and fills."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("copy_", "fill_"):
            self.device.log.append((self.device.now.name, args[0].nbytes if name == "copy_" else name))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(copy_streams, "CHUNK_BYTES", 64)
    return device


def taken(fake: FakeDevice, *chunks: list[Tensor]) -> tuple[list[list[Tensor]], list[FakeEvent]]:
    copy_stream = _DeviceCopyStream(torch.device("cpu"))
    homes = [[torch.zeros_like(t) for t in copies] for copies in chunks]
    return homes, [copy_stream.copy_to_host(copies, home) for copies, home in zip(chunks, homes)]


def test_a_kernel_runs_between_what_leaves(fake: FakeDevice) -> None:
    """Each chunk waits for a kernel on the stream that goes first, which waits for the chunk before."""
    chunks = [[torch.randn(8), torch.randn(4)], [torch.randn(16)], [torch.randn(3)]]
    homes, left = taken(fake, *chunks)
    assert all(torch.equal(a, b) for home, copies in zip(homes, chunks) for a, b in zip(home, copies))
    assert fake.streams == {"bringing": 0, "taking": 0, "pausing": -1}
    copied = [i for i, (stream, what) in enumerate(fake.log) if stream == "taking" and isinstance(what, int)]
    assert [fake.log[i][1] for i in copied] == [32, 16, 64, 12]
    kernels = [i for i, entry in enumerate(fake.log) if entry == ("pausing", "fill_")]
    assert len(kernels) == 3
    for last, kernel, first in zip((copied[1], copied[2]), kernels, (copied[2], copied[3])):
        stream, waited = fake.log[kernel - 1]
        assert (stream, waited.of, waited.after) == ("pausing", "taking", last + 1)
        waits = [e for s, e in fake.log[kernel:first] if s == "taking"]
        assert any(e.of == "pausing" and e.after == kernel + 1 for e in waits)
    assert [event.of for event in left] == ["taking"] * 3
    assert [event.after for event in left] == [copied[1] + 1, copied[2] + 1, copied[3] + 1]  # no pause delays them


def test_a_long_tensor_leaves_in_parts(fake: FakeDevice) -> None:
    long = torch.randn(10, 5)
    (home,), (left,) = taken(fake, [long])
    assert torch.equal(home[0], long)
    assert [what for stream, what in fake.log if stream == "taking" and isinstance(what, int)] == [64, 64, 64, 8]
    assert [entry for entry in fake.log if entry == ("pausing", "fill_")] == [("pausing", "fill_")] * 4
    assert left.after == max(i for i, (_, what) in enumerate(fake.log) if isinstance(what, int)) + 1


def test_a_list_leaves_a_parcel_at_a_time(fake: FakeDevice) -> None:
    """All that a bucket of parameters on the host brings back comes in one call."""
    several = [torch.randn(8), torch.randn(40), torch.randn(4), torch.randn(16)]
    (homes,), (left,) = taken(fake, several)
    assert all(torch.equal(a, b) for a, b in zip(homes, several))
    kinds = [("copy", what) if isinstance(what, int) else what for _, what in fake.log if isinstance(what, (int, str))]
    sizes = [[int(k[1]) for k in group] for copies, group in groupby(kinds, lambda k: k != "fill_") if copies]
    assert sizes == [[32], [64], [64], [32, 16], [64]]
    assert left.after == max(i for i, (_, what) in enumerate(fake.log) if isinstance(what, int)) + 1


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(20, 20)[:, ::2], torch.randn(32)],
    ids=["channels_last", "gaps", "short"],
)
def test_others_leave_as_they_are(fake: FakeDevice, tensor: Tensor) -> None:
    (home,), _ = taken(fake, [tensor])
    assert torch.equal(home[0], tensor)
    assert [what for stream, what in fake.log if stream == "taking" and isinstance(what, int)] == [tensor.nbytes]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a link between a host and a device")
def test_a_number_is_read_before_all_has_left() -> None:
    device = torch.device("cuda")
    copy_stream = _DeviceCopyStream(device)
    copies = [torch.ones(2**23, device=device) for _ in range(32)]
    homes = [torch.zeros(2**23, pin_memory=True) for _ in copies]
    number = torch.ones(64, device=device)
    assert float(number.sum()) == 64.0  # loads the kernels, which takes longer than the copies
    torch.cuda.synchronize()
    for copy, home in zip(copies, homes):
        left = copy_stream.copy_to_host([copy], [home])
    assert float(number.sum()) == 64.0
    assert not left.query()  # of 1 GB, 20 ms
    copy_stream.synchronize()
    assert all(bool((home == 1).all()) for home in homes)
