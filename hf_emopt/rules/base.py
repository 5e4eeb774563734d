"""The interface of a rule: the update of a whole matrix, without any knowledge of where its parameters are.

Between the phases of a rule the engine moves bytes: ``accumulate`` runs where the gradient is, ``transform`` where the whole
matrix is, and the update goes back to the parameter, where :mod:`hf_emopt.rules.adamw` applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_emopt.linalg.cost import Method, ShardedCost
from hf_emopt.linalg.newton_schulz_sharded import Shard
from hf_emopt.routing.lora import Adapter
from hf_emopt.rules.lora_pairs import Factor
from hf_emopt.rules.options import Options

Group = dict[str, Any]
"""Hyperparameters of one parameter group, as in ``torch.optim.Optimizer.param_groups``."""

State = dict[str, Tensor]
"""State of one parameter, or of the matrices of one batch, by name."""

BatchKey = tuple[int, int]
"""Name of a batch of matrices: index of the bucket, index of the batch in it."""


def state_dtype(param: Tensor) -> torch.dtype:
    """dtype of optimizer state: float32, or the parameter's own where that is wider (float64)."""
    return torch.promote_types(param.dtype, torch.float32)


@dataclass(frozen=True)
class RefreshClock:
    """The time for each matrix of a batch. The host knows it, so that schedules need no synchronization.

    Attributes:
        param_steps: optimizer steps that each matrix took part in, including this one, so 1 the first time. Steps that the
            device skipped count too, since the host does not know of them.
        refresh_steps: for each matrix, the step within a period on which each piece of its periodic work is due, in the order
            of :meth:`MatrixRule.periodic_costs`. The pieces are spread over the period by cost.
        key: the batch; ``None`` when the matrix state is a copy of some of its rows.
        undisturbed: nobody reads or writes the matrix state after the transform until the rule's ``join`` is called.
    """

    param_steps: tuple[int, ...]
    refresh_steps: tuple[tuple[int, ...], ...] = ()
    key: BatchKey | None = None
    undisturbed: bool = False


