"""Groups as a user gives them: their keys, their positions, and what schedulers write into them."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

import hf_emopt

RULES = {
    "muon": hf_emopt.Muon,
    "normuon": hf_emopt.NorMuon,
    "soap": hf_emopt.SOAP,
    "shampoo": hf_emopt.Shampoo,
    "kl_shampoo": hf_emopt.KLShampoo,
}
every_rule = pytest.mark.parametrize("cls", RULES.values(), ids=RULES)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    optimizer.zero_grad()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()


# ------------------------------------------------------------------ keys


@every_rule
def test_keys_of_other_packages_choose_the_kind_or_are_refused(cls: Any) -> None:
    rule = next(name for name, c in RULES.items() if c is cls)
    hidden = {"params": [weight(8, 8)]}
    for key, value in [("use_muon", False), ("is_muon", False), ("algorithm", "adamw"), ("optimizer", "adamw")]:
        optimizer = cls([hidden, {"params": [weight(12, 8)], key: value}])
        assert [g["kind"] for g in optimizer.param_groups] == ["matrix", "aux"], key
        added = {"params": [weight(9, 9)], key: value}
        optimizer.add_param_group(added)
        assert optimizer.param_groups[2]["kind"] == "aux"
    named = [("embed_tokens.weight", weight(12, 8))]
    assert [g["kind"] for g in cls([{"params": named, "algorithm": rule}]).param_groups] == ["matrix"]
    if "muon" in rule:
        assert cls([{"params": named, "use_muon": True}]).param_groups[0]["kind"] == "matrix"
    wrong = [{"algorithm": "lion"}, {"optimizer": "sgd"}, {"rule": "adamw2"}, {"use_muon": "no"}, {"is_muon": None}]
    wrong += [{"use_muon": False, "kind": "matrix"}, {"use_muon": False, "algorithm": rule}]
    wrong += [{"use_muon": True}] if "muon" not in rule else []
    for keys in wrong:
        for make in (lambda g: cls([g]), cls([hidden]).add_param_group):
            with pytest.raises(ValueError, match=f"group key {list(keys)[-1] if 'kind' not in keys else 'use_muon'}="):
                make({"params": [weight(12, 8)], **keys})


@every_rule
def test_labels_pass_and_what_would_be_ignored_is_refused(cls: Any) -> None:
    labels = {"lr_scale": 0.5, "lr_mult": 2.0, "layer_id": 3, "name": "block", "initial_lr": 1e-3, "my_key": "x"}
    model = net()
    optimizer = cls([{"params": model.parameters(), **labels, "foreach": None, "maximize": False}])
    assert all(labels.items() <= group.items() for group in optimizer.param_groups)
    step(model, optimizer)
    foreign = {"precondition_frequency": 3} if issubclass(cls, (hf_emopt.Muon, hf_emopt.NorMuon)) else {"ns_steps": 3}
    for keys in ({"weigth_decay": 0.1}, {"maximize": True}, {"amsgrad": True}, {"per_head": True}, foreign):
        key = next(iter(keys))
        message = "did you mean 'weight_decay'" if key == "weigth_decay" else f"{key!r} is no option"
        with pytest.raises(ValueError, match=message):
            cls([{"params": [weight(8, 8)], **keys}])
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [weight(8, 8)], **keys})
        optimizer.param_groups[0] |= keys
        with pytest.raises(ValueError, match=f"changed between steps.*{message}"):
            step(model, optimizer)
        del optimizer.param_groups[0][key]
    optimizer.param_groups[0]["use_muon"] = False
    with pytest.raises(ValueError, match=r"changed between steps.*use_muon=False"):
        step(model, optimizer)
    del optimizer.param_groups[0]["use_muon"]
    optimizer.param_groups[0]["kind"] = "aux"
    with pytest.raises(ValueError, match="kind from 'matrix' to 'aux'"):
        step(model, optimizer)


@every_rule
@pytest.mark.parametrize("kind", ["bogus", 3])
def test_a_kind_of_decay_that_there_is_none_of_is_refused(cls: Any, kind: Any) -> None:
    with pytest.raises(ValueError, match="weight_decay_type"):
        cls([{"params": [weight(8, 8)], "weight_decay_type": kind}])
    model = net()
    optimizer = cls(model)
    step(model, optimizer)
    optimizer.param_groups[0]["weight_decay_type"] = kind
    with pytest.raises(ValueError, match="weight_decay_type"):
        step(model, optimizer)


# ------------------------------------------------------------------ positions


def mixed_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, second, third = model[0], model[2], model[4]
    third.requires_grad_(False)
    return [
        {"params": list(first.parameters()), "lr": 1e-3},
        {"params": list(third.parameters()), "lr": 2e-3},
        {"params": [second.weight], "lr": 3e-3},
        {"params": [second.bias], "lr": 4e-3},
    ]


@every_rule
def test_groups_keep_their_order_and_say_what_became_of_them(cls: Any) -> None:
    model = net()
    optimizer = cls(mixed_groups(model))
    assert optimizer.user_groups == ((0, 1), (2,), (3,), (4,))
    assert [g["kind"] for g in optimizer.param_groups] == ["matrix", "aux", "aux", "matrix", "aux"]
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 1e-3, 2e-3, 3e-3, 4e-3]
    assert [len(g["params"]) for g in optimizer.param_groups] == [1, 1, 0, 1, 1]
    schedule = LambdaLR(optimizer, optimizer.expand([lambda _, s=s: s for s in (1.0, 2.0, 3.0, 4.0)]))
    step(model, optimizer)
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-3, 1e-3, 4e-3, 9e-3, 16e-3])
    with pytest.raises(ValueError, match="2 values for the 4 groups"):
        optimizer.expand([1, 2])
    model[4].requires_grad_(True)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 5e-3})
    assert optimizer.user_groups == ((0, 1), (2,), (3,), (4,), (5, 6))
    step(model, optimizer)
    assert copy.deepcopy(optimizer).user_groups == optimizer.user_groups
    assert cls(net()).user_groups == ((0, 1),)
    assert cls(net().named_parameters()).expand([7]) == [7, 7]


@every_rule
def test_groups_of_one_kind_hold_their_positions(cls: Any) -> None:
    given = [{"params": [weight(8)], "lr": 1e-3}, {"params": [weight(8, 8)], "lr": 2e-3}]
    given += [{"params": [weight(9, 9)], "kind": "aux", "lr": 3e-3}, {"params": [], "lr": 4e-3}]
    optimizer = cls(given)
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 2e-3, 3e-3, 4e-3]
    LambdaLR(optimizer, [lambda _: 1.0] * 4)
    OneCycleLR(optimizer, max_lr=[1e-3, 2e-3, 3e-3, 4e-3], total_steps=5)


@every_rule
def test_a_checkpoint_without_the_empty_group_loads(cls: Any) -> None:
    """Groups with nothing to train were left out once."""
    model = net()
    optimizer = cls(mixed_groups(model))
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    again = cls(mixed_groups(copy.deepcopy(model)))
    again.load_state_dict(optimizer.state_dict())
    del saved["param_groups"][2]
    other = copy.deepcopy(model)
    loaded = cls(mixed_groups(other))
    loaded.load_state_dict(saved)
    assert loaded.user_groups == optimizer.user_groups
    step(model, optimizer, 1)
    step(other, loaded, 1)
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)


# ------------------------------------------------------------------ schedulers


SCHEDULES = {
    "one_cycle": lambda o: OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=8),
    "cyclic": lambda o: CyclicLR(o, 1e-4, 1e-3, step_size_up=2),
}


@every_rule
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_cycle_of_momentum_is_of_the_matrices_alone(cls: Any, name: str) -> None:
    """The same weights as with the value written into the matrices' own hyperparameter, and as after a restart."""
    schedule_of = SCHEDULES[name]
    model, plain = net(), net()
    optimizer, by_hand = cls(model, aux_betas=(0.7, 0.99)), cls(plain, aux_betas=(0.7, 0.99))
    assert all("momentum" not in g for g in optimizer.param_groups if g["kind"] == "aux")
    schedule, seen = schedule_of(optimizer), set()
    for index in range(5):
        for group, own in zip(optimizer.param_groups, by_hand.param_groups):
            own["lr"] = group["lr"]
            if group["kind"] == "matrix":
                seen.add(group["momentum"])
                if "betas" in own:
                    own["betas"] = (group["momentum"], own["betas"][1])
                else:
                    own["momentum"] = group["momentum"]
        if index == 3:
            state, moved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(schedule.state_dict())
            other = net()
            other.load_state_dict(model.state_dict())
            model, optimizer = other, cls(other, aux_betas=(0.7, 0.99))
            schedule = schedule_of(optimizer)
            optimizer.load_state_dict(state)
            schedule.load_state_dict(moved)
        step(model, optimizer, index)
        step(plain, by_hand, index)
        schedule.step()
        assert all(g["betas"] == (0.7, 0.99) for g in optimizer.param_groups if g["kind"] == "aux")
    assert len(seen) > 2
    for one, two in zip(model.parameters(), plain.parameters()):
        assert torch.equal(one, two)


