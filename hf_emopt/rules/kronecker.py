"""What Shampoo and SOAP share: factors of the gradient's covariance by block and by dimension, and when to use them.

For a block ``G`` of the gradient and each of its dimensions ``d``, with ``G_d`` the block unfolded so that dimension ``d``
counts rows, the factor is a running mean (or sum) of ``G_d G_d^T``. What is computed from the factors (inverse roots,
eigenbases) is refreshed once in ``precondition_frequency`` steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch
from torch import Tensor

from hf_emopt.formats.kronecker_factors import FACTOR_STORAGE, init_factor, load_factor, store_factor
from hf_emopt.linalg.matmul_precision import Precision, matmul_precision, scaled_half
from hf_emopt.linalg.symmetric_products import accumulate_gram
from hf_emopt.rules.base import Clock, Group, state_dtype
from hf_emopt.rules.blocks import BlockGrid, BlockState, unfold
from hf_emopt.rules.refresh import REFRESHES, Refresh, RefreshingRule
from hf_emopt.rules.validation import check_choice, check_flags, check_whole

__all__ = ["Gate", "KroneckerRule", "Oversize", "Refresh", "gate_of"]

Oversize = Literal["block", "one_sided"]

WEIGHT_DECAY_TYPES = ("decoupled", "l2", "corrected", "independent")

FACTOR_DTYPES = ("float32", "bfloat16", "float16")
"""In which roots and bases may be kept; float32 is that of the factors, and so float64 where the weights are."""

Gate = Tensor | float
"""1 where a step counts and 0 where it is skipped, as a number or as a scalar tensor on the device."""


class KroneckerRule(RefreshingRule):
    """Base of the rules with factors: validation, blocks, and factor updates."""

    # ------------------------------------------------------------------ hyperparameters

    def validate(self, group: Group) -> None:
        for key, low in (("precondition_frequency", 1), ("max_preconditioner_dim", 1), ("tolerated_failures", 0)):
            check_whole(group, key, low)
        check_choice(group, "refresh", REFRESHES)
        check_choice(group, "matmul_precision", get_args(Precision))
        check_choice(group, "oversize", get_args(Oversize))
        check_choice(group, "factor_storage", FACTOR_STORAGE)
        check_choice(group, "weight_decay_type", WEIGHT_DECAY_TYPES)
        check_flags(group, "kl")
        delay = group["async_delay"]
        if delay is not None and not (isinstance(delay, int) and 1 <= delay < group["precondition_frequency"]):
            raise ValueError(
                f"async_delay={delay!r} must be a whole number from 1 to precondition_frequency - 1 = "
                f"{group['precondition_frequency'] - 1}"
            )
        if group["refresh"] == "async" and group["matmul_precision"] != "highest":
            raise ValueError(
                f"refresh='async' runs beside the training, and matmul_precision={group['matmul_precision']!r} sets flags "
                "of the whole process that the training would see; use matmul_precision='highest' or refresh='staggered'"
            )
        if group["refresh"] == "async" and group["precondition_frequency"] < 2:
            raise ValueError("refresh='async' needs precondition_frequency of at least 2: results come a step later")

    def grid(self, dims: Sequence[int], group: Group) -> BlockGrid:
        """The blocks of a matrix (or tensor) of this shape."""
        limit = group["max_preconditioner_dim"]
        one_sided = group["oversize"] == "one_sided"
        return BlockGrid.of(tuple(dims), tuple(d if one_sided else min(d, limit) for d in dims))

    def has_factor(self, size: int, group: Group) -> bool:
        """Whether a side of a block is preconditioned; one above the limit is left alone (one-sided)."""
        return bool(size <= group["max_preconditioner_dim"])

    def factored(self, block: BlockState, group: Group) -> list[int]:
        """Dimensions of a block that have a factor."""
        return [d for d, size in enumerate(block.sizes) if self.has_factor(size, group)]

    # ------------------------------------------------------------------ phases

    def accumulate(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        group: Group,
        ok: Tensor | None,
    ) -> list[Tensor]:
        """The gradient itself, with the decay added where it is of the L2 kind; all other state is the owner's."""
        wide = [g.to(state_dtype(p)) for g, p in zip(grads, params)]
        if group["weight_decay_type"] == "l2" and group["weight_decay"]:
            wide = [g.add(p.to(g.dtype), alpha=group["weight_decay"]) for g, p in zip(wide, params)]
        if ok is None:
            return wide
        # One tensor of all, since as many small launches as parameters take longer than the copy.
        flat = torch.cat([g.reshape(-1) for g in wide]).masked_fill_(~ok, 0.0)
        return [part.view(g.shape) for part, g in zip(flat.split([g.numel() for g in wide]), wide)]

    def passes_gradients(self, group: Group) -> bool:
        return not (group["weight_decay_type"] == "l2" and group["weight_decay"])

    def blocks(self, x: Tensor, state: dict[str, Tensor], group: Group) -> list[BlockState]:
        """The classes of blocks of a batch ``(N, ...)``."""
        blocks, first_piece = [], 0
        for index, part in enumerate(self.grid(x.shape[1:], group).split(x)):
            block = BlockState(index, part.flatten(0, 1), part.shape[1], first_piece, state)
            blocks.append(block)
            first_piece += block.count * len(self.factored(block, group))
        return blocks

    def init_factors(self, x_shape: Sequence[int], group: Group, like: Tensor) -> dict[str, Tensor]:
        """Zero factors for a batch ``(N, ...)``."""
        state: dict[str, Tensor] = {}
        for index, c in enumerate(self.grid(x_shape[1:], group).classes):
            for d, size in enumerate(c.sizes):
                if self.has_factor(size, group):
                    lead = (x_shape[0], c.count)
                    state |= init_factor(f"factor.{index}.{d}", lead, size, group["factor_storage"], like)
        return state

    def factor(self, block: BlockState, d: int, group: Group) -> Tensor:
        """The factor of dimension ``d`` as ``(N * count, b_d, b_d)``, in the dtype of the mathematics."""
        full = load_factor(block.state, block.key("factor", d), block.sizes[d], group["factor_storage"])
        return full.view(-1, *full.shape[2:]).to(block.state["count"].dtype)

    def update_factor(
        self,
        block: BlockState,
        d: int,
        group: Group,
        beta: float,
        rows: Tensor,
        gate: Gate,
        clock: Clock,
        scale: Tensor | None = None,
    ) -> None:
        """``A <- beta A + (1 - beta) R R^T``, or ``A + R R^T`` for ``beta = 1``, where the step counts.

        Args:
            rows: ``(N * count, b_d, rest)``, the block unfolded (and whitened, where a variant asks for it); zeros in a step
                that does not count. In float16 if they are already rounded, and then to be multiplied by ``scale``.
        """
        new = 1.0 if beta == 1.0 else 1.0 - beta
        factor = self.factor(block, d, group)
        if self.in_half(rows, group):
            half, scale = (rows, scale) if scale is not None else scaled_half(rows)
            scale = scale.view(-1) * gate
            kept = torch.ones_like(scale) if beta == 1.0 else 1.0 - new * gate * torch.ones_like(scale)
            accumulate_gram(factor, half, scale, new, kept)
        elif isinstance(gate, Tensor):
            if beta != 1.0:
                # A list's multiplication by a scalar of the device is vectorized, a tensor's is not.
                torch._foreach_mul_([factor], 1.0 - new * gate)
            factor.baddbmm_(rows, rows.mT, alpha=new)
        else:
            factor.baddbmm_(rows, rows.mT, beta=1.0 if beta == 1.0 else 1.0 - new * gate, alpha=new * gate)
        storage, key = group["factor_storage"], block.key("factor", d)
        if storage == "float32":
            return
        generator = None
        if storage != "packed":  # noise of the round, so that replicas agree and a resumed run repeats it
            seed = clock.rounds[0] * 1_000_003 + 97 * block.index + d
            generator = torch.Generator(factor.device).manual_seed(seed)
        shape = (*block.state[key].shape[:2], *factor.shape[1:])
        store_factor(
            block.state, key, factor.view(shape), storage, generator, gate > 0 if isinstance(gate, Tensor) else None
        )

    @staticmethod
    def in_half(x: Tensor, group: Group) -> bool:
        """Whether products of ``x`` run in float16: float32 matrices (or what is rounded of them) with that precision."""
        return group["matmul_precision"] == "fp16" and x.dtype in (torch.float32, torch.float16)

    def rows_of(self, block: BlockState, group: Group) -> tuple[Tensor, Tensor | None]:
        """The block's gradients as its factors read them, rounded once for all sides, and their scale."""
        return (
            scaled_half(block.grads)
            if self.in_half(block.grads, group) and block.grads.ndim == 3 and self.factored(block, group)
            else (block.grads, None)
        )

    @staticmethod
    def whitened_rows(block: BlockState, d: int, white: Tensor) -> Tensor:
        """A block whitened on its other sides, unfolded for its factor of dimension ``d``, at the size of the gradient.

        The mean eigenvalue of ``R R^T`` is the mean square of the gradient's elements. The KL fit leaves open how a scale is
        split among the sides, so that is what makes gradients of all steps weigh as much as they are large. With the scale
        of the whitening they do not: before the first refresh a contribution has the gradient's variance, 1e-6 say, and
        after it the size one, or a million where the gradients so far leave directions of the other side empty. The running
        mean would then hold the gradients of one period for hundreds of steps.

        Args:
            white: the block's gradient times inverse roots on other dimensions than ``d``, ``(N * count, b1, ..., bk)``.
        """
        dims = tuple(range(1, white.ndim))
        size = torch.linalg.vector_norm(block.grads, dim=dims)
        length = torch.linalg.vector_norm(white, dim=dims).clamp_min(torch.finfo(white.dtype).tiny)
        others = math.prod(block.sizes) // block.sizes[d]
        rows = unfold(white, d)
        return rows * (size / length * others**-0.5).view(-1, 1, 1)

    # ------------------------------------------------------------------ figures

    def measure(self, matrix_state: dict[str, Tensor], shape: tuple[int, int], group: Group) -> dict[str, Tensor]:
        batch = matrix_state["count"].shape[0]
        found = {}
        momentum = self.momentum_square(matrix_state)
        if momentum is not None:
            found["momentum"] = momentum
        conditions, failures = [], []
        with self.precision(group):
            # Only shapes are asked of the gradient.
            for block in self.blocks(torch.empty(batch, *shape, device="meta"), matrix_state, group):
                for d in self.factored(block, group):
                    conditions.append(self.condition(block, d, group).view(batch, -1).amax(1))
                    failures.append(block.tensor("failures", d).clamp_min(0).view(batch, -1).amax(1))
        if conditions:
            found["condition_number"] = torch.stack(conditions).amax(0)
            found["failures"] = torch.stack(failures).amax(0).float()
        return found

    def momentum_square(self, matrix_state: dict[str, Tensor]) -> Tensor | None:
        """Squared norm of each matrix's first moment, which a turn of the basis does not change: ``(B,)``."""
        moments = [value for name, value in matrix_state.items() if name.partition(".")[0] == "exp_avg"]
        moments = moments or [value for name, value in matrix_state.items() if name == "momentum_buffer"]
        return sum((m.flatten(1).square().sum(1) for m in moments), torch.zeros(())) if moments else None

    @abstractmethod
    def condition(self, block: BlockState, d: int, group: Group) -> Tensor:
        """Condition number of the factor of dimension ``d`` of each block, ``(N * count,)``, without a decomposition."""

    def block_flops(self, m: int, n: int, group: Group, products: int, refresh_products: int) -> int:
        """Floating-point operations of an ``m x n`` matrix in a step, averaged over a period.

        One an element where no side has a factor, since what costs nothing would all be given to one rank.

        Args:
            products: products of a block with a square matrix on each preconditioned side, in every step.
            refresh_products: products of two such square matrices, once a period.
        """
        total = 0
        for c in self.grid((m, n), group).classes:
            sides = [s for s in c.sizes if self.has_factor(s, group)]
            numel = math.prod(c.sizes)
            total += c.count * sum(
                2 * products * numel * s + 2 * refresh_products * s**3 // self.period(group) for s in sides
            )
        return total or m * n

    def precision(self, group: Group) -> AbstractContextManager[None]:
        """Context in which this rule's float32 products run."""
        return matmul_precision(group["matmul_precision"])


def gate_of(ok: Tensor | None, like: Tensor) -> Gate:
    """``ok`` as a number to multiply by."""
    return 1.0 if ok is None else ok.to(like.dtype)
