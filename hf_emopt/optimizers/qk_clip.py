"""QK-clip: weights of queries and keys scaled so that no head's attention logits exceed a threshold.

Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1 and algorithm 1 (MuonClip). With ``S_h`` the
largest logit of head ``h`` in the step's batch, ``gamma_h = min(1, threshold / S_h)``; after the optimizer step the rows of
head ``h`` in the query's weight are multiplied by ``gamma_h ** balance`` and those in the key's by
``gamma_h ** (1 - balance)``, so that the head's logits become ``gamma_h`` times what they were and no other head's change. In
latent attention (MLA) that holds for the parts without position; the rotary key, which all heads share, stays as it is, and
the rotary query of head ``h`` takes the whole ``gamma_h``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_emopt.linalg.matmul_precision import plain_arithmetic
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.optimizers.weight_scaling import scale_slices
from hf_emopt.routing.query_key import HeadRows, QueryKey, find_query_key


@dataclass(frozen=True)
class ClipReport:
    """What a clip did.

    Attributes:
        max_logit: the largest of all heads, before the clip.
        clipped: ``(module, head, gamma)`` of every head that was over the threshold less its margin.
    """

    max_logit: float
    clipped: tuple[tuple[str, int, float], ...]

    @property
    def clipped_heads(self) -> int:
        return len(self.clipped)


@plain_arithmetic()
def qk_clip(
    model: nn.Module,
    max_logits: Mapping[str, Tensor],
    threshold: float = 100.0,
    balance: float = 0.5,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    modules: str | Sequence[str] | None = None,
    margin: float = 0.0,
) -> ClipReport:
    """Scales queries and keys of the heads whose logits exceed a threshold, in place; called after ``optimizer.step()``.

    With grouped queries a key head is shared. It takes the factor that all of its query heads need, the largest
    ``gamma_h`` of the group to the power ``1 - balance``, and each query head takes what is left of its own; a group with a
    head under the threshold keeps its key. So every head's logits are scaled by its own ``gamma_h``, as without groups.

    Biases of the projections are scaled with their rows. Where the model norms query and key, rows of the projections
    cannot act, and the norms' weights are scaled instead; a weight that all heads share (Qwen3, Gemma3) is scaled by the
    worst head's factor. Where only the query or only the key trains, it takes the whole factor.

    Args:
        model: wrapped or not; under FSDP2 and tensor parallelism each rank scales the rows that it holds.
        max_logits: by the name of the attention module, ``(heads,)``: the largest logit of every head, as
            :meth:`MaxLogits.max_logits <hf_emopt.MaxLogits.max_logits>` gives it; ``-inf`` for a head without logits. The
            same on every rank.
        threshold: logits above it are scaled to it; positive. The paper's value is 100.
        balance: exponent of the query's share, 0 to 1; the key has the rest.
        optimizer: one of this package's whose 16-bit weights have more bits than the model shows
            (``low_precision_weights``): these are scaled too. Needed where it trains the model; under DDP a collective for
            16-bit weights.
        modules: as for :class:`~hf_emopt.MaxLogits`.
        margin: part of the threshold that is left free for what the next step adds, from 0 on and below 1: logits above
            ``(1 - margin) * threshold`` are scaled to that. 0 is the paper's algorithm.

    Raises:
        ValueError: threshold, balance or margin is out of range, a name or a number of heads does not fit the model, a
            logit is NaN or infinite, or a head is to be scaled where nothing can act: frozen weights, adapters, norms
            without weights.
    """
    return clip_found(find_query_key(model, modules), max_logits, threshold, balance, optimizer, margin)


def clip_found(
    found: Mapping[str, QueryKey],
    max_logits: Mapping[str, Tensor],
    threshold: float,
    balance: float,
    optimizer: torch.optim.Optimizer | None,
    margin: float = 0.0,
) -> ClipReport:
    """As :func:`qk_clip`, of queries and keys that were found before."""
    check_options(threshold, balance, margin)
    line = (1.0 - margin) * threshold
    logits = _on_host(found, max_logits)
    values = torch.cat([*logits.values(), torch.full((1,), -torch.inf, dtype=torch.float64, device="cpu")])
    if (values.isnan() | values.isposinf()).any():
        name = next(name for name, value in logits.items() if (value.isnan() | value.isposinf()).any())
        raise ValueError(
            f"QK-clip: a logit of {name} is infinite or no number, so there is no factor that would bound it; look for what "
            "overflows or is NaN in the weights or the inputs"
        )
    ours = optimizer if isinstance(optimizer, MatrixOptimizer) else None
    if ours is not None:
        ours.synchronize()
    factors: dict[str, tuple[HeadRows, Tensor]] = {}
    clipped: list[tuple[str, int, float]] = []
    for name, value in logits.items():
        gamma = torch.where(value > line, line / value, 1.0)
        if bool((gamma < 1).any()):
            _check_acts(found[name], value, line)
            for rows, by_head in _shares(found[name], gamma, balance):
                _multiply(factors, rows, by_head)
            clipped += [(name, h, float(g)) for h, g in enumerate(gamma.tolist()) if g < 1]
    for rows, factor in factors.values():
        scale_slices(ours, rows.name, rows.parameter, factor, rows.dim, rows.zero_centered)
    return ClipReport(float(values.max()), tuple(clipped))


def check_options(threshold: float, balance: float, margin: float) -> None:
    """Raises where a threshold, a balance or a margin makes no sense."""
    if not 0.0 < threshold < float("inf"):
        raise ValueError(f"threshold={threshold!r} must be a positive number")
    if not 0.0 <= balance <= 1.0:
        raise ValueError(f"balance={balance!r} must lie between 0 (all to the key) and 1 (all to the query)")
    if not 0.0 <= margin < 1.0:
        raise ValueError(f"margin={margin!r} must be a part of the threshold, from 0 on and below 1")


def _on_host(found: Mapping[str, QueryKey], max_logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The logits in float64 on the CPU, in one copy."""
    for name, value in max_logits.items():
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise ValueError(
                f"QK-clip: the model has no attention module {name!r} with a query and a key; it has {known}"
            )
        heads, shape = found[name].heads, tuple(value.shape)
        if shape != (heads,):
            raise ValueError(f"QK-clip: {name} has {heads} query heads, but max_logits has shape {shape}")
    if not max_logits:
        return {}
    devices = {value.device for value in max_logits.values()}
    where = devices.pop() if len(devices) == 1 else torch.device("cpu")
    flat = torch.cat([value.detach().to(where, torch.float64) for value in max_logits.values()]).cpu()
    return dict(zip(max_logits, flat.split([value.numel() for value in max_logits.values()])))


