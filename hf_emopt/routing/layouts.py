"""Builders of :class:`MatrixView` for the ways in which models store several matrices in one parameter.

``parts`` is always a sequence of ``(name, rows)`` in storage order; the rows add up to the outputs of the parameter (of
one group, of one expert). ``head_dim`` asks for one matrix per attention head: an ``int`` for every part or a mapping
from part name to head size (a part that is not named stays whole).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from hf_emopt.routing.matrix_view import MatrixView

Parts = Sequence[tuple[str, int]]
HeadDim = int | Mapping[str, int] | None


def _head_dim(head_dim: HeadDim, name: str) -> int | None:
    return head_dim.get(name) if isinstance(head_dim, Mapping) else head_dim


def _bounds(parts: Parts, total: int) -> list[tuple[str, int, int]]:
    """``(name, start, stop)`` of every part; raises when the parts do not fill ``total`` rows."""
    stops = list(accumulate(size for _, size in parts))
    if not stops or stops[-1] != total:
        raise ValueError(
            f"fused parts {list(parts)} have {stops[-1] if stops else 0} rows, but the parameter has {total}"
        )
    return [(name, stop - size, stop) for (name, size), stop in zip(parts, stops, strict=True)]


def rows(
    shape: Sequence[int], parts: Parts, *, transposed: bool = False, head_dim: HeadDim = None
) -> tuple[MatrixView, ...]:
    """Matrices stored one after the other along the outputs of a 2-D parameter.

    Args:
        shape: ``(out, in)``, or ``(in, out)`` when ``transposed``.
        parts: name and number of outputs of every matrix, in storage order.
        transposed: the outputs are dimension 1, as in GPT-2's ``Conv1D``.
        head_dim: outputs per head; gives a matrix view ``(heads, head_dim, in)`` for the parts that it names.

    Raises:
        ValueError: the parts do not add up to the outputs, or ``head_dim`` does not divide a part.
    """
    out, inp = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    views = []
    for name, start, stop in _bounds(parts, out):
        width = _head_dim(head_dim, name)
        if width is None:
            dim = int(transposed)
            views.append(MatrixView(name, tuple(shape), rows=(dim,), cols=(1 - dim,), dim=dim, start=start, stop=stop))
            continue
        if start % width or stop % width or out % width:
            raise ValueError(f"part {name!r} at rows {start}:{stop} of {out} does not consist of heads of {width} rows")
        cut = {"start": start // width, "stop": stop // width}
        if transposed:
            views.append(MatrixView(name, (inp, out // width, width), rows=(2,), cols=(0,), batch=(1,), dim=1, **cut))
        else:
            views.append(MatrixView(name, (out // width, width, inp), rows=(1,), cols=(2,), batch=(0,), dim=0, **cut))
    return tuple(views)


def heads(shape: Sequence[int], head_dim: int) -> tuple[MatrixView, ...]:
    """One projection ``(heads * head_dim, in)`` as a batch of heads ``(heads, head_dim, in)``."""
    return rows(shape, (("", shape[0]),), head_dim=head_dim)


def grouped_rows(
    shape: Sequence[int], groups: int, parts: Parts, *, head_dim: HeadDim = None
) -> tuple[MatrixView, ...]:
    """Matrices interleaved along the outputs: every one of ``groups`` equal blocks of rows holds a piece of each.

    GPT-NeoX stores ``[q, k, v]`` for head 0, then for head 1, and so on: ``groups`` is the number of heads and every
    part has ``head_dim`` rows. The matrix view gathers the pieces of a part from all groups.

    Args:
        shape: ``(out, in)``.
        parts: name and rows *per group*.
        head_dim: outputs per head, for one matrix per head.

    Raises:
        ValueError: the blocks do not fill the parameter, or ``head_dim`` does not divide a part.
    """
    out, inp = shape
    if out % groups:
        raise ValueError(f"{out} rows do not consist of {groups} equal groups")
    block = out // groups
    views = []
    for name, start, stop in _bounds(parts, block):
        width = _head_dim(head_dim, name)
        if width is None:
            views.append(MatrixView(name, (groups, block, inp), rows=(0, 1), cols=(2,), dim=1, start=start, stop=stop))
            continue
        if start % width or stop % width or block % width:
            raise ValueError(
                f"part {name!r} at rows {start}:{stop} of {block} does not consist of heads of {width} rows"
            )
        view = (groups, block // width, width, inp)
        cut = {"start": start // width, "stop": stop // width}
        views.append(MatrixView(name, view, rows=(2,), cols=(3,), batch=(0, 1), dim=1, **cut))
    return tuple(views)


def expert_stack(
    shape: Sequence[int], names: Sequence[str] = (), *, transposed: bool = False, interleaved: bool = False
) -> tuple[MatrixView, ...]:
    """A stack of experts ``(E, out, in)``, or ``(E, in, out)`` when ``transposed``, as a batch of ``E`` matrices.

    Args:
        names: names of equal matrices fused along the outputs (``("gate", "up")``); none or one for a single matrix.
        transposed: the outputs are the last dimension.
        interleaved: output ``i`` belongs to matrix ``i % len(names)`` (GPT-OSS), instead of block after block.
    """
    dims = tuple(shape)
    out_dim, in_dim = (2, 1) if transposed else (1, 2)
    if len(names) <= 1:
        return (MatrixView(names[0] if names else "", dims, rows=(out_dim,), cols=(in_dim,), batch=(0,)),)
    out, count = dims[out_dim], len(names)
    if out % count:
        raise ValueError(f"{out} outputs per expert cannot hold {count} fused matrices {tuple(names)}")
    views = []
    for i, name in enumerate(names):
        cut = (i, out, count) if interleaved else (i * (out // count), (i + 1) * (out // count), 1)
        views.append(MatrixView(name, dims, (out_dim,), (in_dim,), (0,), out_dim, *cut))
    return tuple(views)


def conv(shape: Sequence[int], groups: int) -> tuple[MatrixView, ...]:
    """A convolution ``(out, in / g, *kernel)`` as ``g`` matrices ``(out / g, in / g * prod(kernel))``."""
    out, inp, *kernel = shape
    if groups == 1:
        return (MatrixView("", tuple(shape), rows=(0,), cols=tuple(range(1, len(shape)))),)
    view = (groups, out // groups, inp * math.prod(kernel))
    return (MatrixView("", view, rows=(1,), cols=(2,), batch=(0,)),)


def transposed_conv(shape: Sequence[int], groups: int) -> tuple[MatrixView, ...]:
    """A transposed convolution ``(in, out / g, *kernel)`` as ``g`` matrices ``(out / g * prod(kernel), in / g)``.

    Every input pixel is mapped to a patch of outputs, so the kernel counts with the outputs.
    """
    inp, out, *kernel = shape
    view = (groups, inp // groups, out * math.prod(kernel))
    if groups == 1:
        return (MatrixView("", view[1:], rows=(1,), cols=(0,)),)
    return (MatrixView("", view, rows=(2,), cols=(1,), batch=(0,)),)
