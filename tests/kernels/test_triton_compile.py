"""The kernels compiled for GPUs that are not here: tensor-core instructions present, no registers spilled.

Triton brings its own assembler, so no GPU and no driver is needed; nothing runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

import triton.language as tl  # noqa: E402
from triton_compiler import TENSOR_CORES, assembler_warnings, compiled, spilled_bytes  # noqa: E402

from hf_emopt.kernels.triton import half_precision, normalize, small_matrices, split_products  # noqa: E402
from hf_emopt.kernels.triton import multi_tensor_kernels as run_kernels  # noqa: E402
from hf_emopt.kernels.triton.configs import CANDIDATES, WIDE, WIDE_FEW, Config  # noqa: E402
from hf_emopt.kernels.triton.symmetric_product import symmetric_product_kernel  # noqa: E402


def symmetric_product(
    config: Config,
    arch: int,
    with_c: bool,
    out: str = "fp16",
    trans: bool = False,
    same: bool = True,
    scaled: bool = False,
) -> Any:
    """``same``: ``A A^T``, else the product of two matrices."""
    side, square = min(config.block_m, config.block_n), config.block_m == config.block_n

    def block(dtype: str, rows: int, cols: int) -> str:
        return f"tensordesc<{dtype}[1,{rows},{cols}]>"

    def factor(rows: int) -> str:
        return block("fp16", *((config.block_k, rows) if trans else (rows, config.block_k)))

    types = {
        "a_desc": factor(config.block_m),
        "b_desc": factor(config.block_n),
        "side_desc": factor(side),
        "c_desc": block(out, *((side, side) if out == "fp32" else (config.block_m, config.block_n))),
        "d_desc": block(out, side, side),
        "scales_ptr": "*fp32",
        "tiles_ptr": "*i32",
        **dict.fromkeys(["alpha", "beta", "diagonal"], "fp32"),
    }
    absent = ["b_desc"] * (same and square) + ["side_desc"] * (same or square)
    absent += ["c_desc"] * (not with_c) + ["scales_ptr"] * (not scaled)
    constants = {
        "HAS_C": with_c,
        "SAME": same,
        "TRANS": trans,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "UPCAST": False,
        "SCALED": scaled,
        "C_LAST": with_c and out == "fp32",
        **dict.fromkeys(absent),
    }
    return compiled(symmetric_product_kernel, types, constants, arch, config.num_warps, config.num_stages)


# A A^T as it is launched, and the product of two matrices.
EVERY = [(arch, config, c, True) for arch, some in CANDIDATES.items() for config in some for c in (False, True)]
EVERY += [(90, config, False, False) for config in CANDIDATES[90]]


@pytest.mark.parametrize(("arch", "config", "with_c", "same"), EVERY, ids=str)
@pytest.mark.first_tier("arch", "same", "with_c")
def test_every_configuration(arch: int, config: Config, with_c: bool, same: bool, tmp_path: Path) -> None:
    kernel = symmetric_product(config, arch, with_c, same=same)
    ptx = kernel.asm["ptx"]
    assert TENSOR_CORES[arch] in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert spilled_bytes(kernel, tmp_path) == 0
    if arch == 90:
        assert "serialized" not in assembler_warnings(kernel, tmp_path)
    assert kernel.metadata.shared <= 232448  # 227 KiB


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("config", [Config(128, 128, 64, 8, 3), WIDE, WIDE_FEW], ids=str)
@pytest.mark.first_tier("trans", "scaled")
def test_float32_results(config: Config, trans: bool, scaled: bool, tmp_path: Path) -> None:
    kernel = symmetric_product(config, 90, True, out="fp32", trans=trans, scaled=scaled)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize(
    ("c", "active", "wide", "parts", "trans_a", "trans_b"),
    [
        (0, True, False, True, False, False),
        (0, True, True, True, False, False),
        (0, False, True, False, False, False),
        (1, False, False, True, False, False),
        (-1, False, True, False, False, False),
        (-1, False, True, False, True, True),
        (-1, False, True, False, False, True),
    ],
)
@pytest.mark.first_tier("c")
def test_split_products(
    c: int, active: bool, wide: bool, parts: bool, trans_a: bool, trans_b: bool, tmp_path: Path
) -> None:
    """The four that a step of a coupled iteration takes, and the three of a basis, of which the last is not symmetric."""
    side, block_k = split_products._SIDE, split_products._BLOCK_K
    lying, standing = f"tensordesc<fp16[1,{side},{block_k}]>", f"tensordesc<fp16[1,{block_k},{side}]>"
    square = f"tensordesc<fp16[1,{side},{side}]>"
    wide_square = square.replace("fp16", "fp32")
    types = {
        **dict.fromkeys(["a1_desc", "a2_desc"], standing if trans_a else lying),
        **dict.fromkeys(["b1_desc", "b2_desc"], standing if trans_b else lying),
        "c_desc": wide_square if c == 0 else square,
        **dict.fromkeys(["c2_desc", "high_desc", "low_desc"], square),
        "out_desc": wide_square,
        "active_ptr": "*i1",
        "tiles_ptr": "*i32",
        **dict.fromkeys(["alpha", "beta", "diagonal", "wide_diagonal"], "fp32"),
    }
    absent = ["c_desc"] * (c < 0) + ["c2_desc"] * (c < 1) + ["active_ptr"] * (not active) + ["out_desc"] * (not wide)
    absent += ["high_desc", "low_desc"] * (not parts)
    constants = {"C_PARTS": c, "ACTIVE": active, "WIDE": wide, "PARTS": parts, "LOW": 2.0**-11, "SIDE": side}
    constants |= {
        "TRANS_A": trans_a,
        "TRANS_B": trans_b,
        "SYMMETRIC": trans_a == trans_b,
        "BLOCK_K": block_k,
        "UPCAST": False,
        **dict.fromkeys(absent),
    }
    kernel = compiled(split_products.split_product_kernel, types, constants, 90, 8, 3)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert spilled_bytes(kernel, tmp_path) == 0
    assert "serialized" not in assembler_warnings(kernel, tmp_path)
    assert kernel.metadata.shared <= 232448


def test_a_square_on_the_diagonal_reads_its_block_once() -> None:
    def loads(same: bool) -> int:
        ptx = symmetric_product(Config(128, 128, 64, 4, 3), 90, False, same=same).asm["ptx"]
        return len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared", ptx))

    # Two before the loop and one in it: of two factors in both branches, or of one in that for the diagonal.
    assert (loads(False), loads(True)) == (12, 9)


def test_tall_matrices_are_read_in_place(tmp_path: Path) -> None:
    """The transposed tile is an operand of the tensor core as it lies in shared memory: no instruction turns it."""
    kernel = symmetric_product(Config(128, 128, 64, 4, 3), 90, False, trans=True)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 100 * 1024
    assert spilled_bytes(kernel, tmp_path) == 0


def test_coefficients_are_no_constants() -> None:
    """Other coefficients, other sizes of the same alignment: the same binary."""
    names = symmetric_product_kernel.arg_names
    constant = {parameter.name for parameter in symmetric_product_kernel.params if parameter.is_constexpr}
    assert {"alpha", "beta", "diagonal", "K", "num_tiles"} <= set(names) - constant


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("side", [16, 32, 64])
@pytest.mark.first_tier
def test_one_program_a_matrix(side: int, arch: int, tmp_path: Path) -> None:
    types = {
        "x_ptr": "*fp32",
        "out_ptr": "*fp16",
        "coefficients_ptr": "*fp32",
        "bounds_ptr": "*i32",
        "safety_factor": "fp32",
    }
    constants = {"R_SCALE": 4096.0, "SIDE": side, "BLOCK": 64, "UPCAST": False, "x_col": 1, "out_col": 1}
    kernel = compiled(small_matrices.small_gram_newton_schulz_kernel, types, constants, arch, 4, 2)
    assert any(name in kernel.asm["ptx"] for name in TENSOR_CORES.values())
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_memory_bound_kernels(arch: int, tmp_path: Path) -> None:
    """Loads of 16 bytes a thread."""
    pointers = {"x_ptr": "*fp32", "y_ptr": "*fp16", "exponent_ptr": "*i32", "sum_ptr": "*fp32", "factor": "fp32"}
    constants = {"CHUNK": 16384, "BLOCK": 4096, "PARTS": 64}
    halves = {"x_ptr": "*fp32", "peak_ptr": "*i32", "y_ptr": "*fp16", "scale_ptr": "*fp32"}
    flat = {"FLAT": True, "BLOCK": 4096}
    iterates = {
        "e_ptr": "*fp32",
        "active_ptr": "*i1",
        "d_ptr": "*fp16",
        "m_ptr": "*fp16",
        "lift": "fp32",
        "slope": "fp32",
    }
    kernels = [
        compiled(normalize.cast_kernel, pointers, constants, arch, 8, 3),
        compiled(normalize.sum_of_squares_kernel, pointers, {"CHUNK": 16384, "BLOCK": 4096}, arch, 8, 3),
        compiled(half_precision.largest_kernel, halves, flat, arch, 8, 3),
        compiled(
            half_precision.scaled_half_kernel, halves, {**flat, "LEAST": 2.0**-44, "LARGEST": 2.0**62}, arch, 8, 3
        ),
        compiled(half_precision.times_kernel, {**halves, "y_ptr": "*fp32"}, flat, arch, 8, 3),
        compiled(half_precision.factors_kernel, iterates, {"LIFTED": True, "BLOCK": 4096}, arch, 8, 3),
    ]
    for kernel in kernels:
        assert re.search(r"ld\.global[.\w:]*\.v4\.b32", kernel.asm["ptx"])
        assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", ["momentum", "copy", "apply", "finite"])
@pytest.mark.first_tier
def test_passes_over_runs(name: str, arch: int, tmp_path: Path) -> None:
    """Addresses are numbers in memory, and still loads are of 16 bytes a thread."""
    tables = {
        "run_of": "*i32",
        "start_of": "*i64",
        "numel_of": "*i64",
        "scales": "*fp32",
        "ok_ptr": "*u8",
        "flag_ptr": "*i32",
    }
    lists = dict.fromkeys(("grads", "buffers", "outs", "sources", "targets", "weights", "updates", "values"), "*i64")
    scalars = dict.fromkeys(("momentum", "rest", "lr", "decay"), "fp32")
    wide, narrow = tl.float32, tl.bfloat16
    constants = {
        "momentum": {"GRAD": wide, "BUFFER": wide, "OUT": narrow, "NESTEROV": True, "HAS_OK": True},
        "copy": {"SOURCE": tl.float16, "TARGET": narrow, "SCALED": True, "HAS_OK": True},
        "apply": {"WEIGHT": wide, "UPDATE": narrow, "SCALED": True, "DECAY": 1, "HAS_OK": True},
        "finite": {"VALUE": wide},
    }[name]
    kernel = compiled(
        getattr(run_kernels, f"{name}_kernel"),
        tables | lists | scalars,
        {**constants, "ALIGNED": True, "BLOCK": 4096},
        arch,
        8,
        3,
    )
    assert re.search(r"ld\.global[.\w:]*\.v4\.b32", kernel.asm["ptx"])
    if name != "finite":
        assert re.search(r"st\.global[.\w:]*\.v[24]\.b(32|64)", kernel.asm["ptx"])
    assert spilled_bytes(kernel, tmp_path) == 0
