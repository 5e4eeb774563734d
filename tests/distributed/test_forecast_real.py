"""Predicted plans, regions and bytes beside those of optimizers that have really been stepped, on one and two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from counter import CollectiveCounter
from harness import World
from transformers import LlamaConfig, LlamaForCausalLM

import hf_emopt
from hf_emopt.distributed.layout import local_tensor
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.tools.bench.step_models import lay_out
from hf_emopt.tools.forecast.amounts import bucket_amounts, memory
from hf_emopt.tools.forecast.layouts import Layout, place

RULES: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {}),
    "normuon": (hf_emopt.NorMuon, {}),
    "soap": (hf_emopt.SOAP, {"oversize": "block", "max_preconditioner_dim": 32}),
    "shampoo": (hf_emopt.Shampoo, {"max_preconditioner_dim": 32}),
    "kl_shampoo": (hf_emopt.KLShampoo, {"max_preconditioner_dim": 32}),
}


def llama(device: str, dtype: str = "float32") -> LlamaForCausalLM:
    """Matrices of which FSDP cuts some unevenly, and an embedding that DDP shares out by rows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1100, hidden_size=64, intermediate_size=90, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config).to(getattr(torch, dtype))


def build(model: torch.nn.Module, rule: str) -> MatrixOptimizer:
    cls, options = RULES[rule]
    return cls(model, **options)  # type: ignore[arg-type]


def stepped(rule: str, layout: str, dtype: str) -> dict[str, Any]:
    device = torch.device("cpu")
    laid = lay_out(llama("cpu", dtype), layout, device)  # type: ignore[arg-type]
    optimizer = build(laid.raw, rule)
    adamw = torch.optim.AdamW(laid.raw.parameters(), foreach=False)
    for p in laid.raw.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with CollectiveCounter() as counter:
        optimizer.step()
    adamw.step()
    engine = optimizer.current_context()
    return {
        "rank": dist.get_rank(),
        "state": sum(local_tensor(v).nbytes for s in optimizer.state.values() for v in s.values()),
        "adamw": sum(local_tensor(v).nbytes for s in adamw.state.values() for v in s.values()),
        "weights": sum(local_tensor(p).nbytes for p in laid.raw.parameters()),
        "plan": engine.plan.digest(),
        "aux_plan": engine.aux_plan.digest(),
        "received": sum(t.received for t in counter.traffic if not t.control),
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp2+tp"])
@pytest.mark.parametrize("rule", RULES)
def test_memory_and_plan_are_those_of_two_ranks(two: World, rule: str, layout: str) -> None:
    model = llama("meta")
    optimizer = build(model, rule)
    placed = place(optimizer, Layout(layout, 2, tp_size=2), model)
    bytes_ = memory(optimizer, placed)
    for real in two.run(stepped, rule=rule, layout=layout, dtype="float32"):
        assert real["plan"] == placed.plan.digest()
        assert real["aux_plan"] == placed.aux_plan.digest()
        assert bytes_.state[real["rank"]] == real["state"]
        assert bytes_.weights[real["rank"]] == bytes_.gradients[real["rank"]] == real["weights"]
        assert bytes_.adamw_state[real["rank"]] == real["adamw"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_memory_of_16_bit_weights(two: World, layout: str) -> None:
    model = llama("meta", "bfloat16")
    optimizer = build(model, "muon")
    bytes_ = memory(optimizer, place(optimizer, Layout(layout, 2), model))
    for real in two.run(stepped, rule="muon", layout=layout, dtype="bfloat16"):
        assert bytes_.state[real["rank"]] == real["state"]
        assert bytes_.weights[real["rank"]] == real["weights"]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_elements_received_are_those_counted_below_torch(two: World, layout: str) -> None:
    """An element is an element, whatever the wire is; a rank's own part of an all-to-all is counted in both."""
    model = llama("meta")
    optimizer = build(model, "muon")
    placed = place(optimizer, Layout(layout, 2), model)
    matrices, others = ([bucket_amounts(b, 2, 2) for b in plan.buckets] for plan in (placed.plan, placed.aux_plan))
    for real in two.run(stepped, rule="muon", layout=layout, dtype="float32"):
        predicted = sum(float((b.sent + b.returned + b.shared)[real["rank"]]) for b in matrices)
        predicted += sum(float(b.shared[real["rank"]]) for b in others)
        assert real["received"] == predicted


@pytest.mark.second_tier
@pytest.mark.parametrize("layout", ["hsdp", "fsdp2+tp"])
@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_memory_and_plan_are_those_of_four_ranks(worlds: Any, rule: str, layout: str) -> None:
    model = llama("meta")
    optimizer = build(model, rule)
    placed = place(optimizer, Layout(layout, 4, shards=2, tp_size=2), model)
    bytes_ = memory(optimizer, placed)
    for real in worlds[4].run(stepped, rule=rule, layout=layout, dtype="float32"):
        assert real["plan"] == placed.plan.digest()
        assert bytes_.state[real["rank"]] == real["state"]
        assert bytes_.weights[real["rank"]] == real["weights"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_memory_is_that_of_one_process(rule: str, state_dtype: str, dtype: str) -> None:
    model = llama("cpu", dtype)
    cls, options = RULES[rule]
    optimizer = cls(model, **options, state_dtype=state_dtype)  # type: ignore[arg-type]
    placed = place(optimizer, Layout("ddp", 1))
    predicted = float(memory(optimizer, placed).state.max())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert predicted == sum(v.nbytes for s in optimizer.state.values() for v in s.values())
