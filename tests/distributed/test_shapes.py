"""Numbers of matrices, rows, ranks and dtypes that do not divide each other; what is transformed, and how often."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, Worlds
from torch import Tensor, nn
from zoo import (
    RULES,
    Block,
    Zoo,
    assert_close,
    backward,
    build,
    linear,
    local,
    single,
    steps_of,
    train,
    weights,
    wrap,
    zoo,
)

import hf_emopt
import hf_emopt.rules.muon

LAYOUTS = ("ddp", "fsdp2", "hsdp")


def trained(make: str, rule: str, layout: str, options: dict[str, Any], **model: Any) -> dict[str, Tensor]:
    """Weights after training a model made by a function of this module."""
    wrapped = wrap(globals()[make](**model), layout)
    train(wrapped, build(wrapped, rule, **options), steps_of(rule))
    return weights(wrapped)


def check(world: World, make: str, rule: str, layout: str, limit: float = 1e-5, /, **model: Any) -> None:
    """Trains on the ranks of a world and on one process."""
    options = model.pop("options", {})
    wanted = single(rule, steps_of(rule), globals()[make], tuple(options.items()), **model)
    for found in world.run(trained, make=make, rule=rule, layout=layout, options=options, **model):
        assert_close(found, wanted, limit)


def some_matrices(count: int) -> Zoo:
    """``count`` matrices of one shape, and a norm that is none."""
    torch.manual_seed(0)
    return Zoo(norm=Block(norm=nn.LayerNorm(7)), layers=Block(**{f"m{i}": linear(9, 6) for i in range(count)}))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("size", "count"), [(2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (4, 3), (4, 5), (4, 8)])
def test_number_of_matrices(worlds: Worlds, layout: str, size: int, count: int) -> None:
    """None, one, and one less, as many, one more and twice as many as ranks."""
    for rule in ("muon", "soap"):
        check(worlds[size], "some_matrices", rule, layout, count=count, options={"allow_no_matrices": count == 0})


def no_matrices() -> None:
    with pytest.raises(ValueError, match="allow_no_matrices"):
        build(some_matrices(0), "muon")


def test_no_matrices_is_an_error_on_every_rank(two: World) -> None:
    two.run(no_matrices)


def short(rows: int) -> Zoo:
    """Two matrices of a few rows, and one that every rank has a part of."""
    torch.manual_seed(0)
    return Zoo(short=Block(a=linear(rows, 11), b=linear(rows, 11)), rest=Block(c=linear(16, 12, bias=True)))


@pytest.mark.parametrize("rows", [3, 5, 13, *(pytest.param(n, marks=pytest.mark.second_tier) for n in (2, 6, 7))])
def test_empty_and_uneven_shards(worlds: Worlds, rows: int) -> None:
    """On four ranks, five rows lie as 2, 2, 1, 0 and thirteen as 4, 4, 4, 1."""
    for rule in ("muon", "normuon", "soap", "shampoo"):
        check(worlds[4], "short", rule, "fsdp2", rows=rows)


def one_update(layout: str, rows: int) -> Tensor:
    """The first update of a zero matrix, per matrix view of learning rate."""
    model = Zoo(only=Block(a=linear(rows, 9)))
    nn.init.zeros_(model.blocks["only"].a.weight)
    wrapped = wrap(model, layout) if dist.is_initialized() else model
    optimizer = build(wrapped, "muon", lr=1.0, ns_steps=30, ns_coefficients=(1.5, -0.5, 0.0))
    train(wrapped, optimizer, 1)
    (update,) = weights(wrapped).values()
    return update


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_scale_of_an_update_is_that_of_the_whole_matrix(worlds: Worlds, layout: str) -> None:
    """13 rows on four ranks would be padded to 16: all singular values are 0.2 sqrt(13), not 0.2 sqrt(16)."""
    for update in worlds[4].run(one_update, layout=layout, rows=13):
        values = torch.linalg.svdvals(update)
        assert values.tolist() == pytest.approx([0.2 * math.sqrt(13)] * 9, rel=1e-4)


def fused(hidden: int, heads: int, kv_heads: int) -> Zoo:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3Attention

    torch.manual_seed(0)
    config = Phi3Config(
        hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=8,
        num_hidden_layers=1, pad_token_id=0,
    )  # fmt: skip
    return Zoo(attention=Block(attn=Phi3Attention(config, layer_idx=0)))


@pytest.mark.parametrize(("hidden", "heads", "kv_heads"), [(16, 4, 4), (20, 5, 1), (24, 3, 1)])
@pytest.mark.parametrize("size", [2, 3])
def test_cuts_of_fused_projections_and_of_shards(
    worlds: Worlds, size: int, hidden: int, heads: int, kv_heads: int
) -> None:
    """The first is cut where three ranks' shards end, the others nowhere near."""
    check(worlds[size], "fused", "muon", "fsdp2", hidden=hidden, heads=heads, kv_heads=kv_heads)
    options = {"per_head": True}
    check(worlds[size], "fused", "muon", "fsdp2", hidden=hidden, heads=heads, kv_heads=kv_heads, options=options)


