"""Newton-Schulz against float64 SVDs, against other implementations bit for bit, and on inputs that break others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torch_muon_newton_schulz

from hf_emopt.linalg import (
    NS_COEFFICIENTS,
    ResolvedCoefficients,
    default_dtype,
    newton_schulz,
    newton_schulz_flops,
    resolve_coefficients,
)
from hf_emopt.linalg.newton_schulz import Normalization, add_product, gram, symmetric_polynomial

JORDAN = (3.4445, -4.7750, 2.0315)
FROBENIUS_SETS = [name for name, entry in NS_COEFFICIENTS.items() if entry.scaling == "frobenius"]
SHAPES = [(16, 16), (24, 40), (40, 24), (7, 33), (64, 160), (160, 64), (1, 9), (9, 1)]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def row_scaled(x: Tensor) -> Tensor:
    """The almost-orthogonal-layer rescaling in the dtype of x, on the short side."""
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x
    wide = wide / (wide @ wide.mT).abs().sum(-1, keepdim=True).sqrt()
    return wide.mT if tall else wide


def response(resolved: ResolvedCoefficients, sigma: Tensor) -> Tensor:
    """The singular values that ``sigma``, of a matrix divided by its norm, become: the composed polynomial."""
    value = sigma / resolved.safety_factor
    for a, b, c in resolved.steps:
        value = value * (a + value**2 * (b + value**2 * c))
    return value


def by_svd(x: Tensor, name: str, steps: int | None) -> Tensor:
    """The polynomial of a set applied to exact singular values, in float64."""
    resolved = resolve_coefficients(name, steps)
    x = x.double()
    normalized = row_scaled(x) if resolved.scaling == "aol" else x / torch.linalg.matrix_norm(x, keepdim=True)
    u, sigma, vh = torch.linalg.svd(normalized, full_matrices=False)
    return (u * response(resolved, sigma).unsqueeze(-2)) @ vh


def keller_reference(g: Tensor, steps: int, dtype: torch.dtype, coefficients: tuple[float, float, float]) -> Tensor:
    """KellerJordan/Muon's arithmetic (857d1ad), with the dtype and coefficients as arguments."""
    a, b, c = coefficients
    transposed = g.size(-2) > g.size(-1)
    x = g.to(dtype)
    x = x.mT if transposed else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram_matrix = x @ x.mT
        x = a * x + (b * gram_matrix + c * gram_matrix @ gram_matrix) @ x
    return x.mT if transposed else x


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


class TestAgainstSVD:
    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    @pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24), (32, 32), (2, 2, 5, 9)])
    def test_float32_is_the_polynomial_of_the_singular_values(self, name: str, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape)
        result = newton_schulz(x, None, name, torch.float32)
        assert result.shape == x.shape
        assert relative(result, by_svd(x, name, None)) < 1e-5

    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    def test_float64_likewise(self, name: str) -> None:
        x = torch.randn(12, 20, dtype=torch.float64)
        assert relative(newton_schulz(x, None, name, torch.float64), by_svd(x, name, None)) < 1e-12
        # From float32 on, what is known of the matrix is its normalization in that.
        result = newton_schulz(x.float(), None, name, torch.float64)
        assert result.dtype is torch.float64
        assert relative(result, by_svd(x.float(), name, None)) < 1e-5

    @pytest.mark.parametrize("steps", [1, 3, 6])
    def test_number_of_steps(self, steps: int) -> None:
        x = torch.randn(24, 40)
        result = newton_schulz(x, steps, "polar_express", torch.float32)
        assert relative(result, by_svd(x, "polar_express", steps)) < 1e-5

    def test_converged_set_gives_the_polar_factor(self) -> None:
        x = torch.randn(24, 40)
        u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
        assert relative(newton_schulz(x, 10, "polar_express", torch.float32), u @ vh) < 1e-5

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)])
    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    def test_half_precision_differs_by_rounding_alone(self, name: str, dtype: torch.dtype, tolerance: float) -> None:
        x = torch.randn(4, 64, 160)
        result = newton_schulz(x, None, name, dtype)
        assert result.dtype == dtype
        assert relative(result, by_svd(x, name, None)) < tolerance

    def test_row_rescaling_changes_the_direction(self) -> None:
        """The documented difference of "aol": the polar factor of the rescaled matrix, not of the input."""
        x = (torch.randn(16, 24) + torch.randn(24)) * torch.logspace(0, -2, 16)[:, None]
        u, _, vh = torch.linalg.svd(row_scaled(x.double()), full_matrices=False)
        exact = torch.linalg.svd(x.double(), full_matrices=False)
        result = newton_schulz(x, 4, "aol", torch.float32)
        assert relative(result, u @ vh) < 0.06
        assert relative(result, exact[0] @ exact[2]) > 0.1


