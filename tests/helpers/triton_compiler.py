"""Compiles kernels for GPUs that are not here, and reads what the compiler and the assembler made of them.

Triton brings its own assembler, so no GPU and no driver is needed; nothing runs.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["TENSOR_CORES", "assembler_warnings", "compiled", "registers", "spilled_bytes"]

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ASSEMBLERS = sorted(_TOOLS.glob("ptxas*"))
DISASSEMBLER = _TOOLS / "cuobjdump"
# Matrix products of each architecture in PTX.
TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, warps: int, stages: int) -> Any:
    """As a launch would compile it whose integers are multiples of 16 and whose tensors are aligned."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name != "num_tiles")
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def spilled_bytes(kernel: Any, tmp_path: Path) -> int:
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run([DISASSEMBLER, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert found is not None, usage
    return int(found[1]) + int(found[2])


def assembler_warnings(kernel: Any, tmp_path: Path) -> str:
    """What the assembler says of a Hopper kernel; that it serializes wgmma, it only says. Of several assemblers, of the
    first that knows this version of PTX."""
    path = tmp_path / "kernel.ptx"
    path.write_text(kernel.asm["ptx"])
    said = ""
    for assembler in ASSEMBLERS:
        arguments = ["-v", "--gpu-name=sm_90a", path, "-o", tmp_path / "again.cubin"]
        run = subprocess.run([assembler, *arguments], capture_output=True, text=True, check=False)
        said = run.stderr
        if run.returncode == 0:
            break
    assert "registers" in said, said
    return said


def registers(kernel: Any, tmp_path: Path) -> int:
    """Of a thread, as the assembler says."""
    found = re.search(r"Used (\d+) registers", assembler_warnings(kernel, tmp_path))
    assert found is not None
    return int(found[1])
