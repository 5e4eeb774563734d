"""Newton-Schulz on slices against the whole matrix; ranks are threads that meet at every sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slices import ComputeGroup, cuts
from torch import Tensor

import hf_emopt.linalg.newton_schulz_sharded as module
from hf_emopt.linalg.coefficients import NS_COEFFICIENTS, resolve_coefficients
from hf_emopt.linalg.cost import cheapest_form, sharded_cost
from hf_emopt.linalg.gram_newton_schulz import find_restart_steps
from hf_emopt.linalg.newton_schulz import newton_schulz, newton_schulz_flops
from hf_emopt.linalg.newton_schulz_sharded import Shard, newton_schulz_sharded

FORMS = ("polynomial", "gram_twice", "shared_polynomial")
SHAPES = [(33, 70), (70, 33), (31, 31), (1, 9), (9, 1)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each order of products, whatever would be cheapest for matrices of a test's size."""
    monkeypatch.setattr(module, "_form", lambda short, long, parts: request.param)
    return request.param


def of_slice(
    x: Tensor, dim: int, all_reduce: Any, full_shape: tuple[int, int], *given: Any,
    all_reduce_max: Any, start: int, parts: int, method: Any = "standard", index: int = -1, **options: Any,
) -> Tensor:  # fmt: skip
    """:func:`newton_schulz_sharded` of a slice that begins at ``start``."""
    stop = start + (x.shape[dim] if -x.ndim <= dim < x.ndim else 0)
    shard = Shard(dim, full_shape, start, stop, all_reduce, all_reduce_max, parts, index, method)
    return newton_schulz_sharded(x, shard, *given, **options)


def sharded(
    x: Tensor, dim: int, parts: int, kind: str = "even", compute_group: ComputeGroup | None = None, **options: Any
) -> list[Tensor]:
    """The results of all ranks."""
    compute_group = compute_group or ComputeGroup(parts)
    bounds = cuts(x.shape[dim], parts, kind)

    def rank(r: int) -> Tensor:
        first, last = bounds[r]
        part = x.narrow(dim, first, last - first)
        before = part.clone()
        result = of_slice(
            part,
            dim,
            compute_group.sum(r),
            tuple(x.shape[-2:]),
            all_reduce_max=compute_group.max(r),
            start=first,
            parts=parts,
            **options,
        )
        torch.testing.assert_close(part, before, rtol=0, atol=0, equal_nan=True)
        assert result.shape == part.shape
        return result

    return compute_group.run(rank)


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def long_dims(shape: tuple[int, int]) -> tuple[int, ...]:
    m, n = shape
    return (-2, -1) if m == n else ((-2,) if m > n else (-1,))


class TestParity:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("kind", ["even", "uneven"])
    @pytest.mark.parametrize("parts", [1, 2, 3, 4])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_slices_are_those_of_the_whole(
        self, form: str, shape: tuple[int, int], parts: int, kind: str, dtype: torch.dtype
    ) -> None:
        for batch in ((), (3,), (2, 2)):
            x = torch.randn(*batch, *shape, dtype=dtype)
            expected = newton_schulz(x, dtype=dtype)
            for dim in long_dims(shape):
                result = torch.cat(sharded(x, dim, parts, kind, dtype=dtype), dim)
                assert result.dtype == dtype
                assert relative(result, expected) < TOLERANCE[dtype]

    @pytest.mark.parametrize("name", NS_COEFFICIENTS)
    def test_every_coefficient_set(self, form: str, name: str) -> None:
        for shape in ((33, 70), (70, 33), (31, 31)):
            x = torch.randn(2, *shape, dtype=torch.float64)
            expected = newton_schulz(x, None, name, torch.float64)
            for dim in long_dims(shape):
                if dim == -2 and shape == (31, 31) and NS_COEFFICIENTS[name].scaling == "aol":
                    continue  # refused, see TestRefusals
                result = torch.cat(sharded(x, dim, 3, steps=None, coefficients=name, dtype=torch.float64), dim)
                assert relative(result, expected) < 1e-12
                narrow = torch.cat(sharded(x.float(), dim, 3, steps=None, coefficients=name, dtype=torch.float64), dim)
                assert narrow.dtype is torch.float64
                assert relative(narrow, expected) < 1e-4

    @pytest.mark.parametrize("normalization", ["clamp", "add"])
    def test_other_normalizations(self, form: str, normalization: Any) -> None:
        """Also where the floor acts: a matrix with a norm below it is scaled by the floor alone."""
        x = torch.randn(2, 20, 50, dtype=torch.float64) * torch.tensor([1.0, 1e-9])[:, None, None]
        options = {"dtype": torch.float64, "eps": 1e-6, "normalization": normalization}
        expected = newton_schulz(x, **options)
        result = torch.cat(sharded(x, -1, 3, "uneven", **options), -1)
        assert relative(result[0], expected[0]) < 1e-12
        assert relative(result[1], expected[1]) < 1e-12

    @pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e20, 1e38])
    def test_scale_does_not_matter(self, form: str, scale: float) -> None:
        x = torch.randn(20, 50)
        x /= x.abs().max()
        expected = newton_schulz(x, dtype=torch.float32)
        result = torch.cat(sharded(x * scale, -1, 3, dtype=torch.float32), -1)
        assert relative(result, expected) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["jordan", "polar_express"])
    def test_half_precision_is_as_far_from_exact_as_the_whole(self, form: str, name: str, dtype: torch.dtype) -> None:
        x = torch.randn(128, 300)
        exact = newton_schulz(x.double(), 5, name, torch.float64)
        whole = relative(newton_schulz(x, 5, name, dtype), exact)
        result = torch.cat(sharded(x, -1, 4, coefficients=name, dtype=dtype), -1)
        # Products with the Gram matrix twice round the unfinished (b X + c A X), which for steep polynomials is large.
        assert relative(result, exact) < (3.5 if form == "gram_twice" else 1.3) * whole

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", [n for n, s in NS_COEFFICIENTS.items() if s.scaling == "frobenius"])
    def test_rank_one_keeps_its_sign_in_half_precision(self, form: str, name: str, dtype: torch.dtype) -> None:
        low, high = NS_COEFFICIENTS[name].singular_value_band
        u, v = torch.randn(30, 17, 1), torch.randn(30, 1, 40)
        for x in (u @ v, torch.sign(u @ v), torch.ones(30, 17, 40)):
            result = torch.cat(sharded(x, -1, 2, steps=None, coefficients=name, dtype=dtype), -1).double()
            left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
            along = (left[..., :1].mT @ result @ right[..., :1, :].mT).flatten()
            assert low - 2e-2 <= along.min()
            assert along.max() <= high + 2e-2