def band_inputs(kind: str) -> Tensor:
    """Twenty seeds of 64 x 160 matrices, one batch."""
    seeds, m, n = 20, 64, 160
    if kind == "randn":
        return torch.randn(seeds, m, n)
    if kind == "rank_one":
        return torch.randn(seeds, m, 1) @ torch.randn(seeds, 1, n)
    if kind == "rank_one_signs":  # all entries of one magnitude: rounding errors add up instead of averaging out
        return torch.sign(torch.randn(seeds, m, 1) @ torch.randn(seeds, 1, n))
    if kind == "low_rank_and_noise":
        return torch.randn(seeds, m, 8) @ torch.randn(seeds, 8, n) + 1e-2 * torch.randn(seeds, m, n)
    u = torch.linalg.qr(torch.randn(seeds, m, m)).Q
    v = torch.linalg.qr(torch.randn(seeds, n, m)).Q
    return (u * torch.logspace(0, -6, m)) @ v.mT


class TestSingularValues:
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 3e-3), (torch.bfloat16, 1e-2)]
    )
    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    @pytest.mark.parametrize("kind", ["randn", "rank_one", "rank_one_signs", "low_rank_and_noise", "condition_1e6"])
    def test_band(self, kind: str, name: str, dtype: torch.dtype, tolerance: float) -> None:
        """All results are below the band's top; as many are above its foot as inputs are above the lower bound."""
        entry = NS_COEFFICIENTS[name]
        x = band_inputs(kind)
        wide = x.double()
        start = row_scaled(wide) if entry.scaling == "aol" else wide / torch.linalg.matrix_norm(wide, keepdim=True)
        reached = (torch.linalg.svdvals(start) >= entry.lower_bound).sum(-1)
        assert reached.min() >= 1
        result = torch.linalg.svdvals(newton_schulz(x, None, name, dtype).double())
        low, high = entry.singular_value_band
        assert result.max() <= high + tolerance
        assert result.gather(-1, reached[:, None] - 1).min() >= low - tolerance

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    def test_rank_one_keeps_its_sign(self, name: str, dtype: torch.dtype) -> None:
        """Rounding lifts the only singular value above 1, where minimax schedules turn negative or overflow."""
        low, high = NS_COEFFICIENTS[name].singular_value_band
        for m, n in [(16, 16), (16, 48), (17, 40), (24, 33), (31, 64)]:
            u, v = torch.randn(30, m, 1), torch.randn(30, 1, n)
            for x in (u @ v, torch.sign(u @ v), torch.ones(30, m, n)):
                y = newton_schulz(x, None, name, dtype).double()
                start = row_scaled(x.double()) if NS_COEFFICIENTS[name].scaling == "aol" else x.double()
                left, _, right = torch.linalg.svd(start, full_matrices=False)
                along = (left[..., :1].mT @ y @ right[..., :1, :].mT).flatten()
                assert low - 2e-2 <= along.min()
                assert along.max() <= high + 2e-2


