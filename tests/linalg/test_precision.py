"""Product precision: errors of the splits, and global flags that are as before whatever happens."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from hf_emopt.linalg import inverse_root, matmul_precision, refresh_eigenbasis
from hf_emopt.linalg.matmul_precision import Precision, add_product, product, scaled_half, unit_roundoff

# The package has a function of that name.
module = importlib.import_module("hf_emopt.linalg.matmul_precision")
PRECISIONS = get_args(Precision)
needs_backend_flags = pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"), reason="this torch has no fp32_precision flags"
)


def flags() -> dict[str, Any]:
    state: dict[str, Any] = {"autocast": torch.is_autocast_enabled("cpu")}
    old_interface = {
        "matmul": torch.get_float32_matmul_precision,
        "cublas": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cudnn": lambda: torch.backends.cudnn.allow_tf32,
    }
    for name, read in old_interface.items():
        try:
            state[name] = read()
        except RuntimeError:  # the two interfaces say different things
            state[name] = "ambiguous"
    if hasattr(torch._C, "_get_fp32_precision_getter"):
        for key in (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("mkldnn", "all"), ("mkldnn", "matmul")):
            state["/".join(key)] = torch._C._get_fp32_precision_getter(*key)
    return state


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = flags()
    yield
    torch.set_float32_matmul_precision("highest")
    if hasattr(torch._C, "_set_fp32_precision_setter"):
        for key in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
            torch._C._set_fp32_precision_setter(*key, before["/".join(key)])
    assert flags() == before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_error_is_within_the_unit_roundoff(precision: Precision) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, 48, generator=generator), torch.randn(2, 48, 32, generator=generator)
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs()
    error = ((product(a, b, precision) - exact).abs() / scale).max().item()
    # Two factors are rounded; sums of 48 in float32 besides.
    assert error < 2 * unit_roundoff(a.dtype, precision) + 48 * 2.0**-24
    if precision in ("tf32_emulated", "bf16x3", "fp16"):
        assert error > 2.0**-22  # it is not float32 in disguise
    assert torch.equal(product(a.double(), b.double(), precision), exact)
    assert unit_roundoff(torch.float64, precision) == 2.0**-53


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_a_small_product_adds_with_a_small_error(precision: Precision, beta: float) -> None:
    """Of the sum only the product is rounded to the precision."""
    generator = torch.Generator().manual_seed(0)
    c, a, b = torch.randn(3, 2, 48, 48, generator=generator)
    a *= 1e-4
    before = [x.clone() for x in (c, a, b)]
    wanted = beta * c.double() + a.double() @ b.double()
    got = add_product(c, a, b, precision, beta=beta)
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error < 2.0**-23 + 1e-4 * 48**0.5 * 4 * unit_roundoff(torch.float32, precision)
    assert all(torch.equal(x, y) for x, y in zip(before, (c, a, b)))


def test_a_factor_and_its_transpose_are_split_alike() -> None:
    x = torch.randn(2, 40, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(product(x.mT, x, "bf16x3"), product(x.mT.clone(), x, "bf16x3"))


def test_float16_factors_at_any_scale() -> None:
    """Powers of two change nothing, also where float16 has no such numbers; what is lost is small beside the largest."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 24, 40, generator=generator), torch.randn(3, 40, 16, generator=generator)
    usual = product(a, b, "fp16")
    powers = torch.tensor([2.0**-40, 1.0, 2.0**50]).view(3, 1, 1)
    assert torch.equal(product(a * powers, b, "fp16"), usual * powers)
    half, scale = scaled_half(a * powers)
    assert half.dtype == torch.float16
    largest = half.abs().amax((-2, -1))
    assert ((largest >= 1) & (largest <= 2)).all()
    assert ((half.float() * scale - a * powers).abs() <= 2.0**-11 * a.abs() * powers + 2.0**-24 * scale).all()
    zero, one = scaled_half(torch.zeros(2, 3, 3))
    assert not zero.any()
    assert (one == 1).all()
    broken, _ = scaled_half(torch.tensor([[[1.0, math.nan]], [[math.inf, 1.0]]]))
    assert broken[0].isnan().tolist() == [[False, True]]
    assert broken[1, 0, 0] == math.inf


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_of_any_number_of_dimensions(precision: Precision) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 4, 5, generator=generator), torch.randn(2, 3, 5, 6, generator=generator)
    for x, y in ((a, b), (a[0], b[0]), (a[0, 0], b[0, 0])):
        value = product(x, y, precision)
        assert value.shape == (x @ y).shape
        torch.testing.assert_close(value, x @ y, rtol=1e-2, atol=1e-2)


