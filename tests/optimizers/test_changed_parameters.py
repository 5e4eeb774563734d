"""Parameters that change under an optimizer: their shape and dtype, the lists of the groups, and the model around them."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.distributed.layout import UnsupportedLayoutError

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (hf_emopt.Muon, {}),
    "normuon": (hf_emopt.NorMuon, {}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 2}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 2}),
    "klshampoo": (hf_emopt.KLShampoo, {"precondition_frequency": 2}),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16 state": {"state_dtype": "bfloat16"},
    "int8 state": {"state_dtype": "int8"},
    "offloaded": {"offload_state": "cpu"},
    "split": {"low_precision_weights": "split"},
    "master": {"low_precision_weights": "master"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(self.embed(tokens)))))


def built(rule: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Net, Any]:
    model = Net().to(dtype)
    cls, own = RULES[rule]
    return model, cls(model, lr=1e-2, **own, **options)


def feed(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def step(model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        feed(model, seed)
        optimizer.step()


def grown(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(2, x.shape[1], dtype=x.dtype)])


def shrunk(x: Tensor) -> Tensor:
    return x[:-6].clone()


def transposed(x: Tensor) -> Tensor:
    return x.T.contiguous()


CHANGES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "embedding grown": ("embed", grown),
    "embedding shrunk": ("embed", shrunk),
    "embedding transposed": ("embed", transposed),
    "head grown": ("head", grown),
    "matrix grown": ("up", grown),
    "matrix shrunk": ("down", shrunk),
    "matrix transposed": ("down", transposed),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_state_never_meets_another_shape(rule: str, options: str, change: str) -> None:
    """All that uses state names both shapes and changes nothing, and ``refresh_parameters`` starts that state anew."""
    module, new = CHANGES[change]
    dtype = torch.bfloat16 if options in ("split", "master") else torch.float32
    model, optimizer = built(rule, dtype, **OPTIONS[options])
    step(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    param = getattr(model, module).weight
    was = tuple(param.shape)
    param.data = new(param.data)
    before = copy.deepcopy(model.state_dict())
    feed(model, 3)
    now = tuple(param.shape)
    for use in (optimizer.step, optimizer.state_dict, optimizer.explain, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(UnsupportedLayoutError, match=r"refresh_parameters\(\)") as raised:
            use()
        assert f"{module}.weight was {was} " in str(raised.value)
        assert f" is {now} " in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    kept = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p is not param}
    name = f"{module}.weight"
    assert optimizer.refresh_parameters() == ([name], [name])
    assert param not in optimizer.state
    for other, state in kept.items():
        assert all(optimizer.state[model.get_parameter(other)][key] is value for key, value in state.items())
    # It steps as in a new optimizer.
    twin = copy.deepcopy(model)
    cls, own = RULES[rule]
    fresh = cls(twin, lr=1e-2, **own, **OPTIONS[options])
    step(model, optimizer, range(3, 5))
    step(twin, fresh, range(3, 5))
    if options != "bfloat16 state":  # whose noise goes on
        torch.testing.assert_close(param, getattr(twin, module).weight, rtol=0.0, atol=1e-6)
    assert float(optimizer.state[param]["step"]) == 2
    assert float(optimizer.state[model.up.bias]["step"]) == 5
    assert optimizer.skipped_steps == 0
    again = cls(model, lr=1e-2, **own, **OPTIONS[options])
    again.load_state_dict(optimizer.state_dict())


def test_before_the_first_step_only_matrices_must_keep_their_shape() -> None:
    model, optimizer = built("soap")
    model.embed.weight.data = grown(model.embed.weight.data)
    optimizer.explain()
    model.head.weight.data = grown(model.head.weight.data)
    step(model, optimizer, range(2))
    model.to(torch.bfloat16)  # another plan
    step(model, optimizer, range(2))
    for change in (grown, transposed):
        model, optimizer = built("soap")
        model.up.weight.data = change(model.up.weight.data)
        feed(model, 0)
        with pytest.raises(UnsupportedLayoutError, match=r"up\.weight was \(48, 32\)"):
            optimizer.step()
        assert optimizer.refresh_parameters() == (["up.weight"], ["up.weight"])
        step(model, optimizer, range(3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_knows_the_shapes_too(copied: Callable[[Any], Any]) -> None:
    model, optimizer = built("muon")
    step(model, optimizer, range(2))
    model, optimizer = copied((model, optimizer))
    step(model, optimizer, range(2, 3))
    model, optimizer = copied((model, optimizer))
    model.embed.weight.data = grown(model.embed.weight.data)
    feed(model, 3)
    with pytest.raises(UnsupportedLayoutError, match=r"embed\.weight was \(64, 32\) .* is \(66, 32\)"):
        optimizer.step()


@pytest.mark.parametrize("module", ["embed", "up"])
def test_an_old_gradient_is_refused(module: str) -> None:
    model, optimizer = built("muon")
    step(model, optimizer, range(2))
    param = getattr(model, module).weight
    param.data = grown(param.data)
    with pytest.raises(UnsupportedLayoutError, match=r"its gradient .*zero_grad\(\)"):
        optimizer.refresh_parameters()
    optimizer.zero_grad()
    optimizer.refresh_parameters()
    step(model, optimizer, range(2))
    model, optimizer = built("muon")
    feed(model, 0)
    model.embed.weight.data = grown(model.embed.weight.data)  # nothing was stepped, so that is its only fault
    with pytest.raises(UnsupportedLayoutError, match=r"embed\.weight is \(6., 32\) on cpu, its gradient"):
        optimizer.step()


@pytest.mark.parametrize("rule", RULES)
def test_state_in_float64_meets_no_other(rule: str) -> None:
    model, optimizer = built(rule)
    model.double()
    step(model, optimizer, range(3))
    model.float()
    feed(model, 3)
    with pytest.raises(UnsupportedLayoutError, match=r"state in torch\.float64 and is .* torch\.float32"):
        optimizer.step()
    added, removed = optimizer.refresh_parameters()
    assert set(added) == set(removed) == {name for name, _ in model.named_parameters()}
    step(model, optimizer, range(3, 6))


@pytest.mark.second_tier
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_state_survives_a_cast_of_the_model(rule: str, options: str) -> None:
    """Moments stay in float32 and grow on; what the narrow weights cannot hold is new."""
    model, optimizer = built(rule, **OPTIONS[options])
    step(model, optimizer, range(3))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        steps = float(optimizer.state[model.up.weight]["step"])
        model.to(dtype)
        step(model, optimizer, range(3, 5))
        assert float(optimizer.state[model.up.weight]["step"]) == steps + 2
        assert all(param.isfinite().all() for param in model.parameters())
    assert optimizer.skipped_steps == 0


# ------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("module", ["embed", "up", "down"])
@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_of_other_shapes_is_refused(rule: str, module: str) -> None:
    model, optimizer = built(rule)
    step(model, optimizer, range(2))
    saved = optimizer.state_dict()
    other = Net()
    weight = getattr(other, module).weight
    weight.data = grown(weight.data)
    loader = RULES[rule][0](other, **RULES[rule][1])
    step(other, loader, range(1))
    before = {name: {k: v.clone() for k, v in loader.state[p].items()} for name, p in other.named_parameters()}
    with pytest.raises(ValueError, match=rf"{module}\.weight: .*\(\d+, .*\(\d+, "):
        loader.load_state_dict(saved)
    for name, state in before.items():
        assert all(torch.equal(loader.state[other.get_parameter(name)][key], value) for key, value in state.items())


# ------------------------------------------------------------------ lists


def append(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.randn(8, 8)))


def remove(optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][0]


def empty(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].clear()


def reverse(optimizer: Any) -> None:
    optimizer.param_groups[-1]["params"].reverse()


def replace_in_the_middle(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][:] = [
        *optimizer.param_groups[0]["params"][1:],
        nn.Parameter(torch.randn(32, 48)),
    ]


def shift(optimizer: Any) -> None:
    """The parameters in all are the same, one is in the next group."""
    first, second = optimizer.param_groups[:2]
    second["params"].insert(0, first["params"].pop())


def forget_a_name(optimizer: Any) -> None:
    optimizer.param_groups[0]["param_names"].pop()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("edit", [append, remove, empty, reverse, replace_in_the_middle, shift, forget_a_name])
@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_lists_that_were_edited_in_place(rule: str, edit: Callable[[Any], None], steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 48), nn.Linear(48, 32))
    optimizer = RULES[rule][0](model, **RULES[rule][1])
    step(model, optimizer, range(steps))
    before = copy.deepcopy(model.state_dict())
    edit(optimizer)
    feed(model, 2)
    uses = [optimizer.step, optimizer.refresh_parameters] + [optimizer.state_dict] * bool(steps)
    for use in uses:
        with pytest.raises(
            UnsupportedLayoutError, match=r"were edited in place .*add_param_group.*refresh_parameters\(\)"
        ):
            use()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_group_that_is_added_is_none_that_was_edited() -> None:
    model, optimizer = built("muon")
    step(model, optimizer, range(2))
    model.late = nn.Linear(32, 32, bias=False)
    optimizer.add_param_group({"params": [("late.weight", model.late.weight)]})
    step(model, optimizer, range(2))
    model.later = nn.Linear(32, 32, bias=False)
    assert optimizer.refresh_parameters() == (["later.weight"], [])
    step(model, optimizer, range(2))
    optimizer.state_dict()


def test_wrappers_may_replace_parameters() -> None:
    model, optimizer = built("muon")
    step(model, optimizer, range(2))
    for name, param in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        new = nn.Parameter(param.detach().clone())
        setattr(model.get_submodule(owner), leaf, new)
        for group in optimizer.param_groups:
            group["params"] = [new if p is param else p for p in group["params"]]
    step(model, optimizer, range(2))
    assert float(optimizer.state[model.up.weight]["step"]) == 4


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64])
def test_dtypes_that_cannot_be_stepped_are_refused_by_name(dtype: torch.dtype) -> None:
    model = Net()
    narrow = nn.Parameter(model.down.weight.detach().to(dtype))
    refused = {"match": rf"late\.weight has dtype {dtype}.*requires_grad=False"}
    late = nn.Linear(48, 32, bias=False)
    late.weight = narrow
    with pytest.raises(ValueError, **refused):
        hf_emopt.Muon(nn.ModuleDict({"late": late, "other": nn.Linear(8, 8)}))
    with pytest.raises(ValueError, **refused):
        hf_emopt.SOAP([("late.weight", narrow)])
    optimizer = hf_emopt.Muon(model)
    with pytest.raises(ValueError, **refused):
        optimizer.add_param_group({"params": [("late.weight", narrow)]})
    step(model, optimizer, range(1))
    model.late = late
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(ValueError, **refused):
        optimizer.refresh_parameters()
    assert all(
        p is q for g, known in zip(optimizer.param_groups, groups) for p, q in zip(g["params"], known, strict=True)
    )
    narrow.requires_grad_(False)
    hf_emopt.Muon(model)


def test_a_parameter_that_becomes_float8_is_refused() -> None:
    model, optimizer = built("muon")
    step(model, optimizer, range(1))
    optimizer.zero_grad()
    model.up.weight.data = model.up.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"up\.weight has dtype torch\.float8_e4m3fn"):
        optimizer.step()


# ------------------------------------------------------------------ the model


def train(model: nn.Module, optimizer: Any, steps: int, by_model: bool = False) -> list[str]:
    """Messages of the warnings, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            loss = model(torch.arange(8)).square().mean()
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            (model if by_model else optimizer).zero_grad()
    return sorted({str(w.message) for w in caught})