class TestScale:
    @pytest.mark.parametrize("name", ["jordan", "polar_express_modded", "aol"])
    @pytest.mark.parametrize("norm", [1.0, 1e-3, 1e-7, 1e-12, 1e-30, 1e6, 1e20, 1e38])
    def test_norm_does_not_matter(self, name: str, norm: float) -> None:
        x = torch.randn(24, 40)
        x /= x.norm()
        expected = newton_schulz(x, None, name, torch.float32)
        # Multiplying by a number that is no power of two rounds the input itself once.
        assert relative(newton_schulz(x * norm, None, name, torch.float32), expected) < 2e-6

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize("exponent", [-110, -40, 60, 120])
    def test_powers_of_two_change_no_bit(self, exponent: int, dtype: torch.dtype) -> None:
        x = torch.randn(24, 40)
        assert torch.equal(newton_schulz(x * 2.0**exponent, dtype=dtype), newton_schulz(x, dtype=dtype))

    def test_every_matrix_of_a_batch_has_its_own_scale(self) -> None:
        x = torch.randn(3, 24, 40)
        scale = torch.tensor([2.0**-100, 1.0, 2.0**100])[:, None, None]
        assert torch.equal(newton_schulz(x * scale), newton_schulz(x))

    def test_float64_beyond_the_range_of_float32(self) -> None:
        x = torch.randn(8, 12, dtype=torch.float64)
        expected = newton_schulz(x, dtype=torch.float32)
        assert torch.equal(newton_schulz(x * 2.0**-500, dtype=torch.float32), expected)
        assert torch.equal(newton_schulz(x * 2.0**500, dtype=torch.float32), expected)

    def test_float16_input_whose_norm_overflows(self) -> None:
        x = (1e3 * torch.randn(512, 512)).half()
        assert torch.isinf(x.norm())
        result = newton_schulz(x, dtype=torch.float16)
        assert torch.isfinite(result).all()
        assert relative(result, by_svd(x, "jordan", 5)) < 1e-2

    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_zero_gives_zero(self, name: str, dtype: torch.dtype) -> None:
        x = torch.randn(3, 16, 24)
        x[1] = 0
        result = newton_schulz(x, None, name, dtype)
        assert torch.equal(result[1], torch.zeros(16, 24, dtype=dtype))
        assert torch.isfinite(result).all()
        assert result[0].count_nonzero() > 0
        assert newton_schulz(torch.zeros(16, 24), None, name, dtype).count_nonzero() == 0

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    def test_zero_rows_stay_zero_under_row_rescaling(self, dtype: torch.dtype) -> None:
        x = torch.randn(16, 24)
        x[3] = 0
        result = newton_schulz(x, None, "aol", dtype)
        assert result[3].count_nonzero() == 0
        assert torch.isfinite(result).all()

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float16, 5e-3)])
    def test_small_rows_survive_row_rescaling(self, dtype: torch.dtype, tolerance: float) -> None:
        """Orthogonal rows with squared norms down to 1e-8, which float16 cannot hold."""
        x = torch.linalg.qr(torch.randn(24, 16)).Q.mT * torch.logspace(0, -4, 16)[:, None]
        assert relative(newton_schulz(x, None, "aol", dtype), by_svd(x, "aol", None)) < tolerance

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", ["jordan", "aol"])
    def test_non_finite_matrix_shows_and_stays_alone(self, name: str, bad: float) -> None:
        x = torch.randn(3, 8, 12)
        x[1, 2, 3] = bad
        result = newton_schulz(x, None, name)
        assert not torch.isfinite(result[1]).any()
        clean = newton_schulz(x[[0, 2]], None, name)
        assert torch.isfinite(clean).all()
        torch.testing.assert_close(result[[0, 2]], clean, rtol=0, atol=1e-6)


