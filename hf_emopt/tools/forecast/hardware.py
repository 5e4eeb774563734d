"""GPUs and networks by name: the numbers that predictions rest on, and their sources.

``"datasheet"`` is the manufacturer's figure (NVIDIA A100 80GB, H100 SXM, H200 SXM, HGX B200; InfiniBand HDR and NDR), dense
operations, one direction of a link. ``"measured"`` comes from ``benchmarks/results`` or from the kernel tables; ``"assumed"``
is neither. Figures that were fitted to steps of the optimizers are here too; bytes that follow from the code are in
:mod:`.work`.
Products have no figure of their own where a table of measured kernels exists (:mod:`.products`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links inside a node.

    Attributes:
        name: as on the command line.
        architecture: compute capability as one number; the kernel tables go by it.
        bf16, tf32, fp32: dense TFLOP/s of products of 16-bit, TF32 and float32 numbers.
        memory_tb_s: bandwidth of memory in TB/s.
        memory_gib: capacity in GiB.
        nvlink_gb_s: GB/s from one GPU to the others of its node, one direction.
        per_node: GPUs in a node.
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
    """What connects nodes.

    Attributes:
        name: as on the command line.
        gb_s: GB/s of one GPU, one direction.
        latency_us: of a collective of small messages, and ``message_us`` of every peer that one sends to.
        source: of the bandwidth.
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
        memory: of the bandwidth, in elementwise passes. Measured: kernels of fused AdamW, 1.1 B parameters, DDP, two H200.
        memory_alone: the same of the passes of Muon where nothing travels. Measured: their kernels, one H200.
        nvlink: of the link, in collectives that run during products. Measured: those of Muon in the same call.
        network: the same between nodes. Assumed.
        tf32: of the rate of TF32 products. Measured: 16 products of 2048, one H100.
        fp16: of the 16-bit rate, in products of SOAP and Shampoo with that precision, those of half a result counted as whole
            ones. Measured: 16 factors of 2048 (0.94) and as many general products (0.72), one H200.
        sustained: how much longer 16-bit products take once a card has done nothing else for ``boost_seconds``: its power is
            limited. Fitted: whole orthogonalizations that take longer than their single products in the kernel table, to
            which the figure belongs. ``boost_seconds`` is assumed.
        model: of the 16-bit rate in forward and backward. Measured: Llamas of 1.1 B and 2.0 B, two H200, 0.30 and 0.39.
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

    ``parameter_ms`` is fitted to Muon's steps on two GPUs under FSDP2 and DDP; ``bucket_ms`` and ``batch_ms`` to
    older ones under DDP, with and without ``overlap_param_gather``, which the host bounds; AdamW's to its own under DDP, and
    under FSDP2, where hosts differ by a third, so that its largest error there is least. 1.1 B and 2.0 B parameters, two
    H200. ``slice_ms``: Muon's step over tensor parallelism, on four GPUs.

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
"""How many times the bytes torch's foreach functions and copies move; fitted to steps under FSDP2 and DDP on two H200."""
FACTOR_BYTES, FACTOR_BYTES_HALF = 200.0, 114.0
"""An owned element of what rules with factors do besides products. Fitted to the steps between refreshes of a synchronous
schedule, whose products are known: SOAP 197, Shampoo 201. Shampoo in float16 reads blocks where they lie: what its kernels
took in a step of one H200."""

# Seconds of the refresh of a side of 2048, and of a call, on an H200 with TF32 products: from a synchronous and a staggered
# schedule of frequency 10 (benchmarks/results/refresh_2048_h200.json). In SOAP's call is what small batches lose. Shampoo's
# side is from a whole step under FSDP2 on two H200, since its roots take fewer products than they did there.
REFRESH_SIDE = {"soap": 1.83e-3, "shampoo": 1.96e-3, "kl_shampoo": 5.07e-3}
REFRESH_CALL = {"soap": 11.5e-3, "shampoo": 0.97e-3, "kl_shampoo": 0.97e-3}
# Of Shampoo's roots on symmetric products in float16: a side from a whole step, of which 0.79 are its products and passes
# alone; a call's is guessed.
# With split factors, 0.72 ms more: 38.2 of two steps of one process, of 53 sides.
HALF_SIDE, HALF_CALL = 0.82e-3, 0.3e-3
SPLIT_SIDE = 1.54e-3
# SOAP's bases in float16 on two streams: what 25 sides in 3.6 calls add to the mean step of two GPUs; how it parts
# between sides and calls is guessed.
BASIS_SIDE, BASIS_CALL = 1.2e-3, 5.9e-3


def custom_gpu(
    base: str,
    tflops: float | None = None,
    memory_tb_s: float | None = None,
    memory_gib: float | None = None,
    nvlink_gb_s: float | None = None,
    per_node: int | None = None,
) -> Gpu:
    """A GPU of :data:`GPUS` with other figures.

    Args:
        tflops: dense 16-bit TFLOP/s; TF32 and float32, and measured kernels, are scaled with it.

    Raises:
        ValueError: for an unknown name, or a figure that is not above 0.
    """
    if base not in GPUS:
        raise ValueError(
            f"--gpu {base} is not one of {', '.join(GPUS)}; take the nearest and give its figures by flags"
        )
    gpu = GPUS[base]
    chosen = _given(
        bf16=("--gpu-tflops", tflops),
        memory_tb_s=("--gpu-bandwidth", memory_tb_s),
        memory_gib=("--gpu-memory", memory_gib),
        nvlink_gb_s=("--nvlink-gbytes", nvlink_gb_s),
        per_node=("--gpus-per-node", per_node),
    )
    source = {**gpu.source, **dict.fromkeys(chosen, "given")}
    if tflops is not None:
        chosen |= {"tf32": gpu.tf32 * tflops / gpu.bf16, "fp32": gpu.fp32 * tflops / gpu.bf16}
    return replace(gpu, **chosen, source=source)


def custom_network(base: str, gb_s: float | None = None, latency_us: float | None = None) -> Network:
    """A network of :data:`NETWORKS` with another bandwidth or latency.

    Raises:
        ValueError: for an unknown name, or a figure that is not above 0.
    """
    if base not in NETWORKS:
        raise ValueError(
            f"--network {base} is not one of {', '.join(NETWORKS)}; take the nearest and give --network-gbytes"
        )
    chosen = _given(gb_s=("--network-gbytes", gb_s), latency_us=("--network-latency", latency_us))
    if gb_s is not None:
        chosen["source"] = "given"
    return replace(NETWORKS[base], **chosen)


def _given(**figures: tuple[str, float | None]) -> dict[str, Any]:
    """The figures that are not ``None``, by field, from their flags and values."""
    for flag, value in figures.values():
        if value is not None and not value > 0:
            raise ValueError(f"{flag} {value} must be above 0")
    return {field: value for field, (_, value) in figures.items() if value is not None}
