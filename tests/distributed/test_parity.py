"""The same weights as one process: every rule under every layout at every world size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import Worlds
from torch import Tensor
from zoo import RULES, assert_close, build, single, steps_of, train, weights, wrap, zoo

LAYOUTS = ("ddp", "fsdp2", "hsdp")


@functools.cache
def reference(rule: str, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return single(rule, steps, dtype=dtype)


def trained(rule: str, layout: str, steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    model = wrap(zoo(dtype), layout)
    before = weights(model)
    optimizer = build(model, rule, **options)
    train(model, optimizer, steps)
    after = weights(model)
    assert all(not torch.equal(before[name], after[name]) for name in after)
    return {"weights": after, "transforms": optimizer.transform_count}


def size_cases() -> list[Any]:
    """Two ranks: everything. One, three and four: every rule once by default, the rest on request."""
    cases = []
    for index, rule in enumerate(RULES):
        for position, layout in enumerate(LAYOUTS):
            for size in (1, 2, 3, 4):
                # The layout moves on with the rule, so that a default run has each layout at every size.
                chosen = size == 2 or position == (index + size) % 3
                marks = () if chosen else (pytest.mark.ranks34,)
                cases.append(pytest.param(rule, layout, size, marks=marks, id=f"{rule}-{layout}-{size}"))
    return cases


@pytest.mark.parametrize(("rule", "layout", "size"), size_cases())
def test_weights_are_those_of_one_process(worlds: Worlds, rule: str, layout: str, size: int) -> None:
    steps = steps_of(rule)
    results = worlds[size].run(trained, rule=rule, layout=layout, steps=steps)
    for result in results:
        assert_close(result["weights"], reference(rule, steps), 1e-5)
    matrices = 20 + 5 * 3  # 5 experts with gate, up and down
    assert sum(result["transforms"] for result in results) == matrices * steps
