"""Matrices with chosen spectra, and a count of reads on the host; shared by the tests of roots and bases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

D = 24


def _geometric(condition: float) -> Tensor:
    return torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), D, dtype=torch.float64)


def _padded(*values: float) -> Tensor:
    """The values, the last one repeated."""
    return torch.tensor([*values, *[values[-1]] * (D - len(values))], dtype=torch.float64)


SPECTRA = {
    "identity": torch.ones(D, dtype=torch.float64),
    "condition_1e2": _geometric(1e2),
    "condition_1e4": _geometric(1e4),
    "condition_1e6": _geometric(1e6),
    "condition_1e10": _geometric(1e10),
    "duplicates": torch.repeat_interleave(_geometric(1e3)[::4], 4),
    "rank_1": _padded(1.0, 0.0),
    "rank_1_and_noise": torch.cat([torch.ones(1, dtype=torch.float64), 1e-9 * _geometric(10)[1:]]),
    "one_zero_negative": torch.cat([torch.ones(8), torch.zeros(8), torch.full((8,), -1e-9)]).double(),
    "large": 1e12 * _geometric(1e3),
    "small": 1e-12 * _geometric(1e3),
}
WELL_CONDITIONED = ["identity", "condition_1e2", "condition_1e4", "duplicates", "large", "small"]
SINGULAR = ["rank_1", "one_zero_negative"]


def orthogonal(count: int, d: int = D, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(count, d, d, generator=generator, dtype=torch.float64)).Q


def matrices(names: list[str], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """One exactly symmetric matrix a name, in its own random eigenbasis."""
    q = orthogonal(len(names), seed=seed)
    a = (q * torch.stack([SPECTRA[name] for name in names]).unsqueeze(-2)) @ q.mT
    return (0.5 * (a + a.mT)).to(dtype)


def relative_error(value: Tensor, reference: Tensor) -> Tensor:
    """``(N,)``: in the Frobenius norm, in float64."""
    difference = (value.double() - reference.double()).flatten(1).norm(dim=1)
    return difference / reference.double().flatten(1).norm(dim=1)


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads() -> Iterator[_Reads]:
    """Counts what would make the host wait for the device."""
    with _Reads() as mode:
        yield mode
