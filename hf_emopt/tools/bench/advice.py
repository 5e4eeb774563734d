"""Which setting would be faster: alternatives of a measured step, measured in turn, and what the difference says.

Nothing is guessed: an alternative that is not measured is not spoken of, and a difference within the noise is called one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_emopt.distributed.assignment import BUCKET_VARIABLE, planned_sizes
from hf_emopt.tools.bench.step import Maker, Row, Settings, attempt, counted, reason
from hf_emopt.tools.bench.step_optimizers import MATRIX_OPTIMIZERS


@dataclass(frozen=True)
class Alternative:
    """Another setting than the measured one: what a user would set, and whether it only cuts the plan into other buckets."""

    name: str
    settings: Settings
    buckets: bool = False


@dataclass(frozen=True)
class Verdict:
    """A measured alternative and the step that it replaces; milliseconds, medians.

    Attributes:
        margin: the noise of a difference: two standard errors of the difference of medians, at least 1 % of a step.
        error: why it could not be measured, or empty.
    """

    optim: str
    setting: str
    before: float
    after: float
    margin: float
    error: str = ""

    @property
    def word(self) -> str:
        """``"faster"``, ``"slower"``, ``"no different"`` or ``"not measured"``."""
        if self.error:
            return "not measured"
        change = self.after - self.before
        return "faster" if change < -self.margin else "slower" if change > self.margin else "no different"

    def __str__(self) -> str:
        if self.error:
            return f"{self.optim}: {self.setting}: not measured ({self.error})"
        change = (self.after - self.before) / self.before
        return (
            f"{self.optim}: {self.setting}: {self.word}, {self.before:.2f} -> {self.after:.2f} ms a step ({change:+.1%}; "
            f"noise {self.margin / self.before:.1%})"
        )


def alternatives(name: str, settings: Settings, world_size: int, device: torch.device) -> list[Alternative]:
    """Other settings of an optimizer of this package: buckets, overlap, layout, form of the orthogonalization, schedule."""
    if name not in MATRIX_OPTIMIZERS:
        return []
    found = []

    def option(**changed: Any) -> None:
        text = ", ".join(f"{k}={v}" for k, v in changed.items())
        found.append(Alternative(text, replace(settings, options={**settings.options, **changed})))

    factors = name in ("soap", "shampoo", "kl_shampoo")
    offloads = settings.options.get("offload_state") is not None
    sizes = planned_sizes(factors, [dict(settings.options)], offloads, world_size)
    overlaps = settings.layout == "ddp" and world_size > 1
    overlaps &= name == "muon-overlap" or bool(settings.options.get("overlap_param_gather"))
    # In the order of the model there are no runs of one shape.
    largest = sizes.together if overlaps else sizes.alike
    for factor in (0.5, 2.0):
        numel = str(int(largest * factor))
        other_buckets = replace(settings, environment={**settings.environment, BUCKET_VARIABLE: numel})
        found.append(Alternative(f"{BUCKET_VARIABLE}={numel}", other_buckets, buckets=True))
    movable = world_size > 1 and name != "muon-overlap"
    if settings.layout == "ddp" and movable:
        option(overlap_param_gather=not settings.options.get("overlap_param_gather", False))
    if settings.layout in ("ddp", "fsdp2") and movable:
        other = "fsdp2" if settings.layout == "ddp" else "ddp"
        kept = {k: v for k, v in settings.options.items() if k != "overlap_param_gather"}
        found.append(Alternative(f"layout {other}", replace(settings, layout=other, options=kept)))
    if name in ("muon", "muon-overlap", "normuon"):
        from hf_emopt.linalg.symmetric_products import kernels_pay

        if kernels_pay(device) and settings.options.get("ns_dtype") is None:
            option(ns_dtype="bfloat16")  # which has the standard form alone
    else:
        for refresh in ("staggered", "synchronous"):
            if refresh != settings.options.get("refresh", "staggered"):
                option(refresh=refresh)
    return found


def compare(optim: str, setting: str, before: Row, after: Row) -> Verdict:
    """The verdict on two measured rows. Means of steps are compared where the optimizer's steps differ by schedule."""
    if "step" not in after:
        return Verdict(optim, setting, counted(before), math.nan, math.nan, reason(after))
    error = math.hypot(_standard_error(before["step_all"]), _standard_error(after["step_all"]))
    return Verdict(optim, setting, counted(before), counted(after), max(2 * error, 0.01 * counted(before)))


def _standard_error(times: Sequence[float]) -> float:
    """Of the median, about 1.25 of the mean's."""
    if len(times) < 2:
        return math.inf  # one step says nothing of the noise
    return 1.25 * statistics.stdev(times) / math.sqrt(len(times))


def measure_alternatives(
    rows: Sequence[Row], makers: Mapping[str, Maker], settings: Settings, world_size: int, device: torch.device
) -> list[Verdict]:
    """Measures and judges the alternatives of every row of an optimizer of this package. All ranks call it.

    Other buckets are measured only where they make another plan than the row's: the same step twice differs by noise.
    """
    verdicts = []
    for row in rows:
        name = row["optimizer_name"]
        if "step" not in row:
            continue
        for alternative in alternatives(name, settings, world_size, device):
            same = row["plan"] if alternative.buckets else None
            measured = attempt(name, makers[name], alternative.settings, device, alternative.name, same)
            verdicts.append(compare(name, alternative.name, row, measured))
    return verdicts


def exposed_share(
    rows: Sequence[Row], makers: Mapping[str, Maker], settings: Settings, device: torch.device
) -> dict[str, dict[int, float]]:
    """The share of a step that the optimizer adds, by optimizer and tokens of a rank: as measured, and with twice as many."""
    found: dict[str, dict[int, float]] = {}
    double = replace(settings, tokens=2 * settings.tokens)
    measured = {r["optimizer_name"]: r for r in rows if "step" in r}
    names, bare = [name for name in measured if name in MATRIX_OPTIMIZERS], measured.get("none")
    if not names or bare is None:
        return found
    bare_double = attempt("none", None, double, device, label=f"{double.tokens} tokens")
    for name in names:
        found[name] = {settings.tokens: _share(measured[name], bare)}
        twice = attempt(name, makers[name], double, device, label=f"{double.tokens} tokens")
        if "step" in twice and "step" in bare_double:
            found[name][double.tokens] = _share(twice, bare_double)
    return found


def _share(row: Row, bare: Row) -> float:
    return max(0.0, (counted(row) - bare["step"]) / counted(row))


def report(verdicts: Sequence[Verdict], shares: Mapping[str, Mapping[int, float]]) -> str:
    """The verdicts for a user, the best first for each optimizer, and the settings that change nothing."""
    lines = []
    for optim in dict.fromkeys(v.optim for v in verdicts):
        mine = [v for v in verdicts if v.optim == optim]
        faster = sorted((v for v in mine if v.word == "faster"), key=lambda v: v.after)
        advice = "none of the alternatives measured is faster"
        if faster:
            best = faster[0]
            advice = f"set {best.setting} (measured: {best.before:.2f} -> {best.after:.2f} ms a step)"
        lines += [f"{optim}: {advice}", *(f"  {v}" for v in mine)]
    for optim, by_tokens in shares.items():
        text = ", ".join(f"{share:.1%} of a step at {tokens:,} tokens a rank" for tokens, share in by_tokens.items())
        (first, *rest) = by_tokens.values()
        small = ": more tokens a step would hide it" if rest and first > 0.05 and rest[0] < 0.75 * first else ""
        lines.append(f"{optim} adds {text}{small}")
    return "\n".join(lines)
