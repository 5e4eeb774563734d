"""Faults that users of other implementations met, and those found when this one was handled roughly.

Each test counts transforms or compares weights; that a loss falls shows nothing.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import hf_emopt
from hf_emopt.distributed.layout import UnsupportedLayoutError

ALL = (hf_emopt.Muon, hf_emopt.NorMuon, hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo)


class Net(nn.Module):
    """Two matrices without embeddings or heads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def backward(model: nn.Module, step: int = 0, scale: float = 1.0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    (scale * model(x).square().mean()).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------- memory and strides


@pytest.mark.parametrize("compat", [None, "moonlight"])
@pytest.mark.parametrize("kind", ["matrix", "aux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", ["weight", "gradient", "expanded gradient", "slice"])
def test_strides_do_not_matter(odd: str, dtype: torch.dtype, kind: str, compat: str | None) -> None:
    """torch's fused AdamW on a CPU pairs elements by place in memory: other strides step other elements."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(6, 4, generator=generator), torch.randn(3, 6, 4, generator=generator)
    if odd == "expanded gradient":
        gradients[:] = gradients[:, :1]
    ends = []
    for strange in (False, True):
        weight = start.to(dtype, copy=True)
        if strange and odd == "weight":
            weight = start.T.contiguous().T.to(dtype)
        if strange and odd == "slice":
            weight = torch.stack([start, start], dim=-1).to(dtype)[..., 0]
        param = nn.Parameter(weight)
        assert param.is_contiguous() is not (strange and odd in ("weight", "slice"))
        optimizer = hf_emopt.Muon([{"params": [param], "kind": kind}], lr=0.1, compat=compat, allow_no_matrices=True)
        for gradient in gradients.to(dtype):
            if strange and odd == "gradient":
                gradient = gradient.T.contiguous().T
            if strange and odd == "expanded gradient":
                gradient = gradient[:1].expand(6, 4)
            param.grad = gradient
            optimizer.step()
        ends.append(param.detach().float().contiguous())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(ends[0], start.to(dtype).float())


@pytest.mark.parametrize("cls", ALL)
def test_parameters_without_elements_are_stepped_over(cls: Any) -> None:
    matrix, empty_matrix, empty = (nn.Parameter(torch.randn(s)) for s in ((4, 4), (0, 4), (0,)))
    groups = [{"params": [matrix, empty_matrix], "kind": "matrix"}, {"params": [empty], "kind": "aux"}]
    optimizer = cls(groups, lr=0.1)
    before = matrix.detach().clone()
    for _ in range(2):
        for p in (matrix, empty_matrix, empty):
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.skipped_steps == 0
    assert not torch.equal(before, matrix)


def test_a_parameter_emptied_in_place_is_refused() -> None:
    """Wrappers put another tensor into the same Parameter; a plan made before must not be followed."""
    p = nn.Parameter(torch.randn(8, 6))
    optimizer = hf_emopt.Muon([("layer.weight", p)])
    optimizer.explain()
    p.data = torch.randn(24)
    p.grad = torch.randn(24)
    with pytest.raises(UnsupportedLayoutError, match=r"layer\.weight was \(8, 6\) .* is \(24,\) .*FSDP2"):
        optimizer.step()


def test_a_model_cast_after_planning_steps_in_its_new_dtype() -> None:
    model = net()
    optimizer = hf_emopt.Muon(model, lr=1e-5)
    optimizer.explain()
    model.bfloat16()
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state[model.up.weight]["weight_low_bits"].dtype is torch.int16
    assert optimizer.state[model.up.weight]["momentum_buffer"].dtype is torch.float32
    assert [p.dtype for p in model.parameters()] == [w.dtype for w in before]


# ---------------------------------------------------------------------------------------------- copies and schedulers


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_made_under_a_scheduler_steps_itself(cls: Any, how: str) -> None:
    """A scheduler hangs a step bound to its optimizer on the object; the copy must not inherit it."""
    model = net()
    optimizer = cls(model, lr=0.05)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    pair = (model, optimizer)
    other, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    before = weights(model)
    train(other, copied, range(2, 4))
    assert same(before, weights(model)), "the copy stepped the original"
    train(model, optimizer, range(2, 4))
    assert same(weights(other), weights(model))


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=5),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.2, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o,
        [float(g["lr"]) / 10 for g in o.param_groups],
        [float(g["lr"]) for g in o.param_groups],
        4,
        cycle_momentum=False,
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_torch_schedulers_keep_the_ratio_and_every_group_moves(name: str, as_tensor: bool) -> None:
    model = net()
    rates = (0.05, 0.01)
    lr, aux_lr = map(torch.tensor, rates) if as_tensor else rates
    optimizer = hf_emopt.Muon(model, lr=lr, aux_lr=aux_lr)
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    for step in range(8):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
        by_kind = {g["kind"]: float(g["lr"]) for g in optimizer.param_groups}
        assert {float(g["lr"]) for g in optimizer.param_groups} == set(by_kind.values())
        assert by_kind["matrix"] == pytest.approx(5 * by_kind["aux"], rel=1e-5)
        seen.append(by_kind["aux"])
    assert len(set(seen)) > 1


def test_resuming_under_a_scheduler_continues_the_schedule() -> None:
    """The rate of a loaded group, its initial_lr and the scheduler's own count agree."""

    def build() -> tuple[Net, Any, Any]:
        model = net()
        optimizer = hf_emopt.Muon(model, lr=0.05, aux_lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

    def go(model: Net, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            train(model, optimizer, range(step, step + 1))
            scheduler.step()

    whole = build()
    go(*whole, range(8))
    first, second = build(), build()
    go(*first, range(4))
    second[0].load_state_dict(first[0].state_dict())
    second[2].load_state_dict(first[2].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    go(*second, range(4, 8))
    assert same(weights(whole[0]), weights(second[0]))
    assert [g["lr"] for g in whole[1].param_groups] == [g["lr"] for g in second[1].param_groups]


# ---------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("saver", "loader"),
    # Shampoo and KLShampoo keep state of one form, so a mix-up of the two cannot be seen.
    [pair for pair in itertools.permutations(ALL, 2) if set(pair) != {hf_emopt.Shampoo, hf_emopt.KLShampoo}],
)
def test_state_of_another_optimizer_is_refused(saver: Any, loader: Any) -> None:
    model = net()
    optimizer = saver(model, lr=0.01)
    train(model, optimizer, range(1))
    other = loader(net(), lr=0.01)
    with pytest.raises(ValueError, match=r"another optimizer saved it|parameter groups"):
        other.load_state_dict(optimizer.state_dict())
    assert not any(other.state.values())


def test_state_of_adamw_is_refused_where_nothing_names_it() -> None:
    model = net()
    params = [p for p in model.parameters() if p.ndim == 2]
    adamw = torch.optim.AdamW(params)
    backward(model)
    adamw.step()
    with pytest.raises(ValueError, match=r"cannot be told whose moments"):
        hf_emopt.Muon(params).load_state_dict(adamw.state_dict())


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "num_hidden_layers": 1}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def test_state_of_other_matrices_is_refused() -> None:
    model = tiny_llama()
    whole, by_head = hf_emopt.NorMuon(model), hf_emopt.NorMuon(model, per_head=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    whole.step()
    with pytest.raises(ValueError, match=r"another shape of row_second_moment\.0.*per_head"):
        by_head.load_state_dict(whole.state_dict())


@pytest.mark.parametrize("wrapper", ["compile", "data parallel", "both"])
@pytest.mark.parametrize("direction", ["wrapped to plain", "plain to wrapped"])
def test_names_that_a_wrapper_changed_still_find_their_state(wrapper: str, direction: str) -> None:
    """A run under DDP or torch.compile resumes on one process, and the other way round."""

    def wrap(model: nn.Module) -> nn.Module:
        if wrapper != "data parallel":
            model = torch.compile(model, backend="eager")
        if wrapper != "compile":
            outer = nn.Module()
            outer.module = model  # as DistributedDataParallel names it
            model = outer
        return model

    first, second = net(), net()
    wrapped = direction == "wrapped to plain"
    saver = hf_emopt.Muon(wrap(first) if wrapped else first, lr=0.05)
    loader = hf_emopt.Muon(second if wrapped else wrap(second), lr=0.05)
    assert saver.param_groups[0]["param_names"] != loader.param_groups[0]["param_names"]
    train(first, saver, range(2))
    second.load_state_dict(first.state_dict())
    loader.load_state_dict(saver.state_dict())
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert saver.state[p].keys() == loader.state[q].keys()
    train(first, saver, range(2, 4))
    train(second, loader, range(2, 4))
    assert same(weights(first), weights(second))


def test_hooks_see_and_may_change_what_is_loaded() -> None:
    model = net()
    optimizer = hf_emopt.Muon(model)
    train(model, optimizer, range(1))
    seen: list[int] = []

    def erase(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {i: {k: torch.zeros_like(v) for k, v in entry.items()} for i, entry in state_dict["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(erase)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [6]
    assert not optimizer.state[model.up.weight]["momentum_buffer"].any()


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (lambda a, b: [("x", a), ("y", a)], "y and x are one parameter"),
        (lambda a, b: [{"params": [("x", a)]}, {"params": [("x", b)]}], "two parameters are named 'x'"),
        (lambda a, b: [{"params": [a], "momentun": 0.5}], "'momentun' is no hyperparameter; did you mean 'momentum'"),
        (lambda a, b: [{"params": [a], "aux_lr": 0.5}], "'aux_lr': inside a group it is 'lr'"),
    ],
)
def test_mistakes_in_groups_are_named(params: Any, message: str) -> None:
    a, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match=message):
        hf_emopt.Muon(params(a, b))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "1e-3"}, "lr='1e-3' must be a finite number"),
        ({"lr": float("inf")}, "lr=inf must be a finite number"),
        ({"aux_lr": float("nan")}, "aux_lr=nan must be a finite number"),
        ({"nesterov": "false"}, "nesterov='false' must be True or False"),
        ({"cautious_weight_decay": "no"}, "cautious_weight_decay='no' must be True or False"),
        ({"compat": "keller", "ns_coefficients": "aol"}, "'aol' has a normalization of its own; leave out compat"),
        ({"eps": 1e-7, "ns_coefficients": "aol"}, "'aol' has a normalization of its own; leave out eps"),
    ],
)
def test_what_would_fail_later_fails_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf_emopt.Muon(net(), **options)


