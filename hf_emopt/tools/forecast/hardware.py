"""GPUs and networks by name, and the constants of predictions; ``docs/planning.md`` says which were measured, and how.

``"datasheet"`` is the manufacturer's figure (NVIDIA A100 80GB, H100 SXM, H200 SXM, HGX B200; InfiniBand HDR and NDR), dense
operations, one direction of a link.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links inside a node.

    Attributes:
        architecture: compute capability as one number; the kernel tables go by it.
        bf16, tf32, fp32: dense TFLOP/s of products of 16-bit, TF32 and float32 numbers.
        nvlink_gb_s: GB/s from one GPU to the others of its node, one direction.
        source: of the figures, by field name; ``""`` for all that are not named.
    """

    name: str
    architecture: int
    bf16: float
    tf32: float
    fp32: float
    memory_tb_s: float
    memory_gib: float
    nvlink_gb_s: float
    per_node: int
    source: Mapping[str, str]


@dataclass(frozen=True)
class Network:
    """The network between nodes.

    Attributes:
        gb_s: GB/s of one GPU, one direction; ``source`` says from where.
        latency_us: of a collective of small messages, and ``message_us`` of every peer that one sends to.
    """

    name: str
    gb_s: float
    latency_us: float
    message_us: float
    source: str


_SHEET = {"": "datasheet"}

GPUS: dict[str, Gpu] = {
    #                arch  bf16  tf32  fp32  TB/s   GiB  NVLink  a node
    "a100": Gpu("a100", 80, 312, 156, 19.5, 2.04, 74.5, 300, 8, _SHEET),
    "h100": Gpu("h100", 90, 989, 495, 67, 3.35, 74.5, 450, 8, _SHEET),
    "h200": Gpu("h200", 90, 989, 495, 67, 4.8, 131.3, 450, 8, _SHEET),
    "b200": Gpu("b200", 100, 2250, 1125, 75, 7.7, 167.6, 900, 8, _SHEET),
}

# Latencies: NCCL's order of magnitude, assumed. 100 Gbit/s Ethernet is taken as one port a node of eight GPUs.
NETWORKS: dict[str, Network] = {
    "nvlink": Network("nvlink", 450, 20, 0.5, "datasheet, every rank in one NVLink domain"),
    "ib400": Network("ib400", 50, 30, 1.0, "datasheet, one port of 400 Gbit/s a GPU"),
    "ib200": Network("ib200", 25, 30, 1.0, "datasheet, one port of 200 Gbit/s a GPU"),
    "eth100": Network("eth100", 12.5 / 8, 60, 5.0, "datasheet, one port of 100 Gbit/s a node of eight"),
}
NVLINK_LATENCY_US = 20.0
"""Of a collective inside a node; assumed."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of datasheet figures that real work reaches.

    Attributes:
        memory: of the bandwidth, in elementwise passes; ``memory_alone`` in those of Muon where nothing travels.
        nvlink, network: of a link in collectives that run during products, inside and between nodes.
        tf32: of the rate of TF32 products.
        fp16: of the 16-bit rate, in products of SOAP and Shampoo, those of half a result counted as whole ones.
        sustained: how much longer 16-bit products take once a card has done nothing else for ``boost_seconds``: its power is
            limited.
        model: of the 16-bit rate in forward and backward.
    """

    memory: float = 0.72
    memory_alone: float = 0.88
    nvlink: float = 0.38
    network: float = 0.8
    tf32: float = 0.69
    fp16: float = 0.8
    sustained: float = 0.03
    boost_seconds: float = 5e-3
    model: float = 0.35


EFFICIENCY = Efficiency()


