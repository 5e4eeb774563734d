"""Shampoo and KL-Shampoo as a user names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.options import KroneckerArguments, takes
from hf_emopt.optimizers.param_groups import Derived
from hf_emopt.rules.base import Group
from hf_emopt.rules.shampoo import KLShampooRule, ShampooOptions, ShampooRule


@dataclass(eq=False)
class ShampooArguments(ShampooOptions, KroneckerArguments):
    """Arguments of :class:`Shampoo`."""


def _second_beta(group: Group) -> Any:
    betas = group["betas"]
    return betas[1] if isinstance(betas, Sequence) and len(betas) == 2 else None  # for validation to refuse


# Made when the group is, and kept: a schedule of the period must not move what has begun.
_START = Derived(itemgetter("precondition_frequency"))
_GRAFTING_BETA2 = Derived(_second_beta)


class Shampoo(MatrixOptimizer):
    r"""Shampoo for matrices, AdamW for everything else, in one optimizer.

    V. Gupta et al., arXiv:1802.09568; H.-J. M. Shi et al., arXiv:2309.06497. See
    :class:`hf_emopt.rules.shampoo.ShampooRule` for the formulas.

    Args:
        params: as for :class:`Muon`.
        lr: learning rate. With ``grafting="adam"`` each block moves as far as Adam would move it.
        betas: decay of the filtered gradient and of the factors; 1.0 for the second sums instead (AdaGrad).
        epsilon: added to a factor's eigenvalues, which are shifted up first where one lies below it.
        weight_decay: see ``weight_decay_type``; none on norms and biases when a model is passed.
        max_preconditioner_dim: longest dimension that has a factor.
        oversize: longer dimensions are cut into blocks of it (``"block"``) or not preconditioned (``"one_sided"``).
        precondition_frequency: steps in which every inverse root is refreshed once.
        start_preconditioning_step: first step with roots, before which the grafted direction alone is used; ``None`` is
            ``precondition_frequency``.
        grafting: whose step length each block takes: ``"adam"``, ``"rmsprop"``, ``"adagrad"``, ``"sgd"`` or ``"none"``.
        grafting_beta2, grafting_epsilon: of that method; ``None`` is ``betas[1]``.
        bias_correction: divide filtered gradient and factors by ``1 - beta^t``.
        exponent_override: ``p`` of ``A^(-p)``, one number or one by the number of preconditioned dimensions; the default
            is ``1 / (2 * dimensions)``, 1/4 for a matrix.
        momentum, nesterov: heavy ball on the preconditioned direction.
        refresh: ``"staggered"`` (default) or ``"synchronous"``; as for :class:`SOAP`.
        root_solver: ``"eigh"``, ``"coupled_newton"``, or ``"auto"``: products only
            (``coupled_newton``) on a GPU, where ``eigh`` runs far below the card's rate, and ``eigh`` on a CPU. A block whose
            iteration does not converge falls back to ``eigh``.
        relative_epsilon: added to a factor's eigenvalues as a fraction of the largest; ``None`` is 1e-6 for ``eigh``, and for
            iterations of products 1e-6 (``highest``), 1e-5 (``bf16x3`` and ``fp16``) or 1e-3 (``tf32``), which is felt in
            the loss; at least 3e-5 in the first refresh, whose factors may be singular. From 1e-3 on, roots in ``fp16`` take
            less than half of the products.
        root_dtype: dtype in which inverse roots are kept. In float16 a root with an entry above 65504 counts as failed.
        matmul_precision, factor_storage, tolerated_failures, weight_decay_type: as for :class:`SOAP`.
        aux_lr, aux_betas, aux_eps, aux_weight_decay, matrix_modules, aux_modules: as for :class:`SOAP`.
        state_dtype, tensor_parallel, lora_one_sided: as for :class:`SOAP`.
        offload_state, low_precision_weights, per_head, allow_no_matrices, skip_nonfinite, average_gradients: as for
            :class:`Muon`.
        transport_dtype, overlap_param_gather, process_group, tensor_parallel_modules, lora_lr_ratio: as for :class:`Muon`.

    Raises:
        ValueError: when a value is out of range, or no parameter is a matrix.

    State per matrix of ``m x n`` (one block): ``exp_avg``, the grafting's second moment, ``factor.*`` and ``root.*`` of
    both sides: ``8 m n + 8 (m^2 + n^2)`` bytes in float32.
    """

    _kl = False

    @takes(ShampooArguments)
    def __init__(self, given: ShampooArguments) -> None:
        derived: Group = {"kl": self._kl}
        if given.start_preconditioning_step is None:
            derived["start_preconditioning_step"] = _START
        if given.grafting_beta2 is None:
            derived["grafting_beta2"] = _GRAFTING_BETA2
        super().__init__(**given.of_optimizer(KLShampooRule() if self._kl else ShampooRule(), **derived))


class KLShampoo(Shampoo):
    r"""Shampoo whose factors estimate the gradient's covariance by minimizing a Kullback-Leibler divergence.

    Each side's factor is a mean of the gradient whitened by the other side, ``G B^-1 G^T / n``, and each side is
    preconditioned by the inverse square root: W. Lin et al., arXiv:2509.03378. Arguments are those of :class:`Shampoo`.
    """

    _kl = True