class TestInput:
    @pytest.mark.parametrize("normalization", ["scale_free", "clamp", "add"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
    @pytest.mark.parametrize("shape", [(12, 20), (20, 12), (1, 12, 20), (2, 20, 12)])
    def test_is_not_modified(self, shape: tuple[int, ...], dtype: torch.dtype, normalization: Normalization) -> None:
        """``x.to(dtype)`` is ``x`` itself when the dtypes agree: a division in place would change the caller's data."""
        x = torch.randn(shape).to(dtype)
        before = x.clone()
        result = newton_schulz(x, dtype=dtype, normalization=normalization)
        assert torch.equal(x, before)
        assert result.data_ptr() != x.data_ptr()

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize("name", ["jordan", "aol"])
    def test_transposed_input_gives_transposed_output(self, name: str, dtype: torch.dtype) -> None:
        x = torch.randn(3, 16, 40)
        assert torch.equal(newton_schulz(x.mT, None, name, dtype), newton_schulz(x, None, name, dtype).mT)

    def test_strides_do_not_matter(self) -> None:
        x = torch.randn(2, 40, 16)
        torch.testing.assert_close(newton_schulz(x), newton_schulz(x.mT.contiguous().mT), rtol=0, atol=1e-6)
        spread = torch.zeros(2, 40, 32)[..., ::2].copy_(x)
        torch.testing.assert_close(newton_schulz(spread), newton_schulz(x), rtol=0, atol=1e-6)

    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)]
    )
    @pytest.mark.parametrize("shape", [(5, 16, 40), (5, 40, 16), (2, 3, 16, 16)])
    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    def test_batch_equals_loop(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
        """An expert stack is its experts one by one; each at another scale, so that a shared norm would show."""
        x = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        loop = torch.stack([newton_schulz(matrix, None, name, dtype) for matrix in x.reshape(-1, *shape[-2:])])
        result = newton_schulz(x, None, name, dtype)
        assert result.shape == x.shape
        for matrix, expected in zip(result.reshape(loop.shape), loop, strict=True):
            assert relative(matrix, expected) < tolerance

    @pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0), (2, 0, 3, 4)])
    @pytest.mark.parametrize("normalization", ["scale_free", "clamp", "add"])
    def test_empty(self, shape: tuple[int, ...], normalization: Normalization) -> None:
        result = newton_schulz(torch.empty(shape), dtype=torch.bfloat16, normalization=normalization)
        assert result.shape == shape
        assert result.dtype == torch.bfloat16

    def test_default_dtype(self) -> None:
        assert newton_schulz(torch.randn(4, 6).bfloat16()).dtype == torch.float32
        assert default_dtype(torch.device("cuda")) == torch.bfloat16
        assert default_dtype(torch.device("xpu")) == torch.bfloat16
        assert default_dtype(torch.device("cpu")) == torch.float32

    def test_result_has_no_graph(self) -> None:
        assert not newton_schulz(torch.randn(4, 6, requires_grad=True)).requires_grad

    def test_user_coefficients(self) -> None:
        x = torch.randn(8, 12)
        assert torch.equal(newton_schulz(x, 5, JORDAN), newton_schulz(x, 5, "jordan"))
        assert torch.equal(newton_schulz(x, 2, [JORDAN, JORDAN]), newton_schulz(x, 2, "jordan"))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
    def test_other_dtypes_raise(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match="real floating-point"):
            newton_schulz(torch.ones(4, 6, dtype=dtype))

    @pytest.mark.parametrize("shape", [(), (5,)])
    def test_fewer_than_two_dimensions_raise(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"matrices \(\.\.\., m, n\)"):
            newton_schulz(torch.ones(shape))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"dtype": torch.int8}, "computes in bfloat16, float16, float32, float64"),
            ({"dtype": torch.float8_e4m3fn}, "computes in bfloat16"),
            ({"normalization": "l2"}, "one of scale_free, clamp, add"),
            ({"eps": 1e-7}, "no meaning for normalization='scale_free'"),
            ({"eps": -1.0, "normalization": "clamp"}, "eps must be"),
            ({"eps": math.nan, "normalization": "add"}, "eps must be"),
            ({"coefficients": "aol", "steps": 4, "normalization": "clamp"}, "rescales rows"),
            ({"coefficients": "jordon"}, "did you mean 'jordan'"),
            ({"steps": 0}, "between 1 and 100"),
        ],
    )
    def test_bad_arguments(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            newton_schulz(torch.ones(4, 6), **arguments)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):  # an empty matrix is no way around the check
            newton_schulz(torch.ones(0, 6), **arguments)  # type: ignore[arg-type]


