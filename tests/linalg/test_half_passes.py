"""Passes that make 16-bit factors, in Triton's interpreter (in a process of its own): to the bit what torch makes."""

from __future__ import annotations

import importlib

import pytest
import torch
from interpreted import INTERPRETING

if INTERPRETING:
    from torch import Tensor

    import hf_emopt
    from hf_emopt.kernels.triton import half_precision
    from hf_emopt.linalg import inverse_root_fp16 as half_newton
    from hf_emopt.linalg.symmetric_products import accumulate_gram
    from hf_emopt.rules import blocks
    from hf_emopt.rules.blocks import BlockGrid
    from hf_emopt.rules.kronecker import KroneckerRule

    # The package has a function of that name.
    precision = importlib.import_module("hf_emopt.linalg.matmul_precision")

    def inputs() -> dict[str, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, 70, 50)
        x[1] = 0
        x[2] *= 1e-20
        wide = torch.randn(2, 64, 256)
        wide[0] *= 1e5
        return {
            "matrices": x,
            "a window": torch.randn(2, 96, 130)[:, 8:72, :128],
            "blocks where they lie": wide.view(2, 64, 2, 128).permute(0, 2, 1, 3),
            "bfloat16": x.bfloat16(),
            "one row": torch.randn(4, 1, 33),
        }

    @pytest.mark.parametrize("name", list(inputs()))
    def test_scaled_half(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        x = inputs()[name]
        assert half_precision.takes(x)
        half, scale = precision.scaled_half(x)
        monkeypatch.setattr(precision, "kernels_pay", lambda device: False)
        expected, powers = precision.scaled_half(x)
        assert torch.equal(half, expected)
        assert torch.equal(scale, powers)

    def test_scaled_half_of_known_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(3, 40, 40)
        positive = x @ x.mT * torch.tensor([1e-20, 1.0, 0.0]).view(3, 1, 1)
        basis = torch.linalg.qr(x).Q
        for matrix, peak in ((positive, blocks.peak_of_positive), (basis, blocks.peak_of_basis)):
            known = peak(matrix)
            assert (matrix.abs().amax((1, 2)) <= known * (1 + 1e-6)).all()
            half, scale = precision.scaled_half(matrix, known)
            assert not scale.eq(0).any()
            torch.testing.assert_close(half.float(), matrix / scale, rtol=2.0**-11, atol=2.0**-24)
            with monkeypatch.context() as without:
                without.setattr(precision, "kernels_pay", lambda device: False)
                assert all(torch.equal(a, b) for a, b in zip(precision.scaled_half(matrix, known), (half, scale)))
        assert torch.equal(
            precision.scaled_half(positive)[1], precision.scaled_half(positive, positive.amax((1, 2)))[1]
        )

    @pytest.mark.parametrize("lift", [0.0, 0.3])
    def test_factors(lift: float, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        e, active = torch.randn(3, 40, 40), torch.tensor([True, False, True])
        found = half_newton._factors(e, lift, -0.25, active)
        monkeypatch.setattr(half_newton, "kernels_pay", lambda device: False)
        for a, b in zip(found, half_newton._factors(e, lift, -0.25, active)):
            assert torch.equal(a, b)
        assert bool(found[0][1].any()) == (lift == 0.0)  # inactive blocks wait through scaled steps alone

    @pytest.mark.parametrize("dims", [(48, 40), (48, 56), (80, 16), (80, 72)])
    def test_blocks_on_their_way(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        """Scaled as they are written, also into windows and where both dimensions are cut."""
        torch.manual_seed(0)
        grid = BlockGrid.of(dims, (32, 32))
        parts = grid.split(torch.randn(2, *dims))
        scales = [torch.rand(part.shape[0] * part.shape[1]) for part in parts]
        expected = grid.merge([p * s.view(*p.shape[:2], 1, 1) for p, s in zip(parts, scales)])
        launches: list[object] = []

        def counted(*arguments: Tensor) -> Tensor:
            launches.append(arguments)
            return plain_times(*arguments)

        plain_times = half_precision.times
        monkeypatch.setattr(half_precision, "times", counted)
        assert torch.equal(
            grid.merge([p.clone(memory_format=torch.contiguous_format) for p in parts], scales), expected
        )
        assert len(launches) == len(parts)

    @pytest.mark.parametrize("trans", [False, True])
    def test_factors_accumulate(trans: bool) -> None:
        torch.manual_seed(0)
        a = torch.randn(2, 48, 40).half()
        a = a.mT.contiguous().mT if trans else a
        c = torch.randn(2, 48, 48)
        c = c + c.mT
        scale, beta = torch.tensor([2.0**-20, 4.0]), torch.tensor([0.9, 1.0])
        gram = a.double() @ a.double().mT
        expected = beta.view(2, 1, 1) * c.double() + 0.1 * scale.double().view(2, 1, 1) ** 2 * gram
        for backend in ("auto", "torch"):
            value = accumulate_gram(c.clone(), a, scale, 0.1, beta, backend=backend)
            assert torch.equal(value, value.mT)
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)

    def test_where_nothing_is_added_nothing_changes() -> None:
        """A step that is skipped has rows of zeros and says so by a scale of 0; 0.05 has no exact quotient."""
        torch.manual_seed(0)
        c = torch.randn(2, 48, 48)
        c = c + c.mT
        for backend in ("auto", "torch"):
            zeros, ones = torch.zeros(2), torch.ones(2)
            value = accumulate_gram(c.clone(), torch.zeros(2, 48, 40).half(), zeros, 0.05, ones, backend=backend)
            assert torch.equal(value, c)

    @pytest.mark.parametrize("cls", [hf_emopt.Shampoo, hf_emopt.SOAP])
    def test_steps_on_kernels_are_those_of_torch(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whole steps, cut into blocks, with one that is skipped in their middle. The blocks are square: a basis of what a
        singular factor leaves out is any."""
        moved, accumulated = [], []
        accumulate = KroneckerRule.accumulate
        monkeypatch.setattr(
            KroneckerRule, "accumulate", lambda *arguments: accumulated.append(1) or accumulate(*arguments)
        )
        for disabled in ("", "1"):
            monkeypatch.setenv("HF_EMOPT_DISABLE_TRITON", disabled)
            generator = torch.Generator().manual_seed(0)
            weight = torch.nn.Parameter(torch.randn(64, 32, generator=generator))
            solver = {} if cls is hf_emopt.SOAP else {"root_solver": "coupled_newton", "relative_epsilon": 1e-3}
            options = {"precondition_frequency": 1, "max_preconditioner_dim": 32, "oversize": "block", **solver}
            optimizer = cls([weight], lr=0.01, matmul_precision="fp16", **options)
            before = weight.detach().clone()
            for step in range(3):
                weight.grad = torch.randn(weight.shape, generator=generator)
                weight.grad[0, 0] += float("nan") if step == 1 else 0.0
                factors = [v.clone() for k, v in optimizer.state[weight].items() if "factor" in k]
                optimizer.step()
                if step == 1:
                    after = [v for k, v in optimizer.state[weight].items() if "factor" in k]
                    assert len(factors) == 2
                    assert all(torch.equal(x, y) for x, y in zip(factors, after, strict=True))
            assert optimizer.skipped_steps == 1
            assert len(accumulated) == (3 if disabled else 0)  # gradients are gathered by one pass
            moved.append(weight.detach() - before)
        assert (moved[0] - moved[1]).norm() <= 1e-3 * moved[1].norm()

    def test_a_large_factor_meets_a_small_gradient() -> None:
        """Sums start from the factor over the square of the gradient's scale, which must not leave float32."""
        a, scale = precision.scaled_half(torch.full((2, 48, 40), 1e-25))
        c = 1e6 * torch.eye(48).expand(2, 48, 48).clone()
        for backend in ("auto", "torch"):
            value = accumulate_gram(c.clone(), a, scale.view(-1), 1e-3, torch.full((2,), 0.999), backend=backend)
            torch.testing.assert_close(value, 0.999 * c)
