"""How the elements of a bucket travel: shards to the owner of a whole matrix, updates back, and copies to replicas.

For a bucket on a grid of ``replicas x shards`` ranks, with ``P`` elements of matrices:

===========  ============================================  =======================  ==========================
stage        who with whom                                 received by a rank       skipped when
===========  ============================================  =======================  ==========================
``send``     all-to-all among the shards of a replica;     P / (replicas shards)    not sharded, or local
             all-gather where every rank gets everything
``give``     the same, back                                P / (replicas shards)    not sharded, or local
``share``    all-gather among the replicas of a shard      P (1 - 1/replicas)       one replica
                                                           / shards
===========  ============================================  =======================  ==========================

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
from hf_emopt.kernels.multi_tensor import Runs, contiguous_run, fits, runs_work

__all__ = ["Arrival", "Exchange", "Stacks"]

Slices = tuple[slice, ...]
Stage = Literal["sent", "received", "given", "taken"]


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

    def apart(self, stacks: Sequence[Tensor]) -> list[Tensor]:
        """Each owned region; views of contiguous stacks."""
        pairs = zip(self.rows, self.shapes)
        return [stacks[number].narrow(0, start, count).reshape(shape) for (number, start, count), shape in pairs]


class Exchange:
    """The collectives of one bucket, for the parameters that take part in a step.

    Args:
        bucket: what travels.
        grid: the ranks, and this rank's place.
        present: indices of the bucket's parameters that have a gradient; the same on all ranks.
        dtype: of the wire.
        device: where transforms run; buffers are there.
    """

    def __init__(
        self, bucket: Bucket, grid: Grid, present: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.grid, self.dtype, self.device = grid, dtype, device
        self.travels, self.returns = bucket.sends, bucket.returns
        self._to_all = bucket.sends and bucket.keeps  # what each owner keeps, all have gathered
        chosen = set(present)
        owned_regions = [s for s in bucket.owned_regions if s.parameter in chosen]
        row = {index: k for k, index in enumerate(present)}
        self.owned = [s for s in owned_regions if s.owner == grid.position]
        storages = [p.storage for p in bucket.parameters]
        self._held = [
            [
                _pieces(_owned_by(owned_regions, q * grid.shards + s), storages, grid.shard, row)
                for s in range(grid.shards)
            ]
            for q in range(grid.replicas)
        ]
        # For each shard, what it holds of this rank's owned regions, in the owned regions' coordinates.
        self._asked = [
            [
                _Piece(k, _relative(inside, owned_region.region, _zero(inside)), _numel(inside))
                for k, owned_region in enumerate(self.owned)
                for region, _ in storages[owned_region.parameter].held(s)
                if (inside := _intersection(region, owned_region.region)) is not None
            ]
            for s in range(grid.shards)
        ]
        self._returned, self._given = self._held, self._asked
        if any(owned_region.gives is not None for owned_region in owned_regions):
            self._narrow(owned_regions, storages, row)
        self._runs: dict[tuple[Stage, bool], Runs | None] = {}
        mine = grid.replica
        self._sizes = {
            "sent": _splits(self.pieces("sent")),
            "received": _splits(self._asked),
            "given": _splits(self._given),
            "returned": _splits(self._returned[mine]),
            "held": _splits(self._held[mine]),
        }
        """Elements by rank of what is sent and received."""
        self._shares = [sum(_splits(pieces)) for pieces in self._returned]
        self._room = {stage: self._size(stage) for stage in ("sent", "received", "given", "taken")}

    def _size(self, stage: Stage) -> int:
        """Elements of a stage's buffer."""
        if stage == "given" and not self.returns:  # then it is the part of the copies that this rank makes
            return sum(p.numel for p in self._returned[self.grid.replica][self.grid.shard])
        return sum(_splits(self.pieces(stage)))

    def _narrow(self, owned_regions: Sequence[OwnedRegion], storages: Sequence[Storage], row: dict[int, int]) -> None:
        """Pieces on the way back, where owners pass on a part of what they have transformed."""
        grid = self.grid
        self._returned = [
            [
                _pieces(_owned_by(owned_regions, q * grid.shards + s), storages, grid.shard, row, narrowed=True)
                for s in range(grid.shards)
            ]
            for q in range(grid.replicas)
        ]
        self._given = [
            [
                _Piece(k, _relative(part, owned_region.region, _zero(part)), _numel(part))
                for k, owned_region in enumerate(self.owned)
                for region, _ in storages[owned_region.parameter].held(s)
                for given in _given(owned_region)
                if (part := _intersection(region, given)) is not None
            ]
            for s in range(grid.shards)
        ]

    # ------------------------------------------------------------------ pieces and buffers

    def pieces(self, stage: Stage) -> list[list[_Piece]]:
        """What lies in a stage's buffer, in order, by rank.

        Args:
            stage: ``"sent"`` and ``"taken"`` are of this rank's part of each present parameter, ``"received"`` and
                ``"given"`` of its owned regions.
        """
        mine = self.grid.replica
        if stage == "sent":
            return self._held[mine][:1] if self._to_all else self._held[mine]
        if stage == "received":
            return self._asked
        if stage == "given":
            return self._given if self.returns else [self._given[self.grid.shard]]
        replicas = self._returned if self.grid.replicas > 1 else [self._returned[mine]]
        return [pieces for shards in replicas for pieces in shards]

    def runs(self, stage: Stage, tensors: Sequence[Tensor], stacks: Stacks | None = None) -> Runs | None:
        """The pieces of a stage as runs, tensors on the left and the buffer on the right.

        ``None`` where kernels do not run here, or a piece's elements do not follow one another in its tensor.

        Args:
            stacks: how the tensors hold the owned regions, where they are not these themselves.
        """
        if not runs_work(self.device):
            return None
        key = (stage, stacks is not None)  # which follow from the bucket and from who is present, as this exchange does
        if key not in self._runs:
            shapes = [t.shape for t in tensors] if stacks is None else stacks.shapes
            runs = _as_runs([p for run in self.pieces(stage) for p in run], shapes)
            self._runs[key] = runs if runs is None or stacks is None else runs.within(left=stacks.places)
        return self._runs[key]

    def room(self, stage: Stage) -> Tensor:
        """An empty buffer of a stage."""
        return torch.empty(self._room[stage], dtype=self.dtype, device=self.device)

    # ------------------------------------------------------------------ shards to owners

    def send(self, messages: Sequence[Tensor]) -> Arrival:
        """Starts to bring the owned regions together from all shards.

        Args:
            messages: this rank's part of each present parameter.
        """
        return self.send_packed(self._packed("sent", messages))

    def send_packed(self, buffer: Tensor) -> Arrival:
        """As :meth:`send`, of a buffer that is filled already."""
        sizes = self._sizes["received"]
        if self._to_all:
            everything = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
            ranks = self.grid.ranks[self.grid.replica]
            return Arrival(everything, _all_gather(everything, sizes, buffer, self.grid.shard_group, ranks), (buffer,))
        return self._all_to_all(buffer, self._sizes["held"], sizes)

    def receive(self, arrival: Arrival, targets: Sequence[Tensor], stacks: Stacks | None = None) -> None:
        """Waits for :meth:`send` and fills a tensor for each owned region, or stacks of them."""
        self._unpack("received", arrival.wait(), targets, stacks)

    # ------------------------------------------------------------------ updates back

    def give(
        self, outputs: Sequence[Tensor], scales: Sequence[float] | None = None, stacks: Stacks | None = None
    ) -> Arrival:
        """Starts to return what owners made of their owned regions: to the shards, or, where all are whole, nowhere yet.

        Args:
            outputs: one for each owned region, or ``stacks`` of them.
            scales: a factor on each owned region.
        """
        buffer = self._packed("given", outputs, scales, stacks)
        if not self.returns:
            return Arrival(buffer)
        return self._all_to_all(buffer, self._sizes["given"], self._sizes["returned"])

    def share(self, arrival: Arrival) -> Arrival:
        """Starts to copy what this replica has to the others, and theirs here."""
        if self.grid.replicas == 1:
            return arrival
        mine = arrival.wait()
        sizes = self._shares
        everything = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        ranks = [row[self.grid.shard] for row in self.grid.ranks]
        return Arrival(everything, _all_gather(everything, sizes, mine, self.grid.replica_group, ranks), (mine,))

    def take(self, arrival: Arrival, targets: Sequence[Tensor]) -> None:
        """Waits and fills this rank's part of each present parameter.

        What the owner is too is written as well: it went through the wire's dtype like everybody's.
        """
        self._unpack("taken", arrival.wait(), targets)

    # ------------------------------------------------------------------ packing

    def _packed(
        self,
        stage: Stage,
        tensors: Sequence[Tensor],
        scales: Sequence[float] | None = None,
        stacks: Stacks | None = None,
    ) -> Tensor:
        buffer = self.room(stage)
        runs = self.runs(stage, tensors, stacks)
        if runs is not None and fits([buffer], self.device) and fits(tensors, self.device):
            runs.to_right(tensors, [buffer], scales)
            return buffer
        if stacks is not None:
            tensors = stacks.apart(tensors)
        if scales is not None:
            tensors = [t.to(torch.promote_types(t.dtype, torch.float32)) * scale for t, scale in zip(tensors, scales)]
        flat = [p for run in self.pieces(stage) for p in run]
        if flat:
            parts = [part.view(tensors[p.index][p.where].shape) for part, p in zip(_parts(buffer, flat), flat)]
            torch._foreach_copy_(parts, [tensors[p.index][p.where] for p in flat])
        return buffer

    def _unpack(self, stage: Stage, buffer: Tensor, targets: Sequence[Tensor], stacks: Stacks | None = None) -> None:
        runs = self.runs(stage, targets, stacks)
        if runs is not None and fits([buffer], self.device) and fits(targets, self.device):
            runs.to_left([buffer], targets)
            return
        if stacks is not None:
            targets = stacks.apart(targets)
        pieces = [p for run in self.pieces(stage) for p in run]
        if pieces:
            views = [targets[p.index][p.where] for p in pieces]
            torch._foreach_copy_(views, [part.view(v.shape) for part, v in zip(_parts(buffer, pieces), views)])

    def _all_to_all(self, buffer: Tensor, sizes: list[int], wanted: list[int]) -> Arrival:
        received = torch.empty(sum(wanted), dtype=self.dtype, device=self.device)
        work = dist.all_to_all_single(received, buffer, wanted, sizes, group=self.grid.shard_group, async_op=True)
        return Arrival(received, (work,), (buffer,))


def _as_runs(pieces: Sequence[_Piece], shapes: Sequence[Sequence[int]]) -> Runs | None:
    runs, offset = [], 0
    for piece in pieces:
        run = contiguous_run(piece.where, shapes[piece.index])
        if run is None:
            return None
        runs.append((piece.index, run[0], 0, offset, run[1]))
        offset += run[1]
    return Runs(runs)


def _owned_by(owned_regions: Sequence[OwnedRegion], position: int) -> list[OwnedRegion]:
    return [s for s in owned_regions if s.owner == position]


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
            for part in _given(owned_region) if narrowed else (owned_region.region,):
                inside = _intersection(region, part)
                if inside is not None:
                    pieces.append(_Piece(row[owned_region.parameter], _relative(inside, region, place), _numel(inside)))
    return pieces


def _given(owned_region: OwnedRegion) -> tuple[Region, ...]:
    return (owned_region.region,) if owned_region.gives is None else owned_region.gives


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


def _parts(buffer: Tensor, pieces: Sequence[_Piece]) -> tuple[Tensor, ...]:
    return buffer.split([p.numel for p in pieces])


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
