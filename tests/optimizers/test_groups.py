"""Every form of the ``params`` argument, and what the groups then say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hf_emopt
from hf_emopt.routing.packing import pack_matrix_views, unpack_matrix_views


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.proj = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 16, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def names(optimizer, kind: str) -> set[str]:
    return {n for g in optimizer.param_groups if g["kind"] == kind for n in g["param_names"]}


def test_a_model_is_routed_by_its_modules() -> None:
    optimizer = hf_emopt.Muon(Tiny(), lr=1e-3, weight_decay=0.1, aux_lr=2e-3, aux_weight_decay=0.2)
    assert names(optimizer, "matrix") == {"proj.weight"}
    groups = {g["name"]: g for g in optimizer.param_groups}
    assert list(groups) == ["matrix", "aux", "aux_no_decay"]
    assert groups["matrix"]["lr"] == 1e-3
    assert groups["matrix"]["weight_decay"] == 0.1
    assert groups["aux"]["lr"] == 2e-3
    assert groups["aux"]["weight_decay"] == 0.2
    assert set(groups["aux"]["param_names"]) == {"embed_tokens.weight", "lm_head.weight"}
    assert groups["aux_no_decay"]["weight_decay"] == 0.0
    assert set(groups["aux_no_decay"]["param_names"]) == {"proj.bias", "norm.weight", "norm.bias"}
    assert optimizer.defaults["lr"] == 1e-3


def test_named_parameters_are_routed_by_name() -> None:
    optimizer = hf_emopt.Muon(Tiny().named_parameters())
    assert names(optimizer, "matrix") == {"proj.weight"}
    assert "embed_tokens.weight" in names(optimizer, "aux")


def test_plain_parameters_are_routed_by_shape() -> None:
    model = Tiny()
    optimizer = hf_emopt.Muon(model.parameters())
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 6
    assert all(p.ndim == 2 for g in optimizer.param_groups if g["kind"] == "matrix" for p in g["params"])


def test_groups_keep_their_own_hyperparameters_and_split_by_kind() -> None:
    """As peft.create_loraplus_optimizer passes them: no names, empty groups, vectors among matrices."""
    a, b, v = (nn.Parameter(torch.randn(s)) for s in ((2, 8), (8, 2), (8,)))
    optimizer = hf_emopt.Muon(
        [{"params": [a], "lr": 1e-3}, {"params": [], "lr": 1.0}, {"params": [b, v], "lr": 5e-3, "weight_decay": 0.0}],
        lr=1e-3,
    )
    assert [(g["kind"], g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        ("matrix", 1e-3, 0.1, 1),
        ("aux", 1.0, 0.1, 0),
        ("matrix", 5e-3, 0.0, 1),
        ("aux", 5e-3, 0.0, 1),
    ]
    assert len({n for g in optimizer.param_groups for n in g["param_names"]}) == 3


def test_peft_loraplus_accepts_our_class() -> None:
    peft = pytest.importorskip("peft", reason="peft is an extra")
    from peft.optimizers import create_loraplus_optimizer

    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    optimizer = create_loraplus_optimizer(model, hf_emopt.Muon, lr=1e-3, loraplus_lr_ratio=16)
    rates = {tuple(p.shape): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    assert rates == {(2, 8): 1e-3, (8, 2): 16e-3}


def test_stacks_need_to_be_told() -> None:
    stack = nn.Parameter(torch.randn(4, 8, 6))
    with pytest.raises(ValueError, match="model"):
        hf_emopt.Muon([stack])
    optimizer = hf_emopt.Muon([{"params": [stack], "kind": "matrix"}])
    assert unpack_matrix_views(optimizer.param_groups[0]["units"][0])[0].shape == (4, 8, 6)


def test_matrix_views_survive_packing() -> None:
    matrix_view = hf_emopt.routing.matrix_view.MatrixView("q", (2, 3, 4, 5), (0, 2), (3,), (1,), 1, 0, 3, 2)
    assert unpack_matrix_views(pack_matrix_views([matrix_view])) == (matrix_view,)


def test_no_matrix_is_an_error_that_shows_why() -> None:
    norm_only = nn.LayerNorm(8)
    with pytest.raises(ValueError, match="allow_no_matrices=True"):
        hf_emopt.Muon(nn.Sequential(norm_only))
    with pytest.raises(ValueError, match="FSDP1 and ZeRO flatten"):
        hf_emopt.Muon([nn.Parameter(torch.zeros(100))])
    optimizer = hf_emopt.Muon(nn.Sequential(norm_only), allow_no_matrices=True)
    norm_only.weight.grad = torch.ones(8)
    optimizer.step()
    assert optimizer.transform_count == 0


def test_frozen_parameters_are_left_out() -> None:
    model = Tiny().requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        hf_emopt.Muon(model)
    model.proj.weight.requires_grad_(True)
    optimizer = hf_emopt.Muon(model)
    assert [g["param_names"] for g in optimizer.param_groups] == [["proj.weight"]]


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ([], ValueError, "params is empty"),
        (nn.Parameter(torch.zeros(2, 2)), TypeError, "single tensor"),
        ([nn.Parameter(torch.zeros(2, 2)), "x"], TypeError, "found str"),
        ({nn.Parameter(torch.zeros(2, 2))}, TypeError, "pass a list"),
        ([{"params": frozenset([nn.Parameter(torch.zeros(2, 2))])}], TypeError, "pass a list"),
        ([{"params": [nn.Parameter(torch.zeros(2))], "kind": "matrix"}], ValueError, "two dimensions"),
        ([{"params": [nn.Parameter(torch.zeros(2, 2))], "kind": "muon"}], ValueError, "'matrix' or 'aux'"),
        ([("a", nn.Parameter(torch.zeros(2, 2))), ("a", nn.Parameter(torch.zeros(2, 2)))], ValueError, "same name"),
    ],
)
def test_unusable_params_are_named(params, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf_emopt.Muon(params)


def test_module_patterns_need_modules() -> None:
    with pytest.raises(ValueError, match="pass the model itself"):
        hf_emopt.Muon(Tiny().parameters(), muon_modules="proj")


def test_add_param_group_after_unfreezing() -> None:
    model = Tiny()
    model.norm.requires_grad_(False)
    optimizer = hf_emopt.Muon(model)
    model.norm.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.norm.named_parameters("norm"))})
    assert names(optimizer, "aux") >= {"norm.weight", "norm.bias"}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = model.norm.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.norm.weight)


def test_coverage_is_warned_about() -> None:
    """A model most of whose inner weights are not matrices would be trained by AdamW in all but name."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(3, 100, 100))
            self.small = nn.Linear(8, 8)

    with pytest.warns(UserWarning, match="%"):
        hf_emopt.Muon(Odd())