def test_a_group_may_give_a_torch_dtype() -> None:
    p = nn.Parameter(torch.randn(4, 4))
    optimizer = hf_emopt.Muon([{"params": [p], "ns_dtype": torch.float64}])
    p.grad = torch.randn(4, 4)
    optimizer.step()
    assert optimizer.param_groups[0]["ns_dtype"] == "float64"


def test_a_group_of_another_optimizer_can_be_passed_on() -> None:
    model = net()
    first = hf_emopt.Muon(model, lr=0.05, momentum=0.8)
    second = hf_emopt.Muon(first.param_groups)
    assert [(g["kind"], g["param_names"], g["lr"], g.get("momentum"), g.get("units")) for g in second.param_groups] == [
        (g["kind"], g["param_names"], g["lr"], g.get("momentum"), g.get("units")) for g in first.param_groups
    ]


def test_frozen_members_do_not_shift_the_matrix_views_of_a_group() -> None:
    model = net()
    groups = [
        {"params": g["params"], "kind": g["kind"], "units": g.get("units")} for g in hf_emopt.Muon(model).param_groups
    ]
    model.up.weight.requires_grad_(False)
    optimizer = hf_emopt.Muon(groups[:1])
    model.down.weight.grad = torch.randn(8, 12)
    before = model.down.weight.detach().clone()
    optimizer.step()
    assert optimizer.transform_count == 1
    assert not torch.equal(before, model.down.weight)


def test_messages_speak_of_the_argument_that_was_given() -> None:
    with pytest.raises(ValueError, match="muon_modules: 'uq' matches no parameter"):
        hf_emopt.Muon(net(), muon_modules="uq")
    with pytest.raises(ValueError, match="matrix_modules: 'uq' matches no parameter"):
        hf_emopt.SOAP(net(), matrix_modules="uq")
    with pytest.raises(ValueError, match=r"^aux_lr=-1"):
        hf_emopt.Muon(net(), aux_lr=-1.0)
    with pytest.raises(ValueError, match=r"^lr=-1"):
        hf_emopt.Muon(net(), lr=-1.0)
    with pytest.raises(ValueError, match="Name the matrices with matrix_modules"):
        hf_emopt.SOAP(nn.Sequential(nn.LayerNorm(4)))


# ---------------------------------------------------------------------------------------------- matrices and modules


@pytest.mark.parametrize("cls", ALL)
def test_zero_gradients_and_idle_experts_stay_finite(cls: Any) -> None:
    """LoRA's A at the first step, and an expert of a stack that no token reached."""
    stack, adapter = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(2, 16))
    optimizer = cls([{"params": [stack, adapter], "kind": "matrix"}], lr=0.1, weight_decay=0.0)
    before = [stack.detach().clone(), adapter.detach().clone()]
    for step in range(3):
        g = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(step))
        g[1] = 0.0
        stack.grad, adapter.grad = g, torch.zeros(2, 16)
        optimizer.step()
    assert torch.equal(adapter, before[1])
    assert torch.equal(stack[1], before[0][1])
    assert torch.isfinite(stack).all()
    assert all(not torch.equal(stack[i], before[0][i]) for i in (0, 2))
    assert all(torch.isfinite(v.float()).all() for s in optimizer.state.values() for v in s.values())


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_optimizer_steps_every_dtype_as_float32(cls: Any, dtype: torch.dtype) -> None:
    """The same gradients give the same weights, up to the spacing of the dtype."""
    if cls is hf_emopt.SOAP and dtype is torch.float64:
        pytest.skip("a 12 x 8 gradient has no unique eigenbasis on its long side, so the two precisions choose others")
    ends = []
    for kind in (torch.float32, dtype):
        model = net().to(dtype).to(kind)
        optimizer = cls(model, lr=0.05)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype).to(kind)
            optimizer.step()
        assert all(p.dtype is kind for p in model.parameters())
        ends.append([w.double() for w in weights(model)])
    start = [w.double() for w in weights(net().to(dtype))]
    spacing = max(torch.finfo(dtype).eps, 1e-5)
    for a, b, before in zip(*ends, start, strict=True):
        assert (a - before).norm() > 0.05
        assert (a - b).norm() <= spacing * (a.norm() + before.norm())


