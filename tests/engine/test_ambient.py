"""What a program has set for its own sake (autocast, inference mode, default dtype and device, TF32) changes no update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import World
from torch import Tensor, nn
from zoo import RULES, assert_close, backward, build, single, weights, wrap, zoo

import hf_emopt
from hf_emopt import linalg
from hf_emopt.linalg import attention_logits
from hf_emopt.linalg.newton_schulz_sharded import Shard, newton_schulz_sharded


@contextlib.contextmanager
def changed(setter: Callable[[Any], None], value: Any, back: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(back)


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "gradients on": torch.enable_grad,
    "float64 by default": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16 by default": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta by default": lambda: changed(torch.set_default_device, "meta", None),
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "medium precision": lambda: changed(torch.set_float32_matmul_precision, "medium", "highest"),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "offloaded": {"offload_state": "cpu"},
    "kahan": {"low_precision_weights": "kahan"},
    "stochastic": {"low_precision_weights": "stochastic"},
}
KRONECKER = {"plain": {"factor_storage": "int8"}, "bfloat16": {"factor_storage": "float16"}}


def model_of(option: str) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if option in ("kahan", "stochastic") else torch.float32
    model = nn.Sequential(nn.Linear(70, 70), nn.LayerNorm(70), nn.Linear(70, 70, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model.to(dtype)


def give(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(10 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def after_steps(rule: str, option: str, state: Callable[[], Any]) -> list[Tensor]:
    """Weights and state after three steps and a checkpoint inside of the state, two steps outside, and what was measured."""
    found: list[Tensor] = []
    given = {**OPTIONS[option], **({} if "muon" in rule else KRONECKER.get(option, {}))}
    models = [model_of(option), model_of(option)]
    optimizers = [build(model, rule, **given) for model in models]
    for step in range(3):
        give(models[0], step)
        with state(), optimizers[0].diagnostics("layers") as figures:
            optimizers[0].step()
    with state():
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, optimizers):
        for step in range(3, 5):
            give(model, step)
            optimizer.step()
        found += [p.detach() for p in model.parameters()]
        found += [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    return [*found, torch.tensor([figures[name] for name in sorted(figures)], dtype=torch.float64)]


@pytest.mark.first_tier("state rule", "option")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("rule", [name for name in RULES if "staggered" not in name])
@pytest.mark.parametrize("state", STATES)
def test_steps_figures_and_checkpoints(state: str, rule: str, option: str) -> None:
    """Bit by bit."""
    wanted = after_steps(rule, option, contextlib.nullcontext)
    found = after_steps(rule, option, STATES[state])
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted):
        assert ours.dtype is theirs.dtype
        assert ours.device == theirs.device
        assert torch.equal(ours, theirs)


A = torch.randn(2, 70, 70, generator=torch.Generator().manual_seed(1))
SYMMETRIC, BASES = A @ A.mT + torch.eye(70), torch.eye(70).repeat(2, 1, 1)
FUNCTIONS: dict[str, Callable[[], Any]] = {
    **{
        f"newton_schulz {n}": lambda n=n: linalg.newton_schulz(A, normalization=n)
        for n in ("scale_free", "clamp", "add")
    },
    "newton_schulz gram": lambda: linalg.newton_schulz(A, method="gram"),
    "newton_schulz aol": lambda: linalg.newton_schulz(A, coefficients="aol"),
    "newton_schulz bfloat16": lambda: linalg.newton_schulz(A, dtype=torch.bfloat16),
    "newton_schulz_sharded": lambda: newton_schulz_sharded(A, Shard(-2, (70, 70), 0, 70, lambda x: x, lambda x: x, 1)),
    "inverse_root": lambda: linalg.inverse_root(SYMMETRIC, 0.25),
    "inverse_root fp16": lambda: linalg.inverse_root(SYMMETRIC, 0.25, solver="coupled_newton", precision="fp16"),
    "eigenbasis": lambda: linalg.eigenbasis(SYMMETRIC),
    "eigendecomposition": lambda: linalg.eigendecomposition(SYMMETRIC),
    "refresh_eigenbasis": lambda: linalg.refresh_eigenbasis(SYMMETRIC, BASES),
    "logit_bound": lambda: attention_logits.logit_bound(A[None], A[None], 1.0),
}


def tensors(result: Any) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else result if isinstance(result, tuple) else vars(result).values()
    return [value for value in found if isinstance(value, Tensor)]


@pytest.mark.first_tier("state", "function")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("state", STATES)
def test_functions_that_people_call(state: str, function: str) -> None:
    wanted = tensors(FUNCTIONS[function]())
    with STATES[state]():
        found = tensors(FUNCTIONS[function]())
    assert len(wanted) > 0
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


def test_compiled_newton_schulz_under_autocast() -> None:
    compiled = torch.compile(linalg.newton_schulz, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(A), linalg.newton_schulz(A))


@pytest.mark.parametrize("state", STATES)
def test_a_closure_runs_in_the_state_of_the_program(state: str) -> None:
    model = model_of("plain")
    optimizer = hf_emopt.Muon(model)
    give(model, 0)
    seen = []

    def closure() -> float:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.get_float32_matmul_precision()))
        return 0.0

    with STATES[state]():
        wanted = (torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), torch.get_float32_matmul_precision())
        optimizer.step(closure)
        assert seen == [wanted]


def under_autocast(rule: str, layout: str) -> dict[str, Tensor]:
    """Updates that were put off end in hooks of a forward pass, which runs under autocast more often than not."""
    model = zoo()
    wrapped = wrap(model, layout)
    optimizer = build(model, rule, overlap_param_gather=layout == "ddp")
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            backward(wrapped, step)
            optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return weights(wrapped)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo"])
def test_layouts(two: World, rule: str, layout: str) -> None:
    wanted = single(rule, 3)
    for found in two.run(under_autocast, rule=rule, layout=layout):
        assert_close(found, wanted, 1e-5)
