"""Kernel variants, the default ones and the others, on the CPU in Triton's interpreter (in a process of its own)."""

from __future__ import annotations

import pytest
import torch
from interpreted import INTERPRETING, run_in_interpreter, small_integers
from torch import Tensor

from hf_emopt.kernels.triton import variants

if not INTERPRETING:

    def test_variants_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

    def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(variants.VARIABLE, " diagonal,estimate,")
        assert variants.chosen() == {"diagonal", "estimate"}
        monkeypatch.setenv(variants.VARIABLE, "diagonal")
        assert not variants.enabled("estimate")
        monkeypatch.delenv(variants.VARIABLE)
        assert variants.chosen() == {"diagonal", "estimate", "clusters"}, "what was measured and found faster"
        monkeypatch.setenv(variants.VARIABLE, "")
        assert not variants.chosen()
        monkeypatch.setenv(variants.VARIABLE, "diagonals")
        with pytest.raises(ValueError, match="diagonals; there are estimate, diagonal"):
            variants.chosen()


if INTERPRETING:
    from hf_emopt.kernels.triton import estimated_launch
    from hf_emopt.kernels.triton.configs import Config
    from hf_emopt.kernels.triton.estimated_launch import estimated_cast
    from hf_emopt.kernels.triton.symmetric_launch import symmetric_product
    from hf_emopt.linalg import resolve_coefficients
    from hf_emopt.linalg.gram_newton_schulz import find_restart_steps, iterate

    CONFIGS = [Config(*tile, 32, 4, 1, True, group=2) for tile in ((32, 32), (32, 64), (64, 32))]
    CONFIGS.append(Config(32, 64, 32, 4, 1, False, group=2))

    @pytest.fixture(autouse=True)
    def _seed() -> None:
        torch.manual_seed(0)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize(("same", "power"), [(True, None), (False, 1), (True, 1), (True, 2), (True, 3)])
    def test_products_of_integers_are_exact(
        config: Config, same: bool, power: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(variants.VARIABLE, "diagonal")
        a = small_integers(2, 70, 48).half()
        b = a if same else 2 * a
        c = None if power == 2 else small_integers(2, 70, 70).half()
        c = None if c is None else c.tril() + c.tril(-1).mT
        t = torch.tensor([0.5, 2.0])
        factor = torch.ones(2, 1, 1).double() if power is None else t.double().view(2, 1, 1)
        added = 3.0 * torch.eye(70).double() + (0 if c is None else 2 * c.double())
        if power == 2:
            factor, added = factor**2, added / factor**2
        expected = factor * (0.5 * (a.double() @ b.double().mT) + added)
        out = torch.full(expected.shape, float("nan"), dtype=torch.float16)
        if power == 3:
            factor, added = torch.ones(2, 1, 1).double(), 3.0 * torch.eye(70).double() + 4 * c.double()
            added += (t.double().view(2, 1, 1) ** 2 - 1) * 0.5 * (a.double() @ b.double().mT)
            expected = 0.5 * (a.double() @ b.double().mT) + added
            # For float32 results alone, whose C is float32 too.
            c, out = c.float(), out.float()
        correction = None if power is None else t if power < 3 else torch.stack((t, torch.full((2,), 4.0)), 1)
        numbers = {"alpha": 0.5, "beta": 0.0 if c is None else 2.0, "diagonal": 3.0, "power": power or 1}
        symmetric_product(a, b, c, out, config=config, correction=correction, **numbers)  # type: ignore[arg-type]
        assert torch.equal(out.double(), expected)

    def test_correction_of_a_sum_is_refused() -> None:
        a = torch.zeros(32, 32).half()
        with pytest.raises(ValueError, match="leave out c"):
            symmetric_product(a, a, a, a, alpha=1.0, beta=1.0, correction=torch.ones(1), power=2)
        with pytest.raises(ValueError, match="give c"):
            symmetric_product(a, a, None, a, alpha=1.0, beta=1.0, correction=torch.ones(1, 2), power=3)
        with pytest.raises(ValueError, match="float32 results"):
            symmetric_product(a, a, a, a, alpha=1.0, beta=1.0, correction=torch.ones(1, 2), power=3)

    def cast(x: Tensor, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
        out, correction = torch.full(x.shape, float("nan"), dtype=dtype), torch.full(x.shape[:1], float("nan"))
        estimated_cast(x, 1024.0, out, correction)
        return out, correction

    def matrices() -> Tensor:
        x = torch.randn(7, 140, 170)
        x[1] = 0
        x[2] *= 1e-40
        x[3] *= 1e-12
        x[4, 5, 6] = 1e9  # beside it the others are nothing, and no sample sees it
        x[5] *= torch.logspace(0, -4, 140)[:, None]
        x[6, 1:] = 0
        return x

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_cast_and_correction_give_the_normalized_matrix(dtype: torch.dtype) -> None:
        x = matrices()
        out, correction = cast(x, dtype)
        wide = x.double()
        norm = torch.linalg.matrix_norm(wide, keepdim=True)
        expected = 1024 * wide / norm.masked_fill(norm == 0, 1)
        bound = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 1)
        error = (out.double() * correction.double().view(-1, 1, 1) - expected).flatten(1).norm(dim=1) / 1024
        assert (error <= bound / 2).all(), error
        assert ((correction >= 0.25) & (correction <= 4)).all()
        assert ((correction[[0, 2, 3]] - 1).abs() < 0.1).all()
        assert correction[4] == 1.0  # cast again
        assert out[1].count_nonzero() == 0

    def test_cast_is_the_same_in_any_batch_and_at_any_scale(monkeypatch: pytest.MonkeyPatch) -> None:
        x = matrices()[[0, 1, 3, 4, 5, 6]]
        out, correction = cast(x)
        for i in range(6):
            single, its = cast(x[i : i + 1].contiguous())
            assert torch.equal(single[0], out[i])
            assert its[0] == correction[i]
        for exponent in (-60, 60):
            scaled, its = cast(x * 2.0**exponent)
            assert torch.equal(scaled, out)
            assert torch.equal(its, correction)
        # As many programs as a device with other multiprocessors would get.
        monkeypatch.setattr(estimated_launch, "multiprocessors", lambda device: 1000)
        again, its = cast(x)
        assert torch.equal(again, out)
        assert torch.equal(its, correction)

    def test_infinity_and_nan_are_shown() -> None:
        x = torch.randn(3, 70, 90)
        plain, _ = cast(x)
        x[0, 3, 4], x[2, 0, 0] = float("inf"), float("nan")
        out, correction = cast(x)
        assert out[0].isnan().all()
        assert out[2].isnan().all()
        assert torch.equal(out[1], plain[1])
        assert correction.isfinite().all()

    @pytest.mark.parametrize("form", ["standard", "gram"])
    @pytest.mark.parametrize(("shape", "name"), [((2, 32, 64), "jordan"), ((64, 40), "polar_express_modded")])
    def test_iterations_are_as_accurate(
        form: str, shape: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        resolved = resolve_coefficients(name, 5)
        restarts = find_restart_steps(resolved.steps) if form == "gram" else None
        # So few numbers are nearly all sampled: the estimates are made wrong by other factors for each matrix.
        factors = torch.tensor([0.6, 2.9])
        original = estimated_launch.estimated_cast

        def wrong(x: Tensor, factor: float, out: Tensor, correction: Tensor) -> None:
            original(x, factor, out, correction)
            wrong_by = factors[: len(x)]
            out.copy_(out / wrong_by.view(-1, 1, 1))
            correction.mul_(wrong_by)

        monkeypatch.setattr(estimated_launch, "estimated_cast", wrong)
        x = torch.randn(shape)
        exact = iterate(x.double(), resolved.steps, None, resolved.safety_factor, torch.float64, "torch")
        errors = {}
        for chosen in ("estimate,diagonal", ""):
            monkeypatch.setenv(variants.VARIABLE, chosen)
            y = iterate(x, resolved.steps, restarts, resolved.safety_factor, torch.float16, "triton")
            errors[chosen] = ((y.double() - exact).norm() / exact.norm()).item()
        assert errors["estimate,diagonal"] <= 1.5 * errors[""]
        assert errors[""] < 1e-2

    def test_the_estimate_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[Tensor] = []
        original = estimated_launch.estimated_cast

        def counted(x: Tensor, factor: float, out: Tensor, correction: Tensor) -> None:
            calls.append(correction)
            original(x, factor, out, correction)

        monkeypatch.setattr(estimated_launch, "estimated_cast", counted)
        monkeypatch.setenv(variants.VARIABLE, "")
        steps = resolve_coefficients("jordan", 5).steps
        x = torch.randn(2, 24, 40)
        iterate(x, steps, None, 1.0, torch.float16, "triton")
        assert not calls
        monkeypatch.setenv(variants.VARIABLE, "estimate")
        for backend in ("triton", "torch"):
            iterate(x, steps, None, 1.0, torch.bfloat16, backend)  # type: ignore[arg-type]
        iterate(x, resolve_coefficients("cubic5", 5).steps, None, 1.0, torch.float16, "triton")
        assert [c.shape for c in calls] == [(2,)]
