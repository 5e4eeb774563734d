"""The tables of a launch over many tensors: chunks, addresses by list, and alignment."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class _Chunks:
    run_of: Tensor
    start_of: Tensor
    numel_of: Tensor
    count: int


@dataclass(frozen=True)
class Prepared:
    """The arguments of every kernel: chunks, addresses of flat spans by list, and whether all are aligned to 16 bytes."""

    run_of: Tensor
    start_of: Tensor
    numel_of: Tensor
    count: int
    addresses: tuple[Tensor, ...]
    aligned: bool
    block: int
