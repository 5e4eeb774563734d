"""Shampoo and KL-Shampoo as a user names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from hf_emopt.distributed.layout import ProcessGroupArgument
from hf_emopt.formats.kronecker_factors import FactorStorageName
from hf_emopt.formats.master_weights import LowPrecisionWeights
from hf_emopt.formats.moments import StateDtype
from hf_emopt.linalg.matmul_precision import Precision
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.options import PEAK_LR, as_tuple, aux_defaults, dtype_name, one_sided
from hf_emopt.optimizers.param_groups import Derived, ParamsArgument
from hf_emopt.rules.base import Group
from hf_emopt.rules.kronecker import Oversize, Refresh
from hf_emopt.rules.shampoo import Grafting, KLShampooRule, ShampooRule
from hf_emopt.rules.validation import check_flags
from hf_emopt.state.forms import OffloadState

__all__ = ["KLShampoo", "Shampoo"]

RootSolverChoice = Literal["auto", "eigh", "coupled_newton"]


def _second_beta(group: Group) -> Any:
    betas = group["betas"]
    return betas[1] if isinstance(betas, Sequence) and len(betas) == 2 else None  # for validation to refuse


def _period(group: Group) -> Any:
    return group["precondition_frequency"]


# Made when the group is, and kept: a schedule of the period must not move what has begun.
_START = Derived(_period)
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
        max_preconditioner_dim: blocks have sides of at most this (``oversize="block"``), or longer sides are not
            preconditioned (``oversize="one_sided"``).
        precondition_frequency: steps in which every inverse root is refreshed once.
        start_preconditioning_step: first step with roots, before which the grafted direction alone is used; ``None`` is
            ``precondition_frequency``.
        grafting: whose step length each block takes: ``"adam"``, ``"rmsprop"``, ``"adagrad"``, ``"sgd"`` or ``"none"``.
        grafting_beta2, grafting_epsilon: of that method; ``None`` is ``betas[1]``.
        bias_correction: divide filtered gradient and factors by ``1 - beta^t``.
        exponent_override: ``p`` of ``A^(-p)``, one number or one by the number of preconditioned dimensions; the default
            is ``1 / (2 * dimensions)``, 1/4 for a matrix.
        momentum, nesterov: heavy ball on the preconditioned direction.
        refresh: ``"staggered"`` (default), ``"synchronous"`` or ``"async"``; as for :class:`SOAP`.
        async_delay: as for :class:`SOAP`.
        root_solver: ``"eigh"``, ``"coupled_newton"``, or ``"auto"``: products only
            (``coupled_newton``) on a GPU, where ``eigh`` runs far below the card's rate, and ``eigh`` on a CPU. A block whose
            iteration does not converge falls back to ``eigh``.
        relative_epsilon: added to a factor's eigenvalues as a fraction of the largest; ``None`` is 0 for ``eigh``, and for
            iterations of products, which need some, 1e-6 (``highest``), 1e-5 (``bf16x3`` and ``fp16``) or 1e-3
            (``tf32``), which is felt in the loss. From 1e-3 on, roots in ``fp16`` take less than half of the products.
        root_dtype: dtype in which inverse roots are kept. In float16 a root with an entry above 65504 counts as failed.
        matmul_precision, factor_storage, tolerated_failures, weight_decay_type: as for :class:`SOAP`.
        aux_lr, aux_betas, aux_eps, aux_weight_decay: of the AdamW part; ``None`` takes the matrices' value.
        matrix_modules, aux_modules: regular expressions on dotted parameter names that override the routing.
        state_dtype: of first and second moments, momentum and AdamW's moments as for :class:`Muon`; factors have
            ``factor_storage``.
        offload_state, low_precision_weights, per_head, allow_no_matrices, skip_nonfinite: as for :class:`Muon`.
        transport_dtype, overlap_param_gather, process_group: as for :class:`Muon`.
        tensor_parallel: ``"auto"`` and ``"layerwise"`` bring whole matrices to owners, with their factors; ``"blockwise"``
            gives each slice that tensor parallelism makes factors of its own: no bytes, but another update.
        tensor_parallel_modules: the same for single parameters, ``"pattern:mode"`` with ``;`` between.
        lora_lr_ratio: learning rate of the B factors of LoRA adapters over that of the A factors (LoRA+, S. Hayou et al.,
            arXiv:2402.12354, who use 16 with AdamW); schedulers keep it, and it is logged as ``lr/matrix_lora_B``.
        lora_one_sided: precondition LoRA factors on the side of their rank alone; the factor of the other side would be many
            times as large as the adapter.

    Raises:
        ValueError: when a value is out of range, or no parameter is a matrix.

    State per matrix of ``m x n`` (one block): ``exp_avg``, the grafting's second moment, ``factor.*`` and ``root.*`` of
    both sides: ``8 m n + 8 (m^2 + n^2)`` bytes in float32.
    """

    _kl = False

    def __init__(
        self,
        params: ParamsArgument,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-12,
        weight_decay: float = 0.0,
        max_preconditioner_dim: int = 1024,
        precondition_frequency: int = 10,
        start_preconditioning_step: int | None = None,
        grafting: Grafting = "adam",
        *,
        grafting_beta2: float | None = None,
        grafting_epsilon: float = 1e-8,
        bias_correction: bool = True,
        exponent_override: float | Mapping[int, float] | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        refresh: Refresh = "staggered",
        async_delay: int | None = None,
        root_solver: RootSolverChoice = "auto",
        relative_epsilon: float | None = None,
        root_dtype: torch.dtype | str = "float32",
        oversize: Oversize = "block",
        matmul_precision: Precision = "highest",
        factor_storage: FactorStorageName = "float32",
        tolerated_failures: int = 3,
        weight_decay_type: Literal["decoupled", "l2", "corrected", "independent"] = "decoupled",
        aux_lr: float | Tensor | None = None,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        aux_eps: float = 1e-8,
        aux_weight_decay: float | None = None,
        low_precision_weights: LowPrecisionWeights = "split",
        state_dtype: StateDtype = "float32",
        offload_state: OffloadState | None = None,
        matrix_modules: str | Sequence[str] | None = None,
        aux_modules: str | Sequence[str] | None = None,
        per_head: bool = False,
        allow_no_matrices: bool = False,
        skip_nonfinite: bool = True,
        transport_dtype: torch.dtype | str | None = None,
        overlap_param_gather: bool = False,
        process_group: ProcessGroupArgument = None,
        tensor_parallel: Literal["auto", "layerwise", "blockwise"] = "auto",
        tensor_parallel_modules: str | Sequence[str] | None = None,
        lora_lr_ratio: float = 1.0,
        lora_one_sided: bool = True,
    ) -> None:
        check_flags({"lora_one_sided": lora_one_sided})
        matrix: Group = {
            "tensor_parallel": tensor_parallel,
            "lr": lr,
            "peak_lr": PEAK_LR,
            "betas": as_tuple(betas),
            "epsilon": epsilon,
            "weight_decay": weight_decay,
            "weight_decay_type": weight_decay_type,
            "max_preconditioner_dim": max_preconditioner_dim,
            "precondition_frequency": precondition_frequency,
            "start_preconditioning_step": _START if start_preconditioning_step is None else start_preconditioning_step,
            "grafting": grafting,
            "grafting_beta2": _GRAFTING_BETA2 if grafting_beta2 is None else grafting_beta2,
            "grafting_epsilon": grafting_epsilon,
            "bias_correction": bias_correction,
            "exponent_override": dict(exponent_override)
            if isinstance(exponent_override, Mapping)
            else exponent_override,
            "momentum": momentum,
            "nesterov": nesterov,
            "refresh": refresh,
            "async_delay": async_delay,
            "root_solver": root_solver,
            "relative_epsilon": relative_epsilon,
            "root_dtype": dtype_name(root_dtype),
            "oversize": oversize,
            "kl": self._kl,
            "matmul_precision": matmul_precision,
            "factor_storage": factor_storage,
            "tolerated_failures": tolerated_failures,
            "low_precision_weights": low_precision_weights,
            "state_dtype": state_dtype,
        }
        super().__init__(
            params,
            KLShampooRule() if self._kl else ShampooRule(),
            matrix,
            aux_defaults(matrix, aux_lr, aux_betas, aux_eps, aux_weight_decay),
            matrix_modules=matrix_modules,
            aux_modules=aux_modules,
            per_head=per_head,
            allow_no_matrices=allow_no_matrices,
            skip_nonfinite=skip_nonfinite,
            transport_dtype=transport_dtype,
            overlap_param_gather=overlap_param_gather,
            process_group=process_group,
            tensor_parallel_modules=tensor_parallel_modules,
            lora_lr_ratio=lora_lr_ratio,
            lora_defaults=partial(one_sided, max_preconditioner_dim) if lora_one_sided else None,
            offload_state=offload_state,
        )


class KLShampoo(Shampoo):
    r"""Shampoo whose factors estimate the gradient's covariance by minimizing a Kullback-Leibler divergence.

    Each side's factor is a mean of the gradient whitened by the other side, ``G B^-1 G^T / n``, and each side is
    preconditioned by the inverse square root: W. Lin et al., arXiv:2509.03378. Arguments are those of :class:`Shampoo`.
    """

    _kl = True
