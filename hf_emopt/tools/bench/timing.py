"""Times of GPU work: medians, with the L2 cache cleared between calls, eager or replayed from a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_Name = TypeVar("_Name")
Shape = tuple[int, int, int]
"""Number of matrices, rows, columns."""


def time_ms(function: Callable[[], Any], repeat_ms: float) -> float:
    """Median milliseconds of one call on the current CUDA device, by events, after two calls of warming up.

    The median is over 5 to 200 calls, as many as fit into ``repeat_ms``."""
    function()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    count = int(max(5, min(200, repeat_ms / max(start.elapsed_time(end), 1e-3))))
    cache = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")  # larger than any L2 cache so far
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for before, after in events:
        cache.zero_()
        before.record()
        function()
        after.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in events)
    return float(times[count // 2])


def in_turn(
    functions: Mapping[_Name, Callable[[], Any]], repeat_ms: float, failed: dict[_Name, str] | None = None
) -> dict[_Name, float]:
    """Median over three rounds of :func:`time_ms`, each in an order of its own, since at a power limit the order counts.

    A function that raises is left out, and ``failed`` gets its message; with ``None`` the error is raised.
    """
    order = random.Random(0)
    times: dict[_Name, list[float]] = {name: [] for name in functions}
    for _ in range(3):
        for name in order.sample(list(times), len(times)):
            try:
                times[name].append(time_ms(functions[name], repeat_ms))
            except Exception as problem:
                if failed is None:
                    raise
                failed[name] = said(problem)
                del times[name]
    return {name: sorted(values)[1] for name, values in times.items()}


def said(problem: Exception) -> str:
    """The kind and the beginning of an error's message, for a table."""
    return f"{type(problem).__name__}: {problem}"[:200]


def relative_error(value: Tensor, reference: Tensor) -> float:
    """``|value - reference|_F / |reference|_F``, in float32."""
    return ((value.float() - reference).norm() / reference.norm()).item()


def is_short(batch: int, m: int, k: int) -> bool:
    """Whether ``(m, k) x (k, m)`` may take less time than its launch: it is timed as a graph of eight, with its L2 hits."""
    return 2 * batch * m * m * k < 1.5e11


def graphed(function: Callable[[], Any]) -> Callable[[], Any]:
    """The same work as the replay of a CUDA graph, which costs the host one launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def device_facts() -> dict[str, str]:
    """The card and the versions that a table must name."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }
