"""LoRA adapters of PEFT: what is routed where, two learning rates, the scale of the product, adapters that come and go."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer, create_riemannian_optimizer
from torch import Tensor, nn
from transformers import get_scheduler

import hf_emopt
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.integrations.transformers import group_learning_rates, summary
from hf_emopt.tools.estimate import estimate

CLASSES = [hf_emopt.Muon, hf_emopt.NorMuon, hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo]


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.Linear(6, 11))


def adapted(**options: Any) -> Any:
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["1", "3"], **options})
    return peft.get_peft_model(body(), config)


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(tokens) - 1.0).square().mean().backward()
    optimizer.step()


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


# --- two learning rates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("schedule", ["cosine", "warmup_stable_decay"])
def test_the_ratio_of_rates_is_kept_by_schedulers(cls: Any, schedule: str) -> None:
    model = adapted(target_modules=["0", "1", "3"])
    optimizer = cls(model, lr=1e-3, aux_lr=1e-4, lora_lr_ratio=16.0)
    by_side = {
        name: group["lr"] for group in optimizer.param_groups for name in group["param_names"] if "lora_" in name
    }
    assert {name: rate for name, rate in by_side.items() if "lora_A" in name} == pytest.approx(
        dict.fromkeys((n for n in by_side if "lora_A" in n), 1e-3)
    )
    assert {by_side[name] for name in by_side if "lora_B" in name} == {16e-3}
    embeddings = {name.rsplit(".", 2)[1]: rate for name, rate in by_side.items() if "embedding" in name}
    assert embeddings == pytest.approx({"lora_embedding_A": 1e-4, "lora_embedding_B": 16e-4})

    kwargs = {"num_decay_steps": 6} if schedule == "warmup_stable_decay" else {}
    scheduler = get_scheduler(
        schedule, optimizer, num_warmup_steps=4, num_training_steps=20, scheduler_specific_kwargs=kwargs
    )
    seen = set()
    for index in range(20):
        step(model, optimizer, index)
        rates = group_learning_rates(optimizer)
        a, b = (
            next(rate for key, rate in rates.items() if key.endswith(end)) for end in ("lr/matrix", "matrix_lora_B")
        )
        assert b == pytest.approx(16.0 * a)
        seen.add(round(a, 9))
        scheduler.step()
    assert len(seen) > 5


@pytest.mark.parametrize("cls", CLASSES)
def test_options_come_through_optim_args(cls: Any) -> None:
    assert parse_optim_args("lora_lr_ratio=16", cls) == {"lora_lr_ratio": 16.0}
    if cls in (hf_emopt.Muon, hf_emopt.NorMuon):
        parsed = parse_optim_args("lora=joint, lora_max_change=0.3, lora_scale=product", cls)
        assert parsed == {"lora": "joint", "lora_max_change": 0.3, "lora_scale": "product"}
        assert cls(adapted(), **parsed).routes.matrix_count == 2
        with pytest.raises(ValueError, match=r"separate\|joint"):
            parse_optim_args("lora=both", cls)
    else:
        with pytest.raises(ValueError, match="unknown key 'lora'"):
            parse_optim_args("lora=joint", cls)


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("inf"), float("nan")])
def test_ratios_out_of_range(ratio: float) -> None:
    with pytest.raises(ValueError, match="lora_lr_ratio"):
        hf_emopt.Muon(adapted(), lora_lr_ratio=ratio)


def test_a_model_without_adapters_has_no_group_for_them() -> None:
    for options in ({"lora_lr_ratio": 4.0}, {"lora": "joint"}):
        optimizer = hf_emopt.Muon(body(), **options)  # type: ignore[arg-type]
        assert [group["name"] for group in optimizer.param_groups] == ["matrix", "aux", "aux_no_decay"]
        assert not any("adapters" in group for group in optimizer.param_groups)


# --- the scale of separate factors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "alpha"), [(2, 4), (8, 16), (8, 8), (32, 16)])
def test_the_product_moves_half_a_whole_step_whatever_rank_and_alpha(rank: int, alpha: int) -> None:
    """From PEFT's start the weight moves by ``s dB A``: its largest singular value is ``0.2 lr sqrt(max(m, n)) / 2``."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(384, 256, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["0"]))
    layer = model.base_model.model[0]
    polar = {"ns_steps": 12, "ns_coefficients": "polar_express", "weight_decay": 0.0}
    sizes = {}
    for scale in ("product", "factor"):
        copied = copy.deepcopy(model)
        optimizer = hf_emopt.Muon(copied, lr=1e-3, lora_scale=scale, **polar)  # type: ignore[arg-type]
        for name, parameter in copied.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter) if "lora_B" in name else torch.zeros_like(parameter)
        optimizer.step()
        delta = copied.base_model.model[0].get_delta_weight("default")
        sizes[scale] = float(torch.linalg.matrix_norm(delta, ord=2))
    whole = 1e-3 * 0.2 * 384**0.5
    assert sizes["product"] == pytest.approx(whole / 2, rel=0.1)
    # A factor of its own shape: s 0.2 sqrt(m) |A| lr, which follows alpha.
    norm = float(torch.linalg.matrix_norm(layer.lora_A["default"].weight, ord=2))
    assert sizes["factor"] == pytest.approx(alpha / rank * 1e-3 * 0.2 * 256**0.5 * norm, rel=0.02)


