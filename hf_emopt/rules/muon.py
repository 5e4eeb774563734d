"""Muon and NorMuon.

Muon: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon).
Scale that matches AdamW: J. Liu et al., "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2.
NorMuon: Z. Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv:2510.05491, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from hf_emopt.linalg.coefficients import CoefficientSpec, hashable, resolve_coefficients
from hf_emopt.linalg.cost import Method, ShardedCost, sharded_cost
from hf_emopt.linalg.newton_schulz import newton_schulz, newton_schulz_flops
from hf_emopt.linalg.newton_schulz_sharded import Shard, newton_schulz_sharded
from hf_emopt.routing.lora import LoraMode
from hf_emopt.rules.adamw import DecayOptions, has_l2_decay, with_l2_decay
from hf_emopt.rules.base import Group, MatrixRule, RefreshClock, State, state_dtype
from hf_emopt.rules.lora_pairs import Factor, pair_update
from hf_emopt.rules.options import Options, as_tuple, check_choice, check_number, check_whole, dtype_name, option

if TYPE_CHECKING:
    from hf_emopt.routing.lora import Adapter

AdjustLrFn = Literal["match_rms_adamw", "original", "spectral", "unscaled"]
CompatName = Literal["torch", "keller", "moonlight"]
LoraScale = Literal["product", "factor"]
ADJUST_LR_FNS: tuple[str, ...] = get_args(AdjustLrFn)
NsCoefficients = str | tuple[float, float, float] | Sequence[tuple[float, float, float]]

_NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Compat:
    """The arithmetic of another Muon, where it differs from ours.

    Attributes:
        normalization: of Newton-Schulz, see :func:`hf_emopt.newton_schulz`.
        eps: floor of that normalization.
        momentum_form: ``"ema"`` (``m += (1 - mu) (g - m)``) or ``"accumulate"`` (``m = mu m + g``). Newton-Schulz does
            not see the factor between the two; the floor does.
        scale_in_ns_dtype: multiply by the shape's scale before leaving the Newton-Schulz dtype.
        adjust_lr_fn: the scale that implementation has, or ``None`` where the user chooses.
        source: where it was read.
    """

    normalization: Literal["clamp", "add"]
    eps: float
    momentum_form: Literal["ema", "accumulate"]
    scale_in_ns_dtype: bool
    adjust_lr_fn: AdjustLrFn | None
    source: str


COMPAT: dict[str, Compat] = {
    "torch": Compat("clamp", 1e-7, "ema", False, None, "torch.optim.Muon, PyTorch 2.9 to 2.13"),
    "keller": Compat("add", 1e-7, "ema", True, "original", "github.com/KellerJordan/Muon, muon.py"),
    "moonlight": Compat(
        "add", 1e-7, "accumulate", False, "match_rms_adamw", "github.com/MoonshotAI/Moonlight, examples/toy_train.py"
    ),
}


def update_scale(adjust_lr_fn: str, m: int, n: int) -> float:
    """Factor on the orthogonalized ``m x n`` (outputs x inputs) update.

    An orthogonal ``m x n`` matrix has elements of root mean square ``max(m, n) ** -0.5``.

    * ``"match_rms_adamw"``: ``0.2 sqrt(max(m, n))``, so the update's RMS is 0.2, about AdamW's (arXiv:2502.16982).
    * ``"original"``: ``sqrt(max(1, m / n))`` (Jordan).
    * ``"spectral"``: ``sqrt(m / n)``, the spectral condition for feature learning (arXiv:2310.17813).
    * ``"unscaled"``: 1.

    Raises:
        ValueError: for any other name.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, m / n))
    if adjust_lr_fn == "spectral":
        return math.sqrt(m / n)
    if adjust_lr_fn == "unscaled":
        return 1.0
    raise ValueError(f"adjust_lr_fn={adjust_lr_fn!r} is not one of {', '.join(ADJUST_LR_FNS)}")


