"""Coefficient sets of the Newton-Schulz iteration.

One step maps every singular value ``s`` of a matrix to ``a*s + b*s**3 + c*s**5`` and leaves the singular vectors alone;
a set is the list of such ``(a, b, c)``. Which set is used decides how close to 1 the singular values end, how small a
singular value is still lifted, and how much rounding the iteration bears: see :data:`NS_COEFFICIENTS`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

Triple: TypeAlias = tuple[float, float, float]
Scaling: TypeAlias = Literal["frobenius", "aol"]

# More is never useful (the slowest set here is done after ten) and is most often a learning rate in the wrong place.
MAX_STEPS = 100


@dataclass(frozen=True)
class ResolvedCoefficients:
    """The steps of an iteration, exactly ``len(steps)`` of them.

    Attributes:
        name: the set's name, or ``"custom"``.
        steps: ``(a, b, c)`` of every step in order.
        safety_factor: the Frobenius norm is multiplied by this before the division, so that singular values start at
            most at ``1 / safety_factor``.
        scaling: ``"frobenius"`` or ``"aol"``, see :class:`CoefficientSet`.
    """

    name: str
    steps: tuple[Triple, ...]
    safety_factor: float = 1.0
    scaling: Scaling = "frobenius"


@dataclass(frozen=True)
class CoefficientSet:
    """A named set with its source and its guarantees.

    Attributes:
        name: key in :data:`NS_COEFFICIENTS`.
        steps: ``(a, b, c)`` per step, as applied (a division that the source prescribes is already done). Asked for
            fewer steps, the first ones are used; asked for more, the last is repeated.
        source: paper and file that the numbers were checked against, and what was changed.
        default_steps: number of steps when none is asked for; the band holds for it.
        lower_bound: smallest normalised singular value that reaches the band. Smaller ones end below it, by
            about the product of the ``a``.
        singular_value_band: the least result for singular values in ``[lower_bound, 1]`` and the greatest for those in
            ``[0, 1]``, in exact arithmetic, rounded outwards to four decimals.
        min_steps: fewer steps are refused, since the result would be another method under this name.
        safety_factor: factor on the Frobenius norm (never on the coefficients).
        scaling: ``"frobenius"``, or ``"aol"`` for the row rescaling of almost-orthogonal layers (arXiv 2208.03160):
            each row of the (short-side-first) matrix is divided by the root of its absolute row sum in ``X X^T``.
            Singular values then start nearer to 1, but the result is the polar factor of the *rescaled* matrix, which
            differs from that of the input unless its rows are orthogonal.
    """

    name: str
    steps: tuple[Triple, ...]
    source: str
    default_steps: int
    lower_bound: float
    singular_value_band: tuple[float, float]
    min_steps: int = 1
    safety_factor: float = 1.0
    scaling: Scaling = "frobenius"

    def resolve(self, steps: int | None = None) -> ResolvedCoefficients:
        """The set cut or extended to ``steps`` (default: ``default_steps``).

        Raises:
            ValueError: when ``steps`` is below ``min_steps``.
        """
        count = self.default_steps if steps is None else steps
        if count < self.min_steps:
            raise ValueError(
                f"coefficient set {self.name!r} is a schedule of at least {self.min_steps} steps, got {count}: "
                f"ask for {self.min_steps} steps, or choose another set"
            )
        sequence = self.steps[:count] + self.steps[-1:] * (count - len(self.steps))
        return ResolvedCoefficients(self.name, sequence, self.safety_factor, self.scaling)


CoefficientSpec: TypeAlias = "str | CoefficientSet | ResolvedCoefficients | Triple | Sequence[Sequence[float]]"


def _deflate(steps: Sequence[Triple], factor: float, *, keep_last: bool) -> tuple[Triple, ...]:
    """Polynomials ``p(s / factor)``: room for singular values that rounding lifted up to ``factor`` times too high."""
    divided = tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in steps)
    return (*divided[:-1], steps[-1]) if keep_last else divided


_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# Minimax schedules use the whole interval up to the largest singular value, and their polynomials turn steeply just
# above it. In bfloat16 a rank-one matrix lands there by rounding alone: "cans" as published then overflows, "cubic5"
# reverses the sign of the direction. The division by 1.01 of the Polar Express paper cures both.
_CANS: tuple[Triple, ...] = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_CUBIC5: tuple[Triple, ...] = (
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)

_SETS = (
    CoefficientSet(
        name="jordan",
        steps=(_JORDAN,),
        source="Keller Jordan, kellerjordan.github.io/posts/muon; KellerJordan/Muon muon.py; torch.optim.Muon",
        default_steps=5,
        lower_bound=1e-2,
        singular_value_band=(0.6818, 1.2024),
    ),
    CoefficientSet(
        name="you",
        steps=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="You Jiacheng, x.com/YouJiacheng/status/1905861218138804534; KellerJordan/modded-nanogpt "
        "train_gpt_medium.py; microsoft/dion newton_schulz_triton.py",
        default_steps=5,
        lower_bound=1e-2,
        singular_value_band=(0.9777, 1.1451),
    ),
    CoefficientSet(
        name="polar_express",
        steps=_deflate(_POLAR_EXPRESS, 1.01, keep_last=True),
        source="Amsel, Persson, Musco, Gower, arXiv 2505.16932, algorithm 1 (degree 5, l = 1e-3), with its division by "
        "1.01 of all but the eighth polynomial",
        default_steps=5,
        lower_bound=1e-3,
        singular_value_band=(0.8461, 1.1236),
    ),
    CoefficientSet(
        name="polar_express_modded",
        steps=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        source="KellerJordan/modded-nanogpt train_gpt.py (num_iters=5, safety_factor=2e-2, cushion=2); microsoft/dion "
        "polar_express.py; the paper's construction with a cushion of 2e-2 gives them again. All but the last are divided "
        "by 1.02, and the norm is multiplied by 1.02 as well",
        default_steps=5,
        lower_bound=1e-3,
        singular_value_band=(0.8466, 1.1412),
        safety_factor=1.02,
    ),
    CoefficientSet(
        name="polar_express_dao",
        steps=_deflate(_POLAR_EXPRESS[:5], 1.05, keep_last=False),
        source="Dao-AILab/gram-newton-schulz coefficients.py: the first five of arXiv 2505.16932, all divided by 1.05",
        default_steps=5,
        lower_bound=5e-3,
        singular_value_band=(0.8460, 1.1236),
    ),
    CoefficientSet(
        name="cans",
        steps=_deflate(_CANS, 1.01, keep_last=True),
        source="Grishina, Smirnov, Rakhuba, arXiv 2506.10935; numbers as in NVIDIA-NeMo/Emerging-Optimizers "
        "muon_utils.py, which the Remez construction with l = 1e-3 gives again to 5e-4. All but the last are divided "
        "by 1.01 here: as published they overflow on rank-one input in bfloat16 and float16",
        default_steps=5,
        lower_bound=1e-3,
        singular_value_band=(0.8628, 1.1134),
    ),
    CoefficientSet(
        name="aol",
        steps=(
            (4.6051, -9.6552, 5.6769),
            (4.7505, -6.0861, 2.1790),
            (2.7763, -2.3190, 0.5523),
            (2.4231, -2.2861, 0.8193),
        ),
        source="thib-s/flash-newton-schulz newton_schulz_triton.py (since b536fa8); microsoft/dion "
        "newton_schulz_triton_fast. Its first version (4.0098, ...) gives negative singular values and is not offered",
        default_steps=4,
        lower_bound=1e-2,
        singular_value_band=(0.9409, 1.0501),
        min_steps=4,
        scaling="aol",
    ),
    CoefficientSet(
        name="deepseek_v4",
        steps=(_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        source="DeepSeek-V4 report, section 2 (hybrid Newton-Schulz: 8 + 2 steps); NVIDIA-NeMo/Emerging-Optimizers",
        default_steps=10,
        lower_bound=1e-3,
        singular_value_band=(0.9999, 1.0021),
        min_steps=10,
    ),
    CoefficientSet(
        name="cubic5",
        steps=_deflate(_CUBIC5, 1.01, keep_last=True),
        source="Huang, arXiv 2606.00371 (relaxed cubic, u = 1.3, l = 7e-3; its closed form gives the numbers again); "
        "NVIDIA-NeMo/Emerging-Optimizers muon_utils.py. c = 0 saves one product per step. All but the last are divided "
        "by 1.01 here: as published, rank-one input in bfloat16 comes out with its sign reversed",
        default_steps=5,
        lower_bound=7e-3,
        singular_value_band=(0.7482, 1.3001),
        min_steps=5,
    ),
)

NS_COEFFICIENTS: Mapping[str, CoefficientSet] = MappingProxyType({entry.name: entry for entry in _SETS})
"""All named sets by name. "jordan" is what most published Muon runs used and bears the most rounding."""


def _check_steps(steps: int | None) -> None:
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"ns_steps must be an integer number of Newton-Schulz steps, got {steps!r}")
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"ns_steps must be between 1 and {MAX_STEPS}, got {steps}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _as_triple(values: Sequence[Any], where: str) -> Triple:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or len(values) != 3:
        raise ValueError(f"{where} must be three numbers (a, b, c) of a*s + b*s**3 + c*s**5, got {values!r}")
    if not all(_is_number(value) and math.isfinite(value) for value in values):
        raise ValueError(f"{where} must be three finite numbers (a, b, c), got {tuple(values)!r}")
    a, b, c = (float(value) for value in values)
    if a <= 0:
        raise ValueError(f"{where}: a must be positive, it is the factor of small singular values, got {(a, b, c)}")
    return a, b, c


def _unknown_name(name: str) -> ValueError:
    close = difflib.get_close_matches(name.lower().replace("-", "_"), NS_COEFFICIENTS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(match) for match in close)}? " if close else ""
    return ValueError(f"unknown coefficient set {name!r}: {hint}known sets are {', '.join(sorted(NS_COEFFICIENTS))}")


def hashable(spec: CoefficientSpec) -> CoefficientSpec:
    """Coefficients as a key of a cache: lists, which a checkpoint in JSON makes of tuples, as tuples again."""
    if isinstance(spec, list):
        return tuple(tuple(row) if isinstance(row, list) else row for row in spec)
    return spec


def resolve_coefficients(spec: CoefficientSpec, steps: int | None = None) -> ResolvedCoefficients:
    """Turns what a user gives into the exact steps of an iteration.

    Args:
        spec: a name in :data:`NS_COEFFICIENTS`; a :class:`CoefficientSet`; one ``(a, b, c)``, used in every step; or a
            sequence of them, used in order and never cut, repeated or cycled. Lists do for tuples.
        steps: number of steps. ``None``: the set's ``default_steps``, 5 for one ``(a, b, c)``, a sequence's length.

    Raises:
        TypeError: ``steps`` is not an integer.
        ValueError: unknown name (with close matches and all names), numbers that are no coefficients, ``steps`` out of
            range, or a number of steps that the set or the sequence does not have.
    """
    _check_steps(steps)
    if isinstance(spec, str):
        if spec not in NS_COEFFICIENTS:
            raise _unknown_name(spec)
        return NS_COEFFICIENTS[spec].resolve(steps)
    if isinstance(spec, CoefficientSet):
        return spec.resolve(steps)
    if isinstance(spec, ResolvedCoefficients):
        resolved = spec
    elif not isinstance(spec, Sequence) or len(spec) == 0:
        raise ValueError(f"coefficients must be a name, (a, b, c) or a sequence of (a, b, c), got {spec!r}")
    elif all(_is_number(value) for value in spec):
        triple = _as_triple(cast("Sequence[Any]", spec), "coefficients")
        return ResolvedCoefficients("custom", (triple,) * (5 if steps is None else steps))
    else:
        rows = enumerate(cast("Sequence[Any]", spec))
        resolved = ResolvedCoefficients("custom", tuple(_as_triple(row, f"coefficients[{i}]") for i, row in rows))
    if steps is not None and steps != len(resolved.steps):
        raise ValueError(
            f"{len(resolved.steps)} coefficient tuples were given for {steps} steps: "
            f"set ns_steps={len(resolved.steps)}, or give {steps} tuples"
        )
    return resolved