def test_a_scale_follows_its_hyperparameters_where_costs_do_not() -> None:
    """What a matrix costs is as it was at the first plan; how far it moves is as the groups say when a plan is made."""
    base = nn.Sequential(nn.Linear(384, 256, bias=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["0"]))
    optimizer = hf_emopt.Muon(model, lr=1e-3, lora_scale="product")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    first = optimizer.planned_parameters()
    assert any(p.scale != 1.0 for p in first)
    for group in optimizer.param_groups:
        group.update(lora_scale="factor", ns_steps=9)
    now = optimizer.planned_parameters()
    assert [p.scale for p in now] == [1.0] * len(first)
    assert [p.costs for p in now] == [p.costs for p in first]


# --- what PEFT adds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", ["separate", "joint"])
def test_dora_saved_modules_and_embeddings(lora: Any) -> None:
    model = adapted(target_modules=["0", "1", "3"], use_dora=True, modules_to_save=["4"])
    optimizer = hf_emopt.Muon(model, lr=1e-2, lora=lora)
    kinds = {name: group["kind"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {kinds[name] for name in kinds if "magnitude" in name} == {"aux"}
    assert {kinds[name] for name in kinds if "lora_A" in name or "lora_B" in name} == {"matrix"}
    assert {kinds[name] for name in kinds if "lora_embedding" in name} == {"aux" if lora == "separate" else "matrix"}
    before = snapshot(model)
    for index in range(3):
        step(model, optimizer, index)
    assert changed(model, before) == set(kinds)
    saved = next(name for name in kinds if "modules_to_save" in name and name.endswith("weight"))
    assert optimizer.routes.by_name[saved].adapter is None
    matrices = 3 if lora == "joint" else 4
    others = sum(kinds[name] == "matrix" for name in kinds if "modules_to_save" in name)
    assert optimizer.transform_count == 3 * (matrices + others)
    assert f"{matrices + others} matrices" in summary(optimizer)
    assert estimate(optimizer).matrices == matrices + others


@pytest.mark.parametrize("cls", CLASSES)
def test_loraplus_of_peft(cls: Any) -> None:
    model = adapted(target_modules=["1", "3"], use_dora=True, modules_to_save=["4"])
    optimizer = create_loraplus_optimizer(model, cls, lr=1e-3, loraplus_lr_ratio=16, loraplus_weight_decay=0.1)
    before = snapshot(model)
    for index in range(12):
        step(model, optimizer, index)
    assert changed(model, before) == {name for name, p in model.named_parameters() if p.requires_grad}
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            wanted = 16e-3 if "lora_B" in name or parameter.ndim == 1 else 1e-3
            assert rates[id(parameter)] == pytest.approx(wanted), name


@pytest.mark.parametrize("cls", CLASSES)
def test_riemannian_preconditioner_of_peft(cls: Any) -> None:
    """A subclass that changes gradients before our step: the weights are those of our class on the changed gradients."""
    model, plain = adapted(init_lora_weights=False), adapted(init_lora_weights=False)
    plain.load_state_dict(model.state_dict())
    optimizer = create_riemannian_optimizer(model, cls, lr=1e-2, reg=1e-2)
    own = cls([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    for index in range(3):
        step(model, optimizer, index)
        for ours, theirs in zip(plain.parameters(), model.parameters()):
            ours.grad = None if theirs.grad is None else theirs.grad.clone()
        own.step()
    for ours, theirs in zip(plain.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)
    assert optimizer.transform_count == own.transform_count == 3 * 4


# --- adapters that come and go ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", ["separate", "joint"])
def test_switching_between_adapters(lora: Any) -> None:
    """Only the active adapter moves; the other's weights and momentum are as it left them, whatever the decay."""
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["1"]))
    for parameter in (p for n, p in model.named_parameters() if "lora_" in n):
        parameter.requires_grad_(True)
    optimizer = hf_emopt.Muon(model, lr=1e-2, weight_decay=0.1, lora=lora)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        before = snapshot(model)
        momentum = {p: copy.deepcopy(dict(optimizer.state[p])) for g in optimizer.param_groups for p in g["params"]}
        step(model, optimizer)
        step(model, optimizer, 1)
        moved = changed(model, before)
        assert moved == {n for n, _ in model.named_parameters() if f".{name}." in n}
        for group in optimizer.param_groups:
            for own, parameter in zip(group["param_names"], group["params"]):
                if f".{name}." not in own:
                    for key, value in momentum[parameter].items():
                        assert torch.equal(optimizer.state[parameter][key], value)
    with model.disable_adapter():
        before = snapshot(model)
        optimizer.zero_grad()
        optimizer.step()
        assert not changed(model, before)


@pytest.mark.parametrize("lora", ["separate", "joint"])
def test_an_adapter_added_later(lora: Any) -> None:
    model = adapted(use_dora=True)
    optimizer = hf_emopt.Muon(model, lr=1e-2, lora=lora)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=10)
    step(model, optimizer)
    scheduler.step()
    model.add_adapter("late", peft.LoraConfig(r=3, target_modules=["1", "3"], use_dora=True))
    model.set_adapter("late")
    with pytest.warns(
        UserWarning, match=r"6 parameters have a gradient and are not the optimizer's.*refresh_parameters"
    ):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)  # once is enough

    count, groups = optimizer.transform_count, len(optimizer.param_groups)
    old = {p: dict(s) for p, s in optimizer.state.items()}
    added, removed = optimizer.refresh_parameters()
    late = [n for n, p in model.named_parameters() if ".late." in n]
    assert (sorted(added), removed) == (sorted(late), [])
    assert len(optimizer.param_groups) == groups  # schedulers count them
    before = snapshot(model)
    for index in range(2):  # B is zero, so A waits for it
        step(model, optimizer, index)
        scheduler.step()
    assert changed(model, before) == set(late)
    assert optimizer.transform_count == count + 2 * (2 if lora == "joint" else 4)
    assert all(
        optimizer.state[p]["momentum_buffer"] is s["momentum_buffer"] for p, s in old.items() if "momentum_buffer" in s
    )
    assert {name for g in optimizer.state_dict()["param_groups"] for name in g["param_names"]} >= set(late)


