"""The two factors of a LoRA adapter as one matrix: spectral steepest descent of their product.

The model adds ``W = s B A`` to a frozen weight, with ``B`` of ``m x r`` and ``A`` of ``r x n``. For any invertible ``R``
the factors ``B R`` and ``R^-1 A`` are the same adapter, so its update should be the same as well. To first order

.. code-block:: text

    dW = s dB A + s B dA

Steepest descent under ``|s dB A| <= c`` and ``|s B dA| <= c`` in the spectral norm gives, with ``msign`` the polar factor,

.. code-block:: text

    dB   = -(c / s) msign(M_B  G_A^(-1/2)) G_A^(-1/2),        G_A = A A^T
    dA^T = -c       msign(M_A^T H_B^(-1/2)) H_B^(-1/2),       H_B = s^2 B^T B + delta^2 G_A^-1

which is LoRA-Muon (F. L. Cesista et al., arXiv:2606.12921), and the core of LoRA-RITE (J.-N. Yen et al., arXiv:2410.20625)
in other coordinates, but for the term with ``delta``. That is ours: PEFT starts with ``B = 0``, where ``G_B`` has no inverse,
and a step later it has one so large that ``A`` would be replaced by a single gradient. In the basis in which ``A`` has
orthonormal rows, ``s^2 B^T B`` has the squared singular values of the product, and ``delta`` keeps them from counting as less
than itself: it is the step over the largest relative change of ``A`` that a step may make. ``G_A^-1`` transforms as ``B^T B``
does, so the update stays invariant; docs/lora.md has the proof. Momentum is that of the factors' own gradients, which
transform along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.linalg.matmul_precision import matmul_precision


@dataclass
class Factor:
    """One factor of a batch of adapters, with ``rank`` columns: B, or A transposed.

    Attributes:
        weight: ``(N, k, r)``, float32 or float64.
        message: momentum of the gradient, likewise.
        matrix_state: of that shape, updated in place.
    """

    weight: Tensor
    message: Tensor
    matrix_state: dict[str, Tensor]


def inverse_sqrt(a: Tensor) -> Tensor:
    """``A^(-1/2)`` of symmetric positive semidefinite ``(N, r, r)``, on the range of ``A``; zero of a zero matrix.

    Eigenvalues below ``r`` unit roundoffs of the largest count as zero. What is not finite gives zeros, since the weights
    that it was made of are lost anyway, and a decomposition that raises would stop one rank alone.
    """
    finite = torch.isfinite(a).all(dim=-1).all(dim=-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, a, torch.zeros_like(a)))
    floor = values[..., -1:] * (a.shape[-1] * torch.finfo(a.dtype).eps)
    roots = torch.where(values > floor.clamp_min(0.0), values.clamp_min(torch.finfo(a.dtype).tiny).rsqrt(), 0.0)
    return (vectors * roots[..., None, :]) @ vectors.mT


def pair_update(
    nonzero_init: Factor,
    zero_init: Factor,
    scaling: Tensor,
    size: float,
    reach: Tensor | float,
    polar: Callable[[Tensor, dict[str, Tensor]], Tensor],
) -> tuple[Tensor, Tensor]:
    """Updates of both factors, to be multiplied by the learning rate and subtracted.

    Args:
        nonzero_init: the factor that does not start at zero. Its Gram matrix is the measure of the other one's update.
        scaling: ``(N, 1, 1)``, the ``s`` of each adapter.
        size: ``c``: largest singular value of each of the two terms of the product's update.
        reach: ``delta``, the smallest singular value that the product is taken to have: a learning rate times ``size``,
            divided by the largest relative change of ``nonzero_init`` in a step.
        polar: the polar factor of ``(N, k, r)``, given that factor's matrix state.
    """
    with matmul_precision("highest"):
        measure = inverse_sqrt(nonzero_init.weight.mT @ nonzero_init.weight)
        product = scaling.square() * (zero_init.weight.mT @ zero_init.weight)
        other = inverse_sqrt(product + reach * reach * (measure @ measure))
        from_zero_init = zero_init.message @ measure
        from_nonzero_init = nonzero_init.message @ other
    zero_init_step = polar(from_zero_init, zero_init.matrix_state)
    nonzero_init_step = polar(from_nonzero_init, nonzero_init.matrix_state)
    with matmul_precision("highest"):
        return (nonzero_init_step @ other) * size, (zero_init_step @ measure) * (size / scaling)
