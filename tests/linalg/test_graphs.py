"""How batches are cut for recorded graphs. Recording itself needs a GPU: tests/linalg/test_graphs_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_emopt.linalg import cuda_graphs
from hf_emopt.linalg.cuda_graphs import replayed


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
