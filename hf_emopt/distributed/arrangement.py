"""How one parameter's matrices are transformed under tensor parallelism, as a value that plans hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hf_emopt.distributed.layout import Region, Storage

__all__ = ["MODES", "Arrangement", "TensorCut", "TensorParallel"]


TensorParallel = Literal["auto", "layerwise", "duplicated", "distributed", "blockwise"]
MODES: tuple[str, ...] = get_args(TensorParallel)


@dataclass(frozen=True)
class TensorCut:
    """How tensor parallelism cuts one parameter.

    Attributes:
        of_shard: for each shard of the storage, which slice it is in (all of it, or what FSDP leaves of it).
        regions: of each slice, in the whole's coordinates.
    """

    of_shard: tuple[int, ...]
    regions: tuple[tuple[Region, ...], ...]

    @property
    def size(self) -> int:
        """Ranks of the tensor parallel dimension."""
        return len(self.regions)

    def columns(self, storage: Storage) -> list[tuple[int, ...]]:
        """Positions of ranks that together hold every slice: one from each, for every replica and every FSDP rank."""
        by_slice = [[s for s, t in enumerate(self.of_shard) if t == slice_] for slice_ in range(self.size)]
        return [
            tuple(replica * storage.shards + shard for shard in shards)
            for replica in range(storage.replicas)
            for shards in zip(*by_slice, strict=True)
        ]


@dataclass(frozen=True)
class Arrangement:
    """How one parameter's matrices are transformed under tensor parallelism.

    Attributes:
        mode: one of :data:`MODES` but ``"auto"`` and ``"layerwise"``, which is the plan's own way.
        cut: the slices.
        costs: operations of each matrix view on each rank.
        methods: of each matrix view's distributed iteration, ``"standard"`` or ``"gram"``.
        recut: the slices are along the short side, and are first exchanged for slices along the long one.
    """

    mode: str
    cut: TensorCut
    costs: tuple[int, ...]
    methods: tuple[Literal["standard", "gram"], ...] = ()
    recut: bool = False

    def is_local(self, storage: Storage) -> bool:
        """Whether every rank has all of its slice, so that no weight-sized message is sent."""
        return self.mode != "duplicated" and not self.recut and self.cut.size == storage.shards

    def keeps(self, storage: Storage) -> bool:
        """Whether what a rank computes is for itself alone."""
        return self.mode == "duplicated" and self.cut.size == storage.shards
