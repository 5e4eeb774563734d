"""Shampoo written out for one tensor of any order: arXiv:2309.06497, algorithm 1, block by block, with eigh."""

from __future__ import annotations

import itertools
import string

import torch
from torch import Tensor


def inverse_power(a: Tensor, p: float, epsilon: float) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    values = values - values.min().clamp(max=0.0) + epsilon
    return vectors @ torch.diag(values ** (-p)) @ vectors.T


def along(x: Tensor, matrix: Tensor, d: int) -> Tensor:
    letters = string.ascii_lowercase[: x.ndim]
    return torch.einsum(f"z{letters[d]},{letters}->{letters.replace(letters[d], 'z')}", matrix, x)


class ReferenceShampoo:
    """State and step of one tensor; ``step`` returns the direction that is subtracted times the learning rate."""

    def __init__(self, shape, block, betas, epsilon, freq, start, grafting, *, graft_beta2=None, graft_eps=1e-8,
                 exponent=None, momentum=0.0, nesterov=False, bias_correction=True, kl=False, one_sided=False):  # fmt: skip
        self.o = dict(locals())
        self.t = 0
        self.shape = shape
        edges = [[(s, min(s + block, n)) for s in range(0, n, block)] if not one_sided else [(0, n)] for n in shape]
        self.blocks = [tuple(slice(a, b) for a, b in choice) for choice in itertools.product(*edges)]
        self.m = torch.zeros(shape, dtype=torch.float64)
        self.v = torch.zeros(shape, dtype=torch.float64)
        self.buffer = torch.zeros(shape, dtype=torch.float64)
        self.factors, self.roots, self.dims = [], [], []
        for window in self.blocks:
            sizes = [w.stop - w.start for w in window]
            dims = [d for d, s in enumerate(sizes) if s <= block]
            self.dims.append(dims)
            self.factors.append({d: torch.zeros(sizes[d], sizes[d], dtype=torch.float64) for d in dims})
            self.roots.append({d: torch.eye(sizes[d], dtype=torch.float64) for d in dims})

    def step(self, g: Tensor) -> Tensor:
        o = self.o
        beta1, beta2 = o["betas"]
        self.t += 1
        t = self.t
        for i, window in enumerate(self.blocks):
            self.accumulate(i, g[window], beta2)
            if t == o["start"] or (t > o["start"] and (t - o["start"]) % o["freq"] == 0):
                for d in self.dims[i]:
                    correction = 1 - beta2**t if o["bias_correction"] and beta2 < 1 else 1.0
                    order = len(self.dims[i])
                    p = o["exponent"] if o["exponent"] is not None else (0.5 if o["kl"] else 1 / (2 * order))
                    self.roots[i][d] = inverse_power(self.factors[i][d] / correction, p, o["epsilon"])
        self.m = beta1 * self.m + (1 - beta1) * g if beta1 else g
        m = self.m / (1 - beta1**t) if beta1 and o["bias_correction"] else self.m
        graft = self.graft(g, m)
        direction = torch.empty_like(g)
        for i, window in enumerate(self.blocks):
            s = m[window]
            for d in self.dims[i]:
                s = along(s, self.roots[i][d], d)
            if o["grafting"] != "none":
                s = s * graft[window].norm() / (s.norm() + 1e-16)
            elif o["kl"] and len(self.dims[i]) > 1:
                order = len(self.dims[i])
                p = o["exponent"] if o["exponent"] is not None else 0.5
                correction = 1 - beta2**t if o["bias_correction"] and beta2 < 1 else 1.0
                variance = (self.factors[i][self.dims[i][0]] / correction).diagonal().mean() + o["epsilon"]
                s = s * variance ** (p * (order - 1))
            direction[window] = s if t >= o["start"] else graft[window]
        if o["momentum"]:
            self.buffer = o["momentum"] * self.buffer + direction
            direction = direction + o["momentum"] * self.buffer if o["nesterov"] else self.buffer.clone()
        return direction

    def accumulate(self, i: int, g: Tensor, beta2: float) -> None:
        roots = dict(self.roots[i])
        for d in self.dims[i]:
            x = g
            if self.o["kl"]:
                for other in self.dims[i]:
                    if other != d:
                        x = along(x, roots[other], other)
            flat = x.movedim(d, 0).reshape(x.shape[d], -1)
            outer = flat @ flat.T
            if self.o["kl"]:  # its mean eigenvalue is the mean square of the gradient
                outer = outer / outer.trace() * g.shape[d] * (g**2).mean()
            a = self.factors[i][d]
            self.factors[i][d] = beta2 * a + (1 - beta2) * outer if beta2 < 1 else a + outer

    def graft(self, g: Tensor, m: Tensor) -> Tensor:
        o = self.o
        kind, beta = o["grafting"], o["graft_beta2"] if o["graft_beta2"] is not None else o["betas"][1]
        if kind in ("sgd", "none"):
            return m
        self.v = self.v + g**2 if kind == "adagrad" else beta * self.v + (1 - beta) * g**2
        v = self.v / (1 - beta**self.t) if kind == "adam" else self.v
        return m / (v.sqrt() + o["graft_eps"])
