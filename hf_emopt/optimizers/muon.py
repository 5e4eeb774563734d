"""Muon and NorMuon as a user names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_emopt.distributed.plan import TensorParallel
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.options import Arguments, takes
from hf_emopt.rules.muon import MuonOptions, MuonRule, NorMuonOptions, NorMuonRule


@dataclass(eq=False, kw_only=True)
class _Arguments(Arguments):
    muon_modules: str | Sequence[str] | None = None
    tensor_parallel: TensorParallel = "auto"


@dataclass(eq=False)
class MuonArguments(MuonOptions, _Arguments):
    """Arguments of :class:`Muon`."""


@dataclass(eq=False)
class NorMuonArguments(NorMuonOptions, _Arguments):
    """Arguments of :class:`NorMuon`."""


class Muon(MatrixOptimizer):
    r"""Muon for matrices, AdamW for everything else, in one optimizer.

    For a matrix :math:`W` of ``m`` outputs and ``n`` inputs with gradient :math:`G` (after accumulation and clipping):

    .. code-block:: text

        M <- M + (1 - momentum) (G - M)
        U <- G + momentum (M - G)  if nesterov else M
        O <- newton_schulz(U)                     about the nearest matrix with orthonormal rows or columns
        W <- (1 - lr weight_decay) W - lr scale(m, n) O

    Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; J. Liu et al., "Muon is
    Scalable for LLM Training", arXiv:2502.16982. Embeddings, output heads, norms, biases, routers and depthwise
    convolutions get AdamW, under the names ``aux_*``; :meth:`explain` prints what goes where and why.

    Args:
        params: the model (best: fused, transposed and stacked weights are recognised by module type); an iterable of
            ``(name, parameter)``; an iterable of parameters; or groups of these with their own hyperparameters.
            Parameters without names must come in the same order on all ranks: shards of two parameters of one shape do not
            say which they are of.
        lr: learning rate; of a tensor each group has a copy. With the default ``adjust_lr_fn`` it means what it means for
            AdamW.
        weight_decay: see ``weight_decay_type``; none on norms, biases and other parameters that are no weights of a layer
            when a model is passed.
        weight_decay_type: of matrices, ``"decoupled"`` (``W *= 1 - lr * weight_decay`` by the base learning rate), ``"l2"``
            (into the gradient), ``"corrected"`` or ``"independent"``; see :func:`hf_emopt.rules.adamw.decay_factor`. The
            AdamW part's is decoupled.
        momentum: in [0, 1).
        nesterov: blend the gradient into the momentum before orthogonalization.
        ns_coefficients: a named set (``"jordan"``, ``"you"``, ``"polar_express"`` ...; see
            ``hf_emopt.linalg.coefficients``), one tuple ``(a, b, c)``, or one tuple a step.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or a ``torch.dtype``; ``None`` is what
            :func:`hf_emopt.newton_schulz` chooses: float16 where this package's kernels run, bfloat16 on other accelerators,
            float32 on CPU.
        adjust_lr_fn: ``"match_rms_adamw"`` (0.2 sqrt(max(m, n)): an update of RMS 0.2 as AdamW's), ``"original"``
            (sqrt(max(1, m/n))), ``"spectral"`` (sqrt(m/n)) or ``"unscaled"``.
        eps: floor of the Frobenius norm, as in ``torch.optim.Muon``; ``None`` needs none and is exactly invariant to the
            gradient's scale.
        cautious_weight_decay: decay matrices only where the update already moves a weight towards zero (arXiv:2510.12402).
        compat: ``"torch"``, ``"keller"`` or ``"moonlight"`` reproduces that implementation's rounding, floor and momentum
            form; the last two also fix its scale, whatever ``adjust_lr_fn`` says. Keller's is of the matrix: his own code
            takes it from a convolution's kernel, where it is 1 for a square one.
        aux_lr: learning rate of the AdamW part; ``None`` is ``lr``. Schedulers keep the ratio of the two.
        aux_betas, aux_eps: of the AdamW part.
        aux_weight_decay: of the AdamW part; ``None`` is ``weight_decay``.
        low_precision_weights: how bfloat16 and float16 weights keep updates below their spacing: ``"split"`` (default,
            exactly float32 for bfloat16 at 2 bytes a weight), ``"master"``, ``"kahan"``, ``"stochastic"``, ``"none"``.
        state_dtype: of momentum and of AdamW's moments as they are kept between steps: ``"float32"``, ``"bfloat16"``
            (rounded stochastically) or ``"int8"`` (also ``"8bit"``: blockwise, by bitsandbytes). A loaded checkpoint is
            converted to it.
        offload_state: ``"cpu"`` keeps all state in page-locked host memory and brings it to the device bucket by bucket.
        muon_modules, aux_modules: regular expressions on dotted parameter names that override the routing.
        per_head: orthogonalize attention projections head by head.
        allow_no_matrices: accept a model without a single matrix.
        skip_nonfinite: leave everything untouched in a step with a NaN or an infinity in a gradient.
        transport_dtype: of matrices on their way between ranks; ``None`` is bfloat16 on accelerators, float32 on the CPU.
        overlap_param_gather: under DDP, let updates arrive behind the next forward pass; code that reads or writes
            parameters other than by a forward pass or the model's ``state_dict`` and ``load_state_dict`` has to call
            :meth:`synchronize` first. Needs the model as ``params``.
        average_gradients: average the gradients of plain parameters over ``process_group`` at the beginning of each step, as
            :class:`~torch.nn.parallel.DistributedDataParallel` does in the backward pass; for loops that have no wrapper.
            A gradient that a rank has not counts as zeros; one that no rank has stays away. Clipping before the step sees
            each rank's own gradients. Not for sharded parameters (FSDP2, tensor parallelism) nor under DeepSpeed.
        process_group: the ranks that hold copies of the parameters; ``None`` for all, ``"self"`` where each process trains a
            model of its own. DTensors (FSDP2, HSDP) know their ranks.
        tensor_parallel: what is done with matrices that tensor parallelism cuts: ``"layerwise"`` (whole matrices go to
            owners), ``"duplicated"`` (every rank gathers and transforms all), ``"distributed"`` (Gram matrices are summed
            over ranks), ``"auto"`` (which of these a model of bytes and operations has cheapest), or ``"blockwise"`` (slices
            are matrices of their own: no bytes, but another update). Kept by group, and never taken from a checkpoint.
        tensor_parallel_modules: the same for single parameters, ``"pattern:mode"`` with ``;`` between, such as
            ``"o_proj:duplicated"``.
        lora: ``"separate"`` makes each factor of a LoRA adapter a matrix of its own; ``"joint"`` steps both as the one matrix
            that they are factors of, by an update that does not depend on the basis they are written in (LoRA-Muon,
            F. L. Cesista et al., arXiv:2606.12921; see docs/lora.md). Needs the model as ``params``; never taken from a
            checkpoint.
        lora_scale: size of a separate factor's update: ``"product"`` (the product's update has the spectral norm of a whole
            matrix' update, whatever rank and ``lora_alpha`` are) or ``"factor"`` (``adjust_lr_fn`` of its own shape).
        lora_max_change: with ``lora="joint"``, by how much a step may change the factor that does not start at zero, relative
            to it: keeps the first steps, in which the product is small, from replacing it.
        lora_lr_ratio: with ``lora="separate"``, the learning rate of B factors over that of A factors (LoRA+, S. Hayou et
            al., arXiv:2402.12354, who use 16 with AdamW); schedulers keep it; it is logged as ``lr/matrix_lora_B``.

    Raises:
        ValueError: when a value is out of range, or no parameter is a matrix.

    State per matrix: ``momentum_buffer`` (float32, shaped as the parameter) and ``step``.
    """

    matrix_option = "muon_modules"

    @takes(MuonArguments)
    def __init__(self, given: MuonArguments) -> None:
        super().__init__(**given.of_optimizer(MuonRule()), matrix_modules=given.muon_modules, lora=given.lora)


class NorMuon(MatrixOptimizer):
    r"""Muon whose orthogonalized update is normalized neuron by neuron.

    After :math:`O` as in :class:`Muon`, each row (output neuron) is divided by the root of a running mean of its squares,
    and the whole is brought back to the Frobenius norm of :math:`O`:

    .. code-block:: text

        v <- v + (1 - beta2) (mean_over_columns(O * O) - v)
        O <- O / (sqrt(v) + 1e-8) * (|O| / |O / (sqrt(v) + 1e-8)|)

    Source: Z. Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491. Rows are outputs whatever
    way a weight is stored, so GPT-2's transposed layers get the same update as a ``Linear``.

    Args:
        beta2: decay of the row second moment, in [0, 1).
        params, lr, and the rest: as for :class:`Muon`; there is no ``compat``.

    Raises:
        ValueError: when a value is out of range, or no parameter is a matrix.

    State per matrix: ``momentum_buffer``, ``step`` and, for each matrix view, ``row_second_moment.<index>`` of shape (B,
        m, 1).
    """

    matrix_option = "muon_modules"

    @takes(NorMuonArguments)
    def __init__(self, given: NorMuonArguments) -> None:
        arguments = given.of_optimizer(NorMuonRule(), compat=None)
        super().__init__(**arguments, matrix_modules=given.muon_modules, lora=given.lora)
