"""Products of split factors, by torch and in Triton's interpreter (in a process of its own)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import INTERPRETING
from torch import Tensor

from hf_emopt.linalg import split_products
from hf_emopt.linalg.split_products import general_product, gram_product, joined, split, split_product


def commuting(d: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Symmetric matrices of one basis, in float64, of size one."""
    torch.manual_seed(d)
    q = torch.linalg.qr(torch.randn(batch, d, d, dtype=torch.float64)).Q
    spectra = torch.rand(2, batch, 1, d, dtype=torch.float64)
    a, b = ((q * s) @ q.mT for s in spectra)
    return a, b


@pytest.mark.parametrize("arguments", [{}, {"scale": 0.25}, {"diagonal": 1.0}])
def test_parts_hold_22_bits(arguments: dict[str, float]) -> None:
    a = commuting(40)[0].float()
    a[0] *= 1e-3
    wanted = a.double() * arguments.get("scale", 1.0) + arguments.get("diagonal", 0.0) * torch.eye(40)
    high, low = split(a, **arguments)
    assert high.dtype == low.dtype == torch.float16
    assert ((joined((high, low)).double() - wanted).abs() <= 2.0**-22 * wanted.abs() + 2.0**-35).all()


@pytest.mark.parametrize("c", [None, "float32", "parts"])
def test_products(c: str | None) -> None:
    """To float32's rounding, where single factors have errors of 2e-4; with all that goes in and out at once."""
    a, b = commuting(72)
    active = torch.tensor([True, False])
    factors = split(a.float()), split(b.float())
    added = None if c is None else a.float() if c == "float32" else split(a.float())
    terms = {"alpha": 0.5, "c": added, "beta": 2.0 if c else 0.0, "diagonal": -0.75}
    wide, parts = split_product(*factors, active=active, wide=True, wide_diagonal=3.0, parts=True, **terms)
    exact = 0.5 * a @ b + (2.0 * a if c else 0.0) - 0.75 * torch.eye(72)
    exact[1] = 0
    assert wide is not None
    assert parts is not None
    torch.testing.assert_close(joined(parts).double(), exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(wide.double(), exact + 3.0 * torch.eye(72), rtol=0, atol=2e-6)
    for matrix in (wide, *parts):
        assert torch.equal(matrix, matrix.mT)
    # Into C itself.
    c32 = a.float()
    assert split_product(*factors, c=c32, beta=1.0, out=c32)[0] is c32
    torch.testing.assert_close(c32.double(), a + a @ b, rtol=0, atol=2e-6)


def test_products_of_any_matrices() -> None:
    a, _ = commuting(72)
    x = torch.linalg.qr(torch.randn(2, 72, 72, dtype=torch.float64)).Q
    y = (a @ x).float()
    exact = (torch.eye(72) - x.mT @ a @ x).float()
    for basis in (x.float(), x.float().mT.contiguous().mT):
        value = gram_product(basis, y, alpha=-1.0, diagonal=1.0)
        torch.testing.assert_close(value, exact, rtol=0, atol=2e-6)
        assert torch.equal(value, value.mT)
        torch.testing.assert_close(gram_product(basis, basis), torch.eye(72).expand(2, 72, 72), rtol=0, atol=2e-6)
        torch.testing.assert_close(general_product(y, basis).double(), y.double() @ x, rtol=0, atol=2e-6)


if INTERPRETING:

    def check_kernel(run: Callable[[], list[Tensor]], launched: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many launches give, bit for bit, what torch gives."""
        launches = []
        from hf_emopt.kernels.triton import split_products as kernels

        kernel = kernels.split_product

        def counted(*arguments: Any, **options: Any) -> Any:
            launches.append(arguments)
            return kernel(*arguments, **options)

        monkeypatch.setattr(kernels, "split_product", counted)
        found = run()
        assert len(launches) == launched
        monkeypatch.setattr(split_products, "kernels_pay", lambda device: False)
        for one, other in zip(found, run(), strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("d", [32, 40, 72])
    @pytest.mark.parametrize("c", [None, "float32", "parts"])
    def test_kernel(d: int, c: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Integers and their low parts: sums are exact in any order."""
        torch.manual_seed(0)
        x = torch.randint(-3, 4, (4, 3, d, d)).float()
        a1, a2, b1, b2 = (x + x.mT).half()
        b1, b2 = a1.clone(), a2.clone()  # commute
        square = (x[0] + x[0].mT).half()
        added = None if c is None else (square.float() if c == "float32" else (square, square.clone()))
        terms = {"alpha": 0.5, "c": added, "beta": 0.25 if c else 0.0, "diagonal": 0.5}
        terms |= {"active": torch.tensor([True, False, True])}

        def run() -> list[Tensor]:
            wide, parts = split_product((a1, a2), (b1, b2), wide=True, wide_diagonal=-1.0, parts=True, **terms)
            assert wide is not None
            assert parts is not None
            return [wide, *parts]

        check_kernel(run, 1, monkeypatch)

    @pytest.mark.parametrize("d", [32, 72])
    def test_kernels_of_any_matrices(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Integers but zero, and a bit beyond a half's last: a part of each, and sums that are exact in any order."""
        torch.manual_seed(0)
        x = (torch.randint(1, 3, (2, d, d)) + torch.randint(0, 2, (2, d, d)) * 2.0**-11) * torch.randn(2, d, d).sign()
        y = torch.randint(-2, 3, (2, d, d)).float()

        def run() -> list[Tensor]:
            return [
                gram_product(x, x, alpha=-0.5, diagonal=1.0),
                gram_product(x.mT.contiguous().mT, x.mT.contiguous().mT),
                gram_product(s := x.mT.contiguous().mT, s),
                general_product(x, y),
                general_product(y.mT, x),
            ]

        check_kernel(run, 5, monkeypatch)

    def test_parts_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
        a = commuting(70)[0].float()
        found = split(a, scale=0.5, diagonal=1.0)
        monkeypatch.setattr(split_products, "kernels_pay", lambda device: False)
        for one, other in zip(found, split(a, scale=0.5, diagonal=1.0)):
            assert torch.equal(one, other)
