"""Programs that stay, compiled for sm_90 without one: what the assembler says, and what the instructions do."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

import ptx_trace  # noqa: E402
from triton_compiler import assembler_warnings, compiled, registers, spilled_bytes  # noqa: E402

from hf_emopt.linalg.triton.configs import CANDIDATES, Config  # noqa: E402
from hf_emopt.linalg.triton.persistent_kernels import persistent_product_kernel  # noqa: E402
from hf_emopt.linalg.triton.persistent_launch import PROGRAMS, schedule  # noqa: E402

TILES_AT, BOUNDS_AT = 1 << 28, 1 << 29
STAYING = tuple(config for config in CANDIDATES[90] if config.persistent)
# A A^T that is corrected, and two factors, as they lie or transposed.
EVERY = [(config, *rest) for config in STAYING for rest in ((True, False, 2), (False, True, 0), (False, False, 1))]


@functools.cache
def product(config: Config, same: bool, trans: bool, corrected: int) -> Any:
    def block(rows: int, cols: int) -> str:
        return f"tensordesc<fp16[1,{rows},{cols}]>"

    factor = block(*((config.block_k, config.block_m) if trans else (config.block_m, config.block_k)))
    types = {
        "a_desc": factor,
        "b_desc": factor,
        "d_desc": block(config.block_m, config.block_m // 2),
        **dict.fromkeys(("alpha", "diagonal"), "fp32"),
        **dict.fromkeys(("tiles_ptr", "bounds_ptr"), "*i32"),
        "correction_ptr": "*fp32",
    }
    constants = {
        "TRANS": trans,
        "BLOCK": config.block_m,
        "BLOCK_K": config.block_k,
        "UPCAST": False,
        "CORRECTED": corrected,
        "ONE": same,
        **({} if corrected else {"correction_ptr": None}),
        **({"b_desc": None} if same else {}),
    }
    return compiled(persistent_product_kernel, types, constants, 90, config.num_warps, config.num_stages)


@pytest.mark.parametrize(("config", "same", "trans", "corrected"), EVERY, ids=str)
def test_every_candidate(config: Config, same: bool, trans: bool, corrected: int, tmp_path: Path) -> None:
    kernel = product(config, same, trans, corrected)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert spilled_bytes(kernel, tmp_path) == 0
    assert "serialized" not in assembler_warnings(kernel, tmp_path)
    # As many programs as planned fit into a multiprocessor: 64 Ki registers and 228 KiB, of which 1 KiB a program is taken.
    assert -(-registers(kernel, tmp_path) // 8) * 8 * 32 * config.num_warps * PROGRAMS <= 65536
    assert (kernel.metadata.shared + 1024) * PROGRAMS <= 228 * 1024
    # One group of matrix instructions stays in flight: in every loop, as in a product of one tile a program.
    assert len(re.findall(r"wgmma\.wait_group\.sync\.aligned 1;", ptx)) == 2
    # Nothing reads the sums between two groups: no selection of zeros, which is how a flattened loop starts a tile.
    assert not [line for line in ptx.splitlines() if "selp.f32" in line and "0f00000000, %r" in line]


M, K, BATCH, COUNT = 896, 256, 2, 9


def traced(ptx: str, config: Config, trans: bool, corrected: int, program: int) -> ptx_trace.Trace:
    """One program's part of two products of 896 x 256."""
    found = schedule(M, BATCH, COUNT, config.block_m, config.group)
    memory = {TILES_AT + 12 * i + 4 * j: v for i, tile in enumerate(found.tiles) for j, v in enumerate(tile)}
    memory |= {BOUNDS_AT + 12 * i + 4 * j: v for i, bounds in enumerate(found.bounds) for j, v in enumerate(bounds)}
    numbers = ptx_trace.parameters(ptx)
    tiles, bounds = numbers["pointers"][1 if corrected else 0 :][:2]
    inner, outer = (64, config.block_k) if trans else (config.block_k, config.block_m)
    rows = [config.block_m] * (len(numbers["descriptors"]) - 1)
    sizes = {n: 2 * inner * (outer if trans else r) for n, r in zip(numbers["descriptors"], rows, strict=False)}
    values = {tiles: TILES_AT, bounds: BOUNDS_AT, numbers["integers"][-1]: K}
    return ptx_trace.run(ptx, config.num_warps, program, values, memory, sizes)


def expected_tiles(config: Config, program: int) -> list[tuple[int, int, int]]:
    """Matrix, row and column of every tile of a program."""
    found = schedule(M, BATCH, COUNT, config.block_m, config.group)
    below, _, end = found.bounds[program]
    return list(found.tiles[below:end])


def stored(config: Config, batch: int, row: int, col: int) -> set[tuple[int, ...]]:
    """Corners of 64 columns and a tile's height that a tile and its mirror consist of, innermost first."""
    return {(x + part, y, batch) for y, x in ((row, col), (col, row)) for part in range(0, config.block_m, 64)}


@pytest.mark.parametrize(("config", "same", "trans", "corrected"), EVERY, ids=str)
def test_compiled_programs_multiply_and_store_the_right_blocks(
    config: Config, same: bool, trans: bool, corrected: int
) -> None:
    """What a compiler makes of integers that loops carry cannot be seen in the interpreter."""
    found = schedule(M, BATCH, COUNT, config.block_m, config.group)
    # One that has tiles of both kinds.
    program = max(range(COUNT), key=lambda p: len(set(found.bounds[p])))
    trace = traced(product(config, same, trans, corrected).asm["ptx"], config, trans, corrected, program)
    blocks = K // config.block_k
    tiles = expected_tiles(config, program)
    assert all(len(groups) == blocks * len(tiles) for groups in trace.products)
    for number, (batch, row, col) in enumerate(tiles):
        for warp, groups in enumerate(trace.products):
            for step, group in enumerate(groups[number * blocks : (number + 1) * blocks]):
                for pair in group:
                    for (_, box), start in zip(pair, (row, col), strict=True):
                        first, k = (box[0], box[1]) if trans else (box[1], box[0])
                        assert k == step * config.block_k
                        assert box[2] == batch
                        # Transposed boxes have 64 rows of the matrix each.
                        assert first in (range(start, start + config.block_m, 64) if trans else (start,)), (
                            number,
                            warp,
                            step,
                        )
    stores = [value[1] for kind, value in trace.events if kind == "store"]
    assert len(set(stores)) == len(stores)
    assert set(stores) == set().union(*(stored(config, *tile) for tile in tiles))


def test_the_next_tile_is_read_before_one_is_stored() -> None:
    (config,) = STAYING
    trace = traced(product(config, True, False, 2).asm["ptx"], config, False, 2, 0)
    first_store = [kind for kind, _ in trace.events].index("store")
    loaded = [value[1] for kind, value in trace.events[:first_store] if kind == "load"]
    batch, row, *_ = expected_tiles(config, 0)[1]
    # As many blocks as there are stages but one.
    assert [(k * config.block_k, row, batch) in loaded for k in range(3)] == [True, True, False]


def test_the_trace_finds_what_is_wrong() -> None:
    (config,) = STAYING
    ptx = product(config, True, False, 2).asm["ptx"]
    early = ptx.replace("wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 2;")
    with pytest.raises(AssertionError, match="being multiplied"):
        traced(early, config, False, 2, 0)
    unloaded = re.sub(r"@%p\d+ mbarrier\.arrive\.expect_tx\S* _, \[%r\d+\], \d+;", "", ptx)
    with pytest.raises(AssertionError, match="never end"):
        traced(unloaded, config, False, 2, 0)
