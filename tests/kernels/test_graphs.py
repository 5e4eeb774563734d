"""How batches are cut for recorded graphs, and which memory these share. Recording itself needs a GPU: test_graphs_gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.cuda_graphs import replayed
from hf_emopt.linalg import gram_newton_schulz
from hf_emopt.linalg.gram_newton_schulz import iterate


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of members in what would be recorded, with room for three of 8 x 8."""
    seen: list[int] = []

    def launched(key: Any, inputs: Any, work: Any, device: torch.device) -> tuple[Tensor, ...]:
        seen.append(len(inputs[0]))
        assert all(len(x) == len(inputs[0]) for x in inputs)
        return work(*inputs)  # type: ignore[no-any-return]

    monkeypatch.setattr(cuda_graphs, "_can_record", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "_replayed", launched)
    monkeypatch.setattr(cuda_graphs, "_MAX_REPLAYED_ELEMENTS", 3 * 8 * 8)
    return seen


def work(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return a @ b, b.sum((-2, -1)) > 0


@pytest.mark.parametrize(
    ("n", "d", "parts"),
    [
        (1, 8, [1]),
        (3, 8, [3]),
        (4, 8, [2, 2]),
        (7, 8, [3, 2, 2]),
        (10, 4, [10]),
        (13, 4, [7, 6]),
        (0, 8, []),
        (2, 14, []),
    ],
)
def test_batches_are_cut_into_equal_parts(n: int, d: int, parts: list[int], sizes: list[int]) -> None:
    """None of more than the room, and none at all where a single matrix has more: then the work is done as it is."""
    a, b = torch.randn(2, n, d, d)
    product, positive = replayed("key", (a, b), work)
    torch.testing.assert_close(product, a @ b)
    assert torch.equal(positive, work(a, b)[1])
    assert sizes == parts


def test_a_cpu_records_nothing() -> None:
    a = torch.randn(2, 8, 8)
    for _ in range(3):
        assert torch.equal(replayed("key", (a, a), work)[0], a @ a)
    assert not cuda_graphs._replays


class FakeRoom(cuda_graphs._Room):
    def __init__(self, place: cuda_graphs.Place, size: int = 0) -> None:
        self.device = place[0]
        self.buffer = self._bytes(size)


class FakeGraph:
    """Does on each replay what was done while it was recorded, on the same memory."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


def captured(room: FakeRoom, run: Callable[[], None], first: Tensor) -> FakeGraph:
    run()
    return FakeGraph(run)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, FakeRoom]]:
    monkeypatch.setattr(cuda_graphs, "_can_record", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "_Room", FakeRoom)
    monkeypatch.setattr(cuda_graphs, "_capture", captured)
    monkeypatch.setattr(cuda_graphs, "current_stream", lambda device: 0)
    cuda_graphs.clear()
    gram_newton_schulz._form_of.cache_clear()
    yield cuda_graphs._recorded_in  # type: ignore[misc]
    cuda_graphs.clear()
    gram_newton_schulz._form_of.cache_clear()


STEPS = [(3.4445, -4.7750, 2.0315)] * 4
LINEAR = [STEPS[0], (1.5, -0.5, 0.0)]


@pytest.mark.parametrize(
    ("steps", "restarts"),
    [(STEPS, None), (STEPS, ()), (STEPS, (1, 3)), (STEPS[:1], None), (STEPS[:1], ()), (LINEAR, (1,)), (LINEAR, None)],
)
@pytest.mark.parametrize("copied", [0, 2**23])
def test_graphs_of_all_shapes_share_a_room(
    steps: Any, restarts: Any, copied: int, rooms: dict[Any, FakeRoom], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small shapes before large ones, wide and tall; a result is right though the next shape is worked on in the same memory,
    and the room is as large as the largest shape needs, once every shape has been recorded in it."""
    monkeypatch.setattr("hf_emopt.linalg.gram_newton_schulz._COPIED_ELEMENTS", copied)
    shapes = [(2, 16, 24), (3, 40, 24), (1, 48, 96), (2, 64, 64)]
    for _ in range(4):  # launched, recorded, recorded anew in the larger room, replayed
        inputs = [torch.randn(*shape) for shape in shapes]
        results = [iterate(x, steps, restarts, 1.0, torch.float32) for x in inputs]
        with monkeypatch.context() as without:
            without.setattr(cuda_graphs, "_can_record", lambda device: False)
            for x, result in zip(inputs, results, strict=True):
                assert torch.equal(result, iterate(x, steps, restarts, 1.0, torch.float32))
    known = [one for one in cuda_graphs._recordings.values() if isinstance(one, cuda_graphs._Recording)]
    assert len(known) == len(cuda_graphs._recordings) == len(shapes)
    (room,) = rooms.values()
    used = {t.untyped_storage().data_ptr() for one in known for t in (*one.sources, *one.results)}
    assert used == {room.buffer.untyped_storage().data_ptr()}
    assert room.buffer.numel() == max(sum(map(cuda_graphs._room_of, (*one.sources, *one.results))) for one in known)


def test_too_many_shapes_are_forgotten(rooms: dict[Any, FakeRoom], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MAX_RECORDED", 3)
    for size in (8, 9, 10, 8, 9, 10, 11):
        iterate(torch.randn(size, 2 * size), STEPS, (2,), 1.0, torch.float32)
    assert len(cuda_graphs._recordings) == 1
    assert not rooms


def called(*shapes: tuple[int, int]) -> None:
    for shape in shapes:
        x = torch.randn(shape)
        result = iterate(x, STEPS, (2,), 1.0, torch.float32)
        assert not result.isnan().any()


def test_a_room_is_made_for_all_shapes_that_have_been_seen(rooms: dict[Any, FakeRoom]) -> None:
    called((8, 16), (24, 48), (16, 32))
    called((8, 16))
    (room,) = rooms.values()
    called((24, 48), (16, 32), (8, 16))
    assert list(rooms.values()) == [room]
    called((32, 64), (32, 64))
    assert list(rooms.values()) != [room]


def test_a_room_that_inference_mode_made_is_of_use_outside(rooms: dict[Any, FakeRoom]) -> None:
    with torch.inference_mode():
        called((16, 32), (16, 32))
    called((8, 16), (8, 16), (8, 16), (16, 32))
    assert len(rooms) == 1


def test_graphs_go_on_where_there_was_no_memory_for_a_larger_room(
    rooms: dict[Any, FakeRoom], monkeypatch: pytest.MonkeyPatch
) -> None:
    called((8, 16), (8, 16), (16, 32))

    def full(self: FakeRoom, size: int) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(FakeRoom, "_bytes", full)
        with pytest.raises(torch.OutOfMemoryError):
            called((16, 32))
    assert not rooms  # the pool of the smaller one has lost its graphs
    called((16, 32), (8, 16), (8, 16))
    assert len(rooms) == 1
