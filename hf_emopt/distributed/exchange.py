"""How the elements of a bucket travel: shards to the owner of a whole matrix, updates back, and copies to replicas.

For a bucket on a grid of ``replicas x shards`` ranks, with ``P`` elements of matrices:

=======================  ============================================  =======================  =====================
method                   who with whom                                 received by a rank       skipped when
=======================  ============================================  =======================  =====================
``storage_to_compute``   all-to-all among the shards of a replica;     P / (replicas shards)    not sharded, or local
                         all-gather where every rank gets everything
``compute_to_storage``   the same, back                                P / (replicas shards)    not sharded, or local
``all_gather_replicas``  all-gather among the replicas of a shard      P (1 - 1/replicas)       one replica
                                                                       / shards
=======================  ============================================  =======================  =====================

Every stage is one collective with exact sizes, started without waiting; what a rank receives is unpacked straight into the
tensors that the mathematics reads. Sizes follow from the plan, so that nothing about them is ever exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.layout import Grid, Region, Storage
from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.kernels.multi_tensor import MultiTensorTable, fits, flat_span, kernels_run_on

Slices = tuple[slice, ...]
Stage = Literal["sent", "received", "returned", "unpacked"]
"""A buffer of the exchange. ``"sent"`` and ``"unpacked"`` hold this rank's part of each present parameter, ``"received"`` and
``"returned"`` its owned regions."""


@dataclass
class Arrival:
    """A buffer that is being filled.

    Attributes:
        buffer: flat; undefined before :meth:`wait`.
        works: collectives to wait for; on a GPU waiting makes the current stream wait, not the host.
        keep: what they read, kept alive until then.
    """

    buffer: Tensor
    works: tuple[Any, ...] = ()
    keep: tuple[Tensor, ...] = ()

    def wait(self) -> Tensor:
        """The filled buffer."""
        for work in self.works:
            work.wait()
        self.works, self.keep = (), ()
        return self.buffer


@dataclass(frozen=True)
class _Piece:
    """A region of a tensor, in that tensor's own coordinates."""

    index: int
    where: Slices
    numel: int


