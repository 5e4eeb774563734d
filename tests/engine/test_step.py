"""What one step does and does not touch: missing gradients, bad numbers, dtypes, scale, counting."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.distributed.exchange import Arrival
from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.engine.context import ApplyStream
from hf_emopt.engine.pipeline import pipeline

OPTIMIZERS = (hf_emopt.Muon, hf_emopt.NorMuon)


def snapshot(params, optimizer) -> list[Tensor]:
    tensors = [p.detach().clone() for p in params]
    for p in params:
        tensors += [v.clone() for k, v in sorted(optimizer.state.get(p, {}).items())]
    return tensors


def assert_same(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) == len(after)
    for a, b in zip(before, after):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("ns_dtype", [None, "bfloat16", "float16"])
def test_every_dtype_steps(cls, dtype: torch.dtype, ns_dtype: str | None) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 20)).to(dtype)
    optimizer = cls(model, lr=1e-2, ns_dtype=ns_dtype, muon_modules=r"0|2", aux_modules=r"bias")
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape).to(dtype)
        optimizer.step()
    for a, p in zip(before, model.parameters()):
        assert p.dtype is dtype
        assert torch.isfinite(p).all()
        assert not torch.equal(a, p)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_parameters_without_gradient_are_untouched(cls) -> None:
    """No decay, no state change, also where the parameter shares a batch with others of its shape."""
    params = [nn.Parameter(torch.randn(8, 6)) for _ in range(4)] + [nn.Parameter(torch.randn(6))]
    optimizer = cls(params, lr=0.1, weight_decay=0.5)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    idle, busy = [params[1], params[4]], [params[0], params[2], params[3]]
    for p in idle:
        p.grad = None
    before_idle, before_busy = snapshot(idle, optimizer), [p.detach().clone() for p in busy]
    optimizer.step()
    assert_same(before_idle, snapshot(idle, optimizer))
    assert all(not torch.equal(a, b) for a, b in zip(before_busy, busy))
    assert optimizer.transform_count == 4 + 3


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_idle_batch_mates_do_not_matter(cls) -> None:
    """A step of some matrices of a batch is the step that they would have taken alone."""
    start = [torch.randn(8, 6) for _ in range(3)]
    grads = [[torch.randn(8, 6) for _ in range(3)] for _ in range(4)]
    together, alone = [nn.Parameter(w.clone()) for w in start], nn.Parameter(start[2].clone())
    both, single = cls(together, lr=0.1), cls([alone], lr=0.1)
    for step in range(4):
        for i, p in enumerate(together):
            p.grad = grads[step][i] if i == 2 or step % 2 else None
        alone.grad = grads[step][2]
        both.step(), single.step()
    torch.testing.assert_close(together[2], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["matrix", "aux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_gradient_skips_the_whole_step(cls, bad: float, where: str, dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.randn(8, 6).to(dtype)), nn.Parameter(torch.randn(6).to(dtype))]
    optimizer = cls(params, lr=0.1)

    def backward(poison: bool) -> None:
        for p in params:
            p.grad = torch.randn(p.shape).to(dtype)
        if poison:
            params[where == "aux"].grad.view(-1)[3] = bad

    backward(False)
    optimizer.step()
    before = snapshot(params, optimizer)
    backward(True)
    optimizer.step()
    assert_same(before, snapshot(params, optimizer))
    assert optimizer.skipped_steps == 1
    backward(False)
    optimizer.step()
    assert all(not torch.equal(a, p) for a, p in zip(before, params))
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("compat", ["torch", "keller", "moonlight"])
def test_skipping_works_in_every_form_of_momentum(compat: str) -> None:
    params = [nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6))]
    optimizer = hf_emopt.Muon(params, lr=0.1, compat=compat)
    for poison in (False, True):
        before = snapshot(params, optimizer)
        for p in params:
            p.grad = torch.full_like(p, math.nan) if poison else torch.randn_like(p)
        optimizer.step()
    assert_same(before, snapshot(params, optimizer))


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("norm", [1e20, 1.0, 1e-6, 1e-12])
def test_the_update_does_not_depend_on_the_gradients_scale(cls, norm: float) -> None:
    direction = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    direction /= direction.norm()
    results = []
    for scale in (1.0, norm):
        p = nn.Parameter(torch.zeros(24, 16))
        p.grad = direction * scale
        cls([p], lr=1.0, weight_decay=0.0).step()
        results.append(p.detach())
    assert (results[0] - results[1]).norm() <= 1e-5 * results[0].norm()
    assert results[0].norm() > 1.0


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_zero_gradient_gives_zero_update(cls) -> None:
    """LoRA's A at the first step: B is zero, so its gradient is exactly zero."""
    p = nn.Parameter(torch.randn(4, 32))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    cls([p], lr=0.1, weight_decay=0.0).step()
    assert torch.equal(before, p)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("compat", [None, "torch"])
def test_momentum_is_the_average_and_gradients_are_not_written_to(cls, nesterov: bool, compat: str | None) -> None:
    """In torch 2.13 a bfloat16 parameter without Nesterov has its momentum normalized in place."""
    if compat and cls is hf_emopt.NorMuon:
        pytest.skip("NorMuon has no compat forms")
    extra = {"compat": compat} if compat else {}
    for dtype in (torch.bfloat16, torch.float32):
        p = nn.Parameter(torch.randn(8, 6).to(dtype))
        optimizer = cls([p], nesterov=nesterov, momentum=0.9, ns_dtype="bfloat16", **extra)
        expected = torch.zeros(8, 6)
        for _ in range(3):
            g = torch.randn(8, 6).to(dtype)
            p.grad = g.clone()
            expected = expected + 0.1 * (g.float() - expected)
            optimizer.step()
            assert torch.equal(p.grad, g)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (192, 3, 16, 16), (512, 512, 3, 3)])
def test_convolutions_step_by_the_stated_rms(shape: tuple[int, ...]) -> None:
    """The scale is that of (out, in * kh * kw), and momentum keeps the kernel's four dimensions."""
    out, inputs, kh, kw = shape
    conv = nn.Conv2d(inputs, out, (kh, kw), bias=False)
    optimizer = hf_emopt.Muon(nn.Sequential(conv), lr=1e-2, weight_decay=0.0, muon_modules=r"0")
    before = conv.weight.detach().clone()
    conv.weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    rms = (conv.weight - before).square().mean().sqrt() / 1e-2
    assert 0.75 * 0.2 <= rms <= 1.25 * 0.2
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].shape == shape


def test_channels_last_convolutions_equal_contiguous_ones() -> None:
    weight, grad = torch.randn(8, 4, 3, 3), torch.randn(8, 4, 3, 3)
    results = []
    for fmt in (torch.contiguous_format, torch.channels_last):
        conv = nn.Conv2d(4, 8, 3, bias=False)
        conv.weight.data = weight.clone(memory_format=torch.preserve_format).to(memory_format=fmt)
        optimizer = hf_emopt.Muon(nn.Sequential(conv), lr=0.1, muon_modules=r"0")
        conv.weight.grad = grad.to(memory_format=fmt)
        optimizer.step()
        assert conv.weight.is_contiguous(memory_format=fmt)
        results.append(conv.weight.detach())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_expert_stacks_equal_separate_matrices(cls) -> None:
    stack, grads = torch.randn(5, 8, 6), [torch.randn(5, 8, 6) for _ in range(3)]
    one = nn.Parameter(stack.clone())
    many = [nn.Parameter(w.clone()) for w in stack]
    stacked, separate = cls([{"params": [one], "kind": "matrix"}], lr=0.1), cls(many, lr=0.1)
    for g in grads:
        one.grad = g
        for p, part in zip(many, g):
            p.grad = part
        stacked.step(), separate.step()
    torch.testing.assert_close(one.detach(), torch.stack([p.detach() for p in many]), rtol=1e-5, atol=1e-6)
    assert stacked.transform_count == separate.transform_count == 15


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    optimizer = hf_emopt.Muon(model, muon_modules=r"1\.weight")
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight has a sparse gradient"):
        optimizer.step()


def test_flattened_parameters_are_refused_by_name() -> None:
    p = nn.Parameter(torch.randn(8, 6))
    optimizer = hf_emopt.Muon([("layer.weight", p)])
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.randn(24))
    optimizer.param_groups[0]["params"][0].grad = torch.randn(24)
    with pytest.raises(UnsupportedLayoutError, match=r"layer\.weight was \(8, 6\) .* is \(24,\) .*FSDP2"):
        optimizer.step()


def test_cautious_decay_only_where_the_update_shrinks_the_weight() -> None:
    w, g = torch.randn(8, 6), torch.randn(8, 6)
    moved = {}
    for cautious in (False, True):
        for wd in (0.0, 0.5):
            p = nn.Parameter(w.clone())
            p.grad = g.clone()
            hf_emopt.Muon([p], lr=0.1, weight_decay=wd, cautious_weight_decay=cautious).step()
            moved[cautious, wd] = p.detach() - w
    update = -moved[False, 0.0] / 0.1
    decay = moved[True, 0.5] - moved[True, 0.0]
    torch.testing.assert_close(decay, -0.1 * 0.5 * w * (w * update > 0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moved[False, 0.5] - moved[False, 0.0], -0.1 * 0.5 * w, rtol=1e-4, atol=1e-6)


def test_learning_rate_as_a_tensor() -> None:
    w, g = torch.randn(8, 6), torch.randn(8, 6)
    results = []
    for lr in (0.1, torch.tensor(0.1)):
        p, b = nn.Parameter(w.clone()), nn.Parameter(w[0].clone())
        p.grad, b.grad = g.clone(), g[0].clone()
        hf_emopt.Muon([p, b], lr=lr).step()
        results += [p.detach(), b.detach()]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_closure_runs_with_gradients() -> None:
    layer = nn.Linear(4, 4, bias=False)
    optimizer = hf_emopt.Muon(nn.Sequential(layer), muon_modules="0")

    def closure() -> float:
        optimizer.zero_grad()
        loss = layer(torch.ones(4)).sum()
        loss.backward()
        return float(loss.detach())

    assert isinstance(optimizer.step(closure), float)
    assert optimizer.transform_count == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, r"momentum=1.0 must be in \[0, 1\)"),
        ({"ns_steps": 0}, "ns_steps=0"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn='rms' is not one of match_rms_adamw"),
        ({"compat": "jax"}, "compat='jax' is not one of torch"),
        ({"ns_dtype": "int8"}, "ns_dtype='int8'"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"ns_coefficients": "jordon"}, "jordan"),
        ({"low_precision_weights": "fp8"}, "low_precision_weights='fp8'"),
        ({"aux_betas": (0.9, 1.0)}, "aux_betas"),
        ({"aux_eps": -1.0}, "aux_eps"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_emopt.Muon([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))], **arguments)