@pytest.mark.parametrize("cls", [hf_emopt.Muon, hf_emopt.NorMuon])
def test_gpt2_with_a_tied_head_steps_each_weight_once(cls: Any) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = cls(model, lr=0.1, weight_decay=0.0)
    assert model.lm_head.weight is model.transformer.wte.weight
    table = model.transformer.wte.weight
    before = table.detach().clone()
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    gradient = table.grad.clone()
    optimizer.step()
    assert optimizer.transform_count == 2 * (3 + 1 + 1 + 1)
    # A first AdamW step is lr times the sign, once.
    big = gradient.abs() > 1e-5
    torch.testing.assert_close((before - table.detach())[big], 0.1 * gradient.sign()[big], rtol=1e-2, atol=0)
    kinds = {name: g["kind"] for g in optimizer.param_groups for name in g["param_names"]}
    assert {n for n, k in kinds.items() if k == "aux" and "ln_" not in n and not n.endswith("bias")} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }
    assert set(optimizer.state) == set(model.parameters())


class Hybrid(nn.Module):
    """Convolutions, a gain (C, 1, 1), a depthwise convolution and linear maps, as vision models mix them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise, self.taps = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv1d(8, 8, 4, groups=8)
        self.layer_scale = nn.Parameter(torch.full((8, 1, 1), 0.1))
        self.mix, self.classifier = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.conv(self.stem(x))) * self.layer_scale
        return self.classifier(self.mix(self.taps(x.flatten(2)).mean(-1)))


@pytest.mark.parametrize("cls", ALL)
def test_a_hybrid_of_convolutions_and_linear_maps_trains_through_the_public_call(cls: Any) -> None:
    torch.manual_seed(0)
    model = Hybrid()
    optimizer = cls(model, lr=1e-2)
    assert {r.name for r in optimizer.routes.matrices} == {"conv.weight", "mix.weight"}
    before = weights(model)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
    assert optimizer.transform_count == 2 * 2
    assert all(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


def test_names_are_matched_by_component_only() -> None:
    """attn_gate, attn_gated_norm, embed_proj and head_mixer are neither routers, nor norms, nor embeddings, nor heads."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("attn_gate", "embed_proj", "head_mixer"):
                self.add_module(name, nn.Linear(8, 8, bias=False))
            self.attn_gated_norm, self.attn_norm = nn.LayerNorm(8), nn.LayerNorm(8)

    for params in (Odd(), Odd().named_parameters()):
        optimizer = hf_emopt.Muon(params)
        matrices = {n for g in optimizer.param_groups if g["kind"] == "matrix" for n in g["param_names"]}
        assert matrices == {"attn_gate.weight", "embed_proj.weight", "head_mixer.weight"}