def test_an_adapter_deleted_takes_its_state_along() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["1"]))
    for parameter in (p for n, p in model.named_parameters() if "lora_" in n):
        parameter.requires_grad_(True)
    optimizer = hf_emopt.SOAP(model, lr=1e-2, precondition_frequency=2)
    for name in ("default", "other"):
        model.set_adapter(name)
        step(model, optimizer)
    assert len(optimizer.state) == 6
    model.set_adapter("default")
    gone = {n for n, _ in model.named_parameters() if ".other." in n}
    model.delete_adapter("other")
    added, removed = optimizer.refresh_parameters()
    assert (added, set(removed)) == ([], gone)
    assert len(optimizer.state) == 4
    assert not gone & {name for group in optimizer.param_groups for name in group["param_names"]}
    before = snapshot(model)
    step(model, optimizer)
    step(model, optimizer)
    assert changed(model, before) == {n for n, _ in model.named_parameters() if "lora_" in n}
    assert len(optimizer.routes) == 4
    restored = hf_emopt.SOAP(model, precondition_frequency=2)
    restored.load_state_dict(optimizer.state_dict())


def test_refreshing_needs_a_model() -> None:
    model = adapted()
    optimizer = hf_emopt.Muon([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ValueError, match="pass the model"):
        optimizer.refresh_parameters()


# --- quantized weights underneath -------------------------------------------------------------------------------------


class FourBit(nn.Module):
    """A frozen linear map in the form that bitsandbytes gives it: packed bytes, and constants of the quantization."""

    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inp, out
        packed = torch.randint(0, 256, (inp * out // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.absmax = torch.rand(4)  # type: ignore[attr-defined]
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inp, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, out, bias=False)})
        self.scaling = {"default": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        high, low = self.weight.view(-1).bitwise_right_shift(4), self.weight.view(-1).bitwise_and(15)
        whole = torch.stack([high, low], 1).view(self.out_features, self.in_features).float() / 15 - 0.5
        adapter = self.lora_B["default"](self.lora_A["default"](x))
        return x @ whole.mT + 2.0 * adapter


@pytest.mark.parametrize("cls", CLASSES)
def test_frozen_four_bit_weights_are_left_alone(cls: Any) -> None:
    """Neither routed nor read nor written: same storage, same bytes, same attributes; the adapters train."""
    torch.manual_seed(0)
    model = nn.Sequential(FourBit(8, 12), nn.Tanh(), FourBit(12, 8))
    modes = [{"lora": "joint"}, {}] if cls in (hf_emopt.Muon, hf_emopt.NorMuon) else [{}]
    for options in modes:
        frozen = [layer.weight for layer in (model[0], model[2])]
        kept = [(p, p.data_ptr(), p._version, p.absmax, p.detach().clone()) for p in frozen]
        optimizer = cls(model, lr=1e-2, **options)
        assert all("lora_" in name for group in optimizer.param_groups for name in group["param_names"])
        before = snapshot(model)
        for _ in range(12):
            optimizer.zero_grad()
            (model(torch.randn(4, 8)) - 1.0).square().mean().backward()
            optimizer.step()
        assert changed(model, before) == {n for n, p in model.named_parameters() if p.requires_grad}
        for (old, pointer, version, absmax, values), now in zip(kept, (model[0].weight, model[2].weight)):
            assert now is old
            assert (now.data_ptr(), now._version, now.absmax is absmax) == (pointer, version, True)
            assert torch.equal(now, values)
        names = {name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]}
        assert len(names) == len(optimizer.state) == 4
        explained = optimizer.explain()
        assert "quantized" not in explained
        assert "lora_A" in explained


# --- factors of the covariance ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo])
def test_adapters_are_preconditioned_on_the_side_of_their_rank(cls: Any) -> None:
    sizes: dict[bool, set[int]] = {}
    for one_sided in (True, False):
        model = adapted(modules_to_save=["4"])
        optimizer = cls(model, lr=1e-2, lora_one_sided=one_sided, precondition_frequency=2)
        for index in range(3):
            step(model, optimizer, index)
        sides: set[int] = set()
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"]):
                if "lora_" in name:
                    factors = [v for k, v in optimizer.state[parameter].items() if k.startswith("factor.")]
                    sides |= {int(factor.shape[-1]) for factor in factors}
        sizes[one_sided] = sides
        # What is no adapter keeps both sides.
        (dense,) = [g for g in optimizer.param_groups if g["kind"] == "matrix" and g["name"] == "matrix"] or [None]
        if one_sided and dense is not None and not any("lora_" in n for n in dense["param_names"]):
            assert dense["max_preconditioner_dim"] > 2
    assert sizes == {True: {2}, False: {2, 6, 10}}
