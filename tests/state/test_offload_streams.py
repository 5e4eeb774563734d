"""Offloaded state in runs of many steps, with copies that come and go as late as they may, or as early: not a bit differs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from late_copies import two_streams
from test_state_dtypes import OPTIMIZERS, Net, through_disk
from torch import Tensor, nn

from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.state.offload import budget_in_buckets

STEPS = 14
EDITS = {3: "replaced", 7: "in place", 11: "by .data"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of a small model, and chunks of a tensor or two."""
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", "11000")
    monkeypatch.setattr("hf_emopt.engine.adamw_step.MAX_BUCKET_NUMEL", 13_000)
    monkeypatch.setattr("hf_emopt.state.offload.CHUNK_BYTES", 2**14)


class Deep(Net):
    """With more matrices, and one outside of the optimizer until it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.late: nn.Module = nn.Linear(96, 80)


def built(rule: str, state_dtype: str, **options: Any) -> tuple[Deep, MatrixOptimizer]:
    torch.manual_seed(0)
    model = Deep()
    cls, defaults = OPTIMIZERS[rule]
    model.late.requires_grad_(False)
    optimizer = cls(model, lr=2e-3, weight_decay=0.1, state_dtype=state_dtype, **{**defaults, **options})
    model.late.requires_grad_(True)
    return model, optimizer


def edit(optimizer: MatrixOptimizer, how: str) -> None:
    """Changes all averages of gradients as a user may: by other tensors in their place, in place, or in place unseen."""
    for p in [p for group in optimizer.param_groups for p in group["params"]]:
        for key, value in list(optimizer.state[p].items()):
            if key not in ("momentum_buffer", "exp_avg"):
                continue
            if how == "replaced":
                optimizer.state[p][key] = value * 0.5
            else:
                (value if how == "in place" else value.data).mul_(0.5)


def resumed(rule: str, state_dtype: str, model: Deep, saved: dict[str, Any], **options: Any) -> MatrixOptimizer:
    model.late.requires_grad_(False)
    cls, defaults = OPTIMIZERS[rule]
    optimizer = cls(model, lr=2e-3, state_dtype=state_dtype, **{**defaults, **options})
    model.late.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.late.named_parameters(prefix="late"))})
    optimizer.load_state_dict(saved)
    return optimizer  # type: ignore[no-any-return]


def run(rule: str, state_dtype: str, **options: Any) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    """Weights, state, and bytes left on the device after each step.

    Some steps have no gradient for some parameters, state is edited after others, a group joins, and the run is saved,
    goes on, and is resumed from where it was saved, by another optimizer.
    """
    model, optimizer = built(rule, state_dtype, **options)
    left = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator)
            absent = step in (2, 5, 6) and name.startswith(("blocks.1", "table"))
            p.grad = None if absent or (step <= 5 and name.startswith("late")) else gradient
        optimizer.step()
        offload = optimizer.current_context().store.offload
        if offload is not None:
            assert offload.resident_bytes <= offload.largest_bytes
            assert offload.peak_bytes <= budget_in_buckets() * offload.largest_bytes
            left.append(offload.resident_bytes)
        if step in EDITS:
            edit(optimizer, EDITS[step])
        if step == 5:
            optimizer.add_param_group({"params": list(model.late.named_parameters(prefix="late"))})
        if step == 9:
            saved = through_disk(optimizer.state_dict())
            weights = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            for p, weight in zip(model.parameters(), weights):
                p.data.copy_(weight)
            optimizer = resumed(rule, state_dtype, model, saved, **options)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [{key: value.clone() for key, value in sorted(optimizer.state[p].items())} for p in params]
    return [p.detach().clone() for p in model.parameters()], state, left


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, str], Any]:
    """Runs without offload."""
    return {}


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize(
    ("rule", "state_dtype"), [*((rule, "float32") for rule in OPTIMIZERS), ("muon", "bfloat16"), ("soap", "bfloat16")]
)
def test_weights_and_state_of_a_run_without_offload(
    plain: dict[tuple[str, str], Any], rule: str, state_dtype: str, early: bool
) -> None:
    if (rule, state_dtype) not in plain:
        plain[rule, state_dtype] = run(rule, state_dtype)
    weights, state, _ = plain[rule, state_dtype]
    with two_streams(early):
        found, kept, left = run(rule, state_dtype, offload_state="cpu")
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))
    for mine, other in zip(kept, state, strict=True):
        assert mine.keys() == other.keys()
        assert [key for key in mine if not torch.equal(mine[key], other[key])] == []
    assert all(left)


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_what_is_brought_ahead_is_used(early: bool) -> None:
    """From the second step on every piece is on its way when it is asked for, the first one too."""
    with two_streams(early):
        model, optimizer = built("soap", "float32", offload_state="cpu")
        model.late.requires_grad_(False)
        for step in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            offload = optimizer.current_context().store.offload
            assert offload is not None
            if step == 0:
                pieces = offload.fetched_late
    assert pieces > 8
    assert (offload.fetched_late, offload.fetched_ahead) == (pieces, 5 * pieces)
    assert offload.largest_bytes / 2 < offload.left_bytes <= offload.largest_bytes < offload.peak_bytes


def test_a_copy_of_the_optimizer_goes_on_alike() -> None:
    with two_streams(early=False):
        model, optimizer = built("muon", "float32", offload_state="cpu")
        model.late = nn.Identity()
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        twin, other = copy.deepcopy((model, optimizer))
        for m, o in ((model, optimizer), (twin, other)):
            for p in m.parameters():
                p.grad = torch.full_like(p, 0.5)
            o.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    assert other.current_context().store.offload is not optimizer.current_context().store.offload
