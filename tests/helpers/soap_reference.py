"""SOAP written out for one matrix, step by step as the paper's reference implementation does it, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


class ReferenceSoap:
    """State and step of one tensor of any order; ``step`` changes ``p`` in place."""

    def __init__(self, shape, lr, betas, eps, weight_decay, freq, max_dim, shampoo_beta=None):
        self.lr, self.betas, self.eps, self.wd, self.freq = lr, betas, eps, weight_decay, freq
        self.shampoo_beta = betas[1] if shampoo_beta is None else shampoo_beta
        self.gg = [torch.zeros(n, n, dtype=torch.float64) if n <= max_dim else None for n in shape]
        self.q: list[Tensor | None] | None = None
        self.exp_avg = torch.zeros(shape, dtype=torch.float64)
        self.exp_avg_sq = torch.zeros(shape, dtype=torch.float64)
        self.t = 0

    def project(self, x: Tensor, back: bool = False) -> Tensor:
        for q in self.q:  # contracting the first dimension and appending the new one turns all dimensions once
            if q is None:
                x = x.movedim(0, -1)
            else:
                x = torch.tensordot(x, q, dims=([0], [1 if back else 0]))
        return x

    def update_factors(self, g: Tensor) -> None:
        for d, a in enumerate(self.gg):
            if a is not None:
                flat = g.movedim(d, 0).reshape(g.shape[d], -1)
                a.lerp_(flat @ flat.T, 1 - self.shampoo_beta)

    def update_bases(self) -> None:
        for d, (a, q) in enumerate(zip(self.gg, self.q)):
            if a is None:
                continue
            order = torch.argsort(torch.diag(q.T @ a @ q), descending=True)
            self.exp_avg_sq = self.exp_avg_sq.index_select(d, order)
            self.q[d] = torch.linalg.qr(a @ q[:, order])[0]

    def step(self, p: Tensor, g: Tensor) -> None:
        if self.q is None:
            self.update_factors(g)
            self.q = [None if a is None else torch.linalg.eigh(a)[1].flip(1) for a in self.gg]
            return
        b1, b2 = self.betas
        self.t += 1
        projected = self.project(g)
        self.exp_avg.mul_(b1).add_(projected, alpha=1 - b1)
        self.exp_avg_sq.mul_(b2).add_(projected**2, alpha=1 - b2)
        size = self.lr * (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
        p.sub_(self.project(self.exp_avg / (self.exp_avg_sq.sqrt() + self.eps), back=True), alpha=size)
        p.mul_(1 - self.lr * self.wd)
        original = self.project(self.exp_avg, back=True)
        self.update_factors(g)
        if self.t % self.freq == 0:
            self.update_bases()
        self.exp_avg = self.project(original)
