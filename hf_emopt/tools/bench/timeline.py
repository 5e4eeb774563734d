"""Where the milliseconds of a profiled step go on the device: by kind of kernel, by stream, and where nothing runs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

_KINDS = (
    ("collective", "nccl"),
    ("product", "gemm|cutlass|symmetric|syrk|split_product|nvjet|small_gram|xmma|sm90_|sm80_|cublas"),
    ("copy", "memcpy|memset|copy|catarray"),
)
"""Kinds of kernels by parts of their names; what matches none is elementwise work or a reduction."""


@dataclass
class Timeline:
    """Milliseconds of device time in a trace.

    Attributes:
        span, busy: from the first kernel's start to the last one's end, and of it with at least one kernel running.
        by_kind, by_stream: sums over kernels.
        alone: by kind, the time in which no kernel of another kind ran.
        largest: the kernels with the largest sums, ``(name, sum, launches)``.
    """

    span: float = 0.0
    busy: float = 0.0
    by_kind: dict[str, float] = field(default_factory=dict)
    by_stream: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    kernels: int = 0
    largest: list[tuple[str, float, int]] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{k} {v:.2f} (alone {self.alone.get(k, 0.0):.2f})" for k, v in sorted(self.by_kind.items()))
        lines = [f"{self.kernels} kernels in {self.span:.2f} ms, {self.busy:.2f} ms busy: {kinds}"]
        lines += [f"{ms:9.3f} ms {count:6d} x {name[:110]}" for name, ms, count in self.largest]
        return "\n".join(lines)


def kind_of(name: str) -> str:
    """``"collective"``, ``"product"``, ``"copy"`` or ``"elementwise"`` by a kernel's name."""
    return next((kind for kind, parts in _KINDS if re.search(parts, name.lower())), "elementwise")


def timeline(trace: Any) -> Timeline:
    """Sums up the device side of a finished ``torch.profiler.profile``, with the names of the 20 largest kernels."""
    found = [e for e in trace.profiler.kineto_results.events() if str(e.device_type()).endswith("CUDA")]
    # Ranges that the profiler draws around kernels are no kernels.
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns(), e.name(), e.device_resource_id()) for e in found]
    ranges = ("ProfilerStep", "nccl:", "Optimizer.")
    return sum_up([s for s in spans if s[1] > s[0] and not s[2].startswith(ranges)])


def sum_up(spans: list[tuple[int, int, str, int]]) -> Timeline:
    """As :func:`timeline`, of ``(start, stop, name, stream)`` in nanoseconds."""
    result = Timeline(kernels=len(spans))
    if not spans:
        return result
    sums: dict[str, float] = defaultdict(float)
    by_kind: dict[str, float] = defaultdict(float)
    by_stream: dict[str, float] = defaultdict(float)
    edges: list[tuple[int, int, str]] = []
    for start, stop, name, stream in spans:
        kind, ms = kind_of(name), (stop - start) * 1e-6
        sums[name] += ms
        by_kind[kind] += ms
        by_stream[str(stream)] += ms
        edges += [(start, 1, kind), (stop, -1, kind)]
    result.by_kind, result.by_stream = dict(by_kind), dict(by_stream)
    result.span = (max(s[1] for s in spans) - min(s[0] for s in spans)) * 1e-6
    result.busy, result.alone = _overlaps(edges)
    launches = Counter(name for *_, name, _ in spans)
    result.largest = [(name, sums[name], launches[name]) for name in sorted(sums, key=lambda name: -sums[name])[:20]]
    return result


def _overlaps(edges: list[tuple[int, int, str]]) -> tuple[float, dict[str, float]]:
    """Milliseconds with any kernel running, and with those of one kind only."""
    running: dict[str, int] = defaultdict(int)
    alone: dict[str, float] = defaultdict(float)
    busy, last = 0.0, 0
    for at, change, kind in sorted(edges):
        active = [k for k, n in running.items() if n]
        if active:
            busy += (at - last) * 1e-6
            if len(active) == 1:
                alone[active[0]] += (at - last) * 1e-6
        running[kind] += change
        last = at
    return busy, dict(alone)