class TestReproducesOthers:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", [1.0, 1e-9])
    def test_torch_muon_bit_for_bit(self, shape: tuple[int, int], input_dtype: torch.dtype, scale: float) -> None:
        x = (scale * torch.randn(shape)).to(input_dtype)
        expected = torch_muon_newton_schulz(x.clone(), JORDAN, 5, 1e-7)
        result = newton_schulz(x, 5, "jordan", torch.bfloat16, eps=1e-7, normalization="clamp")
        assert torch.equal(result, expected)
        # A parameter's matrices come as a batch, mostly of one.
        assert torch.equal(newton_schulz(x[None], 5, "jordan", torch.bfloat16, normalization="clamp")[0], expected)

    @pytest.mark.parametrize("eps", [1e-7, 1e-3])
    def test_torch_muon_with_other_settings(self, eps: float) -> None:
        x = 1e-6 * torch.randn(24, 40)
        expected = torch_muon_newton_schulz(x.clone(), (3.0, -3.2, 1.2), 7, eps)
        result = newton_schulz(x, 7, (3.0, -3.2, 1.2), torch.bfloat16, eps=eps, normalization="clamp")
        assert torch.equal(result, expected)

    @pytest.mark.parametrize("shape", [*SHAPES, (3, 24, 40), (3, 40, 24)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("scale", [1.0, 1e-9])
    def test_keller_jordan_bit_for_bit(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
        x = scale * torch.randn(shape)
        expected = keller_reference(x, 5, dtype, JORDAN)
        assert torch.equal(newton_schulz(x, 5, "jordan", dtype, eps=1e-7, normalization="add"), expected)

    def test_the_two_orders_of_rounding_differ(self) -> None:
        """Otherwise the tests above could not tell one mode from the other."""
        x = torch.randn(24, 40)
        clamp = newton_schulz(x, dtype=torch.bfloat16, normalization="clamp")
        add = newton_schulz(x, dtype=torch.bfloat16, normalization="add")
        assert not torch.equal(clamp, add)

    def test_safety_factor_multiplies_the_norm(self) -> None:
        x = torch.randn(24, 40)
        expected = by_svd(x, "polar_express_modded", 5)
        for normalization in ("clamp", "add"):
            result = newton_schulz(x, 5, "polar_express_modded", torch.float32, normalization=normalization)
            assert relative(result, expected) < 1e-5

    @pytest.mark.parametrize("name", FROBENIUS_SETS)
    def test_modes_agree_where_no_floor_acts(self, name: str) -> None:
        x = torch.randn(24, 40)
        free = newton_schulz(x, None, name, torch.float32)
        for normalization in ("clamp", "add"):
            other = newton_schulz(x, None, name, torch.float32, normalization=normalization)
            assert relative(other, free) < 1e-5


class TestProducts:
    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize("shape", [(12, 20), (5, 12, 20)])
    @pytest.mark.parametrize(("b", "c"), [(-4.775, 2.0315), (-3.3, 0.0)])
    def test_against_float64(self, shape: tuple[int, ...], dtype: torch.dtype, b: float, c: float) -> None:
        """Also c = 0, where a plain call of ``torch.baddbmm`` in bfloat16 would drop b."""
        x = torch.randn(shape).to(dtype)
        x = x / torch.linalg.matrix_norm(x.float(), keepdim=True).to(dtype)
        tolerance = 2 * torch.finfo(dtype).eps
        product = gram(x)
        torch.testing.assert_close(product.double(), x.double() @ x.double().mT, rtol=tolerance, atol=tolerance)
        polynomial = symmetric_polynomial(product, b, c)
        wide = product.double()
        torch.testing.assert_close(polynomial.double(), b * wide + c * wide @ wide, rtol=tolerance, atol=tolerance)
        result = add_product(1.5, polynomial, x)
        expected = 1.5 * x.double() + polynomial.double() @ x.double()
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("m", "n", "steps", "flops"),
    [(768, 3072, 5, 40_768_634_880), (3072, 768, 5, 40_768_634_880), (2, 3, 1, 64), (4096, 4096, 5, 2_061_584_302_080)],
)
def test_flops(m: int, n: int, steps: int, flops: int) -> None:
    assert newton_schulz_flops(m, n, steps) == flops
