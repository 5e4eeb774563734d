"""16-bit factors of Shampoo and SOAP on a GPU: the numbers of torch's functions, and roots within their accuracy."""

from __future__ import annotations

import importlib

import pytest
import torch

from hf_emopt.kernels.triton import runtime
from hf_emopt.linalg import eigenbasis, inverse_root, refresh_eigenbasis
from hf_emopt.linalg.matmul_precision import scaled_half
from hf_emopt.linalg.split_products import general_product, gram_product, joined, split, split_product
from hf_emopt.linalg.symmetric_products import accumulate_gram, symmul

# The package has a function of that name.
precision = importlib.import_module("hf_emopt.linalg.matmul_precision")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not runtime.supported(torch.device("cuda")),
    reason="needs an NVIDIA GPU of capability 8.0 or higher, and Triton",
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_scaled_half_is_what_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 640, 4096 + 512, device="cuda") * torch.tensor([1e-20, 1.0, 1e10], device="cuda").view(3, 1, 1)
    blocks = x[:, :, :4096].view(3, 640, 2, 2048).permute(0, 2, 1, 3)
    found = [scaled_half(y) for y in (x, x.mT, blocks, x[:, 5:300])]
    monkeypatch.setattr(precision, "kernels_pay", lambda device: False)
    for y, (half, scale) in zip((x, x.mT, blocks, x[:, 5:300]), found):
        expected, powers = scaled_half(y)
        assert torch.equal(half, expected)
        assert torch.equal(scale, powers)


@pytest.mark.parametrize("shape", [(3, 640, 1000), (40, 96, 64), (2, 2048, 512), (1, 515, 77)])
@pytest.mark.parametrize("trans", [False, True])
def test_factors_accumulate(shape: tuple[int, int, int], trans: bool) -> None:
    a = torch.randint(-2, 3, shape, device="cuda").half()
    a = a.mT if trans else a
    c = torch.randint(-2, 3, (shape[0], a.shape[1], a.shape[1]), device="cuda").float()
    c = c + c.mT
    scale = 2.0 ** torch.randint(-3, 4, shape[:1], device="cuda").float()
    beta = torch.full_like(scale, 0.5)
    expected = 0.5 * c.double() + 0.25 * scale.double().view(-1, 1, 1) ** 2 * (a.double() @ a.double().mT)
    for _ in range(2):  # compiled, then launched from what was kept
        assert torch.equal(accumulate_gram(c.clone(), a, scale, 0.25, beta).double(), expected)