class MatrixRule(ABC):
    """The update of a whole matrix. A rule sees tensors and hyperparameters, never ranks, modules or a Trainer.

    A rule object holds no state and no hyperparameters. They come in ``state`` dictionaries and in ``group``.

    ``ok`` is a scalar bool tensor on the tensors' device, or ``None``. ``False`` means that this step is skipped because
    a gradient is not finite: state must come out as it went in, decided on the device, without a host sync.
    """

    name: ClassVar[str]

    options: ClassVar[type[Options]] = Options
    """The list of hyperparameters."""

    scheduled: ClassVar[bool] = False
    """Whether the rule reads its :class:`RefreshClock`: it has periodic work or a warm-up."""

    steps_pairs: ClassVar[bool] = False
    """Whether the rule has :meth:`transform_pair`."""

    tensor_parallel_modes: ClassVar[tuple[str, ...]] = ("auto", "layerwise", "blockwise")
    """Accepted values of ``tensor_parallel``. State of whole matrices has one owner, unless the rule needs none."""

    # ------------------------------------------------------------------ hyperparameters and state

    def validate(self, group: Group) -> None:
        """Raises ``ValueError`` naming the hyperparameter, its value and what is accepted."""
        self.options.check(group)

    def init_state(self, param: Tensor, group: Group) -> State:
        """State with the parameter's shape, which is stored and sharded as the parameter is."""
        return {}

    def init_matrix_state(self, shape: tuple[int, int, int], group: Group, like: Tensor) -> State:
        """State of ``(B, m, n)`` whole matrices, held by their owner: tensors whose first dimension is ``B``."""
        return {}

    # ------------------------------------------------------------------ one step

    @abstractmethod
    def accumulate(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        ok: Tensor | None,
    ) -> list[Tensor]:
        """Elementwise phase: updates ``states`` and returns the input of the transform, shaped like the gradients.

        The returned tensors are finite wherever ``ok`` is not ``None``. They may alias state: readers must not write to
        them. ``params`` and ``grads`` are never written to.
        """

    @abstractmethod
    def transform(self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock) -> Tensor:
        """Whole-matrix phase: ``(B, m, n)`` of finite numbers to the update of the same shape.

        ``matrix_state`` is changed in place. The result is subtracted from the weights, times the learning rate alone.
        """

    @abstractmethod
    def cost(self, m: int, n: int, group: Group) -> int:
        """Floating-point operations of :meth:`transform` for one ``m x n`` matrix, averaged over steps."""

    @abstractmethod
    def describe(self, group: Group) -> str:
        """One line for a user: what is done, with which constants, and the size of a step."""

    # ------------------------------------------------------------------ shorter ways through a step

    def momentum_form(self, group: Group) -> tuple[float, bool] | None:
        """``(momentum, nesterov)`` where one pass over many tensors may replace :meth:`accumulate`, else ``None``.

        That pass does ``m += (1 - mu) (g - m)`` on ``momentum_buffer``, and returns ``g + mu (m - g)`` (Nesterov) or ``m``.
        """
        return None

    def passes_gradients(self, group: Group) -> bool:
        """Whether :meth:`accumulate` has no state and returns the gradients, or zeros where the step does not count."""
        return False

    def defers_scale(self, group: Group) -> bool:
        """Whether to call :meth:`transform_unscaled`: it saves a pass, and reads 16-bit numbers as well as wide ones."""
        return False

    def transform_unscaled(
        self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock
    ) -> tuple[Tensor, float]:
        """:meth:`transform` as a tensor of any floating dtype, and a factor to multiply it by in float32."""
        return self.transform(x, matrix_state, group, ok, clock), 1.0

    # ------------------------------------------------------------------ parts of matrices, and pairs

    def transform_part(
        self,
        x: Tensor,
        matrix_state: State,
        group: Group,
        ok: Tensor | None,
        clock: RefreshClock,
        full_shape: tuple[int, int],
    ) -> Tensor:
        """:meth:`transform` of slices ``(B, m_i, n)`` or ``(B, m, n_i)`` as if each were a matrix, which is another update.

        A scale that depends on the shape alone is that of the whole matrix, ``full_shape``.
        """
        return self.transform(x, matrix_state, group, ok, clock)

    def can_shard(self, group: Group) -> bool:
        """Whether :meth:`transform_shard` gives the same update as :meth:`transform` with these hyperparameters."""
        return False

    def transform_shard(
        self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock, shard: Shard
    ) -> Tensor:
        """:meth:`transform` for matrices cut over several ranks, all of which call it together, if :meth:`can_shard`.

        ``x`` is this rank's ``(B, m_i, n)`` rows or ``(B, m, n_i)`` columns, ``matrix_state`` was made by
        :meth:`init_matrix_state` for that shape, and the result is the same part of the whole update. State that does not
        have the dimension that is cut is equal on all ranks.
        """
        raise NotImplementedError(f"{self.name} needs whole matrices with these hyperparameters: call transform")

    def shard_cost(self, m: int, n: int, k: int, group: Group) -> int:
        """Floating-point operations of :meth:`transform_shard` on each of ``k`` ranks for one ``m x n`` matrix.

        The whole :meth:`cost` for a rule that cannot be sharded: nothing is gained by more ranks.
        """
        return self.cost(m, n, group)

    def shard_work(self, m: int, n: int, k: int, dim: int, group: Group) -> tuple[Method, ShardedCost]:
        """The better method of :meth:`transform_shard` for one ``m x n`` matrix, cut along ``dim``, on ``k`` ranks, and its
        cost."""
        raise NotImplementedError(f"{self.name} needs whole matrices with these hyperparameters")

    def transform_pair(
        self,
        nonzero_init: Factor,
        zero_init: Factor,
        scaling: Tensor,
        shape: tuple[int, int],
        group: Group,
        ok: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Updates of both factors of a batch of LoRA adapters, invariant to the basis that the factors are written in.

        Args:
            nonzero_init, zero_init, scaling: see :func:`~hf_emopt.rules.lora_pairs.pair_update`.
            shape: outputs and inputs of the products.
        """
        raise NotImplementedError(f"{self.name} has no rule for pairs of factors: use lora='separate'")

    def adapter_scale(self, m: int, n: int, adapter: Adapter, group: Group) -> float:
        """Factor on the update of a LoRA factor, an ``m x n`` matrix, on top of :meth:`transform`."""
        return 1.0

    # ------------------------------------------------------------------ periodic work

    def period(self, group: Group) -> int:
        """Steps from one time that a piece of periodic work is done to the next."""
        return 1

    def periodic_costs(self, m: int, n: int, group: Group) -> tuple[int, ...]:
        """Costs of the pieces of work that an ``m x n`` matrix needs once a period, such as one root a block."""
        return ()

    def warmup_steps(self, group: Group) -> int:
        """Param steps in which a matrix only gathers statistics: its weight is neither moved nor decayed."""
        return 0

    def join(self) -> None:  # noqa: B027 - most rules have nothing to do
        """Makes the current stream wait for work of :meth:`transform` on other streams. The engine calls it before anybody
        else reads or writes matrix state, and before the next step."""

    def to_retry(self, key: BatchKey) -> frozenset[int]:
        """The matrices of a batch whose refresh failed in the last step, and whose state :meth:`finish_pending` writes."""
        return frozenset()

    def finish_pending(self, key: BatchKey | None, matrix_state: State) -> None:  # noqa: B027
        """Finishes work of the batch's last step, and writes it to the batch's matrix state. ``None`` names no batch."""

    def forget(self, key: BatchKey | None = None) -> None:  # noqa: B027 - most rules know nothing
        """Drops what is known of a batch, or of all, and its pending work: its state was replaced, or keys name other batches
        from here on."""

    # ------------------------------------------------------------------ figures

    def has_momentum(self, group: Group) -> bool:
        """Whether there is a first moment: in ``momentum_buffer`` of the parameter, or in matrix state."""
        return True

    def update_gain(self, m: int, n: int, group: Group) -> float | None:
        """Factor from a semi-orthogonal ``m x n`` matrix to the update; ``None`` where an update approximates none."""
        return None

    def measure(self, matrix_state: State, shape: tuple[int, int], group: Group) -> dict[str, Tensor]:
        """Figures of ``(B, m, n)`` matrices from their matrix state, for diagnostics: ``(B,)`` float32 each, by name.

        ``"momentum"`` is the squared norm of the first moment, ``"condition_number"`` the largest of the factors' and
        ``"failures"`` how often in a row a refresh has failed. Reads no device; changes nothing.
        """
        return {}

    def refresh_age(self, param_steps: int, refresh_steps: Sequence[int], group: Group) -> int | None:
        """Param steps since the statistics that a matrix's preconditioner was computed from, by the schedule: the largest of
        its pieces; ``None`` for rules without periodic work, and before the first time."""
        return None
