"""What is lent, when it is brought, and how much of it is on the device at once; on the CPU, where copies are made alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_emopt.offload import StateOffload, home_of

CPU = torch.device("cpu")


def pieces(count: int) -> dict[str, list[Tensor]]:
    return {f"piece{i}": [torch.zeros(10 + i), torch.zeros(3, 2)] for i in range(count)}


def step(offload: StateOffload, homes: dict[str, list[Tensor]], names: list[str]) -> None:
    offload.begin()
    for name in names:
        with offload.lent(name, homes[name], CPU) as copies:
            for copy, home in zip(copies, homes[name]):
                assert copy.data_ptr() != home.data_ptr()
                copy.add_(1.0)
    offload.finish()
    offload.synchronize()


def test_what_is_written_comes_home() -> None:
    homes, offload = pieces(4), StateOffload()
    for _ in range(3):
        step(offload, homes, list(homes))
    assert all(torch.equal(t, torch.full_like(t, 3.0)) for piece in homes.values() for t in piece)


def test_the_next_piece_is_brought_ahead_and_never_a_third() -> None:
    homes, offload = pieces(6), StateOffload()
    step(offload, homes, list(homes))
    assert (offload.fetched_late, offload.fetched_ahead) == (6, 0)
    assert offload.resident_bytes == 0
    step(offload, homes, list(homes))
    assert (offload.fetched_late, offload.fetched_ahead) == (6, 6)
    sizes = [sum(t.nbytes for t in piece) for piece in homes.values()]
    assert offload.largest_bytes == max(sizes)
    assert offload.peak_bytes == max(a + b for a, b in itertools.pairwise(sizes))
    assert offload.resident_bytes == 0
    assert offload.moved_bytes == 2 * sum(sizes)


def test_another_order_costs_time_alone() -> None:
    homes, offload = pieces(5), StateOffload()
    names = list(homes)
    for order in (names, names[::2], names[::-1], names):
        step(offload, homes, order)
    wanted = [4.0, 3.0, 4.0, 3.0, 4.0]
    for value, piece in zip(wanted, homes.values()):
        assert all(torch.equal(t, torch.full_like(t, value)) for t in piece)
    assert offload.peak_bytes <= 2 * offload.largest_bytes


def test_tensors_that_were_replaced_are_not_taken_for_those_brought_ahead() -> None:
    homes, offload = pieces(2), StateOffload()
    step(offload, homes, list(homes))
    homes["piece1"] = [torch.full((11,), 7.0), torch.full((3, 2), 7.0)]
    step(offload, homes, list(homes))
    assert all(torch.equal(t, torch.full_like(t, 8.0)) for t in homes["piece1"])


def test_a_step_that_broke_off_leaves_nothing_behind() -> None:
    homes, offload = pieces(3), StateOffload()
    step(offload, homes, list(homes))
    offload.begin()
    with pytest.raises(RuntimeError, match="stop"), offload.lent("piece0", homes["piece0"], CPU):
        raise RuntimeError("stop")
    step(offload, homes, list(homes))
    assert offload.resident_bytes == 0
    assert offload.peak_bytes <= 2 * offload.largest_bytes


def test_home_is_the_tensor_itself_where_it_lies_there() -> None:
    tensor = torch.zeros(3)
    assert home_of(tensor, CPU) is tensor