def untied() -> tuple[nn.Module, Any]:
    model = Net()
    model.head.weight = model.embed.weight
    optimizer = hf_emopt.Muon(model)
    train(model, optimizer, 3)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, optimizer


def tied() -> tuple[nn.Module, Any]:
    model, optimizer = built("muon")
    train(model, optimizer, 3)
    model.head.weight = model.embed.weight
    return model, optimizer


def replaced() -> tuple[nn.Module, Any]:
    model, optimizer = built("muon")
    train(model, optimizer, 3)
    model.head = nn.Linear(32, 10, bias=False)
    return model, optimizer


def inserted() -> tuple[nn.Module, Any]:
    model, optimizer = built("muon")
    train(model, optimizer, 3)
    model.down = nn.Sequential(model.down, nn.Linear(32, 32, bias=False))
    return model, optimizer


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize(
    ("change", "message", "refreshed"),
    [
        (untied, r"1 parameters have a gradient and are not the optimizer's: head\.weight", (["head.weight"], [])),
        (tied, r"1 parameters are the optimizer's and not in the model any more: head\.weight", ([], ["head.weight"])),
        (
            replaced,
            r"1 parameters have a gradient and are not the optimizer's: head\.weight",
            (["head.weight"], ["head.weight"]),
        ),
        (
            inserted,
            r"1 parameters have a gradient and are not the optimizer's: down\.1\.weight",
            (["down.1.weight"], []),
        ),
    ],
)
def test_a_part_of_the_model_that_was_replaced_is_noticed(
    change: Callable[[], tuple[nn.Module, Any]], message: str, refreshed: Any, by_model: bool
) -> None:
    model, optimizer = change()
    said = train(model, optimizer, 10, by_model)
    assert len(said) == 1
    assert said[0].startswith(message.replace("\\", ""))
    assert "optimizer.refresh_parameters()" in said[0]
    assert optimizer.refresh_parameters() == refreshed
    optimizer.zero_grad()
    assert train(model, optimizer, 11, by_model) == []


