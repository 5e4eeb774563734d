"""A refresh that fails on one owner, whose host reads that as the next step begins: copies stay equal bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from test_parity import digest
from torch import Tensor
from zoo import backward, build, local, matrices, wrap

from hf_emopt.rules import shampoo as shampoo_rule
from hf_emopt.rules import soap as soap_rule

OPTIONS: dict[str, dict[str, Any]] = {
    "soap": {"basis_method": "orthogonal_iteration"},
    "shampoo": {"root_solver": "coupled_newton", "start_preconditioning_step": 1},
}


def losing(real: Any, calls: list[int], rank: int) -> Any:
    """Attempts without a fallback lose their first block on one rank, every second time."""

    def attempt(a: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(a, *args, **kwargs)
        if not kwargs.get("fallback", True) and dist.get_rank() == rank:
            calls.append(1)
            if len(calls) % 2:
                result.failed[0] = True
        return result

    return attempt


def trained(rule: str, layout: str, rank: int, saves: bool) -> dict[str, Any]:
    """A hash of this rank's weights after some steps, of which one is skipped; ``saves``: a checkpoint after each."""
    calls: list[int] = []
    real = soap_rule.refresh_eigenbasis, shampoo_rule.inverse_root
    soap_rule.refresh_eigenbasis = losing(real[0], calls, rank)
    shampoo_rule.inverse_root = losing(real[1], calls, rank)
    try:
        model = wrap(matrices([(12, 8)] * 3 + [(5, 9), (33, 17)], torch.float32), layout)
        optimizer = build(model, rule, precondition_frequency=2, refresh="synchronous", **OPTIONS[rule])
        optimizer.rule.read_later = frozenset({"cpu"})  # type: ignore[attr-defined]
        for step in range(7):
            backward(model, step)
            if step == 3 and dist.get_rank() == 1 - rank:  # a skipped step, as the failures of the one before are read
                next(p for p in model.parameters() if local(p).numel()).grad.mul_(torch.nan)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            if saves and layout == "ddp":
                optimizer.consolidate_state_dict()
            elif saves:
                optimizer.state_dict()
        optimizer.synchronize()
        held = [local(p) for p in model.parameters()]
        return {
            "digest": digest(held),
            "finite": all(bool(p.isfinite().all()) for p in held),
            "lost": len(calls),
            "skipped": optimizer.skipped_steps,
        }
    finally:
        soap_rule.refresh_eigenbasis, shampoo_rule.inverse_root = real


@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
@pytest.mark.parametrize("rule", OPTIONS)
def test_copies_stay_equal_and_a_checkpoint_changes_nothing(two: World, rule: str, layout: str) -> None:
    plain = two.run(trained, rule=rule, layout=layout, rank=1, saves=False)
    saved = two.run(trained, rule=rule, layout=layout, rank=1, saves=True)
    assert [r["lost"] > 2 for r in plain] == [False, True]
    assert all(r["finite"] and r["skipped"] == 1 for r in plain)
    assert [r["digest"] for r in plain] == [r["digest"] for r in saved]
    assert plain[0]["digest"] == plain[1]["digest"]