@dataclass(frozen=True)
class Host:
    """Python and launches, on the machines that were measured (the processor is not recorded).

    Attributes:
        parameter_ms: of a matrix, before the first kernel: gradients are collected and checked.
        slice_ms: in addition, of a matrix that is sharded along two dimensions.
        bucket_ms: of a bucket without its transforms, and of the time before the first kernel runs.
        batch_ms: of a batch of matrices: its look-ups and launches.
        adamw_ms: of fused AdamW, a plain parameter; ``adamw_sharded_ms`` a DTensor.
    """

    parameter_ms: float = 0.014
    slice_ms: float = 0.041
    bucket_ms: float = 1.33
    batch_ms: float = 0.73
    adamw_ms: float = 0.011
    adamw_sharded_ms: float = 0.0475


HOST = Host()

LAUNCH_SECONDS = 3e-6
"""The time of the smallest kernel on the device; assumed."""
SOFTENING = 0.05
"""Squared distance, in powers of two, within which no measured product decides alone; assumed."""
UNFUSED = 3.3
"""How many times the bytes torch's foreach functions and copies move."""
FACTOR_BYTES, FACTOR_BYTES_HALF = 200.0, 114.0
"""Bytes for each owned element that rules with factors move outside of products, and that Shampoo moves in float16."""

# Seconds of the refresh of a side of 2048, and of a call, on an H200 with TF32 products.
REFRESH_SIDE = {"soap": 1.83e-3, "shampoo": 1.96e-3, "kl_shampoo": 5.07e-3}
REFRESH_CALL = {"soap": 11.5e-3, "shampoo": 0.97e-3, "kl_shampoo": 0.97e-3}
# Shampoo's roots on symmetric products in float16: a side is measured in a whole step (0.79 ms of it are its products and
# passes alone), a call is guessed. Split factors add 0.72 ms: 38.2 ms in two steps of one process, for 53 sides.
HALF_SIDE, HALF_CALL = 0.82e-3, 0.3e-3
SPLIT_SIDE = 1.54e-3
# SOAP's bases in float16 on two streams: 25 sides in 3.6 calls, measured in the mean step of two GPUs; the division between
# sides and calls is guessed.
BASIS_SIDE, BASIS_CALL = 1.2e-3, 5.9e-3


_FLAGS = {
    "bf16": "--gpu-tflops",
    "memory_tb_s": "--gpu-bandwidth",
    "memory_gib": "--gpu-memory",
    "nvlink_gb_s": "--nvlink-gbytes",
    "per_node": "--gpus-per-node",
    "gb_s": "--network-gbytes",
    "latency_us": "--network-latency",
}


def custom_gpu(base: str, **figures: float | None) -> Gpu:
    """A GPU of :data:`GPUS` with other figures, by field; TF32 and float32, and measured kernels, are scaled with ``bf16``.

    Raises:
        ValueError: for an unknown name, or a figure that is not above 0.
    """
    if base not in GPUS:
        raise ValueError(
            f"--gpu {base} is not one of {', '.join(GPUS)}; take the nearest and give its figures by flags"
        )
    gpu = GPUS[base]
    chosen = _given(figures)
    source = {**gpu.source, **dict.fromkeys(chosen, "given")}
    if "bf16" in chosen:
        chosen |= {key: getattr(gpu, key) * chosen["bf16"] / gpu.bf16 for key in ("tf32", "fp32")}
    return replace(gpu, **chosen, source=source)


def custom_network(base: str, **figures: float | None) -> Network:
    """A network of :data:`NETWORKS` with another bandwidth or latency, by field.

    Raises:
        ValueError: for an unknown name, or a figure that is not above 0.
    """
    if base not in NETWORKS:
        raise ValueError(
            f"--network {base} is not one of {', '.join(NETWORKS)}; take the nearest and give --network-gbytes"
        )
    chosen = _given(figures)
    if "gb_s" in chosen:
        chosen["source"] = "given"
    return replace(NETWORKS[base], **chosen)


def _given(figures: Mapping[str, float | None]) -> dict[str, Any]:
    """The figures that are not ``None``."""
    for field, value in figures.items():
        if value is not None and not value > 0:
            raise ValueError(f"{_FLAGS[field]} {value} must be above 0")
    return {field: value for field, value in figures.items() if value is not None}
