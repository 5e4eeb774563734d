"""Tile shapes by architecture and problem: a shipped table, measured where it says so, and no autotuning.

A configuration is that of the nearest measured problem of the same architecture. Another table, written by
``hf-emopt bench kernels --tune``, takes its place when ``HF_EMOPT_KERNEL_TABLE`` names it.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_emopt.kernels.triton.runtime import variable

TABLE_VARIABLE = "HF_EMOPT_KERNEL_TABLE"
LOW = 2.0**-11
"""Factor of the second part of a split factor, :mod:`hf_emopt.kernels.triton.split_products`."""
# Fields of configurations in tables of earlier versions, and the value that stands for the kernel there still is.
_RETIRED_FIELDS = {"descriptors": True, "clusters": False}


@dataclass(frozen=True)
class Config:
    """How one symmetric product is cut up.

    Attributes:
        block_m, block_n, block_k: tile of the result, and depth of one step of the inner loop. ``block_m`` and ``block_n``
            are equal or one is twice the other.
        num_warps, num_stages: warps a program, and depth of software pipelining.
        group: tiles are launched in squares of ``group`` by ``group``, which decides what the L2 cache holds.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 16


@dataclass(frozen=True)
class Entry:
    """A measured problem, its best configuration, the milliseconds of that, and those of the vendor's general product."""

    batch: int
    m: int
    k: int
    with_c: bool
    config: Config
    ms: float
    general_ms: float


# What ``--tune`` tries. All compile without spills (tests/kernels/test_triton_compile.py).
CANDIDATES: dict[int, tuple[Config, ...]] = {
    90: (
        Config(64, 64, 64, 4, 4),
        Config(64, 128, 64, 4, 3),
        Config(64, 128, 64, 4, 4),
        Config(128, 64, 64, 4, 3),
        Config(128, 64, 64, 4, 4),
        Config(128, 128, 64, 4, 3, group=8),
        Config(128, 128, 64, 4, 3),
        Config(128, 128, 64, 8, 4),
        Config(128, 256, 64, 8, 3),
        Config(128, 256, 64, 8, 4),
        Config(256, 128, 64, 8, 4),
        # Three programs a multiprocessor: tiles on the diagonal, which have code of their own, leave the registers.
        Config(128, 128, 64, 4, 2),
    ),
    100: (Config(128, 128, 64, 4, 3), Config(128, 128, 64, 8, 3)),
}
# Without a measurement: what the sizes suggest.
_DEFAULT = Config(128, 128, 64, 4, 3)
_INTERPRETED = Config(32, 32, 32, 4, 1, group=2)
# Float32 results on sm_90: where there are two tiles or more for every multiprocessor, and below.
_MULTIPROCESSORS = 132  # of the cards that the tables were measured on
WIDE = Config(128, 256, 64, 8, 4)
WIDE_FEW = Config(64, 128, 64, 4, 4)


def family(architecture: int) -> int:
    """The architecture whose configurations serve: 80 for 8.x, 90 for 9.x, 100 for anything later."""
    return 80 if architecture < 90 else 90 if architecture < 100 else 100


def chosen_table() -> str:
    """Another table than the shipped ones, from the environment as it is now; empty for none."""
    return variable(TABLE_VARIABLE)


def table_path(architecture: int) -> Path:
    """The table in use for an architecture; it need not exist."""
    chosen = chosen_table()
    return Path(chosen) if chosen else Path(__file__).parent / "tables" / f"sm_{family(architecture)}.json"


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> tuple[Entry, ...]:
    if not path.exists():
        return ()
    rows = json.loads(path.read_text())["entries"]
    entries = []
    for row in rows:
        fields = dict(row["config"])
        if all(fields.pop(name, value) == value for name, value in _RETIRED_FIELDS.items()):
            try:
                entries.append(Entry(**{**row, "config": Config(**fields)}))
            except TypeError as error:
                raise ValueError(f"{path} is of another version ({error}): {_measure_again(path)}") from error
    if rows and not entries:
        raise ValueError(
            f"all of {path} was measured with kernels that are gone (pointers, clusters): {_measure_again(path)}"
        )
    return tuple(entries)


def _measure_again(path: Path) -> str:
    return f"measure it again with `hf-emopt bench kernels --tune {path.name}`"


def load_table(architecture: int) -> tuple[Entry, ...]:
    """Measured problems of an architecture; empty where nothing was measured.

    Raises:
        ValueError: the table is of another version of this package, or of kernels that are gone.
    """
    return _read(table_path(architecture))


def measured(architecture: int) -> bool:
    """Whether there is a table for this architecture, measured where kernels pay."""
    return len(load_table(architecture)) > 0


def save_table(path: Path, entries: list[Entry], **facts: Any) -> None:
    """Writes a table; ``facts`` say where it was measured (card, versions)."""
    rows = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in entries)
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items())
    path.write_text("{\n" + head + ' "entries": [\n' + rows + "\n ]\n}\n")


@functools.lru_cache(maxsize=4096)
def choose(architecture: int | None, batch: int, m: int, k: int, with_c: bool = False) -> Config:
    """The configuration for ``batch`` products of ``(m, k)``: that of the nearest measured problem. ``architecture`` is the
    compute capability as one number; ``None`` when interpreting."""
    if architecture is None:
        return _INTERPRETED
    entries = [entry for entry in load_table(architecture) if entry.with_c == with_c]

    def distance(entry: Entry) -> tuple[float, float]:
        # The number of tiles decides how a device is filled, the depth how much of its time a tile spends on its ends.
        tiles = math.log2(batch * m * m) - math.log2(entry.batch * entry.m * entry.m)
        return abs(tiles) + abs(math.log2(m / entry.m)) + 0.5 * abs(math.log2(k / entry.k)), entry.ms

    return min(entries, key=distance).config if entries else _DEFAULT


def with_wide_registers(config: Config) -> Config:
    """For a float32 result, whose sums and mirror image are both 32 bits wide."""
    large = config.block_m * config.block_n >= 128 * 128
    return replace(config, num_warps=8) if large and config.num_warps < 8 else config


def choose_wide(architecture: int | None, batch: int, m: int, k: int, with_c: bool = False) -> Config:
    """As :func:`choose`, for a float32 result."""
    if architecture is not None and family(architecture) == 90 and m >= 512:
        tiles = batch * (m / 128) * (m / 256 + 1) / 2
        return WIDE if tiles >= 2 * _MULTIPROCESSORS else WIDE_FEW
    return with_wide_registers(choose(architecture, batch, m, k, with_c))
