"""SOAP as a user names it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hf_emopt.distributed.layout import ProcessGroupArgument
from hf_emopt.formats.kronecker_factors import FactorStorageName
from hf_emopt.formats.master_weights import LowPrecisionWeights
from hf_emopt.formats.moments import StateDtype
from hf_emopt.linalg.matmul_precision import Precision
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.options import PEAK_LR, as_tuple, aux_defaults, dtype_name, one_sided
from hf_emopt.optimizers.param_groups import ParamsArgument
from hf_emopt.rules.base import Group
from hf_emopt.rules.kronecker import Oversize, Refresh
from hf_emopt.rules.soap import SoapRule
from hf_emopt.rules.validation import check_flags
from hf_emopt.state.forms import OffloadState

__all__ = ["SOAP"]

BasisMethod = Literal["orthogonal_iteration", "qr", "eigh"]


class SOAP(MatrixOptimizer):
    r"""SOAP for matrices, AdamW for everything else, in one optimizer.

    Adam in the eigenbasis of Shampoo's factors: N. Vyas et al., arXiv:2409.11321. See
    :class:`hf_emopt.rules.soap.SoapRule` for the formulas, and for where the default departs from the reference and why.

    Args:
        params: as for :class:`Muon`.
        lr: learning rate; the update's RMS is Adam's.
        betas: decay of the first and second moment in the eigenbasis.
        eps: added to the root of the second moment.
        weight_decay: decoupled; none on norms and biases when a model is passed.
        precondition_frequency: steps in which every basis is refreshed once.
        max_preconditioner_dim: sides of a matrix longer than this are not preconditioned (``oversize="one_sided"``) or
            cut into blocks of it (``oversize="block"``).
        shampoo_beta: decay of the factors; ``None`` is ``betas[1]``.
        refresh: ``"staggered"`` (default) spreads the blocks over the period by cost, so that no step is long;
            ``"synchronous"`` refreshes all on the same step, the textbook schedule; ``"async"`` computes in the background
            and installs a basis ``async_delay`` steps after it was begun.
        async_delay: staleness of an asynchronous refresh in steps, below ``precondition_frequency``; ``None`` is half of it.
        basis_method: ``"orthogonal_iteration"`` (a power iteration, made orthogonal by matrix products and Cholesky),
            ``"qr"`` or ``"eigh"``. A block that fails its check falls back to ``qr``, then ``eigh``.
        kl: KL-corrected factors, each side whitened by the other (arXiv:2509.03378).
        max_update_rms: cap on the RMS of a matrix's update before the learning rate; ``None`` for none. Without it, a
            basis refreshed every step can make steps of ten to seventy times the learning rate.
        matmul_precision: of float32 products: ``"highest"``, ``"bf16x3"``, ``"tf32"``, or ``"fp16"``, whose products
            are as accurate as the third's and faster, while bases are refreshed and Shampoo's roots made nearly as in the
            first. What ``"tf32"`` leaves of these is felt in the loss; see docs/convergence.md.
        factor_storage: ``"float32"``, ``"packed"`` (one triangle), ``"bfloat16"``, ``"float16"`` or ``"int8"`` (diagonal in
            float32, correlations in 8 bits); see :mod:`hf_emopt.formats.kronecker_factors`.
        basis_dtype: dtype in which bases are kept.
        tolerated_failures: refreshes of one block that may fail in a row before an error is raised.
        weight_decay_type: of matrices, ``"decoupled"``, ``"l2"``, ``"corrected"`` or ``"independent"``; see
            :func:`hf_emopt.rules.adamw.decay_factor`. The AdamW part's is decoupled.
        compat: ``"paper"`` follows the reference implementation step by step; needs ``refresh="synchronous"``.
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

    State per matrix of ``m x n`` (one block): moments ``exp_avg.*``, ``exp_avg_sq.*`` in the eigenbasis, ``factor.*`` and
    ``basis.*`` of both sides: ``8 m n + 8 (m^2 + n^2)`` bytes in float32.
    """

    def __init__(
        self,
        params: ParamsArgument,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 10000,
        *,
        shampoo_beta: float | None = None,
        refresh: Refresh = "staggered",
        async_delay: int | None = None,
        basis_method: BasisMethod = "orthogonal_iteration",
        oversize: Oversize = "one_sided",
        kl: bool = False,
        max_update_rms: float | None = 1.0,
        matmul_precision: Precision = "highest",
        factor_storage: FactorStorageName = "float32",
        basis_dtype: torch.dtype | str = "float32",
        tolerated_failures: int = 3,
        weight_decay_type: Literal["decoupled", "l2", "corrected", "independent"] = "decoupled",
        compat: Literal["paper"] | None = None,
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
        paper = compat == "paper"
        check_flags({"lora_one_sided": lora_one_sided})
        matrix: Group = {
            "tensor_parallel": tensor_parallel,
            "lr": lr,
            "peak_lr": PEAK_LR,
            "betas": as_tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "weight_decay_type": weight_decay_type,
            "decay_after": paper,
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": max_preconditioner_dim,
            "shampoo_beta": shampoo_beta,
            "refresh": refresh,
            "async_delay": async_delay,
            "basis_method": "qr" if paper else basis_method,
            "oversize": oversize,
            "kl": kl,
            "max_update_rms": None if paper else max_update_rms,
            "matmul_precision": matmul_precision,
            "factor_storage": factor_storage,
            "basis_dtype": dtype_name(basis_dtype),
            "tolerated_failures": tolerated_failures,
            "compat": compat,
            "low_precision_weights": low_precision_weights,
            "state_dtype": state_dtype,
        }
        super().__init__(
            params,
            SoapRule(),
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
