"""Adam's moments and direction for a batch of tensors, in one pass where torch has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adam_direction(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    betas: tuple[float, float],
    eps: float,
    gate: Tensor | float = 1.0,
) -> Tensor:
    """``(M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)`` with the moments updated in place.

    Kingma and Ba, arXiv:1412.6980, algorithm 1. torch's fused Adam computes it, with zeros as the parameter and -1 as the
    learning rate. It takes eight reads and writes of an element; the formula by parts takes seventeen.

    Args:
        grad: ``(N, ...)`` of the moments' dtype, float32 or float64.
        exp_avg, exp_avg_sq: ``(N, ...)``, changed in place.
        count: ``(N,)``, number of steps, including this one.
        gate: a number, a scalar tensor, or ``(N,)``. 1 where the step counts; 0 leaves the moments as they are, with an
            arbitrary result.
    """
    one_gate = not isinstance(gate, Tensor) or gate.ndim == 0
    dense = all(x.is_contiguous() and x.dtype == exp_avg.dtype for x in (grad, exp_avg, exp_avg_sq))
    known = exp_avg.dtype in (torch.float32, torch.float64) and exp_avg.numel() > 0  # torch refuses an empty list
    if grad.device.type in ("cpu", "cuda") and one_gate and dense and known:
        return _fused(grad, exp_avg, exp_avg_sq, count, betas, eps, gate)
    if isinstance(gate, Tensor) and gate.ndim:
        gate = gate.view(-1, *[1] * (grad.ndim - 1))
    beta1, beta2 = betas
    exp_avg.lerp_(grad, gate * (1.0 - beta1))
    exp_avg_sq.lerp_(grad.square(), gate * (1.0 - beta2))
    steps = count.clamp_min(1.0).view(-1, *[1] * (grad.ndim - 1))
    correction1, correction2 = 1.0 - beta1**steps, (1.0 - beta2**steps).sqrt()
    # Factors that are one number for a whole tensor are multiplied first.
    return exp_avg / torch.addcmul(eps * correction1, exp_avg_sq.sqrt(), correction1 / correction2)


def _fused(
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    betas: tuple[float, float],
    eps: float,
    gate: Tensor | float,
) -> Tensor:
    direction = torch.zeros_like(grad)
    skipped = None
    if isinstance(gate, Tensor):
        skipped = (1.0 - gate.reshape(())).float()
    elif gate == 0.0:
        return direction
    fused: Any = torch._fused_adam_
    fused(
        direction.unbind(0),
        grad.unbind(0),
        exp_avg.unbind(0),
        exp_avg_sq.unbind(0),
        [],
        count.float().unbind(0),
        lr=-1.0,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=skipped,
    )
    return direction