def _check_acts(query_key: QueryKey, value: Tensor, line: float) -> None:
    if query_key.trains and not query_key.adapted:
        return
    why = (
        "an adapter computes its query or key together with a weight that does not train, which would have to be scaled too: "
        "merge the adapter or leave the module out with modules=..."
        if query_key.adapted
        else "neither its query nor its key has a weight that trains and acts on it (frozen, or normed without a weight, "
        "which bounds the logits by itself): leave the module out with modules=... or raise the threshold"
    )
    raise ValueError(f"QK-clip: {query_key.name} has a logit of {float(value.max()):.4g} over {line:g}, and {why}")


def _shares(query_key: QueryKey, gamma: Tensor, balance: float) -> list[tuple[HeadRows, Tensor]]:
    """The factor of every head of every part; ``gamma`` is ``(heads,)`` float64."""
    if query_key.shared:
        gamma = gamma.min().expand(query_key.heads)
    groups = gamma.view(query_key.kv_heads, -1)
    if not query_key.query and not query_key.query_alone:
        return [(rows, groups.amin(dim=1)) for rows in query_key.key]
    common = groups.amax(dim=1) ** (1.0 - balance) if query_key.key else torch.ones_like(groups[:, 0])
    rest = (groups / common[:, None]).flatten()
    return [
        *((rows, rest) for rows in query_key.query),
        *((rows, common) for rows in query_key.key),
        *((rows, gamma) for rows in query_key.query_alone),
    ]


def _multiply(factors: dict[str, tuple[HeadRows, Tensor]], rows: HeadRows, by_head: Tensor) -> None:
    """Multiplies a parameter's factors: it may hold several parts, and several modules may use it."""
    ones = torch.ones(rows.parameter.shape[rows.dim], dtype=torch.float64, device="cpu")
    _, factor = factors.setdefault(rows.name, (rows, ones))
    heads = rows.rows.shape[0]
    factor[rows.rows.flatten()] *= by_head[:heads].repeat_interleave(rows.rows.shape[1])
