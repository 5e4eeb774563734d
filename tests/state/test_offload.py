"""Swap-ins: which copies begin when, and how many bytes are on the device at once; on the CPU, with late copies."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from late_copies import swapped_in, two_streams
from torch import Tensor

from hf_emopt.state.host_transfer import host_copy_of
from hf_emopt.state.offload import StateOffload, budget_in_buckets

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def budget_of_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least there can be, where what is brought when is easiest to say."""
    monkeypatch.setenv("HF_EMOPT_OFFLOAD_BUCKETS", "2")


def pieces(count: int) -> dict[str, list[Tensor]]:
    return {f"piece{i}": [torch.zeros(10 + i), torch.zeros(3, 2)] for i in range(count)}


def step(offload: StateOffload, homes: dict[str, list[Tensor]], names: list[str]) -> None:
    offload.begin()
    for name in names:
        with swapped_in(offload, name, homes[name], CPU) as copies:
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
    sizes = [sum(t.nbytes for t in piece) for piece in homes.values()]
    assert offload.resident_bytes == offload.left_bytes == sizes[0]  # for the next step
    step(offload, homes, list(homes))
    assert (offload.fetched_late, offload.fetched_ahead) == (6, 6)
    assert offload.largest_bytes == max(sizes)
    assert offload.peak_bytes == max(a + b for a, b in itertools.pairwise(sizes))
    assert offload.resident_bytes == offload.left_bytes == sizes[0]
    assert offload.moved_bytes == 2 * sum(sizes) + sizes[0]
    offload.settle()
    assert offload.resident_bytes == 0


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
    with pytest.raises(RuntimeError, match="stop"), swapped_in(offload, "piece0", homes["piece0"], CPU):
        raise RuntimeError("stop")
    step(offload, homes, list(homes))
    offload.settle()
    assert offload.resident_bytes == 0
    assert offload.peak_bytes <= 2 * offload.largest_bytes


def test_home_is_the_tensor_itself_where_it_lies_there() -> None:
    tensor = torch.zeros(3)
    assert host_copy_of(tensor, CPU) is tensor


def uneven() -> dict[str, list[Tensor]]:
    """Pieces of one to five tensors of all sizes, every second of them moved alone."""
    draw = random.Random(1)
    return {f"piece{i}": [torch.zeros(draw.choice([3, 40, 90])) for _ in range(draw.randint(1, 5))] for i in range(9)}


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_memory_of_what_leaves_is_used_a_few_tensors_at_a_time(
    early: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As much as two pieces have room for is on its way in a step, and as much as one has between steps."""
    monkeypatch.setattr("hf_emopt.state.offload.CHUNK_BYTES", 200)
    homes = dict(list(uneven().items())[:count])
    largest = max(sum(t.nbytes for t in piece) for piece in homes.values())
    draw, wanted = random.Random(0), dict.fromkeys(homes, 0.0)
    with two_streams(early):
        offload = StateOffload()
        for index in range(30):
            names = [name for name in homes if index % 5 != 3 or draw.random() < 0.5]
            offload.begin()
            for name in names:
                with swapped_in(offload, name, homes[name], CPU) as copies:
                    assert all(torch.equal(copy, torch.full_like(copy, wanted[name])) for copy in copies)
                    torch._foreach_add_(copies, 1.0)
                    assert offload.resident_bytes <= 2 * largest
                wanted[name] += 1.0
            offload.finish()
            assert offload.resident_bytes <= largest
            if index == 2:
                late = offload.fetched_late
        assert offload.fetched_late - late <= 3 * count  # after steps that left some out
        assert offload.left_bytes > largest / 2
        assert count == 1 or offload.peak_bytes > 1.5 * largest
        offload.settle()
    assert all(torch.equal(t, torch.full_like(t, wanted[n])) for n, piece in homes.items() for t in piece)


def test_more_room_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    homes = pieces(9)
    assert budget_in_buckets() == 2, "of this file"
    monkeypatch.delenv("HF_EMOPT_OFFLOAD_BUCKETS")
    assert budget_in_buckets() == 3
    monkeypatch.setenv("HF_EMOPT_OFFLOAD_BUCKETS", "4")
    with two_streams(early=False):
        offload = StateOffload()
        for _ in range(3):
            step(offload, homes, list(homes))
    assert 3 * offload.largest_bytes < offload.peak_bytes <= 4 * offload.largest_bytes
    assert offload.left_bytes <= offload.largest_bytes
    for wrong in ("1", "many", "inf"):
        monkeypatch.setenv("HF_EMOPT_OFFLOAD_BUCKETS", wrong)
        with pytest.raises(
            ValueError, match=f"HF_EMOPT_OFFLOAD_BUCKETS='{wrong}' must be a number of buckets from 2 on"
        ):
            StateOffload()


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_what_was_written_to_between_steps_is_brought_again(early: bool) -> None:
    homes = pieces(3)
    with two_streams(early):
        offload = StateOffload()
        step(offload, homes, list(homes))  # which brings the first piece for the next one
        late = offload.fetched_late
        homes["piece0"][1].mul_(10.0)
        step(offload, homes, list(homes))
    assert torch.equal(homes["piece0"][1], torch.full((3, 2), 11.0))
    assert torch.equal(homes["piece0"][0], torch.full((10,), 2.0))
    assert offload.fetched_late == late + 1


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_settled_state_may_be_written_to_in_ways_that_nobody_counts(early: bool) -> None:
    homes = pieces(3)
    with two_streams(early):
        offload = StateOffload()
        for _ in range(2):
            step(offload, homes, list(homes))
        offload.settle()
        homes["piece0"][1].data.mul_(10.0)
        step(offload, homes, list(homes))
    assert torch.equal(homes["piece0"][1], torch.full((3, 2), 21.0))


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_two_pieces_of_the_same_memory(early: bool) -> None:
    """What is brought ahead was read before the piece in hand is written."""
    memory = torch.zeros(4, 10)
    homes = {"whole": [memory], "other": [torch.zeros(10)], "rows": [memory[1], memory[3]], "third": [torch.zeros(30)]}
    with two_streams(early):
        offload = StateOffload()
        for order in [list(homes)] * 3 + [["rows", "whole", "third"]] * 3:
            step(offload, homes, order)
    assert torch.equal(memory, torch.tensor([6.0, 12.0, 6.0, 12.0])[:, None].expand(4, 10))
