"""The kernels on a GPU: exact integers, offsets past 2^31, graphs, no waiting, and as accurate as they claim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.triton import configs, launching, runtime
from hf_emopt.kernels.triton.configs import Config
from hf_emopt.linalg import newton_schulz, resolve_coefficients
from hf_emopt.linalg.gram_newton_schulz import iterate
from hf_emopt.linalg.symmetric_products import kernels_pay, normalize_cast, syrk

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not runtime.has_copy_engine(torch.device("cuda")),
    reason="needs an NVIDIA GPU of capability 9.0 or higher, and Triton",
)
JORDAN = resolve_coefficients("jordan", 5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def candidates() -> tuple[Config, ...]:
    capability = runtime.architecture(torch.device("cuda", 0)) if torch.cuda.is_available() else 90
    return configs.CANDIDATES[max(90, configs.family(capability or 90))]


@pytest.mark.parametrize("config", candidates(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 200, 264), (1, 520, 136), (2, 136, 72)])
@pytest.mark.parametrize("trans", [False, True])
def test_products_of_integers_are_exact(
    config: Config, dtype: torch.dtype, shape: tuple[int, int, int], trans: bool
) -> None:
    from hf_emopt.kernels.triton.symmetric_product import symmetric_product

    x = torch.randint(-2, 3, shape, device="cuda").to(dtype)
    x = x.mT.contiguous().mT if trans else x
    c = torch.randint(-2, 3, (shape[0], shape[1], shape[1]), device="cuda").to(dtype)
    c = c.tril() + c.tril(-1).mT
    exact = 0.5 * (x.double() @ x.double().mT) + 2 * c.double() + torch.eye(shape[1], device="cuda")
    for out_dtype in (dtype, torch.float32):
        out = torch.full(c.shape, float("nan"), dtype=out_dtype, device="cuda")
        for _ in range(2):  # compiled, then launched from what was kept
            symmetric_product(x, x, c.to(out_dtype), out, alpha=0.5, beta=2.0, diagonal=1.0, config=config)
            assert torch.equal(out, exact.to(out_dtype))


def test_offsets_past_two_to_the_31() -> None:
    from hf_emopt.kernels.triton.symmetric_product import symmetric_product

    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros(9, 16384, 16384, device="cuda", dtype=torch.float16)
    x[-1] = torch.randint(-1, 2, (16384, 16384), device="cuda").half() / 16
    out = torch.full_like(x, float("nan"))
    config = Config(128, 128, 64, 8, 3)
    symmetric_product(x, x, x, out, alpha=1.0, beta=0.0, config=config)
    assert out[:-1].count_nonzero() == 0
    assert torch.equal(out[-1], (x[-1] @ x[-1].mT))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e20])
def test_normalize(scale: float) -> None:
    x = torch.randn(3, 700, 900, device="cuda") * scale
    x[1] = 0
    results = [normalize_cast(x, torch.float16, 1024.0, backend="triton") for _ in range(2)]
    assert torch.equal(*results)
    expected = 1024 * x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True).clamp_min(1e-300)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-3, atol=1e-4)


def spectra(m: int, n: int) -> dict[str, Tensor]:
    seeds, device = 20, "cuda"
    u = torch.linalg.qr(torch.randn(seeds, m, m, device=device)).Q
    v = torch.linalg.qr(torch.randn(seeds, n, m, device=device)).Q
    return {
        "gaussian": torch.randn(seeds, m, n, device=device),
        "tiny": 1e-12 * torch.randn(seeds, m, n, device=device),
        "badly scaled": torch.randn(seeds, m, n, device=device) * torch.logspace(0, -4, m, device=device)[:, None],
        "rank 1": torch.randn(seeds, m, 1, device=device) @ torch.randn(seeds, 1, n, device=device),
        "rank 16 and noise": torch.randn(seeds, m, 16, device=device) @ torch.randn(seeds, 16, n, device=device)
        + 1e-2 * torch.randn(seeds, m, n, device=device),
        "condition 1e6": (u * torch.logspace(0, -6, m, device=device)) @ v.mT,
    }


@pytest.mark.parametrize("shape", [(64, 512), (512, 512), (512, 1536), (1536, 512), (1024, 1024), (1024, 4096)])
def test_accuracy_against_the_bfloat16_iteration(shape: tuple[int, int]) -> None:
    for kind, x in spectra(min(shape), max(shape)).items():
        x = x if shape[0] <= shape[1] else x.mT.contiguous()
        exact = iterate(x.double(), JORDAN.steps, None, 1.0, torch.float64, "torch")
        y = (x / torch.linalg.matrix_norm(x, keepdim=True)).bfloat16()
        y = y if shape[0] <= shape[1] else y.mT
        for a, b, c in JORDAN.steps:
            gram = y @ y.mT
            y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        y = y if shape[0] <= shape[1] else y.mT
        for _ in range(3):  # launched, recorded, replayed
            ours = newton_schulz(x)
            error, other = ((z.double() - exact).flatten(1).norm(dim=1) for z in (ours, y))
            assert (error <= other).all(), kind
        sigma = torch.linalg.svdvals(ours[:4].float())
        assert sigma.max() <= 1.2024 + 0.06, kind


@pytest.mark.parametrize("shape", [(64, 256), (256, 512), (20, 48, 512), (2, 4096, 4096)])
def test_replays_give_the_same_and_see_new_input(shape: tuple[int, ...]) -> None:
    cuda_graphs.clear()
    x, other = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
    first = newton_schulz(x)
    for _ in range(3):
        assert torch.equal(newton_schulz(x), first)
    second = newton_schulz(other)
    assert not torch.equal(second, first)
    assert torch.equal(newton_schulz(x), first)
    cuda_graphs.clear()
    assert torch.equal(newton_schulz(other), second)


@pytest.mark.parametrize("shape", [(256, 512), (20, 48, 512)])
def test_part_of_somebody_elses_graph(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="cuda")
    expected = newton_schulz(x)
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros_like(x)
    with torch.cuda.graph(graph):
        result = newton_schulz(static)
    static.copy_(x)
    graph.replay()
    assert torch.equal(result, expected)


def test_does_not_wait_for_the_device() -> None:
    x = torch.randn(4, 256, 512, device="cuda")
    for _ in range(3):
        newton_schulz(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        newton_schulz(x)
        syrk(x.half(), backend="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_twelve_shapes_and_ten_coefficient_sets_share_their_binaries() -> None:
    """Sizes, coefficients and learning rates are run-time values; what is compiled is one kernel per tile and alignment."""
    if not kernels_pay(torch.device("cuda")):
        pytest.skip("no measured table for this GPU")
    for i in range(1, 13):
        newton_schulz(torch.randn(64 * i, 64 * i + 128, device="cuda"))
    kept = len(launching._COMPILED)
    for i in range(1, 11):
        for j in range(1, 13):
            newton_schulz(torch.randn(64 * j, 64 * j + 128, device="cuda"), 5, (3.0 + 0.01 * i, -4.0, 1.9))
    assert len(launching._COMPILED) == kept


@pytest.mark.parametrize("config", candidates(), ids=str)
def test_products_are_repeatable_and_take_scales(config: Config) -> None:
    from hf_emopt.kernels.triton.symmetric_product import symmetric_product

    x = torch.randint(-2, 3, (3, 520, 264), device="cuda").half()
    exact = 0.5 * x.double() @ x.double().mT
    out = torch.full(exact.shape, float("nan"), dtype=torch.float16, device="cuda")
    for _ in range(3):
        symmetric_product(x, x, None, out, alpha=0.5, beta=0.0, diagonal=1.0, config=config)
        symmetric_product(out, out, None, out.clone(), alpha=2.0**-16, beta=0.0, config=config)
    assert torch.equal(out.double(), exact + torch.eye(520, device="cuda").double())
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.0], [2.0, 1.0]], device="cuda")
    c = out.float()
    t, beta = scales.double().view(3, 2, 1, 1).unbind(1)
    expected = exact * t**2 + beta * c.double()
    symmetric_product(x, x, c, c, alpha=0.5, beta=1.0, config=config, scales=scales)
    assert torch.equal(c.double(), expected)


@pytest.mark.parametrize("shape", [(512, 512), (512, 1536), (1536, 512)])
def test_orthogonalizations_are_repeatable(shape: tuple[int, int]) -> None:
    cuda_graphs.clear()
    for kind, x in spectra(min(shape), max(shape)).items():
        x = x if shape[0] <= shape[1] else x.mT.contiguous()
        results = [newton_schulz(x) for _ in range(4)]  # launched, recorded, replayed
        assert all(torch.equal(results[0], other) for other in results), kind


@pytest.mark.parametrize("shape", [(3, 129, 67), (2, 200, 100), (1, 515, 77)])
def test_what_the_copy_engine_cannot_read_is_multiplied_by_torch(shape: tuple[int, int, int]) -> None:
    x = torch.randint(-2, 3, shape, device="cuda").half()
    result = syrk(x, alpha=0.5, diagonal=1.0)
    expected = 0.5 * (x.double() @ x.double().mT) + torch.eye(shape[1], device="cuda")
    assert torch.equal(result.double(), expected)
    assert newton_schulz(torch.randn(shape, device="cuda")).isfinite().all()
