"""The route of every parameter, as data and as a table to read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from hf_emopt.routing.lora import Adapter
from hf_emopt.routing.matrix_view import MatrixView


@dataclass(frozen=True)
class ParameterRoute:
    """Where one parameter goes.

    Attributes:
        name: its name in ``model.named_parameters()``.
        shape: global shape, before any sharding.
        kind: ``"matrix"``: its matrix views are transformed as matrices; ``"aux"``: it is updated elementwise.
        matrix_views: the matrices inside it, which cover each element once; empty for ``"aux"``.
        decay: whether weight decay applies.
        module_type: class of the module that owns it.
        aliases: its other names, for a tied weight.
        role: ``"linear"``, ``"attention"``, ``"expert"``, ``"conv"``, ``"adapter"`` for matrices; ``"embedding"``,
            ``"head"``, ``"router"``, ``"norm"``, ``"bias"``, ``"gain"``, ``"depthwise"``, ``"bare"`` ... for others.
        adapter: its role in a LoRA adapter; ``None`` outside adapters.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    matrix_views: tuple[MatrixView, ...]
    decay: bool
    reason: str
    module_type: str
    aliases: tuple[str, ...] = ()
    role: str = ""
    adapter: Adapter | None = None

    @property
    def matrix_count(self) -> int:
        """Transforms in an optimizer step: a LoRA pair that is stepped as one counts with its B."""
        if self.adapter is not None and self.adapter.joint and self.adapter.side == "A":
            return 0
        return sum(view.shape[0] for view in self.matrix_views)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class RouteTable(Sequence[ParameterRoute]):
    """Routes of all parameters, in the order of ``model.named_parameters()``; printed with repeated layers folded."""

    def __init__(self, routes: Sequence[ParameterRoute]) -> None:
        self._routes = tuple(routes)

    @overload
    def __getitem__(self, index: int) -> ParameterRoute: ...
    @overload
    def __getitem__(self, index: slice) -> RouteTable: ...
    def __getitem__(self, index: int | slice) -> ParameterRoute | RouteTable:
        return RouteTable(self._routes[index]) if isinstance(index, slice) else self._routes[index]

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[ParameterRoute]:
        return iter(self._routes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RouteTable) and self._routes == other._routes

    def __hash__(self) -> int:
        return hash(self._routes)

    @cached_property
    def by_name(self) -> dict[str, ParameterRoute]:
        """Routes by parameter name, aliases included."""
        names = {alias: route for route in self._routes for alias in route.aliases}
        names.update((route.name, route) for route in self._routes)
        return names

    @property
    def matrices(self) -> list[ParameterRoute]:
        return [route for route in self._routes if route.kind == "matrix"]

    @property
    def aux(self) -> list[ParameterRoute]:
        return [route for route in self._routes if route.kind == "aux"]

    @property
    def matrix_numel(self) -> int:
        """Elements inside matrices."""
        return sum(route.numel for route in self.matrices)

    @property
    def aux_numel(self) -> int:
        """Elements updated elementwise."""
        return sum(route.numel for route in self.aux)

    @property
    def matrix_count(self) -> int:
        """Number of matrices that one optimizer step transforms."""
        return sum(route.matrix_count for route in self.matrices)

    def collapsed(self) -> list[dict[str, Any]]:
        """Rows of the printed table: parameters that differ in layer numbers only are one row.

        Rows have ``name`` (``model.layers.{0..29}.mlp.up_proj.weight``), ``count``, ``shape``, ``kind``, ``units`` (text),
        ``decay``, ``reason`` and ``numel`` (of all ``count`` parameters).
        """
        groups: dict[tuple[Any, ...], list[ParameterRoute]] = {}
        for route in self._routes:
            template = tuple("{}" if part.isdigit() else part for part in route.name.split("."))
            key = (template, route.shape, route.kind, route.matrix_views, route.decay, route.reason, len(route.aliases))
            groups.setdefault(key, []).append(route)
        return [
            _row(folded, [route for route in routes if _numbers(route.name) in members])
            for routes in groups.values()
            for folded, members in _fold([route.name for route in routes])
        ]

    def __str__(self) -> str:
        rows = self.collapsed()
        header = ("parameter", "count", "shape", "route", "matrices inside", "decay", "elements", "why")
        cells = [header] + [
            (
                row["name"], f"x{row['count']}", "x".join(map(str, row["shape"])) or "scalar", row["kind"],
                row["units"] or "-", "yes" if row["decay"] else "no", f"{row['numel']:,}", row["reason"],
            )
            for kind in ("matrix", "aux") for row in rows if row["kind"] == kind
        ]  # fmt: skip
        widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
        lines = []
        for line in cells:
            padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
            for column in (1, 6):  # numbers
                padded[column] = line[column].rjust(widths[column])
            lines.append("  ".join(padded).rstrip())
        lines.insert(1, "-" * min(max(map(len, lines)), 160))
        total = self.matrix_numel + self.aux_numel
        share = 100 * self.matrix_numel / total if total else 0.0
        lines.append(
            f"{self.matrix_count:,} matrices in {len(self.matrices):,} parameters, {self.matrix_numel:,} of {total:,} "
            f"elements ({share:.1f} %); {len(self.aux):,} parameters, {self.aux_numel:,} elements elementwise"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON-ready data: ``parameters`` (one entry each) and ``totals``."""
        total = self.matrix_numel + self.aux_numel
        keys = ("name", "shape", "kind", "role", "decay", "reason", "module_type", "aliases")
        parameters = []
        for route in self._routes:
            values = [getattr(route, key) for key in keys]
            entry = {key: list(v) if isinstance(v, tuple) else v for key, v in zip(keys, values)}
            units = [{"name": view.name, "shape": list(view.shape)} for view in route.matrix_views]
            parameters.append({**entry, "units": units})
        return {
            "parameters": parameters,
            "totals": {
                "parameters": len(self),
                "matrices": self.matrix_count,
                "matrix_numel": self.matrix_numel,
                "aux_numel": self.aux_numel,
                "matrix_share": self.matrix_numel / total if total else 0.0,
            },
        }


def _row(name: str, routes: Sequence[ParameterRoute]) -> dict[str, Any]:
    """One row of the printed table for routes that are alike."""
    first = routes[0]
    tied = f"; tied with {', '.join(first.aliases)}" if first.aliases else ""
    # Batch, outputs and inputs of every matrix view: "q 1x2048x2048, k 1x512x2048".
    units = [f"{view.name} {'x'.join(map(str, view.shape))}".strip() for view in first.matrix_views]
    return {
        "name": name,
        "count": len(routes),
        "shape": first.shape,
        "kind": first.kind,
        "units": ", ".join(units),
        "decay": first.decay,
        "reason": first.reason + tied,
        "numel": sum(route.numel for route in routes),
    }


def _numbers(name: str) -> tuple[int, ...]:
    """Components of a dotted name that are numbers."""
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _fold(names: Sequence[str]) -> list[tuple[str, set[tuple[int, ...]]]]:
    """Short names for names that differ in numbers, each with the numbers that it stands for.

    ``layers.{0..3}.fc`` stands for four; numbers that do not fill a grid (``0.1``, ``1.0``, ``1.1``) give several.
    """
    template = ["{}" if part.isdigit() else part for part in names[0].split(".")]
    folded = []
    for grid in _grids({_numbers(name) for name in names}):
        slots = iter(grid)
        parts = [_ranges(next(slots)) if part == "{}" else part for part in template]
        folded.append((".".join(parts), set(itertools.product(*grid))))
    return folded


def _grids(points: set[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Splits points into full grids, each given by its values along every dimension."""
    if points == {()}:
        return [()]
    tails: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for head in sorted({point[0] for point in points}):
        tails.setdefault(frozenset(point[1:] for point in points if point[0] == head), []).append(head)
    return [(tuple(heads), *grid) for tail, heads in tails.items() for grid in _grids(set(tail))]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def coverage_warning(table: RouteTable, threshold: float = 0.5) -> str | None:
    """A message when matrices hold less than ``threshold`` of the elements outside embeddings and heads, else None.

    A low share means that the matrix optimizer hardly runs: the model keeps its weights in a form that no rule knows.
    """
    body = [r for r in table if r.role not in ("embedding", "head") and r.reason != "the group says so"]
    total = sum(route.numel for route in body)
    if total == 0 or table.matrix_numel >= threshold * total:
        return None
    left = sorted((r for r in body if r.kind == "aux"), key=lambda r: -r.numel)[:3]
    largest = "; ".join(f"{r.name} {'x'.join(map(str, r.shape))} ({r.reason})" for r in left)
    return (
        f"only {100 * table.matrix_numel / total:.1f} % of the {total:,} elements outside embeddings and heads are in "
        f"matrices. Largest others: {largest}. Name them in matrix_modules, or add a rule with register_architecture."
    )
