"""Inverse roots against float64 eigendecompositions on spectra that break solvers."""

from __future__ import annotations

import importlib
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from spectra import SINGULAR, SPECTRA, WELL_CONDITIONED, host_reads, matrices, orthogonal, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_emopt.linalg import inverse_root, with_ladder
from hf_emopt.linalg.inverse_root_schedule import finishes, newton_schedule
from hf_emopt.linalg.symmetric_batches import spectral_bound
from hf_emopt.linalg.symmetric_products import symmul

SOLVERS = ["eigh", "coupled_newton"]
ITERATIONS = SOLVERS[1:]
NAMES = list(SPECTRA)


def by_eigh(a: Tensor, exponent: float, epsilon: float = 1e-12, relative_epsilon: float = 0.0) -> Tensor:
    """The definition, one matrix at a time, in float64."""
    roots = []
    for block in a.double():
        ridge = max(epsilon, relative_epsilon * spectral_bound(block.unsqueeze(0)).item())
        eigenvalues, q = torch.linalg.eigh(block)
        eigenvalues = eigenvalues - min(eigenvalues[0].item(), 0.0) + ridge
        roots.append(q @ torch.diag(eigenvalues**-exponent) @ q.T)
    return torch.stack(roots)


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1 / 3, 1 / 8, 1.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_float64_on_all_spectra(solver: str, exponent: float) -> None:
    a = matrices(NAMES)
    result = inverse_root(a, exponent, solver=solver)
    assert not result.failed.any()
    # Smallest eigenvalues are known to 1e-16 of the largest; for singular matrices that is 1e-4 of epsilon, and for
    # 1e12 with epsilon 1e-12 still 1e-13 of the smallest.
    for name, error in zip(NAMES, relative_error(result.value, by_eigh(a, exponent)).tolist()):
        bound = 1e-3 if name in SINGULAR else 1e-5 if name in ("condition_1e10", "rank_1_and_noise") else 1e-9
        assert error < bound, name


@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_known_spectrum(exponent: float) -> None:
    """Not by way of eigh: against eigenvalues and vectors that the matrix was made of."""
    q = orthogonal(len(NAMES))
    eigenvalues = torch.stack([SPECTRA[name] for name in NAMES])
    epsilon = 1e-7
    shifted = eigenvalues - eigenvalues.amin(-1, keepdim=True).clamp(max=0) + epsilon
    expected = (q * shifted.pow(-exponent).unsqueeze(-2)) @ q.mT
    value = inverse_root(matrices(NAMES), exponent, epsilon=epsilon).value
    assert relative_error(value, expected).max() < 1e-8


@pytest.mark.parametrize("solver", SOLVERS)
def test_float32_computed_in_float64(solver: str) -> None:
    """The root of the float32 matrix as it stands, to the rounding of the result."""
    a = matrices(NAMES, torch.float32)
    result = inverse_root(a, 0.25, solver=solver, relative_epsilon=1e-10, compute_dtype=torch.float64)
    assert result.value.dtype == torch.float32
    assert not result.failed.any()
    assert relative_error(result.value, by_eigh(a, 0.25, relative_epsilon=1e-10)).max() < 1e-6


@pytest.mark.parametrize("solver", SOLVERS)
def test_float32_with_a_relative_epsilon(solver: str) -> None:
    a = matrices(NAMES, torch.float32)
    result = inverse_root(a, 0.25, solver=solver, relative_epsilon=1e-5)
    assert not result.failed.any()
    assert not result.fell_back.any()
    # An eigenvalue of 1e-5 is known to about 1e-7.
    assert relative_error(result.value, by_eigh(a, 0.25, relative_epsilon=1e-5)).max() < 5e-3
    assert result.residual.max() < 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_float32_without_an_epsilon_that_matters(solver: str) -> None:
    """1e-12 is far below the rounding of A: the small eigenvalues are lost, the large ones must not be."""
    a = matrices(NAMES, torch.float32)
    value = inverse_root(a, 0.25, solver=solver).value.double()
    eigenvalues, q = torch.linalg.eigh(a.double())
    along = (q.mT @ value @ q).diagonal(dim1=-2, dim2=-1)
    large = eigenvalues > 1e-3 * eigenvalues[:, -1:]
    assert value.isfinite().all()
    assert (along * (eigenvalues + 1e-12).clamp(min=0.0).pow(0.25) - 1)[large].abs().max() < 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