def lora_scale(adjust_lr_fn: str, adapter: Adapter) -> float:
    r"""Factor on the orthogonalized update of one LoRA factor, so that the *product* moves as a whole matrix would.

    The model adds ``s B A`` (``m x n``, rank ``r``) to its weight, so a step ``c O`` of ``B``, with ``O`` orthogonal, moves
    that weight by ``s c O A``, whose singular values are at most ``s c |A|``. A full step has ``update_scale(m, n)``. Half of
    that for each factor is

    .. code-block:: text

        c = update_scale(m, n) / (2 s a),        a = (1 + sqrt(r / k)) / sqrt(3)

    where ``a`` is the spectral norm of the ``A`` that PEFT draws at random, of variance ``1 / (3 k)`` with ``k = n`` columns.
    B starts at zero; ``A`` gets the same ``c``, which is right when ``B`` has grown to the size of ``A``. The product's step
    then has at most the spectral norm of a full step, and with its ``r`` instead of ``min(m, n)`` directions a smaller RMS,
    by ``sqrt(r / min(m, n))``: matching the RMS itself would move each direction too far by the inverse of that.
    """
    norm = (1.0 + math.sqrt(min(1.0, adapter.rank / adapter.inputs))) / math.sqrt(3.0)
    return update_scale(adjust_lr_fn, adapter.outputs, adapter.inputs) / (2.0 * adapter.scaling * norm)


def ns_dtype_of(group: Group) -> torch.dtype | None:
    """The Newton-Schulz dtype of a group, kept there by name so that checkpoints hold plain values."""
    name = group["ns_dtype"]
    return None if name is None else _NS_DTYPES[name]


def _plain_coefficients(coefficients: NsCoefficients) -> Any:
    """A name, or plain tuples, which checkpoints hold without pickling."""
    if isinstance(coefficients, str) or not isinstance(coefficients, Sequence):
        return coefficients
    return tuple(as_tuple(step) for step in coefficients)


@dataclass(eq=False)
class _CommonOptions(DecayOptions):
    """Options of both rules; :class:`hf_emopt.Muon` says what each of them means."""

    lr: float | Tensor = 1e-3
    weight_decay: float = 0.1
    momentum: float = option(0.95, partial(check_number, high=1.0))
    nesterov: bool = True
    ns_coefficients: NsCoefficients = option("jordan", keep=_plain_coefficients)
    ns_steps: int = option(5, partial(check_whole, low=1, high=100))
    ns_dtype: torch.dtype | str | None = option(
        None, partial(check_choice, accepted=_NS_DTYPES, or_none=True), keep=dtype_name
    )
    adjust_lr_fn: AdjustLrFn = "match_rms_adamw"
    _: KW_ONLY
    eps: float | None = option(None, partial(check_number, above=True, or_none="for the scale-free normalization"))
    cautious_weight_decay: bool = False
    lora: LoraMode = "separate"
    lora_scale: LoraScale = "product"
    lora_max_change: float = option(0.1, partial(check_number, above=True))


@dataclass(eq=False, kw_only=True)
class MuonOptions(_CommonOptions):
    compat: CompatName | None = None


@dataclass(eq=False, kw_only=True)
class NorMuonOptions(_CommonOptions):
    beta2: float = option(0.95, partial(check_number, high=1.0))


