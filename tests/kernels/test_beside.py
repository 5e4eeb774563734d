"""Streams beside a step, on a CPU: who waits for whom, and how long what is read there is kept."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from hf_emopt.kernels import streams as side_streams
from hf_emopt.kernels.streams import SideStreams

DEVICE = torch.device("cuda", 0)


class Stream:
    """Keeps what it was told to wait for."""

    device = DEVICE

    def __init__(self) -> None:
        self.waits: list[object] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)


class Event:
    """Keeps the stream that it was recorded on."""

    on: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.on = stream


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The current stream."""
    main = Stream()
    streams: dict[tuple[str, int], Stream] = {}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(
        side_streams, "_side_stream", lambda device, name, index: streams.setdefault((name, index), Stream())
    )
    return main


def test_what_lands_is_kept_until_the_step_has_waited_for_it(main: Stream) -> None:
    landing = SideStreams("apply")
    landing.open(DEVICE)
    side = landing.stream(DEVICE)
    assert side.waits == [main]

    def land() -> weakref.ref[torch.Tensor]:
        arrived = torch.zeros(3)
        with landing.holding(DEVICE, (arrived,)):
            pass
        return weakref.ref(arrived)

    kept = [land() for _ in range(4)]
    assert [ref() is None for ref in kept] == [True, True, False, False]
    assert [type(event) for event in main.waits] == [Event, Event]
    assert all(event.on is side for event in main.waits)
    assert side.waits == [main]  # not for what was queued since

    landing.join()
    assert main.waits[2:] == [side]
    assert all(ref() is None for ref in kept)
    assert not landing.is_open(DEVICE)


def test_a_stream_that_was_asked_for_is_waited_for_by_all_that_ask(main: Stream) -> None:
    """Also where somebody asked between a stream's opening and its use."""
    side = SideStreams("refresh", 2)
    for index in range(3):
        with side.on(DEVICE, index):
            side.wait()
    streams = {side.stream(DEVICE, index) for index in range(2)}
    assert len(streams) == 2
    for _ in range(2):
        main.waits.clear()
        side.wait()
        assert set(main.waits) == streams
    assert side.__getstate__()["_open"] == set()
