"""Verdicts on measured alternatives: what counts as faster, and what is offered."""

from __future__ import annotations

import pytest
import torch

from hf_emopt.tools.bench.advice import Verdict, alternatives, compare, exposed_share, report
from hf_emopt.tools.bench.step import Row, Settings

CPU = torch.device("cpu")


def row(*times: float) -> Row:
    ordered = sorted(times)
    return {"step": ordered[len(ordered) // 2], "step_all": list(times), "step_mean": sum(times) / len(times)}


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ((100.0, 101.0, 99.0), (90.0, 91.0, 89.0), "faster"),
        ((100.0, 101.0, 99.0), (110.0, 111.0, 109.0), "slower"),
        ((100.0, 100.0, 100.0), (99.5, 99.5, 99.5), "no different"),  # below 1 %
        ((100.0, 130.0, 70.0), (90.0, 120.0, 60.0), "no different"),  # below the noise
    ],
)
def test_a_difference_counts_from_the_noise_on(before, after, word: str) -> None:
    assert compare("muon", "layout ddp", row(*before), row(*after)).word == word


def test_the_margin_is_two_standard_errors_of_the_medians() -> None:
    """Of 4 steps with a deviation of 2 each: 1.25 * 2 / 2 for either, so 2 sqrt(2) 1.25."""
    times = (100.0, 100.0 + 12**0.5, 100.0 - 12**0.5, 100.0)
    times = tuple(100.0 + (t - 100.0) * 2 / 8**0.5 for t in times)
    found = compare("muon", "x", row(*times), row(*times))
    assert found.margin == pytest.approx(2 * 2**0.5 * 1.25)


def test_one_step_says_nothing() -> None:
    assert compare("muon", "x", row(100.0), row(50.0)).word == "no different"


def test_steps_that_differ_by_schedule_are_compared_by_their_means() -> None:
    rows = row(10.0, 10.0, 100.0), row(30.0, 30.0, 30.0)
    before, after = ({**r, "scheduled": True} for r in rows)
    assert (compare("soap", "x", before, after).before, compare("soap", "x", before, after).after) == (40.0, 30.0)
    assert (compare("muon", "x", *rows).before, compare("muon", "x", *rows).after) == (10.0, 30.0)


def test_what_cannot_be_measured_says_why() -> None:
    found = compare("muon", "layout fsdp2", row(1.0, 1.0), {"error": "OutOfMemoryError: 3 GiB\nmore"})
    assert found.word == "not measured"
    assert "OutOfMemoryError: 3 GiB" in str(found)


def names(optim: str, settings: Settings, world: int = 2) -> list[str]:
    return [a.name for a in alternatives(optim, settings, world, CPU)]


def test_what_is_offered() -> None:
    half, twice = "HF_EMOPT_MAX_BUCKET_NUMEL=67108864", "HF_EMOPT_MAX_BUCKET_NUMEL=268435456"
    assert names("muon", Settings(layout="ddp")) == [half, twice, "overlap_param_gather=True", "layout fsdp2"]
    assert names("muon", Settings(layout="fsdp2")) == [half, twice, "layout ddp"]
    assert names("muon", Settings(layout="single"), 1) == [half, twice]
    for overlapping in ("muon-overlap", "muon"):  # whose buckets are smaller
        options = {} if overlapping == "muon-overlap" else {"overlap_param_gather": True}
        sizes = names(overlapping, Settings(layout="ddp", options=options))[:2]
        assert sizes == ["HF_EMOPT_MAX_BUCKET_NUMEL=33554432", "HF_EMOPT_MAX_BUCKET_NUMEL=134217728"]
    narrow = Settings(layout="single", options={"state_dtype": "bfloat16"})
    assert names("muon", narrow, 1)[0] == "HF_EMOPT_MAX_BUCKET_NUMEL=33554432"
    assert names("soap", Settings(layout="fsdp2"))[-2:] == ["layout ddp", "refresh=synchronous"]
    assert names("adamw", Settings(layout="ddp")) == []


def test_an_alternative_changes_one_thing() -> None:
    settings = Settings(layout="ddp", options={"overlap_param_gather": True, "ns_steps": 4})
    found = {a.name: a.settings for a in alternatives("muon", settings, 2, CPU)}
    assert found["overlap_param_gather=False"].options == {"overlap_param_gather": False, "ns_steps": 4}
    other = found["layout fsdp2"]
    assert (other.layout, other.options) == ("fsdp2", {"ns_steps": 4})  # which has no such overlap


def test_the_best_is_named_first() -> None:
    verdicts = [
        Verdict("muon", "layout ddp", 100.0, 95.0, 1.0),
        Verdict("muon", "overlap_param_gather=True", 100.0, 90.0, 1.0),
        Verdict("soap", "layout ddp", 100.0, 100.5, 1.0),
    ]
    lines = report(verdicts, {"muon": {8192: 0.2, 16384: 0.1}, "soap": {8192: 0.02}}).splitlines()
    assert lines[0].startswith("muon: set overlap_param_gather=True")
    assert "soap: none of the alternatives measured is faster" in lines
    shares = "20.0% of a step at 8,192 tokens a rank, 10.0% of a step at 16,384 tokens a rank"
    assert lines[-2] == f"muon adds {shares}: more tokens a step would hide it"
    assert lines[-1] == "soap adds 2.0% of a step at 8,192 tokens a rank"


def test_no_share_without_a_step_without_an_optimizer() -> None:
    assert exposed_share([{"optimizer_name": "muon", "step": 1.0}], {}, Settings(), CPU) == {}
