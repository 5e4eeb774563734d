"""Tile shapes by architecture and problem: a shipped table, measured where it says so, and no autotuning.

A configuration is chosen by the nearest measured problem of the same architecture. Another table, written by
``hf-emopt bench kernels --tune``, takes its place when ``HF_EMOPT_KERNEL_TABLE`` names it.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_emopt.kernels.triton.runtime import variable

__all__ = [
    "CANDIDATES",
    "Config",
    "Entry",
    "choose",
    "choose_wide",
    "chosen_table",
    "load_table",
    "measured",
    "table_path",
]

TABLE_VARIABLE = "HF_EMOPT_KERNEL_TABLE"


@dataclass(frozen=True)
class Config:
    """How one symmetric product is cut up.

    Attributes:
        block_m, block_n, block_k: tile of the result, and depth of one step of the inner loop. ``block_m`` and ``block_n``
            are equal or one is twice the other.
        num_warps, num_stages: warps a program, and depth of software pipelining.
        descriptors: load and store by tensor descriptors (sm_90 and later, 16-byte rows) or by pointers.
        group: tiles are launched in squares of ``group`` by ``group``, which decides what the L2 cache holds.
        clusters: two multiprocessors read together what both need, and a tile is stored while the next is summed
            (:mod:`hf_emopt.kernels.hopper`), where the problem allows it; else as without. Its tiles are of 128 by 256.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    descriptors: bool = True
    group: int = 16
    clusters: bool = False


@dataclass(frozen=True)
class Entry:
    """A measured problem, with or without ``+ beta C``, its best configuration, the milliseconds of that, and those of the
    vendor's general product."""

    batch: int
    m: int
    k: int
    with_c: bool
    config: Config
    ms: float
    general_ms: float


# What ``--tune`` tries. All compile without spills, but for some bytes on clusters with a C
# (tests/kernels/test_triton_compile.py, test_clusters.py).
CANDIDATES: dict[int, tuple[Config, ...]] = {
    80: (
        Config(128, 128, 32, 8, 4, descriptors=False),
        Config(64, 128, 32, 4, 4, descriptors=False),
        Config(64, 64, 32, 4, 4, descriptors=False),
    ),
    90: (
        Config(64, 64, 64, 4, 4),
        Config(64, 128, 64, 4, 3),
        Config(64, 128, 64, 4, 4, descriptors=False),
        Config(64, 128, 64, 4, 4),
        Config(128, 64, 64, 4, 3),
        Config(128, 64, 64, 4, 4),
        Config(128, 128, 64, 4, 3, group=8),
        Config(128, 128, 64, 4, 3),
        Config(128, 128, 64, 8, 4),
        Config(128, 256, 64, 8, 3, group=8),
        Config(128, 256, 64, 8, 3),
        Config(128, 256, 64, 8, 4),
        Config(256, 128, 64, 8, 4),
        # Three programs a multiprocessor, with the registers that the variant `diagonal` leaves.
        Config(128, 128, 64, 4, 2),
        Config(128, 128, 32, 4, 4),
        Config(128, 256, 64, 8, 4, group=8, clusters=True),
    ),
    100: (
        Config(128, 128, 64, 4, 3),
        Config(128, 128, 64, 8, 3),
        Config(128, 128, 64, 8, 3, descriptors=False),
    ),
}
# Without a measurement: what the sizes suggest.
_DEFAULTS = {
    80: Config(128, 128, 32, 8, 4, descriptors=False),
    90: Config(128, 128, 64, 4, 3),
    100: Config(128, 128, 64, 4, 3),
}
# Float32 results on sm_90: where there are two tiles or more for every multiprocessor, and below.
_MULTIPROCESSORS = 132  # of the cards that the tables were measured on
WIDE = Config(128, 256, 64, 8, 4)
WIDE_FEW = Config(64, 128, 64, 4, 4)
# Where strides or addresses rule descriptors out.
POINTERS = Config(128, 128, 32, 8, 3, descriptors=False)


def family(architecture: int) -> int:
    """The architecture whose configurations serve: 80 for 8.x, 90 for 9.x, 100 for anything later."""
    return 80 if architecture < 90 else 90 if architecture < 100 else 100


