"""Times of GPU work: medians, with the L2 cache cleared between calls, eager or replayed from a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

_Name = TypeVar("_Name")
Shape = tuple[int, int, int]
"""Number of matrices, rows, columns."""


def time_ms(function: Callable[[], Any], repeat_ms: float = 60.0, least: int = 5, most: int = 200) -> float:
    """Median milliseconds of one call on the current CUDA device, by events, after two calls of warming up."""
    function()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    count = int(max(least, min(most, repeat_ms / max(start.elapsed_time(end), 1e-3))))
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
    functions: Mapping[_Name, Callable[[], Any]],
    repeat_ms: float = 60.0,
    rounds: int = 3,
    most: int = 200,
    failed: dict[_Name, str] | None = None,
) -> dict[_Name, float]:
    """Median over rounds of :func:`time_ms`, each round in an order of its own, since at a power limit the order counts.

    ``failed`` is given what each function that raises has said, and it is left out; with ``None`` it raises.
    """
    order = random.Random(0)
    times: dict[_Name, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in order.sample(list(times), len(times)):
            try:
                times[name].append(time_ms(functions[name], repeat_ms, most=most))
            except Exception as problem:
                if failed is None:
                    raise
                failed[name] = f"{type(problem).__name__}: {problem}"[:200]
                del times[name]
    return {name: sorted(values)[rounds // 2] for name, values in times.items()}


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
