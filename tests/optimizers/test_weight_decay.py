"""Kinds of weight decay under a schedule, against sums that are written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_emopt

LR, DECAY, STEPS = 0.02, 0.3, 6
SHAPE = (6, 6)  # factors of full rank
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {"ns_dtype": "float64"}),
    "muon-torch": (hf_emopt.Muon, {"compat": "torch", "ns_dtype": "float64"}),
    "muon-moonlight": (hf_emopt.Muon, {"compat": "moonlight", "ns_dtype": "float64"}),
    "normuon": (hf_emopt.NorMuon, {"ns_dtype": "float64"}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 2}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 2}),
    "kl_shampoo": (hf_emopt.KLShampoo, {"precondition_frequency": 2}),
}
FACTORS = {
    "decoupled": lambda lr, peak: lr * DECAY,
    "independent": lambda lr, peak: DECAY * lr / peak,
    "corrected": lambda lr, peak: lr * DECAY * lr / peak,
    "l2": lambda lr, peak: 0.0,
}


def gradient(step: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + step))


def start() -> nn.Parameter:
    return nn.Parameter(torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def schedule_of(optimizer: torch.optim.Optimizer, name: str) -> tuple[Any, float]:
    """A schedule, and the rate that decay is relative to."""
    if name == "warmup":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.25, 0.5, 1.0, 1.0, 0.6, 0.2, 0.1][step]), LR
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * LR, total_steps=STEPS + 1, cycle_momentum=False)
    return schedule, 3 * LR


@pytest.mark.parametrize("schedule", ["warmup", "one cycle"])
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("rule", RULES)
def test_weights_are_those_of_the_written_sums(rule: str, kind: str, schedule: str) -> None:
    """``p <- (1 - f) p - lr u``, where ``u`` comes from a twin without decay; with ``"l2"`` its gradient has ``wd p``."""
    cls, options = RULES[rule]
    weight, twin = start(), start()
    decayed = cls(
        [{"params": [weight], "kind": "matrix", "weight_decay_type": kind}], lr=LR, weight_decay=DECAY, **options
    )
    plain = cls([{"params": [twin], "kind": "matrix"}], lr=LR, weight_decay=0.0, **options)
    (scheduled, peak), (beside, _) = schedule_of(decayed, schedule), schedule_of(plain, schedule)
    wanted, shrunk = start().detach(), []
    for step in range(STEPS):
        lr = decayed.param_groups[0]["lr"]
        assert lr == plain.param_groups[0]["lr"]
        weight.grad = gradient(step)
        twin.grad = gradient(step) + (DECAY * wanted if kind == "l2" else 0.0)
        before = twin.detach().clone()
        decayed.step()
        plain.step()
        shrunk.append(FACTORS[kind](lr, peak))
        wanted = (1.0 - shrunk[-1]) * wanted + (twin.detach() - before)
        torch.testing.assert_close(weight.detach(), wanted, rtol=0.0, atol=1e-10)
        scheduled.step()
        beside.step()
    assert kind == "l2" or max(shrunk) > 1.5 * min(shrunk)
    assert not torch.allclose(weight.detach(), twin.detach(), atol=1e-3) or kind == "l2"


def test_kinds_that_do_nothing_or_cannot_hold_are_refused() -> None:
    muon: Any = hf_emopt.Muon
    with pytest.raises(ValueError, match="weight_decay_type='bogus' is not one of decoupled, l2"):
        muon([start()], weight_decay_type="bogus")
    with pytest.raises(ValueError, match=r"cautious_weight_decay=True.*leave one of them out"):
        muon([start()], weight_decay_type="l2", cautious_weight_decay=True)
    with pytest.raises(ValueError, match="weight_decay_type='l2' is in a group of kind 'aux'"):
        muon([{"params": [start()], "kind": "aux", "weight_decay_type": "l2"}], allow_no_matrices=True)
    with pytest.raises(ValueError, match=r"lora='joint'.*weight_decay_type='l2'"):
        muon(nn.Sequential(nn.Linear(4, 4)), lora="joint", weight_decay_type="l2")