@pytest.mark.parametrize("d", [200, 512, 2048])
@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_roots_are_as_good_as_those_in_tf32(d: int, exponent: float) -> None:
    spectrum = torch.logspace(0, -6, d, device="cuda", dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(3, d, d, device="cuda", dtype=torch.float64)).Q
    a = ((q * spectrum) @ q.mT * torch.tensor([1e-12, 1.0, 1e9], device="cuda").view(3, 1, 1)).float()
    a = 0.5 * (a + a.mT)
    exact = inverse_root(a.double(), exponent, relative_epsilon=1e-3).value
    errors = {}
    for name in ("tf32", "fp16"):
        result = inverse_root(
            a, exponent, solver="coupled_newton", relative_epsilon=1e-3, precision=name, fallback=False
        )
        assert not result.failed.any()
        errors[name] = ((result.value - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max().item()
    assert errors["fp16"] <= 2.5 * errors["tf32"]


@pytest.mark.parametrize("relative_epsilon", [1e-6, 1e-5])
def test_split_factors_are_nearly_float32(relative_epsilon: float) -> None:
    spectrum = torch.logspace(0, -8, 1024, device="cuda", dtype=torch.float64)
    q = torch.linalg.qr(torch.randn(2, 1024, 1024, device="cuda", dtype=torch.float64)).Q
    a = ((q * spectrum) @ q.mT).float()
    a = 0.5 * (a + a.mT)
    exact = inverse_root(a.double(), 0.25, relative_epsilon=relative_epsilon).value
    errors = {}
    for name in ("highest", "fp16"):
        options = {"relative_epsilon": relative_epsilon, "precision": name, "fallback": False}
        result = inverse_root(a, 0.25, solver="coupled_newton", **options)
        assert not result.failed.any()
        errors[name] = ((result.value - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max().item()
    assert errors["fp16"] <= 10 * errors["highest"] + 2.0**-17


@pytest.mark.parametrize(("d", "k"), [(2048, 2048), (200, 5632), (1024, 512)])
def test_a_small_product_is_added_in_full(d: int, k: int) -> None:
    """Tensor cores cut what they add to a sum to the sum's last bit: started from C, it loses some of C at every step."""
    g = torch.randn(2, d, d, device="cuda")
    c = (g @ g.mT) / d
    a, scale = scaled_half(1e-2 * torch.randn(2, d, k, device="cuda"))
    square = a.double() @ a.double().mT

    def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
        error = found.double() - c.double() - wanted
        assert wanted.norm() < 1e-3 * c.norm()
        assert error.norm() <= 1e-4 * wanted.norm() + 2.0**-24 * c.norm()
        assert abs((error / c).diagonal(dim1=1, dim2=2).mean()) < 1e-7  # and not always to one side

    wanted = 1e-3 * scale.view(-1, 1, 1).double() ** 2 * square
    check(accumulate_gram(c.clone(), a, scale.view(-1), 1e-3, torch.ones(2, device="cuda")), wanted)
    check(symmul(a, a, c.clone(), alpha=2.0**-22, beta=1.0), 2.0**-22 * square)


@pytest.mark.parametrize("d", [136, 200, 1024, 2048])
def test_split_products_on_the_device(d: int) -> None:
    """Of commuting matrices, to float32's rounding, with one launch; and what is not asked for is not written."""
    q = torch.linalg.qr(torch.randn(2, d, d, device="cuda", dtype=torch.float64)).Q
    a, b, c = ((q * torch.rand(2, 1, d, device="cuda", dtype=torch.float64)) @ q.mT for _ in range(3))
    factors, active = (split(a.float()), split(b.float())), torch.tensor([True, False], device="cuda")
    for added in (None, c.float(), split(c.float())):
        terms = {"alpha": 0.5, "c": added, "beta": 0.0 if added is None else 2.0, "diagonal": 0.25, "active": active}
        wide, parts = split_product(*factors, wide=True, wide_diagonal=1.0, parts=True, **terms)
        exact = 0.5 * a @ b + (0.0 if added is None else 2.0) * c + 0.25 * torch.eye(d, device="cuda")
        exact[1] = 0
        # 2^-24 for each of the sums that units of depth 16 make, cut each time.
        bound = (2.0**-20 + d // 16 * 2.0**-24) * exact.norm()
        assert (joined(parts).double() - exact).norm() <= bound
        assert (wide.double() - exact - torch.eye(d, device="cuda")).norm() <= bound
        assert all(torch.equal(x, x.mT) for x in (wide, *parts))
    target = c.float()
    wide, parts = split_product(*factors, c=target, beta=1.0, out=target)
    assert wide is target
    assert parts is None
    assert (target.double() - c - a @ b).norm() <= (2.0**-20 + d // 16 * 2.0**-24) * (a @ b).norm()


@pytest.mark.parametrize("d", [136, 1024, 2048])
def test_split_products_of_any_matrices(d: int) -> None:
    q = torch.linalg.qr(torch.randn(2, d, d, device="cuda", dtype=torch.float64)).Q
    a = (q * torch.logspace(0, -6, d, device="cuda", dtype=torch.float64)) @ q.mT
    x = torch.linalg.qr(torch.randn(2, d, d, device="cuda")).Q
    # Columns of length 1: their squares, all of one sign, were cut by 1.1 to 1.2 units of 2^-24 in each step of depth 16.
    bound = 2.0**-20 + d // 16 * 2.0**-23
    image = general_product(a.float(), x)
    assert (image.double() - a @ x.double()).norm() <= bound * a.norm()
    for basis in (x.contiguous(), x.mT.contiguous().mT):
        error = gram_product(basis, basis, alpha=-1.0, diagonal=1.0)
        exact = torch.eye(d, device="cuda") - basis.mT.double() @ basis.double()
        assert (error.double() - exact).norm() <= bound * d**0.5
        assert torch.equal(error, error.mT)
    turned = gram_product(x.contiguous(), image)
    assert (turned.double() - x.mT.double() @ a @ x.double()).norm() <= 2 * bound * a.norm()


@pytest.mark.parametrize("precision_name", ["bf16x3", "fp16"])
def test_a_far_basis_needs_no_fallback(precision_name: str) -> None:
    """The second refresh of a run, of gradients that have nothing in common with the first."""

    def square() -> torch.Tensor:
        q = torch.linalg.qr(torch.randn(1, 1024, 1024, device="cuda")).Q
        return (q * torch.arange(1, 1025, device="cuda").float() ** -4) @ q.mT

    first, later = square(), sum(square() for _ in range(5))
    a = 0.5 * (first + later + (first + later).mT)
    result = refresh_eigenbasis(a, eigenbasis(first), precision=precision_name, fallback=False)
    assert not result.failed.any()
    assert result.orthogonality.max() < 2e-6


def test_a_large_factor_meets_a_small_gradient() -> None:
    """Sums start from the factor over the square of the gradient's scale, which must not leave float32."""
    a, scale = scaled_half(torch.full((2, 256, 64), 1e-25, device="cuda"))
    c = 1e6 * torch.eye(256, device="cuda").expand(2, 256, 256).clone()
    beta = torch.full((2,), 0.999, device="cuda")
    value = accumulate_gram(c.clone(), a, scale.view(-1), 1e-3, beta)
    torch.testing.assert_close(value, 0.999 * c)
