"""Adam's moments in one pass, against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_emopt.rules.adam_direction import adam_direction

BETAS, EPS = (0.9, 0.99), 1e-6


def formula(grads: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """After all gradients, for matrices that had ``start`` steps of zeros before."""
    m, v = torch.zeros_like(grads[0], dtype=torch.float64), torch.zeros_like(grads[0], dtype=torch.float64)
    for g in grads:
        m = BETAS[0] * m + (1 - BETAS[0]) * g.double()
        v = BETAS[1] * v + (1 - BETAS[1]) * g.double() ** 2
    steps = (start.double() + len(grads)).view(-1, 1, 1)
    return m, v, m / (1 - BETAS[0] ** steps) / ((v / (1 - BETAS[1] ** steps)).sqrt() + EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", ["number", "scalar", "each"])
@pytest.mark.parametrize("transposed", [False, True])
def test_is_the_formula(dtype: torch.dtype, gate: str, transposed: bool) -> None:
    one = {"number": 1.0, "scalar": torch.ones((), dtype=dtype), "each": torch.ones(3, dtype=dtype)}[gate]
    start = torch.tensor([0.0, 5.0, 2.0], dtype=dtype)
    shape = (3, 7, 11)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator, dtype=dtype) * 10.0 ** -(3 * i) for i in range(4)]
    m, v, count = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), start.clone()
    for g in grads:
        count += 1
        direction = adam_direction(g.mT.contiguous().mT if transposed else g, m, v, count, BETAS, EPS, one)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for got, wanted in zip((m, v, direction), formula(grads, start)):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("gate", [0.0, torch.tensor(0.0), torch.tensor([0.0, 1.0])])
def test_a_step_that_does_not_count_leaves_the_moments(gate: Tensor | float) -> None:
    m, v, g = torch.rand(3, 2, 5, 5).unbind(0)
    before = m.clone(), v.clone()
    direction = adam_direction(g, m, v, torch.tensor([0.0, 1.0]), BETAS, EPS, gate)
    assert torch.equal(m[0], before[0][0])
    assert torch.equal(v[0], before[1][0])
    assert torch.isfinite(direction).all()
    one_counts = isinstance(gate, Tensor) and gate.ndim == 1
    assert torch.equal(m[1], before[0][1]) != one_counts


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
@pytest.mark.parametrize("gate", [0.0, 1.0, torch.tensor(1.0)])
def test_nothing_to_do(shape: tuple[int, int], gate: Tensor | float) -> None:
    m, v, g = (torch.zeros(shape) for _ in range(3))
    assert adam_direction(g, m, v, torch.ones(shape[0]), BETAS, EPS, gate).shape == shape
