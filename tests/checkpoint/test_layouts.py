"""Resumed is uninterrupted: every rule, every way of saving, other numbers of ranks and other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Worlds
from saved_runs import RULE_NAMES, resumed_run, saved_run
from torch import Tensor
from zoo import assert_close

EXTRA = pytest.mark.products


def run(worlds: Worlds, function: Any, ranks: int, **kwargs: Any) -> list[dict[str, Any]]:
    return [function(**kwargs)] if kwargs["layout"] == "single" else worlds[ranks].run(function, **kwargs)


def check(
    worlds: Worlds,
    folder: Path,
    saver: tuple[str, int, str],
    loader: tuple[str, int, str],
    tolerance: float | None,
    **kwargs: Any,
) -> None:
    """Saves under one layout, resumes under another; all ranks must agree, on the weights loaded and on the last."""
    twice = kwargs.pop("twice", False)
    saved = run(worlds, saved_run, saver[1], layout=saver[0], how=saver[2], folder=str(folder), **kwargs)
    resumed = run(
        worlds, resumed_run, loader[1], layout=loader[0], how=loader[2], folder=str(folder), twice=twice, **kwargs
    )
    wanted: dict[str, Tensor] = saved[0]["weights"]
    assert {r["saved"] for r in saved} == {r["loaded"] for r in resumed}, "weights after loading are the saved ones"
    assert all(r["keys"] == saved[0]["keys"] for r in saved), "the same keys on every rank"
    for result in resumed:
        if tolerance is None:
            assert [n for n in wanted if not torch.equal(wanted[n], result["weights"][n])] == []
        else:
            assert_close(result["weights"], wanted, tolerance)


def same_layout_cases() -> list[Any]:
    """Every rule at every moment; which layout and way of saving goes with it moves on from case to case."""
    ways = [("ddp", "file"), ("fsdp2", "sharded"), ("fsdp2", "full"), ("single", "file"), ("fsdp2", "flat")]
    cases = []
    for index, rule in enumerate(RULE_NAMES):
        for moment, at in enumerate((0, 1, 7)):
            for position, (layout, how) in enumerate(ways):
                chosen = (index + moment) % len(ways) == position or (at == 7 and position < 2)
                marks = () if chosen else (EXTRA,)
                cases.append(pytest.param(rule, at, layout, how, marks=marks, id=f"{rule}-{at}-{layout}-{how}"))
    return cases


@pytest.mark.parametrize(("rule", "at", "layout", "how"), same_layout_cases())
@pytest.mark.first_tier("layout how", "at")
def test_same_layout_bit_for_bit(worlds: Worlds, tmp_path: Path, rule: str, at: int, layout: str, how: str) -> None:
    """Step 7 is amid a period; gradients are left on, two parameters are frozen, two never have a gradient."""
    check(worlds, tmp_path, (layout, 2, how), (layout, 2, how), None, rule=rule, at=at)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (("ddp", 2, "file"), ("single", 1, "file")),
        (("single", 1, "file"), ("ddp", 2, "file")),
        (("ddp", 2, "file"), ("fsdp2", 2, "file")),
        (("fsdp2", 2, "full"), ("single", 1, "file")),
        (("fsdp2", 2, "full"), ("ddp", 2, "file")),
        (("single", 1, "full"), ("fsdp2", 2, "full")),
        (("ddp", 2, "sharded"), ("ddp", 2, "sharded")),
        (("ddp", 2, "sharded"), ("fsdp2", 2, "sharded")),
        (("fsdp2", 2, "async"), ("ddp", 2, "sharded")),
    ],
    ids=lambda run: "-".join(map(str, run)),
)
@pytest.mark.parametrize(("rule", "at"), [("muon", 1), ("soap-staggered", 7), ("shampoo-staggered", 3), ("normuon", 0)])
@pytest.mark.first_tier("saver", "rule")
def test_other_layout(
    worlds: Worlds, tmp_path: Path, rule: str, at: int, saver: tuple[str, int, str], loader: tuple[str, int, str]
) -> None:
    check(worlds, tmp_path, saver, loader, 1e-6, rule=rule, at=at, dtype="float64")


def size_cases() -> list[Any]:
    pairs = [
        (("fsdp2", 4, "sharded"), ("fsdp2", 2, "sharded")),
        (("fsdp2", 2, "sharded"), ("fsdp2", 3, "sharded")),
        (("fsdp2", 3, "full"), ("fsdp2", 4, "full")),
        (("hsdp", 4, "sharded"), ("fsdp2", 4, "sharded")),
        (("fsdp2", 4, "flat"), ("hsdp", 4, "flat")),
        (("ddp", 4, "file"), ("ddp", 3, "file")),
        (("hsdp", 4, "full"), ("single", 1, "file")),
        (("hsdp", 2, "full"), ("ddp", 2, "file")),
        (("fsdp2", 2, "sharded"), ("fsdp2", 4, "sharded")),
        (("single", 1, "file"), ("ddp", 4, "file")),
    ]
    cases = []
    for index, rule in enumerate(("muon", "normuon", "soap", "soap-staggered", "shampoo-staggered", "klshampoo")):
        for position, (saver, loader) in enumerate(pairs):
            marks = () if position % 6 == index else (EXTRA,)
            if position not in (1, 5, 6):  # more ranks, fewer, and one: of each way of saving one
                marks = (*marks, pytest.mark.second_tier)
            at = (3, 0, 7, 1)[(index + position) % 4]
            name = "-".join(map(str, (rule, at, *saver, *loader)))
            cases.append(pytest.param(rule, at, saver, loader, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("rule", "at", "saver", "loader"), size_cases())
def test_other_number_of_ranks(
    worlds: Worlds, tmp_path: Path, rule: str, at: int, saver: tuple[str, int, str], loader: tuple[str, int, str]
) -> None:
    check(worlds, tmp_path, saver, loader, 1e-6, rule=rule, at=at, dtype="float64")


@pytest.mark.parametrize("rule", ["muon", "soap-staggered"])
@pytest.mark.parametrize(("layout", "how"), [("ddp", "file"), ("fsdp2", "sharded"), ("fsdp2", "full")])
@pytest.mark.first_tier("layout", "rule")
def test_bfloat16_weights_keep_what_their_dtype_cannot_hold(
    worlds: Worlds, tmp_path: Path, rule: str, layout: str, how: str
) -> None:
    check(worlds, tmp_path, (layout, 2, how), (layout, 2, how), None, rule=rule, at=3, dtype="bfloat16")


@pytest.mark.parametrize(("layout", "how"), [("ddp", "file"), ("fsdp2", "sharded"), ("fsdp2", "full")])
@pytest.mark.first_tier("layout")
def test_loading_twice_into_a_live_optimizer(worlds: Worlds, tmp_path: Path, layout: str, how: str) -> None:
    """Nothing cached outlives a load, and the first step after it meets parameters without a gradient."""
    check(worlds, tmp_path, (layout, 2, how), (layout, 2, how), None, rule="soap-staggered", at=3, twice=True)
