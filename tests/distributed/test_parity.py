"""The same weights as one process: every rule under every layout at every world size."""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, Worlds
from torch import Tensor
from torch.distributed.tensor import DTensor
from zoo import (
    RULES,
    SAMPLES,
    assert_close,
    backward,
    build,
    coefficients,
    local,
    matrices,
    single,
    steps_of,
    train,
    weights,
    wrap,
    zoo,
)

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
    """Two ranks: everything. One, three and four: every rule once; the rest are ``products``."""
    cases = []
    for index, rule in enumerate(RULES):
        for position, layout in enumerate(LAYOUTS):
            for size in (1, 2, 3, 4):
                # The layout moves on with the rule, so that there is each layout at every size.
                chosen = size == 2 or position == (index + size) % 3
                marks = () if chosen else (pytest.mark.products,)
                cases.append(pytest.param(rule, layout, size, marks=marks, id=f"{rule}-{layout}-{size}"))
    return cases


@pytest.mark.first_tier("layout size", "rule")
@pytest.mark.parametrize(("rule", "layout", "size"), size_cases())
def test_weights_are_those_of_one_process(worlds: Worlds, rule: str, layout: str, size: int) -> None:
    steps = steps_of(rule)
    results = worlds[size].run(trained, rule=rule, layout=layout, steps=steps)
    for result in results:
        assert_close(result["weights"], reference(rule, steps), 1e-5)
    matrices = 20 + 5 * 3  # 5 experts with gate, up and down
    assert sum(result["transforms"] for result in results) == matrices * steps


@pytest.mark.parametrize("rule", ["muon", "soap", "shampoo-staggered"])
def test_one_replica_of_a_two_dimensional_mesh(two: World, rule: str) -> None:
    for result in two.run(trained, rule=rule, layout="hsdp1", steps=steps_of(rule)):
        assert_close(result["weights"], reference(rule, steps_of(rule)), 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["muon", "normuon", "soap"])
def test_double_precision(two: World, layout: str, rule: str) -> None:
    """With float64 on the wire too, nothing between the gradient and the weight is rounded to float32."""
    options = {"transport_dtype": "float64", **({"ns_dtype": "float64"} if "muon" in rule else {})}
    wanted = single(rule, steps_of(rule), options=tuple(options.items()), dtype=torch.float64)
    for result in two.run(trained, rule=rule, layout=layout, steps=steps_of(rule), dtype=torch.float64, **options):
        assert_close(result["weights"], wanted, 1e-10)


@pytest.mark.parametrize("rule", ["muon", "soap-staggered"])
def test_delayed_gathers(two: World, rule: str) -> None:
    """Gathers that end in the next forward: it already reads the new weights."""
    steps = steps_of(rule)
    for result in two.run(losses, rule=rule, steps=steps, overlap_param_gather=True):
        assert result == pytest.approx(losses(rule, steps), rel=1e-6)


def losses(rule: str, steps: int, **options: Any) -> list[float]:
    """The loss of the global batch before each step, and after the last."""
    model = zoo()
    optimizer = build(model, rule, **options)
    wrapped = wrap(model, "ddp") if dist.is_initialized() else model
    found = []
    for step in range(steps + 1):
        whole = coefficients(model, step, range(SAMPLES), 1 / 32)
        with torch.no_grad():
            found.append(float(wrapped(whole)))
        if step < steps:
            backward(wrapped, step)
            optimizer.step()
            optimizer.zero_grad()
    return found


def scheduled(rule: str, layout: str, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights after steps whose rates change, with a kind of decay."""
    model = zoo(dtype) if layout == "single" else wrap(zoo(dtype), layout)
    optimizer = build(model, rule, weight_decay_type=kind)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (0.5, 1.0, 0.7, 0.2)[step])
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        schedule.step()
    return weights(model)


@pytest.mark.first_tier("rule", "layout", "kind")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("kind", ["l2", "independent", "corrected"])
def test_kinds_of_decay_under_a_schedule(two: World, kind: str, rule: str, layout: str, dtype: str) -> None:
    """The other rules' kinds go through the same two functions."""
    case = {"rule": rule, "kind": kind, "dtype": getattr(torch, dtype)}
    wanted = scheduled(layout="single", **case)
    plain = scheduled(layout="single", **{**case, "kind": "decoupled"})
    assert any(not torch.equal(wanted[name], plain[name]) for name in wanted)
    for found in two.run(scheduled, layout=layout, **case):
        assert_close(found, wanted, 1e-5 if dtype == "float32" else 2.0**-7)


def digest(tensors: Iterable[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def replicas(rule: str, layout: str, dtype: torch.dtype, transport_dtype: str | None) -> tuple[int, str, bool]:
    """Coordinate of this rank's shard and a hash of it after fifty steps."""
    model = wrap(matrices([(12, 8)] * 3 + [(5, 9), (33, 17), (1, 9)], dtype), layout)
    train(model, build(model, rule, transport_dtype=transport_dtype), 50)
    shards = [local(parameter) for parameter in model.parameters()]
    first = next(model.parameters())
    shard = first.device_mesh.get_coordinate()[-1] if isinstance(first, DTensor) else 0
    return shard, digest(shards), all(bool(torch.isfinite(s).all()) for s in shards)


EXTRA = pytest.mark.products


@pytest.mark.parametrize(("dtype", "transport"), [("float32", None), ("bfloat16", None), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("rule", ["muon", "normuon", "soap-staggered", "shampoo"])
@pytest.mark.parametrize(
    ("layout", "size"),
    [("ddp", 2), ("hsdp", 4), pytest.param("ddp", 3, marks=EXTRA), pytest.param("hsdp", 3, marks=EXTRA)],
)
def test_replicas_are_equal_bit_by_bit(
    worlds: Worlds, rule: str, layout: str, size: int, dtype: str, transport: str | None
) -> None:
    """After fifty steps with decay: hashes of all shards, equal where the shard is the same, different where not."""
    results = worlds[size].run(
        replicas, rule=rule, layout=layout, dtype=getattr(torch, dtype), transport_dtype=transport
    )
    by_shard: dict[int, set[str]] = defaultdict(set)
    for shard, value, finite in results:
        assert finite
        by_shard[shard].add(value)
    assert [len(values) for values in by_shard.values()] == [1] * (2 if (layout, size) == ("hsdp", 4) else 1)
    assert len(set.union(*by_shard.values())) == len(by_shard)
