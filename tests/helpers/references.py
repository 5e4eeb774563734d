"""Reference implementations, written from the papers' and authors' formulas, one matrix at a time and easy to check."""

from __future__ import annotations

import torch
from torch import Tensor

JORDAN = (3.4445, -4.7750, 2.0315)


def zeropower_via_newtonschulz5(
    g: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-7
) -> Tensor:
    """The orthogonalization of Keller Jordan's Muon: Frobenius norm plus 1e-7, quintic iteration."""
    a, b, c = JORDAN
    x = g.to(dtype)
    if g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if g.shape[-2] > g.shape[-1] else x


def keller_step(p: Tensor, g: Tensor, state: dict, lr: float, wd: float, momentum: float, nesterov: bool) -> None:
    """SingleDeviceMuon of github.com/KellerJordan/Muon."""
    buf = state.setdefault("m", torch.zeros_like(p))
    buf.lerp_(g, 1 - momentum)
    update = g.lerp(buf, momentum) if nesterov else buf
    update = zeropower_via_newtonschulz5(update)
    update *= max(1, update.size(-2) / update.size(-1)) ** 0.5
    p.mul_(1 - lr * wd)
    p.add_(update, alpha=-lr)


def moonlight_step(p: Tensor, g: Tensor, state: dict, lr: float, wd: float, momentum: float, nesterov: bool) -> None:
    """Muon of github.com/MoonshotAI/Moonlight, examples/toy_train.py: momentum accumulates, RMS of the update 0.2."""
    buf = state.setdefault("m", torch.zeros_like(p))
    buf.mul_(momentum).add_(g)
    update = g.add(buf, alpha=momentum) if nesterov else buf
    update = zeropower_via_newtonschulz5(update)
    adjusted = lr * 0.2 * max(p.shape) ** 0.5
    p.mul_(1 - lr * wd)
    p.add_(update, alpha=-adjusted)


def keller_adam_step(
    p: Tensor, g: Tensor, state: dict, lr: float, wd: float, betas: tuple[float, float], eps: float
) -> None:
    """The AdamW of Keller's MuonWithAuxAdam: eps beside the corrected second moment."""
    m, v = state.setdefault("m", torch.zeros_like(p)), state.setdefault("v", torch.zeros_like(p))
    state["t"] = state.get("t", 0) + 1
    m.lerp_(g, 1 - betas[0])
    v.lerp_(g.square(), 1 - betas[1])
    update = m / (1 - betas[0] ** state["t"]) / ((v / (1 - betas[1] ** state["t"])).sqrt() + eps)
    p.mul_(1 - lr * wd)
    p.add_(update, alpha=-lr)


def moonlight_adam_step(
    p: Tensor, g: Tensor, state: dict, lr: float, wd: float, betas: tuple[float, float], eps: float
) -> None:
    """The AdamW of Moonlight's toy_train.py: eps beside the uncorrected second moment."""
    m, v = state.setdefault("m", torch.zeros_like(p)), state.setdefault("v", torch.zeros_like(p))
    state["t"] = state.get("t", 0) + 1
    m.lerp_(g, 1 - betas[0])
    v.lerp_(g.square(), 1 - betas[1])
    correction1, correction2 = 1 - betas[0] ** state["t"], 1 - betas[1] ** state["t"]
    scale = correction1 / correction2**0.5
    p.mul_(1 - lr * wd)
    p.add_(m / (eps + v.sqrt()), alpha=-lr / scale)


def normuon_step(p: Tensor, g: Tensor, state: dict, lr: float, wd: float, momentum: float, beta2: float) -> None:
    """NorMuon, arXiv:2510.05491 algorithm 1, with the norm restored as in microsoft/dion and scale 0.2 sqrt(max)."""
    buf = state.setdefault("m", torch.zeros_like(p))
    v = state.setdefault("v", torch.zeros(p.shape[0], 1, dtype=p.dtype))
    buf.lerp_(g, 1 - momentum)
    o = zeropower_via_newtonschulz5(g.lerp(buf, momentum), dtype=p.dtype, eps=0.0)
    v.mul_(beta2).add_(o.square().mean(1, keepdim=True), alpha=1 - beta2)
    u = o / (v.sqrt() + 1e-8)
    u *= o.norm() / u.norm()
    p.mul_(1 - lr * wd)
    p.add_(u, alpha=-lr * 0.2 * max(p.shape) ** 0.5)
