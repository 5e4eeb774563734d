"""Gradients of copies that ranks do not share: told before weights change; averaged by the optimizer where it is asked to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World, Worlds
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zoo import assert_close, backward, bare, build, local, matrices, single, steps_of, weights, wrap, zoo

from hf_emopt.distributed.layout import UnsupportedLayoutError

RULES = ("muon", "normuon", "soap", "shampoo", "klshampoo")
UNREDUCED = ("bare", "no_sync", "hook", "hsdp")


def unreduced(layout: str, model: nn.Module) -> nn.Module:
    """The model under a wrapper, or none, that leaves every rank its own gradients."""
    if layout == "bare":
        return model
    wrapped: Any = wrap(model, "hsdp" if layout == "hsdp" else "ddp")
    if layout == "hook":
        wrapped.register_comm_hook(None, own_gradients)
    return wrapped


def own_gradients(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


own_gradients.__annotations__.clear()  # as text they are none that DistributedDataParallel accepts


def errors(rule: str) -> dict[str, tuple[str, bool]]:
    """What a first step says of each layout, and whether weights are as they were."""
    found = {}
    for layout in UNREDUCED:
        model = unreduced(layout, zoo())
        optimizer = build(model, rule)
        before = [local(p).detach().clone() for p in model.parameters()]
        with model.no_sync() if layout == "no_sync" else nullcontext():  # type: ignore[operator]
            backward(model, 0)
        if layout == "hsdp":  # it gives no gradients before it has reduced them; somebody has changed a replica's
            for parameter in model.parameters():
                parameter.grad.mul_(1 + 0.1 * dist.get_rank())  # type: ignore[union-attr]
        message = ""
        try:
            optimizer.step()
        except RuntimeError as error:
            message = str(error)
        found[layout] = message, all(map(torch.equal, before, map(local, model.parameters())))
    return found


@pytest.mark.parametrize("rule", RULES)
def test_gradients_that_nobody_reduces_are_refused_on_all_ranks(two: World, rule: str) -> None:
    for result in two.run(errors, rule=rule):
        for layout in UNREDUCED:
            message, unchanged = result[layout]
            assert "in step 1 ranks had other gradients of " in message, layout
            for name in ("linears", "DistributedDataParallel", "average_gradients=True", "process_group='self'"):
                assert name in message
            assert unchanged


def later(odd: int, steps: int, group: Any = None) -> str:
    """What is said where ranks have their own gradients from one step on."""
    model = matrices([(9, 7), (12, 5)])
    ddp: Any = DistributedDataParallel(model)
    optimizer = build(model, "muon", process_group=group)
    for step in range(1, steps + 1):
        with ddp.no_sync() if step >= odd else nullcontext():
            backward(ddp, step)
        try:
            optimizer.step()
        except RuntimeError as error:
            return str(error)
        optimizer.zero_grad()
    return ""


def test_gradients_are_compared_again(two: World) -> None:
    for message in two.run(later, odd=4, steps=10):
        assert message.startswith("in step 10 ranks had other gradients of 2 of 2 parameters")
    assert two.run(later, odd=1, steps=10, group="self") == ["", ""]


def may_differ() -> int:
    """Steps with gradients that are not the same on all ranks, and need not be."""
    model = wrap(zoo(torch.bfloat16), "ddp")
    optimizer = build(model, "muon")
    names = dict(model.named_parameters())
    for step in range(12):
        backward(model, step)
        if dist.get_rank() == 1:
            if step == 0:
                names["module.blocks.linears.a.weight"].grad = None
            if step == 9:
                names["module.blocks.linears.b.bias"].grad.fill_(float("nan"))  # type: ignore[union-attr]
            for parameter in names.values():
                if parameter.grad is not None and step:  # another order of a reduction in 16 bits
                    parameter.grad.mul_(1 + 2**-8)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.skipped_steps


def test_steps_that_are_skipped_and_rounding_are_no_difference(two: World) -> None:
    assert two.run(may_differ) == [2, 2]


def trained(rule: str, averages: bool, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Two backward passes a step. In every step rank 0 has no gradient of one parameter, and nobody of another."""
    model = zoo(dtype)
    wrapped = model if averages else DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = build(model, rule, average_gradients=averages, **options)
    last = steps_of(rule)
    for step in range(last):
        for again in range(2):
            without = ("square.b",) if dist.get_rank() and step == last - 1 else ("square.b", "linears.b.bias", "gpt2")
            with wrapped.no_sync() if not averages and not again else nullcontext():  # type: ignore[operator]
                backward(wrapped, 2 * step + again, without=lambda name: any(part in name for part in without))  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return {bare(name): value.float() for name, value in weights(model).items()}


def both(rule: str, dtype: str, **options: Any) -> list[dict[str, Tensor]]:
    return [trained(rule, averages, getattr(torch, dtype), **options) for averages in (True, False)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
def test_averaged_gradients_are_those_of_ddp(worlds: Worlds, rule: str, dtype: str, size: int) -> None:
    for mine, ddp in worlds[size].run(both, rule=rule, dtype=dtype, overlap_param_gather=dtype == "float32"):
        assert_close(mine, ddp, 1e-6)


def averaged(rule: str) -> dict[str, Tensor]:
    model = zoo()
    optimizer = build(model, rule, average_gradients=True)
    for step in range(steps_of(rule)):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.second_tier
@pytest.mark.parametrize("rule", RULES)
def test_averaged_gradients_are_those_of_one_process(two: World, rule: str) -> None:
    for result in two.run(averaged, rule=rule):
        assert_close(result, single(rule, steps_of(rule)), 1e-5)


def refused() -> list[str]:
    messages = []
    for layout in ("fsdp2", "hsdp"):
        model = zoo()
        late = build(model, "muon", average_gradients=True)
        sharded = wrap(model, layout)
        backward(sharded, 0)
        for group, (_, parameter) in zip([late.param_groups[0]], sharded.named_parameters()):
            group["params"] = [parameter, *group["params"][1:]]
        for attempt in (late.step, lambda: build(sharded, "muon", average_gradients=True)):  # noqa: B023
            try:
                attempt()
            except UnsupportedLayoutError as error:
                messages.append(str(error))
    return messages


def test_wrappers_that_reduce_gradients_are_refused(two: World) -> None:
    for messages in two.run(refused):
        assert len(messages) == 4
        assert all("average_gradients=True" in m and "blocks.linears.a.weight is a DTensor" in m for m in messages)
    with pytest.raises(ValueError, match=r"average_gradients=True .* process_group='self'"):
        build(zoo(), "muon", average_gradients=True, process_group="self")
    with pytest.raises(ValueError, match="average_gradients='yes' must be True or False"):
        build(zoo(), "muon", average_gradients="yes")