def test_a_cycle_out_of_range_is_refused() -> None:
    for cls in RULES.values():
        model = net()
        optimizer = cls(model)
        OneCycleLR(optimizer, max_lr=1e-3, total_steps=8, max_momentum=1.0)
        with pytest.raises(ValueError, match=r"(momentum|betas)=.*must be"):
            step(model, optimizer)


def test_shampoo_with_a_momentum_of_its_own_has_two_and_cycles_neither() -> None:
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(hf_emopt.Shampoo(net(), momentum=0.5), max_lr=1e-3, total_steps=8)


@every_rule
def test_a_lost_ratio_is_said(cls: Any) -> None:
    def build(lr: Any = 2e-3) -> tuple[nn.Module, Any]:
        model = net()
        return model, cls(model, lr=lr, aux_lr=5e-4)

    for lost in (
        lambda o: OneCycleLR(o, max_lr=1e-3, total_steps=8),
        lambda o: CyclicLR(o, 1e-4, 1e-3),
        lambda o: [g.update(lr=1e-3) for g in o.param_groups],
    ):
        for lr in (2e-3, torch.tensor(2e-3)):
            model, optimizer = build(lr)
            lost(optimizer)
            with pytest.warns(
                UserWarning, match="'matrix' and 'aux_no_decay' were built with the learning rates 0.002 and 0.0005"
            ):
                step(model, optimizer)
    model, optimizer = build()
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=4e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)  # no scheduler has done anything yet
    for _ in range(5):
        plateau.step(1.0)
    with pytest.warns(UserWarning, match=re.escape("both have 0.0004 now")):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)  # said once
        model, optimizer = build()
        schedule = OneCycleLR(optimizer, max_lr=[g["lr"] for g in optimizer.param_groups], total_steps=4)
        for _ in range(3):
            step(model, optimizer)
            schedule.step()
        model = net()
        optimizer = cls(model, lr=1e-3)
        OneCycleLR(optimizer, max_lr=1e-2, total_steps=4)
        step(model, optimizer)  # there was no ratio
        model, optimizer = build()
        warm_up = LambdaLR(optimizer, lambda s: min(1.0, s / 2))
        for _ in range(3):
            step(model, optimizer)  # from 0, which is one rate
            warm_up.step()


