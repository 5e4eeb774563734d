"""The coefficient table against its sources' constructions, its bands against its polynomials, and its errors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from torch.optim import _muon

from hf_emopt.linalg.coefficients import NS_COEFFICIENTS, CoefficientSet, ResolvedCoefficients, resolve_coefficients

Triple = tuple[float, float, float]

JORDAN = (3.4445, -4.7750, 2.0315)
# Dense at both ends: minimax polynomials are steep near 0 and near 1.
SIGMA = np.unique(np.concatenate([np.geomspace(1e-9, 1, 400_001), np.linspace(0, 1, 400_001)[1:]]))


def evaluate(steps: tuple[Triple, ...], value: np.ndarray | float) -> np.ndarray | float:
    """The composition written out, without the Horner form of the package."""
    for a, b, c in steps:
        value = a * value + b * value**3 + c * value**5
    return value


def response(resolved: ResolvedCoefficients, sigma: Any) -> Any:
    return evaluate(resolved.steps, sigma / resolved.safety_factor)


def minimax_quintic(low: float, high: float) -> tuple[Triple, float]:
    """Odd quintic nearest to 1 on [low, high] and its error, by Remez exchange."""
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(100):
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        root = math.sqrt(9 * b * b - 20 * a * c)
        moved = np.sqrt(np.array([-3 * b - root, -3 * b + root]) / (10 * c))  # extrema of the new polynomial
        if np.abs(moved - inner).max() < 1e-14:
            break
        inner = moved
    return (float(a), float(b), float(c)), abs(float(error))


def polar_express(count: int, cushion: float, safety_factor: float = 1.0) -> list[Triple]:
    """Construction of arXiv 2505.16932, section 3, with l = 1e-3; all but the last are divided by the safety factor."""
    low, high, steps = 1e-3, 1.0, []
    for index in range(count):
        triple, _ = minimax_quintic(max(low, cushion * high), high)
        # A cushioned polynomial is not centred on 1 at the true ends of the interval; scale it so that it is.
        scale = 2 / (evaluate((triple,), low) + evaluate((triple,), high)) if cushion * high > low else 1.0
        factor = safety_factor if index < count - 1 else 1.0
        triple = (triple[0] * scale / factor, triple[1] * scale / factor**3, triple[2] * scale / factor**5)
        steps.append(triple)
        low = float(evaluate((triple,), low))
        high = 2 - low
    return steps


def undeflated(name: str, factor: float, *, keep_last: bool) -> list[Triple]:
    steps = NS_COEFFICIENTS[name].steps
    raw = [(a * factor, b * factor**3, c * factor**5) for a, b, c in steps]
    return [*raw[:-1], steps[-1]] if keep_last else raw


def test_polar_express_is_the_papers_construction() -> None:
    derived = polar_express(5, cushion=0.02407327424182761)
    np.testing.assert_allclose(undeflated("polar_express", 1.01, keep_last=True)[:5], derived, rtol=1e-11)
    np.testing.assert_allclose(undeflated("polar_express_dao", 1.05, keep_last=False), derived, rtol=1e-11)
    assert NS_COEFFICIENTS["polar_express"].steps[-1] == (1.875, -1.25, 0.375)


def test_polar_express_modded_is_the_same_with_its_own_settings() -> None:
    derived = polar_express(5, cushion=2e-2, safety_factor=1.02)
    np.testing.assert_allclose(NS_COEFFICIENTS["polar_express_modded"].steps, derived, rtol=1e-9)


def test_cans_is_a_chain_of_minimax_polynomials() -> None:
    low, high = 1e-3, 1.0
    for published in undeflated("cans", 1.01, keep_last=True):
        derived, error = minimax_quintic(low, high)
        np.testing.assert_allclose(published, derived, atol=1e-3, rtol=0)
        low, high = 1 - error, 1 + error


def test_cubic5_is_the_closed_form_of_the_paper() -> None:
    """arXiv 2606.00371, section 2.2: the cubic with p(low) = p(high) and maximum u = 1.3, from low = 7e-3."""
    low, high, top = 7e-3, 1.0, 1.3
    for a, b, c in undeflated("cubic5", 1.01, keep_last=True):
        mean_square = (high * high + high * low + low * low) / 3
        derived = (1.5 * top / math.sqrt(mean_square), -0.5 * top / mean_square**1.5)
        np.testing.assert_allclose((a, b), derived, atol=1e-6, rtol=0)
        assert c == 0.0
        low, high = derived[0] * low + derived[1] * low**3, top


def test_deepseek_v4_ends_with_two_steps_that_fix_one() -> None:
    resolved = resolve_coefficients("deepseek_v4", 10)
    assert resolved.steps == (JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2
    a, b, c = resolved.steps[-1]
    assert a + b + c == 1.0
    assert a + 3 * b + 5 * c == 0.0  # the slope at 1: the fixed point attracts


def test_sets_that_divide_nothing() -> None:
    assert NS_COEFFICIENTS["jordan"].steps == ((_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C),)
    np.testing.assert_allclose(np.array(NS_COEFFICIENTS["you"].steps).sum(0), (17.4906, -24.9840, 10.2742), atol=1e-9)
    assert NS_COEFFICIENTS["polar_express_modded"].safety_factor == 1.02
    assert [entry.name for entry in NS_COEFFICIENTS.values() if entry.scaling == "aol"] == ["aol"]
    assert [entry.name for entry in NS_COEFFICIENTS.values() if entry.safety_factor != 1] == ["polar_express_modded"]


@pytest.mark.parametrize("name", NS_COEFFICIENTS)
def test_band_is_that_of_the_polynomials(name: str) -> None:
    entry = NS_COEFFICIENTS[name]
    steps = entry.resolve().steps
    assert len(steps) == entry.default_steps
    result = evaluate(steps, SIGMA / entry.safety_factor)
    assert isinstance(result, np.ndarray)
    low, high = entry.singular_value_band
    least, greatest = result[entry.lower_bound <= SIGMA].min(), result.max()
    # Inside the band, and the band no wider than its four decimals.
    assert 0 <= least - low < 1.01e-4
    assert 0 <= high - greatest < 1.01e-4
    # Below the lower bound the result may be small but never of the other sign.
    assert result.min() > 0


@pytest.mark.parametrize("name", NS_COEFFICIENTS)
def test_lower_bound_is_not_claimed_in_vain(name: str) -> None:
    """A tenth of the bound misses the band: the bound is a property of the set, not a guess far too careful."""
    entry = NS_COEFFICIENTS[name]
    if name == "deepseek_v4":  # eight steps of slope 3.4 reach further down than any input has digits
        assert response(entry.resolve(), 1e-5) < entry.singular_value_band[0]
    else:
        assert response(entry.resolve(), entry.lower_bound / 10) < entry.singular_value_band[0]


@pytest.mark.parametrize("name", NS_COEFFICIENTS)
def test_more_steps_stay_in_the_band(name: str) -> None:
    entry = NS_COEFFICIENTS[name]
    sigma = SIGMA[entry.lower_bound <= SIGMA]
    for extra in (1, 2, 7):
        resolved = entry.resolve(entry.default_steps + extra)
        assert len(resolved.steps) == entry.default_steps + extra
        assert resolved.steps[-1] == entry.steps[-1] or name == "polar_express"
        result = response(resolved, sigma)
        assert result.min() >= entry.singular_value_band[0]
        assert result.max() <= entry.singular_value_band[1]


def test_every_set_names_its_source() -> None:
    for name, entry in NS_COEFFICIENTS.items():
        assert entry.name == name
        assert len(entry.source) > 20


def test_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        NS_COEFFICIENTS["jordan"] = NS_COEFFICIENTS["you"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        NS_COEFFICIENTS["jordan"].default_steps = 3  # type: ignore[misc]


def test_fewer_and_more_steps() -> None:
    express = NS_COEFFICIENTS["polar_express"].steps
    assert resolve_coefficients("polar_express").steps == express[:5]
    assert resolve_coefficients("polar_express", 3).steps == express[:3]
    assert resolve_coefficients("polar_express", 10).steps == (*express, express[-1], express[-1])
    assert resolve_coefficients("jordan", 7).steps == (JORDAN,) * 7
    assert resolve_coefficients("deepseek_v4", 11).steps[-3:] == ((2.0, -1.5, 0.5),) * 3


def test_user_coefficients() -> None:
    assert resolve_coefficients((3, -4.5, 2), 2).steps == ((3.0, -4.5, 2.0),) * 2
    assert resolve_coefficients([3.0, -4.5, 2.0]).steps == ((3.0, -4.5, 2.0),) * 5
    two = [[3.0, -4.5, 2.0], (2.0, -1.5, 0.5)]
    resolved = resolve_coefficients(two)
    assert resolved.steps == ((3.0, -4.5, 2.0), (2.0, -1.5, 0.5))
    assert resolve_coefficients(two, 2) == resolved
    assert hash(resolved) == hash(resolve_coefficients(resolved, 2))
    assert resolve_coefficients(dataclasses.replace(NS_COEFFICIENTS["you"], safety_factor=1.1), 5) == (
        ResolvedCoefficients("you", NS_COEFFICIENTS["you"].steps, 1.1)
    )


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("polarexpress", "polar_express"), ("Jordan", "jordan"), ("deepseek-v4", "deepseek_v4"), ("cubic", "cubic5")],
)
def test_unknown_name_suggests_and_lists(name: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{suggestion}'") as caught:
        resolve_coefficients(name, 5)
    assert all(known in str(caught.value) for known in NS_COEFFICIENTS)


def test_unknown_name_without_a_near_one() -> None:
    with pytest.raises(ValueError, match="unknown coefficient set 'zzz': known sets are aol, cans"):
        resolve_coefficients("zzz", 5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ((1.0, 2.0), "three numbers"),
        ((1.0, float("nan"), 2.0), "finite"),
        ((1.0, 2.0, float("inf")), "finite"),
        ((0.0, 2.0, 1.0), "a must be positive"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], r"coefficients\[1\]"),
        ([(1.0, 2.0, 3.0), "abc"], r"coefficients\[1\]"),
        ([(True, 2.0, 3.0)], r"coefficients\[0\]"),
        ([], "name"),
        (None, "name"),
        (3.4445, "name"),
    ],
)
def test_bad_coefficients(spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_coefficients(spec, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [0, -1, 101])
def test_steps_out_of_range(steps: int) -> None:
    with pytest.raises(ValueError, match="ns_steps must be between 1 and 100"):
        resolve_coefficients("jordan", steps)


@pytest.mark.parametrize("steps", [5.0, True, "5"])
def test_steps_of_another_type(steps: object) -> None:
    with pytest.raises(TypeError, match="ns_steps must be an integer"):
        resolve_coefficients("jordan", steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "steps", "needed"), [("deepseek_v4", 5, 10), ("aol", 3, 4), ("cubic5", 4, 5)])
def test_a_schedule_is_not_cut_short(name: str, steps: int, needed: int) -> None:
    with pytest.raises(ValueError, match=f"{name}.*at least {needed} steps, got {steps}: ask for {needed}"):
        resolve_coefficients(name, steps)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_sequence_is_used_whole(steps: int) -> None:
    with pytest.raises(ValueError, match=f"2 coefficient tuples were given for {steps} steps: set ns_steps=2"):
        resolve_coefficients([JORDAN, JORDAN], steps)


def test_resolved_safety_factor_divides_the_singular_value() -> None:
    entry = CoefficientSet("x", ((2.0, -1.0, 0.25),), "by hand, for this test", 1, 0.1, (0.0, 2.0), safety_factor=2.0)
    assert response(entry.resolve(1), 1.0) == 2 * 0.5 - 0.5**3 + 0.25 * 0.5**5