class TestSpecialValues:
    def test_zero_matrices_give_zeros_and_disturb_no_others(self, form: str) -> None:
        x = torch.randn(3, 20, 50)
        x[1] = 0
        result = torch.cat(sharded(x, -1, 3, dtype=torch.float32), -1)
        assert torch.equal(result[1], torch.zeros(20, 50))
        assert relative(result, newton_schulz(x, dtype=torch.float32)) < 1e-5

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_not_finite_on_one_rank_is_not_finite_on_all(self, form: str, value: float) -> None:
        """Even if the transport's maximum loses a NaN."""
        x = torch.randn(3, 20, 50)
        x[1, 4, 49] = value
        results = sharded(x, -1, 4, dtype=torch.float32)
        for part in results:
            assert not part[1].isfinite().any()
        whole = torch.cat(results, -1)
        assert relative(whole[[0, 2]], newton_schulz(x[[0, 2]], dtype=torch.float32)) < 1e-5

    @pytest.mark.parametrize("shape", [(0, 4, 9), (2, 0, 9), (2, 0, 0)])
    def test_empty_batches_and_matrices_need_no_sums(self, shape: tuple[int, ...]) -> None:
        compute_group = ComputeGroup(2)
        assert (
            torch.cat(sharded(torch.empty(shape), -1, 2, compute_group=compute_group, dtype=torch.float32), -1).shape
            == shape
        )
        assert compute_group.calls == []