def test_fourth_root_is_not_the_second(solver: str) -> None:
    a = torch.diag(torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)).unsqueeze(0)
    for exponent in (0.25, 0.5):
        value = inverse_root(a, exponent, epsilon=0.0, solver=solver).value[0]
        expected = torch.tensor([2.0**-exponent, 3.0**-exponent, 5.0**-exponent], dtype=torch.float64)
        torch.testing.assert_close(value, torch.diag(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exponent", [Fraction(2, 3), 0.75, Fraction(3, 2)])
def test_rational_exponents(exponent: float | Fraction) -> None:
    a = matrices(["condition_1e2", "duplicates"])
    value = inverse_root(a, exponent, solver="eigh").value
    assert relative_error(value, by_eigh(a, float(exponent))).max() < 1e-10


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_by_one(solver: str) -> None:
    a = torch.tensor([16.0, 81.0, 1e-8, 1e8]).reshape(4, 1, 1)
    value = inverse_root(a, 0.25, solver=solver).value
    torch.testing.assert_close(value.flatten(), torch.tensor([0.5, 1 / 3, 100.0, 0.01]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_zero_matrix(solver: str) -> None:
    result = inverse_root(torch.zeros(2, 5, 5), 0.25, epsilon=1e-12, solver=solver)
    torch.testing.assert_close(result.value, 1000 * torch.eye(5).expand(2, 5, 5), rtol=1e-5, atol=0.0)
    assert not result.failed.any()
    without = inverse_root(torch.zeros(2, 5, 5), 0.25, epsilon=0.0, solver=solver)
    assert without.failed.all()
    assert without.value.isnan().all()


@pytest.mark.parametrize("shape", [(0, 4, 4), (3, 0, 0)])
def test_empty(shape: tuple[int, int, int]) -> None:
    result = inverse_root(torch.zeros(shape), 0.25)
    assert result.value.shape == shape
    assert result.failed.shape == shape[:1]


@pytest.mark.parametrize("solver", ITERATIONS)
def test_falls_back_on_the_blocks_that_need_it(solver: str) -> None:
    names = ["condition_1e2", "rank_1", "identity", "one_zero_negative"]
    a = matrices(names, torch.float32)
    result = inverse_root(a, 0.25, solver=solver)
    assert result.fell_back.tolist() == [False, True, False, True]
    assert not result.failed.any()
    alone = inverse_root(a[:1], 0.25, solver=solver)
    torch.testing.assert_close(result.value[:1], alone.value, rtol=1e-6, atol=1e-6)
    assert torch.equal(result.value[[1, 3]], inverse_root(a[[1, 3]], 0.25).value)

    reported = inverse_root(a, 0.25, solver=solver, fallback=False)
    assert reported.failed.tolist() == [False, True, False, True]
    assert reported.value[1].isnan().all()
    assert torch.equal(reported.value[0], result.value[0])


@pytest.mark.parametrize("solver", ITERATIONS)
def test_too_few_iterations_fall_back(solver: str) -> None:
    a = matrices(["condition_1e4", "identity"])
    result = inverse_root(a, 0.25, solver=solver, max_iterations=3)
    assert result.fell_back[0]
    assert relative_error(result.value, by_eigh(a, 0.25)).max() < 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
def test_batch_equals_loop(solver: str) -> None:
    names = ["identity", "condition_1e2", "condition_1e4", "duplicates", "rank_1"]
    a = matrices(names, torch.float32)
    batch = inverse_root(a, 0.25, solver=solver, relative_epsilon=1e-5)
    loop = torch.cat(
        [inverse_root(block.unsqueeze(0), 0.25, solver=solver, relative_epsilon=1e-5).value for block in a]
    )
    assert relative_error(batch.value, loop).max() < 1e-5


@pytest.mark.parametrize("solver", SOLVERS)
def test_exactly_symmetric_and_input_unchanged(solver: str) -> None:
    a = matrices(NAMES, torch.float32)
    before = a.clone()
    value = inverse_root(a, 0.25, solver=solver, relative_epsilon=1e-6).value
    assert torch.equal(value, value.mT)
    assert torch.equal(a, before)


@pytest.mark.parametrize("solver", SOLVERS)
def test_scales_with_the_input(solver: str) -> None:
    """No over- or underflow of squares on the way: scaling by a power of 16 scales the fourth root exactly."""
    a = matrices(["condition_1e2", "condition_1e4"], torch.float32)
    value = inverse_root(a, 0.25, epsilon=0.0, solver=solver).value
    for power in (-24, 24):
        scaled = inverse_root(a * 16.0**power, 0.25, epsilon=0.0, solver=solver).value
        torch.testing.assert_close(scaled * 2.0**power, value, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nonfinite_block_fails_alone(solver: str, poison: float) -> None:
    a = matrices(["condition_1e2", "identity", "duplicates"], torch.float32)
    clean = inverse_root(a, 0.25, solver=solver)
    a[1, 2, 3] = poison
    result = inverse_root(a, 0.25, solver=solver)
    assert result.failed.tolist() == [False, True, False]
    assert result.value[1].isnan().all()
    assert result.residual[1] == math.inf
    torch.testing.assert_close(result.value[[0, 2]], clean.value[[0, 2]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("precision", "relative_epsilon", "bound"),
    [("bf16x3", 1e-5, 1.5e-2), ("tf32_emulated", 1e-3, 1.2e-2), ("fp16", 1e-3, 1.6e-2), ("fp16", 1e-5, 2e-3)],
)
def test_reduced_precision_with_its_epsilon(precision: str, relative_epsilon: float, bound: float) -> None:
    a = matrices(NAMES, torch.float32)
    result = inverse_root(a, 0.25, solver="coupled_newton", relative_epsilon=relative_epsilon, precision=precision)
    assert not result.fell_back.any()
    reference = by_eigh(a, 0.25, relative_epsilon=relative_epsilon)
    assert relative_error(result.value, reference).max() < bound


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1 / 3, 1 / 8])
def test_float16_is_as_accurate_as_tf32(exponent: float) -> None:
    """Within 2.5 times its error on every spectrum, though less is kept in float32 on the way."""
    a = matrices(NAMES, torch.float32)
    reference = by_eigh(a, exponent, relative_epsilon=1e-3)
    errors = {}
    for precision in ("tf32_emulated", "fp16"):
        result = inverse_root(a, exponent, solver="coupled_newton", relative_epsilon=1e-3, precision=precision)
        assert not result.fell_back.any()
        assert torch.equal(result.value, result.value.mT)
        errors[precision] = relative_error(result.value, reference)
    assert (errors["fp16"] <= 2.5 * errors["tf32_emulated"] + 1e-6).all()


def test_float16_takes_symmetric_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four a step, but for the first and the last: all of them with a symmetric result, none by general products."""
    half_newton = importlib.import_module("hf_emopt.linalg.inverse_root_fp16")
    products: list[torch.dtype] = []

    def counted(a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Tensor:
        result = symmul(a, b, c, **options)
        products.append(result.dtype)
        return result

    monkeypatch.setattr(half_newton, "symmul", counted)
    a = matrices(["condition_1e2", "condition_1e4"], torch.float32)
    result = inverse_root(a, 0.25, solver="coupled_newton", relative_epsilon=1e-3, precision="fp16", fallback=False)
    assert not result.failed.any()
    assert (products.count(torch.float16), products.count(torch.float32)) == (7 * 2, 7 + 7)
    # float64 is computed in float64.
    exact = inverse_root(a.double(), 0.25, solver="coupled_newton", relative_epsilon=1e-3, precision="fp16")
    assert relative_error(exact.value, by_eigh(a.double(), 0.25, relative_epsilon=1e-3)).max() < 1e-10


@pytest.mark.parametrize("exponent", [0.5, 1 / 3, 0.25])
@pytest.mark.parametrize("relative_epsilon", [1e-6, 1e-5, 1e-4])
def test_split_float16_is_nearly_float32(exponent: float, relative_epsilon: float) -> None:
    """Below 1e-3: within ten times the error of float32, and of 2^-17, which the last steps leave without split factors."""
    a = matrices(NAMES, torch.float32)
    reference = by_eigh(a, exponent, relative_epsilon=relative_epsilon)
    errors = {}
    for precision in ("highest", "bf16x3", "fp16"):
        options = {"relative_epsilon": relative_epsilon, "precision": precision, "fallback": precision == "bf16x3"}
        result = inverse_root(a, exponent, solver="coupled_newton", **options)
        assert not result.failed.any()
        errors[precision] = relative_error(result.value, reference)
    assert (errors["fp16"] <= 10 * errors["highest"] + 2.0**-17).all()
    if exponent == 0.25 and relative_epsilon == 1e-5:
        assert errors["fp16"].max() < 0.3 * errors["bf16x3"].max()


def test_inverses_take_split_factors() -> None:
    """As large as the condition, with a relative epsilon that other roots need no split for."""
    a = matrices(["condition_1e2", "condition_1e4", "duplicates"], torch.float32)
    result = inverse_root(a, 1.0, solver="coupled_newton", relative_epsilon=1e-3, precision="fp16")
    assert not result.fell_back.any()
    assert relative_error(result.value, by_eigh(a, 1.0, relative_epsilon=1e-3)).max() < 1e-3


def test_large_roots_stay_in_the_range_of_float16() -> None:
    """A square root of 1e-10 is 1e5."""
    a = matrices(["condition_1e2"], torch.float32)
    start = importlib.import_module("hf_emopt.linalg.inverse_root_fp16")
    e = a - torch.eye(a.shape[-1])
    steps = newton_schedule(2, 0.5 * 1e-3, 2.0**-11)
    active = torch.ones(1, dtype=torch.bool)
    usual, _ = start.half_newton(e.clone(), steps, 2, active, 1.0 / 50.0**2)
    large, _ = start.half_newton(e.clone(), steps, 2, active, 1e-10)  # held at 2^-9 of its size
    assert not torch.equal(usual, large)
    assert relative_error(large, usual).max() < 2e-3


@pytest.mark.parametrize("precision", ["highest", "bf16x3", "tf32_emulated", "fp16"])
def test_what_has_converged_stays_exact_in_every_precision(precision: str) -> None:
    """Beside blocks that take all steps, a multiple of the identity is its root to float32's rounding."""
    a = matrices(["identity", "condition_1e2"], torch.float32) * torch.tensor([[[9.0]], [[1.0]]])
    result = inverse_root(a, 0.25, solver="coupled_newton", relative_epsilon=1e-3, precision=precision)
    reference = by_eigh(a, 0.25, relative_epsilon=1e-3)
    assert relative_error(result.value, reference)[0] < 1e-6


class Passes(TorchDispatchMode):
    """Counts products of square matrices, and the other functions that return a tensor of their size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.products, self.others = numel, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        full = isinstance(result, Tensor) and result.numel() == self.numel and result.untyped_storage().nbytes() > 0
        if full and name in ("bmm", "baddbmm"):
            self.products += 1
        elif full and not function.is_view:
            self.others += 1
        return result


def test_passes_of_an_iteration() -> None:
    """In TF32, for a fourth root: 8 steps of four products, the first and the last of which need fewer, and a pass each."""
    a = matrices(["condition_1e2", "condition_1e4"], torch.float32)
    kwargs = {"solver": "coupled_newton", "relative_epsilon": 1e-3, "precision": "tf32", "fallback": False}
    inverse_root(a, 0.25, **kwargs)  # fills the cache of probes
    with Passes(a.numel()) as passes:
        inverse_root(a, 0.25, **kwargs)
    assert passes.products == 8 * 4 - 1 - 3
    assert passes.others <= 8 + 14


def test_reduced_precision_falls_back_where_it_cannot() -> None:
    a = matrices(WELL_CONDITIONED + ["condition_1e6"], torch.float32)
    result = inverse_root(a, 0.25, solver="coupled_newton", precision="tf32_emulated")
    assert result.fell_back[-1]
    assert not result.fell_back[0]
    assert relative_error(result.value, by_eigh(a, 0.25)).max() < 1e-1
    strict = inverse_root(a, 0.25, solver="coupled_newton", precision="tf32_emulated", residual_tolerance=1e-6)
    assert strict.fell_back[1:].all()


def test_residual_sees_a_wrong_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigendecomposition that is wrong without an error."""
    eigh = torch.linalg.eigh

    def wrong(a: Tensor) -> tuple[Tensor, Tensor]:
        eigenvalues, q = eigh(a)
        q[1] = q[1].roll(1, -1)
        return eigenvalues, q

    monkeypatch.setattr(torch.linalg, "eigh", wrong)
    result = inverse_root(matrices(["condition_1e2", "condition_1e4", "identity"]), 0.25)
    assert result.failed.tolist() == [False, True, False]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("root", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lowest", [1e-2, 1e-6, 1e-15])
def test_newton_schedule(root: int, lowest: float, degree: int) -> None:
    """On eigenvalues alone: all of [lowest, 1] end at 1, none leaves (0, p + 1) on the way, in fewer steps than Newton's."""
    m = torch.logspace(math.log10(lowest), 0, 2000, dtype=torch.float64)
    schedule = newton_schedule(root, lowest, 2.0**-24, degree)
    for step in schedule:
        m = m * sum(c * m**k for k, c in enumerate(step)) ** root
        assert m.min() > 0
        assert m.max() < 1.1
    assert (m - 1).abs().max() < 2.0**-24
    newton, steps = torch.tensor(lowest, dtype=torch.float64), 0
    while abs(newton - 1) > 2.0**-24:
        newton, steps = newton * ((root + 1 - newton) / root) ** root, steps + 1
    assert len(schedule) < (0.7 if lowest < 1e-3 else 1) * steps


@pytest.mark.parametrize("degree", [1, 2])
def test_schedules_end(degree: int) -> None:
    """Also of the highest roots, whose Newton steps converge from nearby alone."""
    for root in (20, 40, 48, 64):
        for lowest in torch.logspace(-6, -0.1, 60).tolist():
            schedule = newton_schedule(root, lowest, 2.0**-24, degree)
            assert len(schedule) < 30
            ends = torch.tensor([lowest, 1.0], dtype=torch.float64)
            for step in schedule:
                ends = ends * sum(c * ends**k for k, c in enumerate(step)) ** root
            assert (ends - 1).abs().max() < 2.0**-20


@pytest.mark.parametrize("root", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("lowest", [0.3, 5e-4, 5e-7])
def test_steps_of_the_second_degree_take_fewer_products(root: int, lowest: float) -> None:
    """A step has products for X, for M and for the power, and one for the square of M. Only the last ones have Newton's
    slope at 1."""

    def products(degree: int) -> int:
        schedule = newton_schedule(root, lowest, 2.0**-24, degree)
        power = math.floor(math.log2(root)) + bin(root).count("1") - 1
        return sum(power + len(step) for step in schedule)

    assert products(2) <= products(1)
    ends = [finishes(step, root) for step in newton_schedule(root, lowest, 2.0**-24, 2)]
    assert ends == sorted(ends)
    assert 0 < sum(ends) < len(ends)


def test_host_reads() -> None:
    a = matrices(["condition_1e2", "identity"], torch.float32)
    inverse_root(a, 0.25)  # fills the cache of probes
    for kwargs, expected in (
        ({"solver": "eigh"}, 0),
        ({"solver": "coupled_newton"}, 1),
        ({"solver": "coupled_newton", "fallback": False}, 0),
    ):
        with host_reads() as reads:
            inverse_root(a, 0.25, **kwargs)
        assert reads.count == expected, kwargs


def test_bad_arguments() -> None:
    a = torch.eye(3).unsqueeze(0)
    with pytest.raises(TypeError, match="float32 or float64"):
        inverse_root(a.bfloat16(), 0.25)
    for shape in ((3, 3), (1, 3, 4)):
        with pytest.raises(ValueError, match=r"\(N, d, d\)"):
            inverse_root(torch.ones(shape), 0.25)
    for exponent in (0.0, -0.25, math.nan):
        with pytest.raises(ValueError, match="exponent must be positive"):
            inverse_root(a, exponent)
    with pytest.raises(ValueError, match="epsilon must be"):
        inverse_root(a, 0.25, epsilon=-1e-12)
    with pytest.raises(ValueError, match="relative_epsilon must be"):
        inverse_root(a, 0.25, relative_epsilon=math.inf)
    with pytest.raises(ValueError, match="solver must be one of"):
        inverse_root(a, 0.25, solver="newton")
    with pytest.raises(ValueError, match="use solver='eigh'"):
        inverse_root(a, 0.75, solver="coupled_newton")
    with pytest.raises(ValueError, match="no such fraction"):
        inverse_root(a, 0.123456, solver="coupled_newton")
    with pytest.raises(ValueError, match="is gone: use solver='coupled_newton'"):
        inverse_root(a, 0.25, solver="coupled_higher_order")
    with pytest.raises(ValueError, match="precision must be one of"):
        inverse_root(a, 0.25, precision="fp32")
    with pytest.raises(ValueError, match="max_iterations"):
        inverse_root(a, 0.25, solver="coupled_newton", max_iterations=0)
    assert inverse_root(a, 0.123456).value.shape == (1, 3, 3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_root_beyond_the_dtype_is_a_failure(solver: str) -> None:
    """Finite at the scale at which it is computed, 1e40 at that of the input; so is what the ladder finds in float64."""
    a = torch.eye(6).expand(2, 6, 6) * torch.tensor([1e-40, 1.0]).view(-1, 1, 1)
    result = inverse_root(a, 1.0, 0.0, solver, relative_epsilon=1e-6)
    assert result.failed.tolist() == [True, False]
    assert result.value[1].isfinite().all()
    outcome = with_ladder(lambda x: inverse_root(x, 1.0, 0.0, solver, relative_epsilon=1e-6), a)
    assert outcome.failed.tolist() == [True, False]
    assert not outcome.value.value[0].isfinite().any()
