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

from hf_emopt.kernels.triton import (  # noqa: E402
    elementwise_kernels,
    estimated_kernels,
    half_kernels,
    small_kernels,
    split_kernels,
    split_launch,
    symmetric_kernels,
)
from hf_emopt.kernels.triton import multi_tensor_kernels as run_kernels  # noqa: E402
from hf_emopt.kernels.triton.configs import CANDIDATES, POINTERS, WIDE, WIDE_FEW, Config  # noqa: E402


def symmetric_product(
    config: Config,
    arch: int,
    with_c: bool,
    out: str = "fp16",
    trans: bool = False,
    diagonal: int = 2,
    corrected: int = 0,
) -> Any:
    """``diagonal``: 2 for ``A A^T`` and 1 for the product of two matrices, 0 for both without the variant of that name."""
    shared = {
        "HAS_C": with_c,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "UPCAST": False,
        "CORRECTED": corrected,
        "C_LAST": with_c and out == "fp32",
        **({} if corrected else {"correction_ptr": None}),
    }
    scalars = {"alpha": "fp32", "beta": "fp32", "diagonal": "fp32", "tiles_ptr": "*i32", "correction_ptr": "*fp32"}
    if not config.descriptors:
        pointers = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": f"*{out}", "d_ptr": f"*{out}"}
        constants = {**shared, "EVEN_K": True, "a_col": 1, "b_col": 1}
        kernel = symmetric_kernels.symmetric_product_pointer_kernel
        return compiled(kernel, {**pointers, **scalars}, constants, arch, config.num_warps, config.num_stages)
    side = min(config.block_m, config.block_n)

    def block(dtype: str, rows: int, cols: int) -> str:
        return f"tensordesc<{dtype}[1,{rows},{cols}]>"

    def factor(rows: int) -> str:
        return block("fp16", *((config.block_k, rows) if trans else (rows, config.block_k)))

    descriptors = {
        "a_desc": factor(config.block_m),
        "b_desc": factor(config.block_n),
        "side_desc": factor(side),
        "c_desc": block(out, *((side, side) if out == "fp32" else (config.block_m, config.block_n))),
        "d_desc": block(out, side, side),
    }
    square = config.block_m == config.block_n
    same = square and diagonal != 1
    constants = {**shared, "SQUARE": same, "TRANS": trans, "DIAGONAL": diagonal}
    constants |= dict.fromkeys(["b_desc"] * same + ["side_desc"] * square)
    if not with_c:
        constants["c_desc"] = None
    kernel = symmetric_kernels.symmetric_product_descriptor_kernel
    return compiled(kernel, {**descriptors, **scalars}, constants, arch, config.num_warps, config.num_stages)


# Clusters have a kernel of their own.
TILES = {arch: [config for config in some if not config.clusters] for arch, some in CANDIDATES.items()}
# A A^T as it is launched, of a matrix that is normalized and of one that is not yet (then without C).
EVERY = [
    (arch, config, with_c, 2, corrected)
    for arch, some in TILES.items()
    for config in some
    for with_c, corrected in ((False, 2), (True, 0))
]
# The product of two matrices; both without the variant; and a polynomial that ends the normalization.
EVERY += [(90, config, False, 1, 0) for config in TILES[90]]
EVERY += [(90, config, True, 0, 0) for config in TILES[90]]
EVERY += [(arch, some[0], True, 2, 1) for arch, some in TILES.items()]


@pytest.mark.parametrize(("arch", "config", "with_c", "diagonal", "corrected"), EVERY, ids=str)
@pytest.mark.first_tier("arch", "diagonal", "with_c")
def test_every_configuration(
    arch: int, config: Config, with_c: bool, diagonal: int, corrected: int, tmp_path: Path
) -> None:
    kernel = symmetric_product(config, arch, with_c, diagonal=diagonal, corrected=corrected)
    ptx = kernel.asm["ptx"]
    assert TENSOR_CORES[arch] in ptx
    assert ("cp.async.bulk.tensor" in ptx) == config.descriptors
    assert spilled_bytes(kernel, tmp_path) == 0
    if arch == 90:
        assert "serialized" not in assembler_warnings(kernel, tmp_path)
    # What the architecture gives one program: 163 KiB on sm_80, 227 KiB later.
    assert kernel.metadata.shared <= {80: 166912, 90: 232448, 100: 232448}[arch]