class TestSums:
    @pytest.mark.parametrize("s", [1, 2, 7, 8])
    @pytest.mark.parametrize("batch", [(), (3,)])
    def test_packing_keeps_the_lower_triangle(self, s: int, batch: tuple[int, ...]) -> None:
        a = torch.randn(*batch, s, s)
        packed = module._pack(a)
        assert packed.shape == (*batch, s * (s + 1) // 2)
        assert torch.equal(module._unpack(packed, s), a.tril() + a.tril(-1).mT)

    def test_what_travels(self, form: str) -> None:
        """A peak, a norm and one triangle a step, in float32; a second triangle in the dtype where rows are shared."""
        compute_group = ComputeGroup(2)
        sharded(torch.randn(3, 8, 20), -1, 2, compute_group=compute_group, dtype=torch.bfloat16)
        triangle = 3 * 8 * 9 // 2
        step = [("sum", torch.float32, triangle)]
        if form == "shared_polynomial":
            step.append(("sum", torch.bfloat16, triangle))
        assert compute_group.calls == [("max", torch.float32, 3), ("sum", torch.float32, 3), *(step * 5)]

    def test_gram_matrices_are_symmetric_and_equal_on_all_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: dict[int, list[Tensor]] = {}
        original = module._Slice.gram

        def gram(self: Any, y: Tensor) -> Tensor:
            result = original(self, y)
            seen.setdefault(self.start, []).append(result)
            return result

        monkeypatch.setattr(module._Slice, "gram", gram)
        sharded(torch.randn(2, 16, 40), -1, 3, dtype=torch.bfloat16)
        first, *others = seen.values()
        assert len(first) == 5
        assert len(others) == 2
        for matrices in others:
            assert all(torch.equal(a, b) for a, b in zip(first, matrices))
        assert all(torch.equal(a, a.mT) for a in first)


class TestFlops:
    @pytest.mark.parametrize("shape", [(64, 64), (96, 64), (64, 224), (4096, 14336), (8192, 8192)])
    @pytest.mark.parametrize("parts", [1, 2, 3, 8])
    @pytest.mark.parametrize("coefficients", ["jordan", "cubic5"])
    def test_count_is_that_of_the_products(self, shape: tuple[int, int], parts: int, coefficients: str) -> None:
        """The products that are done, seen by torch's own counter, on the rank with the longest slice."""
        from torch.utils.flop_counter import FlopCounterMode

        m, n = shape
        dim = -2 if m >= n else -1
        bounds = cuts(shape[dim], parts)[0]
        part = torch.empty((bounds[1], n) if dim == -2 else (m, bounds[1]), device="meta")
        with FlopCounterMode(display=False) as counter:
            of_slice(
                part,
                dim,
                lambda t: t,
                shape,
                coefficients=coefficients,
                dtype=torch.float32,
                all_reduce_max=lambda t: t,
                start=0,
                parts=parts,
            )
        counted = sharded_cost(m, n, parts).flops
        if coefficients == "cubic5":
            assert counter.get_total_flops() <= counted
        else:
            short, rows = min(shape), -(-min(shape) // parts)
            # Rows of the polynomial are shared by rounding bounds down, so the first rank may have one row less.
            shared = cheapest_form(min(shape), max(shape), parts)[0] == "shared_polynomial"
            less = 5 * 2 * short * short * (rows - bounds[1] * short // max(shape)) if shared else 0
            assert counter.get_total_flops() == counted - less

    def test_figures(self) -> None:
        assert sharded_cost(64, 200, 1).flops == newton_schulz_flops(64, 200)
        for k in (2, 4, 8):
            assert sharded_cost(4096, 4096, k).flops * k == newton_schulz_flops(4096, 4096)
            # Rows of the polynomial are shared where that saves work worth its bytes ...
            assert sharded_cost(8192, 28672, k).flops * k <= 1.32 * newton_schulz_flops(8192, 28672)
        assert sharded_cost(8192, 28672, 4).flops * 4 == newton_schulz_flops(8192, 28672)
        # ... and not in small matrices, which pay with a third product on the slice.
        assert sharded_cost(3072, 1024, 4).flops == 5 * 6 * 768 * 1024**2
        assert sharded_cost(3072, 1024, 2).flops == 5 * (4 * 1536 * 1024**2 + 2 * 1024**3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("shape", "full", "options", "message"),
        [
            ((4, 3), (4, 9), {"dim": 0}, "short side.*dim=-1"),
            ((4, 3), (5, 9), {}, "not part of matrices"),
            ((4, 3), (4, 9), {"start": 7}, "not part of matrices"),
            ((4, 3), (4, 9), {"start": -1}, "not part of matrices"),
            ((4, 3), (4, 9), {"parts": 0}, "parts=0"),
            ((4, 3), (4, 9), {"dim": 2}, "dim=2"),
            ((3, 4), (4, 4), {"dim": -2, "coefficients": "aol", "steps": None}, "rescales rows.*dim=-1"),
            ((4, 3), (4, 9), {"eps": 1e-7}, "scale_free"),
            ((4, 3), (4, 9), {"dtype": torch.int32}, "computes in"),
        ],
    )
    def test_message_names_the_cause(
        self, shape: tuple[int, int], full: tuple[int, int], options: dict[str, Any], message: str
    ) -> None:
        arguments = {"dim": -1, "start": 0, "parts": 3, **options}
        dim = arguments.pop("dim")
        with pytest.raises(ValueError, match=message):
            of_slice(torch.ones(shape), dim, lambda t: t, full, all_reduce_max=lambda t: t, **arguments)

    def test_integers_are_refused(self) -> None:
        with pytest.raises(TypeError, match="floating"):
            of_slice(
                torch.ones(4, 3, dtype=torch.int64),
                -1,
                lambda t: t,
                (4, 9),
                all_reduce_max=lambda t: t,
                start=0,
                parts=3,
            )


def gram_form(
    x: Tensor, dim: int, parts: int, kind: str, compute_group: ComputeGroup | None = None, **options: Any
) -> Tensor:
    """All slices of the Gram form's result, put together."""
    compute_group = compute_group or ComputeGroup(parts)
    bounds = cuts(x.shape[dim], parts, kind)

    def rank(r: int) -> Tensor:
        first, last = bounds[r]
        part = x.narrow(dim, first, last - first)
        return of_slice(
            part, dim, compute_group.sum(r), tuple(x.shape[-2:]), all_reduce_max=compute_group.max(r),
            start=first, parts=parts, method="gram", index=r, **options,
        )  # fmt: skip

    return torch.cat(compute_group.run(rank), dim)


class TestGramForm:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    @pytest.mark.parametrize("kind", ["even", "uneven"])
    @pytest.mark.parametrize("parts", [1, 2, 3, 4])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_slices_are_those_of_the_whole(
        self, shape: tuple[int, int], parts: int, kind: str, dtype: torch.dtype
    ) -> None:
        for batch in ((), (3,), (2, 2)):
            x = torch.randn(*batch, *shape, dtype=torch.promote_types(dtype, torch.float32))
            expected = newton_schulz(x.double(), dtype=torch.float64)
            for dim in long_dims(shape):
                result = gram_form(x, dim, parts, kind, dtype=dtype)
                assert result.dtype == dtype
                assert relative(result, expected) < TOLERANCE.get(dtype, 2e-2)

    def test_a_stack_is_a_loop_over_its_matrices(self) -> None:
        x = torch.randn(5, 12, 20)
        together = gram_form(x, -1, 3, "even", dtype=torch.float32)
        each = torch.stack([gram_form(matrix, -1, 3, "even", dtype=torch.float32) for matrix in x])
        assert relative(together, each) < 1e-6

    @pytest.mark.parametrize("steps", [1, 3, 5, 8])
    def test_gram_matrices_are_summed_at_the_start_and_at_restarts(self, steps: int) -> None:
        compute_group = ComputeGroup(3)
        gram_form(torch.randn(2, 20, 50), -1, 3, "even", compute_group, dtype=torch.float32, steps=steps)
        cost = sharded_cost(20, 50, 3, steps, method="gram")
        assert [numel for _, _, numel in compute_group.calls] == [2 * numel for numel in cost.reductions]
        restarts = find_restart_steps(resolve_coefficients("jordan", steps).steps)
        assert len(cost.reductions) == 2 + len(restarts) <= 2 + steps // 2

    @pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e20, 1e38])
    def test_scale_does_not_matter(self, scale: float) -> None:
        x = torch.randn(20, 50)
        x /= x.abs().max()
        assert relative(gram_form(x * scale, -1, 3, "uneven", dtype=torch.float32), newton_schulz(x)) < 1e-5

    def test_zeros_give_zeros_and_bad_numbers_stay_in_their_matrix(self) -> None:
        x = torch.randn(4, 20, 50)
        x[1] = 0
        x[2, 3, 4], x[3, 0, 49] = float("nan"), float("inf")
        result = gram_form(x, -1, 3, "even", dtype=torch.float32)
        assert relative(result[0], newton_schulz(x[0])) < 1e-5
        assert torch.equal(result[1], torch.zeros(20, 50))
        for matrix in result[2:]:
            for part in matrix.split(17, -1):  # on every rank
                assert not torch.isfinite(part).all()

    def test_flops_are_those_of_the_products(self) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        # The trials that place the restarts run once in a process, and are no products of the transform.
        gram_form(torch.randn(20, 50), -1, 2, "even", dtype=torch.float32)
        for m, n, parts in ((64, 256, 4), (256, 64, 2), (64, 64, 2)):
            dim = -2 if m > n else -1
            size = (m // parts, n) if dim == -2 else (m, n // parts)
            with FlopCounterMode(display=False) as counter:
                of_slice(
                    torch.empty(size, device="meta"), dim, lambda t: t, (m, n), dtype=torch.float32, start=0,
                    all_reduce_max=lambda t: t, parts=parts, method="gram", index=0,
                )  # fmt: skip
            assert counter.get_total_flops() == sharded_cost(m, n, parts, method="gram").flops

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"index": -1}, "index=-1 must say which"),
            ({"index": 3}, "index=3 must say which"),
            ({"dtype": torch.bfloat16}, "more bits than bfloat16"),
            ({"coefficients": "aol", "steps": None}, "rescales rows"),
        ],
    )
    def test_refusals(self, options: dict[str, Any], message: str) -> None:
        arguments = {"dim": -1, "start": 0, "parts": 3, "index": 0, "method": "gram", **options}
        with pytest.raises(ValueError, match=message):
            of_slice(
                torch.ones(4, 3), all_reduce=lambda t: t, full_shape=(4, 9), all_reduce_max=lambda t: t, **arguments
            )
