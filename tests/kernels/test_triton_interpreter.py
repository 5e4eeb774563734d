"""The kernels on the CPU, in Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own.

What the interpreter does otherwise than a GPU, and how these tests bear it: ``tl.dot`` multiplies the bit patterns of
bfloat16 (the kernels multiply in float32 there), float32 is cut to bfloat16 instead of rounded (bounds for bfloat16 are
twice as wide, exact tests use numbers that need no rounding), and several tilings of one kernel cannot be autotuned (no
kernel is).
"""

from __future__ import annotations

import pytest
import torch
from interpreted import INTERPRETING, small_integers

HALF = [torch.float16, torch.bfloat16]

if INTERPRETING:
    from hf_emopt.kernels.triton.configs import Config
    from hf_emopt.kernels.triton.small_matrices import small_gram_newton_schulz
    from hf_emopt.kernels.triton.symmetric_product import symmetric_product, takes
    from hf_emopt.linalg import resolve_coefficients
    from hf_emopt.linalg.gram_newton_schulz import find_restart_steps, iterate
    from hf_emopt.linalg.symmetric_products import normalize_cast, symmul, syrk

    CONFIGS = [Config(block_m, block_n, 32, 4, 1, group=2) for block_m, block_n in ((32, 32), (32, 64), (64, 32))]

    @pytest.fixture(autouse=True)
    def _seed() -> None:
        torch.manual_seed(0)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("shape", [(2, 72, 48), (1, 64, 40), (96, 64), (3, 8, 16), (2, 40, 8)])
    @pytest.mark.parametrize("trans", [False, True])
    def test_products_of_integers_are_exact(
        config: Config, dtype: torch.dtype, shape: tuple[int, ...], trans: bool
    ) -> None:
        """Sums below 256 and factors that are powers of two: no rounding, so every element must be right to the bit."""
        x = small_integers(*shape).to(dtype)
        x = x.mT.contiguous().mT if trans else x
        c = small_integers(*shape[:-1], shape[-2]).to(dtype)
        c = c.tril() + c.tril(-1).mT
        expected = 0.5 * (x.double() @ x.double().mT) + 2 * c.double() + 3 * torch.eye(shape[-2])
        for out_dtype in (dtype, torch.float32):
            out = torch.full(c.shape, float("nan"), dtype=out_dtype)
            symmetric_product(x, x, c.to(out_dtype), out, alpha=0.5, beta=2.0, diagonal=3.0, config=config)
            assert torch.equal(out.double(), expected)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("dtype", HALF)
    def test_results_are_symmetric_bit_for_bit(config: Config, dtype: torch.dtype) -> None:
        x = torch.randn(2, 72, 40).to(dtype)
        out = torch.full((2, 72, 72), float("nan"), dtype=dtype)
        symmetric_product(x, x, None, out, alpha=1.0, beta=0.0, config=config)
        assert torch.equal(out, out.mT)
        bound = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 1)
        torch.testing.assert_close(out.double(), x.double() @ x.double().mT, rtol=bound, atol=bound)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_two_factors(config: Config) -> None:
        a = torch.randn(2, 72, 72)
        a = (a @ a.mT / 72).half()
        b = (a.double() @ a.double()).half()
        out = torch.empty_like(a)
        symmetric_product(a, b, None, out, alpha=1.0, beta=0.0, config=config)
        exact = a.double() @ b.double()
        # Of the product only the lower triangle counts: b is a polynomial of a up to rounding.
        torch.testing.assert_close(out.double().tril(), exact.tril(), rtol=2e-3, atol=2e-3)
        assert torch.equal(out, out.mT)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("same", [True, False])
    @pytest.mark.parametrize("scaled", [True, False])
    def test_two_factors_and_scales_of_integers_are_exact(config: Config, same: bool, scaled: bool) -> None:
        a = small_integers(2, 72, 48).half()
        b = a if same else 2 * a
        c = small_integers(2, 72, 72)
        c = c.tril() + c.tril(-1).mT
        numbers = torch.tensor([[0.5, 4.0], [2.0, 1.0]])
        t, beta = numbers.double().view(2, 2, 1, 1).unbind(1) if scaled else (1.0, 2.0)
        expected = t**2 * 0.5 * (a.double() @ b.double().mT) + beta * c.double() + 3 * torch.eye(72)
        for dtype in (torch.float32,) if scaled else (torch.float32, torch.float16):
            out = torch.full(expected.shape, float("nan"), dtype=dtype)
            scales = numbers if scaled else None
            symmetric_product(a, b, c.to(dtype), out, alpha=0.5, beta=2.0, diagonal=3.0, config=config, scales=scales)
            assert torch.equal(out.double(), expected)

    def test_scales_are_for_float32_results_with_a_c() -> None:
        a, scales = torch.zeros(1, 32, 32).half(), torch.ones(1, 2)
        for c, out, given in ((None, a.float(), scales), (a, a, scales), (a.float(), a.float(), torch.ones(1))):
            with pytest.raises(ValueError, match="scales are"):
                symmetric_product(a, a, c, out, alpha=1.0, beta=1.0, scales=given)

    @pytest.mark.parametrize("config", CONFIGS[::2], ids=str)
    def test_strides(config: Config) -> None:
        """A batch cut out of a larger one, and rows with a gap."""
        x = small_integers(2, 40, 24).half()
        expected = x.double() @ x.double().mT
        for view in (torch.zeros(4, 40, 24).half()[::2], torch.zeros(2, 40, 32).half()[..., :24]):
            view.copy_(x)
            out = torch.zeros(2, 40, 48, dtype=torch.float16)[..., :40]
            assert takes(view, view, None, out)
            symmetric_product(view, view, None, out, alpha=1.0, beta=0.0, config=config)
            assert torch.equal(out.double(), expected)

    @pytest.mark.parametrize("odd", ["columns with a gap", "an address", "rows", "a result"])
    def test_torch_multiplies_what_the_copy_engine_cannot_read(odd: str) -> None:
        x = small_integers(2, 40, 24).half()
        view = {
            "columns with a gap": torch.zeros(2, 40, 48).half()[..., ::2],
            "an address": torch.zeros(2, 40, 32).half()[..., 1:25],
            "rows": torch.zeros(2, 40, 25).half()[..., :24],
            "a result": torch.zeros(2, 37, 24).half(),
        }[odd]
        view.copy_(x[:, : view.shape[1]])
        m = view.shape[1]
        out = torch.zeros(2, m, m, dtype=torch.float16)
        assert not takes(view, view, None, out)
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            syrk(view, out=out, backend="triton")
        assert torch.equal(syrk(view, out=out).double(), view.double() @ view.double().mT)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_accumulates_in_place_and_ignores_the_upper_triangle(config: Config) -> None:
        g = small_integers(2, 72, 24).to(torch.bfloat16)
        lower = small_integers(2, 72, 72).tril()
        factor = lower + torch.full((72, 72), float("nan")).triu(1)
        symmetric_product(g, g, factor, factor, alpha=0.25, beta=0.5, config=config)
        expected = 0.5 * (lower + lower.tril(-1).mT) + 0.25 * g.float() @ g.float().mT
        assert torch.equal(factor, expected)

    def test_public_functions_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
        from hf_emopt.kernels.triton import symmetric_product as kernels

        launches: list[int] = []
        original = kernels.symmetric_product
        monkeypatch.setattr(kernels, "symmetric_product", lambda *a, **k: (launches.append(1), original(*a, **k))[1])
        x = small_integers(2, 24, 40).half()
        assert torch.equal(syrk(x), syrk(x, backend="torch"))
        assert torch.equal(syrk(x.mT, trans=True), syrk(x, backend="torch"))
        assert torch.equal(symmul(x, x, out_dtype=torch.float32), syrk(x, backend="torch", out_dtype=torch.float32))
        assert len(launches) == 3
        monkeypatch.setenv("HF_EMOPT_DISABLE_TRITON", "1")
        syrk(x)
        assert len(launches) == 3
        with pytest.raises(ValueError, match="HF_EMOPT_DISABLE_TRITON"):
            syrk(x, backend="triton")

    @pytest.mark.parametrize("dtype", [torch.float32, *HALF])
    @pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-40, 1e20])
    def test_normalize(dtype: torch.dtype, scale: float) -> None:
        x = torch.randn(3, 70, 90) * scale
        x[1] = 0
        result = normalize_cast(x, dtype, 4.0, backend="triton")
        wide = x.double()
        expected = 4 * wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp_min(1e-300)
        bound = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 1) + (1e-4 if scale == 1e-40 else 0)
        torch.testing.assert_close(result.double(), expected, rtol=bound, atol=0.1 * bound)
        assert result[1].count_nonzero() == 0

    def test_normalize_does_not_see_powers_of_two_and_shows_infinities() -> None:
        x = torch.randn(2, 70, 90)
        plain = normalize_cast(x, torch.float16, backend="triton")
        for exponent in (-100, 60):
            assert torch.equal(normalize_cast(x * 2.0**exponent, torch.float16, backend="triton"), plain)
        assert torch.equal(normalize_cast(x.mT, torch.float16, backend="triton"), plain.mT)
        x[0, 3, 4] = float("inf")
        result = normalize_cast(x, torch.float16, backend="triton")
        assert result[0].isnan().all()
        assert torch.equal(result[1], plain[1])

    @pytest.mark.parametrize("form", ["standard", "gram"])
    @pytest.mark.parametrize("shape", [(48, 80), (2, 40, 72), (80, 48)])
    def test_iterations_agree_with_torch(form: str, shape: tuple[int, ...]) -> None:
        """The same rounding points: what is left are sums in another order."""
        resolved = resolve_coefficients("jordan", 5)
        restarts = find_restart_steps(resolved.steps) if form == "gram" else None
        x = torch.randn(shape)
        results = [
            iterate(x, resolved.steps, restarts, 1.0, torch.float16, backend).double()
            for backend in ("triton", "torch")
        ]
        exact = iterate(x.double(), resolved.steps, None, 1.0, torch.float64)
        errors = [((result - exact).norm() / exact.norm()).item() for result in results]
        assert errors[0] <= 1.5 * errors[1]
        assert errors[1] < 5e-3

    @pytest.mark.parametrize("name", ["jordan", "polar_express_modded", "cubic5"])
    @pytest.mark.parametrize("shape", [(3, 24, 60), (2, 60, 17), (2, 5, 33)])
    def test_one_program_a_matrix(name: str, shape: tuple[int, ...]) -> None:
        resolved = resolve_coefficients(name, 5)
        restarts = find_restart_steps(resolved.steps)
        x = torch.randn(shape) * torch.logspace(-20, 10, shape[0])[:, None, None]
        out = torch.full(shape, float("nan"), dtype=torch.float16)
        small_gram_newton_schulz(x, [c for s in resolved.steps for c in s], restarts, resolved.safety_factor, out)
        exact = iterate(x.double(), resolved.steps, None, resolved.safety_factor, torch.float64)
        by_products = iterate(x, resolved.steps, restarts, resolved.safety_factor, torch.float16, "torch")
        error, other = ((y.double() - exact).norm() / exact.norm() for y in (out, by_products))
        assert error <= max(2 * other, 2e-3)

    def test_one_program_shows_zero_and_infinity() -> None:
        x = torch.zeros(2, 16, 32)
        x[1, 3, 4] = float("inf")
        out = torch.empty(2, 16, 32, dtype=torch.float16)
        small_gram_newton_schulz(x, [3.4445, -4.7750, 2.0315] * 5, (2,), 1.0, out)
        assert out[0].count_nonzero() == 0
        assert not out[1].isfinite().any()
