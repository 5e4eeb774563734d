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
from hf_emopt.tools.forecast.amounts import Array, BucketAmounts, Kind, bucket_amounts, held, memory, spread
from hf_emopt.tools.forecast.hardware import EFFICIENCY, HOST, NVLINK_LATENCY_US, UNFUSED, Gpu, Network
from hf_emopt.tools.forecast.layouts import Layout, Placed, communication_bytes, parameter_of, place
from hf_emopt.tools.forecast.products import has_kernels
from hf_emopt.tools.forecast.refreshes import refreshes
from hf_emopt.tools.forecast.work import Passes, Work, passes, refresh_seconds, transform_work


@dataclass(frozen=True)
class Machine:
    """What the ranks are: a GPU each, and the network between nodes."""

    gpu: Gpu
    network: Network

    @property
    def bandwidth(self) -> float:
        """Bytes a second of elementwise passes."""
        return self.gpu.memory_tb_s * 1e12 * EFFICIENCY.memory

    def exchange_seconds(self, received: float, ranks: Sequence[int]) -> float:
        """One collective in which a rank receives so many bytes, in equal parts from itself and each other of ``ranks``."""
        world = len(ranks)
        if world == 1 or received == 0:
            return 0.0
        near = sum(rank // self.gpu.per_node == ranks[0] // self.gpu.per_node for rank in ranks)
        far = world - near
        inside = received * (near - 1) / world / (self.gpu.nvlink_gb_s * 1e9 * EFFICIENCY.nvlink)
        outside = received * far / world / (self.network.gb_s * 1e9 * EFFICIENCY.network)
        start = self.network.latency_us + self.network.message_us * far if far else NVLINK_LATENCY_US
        return max(inside, outside) + start * 1e-6


@dataclass(frozen=True)
class AdamWForecast:
    """Fused AdamW on the same layout; nothing travels. Seconds and bytes of the rank with most."""

    host: float
    seconds: float
    state_bytes: float


class Forecast:
    """One optimizer on one layout: seconds of a step on the rank that takes longest.

    Attributes:
        products, passes: of transforms, and of elementwise passes.
        exchange, exposed_exchange: of collectives, and of those that no other bucket's work hides.
        compute_group_sums: of all-reduces among ranks that share a matrix, which hide behind nothing.
        device, host: of the device, without what overlap hides, and of Python and launches at the same time.
        refresh: that refreshes of factors add to the mean step, with the wait for the rank that has most.
        seconds, largest_seconds: of the mean step from an idle device, and of the longest step in a period.
        received_bytes, sent_bytes: of the rank with most, its own part of an all-to-all counted.
        flops_balance, time_balance, bytes_balance: largest over mean, of operations, of transform times and of bytes.
        matrices, buckets, compute_groups: matrices in the model, buckets, and matrices that several ranks transform together.
    """

    def __init__(self, optimizer: MatrixOptimizer, machine: Machine, placed: Placed, frozen_bytes: int) -> None:
        self.placed, self._optimizer, self._machine = placed, optimizer, machine
        self._world, self._is_muon = placed.layout.world_size, isinstance(optimizer.rule, MuonRule)
        buckets, copies = placed.plan.buckets, placed.aux_plan.buckets
        self._owned = [bucket_amounts(b, self._world, communication_bytes(optimizer, b.parameters[0])) for b in buckets]
        widths = [parameter_of(optimizer, b.parameters[0]).dtype.itemsize for b in copies]
        self._copied = [bucket_amounts(b, self._world, width) for b, width in zip(copies, widths)]
        self._all = self._owned + self._copied
        self.matrices = sum(u.shape[0] for b in buckets for p in b.parameters for u in p.matrix_views)
        self.buckets = len(buckets)
        self.compute_groups = sum(len({s.parameter for s in b.owned_regions if s.slicings}) for b in buckets)
        self.memory = memory(optimizer, placed, frozen_bytes)
        self.adamw = self._adamw()
        self._count_bytes()
        self._time()

    def _count_bytes(self) -> None:
        # Each rank receives shards of matrices that it owns, shards of updates, and updates of other replicas. It sends its
        # shards, updates that it owns, and in a ring of replicas as much as it receives.
        received, sent = np.zeros(self._world), np.zeros(self._world)
        for b in self._all:
            received += b.width * (b.sent + b.returned + b.shared)
            sent += b.width * ((b.local if b.bucket.sends else 0.0) + (b.owned if b.bucket.returns else 0.0) + b.shared)
        self.received_bytes, self.sent_bytes = float(received.max()), float(sent.max())
        self.bytes_balance = _balance(received)

    def _time(self) -> None:
        products, sums, batches = self._transforms()
        if self._is_muon:
            products = products + EFFICIENCY.sustained * np.maximum(0.0, products - EFFICIENCY.boost_seconds)
        elementwise = self._elementwise()
        compute = products + sums + elementwise
        slowest = int(np.argmax(compute))
        self.products, self.passes = float(products[slowest]), float(elementwise[slowest])
        self.compute_group_sums = float(sums[slowest])
        self.flops_balance, self.time_balance = self.placed.plan.imbalance, _balance(products + sums)
        # All ranks wait for the slowest rank of each step.
        busy_by_step = (compute + self._refreshes()).max(axis=1)
        busy = float(busy_by_step.mean())
        self.refresh = busy - float(compute.max())
        exchange = self._exchanges()
        self.exchange, count = float(sum(exchange)), max(1, len(exchange))
        hidden = 1 - 1 / count
        self.exposed_exchange = self.exchange / count + max(0.0, self.exchange * hidden - busy * hidden)
        self.device = busy - self._overlapped_apply() + self.exposed_exchange
        each = HOST.parameter_ms + (HOST.slice_ms if self.placed.layout.name == "fsdp2+tp" else 0.0)
        before = 1e-3 * each * sum(len(b.parameters) for b in self.placed.plan.buckets)
        bucket_ms = HOST.bucket_ms * (1.0 if has_kernels(self._machine.gpu) else UNFUSED)
        own = len(self.placed.own) * self._adamw_ms
        self.host = before + 1e-3 * (bucket_ms * len(self._all) + HOST.batch_ms * batches + own)
        self.seconds = max(before + HOST.bucket_ms * 1e-3 + self.device, self.host)
        self.largest_seconds = self.seconds + float(busy_by_step.max()) - busy

    def _transforms(self) -> tuple[Array, Array, int]:
        """Seconds of transforms and of their sums by rank, and batches of the rank with most."""
        products, sums, batches = np.zeros(self._world), np.zeros(self._world), np.zeros(self._world)
        known: dict[tuple[int, Kind, int], Work] = {}  # most batches are like others
        for b in self._owned:
            group = self._optimizer.param_groups[b.bucket.group]
            storage = b.bucket.storage
            seconds, summed, calls = (np.zeros((storage.replicas, storage.shards)) for _ in range(3))
            for position, kinds in b.batches.items():
                where = divmod(position, storage.shards)
                for kind, count in kinds.items():
                    key = (b.bucket.group, kind, count)
                    if key not in known:
                        known[key] = transform_work(self._machine.gpu, self._optimizer.rule, group, kind, count)
                    work = known[key]
                    seconds[where] += work.seconds
                    calls[where] += 1
                    if work.sums and (slicing := kind[1]) is not None and len(slicing.compute_group) > 1:
                        ranks = [storage.rank(index) for index in slicing.compute_group]
                        each = self._machine.exchange_seconds(2 * work.sums_bytes / work.sums, ranks)
                        summed[where] += each * work.sums
            products = products + spread(storage, seconds, self._world)
            sums = sums + spread(storage, summed, self._world)
            batches = batches + spread(storage, calls, self._world)
        return products, sums, int(batches.max())

    def _refreshes(self) -> Array:
        """Seconds of refreshes ``(period, ranks)``; one step without any for rules that have none."""
        schedule = refreshes(self._optimizer, self.placed)
        if schedule is None:
            return np.zeros((1, self._world))
        group = next(g for g in self._optimizer.param_groups if g["kind"] == "matrix")
        return refresh_seconds(self._machine.gpu, self._optimizer.rule, group, schedule.sides, schedule.calls)

    def _passes(self, b: BucketAmounts) -> Passes:
        group = self._optimizer.param_groups[b.bucket.group]
        return passes(self._optimizer.rule, group, self._machine.gpu, self.placed.layout, b.width)

    def _elementwise(self) -> Array:
        """Seconds of elementwise passes."""
        optimizer, moved = self._optimizer, np.zeros(self._world)
        for b in self._owned:
            each = self._passes(b)
            moved = moved + each.local * b.local + each.owned * b.owned
            moved = moved + each.checked * b.local * optimizer.skip_nonfinite
        for b in self._copied:  # their weights travel
            moved = moved + (3 * b.width + 16) * b.owned
            moved = moved + 2 * b.width * b.local + b.width * b.local * optimizer.skip_nonfinite
        for g, i, storage in self.placed.own:
            weight = optimizer.param_groups[g]["params"][i].dtype.itemsize
            local = spread(storage, held(storage), self._world)
            moved = moved + (3 * weight + 16 + weight * optimizer.skip_nonfinite) * local
        alone = self._world == 1 and self._is_muon and has_kernels(self._machine.gpu)
        return moved / (self._machine.bandwidth * (EFFICIENCY.memory_alone / EFFICIENCY.memory if alone else 1.0))

    def _overlapped_apply(self) -> float:
        """Seconds of the apply stream that products hide: those of all buckets but one.

        Zero for rules with factors, whose measured passes contain them, and for few buckets.
        """
        if len(self._owned) <= 2 or not self._is_muon:
            return 0.0
        each = [self._passes(b).applied * float(b.local.max()) for b in self._owned]
        return sum(each) / self._machine.bandwidth * (1 - 1 / len(self._owned))

    def _exchanges(self) -> list[float]:
        """Seconds of each bucket's collectives; a rank keeps its own part of an all-to-all."""
        found = []
        for b in self._all:
            storage = b.bucket.storage
            shards, replicas = storage.ranks[0], [ranks[0] for ranks in storage.ranks]
            seconds = self._machine.exchange_seconds(b.width * float(b.sent.max()), shards)
            seconds += self._machine.exchange_seconds(b.width * float(b.returned.max()), shards)
            # In an all-gather a rank receives from others alone.
            gathered = b.width * float(b.shared.max()) * len(replicas) / max(1, len(replicas) - 1)
            seconds += self._machine.exchange_seconds(gathered, replicas)
            if seconds:
                found.append(seconds)
        return found

    @property
    def _adamw_ms(self) -> float:
        return HOST.adamw_sharded_ms if self.placed.layout.is_sharded else HOST.adamw_ms

    def _adamw(self) -> AdamWForecast:
        """``torch.optim.AdamW(fused=True)``, whose state has the weights' dtype."""
        # Weight, gradient and two moments are read; weight and moments are written.
        device = 7 * float(self.memory.gradients.max()) / self._machine.bandwidth
        host = 1e-3 * sum(len(group["params"]) for group in self._optimizer.param_groups) * self._adamw_ms
        return AdamWForecast(host, device + host, float(self.memory.adamw_state.max()))


def forecast(
    optimizer: MatrixOptimizer,
    layout: Layout,
    machine: Machine,
    model: nn.Module | None = None,
    *,
    frozen_bytes: int = 0,
    max_bucket_numel: int | None = None,
) -> Forecast:
    """What a step of this optimizer takes, whose model is on the meta device or has not been wrapped.

    Args:
        model, max_bucket_numel: see :func:`~hf_emopt.tools.forecast.layouts.place`.
        frozen_bytes: of weights that are not trained.

    Raises:
        ValueError: when layout and model do not fit, or state is offloaded, whose time is not modelled.
    """
    if optimizer.offload_state is not None:
        raise ValueError(
            f"offload_state={optimizer.offload_state!r}: there is no model of the time that state takes from the host; leave "
            "it out of --optim_args, and take its bytes from the GPU's memory"
        )
    placed = place(optimizer, layout, model, max_bucket_numel)
    return Forecast(optimizer, machine, placed, frozen_bytes)


def _balance(values: Array) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0