def chosen_table() -> str:
    """Another table than the shipped ones, from the environment; empty for none. Read at every call, so that a
    measurement can change it."""
    return variable(TABLE_VARIABLE)


def table_path(architecture: int) -> Path:
    """The table in use for an architecture; it need not exist."""
    chosen = chosen_table()
    return Path(chosen) if chosen else Path(__file__).parent / "tables" / f"sm_{family(architecture)}.json"


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> tuple[dict[str, Any], tuple[Entry, ...]]:
    if not path.exists():
        return {}, ()
    content = json.loads(path.read_text())
    known = {field.name for field in fields(Config)}
    for row in content["entries"]:
        if unknown := sorted(set(row["config"]) - known):
            raise ValueError(
                f"{path} is of another version: it has configurations with {', '.join(unknown)}. Measure it again with "
                f"`hf-emopt bench kernels --tune {path.name}`"
            )
    entries = tuple(
        Entry(row["batch"], row["m"], row["k"], row["with_c"], Config(**row["config"]), row["ms"], row["general_ms"])
        for row in content["entries"]
    )
    return {key: value for key, value in content.items() if key != "entries"}, entries


def load_table(architecture: int) -> tuple[Entry, ...]:
    """Measured problems of an architecture; empty where nothing was measured."""
    return _read(table_path(architecture))[1]


def measured(architecture: int) -> bool:
    """Whether the kernels have been shown to pay on this architecture."""
    return len(load_table(architecture)) > 0


def save_table(path: Path, entries: list[Entry], **facts: Any) -> None:
    """Writes a table; ``facts`` say where it was measured (card, versions)."""
    dicts = [asdict(entry) for entry in entries]
    for row in dicts:
        if not row["config"]["clusters"]:
            del row["config"]["clusters"]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in dicts)
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    path.write_text("{\n" + head + ' "entries": [\n' + rows + "\n ]\n}\n")


@functools.lru_cache(maxsize=4096)
def choose(
    architecture: int | None, batch: int, m: int, k: int, with_c: bool = False, clusters: bool = False
) -> Config:
    """The configuration for ``batch`` products of ``(m, k)``: that of the nearest measured problem.

    Args:
        architecture: compute capability as one number; ``None`` when interpreting.
        clusters: the product can run on clusters. A problem has an entry with them beside the one without where they are
            faster.
    """
    if architecture is None:
        return Config(32, 32, 32, 4, 1, descriptors=False, group=2)
    entries = tuple(
        entry for entry in load_table(architecture) if entry.with_c == with_c and entry.config.clusters <= clusters
    )
    if not entries:
        return _DEFAULTS[family(architecture)]

    def distance(entry: Entry) -> tuple[float, float]:
        # The number of tiles decides how a device is filled, the depth how much a tile costs beside its ends.
        tiles = math.log2(batch * m * m) - math.log2(entry.batch * entry.m * entry.m)
        return abs(tiles) + abs(math.log2(m / entry.m)) + 0.5 * abs(math.log2(k / entry.k)), entry.ms

    return min(entries, key=distance).config


def with_wide_registers(config: Config) -> Config:
    """For a float32 result: what is summed and its mirror image are both 32 bits wide."""
    large = config.block_m * config.block_n >= 128 * 128
    return replace(config, num_warps=8) if large and config.num_warps < 8 else config


def choose_wide(architecture: int | None, batch: int, m: int, k: int, with_c: bool = False) -> Config:
    """As :func:`choose`, for a float32 result.

    On an H200, 16 results of 2048 x 2048 of that depth, added to, took 18.5 microseconds each with tiles of 128 x 256, 21.4
    with 64 x 128, and 24.7 with the 128 x 128 of the table.
    """
    if architecture is not None and family(architecture) == 90 and m >= 512:
        tiles = batch * (m / 128) * (m / 256 + 1) / 2
        return WIDE if tiles >= 2 * _MULTIPROCESSORS else WIDE_FEW
    return with_wide_registers(choose(architecture, batch, m, k, with_c))
