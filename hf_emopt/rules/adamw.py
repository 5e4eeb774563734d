"""Elementwise steps: AdamW for the auxiliary parameters, and the last phase of every matrix rule.

AdamW: I. Loshchilov and F. Hutter, arXiv:1711.05101; the arithmetic is torch's own fused kernel.
Cautious weight decay: L. Chen et al., arXiv:2510.12402.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hf_emopt.formats.master_weights import LOW_DTYPES, load_weights, store_weights
from hf_emopt.rules.base import Group, state_dtype
from hf_emopt.rules.options import Options, check_betas, check_number


@dataclass(eq=False, kw_only=True)
class DecayOptions(Options):
    """How matrices decay; :func:`decay_factor` says what each kind is."""

    weight_decay_type: Literal["decoupled", "l2", "corrected", "independent"] = "decoupled"


def validate_adamw(group: Group) -> None:
    """Raises ``ValueError`` when betas or eps of an auxiliary group are out of range."""
    check_betas(group, name="aux_betas")
    check_number({"aux_eps": group["eps"]}, "aux_eps")
    kind = group.get("weight_decay_type", "decoupled")
    if kind != "decoupled":
        raise ValueError(
            f"weight_decay_type={kind!r} is in a group of kind 'aux', whose decay is decoupled: pass it to the constructor, "
            "or in a group with 'kind': 'matrix'"
        )


def init_adamw_state(param: Tensor) -> dict[str, Tensor]:
    """Moments of the parameter's shape, float32 or wider, under the names of ``torch.optim.AdamW``."""
    dtype = state_dtype(param)
    return {"exp_avg": torch.zeros_like(param, dtype=dtype), "exp_avg_sq": torch.zeros_like(param, dtype=dtype)}


