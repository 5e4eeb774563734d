"""Shampoo, its one-sided and its KL variant.

Shampoo: V. Gupta, T. Koren, Y. Singer, arXiv:1802.09568. Moving averages, grafting, blocking, start and frequency: H.-J. M.
Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the Distributed Shampoo Optimizer", arXiv:2309.06497,
algorithm 1. KL-Shampoo: W. Lin et al., arXiv:2509.03378.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_emopt.kernels.cuda_graphs import replayed
from hf_emopt.linalg.inverse_root import RootSolver, inverse_root
from hf_emopt.linalg.retry_ladder import with_ladder
from hf_emopt.linalg.symmetric_batches import finite_blocks
from hf_emopt.rules.adam_direction import adam_direction
from hf_emopt.rules.base import Group, RefreshClock
from hf_emopt.rules.blocks import (
    BlockState,
    FactorDim,
    half_mode_products,
    mode_products,
    peak_of_positive,
    rounded,
    unfold,
)
from hf_emopt.rules.condition_number import condition_of_root
from hf_emopt.rules.kronecker import Gate, KroneckerOptions, KroneckerRule, cycled, gate_of, result_dtype
from hf_emopt.rules.options import Options, as_tuple, check_betas, check_flags, check_number, check_whole, option
from hf_emopt.rules.refresh import FIRST_PENDING, Refreshed, Snapshot

Grafting = Literal["adam", "rmsprop", "adagrad", "sgd", "none"]
RootSolverChoice = Literal["auto", RootSolver]

_GRAFT_FLOOR = 1e-16
# An iteration of products cannot tell a smaller eigenvalue from rounding, and would not converge on it. In float16 factors
# are split, and 1e-6 did for sides of up to 1408; of those of 2048 some fell back, since tensor cores cut long sums.
_RELATIVE_EPSILON = {"highest": 1e-6, "bf16x3": 1e-5, "tf32": 1e-3, "tf32_emulated": 1e-3, "fp16": 1e-5}
# The first factors of a matrix that is not square are singular, and rounding is felt in their roots if it is not far below.
_FIRST_EPSILON = 3e-5


def _plain_exponents(exponents: float | Mapping[int, float] | None) -> Any:
    return dict(exponents) if isinstance(exponents, Mapping) else exponents


@dataclass(eq=False)
class ShampooOptions(KroneckerOptions):
    """:class:`hf_emopt.Shampoo` says what each of them means."""

    lr: float | Tensor = 1e-3
    betas: tuple[float, float] = option((0.9, 0.999), partial(check_betas, sums=True), keep=as_tuple)
    epsilon: float = option(1e-12, check_number)
    weight_decay: float = 0.0
    max_preconditioner_dim: int = option(1024, partial(check_whole, low=1))
    precondition_frequency: int = option(10, partial(check_whole, low=1))
    start_preconditioning_step: int | None = option(None, partial(check_whole, low=1))
    grafting: Grafting = "adam"
    _: KW_ONLY
    grafting_beta2: float | None = None
    grafting_epsilon: float = option(1e-8, check_number)
    bias_correction: bool = True
    exponent_override: float | Mapping[int, float] | None = option(None, keep=_plain_exponents)
    momentum: float = option(0.0, partial(check_number, high=1.0))
    nesterov: bool = False
    root_solver: RootSolverChoice = "auto"
    relative_epsilon: float | None = option(None, partial(check_number, high=1.0, or_none="for what the solver needs"))
    root_dtype: torch.dtype | str = result_dtype()


class ShampooRule(KroneckerRule):
    """The filtered gradient, multiplied along each dimension by an inverse root of that dimension's factor.

    .. code-block:: text

        A_d  <- beta2 A_d + (1 - beta2) G_d G_d^T                      (+ G_d G_d^T for beta2 = 1)
        M    <- beta1 M + (1 - beta1) G;   M^ = M / (1 - beta1^t)
        S    =  M^ x_1 (A_1/(1-beta2^t) + eps I)^(-1/(2k)) ... x_k (...)^(-1/(2k))        k preconditioned dimensions
        U    =  S |graft(M^)| / (|S| + 1e-16)    block by block; graft(M^) alone before start_preconditioning_step
    """

    name: ClassVar[str] = "shampoo"
    options: ClassVar[type[Options]] = ShampooOptions

    def validate(self, group: Group) -> None:
        if group["root_solver"] == "coupled_higher_order":
            raise ValueError("root_solver='coupled_higher_order' is gone: use 'auto', 'coupled_newton' or 'eigh'")
        group = cycled(group)
        super().validate(group)
        check_flags(group, "kl")
        decays = group["grafting"] in ("adam", "rmsprop")
        beta = group["grafting_beta2"]
        if decays and beta == 1.0:
            raise ValueError(
                f"grafting_beta2={beta!r}, which is the second of the betas unless it is given, must be below 1 with "
                f"grafting={group['grafting']!r}: its moments would stay zero; grafting='adagrad' sums"
            )
        if decays or beta != 1.0:
            check_number(group, "grafting_beta2", high=1.0)
        given = group["exponent_override"]
        for order, exponent in (given if isinstance(given, Mapping) else {None: given}).items():
            check_number({"exponent_override": exponent}, "exponent_override", above=True, or_none="for the rule's own")
            if order is not None and not isinstance(order, int):
                raise ValueError(
                    f"exponent_override={given!r} must have numbers of dimensions as keys, such as {{2: 0.5}}"
                )

    def exponent(self, order: int, group: Group) -> float:
        """``p`` in ``A^(-p)`` for blocks with ``order`` factors."""
        given = group["exponent_override"]
        if isinstance(given, Mapping):
            given = given.get(order)
        if given is not None:
            return float(given)
        return 0.5 if group["kl"] else 1.0 / (2 * order)

    def first_refresh_step(self, group: Group) -> int:
        return int(group["start_preconditioning_step"])

    # ------------------------------------------------------------------ state

    def init_matrix_state(self, shape: tuple[int, ...], group: Group, like: Tensor) -> dict[str, Tensor]:
        wide = torch.empty(0, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        state = self.init_factors(shape, group, wide)
        state |= self.init_results("root", shape, group, wide)
        state["count"] = wide.new_zeros(shape[0])
        state |= self.init_failures(shape, group, like.device)
        if group["betas"][0] or "base_momentum" in group:
            state["exp_avg"] = wide.new_zeros(shape)
        if group["grafting"] in ("adam", "rmsprop", "adagrad"):
            state["graft_second_moment"] = wide.new_zeros(shape)
        if cycled(group)["momentum"]:
            state["momentum_buffer"] = wide.new_zeros(shape)
        return state

    # ------------------------------------------------------------------ step

    def transform(
        self, x: Tensor, matrix_state: dict[str, Tensor], group: Group, ok: Tensor | None, clock: RefreshClock
    ) -> Tensor:
        self.finish_pending(clock.key, matrix_state)
        group = cycled(group)
        gate = gate_of(ok, x)
        matrix_state["count"].add_(gate)
        filtered, graft = self._directions(x, matrix_state, group, gate)
        blocks = self.blocks(x, matrix_state, group)
        parts: list[Tensor] = []
        scales: list[Tensor | None] = []
        grid = self.grid(x.shape[1:], group)
        with self.precision(group):
            for block in blocks:
                self._update_factors(block, group, gate, clock)
            self.refresh(blocks, group, ok, clock)
            for block, m, g in zip(blocks, grid.split(filtered), grid.split(graft)):
                direction, scale = self._precondition(block, m, g, group, clock)
                parts.append(direction.view(m.shape))
                scales.append(scale)
        update = grid.merge(parts, scales)
        return self._momentum(update, matrix_state, group, gate)

    def _directions(self, x: Tensor, state: dict[str, Tensor], group: Group, gate: Gate) -> tuple[Tensor, Tensor]:
        """The filtered gradient, which is preconditioned, and the grafted direction, whose length the result takes over."""
        if group["grafting"] == "adam" and group["betas"][0] and group["bias_correction"]:
            # Only the direction of the filtered gradient counts, so it stays without the correction.
            betas, eps = (group["betas"][0], group["grafting_beta2"]), group["grafting_epsilon"]
            moments = state["exp_avg"], state["graft_second_moment"]
            return state["exp_avg"], adam_direction(x.contiguous(), *moments, state["count"], betas, eps, gate)
        filtered, beta1 = x, group["betas"][0]
        if beta1:
            filtered = state["exp_avg"].lerp_(x, gate * (1.0 - beta1))
            filtered = filtered / self._correction(beta1, state, x) if group["bias_correction"] else filtered
        return filtered, self._graft(x, filtered, state, group, gate)

    def _correction(self, beta: float, state: dict[str, Tensor], like: Tensor) -> Tensor:
        """``1 - beta^t`` of each matrix, shaped to divide a batch of them."""
        steps = state["count"].clamp_min(1.0)
        return (1.0 - beta**steps).view(-1, *[1] * (like.ndim - 1))

    def _graft(self, x: Tensor, filtered: Tensor, state: dict[str, Tensor], group: Group, gate: Gate) -> Tensor:
        kind, eps = group["grafting"], group["grafting_epsilon"]
        if kind in ("sgd", "none"):
            return filtered
        moment, beta = state["graft_second_moment"], group["grafting_beta2"]
        if kind == "adagrad":
            moment.add_(x.square() * gate)
        else:
            moment.lerp_(x.square(), gate * (1.0 - beta))
        if kind == "adam":
            return filtered / (moment.sqrt() * self._correction(beta, state, x).rsqrt() + eps)
        return filtered / (moment.sqrt() + eps)

    def _update_factors(self, block: BlockState, group: Group, gate: Gate, clock: RefreshClock) -> None:
        dims, precision = self.factored(block, group), group["matmul_precision"]
        if not group["kl"]:
            rows, scale = self.rows_of(block, group)
            for d in dims:
                self.update_factor(block, d, group, unfold(rows, d), gate, clock, scale)
            return
        for d in dims:  # each factor sees the gradient whitened by the other dimensions' inverse roots
            roots = [(other, block.tensor("root", other)) for other in dims if other != d]
            white = mode_products(block.grads, roots, precision)
            self.update_factor(block, d, group, self.whitened_rows(block, d, white), gate, clock)

    def snapshot(self, factor_dim: FactorDim, group: Group) -> dict[str, Tensor]:
        beta2, block = group["betas"][1], factor_dim.block
        factor = factor_dim.pick(self.factor(block, factor_dim.d, group))
        if not group["bias_correction"] or beta2 == 1.0:
            return {"factor": factor}
        counts = factor_dim.pick(block.state["count"].repeat_interleave(block.count)).clamp_min(1.0)
        return {"factor": factor / (1.0 - beta2**counts).view(-1, 1, 1)}

    def compute(self, snapshot: Snapshot, group: Group, first: bool, deferred: bool = False) -> Refreshed:
        factor = snapshot.tensors["factor"]
        solver, relative_epsilon = self._solver(factor, group, first)
        root = partial(
            inverse_root,
            exponent=self.exponent(snapshot.order, group),
            epsilon=group["epsilon"],
            solver=solver,
            relative_epsilon=relative_epsilon,
            precision=group["matmul_precision"],
        )
        optimistic = None if solver == "eigh" else partial(root, fallback=False)  # tried without a read of its result
        if deferred and optimistic is not None:

            def work(a: Tensor) -> tuple[Tensor, Tensor]:
                tried = optimistic(a)
                return tried.value, tried.failed

            value, failed = replayed(("root", *sorted(root.keywords.items())), (factor,), work)
            return Refreshed({"root": value}, _unstorable(value, failed, group), deferred=True)
        outcome = with_ladder(root, factor, optimistic=optimistic)
        self.ladder += outcome.report
        clean = not outcome.failed_blocks and group["root_dtype"] != "float16"
        return Refreshed({"root": outcome.value.value}, _unstorable(outcome.value.value, outcome.failed, group), clean)

    def install(
        self, dims: Sequence[FactorDim], new: Sequence[Refreshed], keep: Sequence[Tensor], group: Group
    ) -> None:
        for dim, result, kept in zip(dims, new, keep):
            root = dim.take("root")
            dim.put("root", torch.where(kept.view(-1, 1, 1), root, result.tensors["root"].to(root.dtype)))

    @staticmethod
    def _solver(factor: Tensor, group: Group, first: bool) -> tuple[RootSolver, float]:
        """The solver and its relative epsilon."""
        chosen: RootSolver | Literal["auto"] = group["root_solver"]
        solver: RootSolver = ("coupled_newton" if factor.is_cuda else "eigh") if chosen == "auto" else chosen
        if group["relative_epsilon"] is not None:
            return solver, group["relative_epsilon"]
        needed = _RELATIVE_EPSILON["highest" if solver == "eigh" else group["matmul_precision"]]
        return solver, max(needed, _FIRST_EPSILON) if first else needed

    def _precondition(
        self, block: BlockState, m: Tensor, graft: Tensor, group: Group, clock: RefreshClock
    ) -> tuple[Tensor, Tensor | None]:
        """The update of each block, and a factor that it must still be multiplied by, or ``None``.

        The filtered gradient ``m`` and the grafted direction are ``(N, count, b1, ..., bk)``.
        """
        ready = self.refreshed_before(block, group, clock)
        if not any(ready):
            return graft, None
        roots = [(d, block.tensor("root", d)) for d in self.factored(block, group)]
        scale: Tensor | None = None
        if roots and m.ndim == 4 and self.in_half(m, group):
            direction, scale = half_mode_products(m, rounded(roots, peak_of_positive))
        else:
            direction = mode_products(m.flatten(0, 1), roots, group["matmul_precision"])
        if group["grafting"] != "none":
            length = torch.linalg.vector_norm(direction.flatten(1), dim=1)
            length = length if scale is None else length * scale
            wanted = torch.linalg.vector_norm(graft, dim=tuple(range(2, graft.ndim))).flatten()
            ratio = wanted / (length + _GRAFT_FLOOR)
            scale = ratio if scale is None else scale * ratio
        elif group["kl"]:
            ratio = self._one_scale(block, group)
            scale = ratio if scale is None else scale * ratio
        if not roots:  # without a factor it may be the state itself
            direction = direction.clone()
        awaited = bool(roots) and self.may_await_first(clock.key)
        if all(ready) and not awaited:
            return direction, scale
        chosen = None if all(ready) else torch.tensor(ready, device=m.device)
        for d, _ in roots if awaited else ():
            refreshed = block.tensor("failures", d) != FIRST_PENDING
            chosen = refreshed if chosen is None else chosen & refreshed
        assert chosen is not None
        chosen = chosen.view(-1, *[1] * (direction.ndim - 1))
        direction = direction if scale is None else direction * scale.view(-1, *[1] * (direction.ndim - 1))
        return torch.where(chosen, direction, graft.flatten(0, 1)), None

    def _one_scale(self, block: BlockState, group: Group) -> Tensor:
        """``(N * count,)``: the correction for inverse roots that each hold the variance of an element, where one should."""
        dims = self.factored(block, group)
        if len(dims) < 2:
            return block.grads.new_ones(block.grads.shape[0])
        factor = self.snapshot(FactorDim(block, dims[0], (), None, len(dims)), group)["factor"]
        variance = factor.diagonal(dim1=-2, dim2=-1).mean(-1) + group["epsilon"]
        return variance ** (self.exponent(len(dims), group) * (len(dims) - 1))

    def _momentum(self, update: Tensor, state: dict[str, Tensor], group: Group, gate: Gate) -> Tensor:
        mu = group["momentum"]
        if not mu:
            return update
        buffer = state["momentum_buffer"]
        buffer.add_((update - (1.0 - mu) * buffer) * gate)  # mu * buffer + update, where the step counts
        return update.add(buffer, alpha=mu) if group["nesterov"] else buffer.clone()

    def has_momentum(self, group: Group) -> bool:
        return bool(cycled(group)["betas"][0] or group["momentum"])

    def condition(self, block: BlockState, d: int, group: Group) -> Tensor:
        order = len(self.factored(block, group))
        factor = self.snapshot(FactorDim(block, d, (), None, order), group)["factor"]
        return condition_of_root(factor, block.tensor("root", d), self.exponent(order, group))

    def cost(self, m: int, n: int, group: Group) -> int:
        # Factor and preconditioning are a product each; a root is some twenty products of its size, once a period.
        return self.block_flops(m, n, group, products=2, refresh_products=20)

    def describe(self, group: Group) -> str:
        kind = "KL-Shampoo" if group["kl"] else "Shampoo"
        size = f"lr is that of {group['grafting']}" if group["grafting"] != "none" else "lr is not AdamW's"
        if group["grafting"] == "adam":
            size = "each block moves as far as AdamW would move it: lr means what it means for AdamW"
        return (
            f"{kind}: betas {tuple(group['betas'])}, roots every {group['precondition_frequency']} steps from step "
            f"{group['start_preconditioning_step']} ({group['refresh']}), blocks of {group['max_preconditioner_dim']}; "
            f"grafting {group['grafting']}: {size}"
        )


class KLShampooRule(ShampooRule):
    """Shampoo with ``kl=True``. It is a rule of its own because its factors have another meaning.

    .. code-block:: text

        A   <-  beta2 A + (1 - beta2) v W W^T / |W|^2 m,    W = G B^(-1/2),    v the mean square of G's elements
        B   <-  beta2 B + (1 - beta2) v W^T W / |W|^2 n,    W = A^(-1/2) G
        S    =  A^(-1/2) M^ B^(-1/2) sqrt(mean eigenvalue)                 the length only where there is no grafting

    The paper's ``G B^-1 G^T / n`` and its fixed point, at the scale of ``G``: see :meth:`whitened_rows` for why.
    """

    name: ClassVar[str] = "kl_shampoo"


def _unstorable(root: Tensor, failed: Tensor, group: Group) -> Tensor:
    """The failed blocks. A root that is kept in float16 has failed too if an entry is out of range."""
    return failed if group["root_dtype"] != "float16" else failed | ~finite_blocks(root.to(torch.float16))