def test_explain_shows_routes_groups_and_batches() -> None:
    text = hf_emopt.Muon(Tiny(), lr=1e-3, aux_lr=5e-4).explain()
    for expected in (
        "proj.weight",
        "embed_tokens.weight",
        "lr 0.001",
        "lr 0.0005",
        "match_rms_adamw",
        "1x8x8",
        "imbalance",
    ):
        assert expected in text


def test_defaults_that_follow_from_others_follow_from_the_groups_own() -> None:
    own = {"params": [nn.Parameter(torch.randn(8, 8))], "lr": 2e-2, "precondition_frequency": 2, "betas": (0.8, 0.9)}
    optimizer = hf_emopt.Shampoo([own], lr=1e-3, precondition_frequency=10)
    given = hf_emopt.Shampoo(
        [nn.Parameter(torch.randn(8, 8))], lr=2e-2, precondition_frequency=2, betas=(0.8, 0.9)
    ).param_groups[0]
    for key in ("start_preconditioning_step", "grafting_beta2", "peak_lr"):
        assert optimizer.param_groups[0][key] == given[key]
    told = {**own, "params": [nn.Parameter(torch.randn(8, 8))], "start_preconditioning_step": 7}
    assert hf_emopt.Shampoo([told]).param_groups[0]["start_preconditioning_step"] == 7


@pytest.mark.parametrize("cls", [hf_emopt.SOAP, hf_emopt.Shampoo])
@pytest.mark.parametrize(("kind", "first"), [("independent", 0.05), ("corrected", 0.05 * 2e-2)])
def test_decay_is_relative_to_the_groups_own_peak(cls, kind: str, first: float) -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    group = {"params": [weight], "lr": 2e-2, "kind": "matrix"}
    optimizer = cls([group], lr=1e-3, weight_decay=0.05, weight_decay_type=kind)
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - first))


def test_decay_under_one_cycle_is_relative_to_its_top() -> None:
    """``initial_lr`` is a 25th of the peak there, of which the decay would be 25 times what was asked for."""
    weight = nn.Parameter(torch.randn(8, 8))
    optimizer = hf_emopt.SOAP([weight], lr=1e-2, weight_decay=0.05, weight_decay_type="independent")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10, cycle_momentum=False)
    lost = []
    for _ in range(9):
        before = weight.detach().clone()
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        schedule.step()
        lost.append(1 - (weight.detach() / before).median().item())
    assert max(lost) == pytest.approx(0.05, abs=1e-5)
    assert lost[0] == pytest.approx(0.05 / 25, abs=1e-5)


def test_groups_do_not_share_a_learning_rate_tensor() -> None:
    """What multiplies each group's (``ReduceLROnPlateau``) would multiply one as often as there are groups."""
    rate = torch.tensor(1e-2)
    optimizer = hf_emopt.Muon(Tiny(), lr=rate)
    rates = [g["lr"] for g in optimizer.param_groups]
    assert len({id(r) for r in (rate, *rates)}) == 1 + len(rates)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(2):
        schedule.step(1.0)
    assert [float(g["lr"]) for g in optimizer.param_groups] == pytest.approx([5e-3] * len(rates))


def test_a_convolution_is_no_stack_of_kernels() -> None:
    with pytest.raises(ValueError, match="Pass the model"):
        hf_emopt.Muon([{"params": [nn.Conv2d(16, 32, 3).weight], "kind": "matrix"}])