def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: Group,
    ok: Tensor | None,
    generator: torch.Generator | None = None,
) -> None:
    """One AdamW step with decoupled decay ``p (1 - lr wd)``, in place.

    Args:
        params: parameters of one device and one dtype.
        grads: their gradients, any dtype; not written to.
        states: ``exp_avg``, ``exp_avg_sq`` and ``step`` of each.
        group: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``low_precision_weights`` and ``compat``.
        ok: scalar bool on the device; ``False`` leaves parameters, moments and ``step`` as they are.
        generator: see :func:`~hf_emopt.formats.master_weights.store_weights`.
    """
    policy, low = group["low_precision_weights"], params[0].dtype in LOW_DTYPES
    weights = load_weights(params, states, policy) if low else list(params)
    if group["compat"] == "moonlight":
        _moonlight_adamw(weights, grads, states, group, ok)
    else:
        beta1, beta2 = group["betas"]
        # The fused kernel walks memory, not indices: all of a parameter's tensors are seen in the order of its weight's.
        moments = [[s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")]
        changed = [*weights, *moments[0], *moments[1]]
        plain = all(map(Tensor.is_contiguous, changed))  # as nearly always
        orders = [None] * len(weights) if plain else [_memory_order(w) for w in weights]
        rows = changed if plain else [_in_order(t, order) for t, order in zip(changed, orders * 3)]
        count = len(weights)
        adamw(
            rows[:count],
            [_in_order(g.to(w.dtype), order) for g, w, order in zip(grads, weights, orders)],
            rows[count : 2 * count],
            rows[2 * count :],
            [],
            [s["step"] for s in states],
            fused=True,
            found_inf=None if ok is None else (~ok).to(torch.float32),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for tensor, row, order in zip(changed, rows, orders * 3):
            if row is not tensor and row.data_ptr() != tensor.data_ptr():
                (tensor if order is None else tensor.permute(order)).copy_(row)
    if low:
        store_weights(params, weights, states, policy, generator)


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the slowest to the fastest in memory, in which a dense tensor of any format is contiguous; ``None``
    where they are in that order already."""
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def _in_order(tensor: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Contiguous with its dimensions in an order; the tensor itself where it is that."""
    return (tensor if order is None else tensor.permute(order)).contiguous()


def _moonlight_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: Group,
    ok: Tensor | None,
) -> None:
    """AdamW with eps beside the uncorrected second moment, as in Moonlight's toy_train.py."""
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    for weight, grad, state in zip(weights, grads, states):
        gate = torch.ones((), dtype=torch.float32, device=weight.device) if ok is None else ok.to(torch.float32)
        g = grad.to(weight.dtype) if ok is None else torch.where(ok, grad.to(weight.dtype), 0.0)
        state["step"].add_(gate)
        # A gate of 0 turns each blend into "keep", without asking the device what it is.
        state["exp_avg"].add_((g - state["exp_avg"]) * gate, alpha=1.0 - beta1)
        state["exp_avg_sq"].add_((g.square() - state["exp_avg_sq"]) * gate, alpha=1.0 - beta2)
        step = state["step"].to(weight.dtype).clamp_min(1.0)
        correction = (1.0 - beta2**step).sqrt() / (1.0 - beta1**step)
        update = state["exp_avg"] / (group["eps"] + state["exp_avg_sq"].sqrt()) * correction
        weight.mul_(1.0 - lr * decay * gate).sub_(update * (lr * gate))


def has_l2_decay(group: Group) -> bool:
    """Whether the gradient has the decay."""
    return group.get("weight_decay_type") == "l2" and bool(group["weight_decay"])


def with_l2_decay(grads: list[Tensor], params: Sequence[Tensor], group: Group) -> list[Tensor]:
    """``g + wd p`` in the gradients' dtype where the decay is of the L2 kind, else the gradients as they are."""
    if not has_l2_decay(group):
        return grads
    return [g.add(p.to(g.dtype), alpha=group["weight_decay"]) for g, p in zip(grads, params)]


def decay_factor(group: Group, lr: float | Tensor) -> float | Tensor:
    """What a weight loses in a step, as a fraction: the decay kinds of arXiv:2309.06497's implementation.

    ``"decoupled"``: ``lr wd``; ``"corrected"``: ``lr wd lr / peak lr`` (A. Defazio, arXiv:2506.02285); ``"independent"``:
    ``wd lr / peak lr``, which the peak learning rate does not change; ``"l2"``: nothing, the gradient has it already. The
    peak is ``max_lr`` where a scheduler keeps one (``OneCycleLR``), else ``initial_lr``, which all of torch's keep, else what
    the group began with. A learning rate above all of these is its own peak.
    """
    kind, decay = group.get("weight_decay_type", "decoupled"), group["weight_decay"]
    if not decay or kind == "l2":
        return 0.0
    if kind == "decoupled":
        return lr * decay
    peak = next(group[key] for key in ("max_lr", "initial_lr", "peak_lr", "lr") if key in group)
    relative = group["lr"] / max(float(peak), 1e-30)
    relative = relative.clamp(max=1.0) if isinstance(relative, Tensor) else min(relative, 1.0)
    return lr * decay * relative if kind == "corrected" else decay * relative


def apply_updates(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    group: Group,
    ok: Tensor | None,
    generator: torch.Generator | None = None,
) -> None:
    """``p <- (1 - lr wd) p - lr u``, in place, with the decay by the base learning rate.

    Args:
        params, ok, generator: as for :func:`adamw_step`.
        updates: of the rule's transform, shaped like the parameters; overwritten.
        states: with the low bits of 16-bit weights.
        group: ``lr``, ``weight_decay``, ``low_precision_weights``; and where a rule has them ``cautious_weight_decay``,
            ``weight_decay_type`` (see :func:`decay_factor`) and ``decay_after`` (``p <- (1 - lr wd) (p - lr u)``).
    """
    if not params:
        return
    lr, policy, low = group["lr"], group["low_precision_weights"], params[0].dtype in LOW_DTYPES
    weights = load_weights(params, states, policy) if low else list(params)
    wide = [u if u.dtype == w.dtype else u.to(w.dtype) for u, w in zip(updates, weights)]
    gate = 1.0 if ok is None else ok.to(weights[0].dtype)
    shrink = decay_factor(group, lr)
    decays = isinstance(shrink, Tensor) or shrink != 0.0
    after = group.get("decay_after", False)
    if decays and group.get("cautious_weight_decay", False):
        for weight, update in zip(weights, wide):
            # Only where the update already pulls the weight towards zero.
            weight.sub_(weight * (weight * update > 0) * (shrink * gate))
    elif decays and not after:
        torch._foreach_mul_(weights, 1.0 - shrink * gate)
    torch._foreach_mul_(wide, -(lr * gate))
    torch._foreach_add_(weights, wide)
    if decays and after:
        torch._foreach_mul_(weights, 1.0 - shrink * gate)
    if low:
        store_weights(params, weights, states, policy, generator)
