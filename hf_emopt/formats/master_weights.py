"""Policies for 16-bit weights that keep small updates.

With ``lr = 1e-5`` and an update of RMS 0.2, a bfloat16 weight of 0.02 has to move by a fortieth of its spacing: rounding to
the nearest loses 98 % of such updates. Each policy turns the stored weights into float32 for the step, and stores them back
with the rounding error or with an unbiased rounding.

=============  ===============================  ==========================================================
policy         extra state                      precision
=============  ===============================  ==========================================================
``split``      2 bytes a weight (default)       bfloat16: the 16 low bits, so exactly a float32 master;
                                                float16: the rounding error, 22 bits in all
``master``     4 bytes a weight                 a float32 copy
``kahan``      2 bytes a weight                 the rounding error in the weight's own dtype
``stochastic`` none                             the expectation (bfloat16 only)
``none``       none                             nothing: small updates vanish
=============  ===============================  ==========================================================

Every policy accepts a weight that other code changed between steps (a checkpoint loaded into the model, a re-initialized
head): a stale copy never overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

LowPrecisionWeights = Literal["split", "master", "kahan", "stochastic", "none"]
LOW_PRECISION_WEIGHTS: tuple[str, ...] = ("split", "master", "kahan", "stochastic", "none")

WEIGHT_STATE = ("weight_low_bits", "master_weight", "weight_compensation")
"""Entries of state with the bits that a 16-bit weight drops."""

LOW_DTYPES = (torch.bfloat16, torch.float16)


def needs_master(param: Tensor) -> bool:
    """Whether a parameter has 16 bits, so that a policy applies to it."""
    return param.dtype in LOW_DTYPES


def load_weights(params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], policy: str) -> list[Tensor]:
    """The weights to step: float32 reconstructions of 16-bit parameters, and wider parameters themselves.

    Args:
        params: parameters of any floating dtype and shape.
        states: state of each, with one of :data:`WEIGHT_STATE` where the policy keeps one.
        policy: one of :data:`LOW_PRECISION_WEIGHTS`.
    """
    return [_load(p, s, policy) if needs_master(p) else p for p, s in zip(params, states)]


def store_weights(
    params: Sequence[Tensor],
    weights: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    policy: str,
    generator: torch.Generator | None = None,
) -> None:
    """Stores the stepped ``weights`` of :func:`load_weights` in 16-bit parameters and their state, in place.

    Args:
        generator: noise of ``"stochastic"`` on the device of the weights; replicas must seed it alike.

    Raises:
        ValueError: ``"stochastic"`` with float16 weights, or without a generator.
    """
    for param, weight, state in zip(params, weights, states):
        if needs_master(param):
            _store(param, weight, state, policy, generator)


def init_weight_state(param: Tensor, policy: str) -> dict[str, Tensor]:
    """The state that :func:`store_weights` writes, for a weight without a rounding error; empty where it writes none."""
    key = weight_state_key(param.dtype, policy)
    if key is None:
        return {}
    if key == "master_weight":
        return {key: param.detach().float()}
    return {key: torch.zeros_like(param, dtype=torch.int16 if key == "weight_low_bits" else None)}


def weight_state_key(dtype: torch.dtype, policy: str) -> str | None:
    """The entry of state that a policy keeps for weights of a dtype; ``None`` where it keeps none."""
    if dtype not in LOW_DTYPES or policy in ("stochastic", "none"):
        return None
    if policy == "master":
        return "master_weight"
    return "weight_low_bits" if policy == "split" and dtype is torch.bfloat16 else "weight_compensation"


def _load(param: Tensor, state: dict[str, Tensor], policy: str) -> Tensor:
    if policy == "master" and "master_weight" in state:
        master = state["master_weight"]
        # Other code wrote to a weight that is not the rounded master: the weight is the newer one.
        return torch.where(master.to(param.dtype) == param, master, param.float())
    if policy == "split" and param.dtype is torch.bfloat16 and "weight_low_bits" in state:
        return _join(param, state["weight_low_bits"])
    if policy in ("split", "kahan") and "weight_compensation" in state:
        error = state["weight_compensation"].float() / _compensation_scale(param)
        # Rounding leaves at most half a spacing: a larger error belongs to a weight that other code has replaced.
        return torch.where(error.abs() <= _half_spacing(param), param.float() + error, param.float())
    return param.float()


def _store(
    param: Tensor, weight: Tensor, state: dict[str, Tensor], policy: str, generator: torch.Generator | None
) -> None:
    if policy == "stochastic":
        param.copy_(round_stochastically(weight, param.dtype, generator))
        return
    param.copy_(weight)
    if policy == "master":
        _keep(state, "master_weight", weight)
    elif policy == "split" and param.dtype is torch.bfloat16:
        _keep(state, "weight_low_bits", _low_bits(param, weight))
    elif policy in ("split", "kahan"):
        error = (weight - param.float()) * _compensation_scale(param)
        _keep(state, "weight_compensation", error.to(param.dtype))


def _compensation_scale(param: Tensor) -> float:
    """Factor on a kept rounding error: 2**11 for float16, where the error of a small weight would be a subnormal number."""
    return 2.0**11 if param.dtype is torch.float16 else 1.0


def _half_spacing(param: Tensor) -> Tensor:
    """Half of the distance from each number to the next larger one of its dtype, float32."""
    info = torch.finfo(param.dtype)
    exponents = 0x7F80 if param.dtype is torch.bfloat16 else 0x7C00
    power = (param.view(torch.int16) & exponents).view(param.dtype).float()
    return power.clamp_min_(info.tiny).mul_(info.eps / 2)


def _keep(state: dict[str, Tensor], key: str, value: Tensor) -> None:
    if key in state:
        state[key].copy_(value)
    else:
        state[key] = value


def _high_bits(param: Tensor) -> Tensor:
    """The bit pattern of a bfloat16 tensor as the upper half of int32."""
    return param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)


def _low_bits(param: Tensor, weight: Tensor) -> Tensor:
    """int16 difference between the bit patterns of a float32 and of the bfloat16 it rounded to.

    It is at most half a bfloat16 spacing, 2**15 patterns. The one tie at +2**15 is stored as 2**15 - 1, one float32 spacing
    off.
    """
    return (weight.view(torch.int32) - _high_bits(param)).clamp_(-(2**15), 2**15 - 1).to(torch.int16)


def _join(param: Tensor, low: Tensor) -> Tensor:
    high = _high_bits(param)
    # Zero has no pattern below it: stale negative low bits of a weight that other code set to zero would make a NaN.
    at_zero = param == 0
    bits = high + torch.where(at_zero, low.clamp(min=0), low).to(torch.int32)
    return bits.view(torch.float32)


def round_stochastically(weight: Tensor, dtype: torch.dtype, generator: torch.Generator | None) -> Tensor:
    """float32 rounded up or down to bfloat16, with the probability that makes the expectation exact.

    Args:
        weight: float32 of any shape; bfloat16 numbers stay as they are.
        generator: noise, on the device of ``weight``. torch's global generator belongs to the training.

    Raises:
        ValueError: another dtype than bfloat16, or no generator.
    """
    if dtype is not torch.bfloat16:
        raise ValueError(
            f"low_precision_weights='stochastic' rounds to bfloat16, not to {dtype}; use 'split' for float16 weights"
        )
    if generator is None:
        raise ValueError("rounding stochastically needs a generator of its own")
    noise = torch.randint(0, 2**16, weight.shape, dtype=torch.int32, device=weight.device, generator=generator)
    bits = (weight.view(torch.int32) + noise).bitwise_and_(-(2**16))
    # The noise must not make a finite number infinite, nor change one that is not finite.
    rounded = bits.view(torch.float32)
    return torch.where(torch.isfinite(rounded), rounded, weight).to(dtype)
