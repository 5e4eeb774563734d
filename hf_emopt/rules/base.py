"""What a matrix optimizer is, apart from where its parameters lie: three phases and a price.

A rule sees tensors and hyperparameters, never ranks, shards, modules or a Trainer. Between its phases somebody else
moves bytes: ``accumulate`` runs where the gradient lies, ``transform`` where the whole matrix is, and the update comes
back to the parameter, where :mod:`hf_emopt.rules.adamw` applies it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_emopt.linalg.cost import Method, ShardedCost
from hf_emopt.rules.lora_pairs import Factor

if TYPE_CHECKING:
    from hf_emopt.routing.lora import Adapter

__all__ = ["Clock", "Group", "MatrixRule", "Shard", "state_dtype"]

Group = dict[str, Any]
"""Hyperparameters of one parameter group, as in ``torch.optim.Optimizer.param_groups``."""


def state_dtype(param: Tensor) -> torch.dtype:
    """dtype of optimizer state: float32, or the parameter's own where that is wider (float64)."""
    return torch.promote_types(param.dtype, torch.float32)


@dataclass(frozen=True)
class Clock:
    """What time it is for each matrix of a batch. Known on the host, so that schedules need no synchronization.

    Attributes:
        rounds: optimizer steps that each matrix took part in, this one counted, so 1 the first time. Steps that the device
            skipped are counted too, since the host does not know of them.
        slots: for each matrix, the step within a period at which each piece of its periodic work is due, as
            :meth:`MatrixRule.periodic_costs` counts pieces; spread over the period by cost.
        key: names the batch, when all its matrices are present and the matrix state is the batch's own; ``None`` when the
            matrix state is a copy of some rows.
        undisturbed: nobody reads or writes the matrix state after the transform until the rule's ``join`` is called.
    """

    rounds: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...] = ()
    key: tuple[int, int] | None = None
    undisturbed: bool = False


@dataclass(frozen=True)
class Shard:
    """Which part of a batch of whole matrices a tensor is, and how to sum over all parts. Nothing in it names a rank.

    Attributes:
        dim: the dimension that is cut: ``-2`` (rows) or ``-1`` (columns), the longer one or either one of a square.
        full_shape: ``(m, n)`` of the whole matrices.
        start, stop: the rows or columns that this part has. Parts may differ in size and be empty.
        sum: adds a contiguous tensor up over all parts, in place or not; the result has the same bits everywhere.
        max: the same for the elementwise largest value.
        parts: ranks that share the matrices.
        index: which part this is, from 0.
        method: of an iteration that has several: ``"standard"`` or ``"gram"``.
    """

    dim: int
    full_shape: tuple[int, int]
    start: int
    stop: int
    sum: Callable[[Tensor], Tensor]
    max: Callable[[Tensor], Tensor]
    parts: int
    index: int = 0
    method: Literal["standard", "gram"] = "standard"


