"""Compiles the CUDA source of this folder with NVRTC, which comes with torch's builds for CUDA; no compiler is installed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["STAGES", "available", "compiled", "source"]

ARCHITECTURE = "sm_90a"
STAGES = 4
PARTS = 6
"""Of a tile's sums, after each of which one square of the tile before is stored, of which there are four."""


def _multiply(columns: int, element: str) -> str:
    """A device function around one ``wgmma`` of 64 by ``columns`` by 16: instructions name every register of the sums."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}"
    return f"""__device__ __forceinline__ void wgmma_{columns}(float (&d)[128], u64 a, u64 b, int keep) {{
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
        "{instruction} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
        : {operands} : "l"(a), "l"(b), "r"(keep));
}}
"""


def _conversions(element: str) -> str:
    convert = "cvt.f32.bf16" if element == "bf16" else "cvt.f32.f16"
    return f"""__device__ __forceinline__ u32 pack(float low, float high) {{
    u32 both;
    asm("cvt.rn.{element}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}}

__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {{
    asm("{{\\n.reg .b16 l, h;\\nmov.b32 {{l, h}}, %2;\\n{convert} %0, l;\\n{convert} %1, h;\\n}}"
        : "=f"(low), "=f"(high) : "r"(both));
}}
"""


def source(dtype: torch.dtype, same: bool, added: bool) -> str:
    """The CUDA source for factors and results of a dtype of 16 bits; ``same``: B is A; ``added``: there is a C."""
    element = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    here = Path(__file__).parent
    instructions, kernel = ((here / name).read_text() for name in ("instructions.cuh", "symmetric_product.cu"))
    integers, flags = {"STAGES": STAGES, "PARTS": PARTS}, {"SAME": same, "ADDED": added}
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in integers.items())
    constants += "".join(f"constexpr bool {name} = {str(value).lower()};\n" for name, value in flags.items())
    generated = _conversions(element) + _multiply(256, element) + _multiply(128, element)
    return constants + instructions.replace("//GENERATED", generated) + "\n" + kernel


def _names() -> Iterator[str]:
    version = (torch.version.cuda or "").split(".")[0]
    yield from (f"libnvrtc.so.{version}", "libnvrtc.so") if version else ("libnvrtc.so",)
    for folder in sorted(Path(torch.__file__).parent.parent.glob("nvidia/*/lib")):
        yield from sorted(str(path) for path in folder.glob("libnvrtc.so*"))


@functools.cache
def _library() -> ctypes.CDLL | None:
    for name in _names():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def available() -> bool:
    """Whether NVRTC is there: beside torch, or where the system looks for libraries."""
    return _library() is not None


def _text(program: ctypes.c_void_p, size_of: str, get: str) -> bytes:
    library = _library()
    size = ctypes.c_size_t()
    getattr(library, size_of)(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, get)(program, buffer)
    return buffer.raw


@functools.cache
def compiled(dtype: torch.dtype, same: bool, added: bool) -> tuple[bytes, str]:
    """The machine code, and what the compiler said; about a second, once a process for each combination.

    Raises:
        RuntimeError: there is no NVRTC, or it cannot compile the source; with its log.
    """
    library = _library()
    if library is None:
        raise RuntimeError("libnvrtc is not there: install torch for CUDA from pip, or the CUDA toolkit")
    program = ctypes.c_void_p()
    text = source(dtype, same, added).encode()
    code = library.nvrtcCreateProgram(ctypes.byref(program), text, b"symmetric_product.cu", 0, None, None)
    if code != 0:
        raise RuntimeError(f"nvrtcCreateProgram failed with {code}")
    try:
        options = (ctypes.c_char_p * 3)(f"-arch={ARCHITECTURE}".encode(), b"-std=c++17", b"--ptxas-options=-v")
        code = library.nvrtcCompileProgram(program, len(options), options)
        log = _text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
        if code != 0:
            raise RuntimeError(
                f"NVRTC cannot compile symmetric_product.cu for {ARCHITECTURE}: {log} Set HF_EMOPT_KERNEL_VARIANTS="
                "estimate,diagonal to run on the Triton kernels, and report this with the version of torch"
            )
        return _text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