@dataclass(frozen=True)
class Stacks:
    """Owned regions as parts of a few tensors: matrices of one shape lie one after another in one ``(B, m, n)``.

    Attributes:
        rows: for each owned region the number of its stack, its first matrix there, and how many.
        shapes: of the owned regions.
        places: for each owned region the number of its stack and its first element there.
    """

    rows: tuple[tuple[int, int, int], ...]
    shapes: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, int], ...]

    def split(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Each owned region; views of contiguous stacks."""
        pairs = zip(self.rows, self.shapes)
        return [stacks[number].narrow(0, start, count).reshape(shape) for (number, start, count), shape in pairs]


class Exchange:
    """The collectives of one bucket, for the parameters that take part in a step.

    Args:
        bucket: what travels.
        grid: the ranks, and this rank's place.
        present: indices of the bucket's parameters that have a gradient; the same on all ranks.
        dtype: communication dtype.
        device: of the buffers, where transforms run.

    Attributes:
        travels: shards go to owners before the transform.
        returns: updates go back to shards after it.
    """

    def __init__(
        self, bucket: Bucket, grid: Grid, present: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.grid, self.dtype, self.device = grid, dtype, device
        self.travels, self.returns = bucket.sends, bucket.returns
        self._to_all = bucket.sends and bucket.keeps  # what each owner keeps, all have gathered
        self._kernels = kernels_run_on(device)
        chosen = set(present)
        owned_regions = [s for s in bucket.owned_regions if s.parameter in chosen]
        row = {index: k for k, index in enumerate(present)}
        self.owned = [s for s in owned_regions if s.owner == grid.position]
        storages = [p.storage for p in bucket.parameters]
        mine, narrowed = grid.replica, any(s.gives is not None for s in owned_regions)

        def held(replica: int, narrowed: bool) -> list[list[_Piece]]:
            """By shard of a replica, what this rank holds of that shard's owned regions."""
            return [
                _pieces(
                    [s for s in owned_regions if s.owner == replica * grid.shards + shard],
                    storages,
                    grid.shard,
                    row,
                    narrowed,
                )
                for shard in range(grid.shards)
            ]

        def asked(narrowed: bool) -> list[list[_Piece]]:
            """By shard, what it holds of this rank's owned regions, in the coordinates of these."""
            return [
                [
                    _Piece(k, _relative(part, s.region, _zero(part)), _numel(part))
                    for k, s in enumerate(self.owned)
                    for region, _ in storages[s.parameter].held(shard)
                    for given in (s.results if narrowed else (s.region,))
                    if (part := _intersection(region, given)) is not None
                ]
                for shard in range(grid.shards)
            ]

        sent, received = held(mine, False), asked(False)
        returned = asked(True) if narrowed else received
        # Narrowed: an owner passes on a part of what it has transformed.
        unpacked = [held(replica, narrowed) for replica in range(grid.replicas)]
        by_rank: dict[Stage, list[list[_Piece]]] = {
            "sent": sent[:1] if self._to_all else sent,
            "received": received,
            "returned": returned if self.returns else [returned[grid.shard]],
            "unpacked": [pieces for shards in unpacked for pieces in shards],
        }
        self._pieces = {stage: [p for pieces in ranks for p in pieces] for stage, ranks in by_rank.items()}
        # Elements of each buffer, and by rank of what a collective sends and receives.
        self._numel = {stage: sum(p.numel for p in pieces) for stage, pieces in self._pieces.items()}
        if not self.returns:  # then the buffer is the part of the copies that this rank makes
            self._numel["returned"] = sum(p.numel for p in unpacked[mine][grid.shard])
        self._to_owners = _splits(sent), _splits(received)
        self._to_shards = _splits(returned), _splits(unpacked[mine])
        self._by_replica = [sum(_splits(shards)) for shards in unpacked]
        self._tables: dict[tuple[Stage, bool], MultiTensorTable | None] = {}

    def table(self, stage: Stage, tensors: Sequence[Tensor], stacks: Stacks | None = None) -> MultiTensorTable | None:
        """The pieces of a stage for one launch over many tensors: tensors on the left, the buffer on the right.

        Args:
            stacks: how the tensors hold the owned regions, where they are not the owned regions themselves.

        Returns:
            ``None`` where kernels do not run on the device, or a piece is no flat span of its tensor.
        """
        if not self._kernels:
            return None
        key = (
            stage,
            stacks is not None,
        )  # shapes follow from the bucket and from who is present, as this exchange does
        if key not in self._tables:
            shapes = [t.shape for t in tensors] if stacks is None else stacks.shapes
            table = _as_table(self._pieces[stage], shapes)
            self._tables[key] = table if table is None or stacks is None else table.within(left=stacks.places)
        return self._tables[key]

    def empty(self, stage: Stage) -> Tensor:
        """A buffer of a stage, not filled."""
        return torch.empty(self._numel[stage], dtype=self.dtype, device=self.device)

    # ------------------------------------------------------------------ storage to compute

    def storage_to_compute(self, inputs: Sequence[Tensor] | Tensor) -> Arrival:
        """Starts to bring the owned regions together from all shards.

        Args:
            inputs: this rank's part of each present parameter, or the ``"sent"`` buffer, filled.
        """
        buffer = inputs if isinstance(inputs, Tensor) else self._packed("sent", inputs)
        sizes, wanted = self._to_owners
        received = torch.empty(sum(wanted), dtype=self.dtype, device=self.device)
        if self._to_all:
            ranks = self.grid.ranks[self.grid.replica]
            return Arrival(received, _all_gather(received, wanted, buffer, self.grid.shard_group, ranks), (buffer,))
        work = dist.all_to_all_single(received, buffer, wanted, sizes, group=self.grid.shard_group, async_op=True)
        return Arrival(received, (work,), (buffer,))

    # ------------------------------------------------------------------ compute to storage

    def compute_to_storage(
        self, outputs: Sequence[Tensor], scales: Sequence[float] | None = None, stacks: Stacks | None = None
    ) -> Arrival:
        """Starts to return owned regions to the shards; where all are whole, nothing travels yet.

        Args:
            outputs: one for each owned region, or ``stacks`` of them.
            scales: a factor on each owned region.
        """
        buffer = self._packed("returned", outputs, scales, stacks)
        if not self.returns:
            return Arrival(buffer)
        sizes, wanted = self._to_shards
        received = torch.empty(sum(wanted), dtype=self.dtype, device=self.device)
        work = dist.all_to_all_single(received, buffer, wanted, sizes, group=self.grid.shard_group, async_op=True)
        return Arrival(received, (work,), (buffer,))

    def all_gather_replicas(self, arrival: Arrival) -> Arrival:
        """Starts to copy what this replica has to the others, and theirs here."""
        if self.grid.replicas == 1:
            return arrival
        mine, sizes = arrival.wait(), self._by_replica
        gathered = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        ranks = [row[self.grid.shard] for row in self.grid.ranks]
        return Arrival(gathered, _all_gather(gathered, sizes, mine, self.grid.replica_group, ranks), (mine,))

    # ------------------------------------------------------------------ packing

    def _packed(
        self,
        stage: Stage,
        tensors: Sequence[Tensor],
        scales: Sequence[float] | None = None,
        stacks: Stacks | None = None,
    ) -> Tensor:
        buffer = self.empty(stage)
        table = self.table(stage, tensors, stacks) if self._kernels else None
        if table is not None and fits([buffer], self.device) and fits(tensors, self.device):
            table.to_right(tensors, [buffer], scales)
            return buffer
        if stacks is not None:
            tensors = stacks.split(tensors)
        if scales is not None:
            tensors = [t.to(torch.promote_types(t.dtype, torch.float32)) * scale for t, scale in zip(tensors, scales)]
        pieces = self._pieces[stage]
        if pieces:
            parts = buffer.split([p.numel for p in pieces])
            sources = [tensors[p.index][p.where] for p in pieces]
            torch._foreach_copy_([part.view(source.shape) for part, source in zip(parts, sources)], sources)
        return buffer

    def unpack(self, stage: Stage, arrival: Arrival, targets: Sequence[Tensor], stacks: Stacks | None = None) -> None:
        """Waits for a buffer and fills the targets from it.

        An owner's own part is written as well: it went through the communication dtype like everybody's.

        Args:
            stage: ``"received"``: a target is an owned region, or ``stacks`` of them; ``"unpacked"``: a target is this
                rank's part of a present parameter.
        """
        buffer = arrival.wait()
        table = self.table(stage, targets, stacks) if self._kernels else None
        if table is not None and fits([buffer], self.device) and fits(targets, self.device):
            table.to_left([buffer], targets)
            return
        if stacks is not None:
            targets = stacks.split(targets)
        pieces = self._pieces[stage]
        if pieces:
            views = [targets[p.index][p.where] for p in pieces]
            parts = buffer.split([p.numel for p in pieces])
            torch._foreach_copy_(views, [part.view(v.shape) for part, v in zip(parts, views)])


def _as_table(pieces: Sequence[_Piece], shapes: Sequence[Sequence[int]]) -> MultiTensorTable | None:
    runs, offset = [], 0
    for piece in pieces:
        run = flat_span(piece.where, shapes[piece.index])
        if run is None:
            return None
        runs.append((piece.index, run[0], 0, offset, run[1]))
        offset += run[1]
    return MultiTensorTable(runs)


def _pieces(
    owned_regions: Sequence[OwnedRegion],
    storages: Sequence[Storage],
    shard: int,
    row: dict[int, int],
    narrowed: bool = False,
) -> list[_Piece]:
    """What a shard holds of some owned regions (or of what their owners give), in its own coordinates."""
    pieces = []
    for owned_region in owned_regions:
        for region, place in storages[owned_region.parameter].held(shard):
            for part in owned_region.results if narrowed else (owned_region.region,):
                inside = _intersection(region, part)
                if inside is not None:
                    pieces.append(_Piece(row[owned_region.parameter], _relative(inside, region, place), _numel(inside)))
    return pieces


def _intersection(a: Region, b: Region) -> Region | None:
    region = tuple((max(s, t), min(u, v)) for (s, u), (t, v) in zip(a, b))
    return region if all(start < stop for start, stop in region) else None


def _relative(inside: Region, whole: Region, place: Region) -> Slices:
    """A region inside another as an index into a tensor in which that other lies at ``place``."""
    return tuple(
        slice(start - origin + offset, stop - origin + offset)
        for (start, stop), (origin, _), (offset, _) in zip(inside, whole, place)
    )


def _zero(region: Region) -> Region:
    return tuple((0, 0) for _ in region)


def _numel(region: Region) -> int:
    total = 1
    for start, stop in region:
        total *= stop - start
    return total


def _splits(runs: Sequence[Sequence[_Piece]]) -> list[int]:
    return [sum(p.numel for p in run) for run in runs]


def _all_gather(
    everything: Tensor, sizes: list[int], mine: Tensor, group: Any, ranks: Sequence[int]
) -> tuple[Any, ...]:
    """All-gather of different sizes into one buffer; ``ranks`` are the group's."""
    if len(set(sizes)) == 1:
        return (dist.all_gather_into_tensor(everything, mine, group=group, async_op=True),)
    parts = list(everything.split(sizes))
    if dist.get_backend(group) == "nccl":  # grouped broadcasts
        return (dist.all_gather(parts, mine, group=group, async_op=True),)
    parts[ranks.index(dist.get_rank())].copy_(mine)
    return tuple(
        dist.broadcast(part, src=rank, group=group, async_op=True) for part, rank in zip(parts, ranks) if part.numel()
    )