@pytest.mark.parametrize("corrected", [0, 3])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("config", [Config(128, 128, 64, 8, 3), WIDE, WIDE_FEW, POINTERS], ids=str)
@pytest.mark.first_tier("trans", "corrected")
def test_float32_results(config: Config, trans: bool, corrected: int, tmp_path: Path) -> None:
    kernel = symmetric_product(config, 90, True, out="fp32", trans=trans, corrected=corrected)
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
    side, block_k = split_launch._SIDE, split_launch._BLOCK_K
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
    kernel = compiled(split_kernels.split_product_kernel, types, constants, 90, 8, 3)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert spilled_bytes(kernel, tmp_path) == 0
    assert "serialized" not in assembler_warnings(kernel, tmp_path)
    assert kernel.metadata.shared <= 232448


def test_a_square_on_the_diagonal_reads_its_block_once() -> None:
    def loads(diagonal: int) -> int:
        ptx = symmetric_product(Config(128, 128, 64, 4, 3), 90, False, diagonal=diagonal).asm["ptx"]
        return len(re.findall(r"cp\.async\.bulk\.tensor\.3d\.shared", ptx))

    # Two before the loop and one in it: of two factors in the one branch, of one in the other.
    assert (loads(0), loads(2)) == (6, 9)


def test_tall_matrices_are_read_in_place(tmp_path: Path) -> None:
    """The transposed tile is an operand of the tensor core as it lies in shared memory: no instruction turns it."""
    kernel = symmetric_product(Config(128, 128, 64, 4, 3), 90, False, trans=True)
    assert "wgmma.mma_async" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= 100 * 1024
    assert spilled_bytes(kernel, tmp_path) == 0


def test_coefficients_are_no_constants() -> None:
    """Other coefficients, other sizes of the same alignment: the same binary."""
    names = symmetric_kernels.symmetric_product_descriptor_kernel.arg_names
    parameters = symmetric_kernels.symmetric_product_descriptor_kernel.params
    constant = {parameter.name for parameter in parameters if parameter.is_constexpr}
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
    kernel = compiled(small_kernels.small_gram_newton_schulz_kernel, types, constants, arch, 4, 2)
    assert any(name in kernel.asm["ptx"] for name in TENSOR_CORES.values())
    assert spilled_bytes(kernel, tmp_path) == 0


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_memory_bound_kernels(arch: int, tmp_path: Path) -> None:
    """Loads of 16 bytes a thread."""
    pointers = {"x_ptr": "*fp32", "y_ptr": "*fp16", "exponent_ptr": "*i32", "sum_ptr": "*fp32", "factor": "fp32"}
    constants = {"CHUNK": 16384, "BLOCK": 4096, "PARTS": 64}
    estimated = {**pointers, "estimate_exponent_ptr": "*i32", "estimate_ptr": "*fp32", "correction_ptr": "*fp32"}
    whole = {"BLOCK": 8192, "PER_PROGRAM": 8, "SAMPLES": 1024}
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
        compiled(estimated_kernels.estimated_cast_kernel, estimated, whole, arch, 8, 3),
        compiled(estimated_kernels.correct_kernel, estimated, {"BLOCK": 8192, "PARTS": 4096}, arch, 8, 3),
        compiled(elementwise_kernels.cast_kernel, pointers, constants, arch, 8, 3),
        compiled(elementwise_kernels.sum_of_squares_kernel, pointers, {"CHUNK": 16384, "BLOCK": 4096}, arch, 8, 3),
        compiled(half_kernels.largest_kernel, halves, flat, arch, 8, 3),
        compiled(half_kernels.scaled_half_kernel, halves, {**flat, "LEAST": 2.0**-44, "LARGEST": 2.0**62}, arch, 8, 3),
        compiled(half_kernels.times_kernel, {**halves, "y_ptr": "*fp32"}, flat, arch, 8, 3),
        compiled(half_kernels.factors_kernel, iterates, {"LIFTED": True, "BLOCK": 4096}, arch, 8, 3),
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