@pytest.mark.parametrize("kept", [True, False])
def test_adapters_that_were_merged_are_noticed(kept: bool) -> None:
    adapted: Any = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
    optimizer = hf_emopt.Muon(adapted, lora="joint")
    assert train(adapted, optimizer, 3) == []
    model = adapted.merge_and_unload()
    alive = adapted if kept else None
    del adapted
    model.requires_grad_(True)
    said = train(model, optimizer, 10)
    if kept:
        assert alive is not None
        assert [s.partition(":")[0].partition(" ")[2] for s in said] == [
            "parameters are the optimizer's and not in the model any more",
            "parameters have a gradient and are not the optimizer's",
        ]
    else:
        assert [s.partition(":")[0] for s in said] == ["4 parameters had a gradient, and now none has"]
    added, removed = optimizer.refresh_parameters(model)
    assert len(removed) == 4
    assert set(added) == {name for name, _ in model.named_parameters()}


def test_adapters_that_are_switched_off_are_no_fault() -> None:
    adapted: Any = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["up", "down"]))
    optimizer = hf_emopt.Muon(adapted)
    assert train(adapted, optimizer, 3) == []
    with adapted.disable_adapter():
        assert train(adapted, optimizer, 11) == []
    assert train(adapted, optimizer, 11) == []
