"""Products on clusters of two multiprocessors, on a GPU: exact integers in every kind of tile, and everything they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_emopt.kernels.hopper import launch
from hf_emopt.kernels.triton import runtime
from hf_emopt.kernels.triton.configs import CANDIDATES, Config
from hf_emopt.kernels.triton.symmetric_launch import symmetric_product

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or runtime.architecture(torch.device("cuda", 0)) != 90,
    reason="needs an NVIDIA GPU of capability 9.0",
)
(CLUSTERS,) = (config for config in CANDIDATES[90] if config.clusters)
DTYPES = [torch.float16, torch.bfloat16]
# One square; an odd and an even number of tiles in a column; rows, columns and depths that end within a tile; more items
# than clusters; depths of less than a stage, of one square's stage and a part, and of many.
SHAPES = [
    (1, 8, 8),
    (1, 128, 64),
    (3, 384, 320),
    (2, 512, 192),
    (2, 1000, 72),
    (5, 136, 1000),
    (24, 1024, 256),
    (7, 2048, 64),
    (1, 4104, 264),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape, device="cuda").to(dtype)


def symmetric_integers(batch: int, m: int, dtype: torch.dtype) -> Tensor:
    c = integers(batch, m, m, dtype=dtype)
    return c.tril() + c.tril(-1).mT


def exact(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, diagonal: float) -> Tensor:
    value = alpha * (a.double() @ b.double().mT)
    if c is not None:
        value += beta * c.double()
    value.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return value.to(a.dtype)


def product(
    a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None = None, config: Config = CLUSTERS, **others: Any
) -> Tensor:
    """With ``alpha`` 0.5, ``beta`` 2 and ``diagonal`` 3."""
    if out is None:
        out = torch.full((*a.shape[:2], a.shape[1]), float("nan"), dtype=a.dtype, device="cuda")
    assert not config.clusters or launch.takes(a, b, c, out)
    return symmetric_product(a, b, c, out, config=config, **{"alpha": 0.5, "beta": 2.0, "diagonal": 3.0, **others})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers_are_exact(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch, m, _ = shape
    a = integers(*shape, dtype=dtype)
    c = symmetric_integers(batch, m, dtype)
    for b in (a, a.clone()):  # one factor, and two
        for added in (None, c):
            for _ in range(2):  # compiled, then launched from what was kept
                found = product(a, b, added)
                assert torch.equal(found, exact(a, b, added, 0.5, 2.0, 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_c_of_which_the_upper_triangle_is_not_read(dtype: torch.dtype) -> None:
    a = integers(3, 1416, 136, dtype=dtype)
    c = symmetric_integers(3, 1416, dtype)
    expected = exact(a, a, c, 0.5, 2.0, 3.0)
    c += torch.full_like(c, float("inf")).triu(1)
    assert torch.equal(product(a, a, c, c), expected)


@pytest.mark.parametrize("same", [True, False])
def test_rows_apart_and_matrices_apart(same: bool) -> None:
    wide = integers(4, 600, 512, dtype=torch.float16)
    a = wide[::2, 8:408, 64:384]
    b = a if same else wide.clone()[::2, 8:408, 64:384]
    out = torch.zeros(2, 408, 480, dtype=torch.float16, device="cuda")
    inner = out[:, 8:, 16:416][:, :400]
    product(a, b, None, inner)
    assert torch.equal(inner, exact(a, b, None, 0.5, 0.0, 3.0))
    assert out.count_nonzero() == inner.count_nonzero()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("added", [False, True])
def test_corrections(power: int, added: bool) -> None:
    if power == 2 and added:
        pytest.skip("a correction of alpha alone takes no C")
    a = integers(3, 520, 200, dtype=torch.bfloat16)
    c = symmetric_integers(3, 520, torch.bfloat16) if added else None
    t = torch.tensor([0.5, 1.0, 4.0], device="cuda")
    found = product(a, a, c, correction=t, power=power)
    for i, s in enumerate(t.tolist()):
        alpha, beta, diagonal = (0.5 * s, 2.0 * s, 3.0 * s) if power == 1 else (0.5 * s * s, 2.0, 3.0)
        part = slice(i, i + 1)
        assert torch.equal(found[part], exact(a[part], a[part], None if c is None else c[part], alpha, beta, diagonal))


def test_random_numbers_agree_with_the_other_kernels() -> None:
    """Sums of both are in float32 over the same blocks; what differs are their order within the matrix instruction's."""
    a = torch.randn(4, 1536, 1100 // 8 * 8, device="cuda", dtype=torch.float16)
    found, other = (product(a, a, None, config=config, alpha=0.01) for config in (CLUSTERS, Config(128, 128, 64, 4, 3)))
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found.float(), other.float(), rtol=2e-3, atol=2e-3)


def test_offsets_past_two_to_the_31() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    a = torch.zeros(3, 32768, 64, dtype=torch.float16, device="cuda")
    a[2, -300:] = integers(300, 64, dtype=torch.float16)
    found = product(a, a, None)
    expected = exact(a[2:, -300:], a[2:, -300:], None, 0.5, 0.0, 3.0)
    assert torch.equal(found[2:, -300:, -300:], expected)
    assert not found[2, :-300, -300:].any()
    assert not found[2, -300:, :-300].any()


def test_replays_and_streams() -> None:
    a = integers(6, 1024, 512, dtype=torch.float16)
    out = torch.zeros(6, 1024, 1024, dtype=torch.float16, device="cuda")
    product(a, a, None, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(a, a, None, out)
    a.copy_(integers(6, 1024, 512, dtype=torch.float16))
    graph.replay()
    assert torch.equal(out, exact(a, a, None, 0.5, 0.0, 3.0))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        a.zero_()
        found = product(a, a, None)
    side.synchronize()
    assert torch.equal(found, exact(a, a, None, 0.5, 0.0, 3.0))


def test_other_problems_run_on_the_other_kernels() -> None:
    a = integers(2, 392, 264, dtype=torch.float16)
    assert not launch.takes(a, a, None, torch.empty(2, 392, 392, device="cuda"))
    unaligned = a[:, :, 1:]
    assert not launch.takes(unaligned, unaligned, None, a.new_empty(2, 392, 392))
    for x in (unaligned, a.mT.contiguous().mT):
        out = a.new_empty(2, 392, 392)
        symmetric_product(x, x, None, out, alpha=0.5, beta=0.0, diagonal=3.0, config=CLUSTERS)
        assert torch.equal(out, exact(x, x, None, 0.5, 0.0, 3.0))
