"""What travels in a step, counted below torch.distributed, and what state each rank holds."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import pytest
import torch
from counter import CollectiveCounter, Traffic
from harness import World, Worlds
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from zoo import RULES, Block, Zoo, backward, build, local, matrices, train, wrap, zoo

import hf_emopt
from hf_emopt.optimizers.base import MatrixOptimizer

SIDES = (24, 36)
NUMEL = 24 * 36


def one_step(model: torch.nn.Module, optimizer: MatrixOptimizer, missing: str = "no such name") -> CollectiveCounter:
    """Counts the second step: plans and groups are made in the first."""
    train(model, optimizer, 1)
    backward(model, 1)
    for name, parameter in model.named_parameters():
        if missing in name:
            parameter.grad = None
    with CollectiveCounter() as counter:
        optimizer.step()
        optimizer.synchronize()
    return counter


def traffic(layout: str, shapes: list[tuple[int, int]], rule: str = "muon", **options: Any) -> list[Traffic]:
    model = wrap(matrices(shapes), layout)
    return one_step(model, build(model, rule, **options)).traffic


def payload(messages: list[Traffic]) -> int:
    return sum(t.received for t in messages if not t.control)


def expected(layout: str, size: int, numel: int) -> Fraction:
    """Elements that a rank receives when work divides evenly."""
    replicas = {"ddp": size, "fsdp2": 1, "hsdp": 2 if size == 4 else size}[layout]
    shards = size // replicas
    to_owners_and_back = Fraction(2 * numel, size) if shards > 1 else 0  # one shard has everything already
    return to_owners_and_back + Fraction(numel * (replicas - 1), replicas * shards)


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo", "klshampoo"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
def test_bytes_of_each_rule(two: World, layout: str, rule: str) -> None:
    """Two ranks, four matrices: two each."""
    for messages in two.run(traffic, layout=layout, shapes=[SIDES] * 4, rule=rule):
        assert payload(messages) == expected(layout, 2, 4 * NUMEL)
        assert {t.dtype for t in messages if not t.control} == {torch.float32}


def test_what_is_expected() -> None:
    assert [expected("fsdp2", size, 12) for size in (1, 2, 4)] == [0, 12, 6]
    assert [expected("ddp", size, 12) for size in (1, 2, 3, 4)] == [0, 6, 8, 9]
    assert expected("hsdp", 4, 12) == 6 + 3


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_bytes_at_other_sizes(worlds: Worlds, layout: str, size: int) -> None:
    for messages in worlds[size].run(traffic, layout=layout, shapes=[SIDES] * 2 * size):
        assert payload(messages) == expected(layout, size, 2 * size * NUMEL)


@pytest.mark.parametrize(("layout", "total"), [("ddp", 2), ("fsdp2", 2)])
def test_uneven_shapes_are_not_padded(worlds: Worlds, layout: str, total: int) -> None:
    """Three ranks, nothing divides: summed over ranks it is exactly P (W - 1) and 2P all the same."""
    shapes = [(33, 17), (7, 40), (5, 9), (2, 9), (33, 17), (13, 11), (20, 20), (19, 23)]
    numel = sum(m * n for m, n in shapes)
    results = worlds[3].run(traffic, layout=layout, shapes=shapes)
    assert sum(t.received for messages in results for t in messages if t.dtype.is_floating_point) == total * numel


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_transport_dtype_is_what_travels(two: World, layout: str) -> None:
    for messages in two.run(traffic, layout=layout, shapes=[SIDES] * 4, transport_dtype="bfloat16"):
        assert payload(messages) == expected(layout, 2, 4 * NUMEL)
        assert {t.dtype for t in messages if not t.control} == {torch.bfloat16}


def missing_half(layout: str) -> tuple[int, list[Traffic]]:
    model = wrap(matrices([SIDES] * 4), layout)
    optimizer = build(model, "muon")
    counter = one_step(model, optimizer, missing="m1")
    return optimizer.transform_count, counter.traffic


@pytest.mark.parametrize(("layout", "total"), [("ddp", 1), ("fsdp2", 2)])
def test_a_parameter_without_gradient_does_not_travel(two: World, layout: str, total: int) -> None:
    results = two.run(missing_half, layout=layout)
    assert sum(count for count, _ in results) == 4 + 3
    assert sum(payload(messages) for _, messages in results) == total * 3 * NUMEL


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
def test_control_messages_are_few_and_small(two: World, layout: str) -> None:
    """One or two collectives a step, of about a byte for each parameter, however many buckets there are."""
    shapes = [(8 + i, 12) for i in range(20)]
    for messages in two.run(traffic, layout=layout, shapes=shapes):
        control = [t for t in messages if t.control]
        assert len(control) <= 2
        assert sum(t.bytes for t in control) <= 16 + 4 * len(shapes)


def experts(kind: str, count: int) -> Zoo:
    torch.manual_seed(0)
    if kind == "mixtral":
        module = MixtralExperts(MixtralConfig(hidden_size=10, intermediate_size=6, num_local_experts=count))
    else:
        module = GptOssExperts(GptOssConfig(hidden_size=10, intermediate_size=6, num_local_experts=count))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return Zoo(moe=Block(experts=module))


def expert_traffic(kind: str, count: int, layout: str) -> tuple[int, int]:
    model = wrap(experts(kind, count), layout)
    # Biases of GPT-OSS experts are two-dimensional; they are not matrices, and are stepped where they lie.
    optimizer = build(model, "muon")
    counter = one_step(model, optimizer)
    return sum(t.received for t in counter.traffic if t.dtype.is_floating_point), optimizer.transform_count


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(("size", "count"), [(2, 4), (2, 5), (4, 5), (4, 3)])
def test_local_experts_need_no_bytes(worlds: Worlds, kind: str, size: int, count: int) -> None:
    """Sharded by expert, also where experts do not divide by ranks, or some ranks have none."""
    results = worlds[size].run(expert_traffic, kind=kind, count=count, layout="fsdp2")
    assert [received for received, _ in results] == [0] * size
    assert sum(transforms for _, transforms in results) == 2 * 3 * count
    assert max(transforms for _, transforms in results) == 2 * 3 * -(-count // size)


def order_of_messages(missing: str) -> tuple[list[Traffic], list[bool]]:
    os.environ["HF_EMOPT_MAX_BUCKET_NUMEL"] = "300"
    try:
        torch.manual_seed(0)
        sides = (120, 110, 20, 22, 24)  # the experts' cost is in between
        dtypes = {side: torch.float32 if side > 100 else torch.float64 for side in sides}  # in buckets of their own
        layers = {f"layer{s}": Block(dense=nn.Linear(s, s - 2, bias=False, dtype=dtypes[s])) for s in sides}
        moe = MixtralExperts(MixtralConfig(hidden_size=32, intermediate_size=24, num_local_experts=4))
        for parameter in moe.parameters():
            nn.init.normal_(parameter, std=0.25)
        model = wrap(Zoo(moe=Block(experts=moe), **layers), "fsdp2")
        optimizer = build(model, "muon")
        found = one_step(model, optimizer, missing).traffic
        assert optimizer.context is not None
        return found, [bucket.communication_free for bucket in optimizer.context.plan.buckets]
    finally:
        del os.environ["HF_EMOPT_MAX_BUCKET_NUMEL"]


def test_a_bucket_of_which_nothing_travels_has_no_part_in_the_order(two: World) -> None:
    """A rank may have no gradient for its own experts where another has: both must send the rest in one order."""
    with_experts = two.run(order_of_messages, missing="no such name")
    without = two.run(order_of_messages, missing="experts")
    for (messages, alone), (others, _) in zip(with_experts, without, strict=True):
        assert alone.index(True) >= 1  # behind one that waits for its matrices, which it would have moved on
        assert not alone[-1], alone
        assert [t for t in messages if not t.control] == [t for t in others if not t.control]


def test_local_experts_under_hsdp_are_only_copied(worlds: Worlds) -> None:
    """Two replicas share the work on each shard's two experts and exchange the updates."""
    results = worlds[4].run(expert_traffic, kind="mixtral", count=4, layout="hsdp")
    numel = 4 * (12 * 10 + 10 * 6)
    assert sum(received for received, _ in results) == numel
    assert sum(transforms for _, transforms in results) == 2 * 3 * 4


