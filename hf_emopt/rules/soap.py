"""SOAP: Adam in the slowly turning eigenbasis of Shampoo's factors.

N. Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3, and its reference
implementation (github.com/nikhilvyas/SOAP), which ``compat="paper"`` follows step by step. KL correction of the factors:
W. Lin et al., arXiv:2509.03378, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_emopt.kernels.cuda_graphs import replayed
from hf_emopt.linalg.eigenbasis import EigenbasisRefresh, RefreshMethod, refresh_eigenbasis
from hf_emopt.linalg.matmul_precision import Precision, product
from hf_emopt.linalg.retry_ladder import with_ladder
from hf_emopt.rules.adam_direction import adam_direction
from hf_emopt.rules.base import Group, RefreshClock
from hf_emopt.rules.blocks import (
    BlockState,
    FactorDim,
    half_mode_products,
    mode_product,
    mode_products,
    peak_of_basis,
    rounded,
    rounded_mode_products,
    unfold,
)
from hf_emopt.rules.condition_number import condition_in_basis, condition_of_spectrum
from hf_emopt.rules.kronecker import Gate, KroneckerOptions, KroneckerRule, Oversize, cycled, gate_of, result_dtype
from hf_emopt.rules.options import Options, as_tuple, check_betas, check_number, check_whole, option
from hf_emopt.rules.refresh import Refreshed, Snapshot

BasisMethod = RefreshMethod

# The last of a ramp on the diagonal that orders what a first gradient leaves open, of the mean eigenvalue. In float32 the
# basis of a null space still turned by a percent with 0.01.
_GRADE = 0.1
# Of the largest eigenvalue: float32 does not tell smaller ones from rounding.
_LEAST_EIGENVALUE = 1e-5


@dataclass(eq=False)
class SoapOptions(KroneckerOptions):
    """:class:`hf_emopt.SOAP` says what each of them means."""

    lr: float | Tensor = 3e-3
    betas: tuple[float, float] = option((0.95, 0.95), check_betas, keep=as_tuple)
    eps: float = option(1e-8, partial(check_number, above=True))
    weight_decay: float = 0.01
    precondition_frequency: int = option(10, partial(check_whole, low=1))
    max_preconditioner_dim: int = option(10000, partial(check_whole, low=1))
    _: KW_ONLY
    shampoo_beta: float | None = option(None, partial(check_number, high=1.0, or_none="for the second of the betas"))
    basis_method: BasisMethod = "orthogonal_iteration"
    oversize: Oversize = "one_sided"
    kl: bool = False
    max_update_rms: float | None = option(1.0, partial(check_number, above=True, or_none="for no cap"))
    basis_dtype: torch.dtype | str = result_dtype()
    compat: Literal["paper"] | None = None


class SoapRule(KroneckerRule):
    """Adam on the gradient as the eigenbases of its factors see it.

    .. code-block:: text

        G'  = G x_1 Q_1^T ... x_k Q_k^T
        M'  <- beta1 M' + (1 - beta1) G';   V' <- beta2 V' + (1 - beta2) G' G'
        U   = (M'/(1 - beta1^t) / (sqrt(V'/(1 - beta2^t)) + eps)) x_1 Q_1 ... x_k Q_k
        A_d <- shampoo_beta A_d + (1 - shampoo_beta) G_d G_d^T
        once in precondition_frequency steps: Q_d <- eigenbasis of A_d, and M', V' are carried into the new basis

    The gradient is projected with the basis of earlier gradients: a basis that has just seen the gradient finds it where
    the second moment is near zero, and steps of ten times the learning rate follow.

    Two things differ from the reference by default. A matrix starts in the identity basis, as Adam, so no step is lost;
    after the first step all blocks have a basis, and later ones are spread over the period. And the second moment is
    carried through a turn ``R = Q_old^T Q_new`` as ``(R*R)^T V' (R*R)``, the exact second moment of uncorrelated
    coordinates; where ``R`` is a permutation this is the reference's reordering.
    """

    name: ClassVar[str] = "soap"
    options: ClassVar[type[Options]] = SoapOptions

    def validate(self, group: Group) -> None:
        if group["basis_method"] == "first_order":
            raise ValueError("basis_method='first_order' is gone: use 'orthogonal_iteration', the default")
        group = cycled(group)
        super().validate(group)
        compat = group["compat"]
        if compat == "paper" and group["refresh"] != "synchronous":
            raise ValueError("compat='paper' refreshes every block on the same step; use refresh='synchronous' with it")
        if compat == "paper" and group["kl"]:
            raise ValueError("compat='paper' has no KL correction; use kl=False with it")

    def warmup_steps(self, group: Group) -> int:
        return 1 if group["compat"] == "paper" else 0

    # ------------------------------------------------------------------ state

    def init_matrix_state(self, shape: tuple[int, ...], group: Group, like: Tensor) -> dict[str, Tensor]:
        wide = torch.empty(0, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        state = self.init_factors(shape, group, wide) | self.init_results("basis", shape, group, wide)
        for index, c in enumerate(self.grid(shape[1:], group).classes):
            lead = (shape[0], c.count)
            state[f"exp_avg.{index}"] = wide.new_zeros(*lead, *c.sizes)
            state[f"exp_avg_sq.{index}"] = wide.new_zeros(*lead, *c.sizes)
            for d, size in enumerate(c.sizes):
                if group["kl"] and self.has_factor(size, group):
                    state[f"eigenvalues.{index}.{d}"] = wide.new_ones(*lead, size)
        state["count"] = wide.new_zeros(shape[0])
        return state | self.init_failures(shape, group, like.device)

    # ------------------------------------------------------------------ step

    def transform(
        self, x: Tensor, matrix_state: dict[str, Tensor], group: Group, ok: Tensor | None, clock: RefreshClock
    ) -> Tensor:
        self.finish_pending(clock.key, matrix_state)
        group = cycled(group)
        gate: Gate = gate_of(ok, x)
        # In the reference the first gradient only makes the first basis.
        warming = [step <= self.warmup_steps(group) for step in clock.param_steps]
        if any(warming):
            gate = gate * x.new_tensor([0.0 if w else 1.0 for w in warming])
        matrix_state["count"].add_(gate)
        blocks = self.blocks(x, matrix_state, group)
        parts: list[Tensor] = []
        scales: list[Tensor | None] = []
        with self.precision(group):
            for block in blocks:
                rows = self.rows_of(block, group)
                part, scale = self._adam(block, group, gate, rows)
                parts.append(part.view(x.shape[0], -1, *part.shape[1:]))
                scales.append(scale)
                self._update_factors(block, group, gate_of(ok, x), clock, rows)
            self.refresh_on_side_stream(blocks, group, ok, clock, x.device)
        return self._capped(self.grid(x.shape[1:], group).merge(parts, scales), group)

    def _adam(
        self, block: BlockState, group: Group, gate: Gate, rows: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """The update of each block in the parameter's coordinates, and a factor that it must still be multiplied by, if any.

        Args:
            rows: the result of :meth:`rows_of`.
        """
        bases = [(d, block.tensor("basis", d)) for d in self.factored(block, group)]
        half, scale = rows
        if bases and scale is not None:
            out = rounded(bases, peak_of_basis)  # once for both ways
            into = [(d, basis.mT, size) for d, basis, size in out]
            projected = rounded_mode_products(block.grads, into, (half, scale))
            return half_mode_products(self._direction(projected, block, group, gate), out)
        wide, precision = [(d, basis.to(block.grads.dtype)) for d, basis in bases], group["matmul_precision"]
        projected = mode_products(block.grads, [(d, basis.mT) for d, basis in wide], precision)
        return mode_products(self._direction(projected, block, group, gate), wide, precision), None

    def _direction(self, projected: Tensor, block: BlockState, group: Group, gate: Gate) -> Tensor:
        """Adam's, of gradients in the bases."""
        if group["compat"] == "paper":
            return self._paper_direction(projected, block, group, gate)
        count = block.state["count"]
        exp_avg, exp_avg_sq = (block.tensor(name).view(len(count), -1) for name in ("exp_avg", "exp_avg_sq"))
        flat = projected.reshape(len(count), -1)
        update = adam_direction(flat, exp_avg, exp_avg_sq, count, group["betas"], group["eps"], gate)
        return update.view(projected.shape)

    @staticmethod
    def _paper_direction(projected: Tensor, block: BlockState, group: Group, gate: Gate) -> Tensor:
        """The direction of the reference: ``eps`` is added to the root of the second moment before its correction."""
        beta1, beta2 = group["betas"]
        exp_avg, exp_avg_sq, gate = block.tensor("exp_avg"), block.tensor("exp_avg_sq"), _per_block(gate, block)
        exp_avg.lerp_(projected, gate * (1.0 - beta1))
        exp_avg_sq.lerp_(projected.square(), gate * (1.0 - beta2))
        steps = _per_block(block.state["count"].clamp_min(1.0), block)
        assert isinstance(steps, Tensor)
        correction1, correction2 = 1.0 - beta1**steps, (1.0 - beta2**steps).sqrt()
        return exp_avg / (exp_avg_sq.sqrt() + group["eps"]) * (correction2 / correction1)

    def factor_beta(self, group: Group) -> float:
        beta = group["shampoo_beta"]
        return float(group["betas"][1] if beta is None else beta)

    def _update_factors(
        self,
        block: BlockState,
        group: Group,
        gate: Gate,
        clock: RefreshClock,
        scaled_rows: tuple[Tensor, Tensor | None],
    ) -> None:
        dims, precision = self.factored(block, group), group["matmul_precision"]
        if not group["kl"]:
            rows, scale = scaled_rows
            for d in dims:
                self.update_factor(block, d, group, unfold(rows, d), gate, clock, scale)
            return
        for d in dims:
            # The other dimensions' covariance is Q diag(lambda) Q^T; whitening by it needs no matrix back from the basis.
            turns = []
            for other in dims:
                if other != d:
                    eigenvalues = block.tensor("eigenvalues", other)
                    least = max(group["eps"], _LEAST_EIGENVALUE) * eigenvalues.amax(-1, keepdim=True)
                    floor = least + torch.finfo(eigenvalues.dtype).tiny
                    basis = block.tensor("basis", other).to(block.grads.dtype)
                    turns.append((other, eigenvalues.maximum(floor).rsqrt().unsqueeze(-1) * basis.mT))
            white = mode_products(block.grads, turns, precision)
            self.update_factor(block, d, group, self.whitened_rows(block, d, white), gate, clock)

    # ------------------------------------------------------------------ refresh

    def snapshot(self, factor_dim: FactorDim, group: Group) -> dict[str, Tensor]:
        factor = factor_dim.pick(self.factor(factor_dim.block, factor_dim.d, group))
        return {"factor": factor, "basis": factor_dim.take("basis").to(factor.dtype)}

    def compute(self, snapshot: Snapshot, group: Group, first: bool, deferred: bool = False) -> Refreshed:
        # The first basis is far from the identity it replaces, so it is computed from scratch.
        method: RefreshMethod = "eigh" if first else group["basis_method"]
        turn = partial(refresh_eigenbasis, method=method, precision=group["matmul_precision"], measure=group["kl"])
        # An iteration may be tried without a read of its result.
        optimistic = None if method == "eigh" else partial(turn, fallback=False)
        factor, basis = snapshot.tensors["factor"], snapshot.tensors["basis"]
        if first and group["compat"] != "paper":
            factor = _graded(factor)
        if deferred and optimistic is not None:
            kl, paper = group["kl"], group["compat"] == "paper"

            def work(a: Tensor, q: Tensor) -> tuple[Tensor, ...]:
                result = optimistic(a, q)
                return result.failed, *self._results(result, group).values()

            failed, *made = replayed(("basis", paper, *sorted(turn.keywords.items())), (factor, basis), work)
            names = ["basis", *(["eigenvalues"] if kl else []), *(["permutation"] if paper else [])]
            return Refreshed(dict(zip(names, made, strict=True)), failed, deferred=True)
        outcome = with_ladder(turn, factor, basis, optimistic=optimistic)
        self.ladder += outcome.report
        return Refreshed(self._results(outcome.value, group), outcome.failed, clean=not outcome.failed_blocks)

    @staticmethod
    def _results(result: EigenbasisRefresh, group: Group) -> dict[str, Tensor]:
        tensors = {"basis": result.q}
        if group["kl"]:
            tensors["eigenvalues"] = result.eigenvalues_estimate
        if group["compat"] == "paper":
            tensors["permutation"] = result.permutation
        return tensors

    def install(
        self, dims: Sequence[FactorDim], new: Sequence[Refreshed], keep: Sequence[Tensor], group: Group
    ) -> None:
        """Replaces the bases of some blocks and carries their moments into the new bases."""
        exp_avg, exp_avg_sq = dims[0].block.tensor("exp_avg"), dims[0].block.tensor("exp_avg_sq")
        first_moment, second_moment = dims[0].pick(exp_avg), dims[0].pick(exp_avg_sq)
        precision: Precision = group["matmul_precision"]
        for dim, result, kept in zip(dims, new, keep):
            d, basis = dim.d, dim.take("basis")
            # In its stored dtype: the moments must turn by the basis that the next step sees.
            turned = torch.where(kept.view(-1, 1, 1), basis, result.tensors["basis"].to(basis.dtype))
            turn = mode_products(turned.to(exp_avg.dtype), [(0, basis.mT)], precision)
            # Blocks that stay are left as they were, not put through a product with a near-identity.
            stay = kept.view(-1, *[1] * (exp_avg.ndim - 1))
            first_moment = torch.where(stay, first_moment, mode_products(first_moment, [(d, turn.mT)], precision))
            if group["compat"] != "paper":
                carried = _turned_squares(second_moment, turn.square().mT, d, precision)
            else:
                shape = [1] * second_moment.ndim
                shape[0], shape[d + 1] = turn.shape[:2]
                order = result.tensors["permutation"].view(shape).expand_as(second_moment)
                carried = second_moment.gather(d + 1, order)
            second_moment = torch.where(stay, second_moment, carried)
            dim.put("basis", turned)
            if "eigenvalues" in result.tensors:
                eigenvalues = dim.take("eigenvalues")
                dim.put("eigenvalues", torch.where(kept.view(-1, 1), eigenvalues, result.tensors["eigenvalues"]))
        dims[0].assign(exp_avg, first_moment)
        dims[0].assign(exp_avg_sq, second_moment)

    def _capped(self, update: Tensor, group: Group) -> Tensor:
        cap = group["max_update_rms"]
        if cap is None:
            return update
        rms = update.square().mean(dim=tuple(range(1, update.ndim)), keepdim=True).sqrt()
        return update * (cap / rms.clamp_min(cap))

    # ------------------------------------------------------------------ figures

    def condition(self, block: BlockState, d: int, group: Group) -> Tensor:
        if group["kl"]:
            return condition_of_spectrum(block.tensor("eigenvalues", d))
        return condition_in_basis(self.factor(block, d, group), block.tensor("basis", d))

    def cost(self, m: int, n: int, group: Group) -> int:
        # Projection, back-projection and factor are a product each; a refresh is some four products a factor.
        return self.block_flops(m, n, group, products=3, refresh_products=4)

    def describe(self, group: Group) -> str:
        cap = "" if group["max_update_rms"] is None else f", update RMS capped at {group['max_update_rms']:g}"
        return (
            f"SOAP{' (KL)' if group['kl'] else ''}: betas {tuple(group['betas'])}, bases every "
            f"{group['precondition_frequency']} steps ({group['refresh']}, {group['basis_method']}){cap}; "
            "update RMS is Adam's: lr means what it means for AdamW"
        )


def _graded(factor: Tensor) -> Tensor:
    """Factors ``(N, d, d)`` whose null spaces have one eigenbasis.

    The first gradients of a matrix that is not square leave a factor singular. Any basis of its null space is then one of
    eigenvectors, rounding chooses it, and what Adam does in it follows.
    """
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    ramp = torch.linspace(_GRADE, 0.0, factor.shape[-1], dtype=factor.dtype, device=factor.device)
    return factor + torch.diag_embed(mean * ramp)


def _turned_squares(squares: Tensor, turn: Tensor, d: int, precision: Precision) -> Tensor:
    """:func:`mode_product` of squares that divide updates. It is never in float16, which would lose small squares."""
    if precision != "fp16" or squares.dtype != torch.float32 or squares.ndim != 3:
        return mode_product(squares, turn, d)
    return product(turn, squares, "bf16x3") if d == 0 else product(squares, turn.mT, "bf16x3")


def _per_block(value: Gate, block: BlockState) -> Gate:
    """A number for each matrix as a number for each block, shaped to multiply blocks."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    return value.repeat_interleave(block.count).view(-1, *[1] * (block.grads.ndim - 1))