class MuonRule(MatrixRule):
    """Momentum, then the nearest semi-orthogonal matrix, then a scale by shape.

    .. code-block:: text

        m  <- m + (1 - mu) (g - m)
        u  <- g + mu (m - g)  if nesterov else m
        o  <- newton_schulz(u)
        p  <- (1 - lr wd) p - lr scale(shape) o
    """

    name: ClassVar[str] = "muon"
    options: ClassVar[type[Options]] = MuonOptions
    steps_pairs: ClassVar[bool] = True
    tensor_parallel_modes: ClassVar[tuple[str, ...]] = ("auto", "layerwise", "duplicated", "distributed", "blockwise")

    def validate(self, group: Group) -> None:
        super().validate(group)
        compat = group["compat"]
        try:
            resolved = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"ns_coefficients={group['ns_coefficients']!r}: {error}") from error
        if group["cautious_weight_decay"] and group["weight_decay_type"] == "l2":
            raise ValueError(
                "cautious_weight_decay=True asks where the update moves a weight, which is not known when "
                "weight_decay_type='l2' puts the decay into the gradient: leave one of them out"
            )
        if group["lora"] == "joint":
            self._validate_joint(group, resolved.scaling)
        if resolved.scaling != "frobenius" and (compat is not None or group["eps"] is not None):
            given = f"compat={compat!r}" if compat is not None else f"eps={group['eps']}"
            raise ValueError(f"ns_coefficients={resolved.name!r} has a normalization of its own; leave out {given}")

    def _validate_joint(self, group: Group, scaling: str) -> None:
        wrong = {
            "compat": group["compat"] is not None,
            "cautious_weight_decay": bool(group["cautious_weight_decay"]),
            "lora_scale": group["lora_scale"] != "product",
            "weight_decay_type": group["weight_decay_type"] == "l2",
            "ns_coefficients": scaling != "frobenius",
        }
        for name in (name for name, given in wrong.items() if given):
            raise ValueError(
                f"lora='joint' makes an update that does not depend on the basis of an adapter's factors, and "
                f"{name}={group[name]!r} would make it depend on it: leave it out, or use lora='separate'"
            )

    def init_state(self, param: Tensor, group: Group) -> State:
        return {"momentum_buffer": torch.zeros_like(param, dtype=state_dtype(param))}

    def accumulate(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        group: Group,
        ok: Tensor | None,
    ) -> list[Tensor]:
        mu = group["momentum"]
        buffers = [state["momentum_buffer"] for state in states]
        inputs = [g if g.dtype == b.dtype else g.to(b.dtype) for g, b in zip(grads, buffers)]
        inputs = with_l2_decay(inputs, params, group)
        if _compat(group).momentum_form == "accumulate":
            summed = torch._foreach_add(torch._foreach_mul(buffers, mu), inputs)
            for buffer, value in zip(buffers, summed):
                buffer.copy_(value if ok is None else torch.where(ok, value, buffer))
            if ok is not None:
                inputs = [torch.where(ok, g, 0.0) for g in inputs]
            return list(torch._foreach_add(inputs, buffers, alpha=mu)) if group["nesterov"] else buffers
        if ok is not None:
            inputs = [torch.where(ok, g, b) for g, b in zip(inputs, buffers)]
        torch._foreach_lerp_(buffers, inputs, 1.0 - mu)
        return list(torch._foreach_lerp(inputs, buffers, mu)) if group["nesterov"] else buffers

    def momentum_form(self, group: Group) -> tuple[float, bool] | None:
        # Another implementation's bits need its order of sums, and the pass reads no weights.
        plain = group["compat"] is None and not has_l2_decay(group)
        return (group["momentum"], group["nesterov"]) if plain else None

    def orthogonalize(self, x: Tensor, group: Group) -> Tensor:
        """``(B, m, n)`` to its polar factor, as this group's constants approximate it."""
        compat, eps = group["compat"], group["eps"]
        steps, coefficients, dtype = group["ns_steps"], group["ns_coefficients"], ns_dtype_of(group)
        if compat is None:
            if eps is None:
                return newton_schulz(x, steps, coefficients, dtype)
            return newton_schulz(x, steps, coefficients, dtype, eps=eps, normalization="clamp")
        form = COMPAT[compat]
        # Those implementations take one matrix at a time; a batched product may round otherwise.
        ortho = [
            newton_schulz(
                matrix,
                steps,
                coefficients,
                dtype or torch.bfloat16,
                eps=eps or form.eps,
                normalization=form.normalization,
            )
            for matrix in x.unbind(0)
        ]
        return torch.stack(ortho)

    def scaled(self, ortho: Tensor, group: Group, out_dtype: torch.dtype) -> Tensor:
        """Times the shape's scale, in ``out_dtype``."""
        form = _compat(group)
        scale = update_scale(form.adjust_lr_fn or group["adjust_lr_fn"], ortho.shape[-2], ortho.shape[-1])
        if form.scale_in_ns_dtype:
            return ortho.mul_(scale).to(out_dtype)
        return ortho.to(out_dtype) * scale

    def update_gain(self, m: int, n: int, group: Group) -> float | None:
        return update_scale(_compat(group).adjust_lr_fn or group["adjust_lr_fn"], m, n)

    def transform(self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock) -> Tensor:
        return self.scaled(self.orthogonalize(x, group), group, x.dtype)

    def transform_pair(
        self,
        nonzero_init: Factor,
        zero_init: Factor,
        scaling: Tensor,
        shape: tuple[int, int],
        group: Group,
        ok: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # Half for each of the two terms, so that together they are at most the step of a matrix of this shape.
        size = update_scale(group["adjust_lr_fn"], *shape) / 2
        reach = group["lr"] * size / group["lora_max_change"]
        return pair_update(
            nonzero_init, zero_init, scaling, size, reach, lambda x, state: self.pair_polar(x, state, group, ok)
        )

    def pair_polar(self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None) -> Tensor:
        """The polar factor of one side of a pair ``(N, k, r)``; turning its columns turns those of the result alike."""
        return self.orthogonalize(x, group).to(x.dtype)

    def adapter_scale(self, m: int, n: int, adapter: Adapter, group: Group) -> float:
        if group["lora_scale"] == "factor" or group["compat"] is not None or not (adapter.outputs and adapter.inputs):
            return 1.0
        return lora_scale(group["adjust_lr_fn"], adapter) / update_scale(group["adjust_lr_fn"], m, n)

    def defers_scale(self, group: Group) -> bool:
        return group["compat"] is None

    def transform_unscaled(
        self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock
    ) -> tuple[Tensor, float]:
        return self.orthogonalize(x, group), update_scale(group["adjust_lr_fn"], x.shape[-2], x.shape[-1])

    def transform_part(
        self,
        x: Tensor,
        matrix_state: State,
        group: Group,
        ok: Tensor | None,
        clock: RefreshClock,
        full_shape: tuple[int, int],
    ) -> Tensor:
        form = _compat(group)
        rule = form.adjust_lr_fn or group["adjust_lr_fn"]
        scale = update_scale(rule, *full_shape) / update_scale(rule, x.shape[-2], x.shape[-1])
        return self.transform(x, matrix_state, group, ok, clock) * scale

    def can_shard(self, group: Group) -> bool:
        # Another implementation's bits need its order of products; rescaled rows have to be whole.
        spec = group["ns_coefficients"]
        spec = hashable(spec) if isinstance(spec, list) else spec
        return group["compat"] is None and _scaling(spec, group["ns_steps"]) == "frobenius"

    def orthogonalize_shard(self, x: Tensor, group: Group, shard: Shard) -> Tensor:
        """This rank's part of the polar factor; :meth:`orthogonalize` for cut matrices.

        Raises:
            NotImplementedError: when :meth:`can_shard` says no.
        """
        if not self.can_shard(group):
            raise NotImplementedError(
                f"{self.name} with compat={group['compat']!r} and ns_coefficients={group['ns_coefficients']!r} needs whole "
                "matrices: call transform, or use compat=None and coefficients that rescale no rows"
            )
        return newton_schulz_sharded(
            x,
            shard,
            group["ns_steps"],
            group["ns_coefficients"],
            ns_dtype_of(group),
            eps=group["eps"],
            normalization="scale_free" if group["eps"] is None else "clamp",
        )

    def transform_shard(
        self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock, shard: Shard
    ) -> Tensor:
        ortho = self.orthogonalize_shard(x, group, shard).to(x.dtype)
        return ortho * update_scale(group["adjust_lr_fn"], *shard.full_shape)

    def cost(self, m: int, n: int, group: Group) -> int:
        return newton_schulz_flops(m, n, group["ns_steps"])

    def shard_cost(self, m: int, n: int, k: int, group: Group) -> int:
        if not self.can_shard(group):
            return self.cost(m, n, group)
        return sharded_cost(m, n, k, group["ns_steps"]).flops

    def shard_work(self, m: int, n: int, k: int, dim: int, group: Group) -> tuple[Method, ShardedCost]:
        if not self.can_shard(group):
            return super().shard_work(m, n, k, dim, group)
        methods: list[Method] = ["standard"]
        if group["eps"] is None and group["ns_dtype"] != "bfloat16":  # which has too few bits for the Gram form
            methods.append("gram")
        work = {
            method: sharded_cost(m, n, k, group["ns_steps"], group["ns_coefficients"], method) for method in methods
        }
        best = min(methods, key=lambda method: work[method].on(k).seconds)
        return best, work[best]

    def describe(self, group: Group) -> str:
        form = _compat(group)
        rule = form.adjust_lr_fn or group["adjust_lr_fn"]
        size = {
            "match_rms_adamw": "update RMS about 0.2 lr, as AdamW's: lr means what it means for AdamW",
            "original": "update RMS about lr / sqrt(max(m, n)) * sqrt(max(1, m / n)): lr is not AdamW's",
            "spectral": "spectral norm of the update about lr sqrt(m / n): lr is not AdamW's",
            "unscaled": "spectral norm of the update about lr: lr is not AdamW's",
        }[rule]
        coefficients = group["ns_coefficients"]
        named = coefficients if isinstance(coefficients, str) else "custom coefficients"
        compat = f", compat={group['compat']}" if group["compat"] else ""
        return (
            f"{self.name}: momentum {group['momentum']}{' (Nesterov)' if group['nesterov'] else ''}, "
            f"{group['ns_steps']} Newton-Schulz steps ({named}){compat}; {rule}: {size}"
        )


class NorMuonRule(MuonRule):
    """Muon with a second moment for each output neuron.

    .. code-block:: text

        o  <- newton_schulz(u)                                  # as Muon
        v  <- v + (1 - beta2) (mean_over_columns(o * o) - v)    # one number a row
        o' <- o / (sqrt(v) + 1e-8),  scaled back to the Frobenius norm of o

    Rows are outputs whatever way the weight is stored, and the norm is that of the whole matrix.
    """

    name: ClassVar[str] = "normuon"
    options: ClassVar[type[Options]] = NorMuonOptions
    _EPS: ClassVar[float] = 1e-8

    def defers_scale(self, group: Group) -> bool:
        return False  # rows are normalized in the dtype of what comes in

    def validate(self, group: Group) -> None:
        super().validate(group)
        if group["compat"] is not None:
            raise ValueError(
                f"compat={group['compat']!r} is Muon's: that implementation has no NorMuon; use compat=None"
            )

    def init_matrix_state(self, shape: tuple[int, int, int], group: Group, like: Tensor) -> State:
        batch, m, _ = shape
        return {"row_second_moment": torch.zeros(batch, m, 1, dtype=state_dtype(like), device=like.device)}

    def transform(self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock) -> Tensor:
        return self.scaled(self._normalized(x, matrix_state, group, ok), group, x.dtype)

    def pair_polar(self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None) -> Tensor:
        # Rows are outputs in B and inputs in A, and their norms do not change when columns are turned.
        return self._normalized(x, matrix_state, group, ok)

    def _normalized(self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None) -> Tensor:
        """The polar factor with rows of running mean square one, at the polar factor's Frobenius norm."""
        ortho = self.orthogonalize(x, group).to(x.dtype)
        normalized = ortho / self._row_norms(ortho.square().mean(dim=-1, keepdim=True), matrix_state, group, ok)
        target = torch.linalg.matrix_norm(ortho, keepdim=True)
        length = torch.linalg.matrix_norm(normalized, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        return normalized * (target / length)

    def _row_norms(self, mean_square: Tensor, matrix_state: State, group: Group, ok: Tensor | None) -> Tensor:
        """Divisors of rows ``(B, m, 1)`` after their second moment has taken in the mean squares ``(B, m, 1)``."""
        moment = matrix_state["row_second_moment"]
        moment.lerp_(mean_square if ok is None else torch.where(ok, mean_square, moment), 1.0 - group["beta2"])
        return moment.sqrt() + self._EPS

    def transform_shard(
        self, x: Tensor, matrix_state: State, group: Group, ok: Tensor | None, clock: RefreshClock, shard: Shard
    ) -> Tensor:
        ortho = self.orthogonalize_shard(x, group, shard).to(x.dtype)
        # A cut along rows leaves rows whole; after a cut along columns all ranks have the same moments.
        square_sum = ortho.square().sum(dim=-1, keepdim=True)
        mean_square = (square_sum if shard.dim == -2 else shard.sum(square_sum)) / shard.full_shape[1]
        normalized = ortho / self._row_norms(mean_square, matrix_state, group, ok)
        parts = torch.stack([torch.linalg.matrix_norm(t, keepdim=True) for t in (ortho, normalized)])
        target, length = shard.sum(parts.square()).sqrt().unbind(0)
        update = normalized * (target / length.clamp_min(torch.finfo(x.dtype).tiny))
        return update * update_scale(group["adjust_lr_fn"], *shard.full_shape)

    def shard_work(self, m: int, n: int, k: int, dim: int, group: Group) -> tuple[Method, ShardedCost]:
        method, work = super().shard_work(m, n, k, dim, group)
        rows = (m,) if dim == -1 else ()  # the moments of rows that are cut, then the norms before and after
        return method, replace(work, reductions=(*work.reductions, *rows, 2))


@lru_cache(maxsize=256, typed=True)
def _scaling(coefficients: CoefficientSpec, steps: int | None) -> str:
    """How the iteration scales its input, looked up once for each set of coefficients."""
    return resolve_coefficients(coefficients, steps).scaling


_OURS = Compat("clamp", 1e-7, "ema", False, None, "this package")


def _compat(group: Group) -> Compat:
    compat = group["compat"]
    return _OURS if compat is None else COMPAT[compat]
