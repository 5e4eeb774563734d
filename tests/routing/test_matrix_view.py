"""A matrix view leads from a stored parameter to matrices and back, without losing or touching an element."""

from __future__ import annotations

import pytest
import torch

from hf_emopt.routing import MatrixView
from hf_emopt.routing.layouts import conv, expert_stack, grouped_rows, heads, rows, transposed_conv

LAYOUTS = {
    "plain": ((6, 4), (MatrixView.whole((6, 4)),)),
    "transposed": ((6, 4), (MatrixView.whole((6, 4), transposed=True),)),
    "stack": ((3, 6, 4), (MatrixView.whole((3, 6, 4)),)),
    "rows": ((12, 5), rows((12, 5), [("q", 6), ("k", 2), ("v", 4)])),
    "columns": ((5, 12), rows((5, 12), [("q", 4), ("k", 4), ("v", 4)], transposed=True)),
    "rows by head": ((12, 5), rows((12, 5), [("q", 6), ("k", 2), ("v", 4)], head_dim=2)),
    "columns by head": ((5, 12), rows((5, 12), [("q", 4), ("k", 4), ("v", 4)], transposed=True, head_dim=2)),
    "some by head": ((12, 5), rows((12, 5), [("q", 6), ("gate", 6)], head_dim={"q": 3})),
    "grouped": ((24, 5), grouped_rows((24, 5), 3, [("q", 4), ("k", 2), ("v", 2)])),
    "grouped by head": ((24, 5), grouped_rows((24, 5), 3, [("q", 4), ("k", 2), ("v", 2)], head_dim=2)),
    "experts": ((3, 8, 5), expert_stack((3, 8, 5), ("gate", "up"))),
    "experts transposed": ((3, 5, 8), expert_stack((3, 5, 8), ("gate", "up"), transposed=True)),
    "experts interleaved": ((3, 5, 8), expert_stack((3, 5, 8), ("gate", "up"), transposed=True, interleaved=True)),
    "convolution": ((6, 4, 3, 2), conv((6, 4, 3, 2), 1)),
    "grouped convolution": ((6, 4, 3), conv((6, 4, 3), 2)),
    "transposed convolution": ((4, 6, 3), transposed_conv((4, 6, 3), 1)),
    "transposed grouped convolution": ((4, 3, 2, 2), transposed_conv((4, 3, 2, 2), 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrix_views_cover_every_element_once(layout: str) -> None:
    shape, matrix_views = LAYOUTS[layout]
    source = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32).reshape(shape)
    pieces = [matrix_view.extract(source) for matrix_view in matrix_views]
    assert [tuple(piece.shape) for piece in pieces] == [matrix_view.shape for matrix_view in matrix_views]
    assert sum(matrix_view.numel for matrix_view in matrix_views) == source.numel()
    # Each element occurs in exactly one matrix view ...
    assert torch.cat([piece.flatten() for piece in pieces]).sort().values.equal(source.flatten())
    # ... and goes back to its own place.
    target = torch.zeros_like(source)
    for matrix_view, piece in zip(matrix_views, pieces, strict=True):
        matrix_view.insert(target, piece)
    assert target.equal(source)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_insert_leaves_the_rest_alone(layout: str) -> None:
    shape, matrix_views = LAYOUTS[layout]
    for matrix_view in matrix_views:
        target = torch.zeros(shape)
        matrix_view.insert(target, torch.ones(matrix_view.shape))
        assert int(target.sum()) == matrix_view.numel


def test_extract_knows_rows_from_columns() -> None:
    source = torch.arange(24.0).reshape(2, 3, 4)
    assert MatrixView.whole((2, 3, 4)).extract(source).equal(source)
    assert MatrixView.whole((2, 3, 4), transposed=True).extract(source).equal(source.mT)
    gate, up = expert_stack((2, 3, 4), ("gate", "up"), transposed=True, interleaved=True)
    assert gate.extract(source).equal(source[..., ::2].mT)
    assert up.extract(source).equal(source[..., 1::2].mT)


def test_head_batches() -> None:
    source = torch.arange(60.0).reshape(12, 5)
    (matrix_view,) = heads((12, 5), 3)
    assert matrix_view.extract(source).equal(source.view(4, 3, 5))
    q = grouped_rows((12, 5), 2, [("q", 4), ("k", 2)], head_dim=2)[0]
    assert q.extract(source).equal(torch.stack([source[0:2], source[2:4], source[6:8], source[8:10]]))


def test_extract_is_a_view_and_keeps_dtype() -> None:
    parameter = torch.zeros(12, 5, dtype=torch.bfloat16)
    _, k, _ = rows((12, 5), [("q", 6), ("k", 2), ("v", 4)])
    k.extract(parameter).fill_(1.0)
    assert parameter[6:8].eq(1).all()
    assert parameter.sum() == 10
    assert k.extract(parameter).dtype is torch.bfloat16


def test_insert_refuses_a_target_that_would_be_copied() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        MatrixView.whole((4, 3)).insert(torch.zeros(3, 4).t(), torch.ones(1, 4, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"view": (4, 3), "rows": (0,), "cols": ()}, "must name each"),
        ({"view": (4, 3), "rows": (0, 1), "cols": ()}, "rows and columns"),
        ({"view": (4, 3), "rows": (0,), "cols": (1,), "dim": 0, "start": 2, "stop": 5}, "outside dimension 0"),
        ({"view": (4, 3), "rows": (0,), "cols": (1,), "dim": 0, "start": 2, "stop": 2}, "outside dimension 0"),
    ],
)
def test_impossible_matrix_views_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixView("u", **arguments)  # type: ignore[arg-type]


def test_builders_refuse_parts_that_do_not_fill() -> None:
    with pytest.raises(ValueError, match="10 rows, but the parameter has 12"):
        rows((12, 5), [("q", 6), ("k", 4)])
    with pytest.raises(ValueError, match="heads of 4 rows"):
        rows((12, 5), [("q", 6), ("k", 6)], head_dim=4)
    with pytest.raises(ValueError, match="5 equal groups"):
        grouped_rows((12, 5), 5, [("q", 2)])
    with pytest.raises(ValueError, match="cannot hold 2"):
        expert_stack((3, 7, 5), ("gate", "up"))
