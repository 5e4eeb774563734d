"""The common part of Shampoo and SOAP: factors of the gradient's covariance, by block and by dimension.

Let ``G`` be a block of the gradient and ``G_d`` the block unfolded so that dimension ``d`` counts rows. The factor of
dimension ``d`` is a running mean (or sum) of ``G_d G_d^T``. Inverse roots (Shampoo) or eigenbases (SOAP) are computed from
the factors once in ``precondition_frequency`` steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_emopt.formats.kronecker_factors import FactorStorageName, init_factor, load_factor, store_factor
from hf_emopt.linalg.matmul_precision import Precision, matmul_precision, scaled_half
from hf_emopt.linalg.symmetric_products import accumulate_gram
from hf_emopt.rules.adamw import DecayOptions, has_l2_decay, with_l2_decay
from hf_emopt.rules.base import Group, RefreshClock
from hf_emopt.rules.blocks import BlockGrid, BlockState, unfold
from hf_emopt.rules.options import check_choice, check_whole, dtype_name, option
from hf_emopt.rules.refresh import Refresh, RefreshingRule

Oversize = Literal["block", "one_sided"]

_RESULT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Gate = Tensor | float
"""1 where a step counts and 0 where it is skipped, as a number or as a scalar tensor on the device."""


def _check_refresh(group: Mapping[str, Any], key: str) -> None:
    if group[key] == "async":
        raise ValueError(
            f"{key}='async' was removed, since no step was measured to be faster with it; use {key}='staggered', the "
            "default, which spreads the refreshes over the steps of a period"
        )
    check_choice(group, key, get_args(Refresh))


def result_dtype() -> Any:
    """The option for the dtype in which roots or bases are kept. ``float32`` stands for the dtype of the factors, which is
    float64 where the weights are."""
    return option("float32", partial(check_choice, accepted=_RESULT_DTYPES), keep=dtype_name)


@dataclass(eq=False, kw_only=True)
class KroneckerOptions(DecayOptions):
    """Options of all rules with factors; :class:`hf_emopt.SOAP` says what each of them means."""

    refresh: Refresh = option("staggered", _check_refresh)
    oversize: Oversize = "block"
    matmul_precision: Precision = "highest"
    factor_storage: FactorStorageName = "float32"
    tolerated_failures: int = option(3, partial(check_whole, low=0))


class KroneckerRule(RefreshingRule):
    """Base of the rules with factors: blocks, updates of the factors, and figures."""

    # ------------------------------------------------------------------ blocks

    def grid(self, dims: Sequence[int], group: Group) -> BlockGrid:
        limit = group["max_preconditioner_dim"]
        one_sided = group["oversize"] == "one_sided"
        return BlockGrid.of(tuple(dims), tuple(d if one_sided else min(d, limit) for d in dims))

    def has_factor(self, size: int, group: Group) -> bool:
        # With oversize="one_sided" a longer dimension is left alone.
        return bool(size <= group["max_preconditioner_dim"])

    # ------------------------------------------------------------------ phases

    def accumulate(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        group: Group,
        ok: Tensor | None,
    ) -> list[Tensor]:
        """The gradient itself, plus the decay if it is of the L2 kind. All state is the owner's."""
        wide = [g.to(torch.promote_types(p.dtype, torch.float32)) for g, p in zip(grads, params)]
        wide = with_l2_decay(wide, params, group)
        if ok is None:
            return wide
        # One tensor of all, since as many small launches as parameters take longer than the copy.
        flat = torch.cat([g.reshape(-1) for g in wide]).masked_fill_(~ok, 0.0)
        return [part.view(g.shape) for part, g in zip(flat.split([g.numel() for g in wide]), wide)]

    def passes_gradients(self, group: Group) -> bool:
        return not has_l2_decay(group)

    def blocks(self, x: Tensor, state: dict[str, Tensor], group: Group) -> list[BlockState]:
        """The blocks of a batch ``(N, ...)``, one :class:`BlockState` for each class."""
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

    def init_results(self, name: str, x_shape: Sequence[int], group: Group, like: Tensor) -> dict[str, Tensor]:
        """Identities for a batch ``(N, ...)``, one for each factor: the roots or bases before the first refresh."""
        dtype = _RESULT_DTYPES[group[f"{name}_dtype"]]
        state: dict[str, Tensor] = {}
        for index, c in enumerate(self.grid(x_shape[1:], group).classes):
            for d, size in enumerate(c.sizes):
                if self.has_factor(size, group):
                    wide = like.dtype if dtype is torch.float32 else dtype
                    eye = torch.eye(size, dtype=wide, device=like.device)
                    state[f"{name}.{index}.{d}"] = eye.expand(x_shape[0], c.count, size, size).clone()
        return state

    def factor(self, block: BlockState, d: int, group: Group) -> Tensor:
        """The factor of dimension ``d`` as ``(N * count, b_d, b_d)``, in the dtype of the mathematics."""
        key, storage = block.key("factor", d), group["factor_storage"]
        full = block.state[key] if storage == "float32" else load_factor(block.state, key, block.sizes[d], storage)
        return full.view(-1, *full.shape[2:]).to(block.state["count"].dtype)

    def factor_beta(self, group: Group) -> float:
        """The decay of the factors; 1 for sums."""
        return float(group["betas"][1])

    def update_factor(
        self,
        block: BlockState,
        d: int,
        group: Group,
        rows: Tensor,
        gate: Gate,
        clock: RefreshClock,
        scale: Tensor | None = None,
    ) -> None:
        """``A <- beta A + (1 - beta) R R^T``, or ``A + R R^T`` for ``beta = 1``, where the step counts.

        Args:
            rows: ``(N * count, b_d, rest)``, the unfolded block (whitened, in KL variants); zeros in a step that does not
                count. They may be rounded to float16 already.
            scale: the factor of each of these float16 matrices.
        """
        beta = self.factor_beta(group)
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
            seed = clock.param_steps[0] * 1_000_003 + 97 * block.index + d
            generator = torch.Generator(factor.device).manual_seed(seed)
        shape = (*block.state[key].shape[:2], *factor.shape[1:])
        store_factor(
            block.state, key, factor.view(shape), storage, generator, gate > 0 if isinstance(gate, Tensor) else None
        )

    @staticmethod
    def in_half(x: Tensor, group: Group) -> bool:
        """Whether products of ``x`` run in float16: with that precision, for float32 and for already rounded matrices."""
        return group["matmul_precision"] == "fp16" and x.dtype in (torch.float32, torch.float16)

    def rows_of(self, block: BlockState, group: Group) -> tuple[Tensor, Tensor | None]:
        """The block's gradients for its factors, and their scale: rounded to float16 once for all dimensions, or as given."""
        return (
            scaled_half(block.grads)
            if self.in_half(block.grads, group) and block.grads.ndim == 3 and self.factored(block, group)
            else (block.grads, None)
        )

    @staticmethod
    def whitened_rows(block: BlockState, d: int, white: Tensor) -> Tensor:
        """A block that is whitened on its other dimensions, unfolded for the factor of dimension ``d``, at the scale of the
        gradient.

        The mean eigenvalue of ``R R^T`` is the mean square of the gradient's elements. The KL fit leaves open how a scale is
        split among the factors. With this choice a gradient weighs as much as it is large. With the scale of the whitening it
        would not: before the first refresh a contribution has the gradient's variance, 1e-6 say. After it, it has the size
        one, or a million if the gradients so far leave directions of the other dimension empty. The running mean would then
        hold the gradients of one period for hundreds of steps.

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
            # Only the shape of the gradient matters here.
            for block in self.blocks(torch.empty(batch, *shape, device="meta"), matrix_state, group):
                for d in self.factored(block, group):
                    conditions.append(self.condition(block, d, group).view(batch, -1).amax(1))
                    failures.append(block.tensor("failures", d).clamp_min(0).view(batch, -1).amax(1))
        if conditions:
            found["condition_number"] = torch.stack(conditions).amax(0)
            found["failures"] = torch.stack(failures).amax(0).float()
        return found

    def momentum_square(self, matrix_state: dict[str, Tensor]) -> Tensor | None:
        """Squared norm of each matrix's first moment, ``(B,)``. A turn of the basis does not change it."""
        moments = [value for name, value in matrix_state.items() if name.partition(".")[0] == "exp_avg"]
        moments = moments or [value for name, value in matrix_state.items() if name == "momentum_buffer"]
        return sum((m.flatten(1).square().sum(1) for m in moments), torch.zeros((), device="cpu")) if moments else None

    @abstractmethod
    def condition(self, block: BlockState, d: int, group: Group) -> Tensor:
        """Condition number of the factor of dimension ``d`` of each block, ``(N * count,)``, without a decomposition."""

    def block_flops(self, m: int, n: int, group: Group, products: int, refresh_products: int) -> int:
        """Floating-point operations of an ``m x n`` matrix in a step, averaged over a period.

        A matrix without a factor counts one operation an element: matrices that cost nothing would all go to one rank.

        Args:
            products: products of a block with a square matrix for each factor, in every step.
            refresh_products: products of two such square matrices, once a period.
        """
        total = 0
        for c in self.grid((m, n), group).classes:
            sizes = [s for s in c.sizes if self.has_factor(s, group)]
            numel = math.prod(c.sizes)
            total += c.count * sum(
                2 * products * numel * s + 2 * refresh_products * s**3 // self.period(group) for s in sizes
            )
        return total or m * n

    def precision(self, group: Group) -> AbstractContextManager[None]:
        """Context in which this rule's float32 products run."""
        return matmul_precision(group["matmul_precision"])


def cycled(group: Group) -> Group:
    """A group as rules read it: what OneCycleLR and CyclicLR write as ``momentum`` is the first of the betas."""
    own = {"betas": (group["momentum"], group["betas"][1]), "momentum": 0.0} if "base_momentum" in group else {}
    return {**group, **own} if own else group


def gate_of(ok: Tensor | None, like: Tensor) -> Gate:
    """``ok`` as a number to multiply by."""
    return 1.0 if ok is None else ok.to(like.dtype)
