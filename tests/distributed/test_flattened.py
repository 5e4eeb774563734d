"""Flattened parameters without any wrapper: where their pieces lie, who transforms them, and their files made whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_emopt.checkpoint.flat_state_dict import merged
from hf_emopt.distributed.assignment import make_plan
from hf_emopt.distributed.flat_params import FlatTensor, Place, cut_each, cut_together
from hf_emopt.distributed.layout import Grid, Storage, UnsupportedLayoutError
from hf_emopt.distributed.plan import PlannedParameter
from hf_emopt.optimizers.flat_groups import Flattened
from hf_emopt.routing.matrix_view import MatrixView

SHAPES = [(3, 4), (5,), (2, 3, 2), (1,)]


def pieces(places: list[tuple[Place, ...]], flats: list[torch.Tensor]) -> list[torch.Tensor]:
    """Whole parameters from every rank's flat tensor."""
    found = []
    for ranks in zip(*places):
        runs = []
        for rank, place in enumerate(ranks):
            start, stop = place.spans[rank]
            runs.append(flats[rank][place.offset : place.offset + stop - start])
        found.append(torch.cat(runs))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("gap", [0, 3])
def test_runs_of_equal_size_one_behind_the_other(ranks: int, gap: int) -> None:
    offsets, row = [], torch.empty(0)
    values = [torch.arange(math.prod(shape)) + 100.0 * i for i, shape in enumerate(SHAPES)]
    for value in values:
        offsets.append(row.numel())
        row = torch.cat([row, value, torch.full((gap,), -1.0)])
    size = -(-row.numel() // ranks)
    row = torch.cat([row, torch.full((size * ranks - row.numel(),), -1.0)])
    places = [cut_together(SHAPES, offsets, size, ranks, rank) for rank in range(ranks)]
    for value, found in zip(values, pieces(places, list(row.split(size)))):
        assert torch.equal(value, found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_each_parameter_cut_by_itself(ranks: int) -> None:
    values = [torch.arange(math.prod(shape)) + 100.0 * i for i, shape in enumerate(SHAPES)]
    flats: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for value in values:
        size = -(-value.numel() // ranks)
        padded = torch.cat([value, torch.full((size * ranks - value.numel(),), -1.0)])
        for rank, part in enumerate(padded.split(size)):
            flats[rank].append(part)
    places = [cut_each(SHAPES, ranks, rank, first=5) for rank in range(ranks)]
    assert [place.position for place in places[0]] == [5, 6, 7, 8]
    for value, found in zip(values, pieces(places, [torch.cat(parts) for parts in flats])):
        assert torch.equal(value, found)


def stack(name: str, experts: int, spans: list[tuple[int, int]]) -> PlannedParameter:
    """A flattened stack of ``(experts, 4, 6)``."""
    storage = Storage((experts * 24,), tuple((((a, b),),) for a, b in spans), (tuple(range(len(spans))),))
    matrix_view = MatrixView.whole((experts, 4, 6))
    return PlannedParameter(name, 0, 0, (matrix_view,), (experts * 100,), "float32 cpu", storage)


def test_a_flattened_stack_is_shared_between_matrices() -> None:
    plan = make_plan([stack("experts", 5, [(0, 60), (60, 120)])])
    (bucket,) = plan.buckets
    assert not bucket.local
    assert sorted((s.region, s.matrix_views[0].shape) for s in bucket.owned_regions) == [
        (((0, 48),), (2, 4, 6)),
        (((48, 120),), (3, 4, 6)),
    ]
    assert plan.loads() in ([200, 300], [300, 200])


def test_a_flattened_stack_that_is_cut_between_matrices_stays_where_it_is() -> None:
    plan = make_plan([stack("experts", 4, [(0, 48), (48, 96)])])
    (bucket,) = plan.buckets
    assert bucket.local
    assert [(s.region, s.owner) for s in bucket.owned_regions] == [(((0, 48),), 0), (((48, 96),), 1)]


def test_a_parameter_that_no_flat_tensor_has_is_named() -> None:
    flat = torch.zeros(6)
    grid = Grid(((0,),), 0, 0)
    group: dict[str, Any] = {"name": "matrix", "param_names": ["a", "b"], "params": [flat]}
    tensors = [FlatTensor(flat, 0, cut_together([(2, 3)], [0], 6, 1, 0), grid, flat.device)]
    with pytest.raises(UnsupportedLayoutError, match="no flat tensor has b of group 'matrix'"):
        Flattened([group], tensors)


def saved(span: tuple[int, int], owned: list[list[int]], **entry: torch.Tensor) -> dict[str, Any]:
    group = {"params": [0], "param_names": ["w"], "spans": [list(span)], "shapes": [[4, 3, 2]], "flats": [[0, 0]]}
    return {
        "state": {0: {k.replace("_0", ".0"): v for k, v in entry.items()}},
        "param_groups": [{**group, "owned": [owned]}],
    }


def test_files_of_ranks_become_one() -> None:
    moments, factors = torch.arange(24.0), torch.arange(4.0)
    parts = [
        saved((10, 24), [[0, 6], [18, 24]], step=torch.tensor(3.0), m=moments[10:], L_0=factors[[0, 3]]),
        saved((0, 10), [[6, 18]], step=torch.tensor(3.0), m=moments[:10], L_0=factors[1:3]),
    ]
    whole = merged(parts)
    assert torch.equal(whole["state"][0]["m"], moments.view(4, 3, 2))
    assert torch.equal(whole["state"][0]["L.0"], factors)
    assert whole["param_groups"] == [{"params": [0], "param_names": ["w"]}]
    with pytest.raises(ValueError, match=r"w: .*is one of a rank missing"):
        merged(parts[1:])
    del parts[0]["state"][0]["L.0"]
    with pytest.raises(ValueError, match=r"w: L.0 of some matrices is in none of the files"):
        merged(parts)