def held(optimizer: MatrixOptimizer) -> int:
    """Bytes of this rank's state, without the counters, of which every rank has its own."""
    tensors: dict[int, Tensor] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step" and not key.startswith(("rounds", "pending", "failures")):
                tensors[id(value)] = local(value)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def state_bytes(rule: str, layout: str, even: bool) -> int:
    model = wrap(matrices([(24, 24)] * 8) if even else zoo(), layout)
    optimizer = build(model, rule)
    train(model, optimizer, 2)
    return held(optimizer)


@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo", "klshampoo"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.second_tier)])
def test_state_is_divided_by_the_ranks(worlds: Worlds, rule: str, layout: str, size: int) -> None:
    model = matrices([(24, 24)] * 8)
    optimizer = build(model, rule)
    train(model, optimizer, 2)
    whole = held(optimizer)
    assert whole >= 8 * 24 * 24 * 4
    per_rank = worlds[size].run(state_bytes, rule=rule, layout=layout, even=True)
    # Failure counts and the like of a block are a few bytes.
    assert per_rank == pytest.approx([whole / size] * size, rel=1e-3)


@pytest.mark.parametrize("rule", ["muon", "soap"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_state_of_a_mixed_model_is_held_once(worlds: Worlds, rule: str, layout: str) -> None:
    model = zoo()
    optimizer = build(model, rule)
    train(model, optimizer, 2)
    per_rank = worlds[3].run(state_bytes, rule=rule, layout=layout, even=False)
    assert sum(per_rank) == held(optimizer)


def test_every_rule_is_covered() -> None:
    assert {cls for cls, _ in RULES.values()} == {
        hf_emopt.Muon, hf_emopt.NorMuon, hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo,
    }  # fmt: skip
