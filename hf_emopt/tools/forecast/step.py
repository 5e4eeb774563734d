"""The time of an optimizer step on ranks that do not exist, put together from what is measured and what is on datasheets.

``docs/planning.md`` has the model in words, and how far it is from every step that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.rules.muon import MuonRule
from hf_emopt.tools.forecast.amounts import (
    Array,
    BucketAmounts,
    Kind,
    Memory,
    bucket_amounts,
    held,
    memory,
    spread,
    total,
)
from hf_emopt.tools.forecast.hardware import EFFICIENCY, HOST, NVLINK_LATENCY_US, UNFUSED, Gpu, Network
from hf_emopt.tools.forecast.layouts import Layout, Placed, place
from hf_emopt.tools.forecast.products import has_kernels
from hf_emopt.tools.forecast.refreshes import refreshes
from hf_emopt.tools.forecast.work import Passes, Work, passes, refresh_seconds, transform_work

__all__ = ["AdamWForecast", "Forecast", "Machine", "forecast"]


@dataclass(frozen=True)
class Machine:
    """What the ranks are.

    Attributes:
        gpu: one a rank.
        network: between nodes.
    """

    gpu: Gpu
    network: Network

    @property
    def bandwidth(self) -> float:
        """Bytes a second of elementwise passes."""
        return self.gpu.memory_tb_s * 1e12 * EFFICIENCY.memory

    def exchange_seconds(self, received: float, ranks: Sequence[int], latency: bool = True) -> float:
        """One collective in which a rank receives so many bytes, in equal parts from itself and each other of ``ranks``."""
        world = len(ranks)
        if world == 1 or received == 0:
            return 0.0
        node = {rank // self.gpu.per_node for rank in ranks[:1]}
        near = sum(rank // self.gpu.per_node in node for rank in ranks)
        far = world - near
        inside = received * (near - 1) / world / (self.gpu.nvlink_gb_s * 1e9 * EFFICIENCY.nvlink)
        outside = received * far / world / (self.network.gb_s * 1e9 * EFFICIENCY.network)
        start = self.network.latency_us + self.network.message_us * far if far else NVLINK_LATENCY_US
        return max(inside, outside) + (start * 1e-6 if latency else 0.0)


@dataclass(frozen=True)
class AdamWForecast:
    """Fused AdamW on the same layout; nothing travels. Seconds and bytes of the rank with most."""

    device: float
    host: float
    seconds: float
    state_bytes: float


@dataclass(frozen=True)
class Forecast:
    """One optimizer on one layout. Seconds of a step, of the rank that takes longest.

    Attributes:
        products: transforms; ``passes``: elementwise; ``exchange``: collectives, hidden or not; ``compute_group_sums``:
            all-reduces among ranks that share a matrix, which hide behind nothing.
        exposed_exchange: what of the exchange no other bucket's work hides.
        device: without what overlap hides, exchange and landing; ``host``: Python and launches, beside it.
        refresh: what refreshes of factors add in the mean step, waiting for the rank that has most to do included.
        seconds: of the mean step, from an idle device; ``largest_seconds`` of the longest in a period.
        received_bytes, sent_bytes: of the rank with most; an all-to-all's own part counted.
        flops_balance, time_balance, bytes_balance: largest over mean, of operations, of transform times and of bytes.
        matrices, buckets, compute_groups: matrices in the model, buckets, and matrices that several ranks transform together.
        memory: bytes by rank.
        adamw: beside it.
    """

    placed: Placed
    products: float
    passes: float
    exchange: float
    compute_group_sums: float
    exposed_exchange: float
    device: float
    host: float
    refresh: float
    seconds: float
    largest_seconds: float
    received_bytes: float
    sent_bytes: float
    flops_balance: float
    time_balance: float
    bytes_balance: float
    matrices: int
    buckets: int
    compute_groups: int
    memory: Memory
    adamw: AdamWForecast


def forecast(
    optimizer: MatrixOptimizer,
    layout: Layout,
    machine: Machine,
    model: nn.Module | None = None,
    *,
    frozen_bytes: int = 0,
    max_bucket_numel: int | None = None,
) -> Forecast:
    """What a step of this optimizer takes.

    Args:
        optimizer: of a model on the meta device, or of a real one that has not been wrapped.
        model: for the layout with tensor parallelism, whose plan it has.
        frozen_bytes: of weights that are not trained.
        max_bucket_numel: of each rank in a bucket, instead of what the optimizer has.

    Raises:
        ValueError: when layout and model do not fit, or state is offloaded, whose time is not modelled.
    """
    if optimizer.offload_state is not None:
        raise ValueError(
            f"offload_state={optimizer.offload_state!r}: there is no model of the time that state takes from the host; leave "
            "it out of --optim_args, and take its bytes from the GPU's memory"
        )
    placed = place(optimizer, layout, model, max_bucket_numel)
    world = layout.world_size
    buckets, copies = bucket_amounts(placed.plan, world), bucket_amounts(placed.aux_plan, world)
    wire = _wire_bytes(optimizer)
    products, sums, batches = _transforms(optimizer, machine, placed, buckets)
    if isinstance(optimizer.rule, MuonRule):
        products = products + EFFICIENCY.sustained * np.maximum(0.0, products - EFFICIENCY.boost_seconds)
    elementwise = _elementwise(optimizer, machine, placed, buckets, copies, wire)
    exchange = _exchanges(machine, buckets, wire) + _exchanges(machine, copies, None, optimizer)
    moved = [(wire * (b.sent + b.returned + b.shared)) for b in buckets]
    moved += [_weight_bytes(optimizer, b) * b.shared for b in copies]
    received = total(moved, world)
    compute = products + sums + elementwise
    slowest = int(np.argmax(compute))
    refreshed = _refreshes(optimizer, machine, placed)
    # All wait for the slowest of a step, whoever that is.
    busy_by_step = (compute + refreshed).max(axis=1)
    busy, comm = float(busy_by_step.mean()), sum(exchange)
    count = max(1, len(exchange))
    exposed = comm / count + max(0.0, comm * (1 - 1 / count) - busy * (1 - 1 / count))
    landing = _landing(optimizer, machine, placed, buckets, wire)
    device = busy - landing + exposed
    each = HOST.parameter_ms + (HOST.slice_ms if layout.name == "fsdp2+tp" else 0.0)
    before = 1e-3 * each * sum(len(b.parameters) for b in placed.plan.buckets)
    host = before + _host(buckets, copies, placed, batches, has_kernels(machine.gpu))
    seconds = max(before + HOST.bucket_ms * 1e-3 + device, host)
    numbers = memory(optimizer, placed, frozen_bytes)
    compute_groups = {
        (i, p)
        for i, b in enumerate(placed.plan.buckets)
        for p in {s.parameter for s in b.owned_regions if s.compute_group or s.cuts}
    }
    return Forecast(
        placed, float(products[slowest]), float(elementwise[slowest]), comm, float(sums[slowest]), exposed, device, host,
        float(busy_by_step.mean() - compute.max()), seconds, seconds + float(busy_by_step.max()) - busy,
        float(received.max()), float(_sent(buckets, copies, wire, optimizer).max()),
        placed.plan.imbalance, _balance(products + sums), _balance(received),
        sum(u.shape[0] for b in placed.plan.buckets for p in b.parameters for u in p.matrix_views),
        len(placed.plan.buckets), len(compute_groups), numbers, _adamw(optimizer, machine, placed, numbers),
    )  # fmt: skip


def _balance(values: Array) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def _wire_bytes(optimizer: MatrixOptimizer) -> int:
    return {"float32": 4, "float64": 8}.get(optimizer.transport_dtype or "bfloat16", 2)


def _transforms(
    optimizer: MatrixOptimizer, machine: Machine, placed: Placed, buckets: Sequence[BucketAmounts]
) -> tuple[Array, Array, int]:
    """Seconds of transforms and of their sums by rank, and batches of the rank with most."""
    world = placed.layout.world_size
    products, sums, batches = np.zeros(world), np.zeros(world), np.zeros(world)
    known: dict[tuple[int, Kind, int], Work] = {}  # most batches are like others
    for b in buckets:
        group = optimizer.param_groups[b.bucket.group]
        storage = b.bucket.storage
        seconds, summed, calls = (np.zeros((storage.replicas, storage.shards)) for _ in range(3))
        for position, kinds in b.batches.items():
            where = divmod(position, storage.shards)
            for kind, count in kinds.items():
                key = (b.bucket.group, kind, count)
                if key not in known:
                    known[key] = transform_work(machine.gpu, optimizer.rule, group, kind, count)
                work = known[key]
                seconds[where] += work.seconds
                calls[where] += 1
                if work.parts > 1 and kind.cut is not None:
                    compute_group = [storage.rank(p) for p in kind.cut.compute_group]
                    each = machine.exchange_seconds(2 * work.sums_bytes / max(1, work.sums), compute_group)
                    summed[where] += each * work.sums
        products = products + spread(storage, seconds, world)
        sums = sums + spread(storage, summed, world)
        batches = batches + spread(storage, calls, world)
    return products, sums, int(batches.max())


def _refreshes(optimizer: MatrixOptimizer, machine: Machine, placed: Placed) -> Array:
    """Seconds of refreshes ``(period, ranks)``; one step of nothing for rules that have none."""
    schedule = refreshes(optimizer, placed)
    if schedule is None:
        return np.zeros((1, placed.layout.world_size))
    group = next(g for g in optimizer.param_groups if g["kind"] == "matrix")
    return refresh_seconds(machine.gpu, optimizer.rule, group, schedule.sides, schedule.calls)


def _passes_of(optimizer: MatrixOptimizer, machine: Machine, placed: Placed, group_index: int, wire: int) -> Passes:
    group = optimizer.param_groups[group_index]
    layout = placed.layout
    return passes(
        optimizer.rule, group, machine.gpu, sharded=layout.is_sharded, world_size=layout.world_size,
        weight=group["params"][0].dtype.itemsize, wire=wire,
    )  # fmt: skip


def _elementwise(
    optimizer: MatrixOptimizer,
    machine: Machine,
    placed: Placed,
    buckets: Sequence[BucketAmounts],
    copies: Sequence[BucketAmounts],
    wire: int,
) -> Array:
    moved = np.zeros(placed.layout.world_size)
    for b in buckets:
        each = _passes_of(optimizer, machine, placed, b.bucket.group, wire)
        moved = moved + each.local * b.local + each.owned * b.owned
        moved = moved + each.checked * b.local * optimizer.skip_nonfinite
    for b in copies:
        weight = _weight_bytes(optimizer, b)
        moved = moved + (3 * weight + 16) * b.owned + 2 * weight * b.local + weight * b.local * optimizer.skip_nonfinite
    world = placed.layout.world_size
    for g, i, storage in placed.own:
        weight = optimizer.param_groups[g]["params"][i].dtype.itemsize
        local = spread(storage, held(storage), world)
        moved = moved + (3 * weight + 16 + weight * optimizer.skip_nonfinite) * local
    alone = world == 1 and isinstance(optimizer.rule, MuonRule) and has_kernels(machine.gpu)
    return moved / (machine.bandwidth * (EFFICIENCY.memory_alone / EFFICIENCY.memory if alone else 1.0))


_FEW_BUCKETS = 2
"""Of so few, next to nothing is put onto the weights beside the products of others."""


def _landing(
    optimizer: MatrixOptimizer, machine: Machine, placed: Placed, buckets: Sequence[BucketAmounts], wire: int
) -> float:
    """Seconds in which updates of other ranks are put onto the weights beside products: of all buckets but one. Not counted
    for rules with factors, whose passes were measured as they are."""
    if len(buckets) <= _FEW_BUCKETS or not isinstance(optimizer.rule, MuonRule):
        return 0.0
    each = [
        _passes_of(optimizer, machine, placed, b.bucket.group, wire).landing * float(b.local.max()) for b in buckets
    ]
    return sum(each) / machine.bandwidth * (1 - 1 / len(buckets))


def _weight_bytes(optimizer: MatrixOptimizer, b: BucketAmounts) -> int:
    return int(optimizer.param_groups[b.bucket.group]["params"][b.bucket.parameters[0].position].dtype.itemsize)


def _exchanges(
    machine: Machine, buckets: Sequence[BucketAmounts], wire: int | None, optimizer: MatrixOptimizer | None = None
) -> list[float]:
    """Seconds of each bucket's collectives; a rank's own part of an all-to-all stays where it is."""
    found = []
    for b in buckets:
        storage = b.bucket.storage
        width = wire if wire is not None or optimizer is None else _weight_bytes(optimizer, b)
        assert width is not None
        row, column = storage.ranks[0], [ranks[0] for ranks in storage.ranks]
        seconds = machine.exchange_seconds(width * float(b.sent.max()), row)
        seconds += machine.exchange_seconds(width * float(b.returned.max()), row)
        replicas = len(column)
        # Of an all-gather what is received comes from others alone.
        gathered = width * float(b.shared.max()) * replicas / max(1, replicas - 1)
        seconds += machine.exchange_seconds(gathered, column)
        if seconds:
            found.append(seconds)
    return found


def _sent(
    buckets: Sequence[BucketAmounts], copies: Sequence[BucketAmounts], wire: int, optimizer: MatrixOptimizer
) -> Array:
    """Bytes that leave each rank: its shard, updates that it owns, and in a ring of replicas what it receives."""
    moved = []
    for b in buckets:
        away = (b.local if b.bucket.sends else 0.0) + (b.owned if b.bucket.returns else 0.0) + b.shared
        moved.append(wire * away)
    moved += [_weight_bytes(optimizer, b) * b.shared for b in copies]
    return total(moved, len(moved[0]) if moved else 1)


def _host(
    buckets: Sequence[BucketAmounts], copies: Sequence[BucketAmounts], placed: Placed, batches: int, fused: bool
) -> float:
    """Python and launches of a step from the first bucket on."""
    bucket_ms = HOST.bucket_ms * (1.0 if fused else UNFUSED)
    own = len(placed.own) * (HOST.adamw_sharded_ms if placed.layout.is_sharded else HOST.adamw_ms)
    return 1e-3 * (bucket_ms * (len(buckets) + len(copies)) + HOST.batch_ms * batches + own)


def _adamw(optimizer: MatrixOptimizer, machine: Machine, placed: Placed, numbers: Memory) -> AdamWForecast:
    """``torch.optim.AdamW(fused=True)``, whose state has the weights' dtype."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = placed.layout.is_sharded
    # Weight, gradient and two moments are read; weight and moments are written.
    device = 7 * float(numbers.gradients.max()) / machine.bandwidth
    host = 1e-3 * len(params) * (HOST.adamw_sharded_ms if sharded else HOST.adamw_ms)
    return AdamWForecast(device, host, device + host, float(numbers.adamw_state.max()))
