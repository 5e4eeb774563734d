"""Checkpoints of moments in fewer bits, and of state that lies on the host."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Worlds
from saved_runs import resumed_run, saved_run
from zoo import assert_close

from hf_emopt.formats import moments

NO_LIBRARY = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
INT8 = pytest.param("int8", marks=NO_LIBRARY)


def every_size(function: Any, **kwargs: Any) -> Any:
    """Calls the function with 8-bit state also for small matrices, of which the models here are made."""
    least = moments._MIN_NUMEL, moments._MIN_ROW
    moments._MIN_NUMEL, moments._MIN_ROW = 1, 1
    try:
        return function(**kwargs)
    finally:
        moments._MIN_NUMEL, moments._MIN_ROW = least


def saver(**kwargs: Any) -> Any:
    return every_size(saved_run, **kwargs)


def loader(**kwargs: Any) -> Any:
    return every_size(resumed_run, **kwargs)


def check(
    worlds: Worlds,
    folder: Path,
    one: tuple[str, str],
    other: tuple[str, str],
    tolerance: float | None = None,
    saving: dict[str, Any] | None = None,
    loading: dict[str, Any] | None = None,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Saves under one layout, resumes under another, with options of each; bit for bit without a tolerance."""

    def run(function: Any, layout: str, how: str, options: dict[str, Any] | None) -> list[dict[str, Any]]:
        given = {**kwargs, **(options or {}), "layout": layout, "how": how, "folder": str(folder)}
        return [function(**given)] if layout == "single" else worlds[2].run(function, **given)

    saved, resumed = run(saver, *one, saving), run(loader, *other, loading)
    assert {r["saved"] for r in saved} == {r["loaded"] for r in resumed}
    for result in resumed:
        wanted = saved[0]["weights"]
        if tolerance is None:
            assert [name for name in wanted if not torch.equal(wanted[name], result["weights"][name])] == []
        else:
            assert_close(result["weights"], wanted, tolerance)
    return resumed


@pytest.mark.parametrize("state_dtype", ["bfloat16", INT8])
@pytest.mark.parametrize(
    ("rule", "layout", "how"),
    [
        ("muon", "single", "file"),
        ("muon", "ddp", "file"),
        ("muon", "fsdp2", "sharded"),
        ("muon", "fsdp2", "full"),
        ("muon", "hsdp", "sharded"),
        ("soap-staggered", "ddp", "file"),
        ("soap-staggered", "fsdp2", "sharded"),
        ("shampoo", "fsdp2", "full"),
    ],
)
@pytest.mark.first_tier("layout", "state_dtype")
def test_resumed_is_uninterrupted(
    worlds: Worlds, tmp_path: Path, rule: str, layout: str, how: str, state_dtype: str
) -> None:
    resumed = check(worlds, tmp_path, (layout, how), (layout, how), rule=rule, at=3, state_dtype=state_dtype)
    kinds = {d for result in resumed for state in result["dtypes"].values() for d in state.values()}
    assert ("torch.uint8" if state_dtype == "int8" else "torch.bfloat16") in kinds


@NO_LIBRARY
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(("ddp", "file"), ("single", "file"), marks=pytest.mark.second_tier),
        pytest.param(("single", "file"), ("fsdp2", "file"), marks=pytest.mark.second_tier),
        (("fsdp2", "full"), ("ddp", "file")),
        (("ddp", "sharded"), ("fsdp2", "sharded")),
    ],
)
def test_eight_bits_are_the_same_in_another_layout(
    worlds: Worlds, tmp_path: Path, one: tuple[str, str], other: tuple[str, str]
) -> None:
    check(worlds, tmp_path, one, other, 1e-5, rule="muon", at=3, state_dtype="int8")


@pytest.mark.parametrize("offloaded", ["saving", "loading"])
@pytest.mark.parametrize(
    ("rule", "layout", "how"),
    [
        ("muon", "single", "file"),
        ("soap-staggered", "single", "file"),
        ("normuon", "ddp", "file"),
        ("soap-staggered", "ddp", "file"),
        ("muon", "fsdp2", "sharded"),
        ("shampoo-staggered", "fsdp2", "full"),
    ],
)
@pytest.mark.first_tier("layout", "offloaded")
def test_offload_on_one_side_only(
    worlds: Worlds, tmp_path: Path, rule: str, layout: str, how: str, offloaded: str
) -> None:
    options = {offloaded: {"offload_state": "cpu"}}
    check(worlds, tmp_path, (layout, how), (layout, how), rule=rule, at=3, **options)