def test_the_stages_of_tasks_in_the_order_of_their_bytes_and_products() -> None:
    """Each task's first stage before the second of the one before; what fills begins when one has its products queued, brings
    nothing forward, and goes on after the next task."""
    done: list[str] = []

    def task(name: str, stages: int) -> Iterator[None]:
        for stage in range(stages):
            done.append(f"{name}{stage}")
            if stage + 1 < stages:
                yield

    pipeline([task(name, 3) for name in "abcd"], lambda: [task("e", 2), task("f", 1)])
    assert " ".join(done) == "a0 b0 a1 e0 f0 c0 b1 a2 e1 d0 c1 b2 d1 c2 d2"

    done.clear()
    pipeline([task("a", 3)], lambda: [task("e", 2)])
    assert " ".join(done) == "a0 e0 a1 e1 a2"

    done.clear()
    pipeline([], lambda: [task("e", 2), task("f", 2)])
    assert sorted(done) == ["e0", "e1", "f0", "f1"]


@pytest.mark.parametrize(
    ("options", "undisturbed"),
    [({}, True), ({"state_dtype": "bfloat16"}, False), ({"offload_state": "cpu"}, False)],
)
def test_work_beside_a_step_only_where_nobody_touches_the_state(options: dict, undisturbed: bool) -> None:
    """A refresh may run beside what follows where the state is kept as it is used, nobody measures it, and all of a batch's
    matrices take part. Who asks for state, or begins a step, waits for it; a step that fails does."""
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
    optimizer = hf_emopt.SOAP(model, **options)
    rule, clocks, joins = optimizer.rule, [], []
    transform, join = rule.transform, rule.join
    rule.transform = lambda x, state, group, ok, clock: clocks.append(clock) or transform(x, state, group, ok, clock)
    rule.join = lambda: joins.append(len(clocks)) or join()

    def step() -> bool:
        clocks.clear()
        joins.clear()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.randn_like(p)
        optimizer.step()
        assert clocks
        assert set(joins) <= {0}  # before the first matrix, and not after it
        return all(clock.undisturbed for clock in clocks)

    assert step() == undisturbed
    assert step() == undisturbed
    assert joins
    for ask in (lambda: optimizer.state, optimizer.synchronize, optimizer.state_dict):
        joins.clear()
        ask()
        assert joins
    with optimizer.diagnostics():
        assert not step()
    model[0].weight.grad = None
    model[0].weight.requires_grad_(False)
    clocks.clear()
    optimizer.step()
    assert not any(clock.undisturbed for clock in clocks)


def test_a_step_that_fails_leaves_nothing_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer, joins = hf_emopt.SOAP(model), []
    model.weight.grad = torch.randn(8, 8)
    optimizer.step()
    monkeypatch.setattr(optimizer.rule, "join", lambda: joins.append(None))

    def fail(*_: object) -> Tensor:
        joins.clear()
        raise ValueError("in the middle")

    monkeypatch.setattr(optimizer.rule, "transform", fail)
    with pytest.raises(ValueError, match="in the middle"):
        optimizer.step()
    assert joins


def test_updates_are_applied_on_a_stream_of_their_own_only_where_a_collective_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was packed here (an expert of this rank, a matrix that each rank transforms) is ready on its own stream alone."""
    apply_stream, held = ApplyStream(()), []

    def holding(device: torch.device, reads: tuple[Tensor, ...]) -> contextlib.AbstractContextManager[None]:
        held.append(reads)
        return contextlib.nullcontext()

    monkeypatch.setattr(apply_stream._streams, "is_open", lambda *_: True)
    monkeypatch.setattr(apply_stream._streams, "holding", holding)
    buffer, sent = torch.zeros(3), torch.zeros(2)
    with apply_stream.waiting_for(Arrival(buffer)):
        assert not held
    with apply_stream.waiting_for(Arrival(buffer, (object(),), (sent,))):
        assert len(held) == 1
    assert held[0][0] is buffer
    assert held[0][1] is sent
