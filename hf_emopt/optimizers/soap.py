"""SOAP as a user names it."""

from __future__ import annotations

from dataclasses import dataclass

from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.options import KroneckerArguments, takes
from hf_emopt.rules.soap import SoapOptions, SoapRule


@dataclass(eq=False)
class SoapArguments(SoapOptions, KroneckerArguments):
    """Arguments of :class:`SOAP`."""


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
        max_preconditioner_dim: longest dimension that has a factor.
        oversize: longer dimensions are not preconditioned (``"one_sided"``) or cut into blocks of it (``"block"``).
        shampoo_beta: decay of the factors; ``None`` is ``betas[1]``.
        refresh: ``"staggered"`` (default) spreads the blocks over the period by cost, so that no step is long;
            ``"synchronous"`` refreshes all on the same step, the textbook schedule.
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
        offload_state, low_precision_weights, per_head, allow_no_matrices, skip_nonfinite, average_gradients: as for
            :class:`Muon`.
        transport_dtype, overlap_param_gather, process_group, tensor_parallel_modules, lora_lr_ratio: as for :class:`Muon`.
        tensor_parallel: ``"auto"`` and ``"layerwise"`` bring whole matrices to owners, with their factors; ``"blockwise"``
            gives each slice that tensor parallelism makes factors of its own: no bytes, but another update.
        lora_one_sided: precondition LoRA factors on the side of their rank alone; the factor of the other side would be many
            times as large as the adapter.

    Raises:
        ValueError: when a value is out of range, or no parameter is a matrix.

    State per matrix of ``m x n`` (one block): moments ``exp_avg.*``, ``exp_avg_sq.*`` in the eigenbasis, ``factor.*`` and
    ``basis.*`` of both sides: ``8 m n + 8 (m^2 + n^2)`` bytes in float32.
    """

    @takes(SoapArguments)
    def __init__(self, given: SoapArguments) -> None:
        paper = given.compat == "paper"
        fixed = {"basis_method": "qr", "max_update_rms": None} if paper else {}
        super().__init__(**given.of_optimizer(SoapRule(), decay_after=paper, **fixed))