def test_a_convolution_steps_along_the_polar_factor_of_its_flattened_gradient() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 10, 3, bias=False)
    model = nn.Sequential(conv)
    optimizer = hf_emopt.Muon(
        model, lr=1.0, weight_decay=0.0, adjust_lr_fn="unscaled", nesterov=False, muon_modules="0"
    )
    gradient, before = torch.randn(10, 6, 3, 3), conv.weight.detach().clone()
    conv.weight.grad = gradient.clone()
    optimizer.step()
    moved = (before - conv.weight.detach()).reshape(10, 54)
    torch.testing.assert_close(moved, hf_emopt.newton_schulz(gradient.reshape(10, 54)), rtol=1e-4, atol=1e-5)
    assert torch.linalg.svdvals(moved).min() > 0.5


# ---------------------------------------------------------------------------------------------- loss scaling


@pytest.mark.parametrize("cls", ALL)
def test_gradient_scaler_unscales_before_and_skips_on_overflow(cls: Any) -> None:
    model, plain = net(), net()
    optimizer, reference = cls(model, lr=0.05), cls(plain, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad(), reference.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        backward(plain, step)
        reference.step()
    for a, b in zip(weights(model), weights(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    before, count = weights(model), optimizer.transform_count
    optimizer.zero_grad()
    scaler.scale(model(torch.full((4, 8), float("inf"))).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert same(before, weights(model))
    assert optimizer.transform_count == count
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("cls", ALL)
def test_clearing_gradients_to_zero_equals_dropping_them(cls: Any) -> None:
    """zero_grad(set_to_none=False) before a backward pass that reaches everything changes no step."""
    ends = []
    for set_to_none in (True, False):
        model = net()
        optimizer = cls(model, lr=0.05)
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, step)
            optimizer.step()
        ends.append(weights(model))
    assert same(*ends)


def test_stochastic_rounding_repeats_on_replicas() -> None:
    """Two processes with other global seeds and the same gradients keep the same weights."""
    ends = []
    for seed in (1, 2):
        model = net().bfloat16()
        optimizer = hf_emopt.Muon(model, lr=1e-3, low_precision_weights="stochastic")
        for step in range(4):
            torch.manual_seed(seed)
            torch.randn(seed)
            gradient = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=gradient).bfloat16()
            optimizer.step()
        ends.append(weights(model))
    assert same(*ends)
    assert not same(ends[0], weights(net().bfloat16()))


def test_the_startup_text_says_what_the_rate_means() -> None:
    texts = {
        rule: hf_emopt.Muon(net(), adjust_lr_fn=rule).explain()
        for rule in ("match_rms_adamw", "original", "spectral", "unscaled")
    }
    assert "lr means what it means for AdamW" in texts["match_rms_adamw"]
    assert all(re.search("lr is not AdamW's", texts[rule]) for rule in ("original", "spectral", "unscaled"))