def test_blocks_are_rounded_where_they_lie() -> None:
    """Of a tensor cut into blocks, each has a scale of its own."""
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    x[:, :, 4:] *= 1e-6
    blocks = x.view(2, 6, 2, 4).permute(0, 2, 1, 3)
    half, scale = scaled_half(blocks)
    each = [scaled_half(blocks[i, j]) for i in range(2) for j in range(2)]
    assert torch.equal(half, torch.stack([h for h, _ in each]))
    assert torch.equal(scale, torch.stack([s for _, s in each]))


def test_tf32_emulation_keeps_ten_bits() -> None:
    one = torch.ones(1, 1)
    for x, expected in ((1 + 2.0**-10, 1 + 2.0**-10), (1 + 2.0**-11, 1.0), (-(1 + 2.0**-11), -1.0), (1.5e-30, None)):
        value = product(torch.full((1, 1), x), one, "tf32_emulated").item()
        assert value == pytest.approx(x, rel=2.0**-10) if expected is None else value == expected
    assert math.isnan(product(torch.full((1, 1), math.nan), one, "tf32_emulated").item())
    assert product(torch.full((1, 1), math.inf), one, "tf32_emulated").item() == math.inf


def test_transposed_operands() -> None:
    a = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    for precision in PRECISIONS:
        torch.testing.assert_close(product(a.mT, a, precision), product(a.mT.contiguous(), a, precision))


def set_legacy(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def set_generic(value: str) -> None:
    torch.backends.fp32_precision = value  # type: ignore[attr-defined]


def set_cuda(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


STATES = [
    pytest.param(set_legacy, "highest", id="legacy-highest"),
    pytest.param(set_legacy, "high", id="legacy-high"),
    pytest.param(set_legacy, "medium", id="legacy-medium"),
    pytest.param(set_generic, "tf32", id="generic-tf32", marks=needs_backend_flags),
    pytest.param(set_generic, "ieee", id="generic-ieee", marks=needs_backend_flags),
    pytest.param(set_cuda, "tf32", id="cuda-tf32", marks=needs_backend_flags),
    pytest.param(set_cuda, "ieee", id="cuda-ieee", marks=needs_backend_flags),
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("change", "value"), STATES)
def test_flags_restored(change: Any, value: str, precision: Precision) -> None:
    change(value)
    before = flags()
    with matmul_precision(precision):
        inside = flags()
    assert flags() == before

    with pytest.raises(ZeroDivisionError), matmul_precision(precision):
        raise ZeroDivisionError
    assert flags() == before

    if "cuda/matmul" in inside:
        allowed = inside["cuda/matmul"] == "tf32"
        assert allowed == (precision == "tf32")
        assert inside["mkldnn/matmul"] in ("ieee", "none")
    with matmul_precision("tf32"):
        with matmul_precision("highest"):
            assert flags().get("cuda/matmul", "ieee") in ("ieee", "none")
        assert flags().get("cuda/matmul", "tf32") == "tf32"
    assert flags() == before


@needs_backend_flags
def test_a_flag_that_follows_another_still_does() -> None:
    set_generic("tf32")
    with matmul_precision("highest"):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    set_generic("ieee")
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_autocast_is_off_within() -> None:
    a = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = product(a, a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(product(a, a), expected)
        assert (a @ a).dtype == torch.bfloat16
        with matmul_precision("highest"):
            assert (a @ a).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_solvers_restore_flags(precision: Precision) -> None:
    a = torch.diag(torch.tensor([1.0, 2.0, 3.0])).unsqueeze(0)
    for value in ("highest", "medium"):
        torch.set_float32_matmul_precision(value)
        before = flags()
        inverse_root(a, 0.25, solver="coupled_newton", precision=precision)
        refresh_eigenbasis(a, torch.eye(3).unsqueeze(0), precision=precision)
        assert flags() == before


def test_unknown_precision() -> None:
    with pytest.raises(ValueError, match="highest, bf16x3"), matmul_precision("high"):  # type: ignore[arg-type]
        pass