# ------------------------------------------------------------------ lists without names


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 8)
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)
        self.lm_head = nn.Linear(8, 64, bias=False)


@every_rule
def test_shapes_of_embeddings_in_a_list_without_names_are_named(cls: Any) -> None:
    model = Embedded()
    message = r"2 of them look like embeddings.*param\.0 \(64, 8\).*named_parameters\(\).*'kind': 'matrix'"
    with pytest.warns(UserWarning, match=message):
        cls(model.parameters())
    with pytest.warns(UserWarning, match="2 of them look like"):
        cls([{"params": [p]} for p in model.parameters()])
    optimizer = cls([model.up.weight])
    with pytest.warns(UserWarning, match="1 of them look like"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(512, 8))]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([{"params": model.parameters(), "kind": "matrix"}])
        cls(model.named_parameters())
        cls([model.up.weight, model.down.weight])
        cls([{"params": list(model.embed_tokens.parameters()), "kind": "aux"}, {"params": [model.up.weight]}])


@every_rule
def test_a_model_beside_the_groups_routes_them(cls: Any) -> None:
    model = Embedded()
    whole = cls(model)
    given = [
        {"params": [model.embed_tokens.weight, model.up.weight]},
        {"params": iter([model.down.weight]), "lr": 5e-3},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = cls((model, [*given, {"params": [model.lm_head.weight]}]))
    assert optimizer.user_groups == ((0, 1), (2,), (3,))
    assert optimizer.routes.matrix_count == whole.routes.matrix_count == 2
    names = {n: (g["kind"], g["lr"]) for g in optimizer.param_groups for n in g["param_names"]}
    assert names["down.weight"] == ("matrix", 5e-3)
    assert names["embed_tokens.weight"][0] == names["lm_head.weight"][0] == "aux"
    state: dict[str, Tensor] = dict(model.named_parameters())
    assert all(p is state[n] for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"]))
    forced = cls((model, [{"params": [model.lm_head.weight, model.up.weight], "kind": "matrix"}]))
    assert forced.routes.matrix_count == 2