def tied() -> Zoo:
    """One weight in two modules, once as embedding and head, once as two layers."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(16, 6), linear(16, 6)
    head.weight = embedding.weight
    first, second = linear(6, 6), linear(6, 6)
    second.weight = first.weight
    return Zoo(ends=Block(embedding=embedding, head=head), middle=Block(first=first, second=second, other=linear(6, 6)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_weights(two: World, layout: str) -> None:
    for rule in ("muon", "soap"):
        check(two, "tied", rule, layout)


def mixed() -> Zoo:
    """Weights in bfloat16 beside norms and matrices in float32."""
    torch.manual_seed(0)
    low = Block(a=linear(16, 12), b=linear(16, 12), c=linear(12, 16)).to(torch.bfloat16)
    return Zoo(low=low, high=Block(d=linear(16, 12), e=linear(12, 12), norm=nn.LayerNorm(12)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo"])
def test_mixed_dtypes_in_one_model(two: World, layout: str, rule: str) -> None:
    """What reaches a bfloat16 weight is float32, so that it is the same number but where a rounding is a near tie."""
    wanted = single(rule, steps_of(rule), mixed)
    for found in two.run(trained, make="mixed", rule=rule, layout=layout, options={}):
        for name, value in wanted.items():
            assert found[name].dtype is value.dtype
        high = {name: value for name, value in wanted.items() if value.dtype is torch.float32}
        assert_close({name: found[name] for name in high}, high, 1e-5)
        low = [name for name in wanted if name not in high]
        differs = sum(int((found[name] != wanted[name]).sum()) for name in low)
        assert differs <= 0.01 * sum(wanted[name].numel() for name in low)
        assert_close({name: found[name] for name in low}, {name: wanted[name] for name in low}, 2**-8)


def all_dtypes(rule: str, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = wrap(zoo(dtype), layout)
        optimizer = build(model, rule)
        before = weights(model)
        train(model, optimizer, steps_of(rule))
        for name, after in weights(model).items():
            assert after.dtype is dtype
            assert torch.isfinite(after).all(), name
            assert not torch.equal(after, before[name]), name


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo", "klshampoo"])
def test_every_dtype_steps(two: World, rule: str, layout: str) -> None:
    two.run(all_dtypes, rule=rule, layout=layout)


class NewtonSchulzCalls:
    """Counts matrices where they are orthogonalized, independently of the optimizer's own count."""

    def __init__(self) -> None:
        self.matrices = Fraction(0)

    def __enter__(self) -> NewtonSchulzCalls:
        self.originals = {
            name: getattr(hf_emopt.rules.muon, name) for name in ("newton_schulz", "newton_schulz_sharded")
        }
        for name, function in self.originals.items():
            setattr(hf_emopt.rules.muon, name, self._counting(function))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, function in self.originals.items():
            setattr(hf_emopt.rules.muon, name, function)

    def _counting(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # Of a matrix that several ranks orthogonalize together, each has its share.
            self.matrices += Fraction(math.prod(x.shape[:-2]), getattr(args[0], "parts", 1) if args else 1)
            return function(x, *args, **kwargs)

        return counted


def transforms(layout: str, steps: int, micro_batches: int) -> dict[str, Any]:
    model = wrap(zoo(), layout)
    optimizer = build(model, "muon")
    size, rank = dist.get_world_size(), dist.get_rank()
    each = 16 // size
    with NewtonSchulzCalls() as calls:
        for step in range(steps):
            for micro in range(micro_batches):
                length = each // micro_batches
                start = rank * each + micro * length
                backward(model, step, range(start, start + length))
            optimizer.step()
            optimizer.zero_grad()
    return {
        "weights": weights(model),
        "counted": optimizer.transform_count,
        "calls": calls.matrices,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_each_matrix_is_orthogonalized_once_a_step(worlds: Worlds, layout: str, size: int) -> None:
    """By one rank each; accumulated over four micro-batches it is the same step with the same number of transforms."""
    results = {n: worlds[size].run(transforms, layout=layout, steps=3, micro_batches=n) for n in (1, 4)}
    for by_rank in results.values():
        assert sum(r["counted"] for r in by_rank) == 35 * 3
        assert sum(r["calls"] for r in by_rank) == 35 * 3
    for one, four in zip(results[1], results[4]):
        assert one["calls"] == four["calls"]
        assert_close(four["weights"], one["weights"], 0.0)


def adapters(layout: str, rule: str) -> None:
    """Low-rank adapters at the start: B is zero, so the gradient of A is exactly zero."""
    torch.manual_seed(0)
    model = Zoo(lora=Block(a=linear(4, 24), b=linear(24, 4)))
    nn.init.zeros_(model.blocks["lora"].b.weight)
    wrapped = wrap(model, layout)
    optimizer = build(wrapped, rule, weight_decay=0.0)
    before = weights(wrapped)
    for step in range(3):
        backward(wrapped, step)
        for name, parameter in wrapped.named_parameters():
            if name.endswith("a.weight"):
                local(parameter.grad).zero_()  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    after = weights(wrapped)
    assert torch.equal(after["blocks.lora.a.weight"], before["blocks.lora.a.weight"])
    assert torch.isfinite(after["blocks.lora.b.weight"]).all()
    assert after["blocks.lora.b.weight"].abs().max() > 0
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_zero_gradients_give_zero_updates(two: World, layout: str, rule: str) -> None:
    two.run(adapters, layout=layout, rule=rule)