class MatrixRule(ABC):
    """The update of a whole matrix.

    A rule object holds no state and no hyperparameters: the first comes in ``state`` dictionaries, the second in
    ``group``, so that a rule can be tested on three tensors and run under every layout.

    ``ok`` is a scalar bool tensor on the tensors' device, or ``None``. ``False`` means that this step is skipped because
    a gradient is not finite: state must come out as it went in, decided on the device, without a host sync.
    """

    name: ClassVar[str]
    scheduled: ClassVar[bool] = False
    """Whether the rule reads its :class:`Clock`: it has periodic work or rounds of warm-up."""

    steps_pairs: ClassVar[bool] = False
    """Whether the rule has :meth:`transform_pair`."""

    tensor_parallel_modes: ClassVar[tuple[str, ...]] = ("auto", "layerwise", "blockwise")
    """What ``tensor_parallel`` may be: state of whole matrices has one owner, unless the rule says that it needs none."""

    def validate(self, group: Group) -> None:  # noqa: B027 - most rules have something to check, none has to
        """Raises ``ValueError`` naming the hyperparameter, its value and what is accepted."""

    def init_state(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        """State with the parameter's shape, which lies and is sharded as the parameter is."""
        return {}

    def init_matrix_state(self, shape: tuple[int, int, int], group: Group, like: Tensor) -> dict[str, Tensor]:
        """State of ``(B, m, n)`` whole matrices, held by their owner: tensors whose first dimension is ``B``."""
        return {}

    def periodic_costs(self, m: int, n: int, group: Group) -> tuple[int, ...]:
        """Costs of the pieces of work that an ``m x n`` matrix needs once a period, such as one root a block."""
        return ()

    def period(self, group: Group) -> int:
        """Steps between two times that a piece of periodic work is done."""
        return 1

    def warmup_rounds(self, group: Group) -> int:
        """Rounds in which a matrix only gathers statistics: its weight is neither moved nor decayed."""
        return 0

    @abstractmethod
    def accumulate(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        group: Group,
        ok: Tensor | None,
    ) -> list[Tensor]:
        """Elementwise phase: updates ``states`` and returns what the transform is to see, shaped like the gradients.

        The returned tensors are finite wherever ``ok`` is not ``None``. They may alias state: readers must not write to
        them. ``params`` and ``grads`` are never written to.
        """

    @abstractmethod
    def transform(
        self, x: Tensor, matrix_state: dict[str, Tensor], group: Group, ok: Tensor | None, clock: Clock
    ) -> Tensor:
        """Whole-matrix phase: ``(B, m, n)`` of finite numbers to the update of the same shape.

        ``matrix_state`` is changed in place. The result is subtracted from the weights, times the learning rate alone.
        """

    def update_gain(self, m: int, n: int, group: Group) -> float | None:
        """Factor between a semi-orthogonal ``m x n`` matrix and the update; ``None`` where an update approximates none."""
        return None

    def has_momentum(self, group: Group) -> bool:
        """Whether there is a first moment: in ``momentum_buffer`` beside the parameter, or in matrix state."""
        return True

    def measure(self, matrix_state: dict[str, Tensor], shape: tuple[int, int], group: Group) -> dict[str, Tensor]:
        """Figures of ``(B, m, n)`` matrices from their matrix state, for diagnostics: ``(B,)`` float32 each, by name.

        ``"momentum"`` is the squared norm of the first moment, ``"condition_number"`` the largest of the factors' and
        ``"failures"`` how often in a row a refresh has failed. Reads no device; changes nothing.
        """
        return {}

    def refresh_age(self, rounds: int, slots: Sequence[int], group: Group) -> int | None:
        """Rounds since the statistics that a matrix's preconditioner was computed from, by the schedule.

        Args:
            rounds: of the matrix, see :class:`Clock`.
            slots: of its pieces.

        Returns:
            The largest of its pieces'; ``None`` for rules without periodic work, and before the first time.
        """
        return None

    def momentum_form(self, group: Group) -> tuple[float, bool] | None:
        """``(momentum, nesterov)`` where one pass over many tensors may take the place of :meth:`accumulate`, else ``None``.

        That pass does ``m += (1 - mu) (g - m)`` on ``momentum_buffer``, and passes on ``g + mu (m - g)``, or ``m``.
        """
        return None

    def passes_gradients(self, group: Group) -> bool:
        """Whether :meth:`accumulate` has no state and returns the gradients, or zeros where the step does not count: then one
        pass over many tensors may take its place."""
        return False

    def defers_scale(self, group: Group) -> bool:
        """Whether :meth:`transform_unscaled` saves a pass, and reads 16-bit numbers as well as wide ones."""
        return False

    def transform_unscaled(
        self, x: Tensor, matrix_state: dict[str, Tensor], group: Group, ok: Tensor | None, clock: Clock
    ) -> tuple[Tensor, float]:
        """:meth:`transform` as a tensor of any floating dtype, and a factor to multiply it by in float32."""
        return self.transform(x, matrix_state, group, ok, clock), 1.0

    def transform_part(
        self,
        x: Tensor,
        matrix_state: dict[str, Tensor],
        group: Group,
        ok: Tensor | None,
        clock: Clock,
        full_shape: tuple[int, int],
    ) -> Tensor:
        """:meth:`transform` of slices ``(B, m_i, n)`` or ``(B, m, n_i)`` as if each were a matrix, which is another update.

        What depends on the shape of a matrix alone, a scale, is that of the whole, ``full_shape``.
        """
        return self.transform(x, matrix_state, group, ok, clock)

    def transform_pair(
        self,
        still: Factor,
        starting: Factor,
        scaling: Tensor,
        shape: tuple[int, int],
        group: Group,
        ok: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Updates of both factors of a batch of LoRA adapters, which are invariant to the basis that they are written in.

        Args:
            still, starting: the factors, with ``rank`` columns each; see :func:`~hf_emopt.rules.lora_pairs.pair_update`.
            scaling: ``(N, 1, 1)``, what the model multiplies each product by.
            shape: outputs and inputs of the products.

        Raises:
            NotImplementedError: where :attr:`steps_pairs` says no.
        """
        raise NotImplementedError(f"{self.name} has no rule for pairs of factors: use lora='separate'")

    def adapter_scale(self, m: int, n: int, adapter: Adapter, group: Group) -> float:
        """Factor on the update of a LoRA factor, an ``m x n`` matrix, beside what :meth:`transform` makes of it."""
        return 1.0

    def settle(self, key: tuple[int, int], storage: dict[str, Tensor]) -> None:  # noqa: B027 - most have none
        """Finishes work in the background for the batch ``key`` and writes it to the batch's matrix state."""

    def to_mend(self, key: tuple[int, int]) -> frozenset[int]:
        """Matrices of the batch ``key`` whose moments :meth:`settle` will write to; of all others it writes none."""
        return frozenset()

    def join(self) -> None:  # noqa: B027 - most have nothing
        """Makes the current stream wait for what :meth:`transform` has begun beside it; called before anybody else reads or
        writes matrix state, and before the next step."""

    def forget(self) -> None:  # noqa: B027 - most have nothing
        """Before all state is replaced: what would still be done to that of the last step is not."""

    def forget_batches(self) -> None:  # noqa: B027 - most have nothing
        """When a plan is made: keys name other batches from here on."""

    def forget_batch(self, key: tuple[int, int]) -> None:  # noqa: B027 - most have nothing
        """When a batch's state was replaced between steps: nothing that is known or computed of the old one holds."""

    def in_flight(self, key: tuple[int, int]) -> bool:
        """Whether :meth:`settle` has something to wait for."""
        return False

    @abstractmethod
    def cost(self, m: int, n: int, group: Group) -> int:
        """Floating-point operations of :meth:`transform` for one ``m x n`` matrix, averaged over steps."""

    def can_shard(self, group: Group) -> bool:
        """Whether :meth:`transform_shard` gives with these hyperparameters what :meth:`transform` would."""
        return False

    def transform_shard(
        self, x: Tensor, matrix_state: dict[str, Tensor], group: Group, ok: Tensor | None, clock: Clock, shard: Shard
    ) -> Tensor:
        """:meth:`transform` for matrices cut over several ranks, all of which call it together.

        ``x`` is this rank's ``(B, m_i, n)`` rows or ``(B, m, n_i)`` columns, ``matrix_state`` was made by
        :meth:`init_matrix_state` for that shape, and the result is the same part of the whole update. State that does not
        have the dimension that is cut is equal on all ranks.

        Raises:
            NotImplementedError: when :meth:`can_shard` says no.
        """
        raise NotImplementedError(f"{self.name} needs whole matrices with these hyperparameters: call transform")

    def shard_cost(self, m: int, n: int, k: int, group: Group) -> int:
        """Floating-point operations of :meth:`transform_shard` on each of ``k`` ranks for one ``m x n`` matrix.

        The whole :meth:`cost` for a rule that cannot be sharded: nothing is gained by more ranks.
        """
        return self.cost(m, n, group)

    def shard_work(self, m: int, n: int, k: int, dim: int, group: Group) -> tuple[Method, ShardedCost]:
        """The better method of :meth:`transform_shard` for one ``m x n`` matrix on ``k`` ranks, and what it costs.

        Args:
            dim: the side that is cut.

        Raises:
            NotImplementedError: when :meth:`can_shard` says no.
        """
        raise NotImplementedError(f"{self.name} needs whole matrices with these hyperparameters")

    @abstractmethod
    def describe(self, group: Group) -> str:
        """One line for a user: what is done, with which constants, and the size of a step."""
