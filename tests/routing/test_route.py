"""Routing of modules of every type, of tied, frozen, wrapped and adapted models, and the user's overrides."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from families import build
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hf_emopt.routing
from hf_emopt.routing import (
    Decision,
    ParameterInfo,
    RouteTable,
    aux,
    coverage_warning,
    matrix,
    register_architecture,
    route_named_parameters,
    route_parameters,
    route_parameters_list,
)
from hf_emopt.routing.layouts import rows


def kinds(table: RouteTable) -> dict[str, str]:
    return {route.name: route.kind for route in table}


def shapes(table: RouteTable, name: str) -> list[tuple[int, int, int]]:
    return [matrix_view.shape for matrix_view in table.by_name[name].matrix_views]


class Gain(nn.Module):
    """LayerScale of vision models: a bare ``(C, 1, 1)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1))


class OddBlock(nn.Module):
    """A block of no known library, with names that contain other names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn_gate = nn.Linear(width, width)
        self.attn_gated_norm = nn.RMSNorm(width)
        self.head_mixer = nn.Linear(width, width, bias=False)
        self.score_net = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.taps = nn.Conv1d(width, width, 4, groups=width)
        self.lift = Gain(width)


class OddModel(nn.Module):
    def __init__(self, words: int = 40, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.embed_proj = nn.Linear(width, width)
        self.start = nn.Parameter(torch.zeros(1, 1, width))
        self.steps = nn.Parameter(torch.zeros(1, 16, width))
        self.stack = nn.ModuleList(OddBlock(width) for _ in range(2))
        self.out = nn.Linear(width, words, bias=False)


# --- types ------------------------------------------------------------------------------------------------------------


def test_unknown_model_is_routed_by_structure() -> None:
    table = route_parameters(OddModel())
    matrices = {route.name for route in table.matrices}
    assert matrices == {"embed_proj.weight"} | {
        f"stack.{i}.{name}.weight" for i in range(2) for name in ("attn_gate", "head_mixer", "score_net", "down")
    }
    assert table.by_name["words.weight"].role == "embedding"
    assert table.by_name["out.weight"].role == "head"  # shaped like the embedding, at its level
    assert table.by_name["stack.0.attn_gated_norm.weight"].role == "norm"
    assert table.by_name["stack.0.taps.weight"].role == "depthwise"
    assert table.by_name["stack.0.lift.gamma"].role == "gain"
    assert "use is unknown" in table.by_name["steps"].reason


def test_decay_spares_vectors_biases_norms_and_gains() -> None:
    table = route_parameters(OddModel())
    spared = {route.name for route in table if not route.decay}
    assert {"words.weight", "out.weight", "steps", "stack.0.taps.weight"}.isdisjoint(spared)
    assert {"start", "embed_proj.bias", "stack.1.lift.gamma", "stack.1.attn_gated_norm.weight"} <= spared
    assert all(table.by_name[route.name].decay for route in table.matrices)


@pytest.mark.parametrize(
    ("module", "x", "patches"),
    [
        (nn.Conv2d(8, 6, (3, 2), bias=False), torch.randn(1, 8, 3, 2), 1),
        (nn.Conv1d(8, 6, 3, bias=False), torch.randn(1, 8, 3), 1),
        (nn.Conv3d(8, 4, 2, bias=False), torch.randn(1, 8, 2, 2, 2), 1),
        (nn.Conv2d(8, 6, 3, groups=2, bias=False), torch.randn(1, 8, 3, 3), 2),
        (nn.Conv1d(12, 6, 2, groups=3, bias=False), torch.randn(1, 12, 2), 3),
    ],
    ids=["2d", "1d", "3d", "2d groups", "1d groups"],
)
def test_convolution_is_a_matrix_on_patches(module: nn.Module, x: Tensor, patches: int) -> None:
    """An input as large as the kernel gives one output pixel, the product of the matrix and the input."""
    (matrix_view,) = route_parameters(module).by_name["weight"].matrix_views
    weight = module.weight.detach()  # type: ignore[union-attr,operator]
    assert matrix_view.shape == (patches, weight.shape[0] // patches, weight[0].numel())
    ours = torch.einsum("gmn,gn->gm", matrix_view.extract(weight), x.reshape(patches, -1))
    torch.testing.assert_close(ours.flatten(), module(x).detach().flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_is_a_matrix_to_patches(groups: int) -> None:
    module = nn.ConvTranspose2d(8, 6, 3, groups=groups, bias=False)
    x = torch.randn(1, 8, 1, 1)
    (matrix_view,) = route_parameters(module).by_name["weight"].matrix_views
    assert matrix_view.shape == (groups, 6 // groups * 9, 8 // groups)
    ours = torch.einsum("gmn,gn->gm", matrix_view.extract(module.weight.detach()), x.reshape(groups, -1))
    torch.testing.assert_close(ours.flatten(), module(x).detach().flatten(), rtol=1e-4, atol=1e-5)


class Recurrence(nn.Module):
    """Parameters of Mamba, RWKV, S4 and Hyena that are no weights, under names of theirs, or marked as theirs are."""

    def __init__(self) -> None:
        super().__init__()
        for name in (
            "A_log",
            "A_logs",
            "A_real",
            "log_dt",
            "time_decay",
            "time_faaaa",
            "time_maa_w1",
            "log_poles",
            "freq",
        ):
            self.register_parameter(name, nn.Parameter(torch.zeros(4, 6)))
        self.D = nn.Parameter(torch.zeros(6))
        self.marked = nn.Parameter(torch.zeros(4, 6))
        self.marked._no_weight_decay = True  # type: ignore[attr-defined]
        self.optim = nn.Parameter(torch.zeros(4, 6))
        self.optim._optim = {"lr": 1e-3, "weight_decay": 0.0}  # type: ignore[attr-defined]
        self.weight = nn.Parameter(torch.zeros(4, 6))
        self.proj = nn.Linear(6, 4)


def test_rates_of_recurrences_are_no_matrices_and_do_not_decay() -> None:
    model = Recurrence()
    decayed = ["weight", "proj.weight"]
    table = route_parameters(model)
    assert [route.name for route in table if route.decay] == decayed
    assert [route.name for route in table.matrices] == ["proj.weight"]
    marked = {"marked", "optim"}  # a name says nothing of these
    named = route_named_parameters((n, p) for n, p in model.named_parameters() if n not in marked)
    assert [route.name for route in named if route.decay] == [route.name for route in named.matrices] == decayed
    mamba = tf.MambaModel(tf.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    assert {r.name.rpartition(".")[2] for r in route_parameters(mamba) if not r.decay} == {
        "A_log",
        "D",
        "weight",
        "bias",
    }


def test_convolutions_that_are_no_matrices() -> None:
    model = nn.ModuleDict(
        {
            "depthwise": nn.Conv1d(16, 16, 4, groups=16, padding=3),
            "multiplier": nn.Conv2d(16, 32, 3, groups=16),
            "stem": nn.Conv2d(3, 16, 7),
            "grey": nn.Conv2d(1, 16, 7),
            "pointwise": nn.Conv2d(16, 32, 1),
            "one_out": nn.Conv2d(16, 1, 3),
            "one_out_each": nn.Conv1d(16, 4, 3, groups=4),
            "linear": nn.Linear(16, 1),
        }
    )
    table = route_parameters(model)
    assert table.by_name["depthwise.weight"].shape == (16, 1, 4)
    assert [table.by_name[f"{name}.weight"].role for name in model] == [
        "depthwise", "depthwise", "embedding", "embedding", "conv", "gain", "gain", "gain",
    ]  # fmt: skip
    assert "3 channels" in table.by_name["stem.weight"].reason
    assert shapes(table, "pointwise.weight") == [(1, 32, 16)]


def test_layer_scale_of_every_shape() -> None:
    class LayerScale(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(shape))

    model = nn.ModuleList([LayerScale(8, 1, 1), LayerScale(8), LayerScale(1, 8, 1, 1), LayerScale(2, 8)])
    table = route_parameters(model)
    assert all(route.kind == "aux" and route.role == "gain" for route in table)
    assert [route.decay for route in table] == [False, False, False, True]


def test_one_row_is_no_matrix() -> None:
    model = nn.ModuleDict({"gate": nn.Linear(8, 1), "spread": nn.Linear(1, 8), "two": nn.Linear(8, 2)})
    assert [r.kind for r in route_parameters(model) if r.name.endswith("weight")] == ["aux", "aux", "matrix"]


@pytest.mark.parametrize("per_head", [False, True])
def test_torch_multihead_attention(per_head: bool) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    table = route_parameters(module, per_head=per_head)
    fused = module.in_proj_weight.detach()
    matrix_views = table.by_name["in_proj_weight"].matrix_views
    assert [matrix_view.name for matrix_view in matrix_views] == ["q", "k", "v"]
    for matrix_view, part in zip(matrix_views, fused.chunk(3), strict=True):
        assert matrix_view.extract(fused).equal(part.reshape(2 if per_head else 1, -1, 8))
    other = route_parameters(nn.MultiheadAttention(8, 2, kdim=6, vdim=4), per_head=per_head)
    assert shapes(other, "k_proj_weight") == ([(2, 4, 6)] if per_head else [(1, 8, 6)])
    assert kinds(table)["out_proj.weight"] == "matrix"
    assert kinds(table)["in_proj_bias"] == "aux"


def test_gates_of_an_lstm() -> None:
    module = nn.LSTM(5, 4, batch_first=True, bias=False)
    table = route_parameters(module)
    gates = {
        matrix_view.name: matrix_view.extract(module.weight_ih_l0.detach())[0]
        for matrix_view in table.by_name["weight_ih_l0"].matrix_views
    }
    x = torch.randn(5)
    h, c = (value.flatten() for value in module(x[None, None])[1])  # the first step, from zero state
    i, g, o = torch.sigmoid(gates["i"] @ x), torch.tanh(gates["g"] @ x), torch.sigmoid(gates["o"] @ x)
    torch.testing.assert_close(c.detach(), i * g)
    torch.testing.assert_close(h.detach(), o * torch.tanh(i * g))
    assert shapes(table, "weight_hh_l0") == [(1, 4, 4)] * 4


def test_router_is_found_by_what_it_scores() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)
            self.gate_proj = nn.Linear(8, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)  # an ordinary gate: there are no experts

    assert route_parameters(Mixture()).by_name["gate.weight"].role == "router"
    assert kinds(route_parameters(Mixture()))["gate_proj.weight"] == "matrix"
    assert kinds(route_parameters(Mixture()))["experts.3.weight"] == "matrix"
    assert kinds(route_parameters(Gated()))["gate.weight"] == "matrix"


def test_unknown_expert_stack_and_unknown_fusion_say_so() -> None:
    class MyExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden_size = 8
            self.up = nn.Parameter(torch.randn(4, 8, 6))
            self.down = nn.Parameter(torch.randn(4, 6, 8))
            self.scale = nn.Parameter(torch.randn(4, 8))

    class MyAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

    table = route_parameters(MyExperts())
    assert shapes(table, "up") == [(4, 6, 8)]
    assert shapes(table, "down") == [(4, 8, 6)]
    assert table.by_name["scale"].kind == "aux"
    fused = route_parameters(MyAttention()).by_name["qkv.weight"]
    assert [matrix_view.shape for matrix_view in fused.matrix_views] == [(1, 24, 8)]
    assert "layout is unknown" in fused.reason


def test_reparametrized_weight_is_elementwise() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4, bias=False))
    table = route_parameters(model)
    assert table.matrices == []
    assert "reparametrized" in table.by_name["parametrizations.weight.original1"].reason


def test_linear_like_classes_are_linear() -> None:
    class MyLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 6, 4
            self.weight = nn.Parameter(torch.randn(4, 6))

    assert shapes(route_parameters(MyLinear()), "weight") == [(1, 4, 6)]


# --- embeddings, heads, ties ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a linear head that share one parameter, registered in either order."""

    def __init__(self, head_first: bool, share: bool = True) -> None:
        super().__init__()
        if head_first:
            self.project = nn.Linear(8, 40, bias=False)
        self.body = nn.Linear(8, 8)
        self.table = nn.Embedding(40, 8)
        if not head_first:
            self.project = nn.Linear(8, 40, bias=False)
        if share:
            self.project.weight = self.table.weight


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_embedding_in_either_order(head_first: bool) -> None:
    model = Tied(head_first)
    table = route_parameters(model)
    first, second = ("project.weight", "table.weight") if head_first else ("table.weight", "project.weight")
    tied = table.by_name["table.weight"]
    assert (tied.name, tied.aliases, tied.kind, tied.role) == (first, (second,), "aux", "embedding")
    assert [route.name for route in table] == [name for name, _ in model.named_parameters()]
    assert table.by_name[second] is table.by_name[first]


def test_tied_linear_maps_are_one_matrix() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    table = route_parameters(model)
    assert table.by_name["b.weight"].aliases == ("b.weight",)
    assert table.matrix_count == 1


def test_tied_uses_that_disagree_are_refused() -> None:
    class Conv1D(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    model = nn.ModuleDict({"a": nn.Linear(8, 8)})
    model["b"] = Conv1D(model["a"].weight)
    with pytest.raises(ValueError, match=r"a\.weight is tied to b\.weight"):
        route_parameters(model)
    assert kinds(route_parameters(model, aux_modules="a"))["a.weight"] == "aux"


def test_untied_heads_are_not_matrices() -> None:
    assert route_parameters(Tied(False, share=False)).by_name["project.weight"].role == "head"
    assert route_parameters(build("llama")).by_name["lm_head.weight"].role == "head"
    classifier = route_parameters(build("roberta_classifier"))
    assert classifier.by_name["classifier.out_proj.weight"].role == "head"
    assert classifier.by_name["classifier.dense.weight"].kind == "matrix"
    vision = nn.Sequential()
    vision.add_module("features", nn.Linear(8, 8))
    vision.add_module("classifier", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)))
    named = kinds(route_parameters(vision))
    assert (named["classifier.0.weight"], named["classifier.2.weight"]) == ("matrix", "aux")


def test_model_is_asked_for_its_embeddings() -> None:
    """Neither name, nor type, nor shape tells here: the input is a linear map, the vocabulary of the head is padded."""

    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(12, 8, bias=False)
            self.body = nn.Linear(8, 8, bias=False)
            self.ends = nn.ModuleDict({"words": nn.Linear(8, 48, bias=False)})

        def get_input_embeddings(self) -> nn.Module:
            return self.lift

        def get_output_embeddings(self) -> nn.Module:
            return self.ends["words"]

    roles = {route.name: route.role for route in route_parameters(nn.Sequential(Asked()))}
    assert roles == {"0.lift.weight": "embedding", "0.body.weight": "linear", "0.ends.words.weight": "head"}


def test_head_inside_a_larger_model_is_found() -> None:
    outer = nn.ModuleDict({"policy": build("gpt_neox"), "value": nn.Linear(256, 256)})
    table = route_parameters(outer)
    assert table.by_name["policy.lm_head.weight"].role == "head"
    assert table.by_name["value.weight"].kind == "matrix"


# --- frozen, sharded, wrapped -----------------------------------------------------------------------------------------


def test_frozen_parameters_are_left_out() -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    assert {route.name for route in route_parameters(model)} == {
        f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)
    }
    assert len(route_parameters(model, trainable_only=False)) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    assert route_parameters(model).matrices == []
    assert len(route_parameters(model)) == 5
    with pytest.raises(ValueError, match=r"'q_proj' matches frozen parameters only, such as model\.layers\.0"):
        route_parameters(model, matrix_modules="q_proj")


def test_shape_of_a_partitioned_parameter_is_the_global_one() -> None:
    """ZeRO-3 leaves shape (0,) and keeps the true shape in ``ds_shape``."""
    whole, partitioned = build("gpt2"), build("gpt2")
    for module in partitioned.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not hasattr(parameter, "ds_shape"):
                empty = nn.Parameter(torch.empty(0, device="meta"))
                empty.ds_shape = parameter.shape  # type: ignore[attr-defined]
                module._parameters[name] = empty
    partitioned.tie_weights()
    ours, theirs = route_parameters(partitioned), route_parameters(whole)
    assert [(r.name, r.shape, r.kind, r.matrix_views) for r in ours] == [
        (r.name, r.shape, r.kind, r.matrix_views) for r in theirs
    ]


@pytest.mark.parametrize("wrapper", ["compile", "data parallel", "both", "checkpoint"])
def test_wrappers_change_names_and_nothing_else(wrapper: str) -> None:
    plain = build("gpt_oss")
    model = build("gpt_oss")
    if wrapper == "checkpoint":
        layers = model.model.layers
        for i in range(len(layers)):
            layers[i] = checkpoint_wrapper(layers[i])
    if wrapper in ("compile", "both"):
        model = torch.compile(model)
    if wrapper in ("data parallel", "both"):
        model = nn.DataParallel(model)
    table, expected = route_parameters(model), route_parameters(plain)
    assert [route.name for route in table] == [name for name, _ in model.named_parameters()]
    assert [(r.shape, r.kind, r.matrix_views, r.decay, r.reason) for r in table] == [
        (r.shape, r.kind, r.matrix_views, r.decay, r.reason) for r in expected
    ]
    # Overrides are written for the plain names.
    forced = route_parameters(model, matrix_modules=r"^lm_head", aux_modules=r"model\.layers\.1\.self_attn")
    changed = {a.name for a, b in zip(forced, table, strict=True) if a.kind != b.kind}
    prefix = {"compile": "_orig_mod.", "data parallel": "module.", "both": "module._orig_mod.", "checkpoint": ""}[
        wrapper
    ]
    inner = "_checkpoint_wrapped_module." if wrapper == "checkpoint" else ""
    assert changed == {f"{prefix}lm_head.weight"} | {
        f"{prefix}model.layers.1.{inner}self_attn.{leaf}_proj.weight" for leaf in "qkvo"
    }


def test_quantized_storage_is_not_a_matrix() -> None:
    module = nn.Linear(8, 8, bias=False)
    module.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    assert len(route_parameters(module)) == 0
    assert route_parameters(module, trainable_only=False)[0].role == "quantized"


# --- overrides --------------------------------------------------------------------------------------------------------


def test_overrides_match_whole_components() -> None:
    model = OddModel()
    base = kinds(route_parameters(model))
    for pattern, expected in {
        "attn_gate": {"stack.0.attn_gate.weight", "stack.1.attn_gate.weight"},
        r"stack\.0": {f"stack.0.{name}.weight" for name in ("attn_gate", "head_mixer", "score_net", "down")},
        r"stack\.[01]\.down\.weight": {"stack.0.down.weight", "stack.1.down.weight"},
        r"attn.*": {"stack.0.attn_gate.weight", "stack.1.attn_gate.weight"},
        "embed_proj|down": {"embed_proj.weight", "stack.0.down.weight", "stack.1.down.weight"},
    }.items():
        changed = {
            name for name, kind in kinds(route_parameters(model, aux_modules=pattern)).items() if kind != base[name]
        }
        assert changed == expected, pattern
    for pattern in ("attn", "gate", "head", "embed", "proj", "score"):
        with pytest.raises(ValueError, match=f"aux_modules: '{pattern}' matches no parameter"):
            route_parameters(model, aux_modules=pattern)


def test_forced_matrices() -> None:
    table = route_parameters(OddModel(), matrix_modules=["words", "out", "taps", r"steps"], aux_modules="embed_proj")
    assert shapes(table, "words.weight") == [(1, 40, 8)]
    assert shapes(table, "out.weight") == [(1, 40, 8)]
    assert shapes(table, "stack.1.taps.weight") == [(1, 8, 4)]  # flattened as a convolution
    assert table.by_name["stack.1.taps.bias"].kind == "aux"  # a vector below a named module stays one
    assert shapes(table, "steps") == [(1, 16, 8)]
    assert table.by_name["out.weight"].reason == "matrix_modules 'out'"
    # A parameter that is a matrix anyway keeps its matrix views.
    assert (
        len(shapes(route_parameters(build("gpt2"), matrix_modules="c_attn"), "transformer.h.0.attn.c_attn.weight")) == 3
    )


def test_override_by_any_name_of_a_tied_weight() -> None:
    for pattern in ("lm_head", "wte"):
        table = route_parameters(build("gpt2"), matrix_modules=pattern)
        assert table.by_name["lm_head.weight"].kind == "matrix"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"matrix_modules": "down", "aux_modules": r"stack\.0"},
            r"stack\.0\.down\.weight is claimed by matrix_modules",
        ),
        ({"matrix_modules": r"down\.bias"}, r"stack\.0\.down\.bias is a vector"),
        ({"matrix_modules": "start"}, "start is a vector"),
        ({"aux_modules": "attn_gaet"}, "close names: attn_gate"),
        ({"matrix_modules": ["down", "embed_projection"]}, "'embed_projection' matches no parameter.*embed_proj"),
        ({"matrix_modules": "(down"}, r"matrix_modules: '\(down' is not a regular expression"),
        ({"aux_modules": ["down", ""]}, "a pattern is empty"),
    ],
)
def test_bad_overrides_are_refused(options: dict[str, str | list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route_parameters(OddModel(), **options)  # type: ignore[arg-type]


# --- registered architectures -----------------------------------------------------------------------------------------


def test_registered_rule_is_asked_first_and_can_be_removed() -> None:
    class OddAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 16, bias=False)

    def rule(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision | None:
        assert isinstance(module, OddAttention)
        if relative == "qkv.weight":
            return matrix(rows(parameter.shape, [("q", 8), ("k", 4), ("v", 4)]), "fused q, k, v")
        return None

    model = nn.ModuleList([OddAttention()])
    remove = register_architecture("OddAttention", rule)
    try:
        assert shapes(route_parameters(model), "0.qkv.weight") == [(1, 8, 8), (1, 4, 8), (1, 4, 8)]
        over = register_architecture(lambda m: isinstance(m, OddAttention), lambda *_: aux("never asked", "bare"))
        assert len(shapes(route_parameters(model), "0.qkv.weight")) == 3
        over()
    finally:
        remove()
    assert shapes(route_parameters(model), "0.qkv.weight") == [(1, 16, 8)]


def test_rule_that_does_not_cover_is_refused() -> None:
    def short(parameter: ParameterInfo, module: nn.Module, relative: str) -> Decision:
        return matrix(rows(parameter.shape, [("a", 8), ("b", 8)])[:1], "half of it")

    remove = register_architecture(lambda m: isinstance(m, nn.Bilinear), short)
    module = nn.Bilinear(2, 2, 2)
    module.weight = nn.Parameter(torch.zeros(16, 4))
    try:
        with pytest.raises(ValueError, match="cover 32 elements of shape"):
            route_parameters(module)
    finally:
        remove()


# --- adapters ---------------------------------------------------------------------------------------------------------


def lora(model: nn.Module, **options: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options))


def test_lora_with_saved_head_embedding_adapter_and_dora() -> None:
    model = lora(
        build("gpt2", device="cpu"), target_modules=["c_attn", "c_proj", "wpe"], modules_to_save=["lm_head", "c_fc"],
        use_dora=True,
    )  # fmt: skip
    table = route_parameters(model)
    assert [r.name for r in table] == [name for name, p in model.named_parameters() if p.requires_grad]
    base = "base_model.model.transformer.h.0"
    assert shapes(table, f"{base}.attn.c_attn.lora_A.default.weight") == [(1, 2, 768)]
    assert shapes(table, f"{base}.attn.c_attn.lora_B.default.weight") == [(1, 2304, 2)]
    assert table.by_name[f"{base}.attn.c_attn.lora_magnitude_vector.default.weight"].kind == "aux"
    assert table.by_name["base_model.model.transformer.wpe.lora_embedding_A.default"].kind == "aux"
    assert table.by_name["base_model.model.lm_head.modules_to_save.default.weight"].role in ("head", "embedding")
    # A copied module is what it copies: a Conv1D, stored (in, out).
    assert shapes(table, f"{base}.mlp.c_fc.modules_to_save.default.weight") == [(1, 3072, 768)]
    forced = route_parameters(model, aux_modules=r"transformer\.h\.0\.attn\.c_attn\.lora_A", matrix_modules="lm_head")
    assert forced.by_name[f"{base}.attn.c_attn.lora_A.default.weight"].kind == "aux"
    assert forced.by_name["base_model.model.lm_head.modules_to_save.default.weight"].kind == "matrix"


def test_lora_rank_one_is_a_matrix_and_classifier_copy_is_a_head() -> None:
    config = tf.BertConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=32
    )
    model = peft.get_peft_model(
        tf.BertForSequenceClassification(config), peft.LoraConfig(task_type="SEQ_CLS", r=1, target_modules=["query"])
    )
    table = route_parameters(model)
    assert table.by_name["base_model.model.classifier.modules_to_save.default.weight"].role == "head"
    assert {route.shape for route in table.matrices} == {(1, 24), (24, 1)}


def test_a_model_called_model_inside_an_adapted_model_keeps_its_name() -> None:
    """PEFT gives the model that it adapts a ``peft_config`` of its own."""
    model = lora(build("llama", device="cpu"), target_modules=["q_proj"])
    table = route_parameters(model, aux_modules=r"model\.layers\.0\.self_attn")
    assert {route.name for route in table.aux} == {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.default.weight" for side in "AB"
    }


def test_lora_of_fused_layers_in_a_saved_module() -> None:
    """A whole attention module in ``modules_to_save`` keeps the layout of its family."""
    model = lora(build("gpt_neox", device="cpu"), target_modules=["dense_h_to_4h"], modules_to_save=["attention"])
    name = "base_model.model.gpt_neox.layers.1.attention.modules_to_save.default.query_key_value.weight"
    assert [matrix_view.name for matrix_view in route_parameters(model).by_name[name].matrix_views] == ["q", "k", "v"]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4"])
def test_lora_of_expert_stacks(family: str) -> None:
    """``delta[e] = scaling * B_e @ A_e`` in PEFT's own words, with A and B as our matrix views cut them."""
    stacks = "feed_forward" if family == "llama4" else "mlp"
    model = lora(
        build(family, device="cpu"), target_modules=[],
        target_parameters=[f"{stacks}.experts.gate_up_proj", f"{stacks}.experts.down_proj"],
    )  # fmt: skip
    table = route_parameters(model)
    layers = [(n, m) for n, m in model.named_modules() if type(m).__name__ == "ParamWrapper"]
    assert len(layers) == (2 if family == "llama4" else 4)
    for name, layer in layers:
        a, b = (getattr(layer, f"lora_{side}")["default"].weight.detach() for side in "AB")
        (matrix_view_a,) = table.by_name[f"{name}.lora_A.default.weight"].matrix_views
        (matrix_view_b,) = table.by_name[f"{name}.lora_B.default.weight"].matrix_views
        assert matrix_view_a.shape == (4, 2, a.shape[1])
        assert matrix_view_b.shape == (4, b.shape[0], 2)
        delta = matrix_view_b.extract(b) @ matrix_view_a.extract(a) * layer.scaling["default"]
        theirs = layer.get_delta_weight("default").detach()
        swapped = getattr(layer.get_base_layer(), "is_transposed", False)
        torch.testing.assert_close(delta.mT if swapped else delta, theirs, rtol=1e-4, atol=1e-5)


# --- by name, and without names ---------------------------------------------------------------------------------------


def test_by_name() -> None:
    named = {
        "model.embed_tokens.weight": torch.zeros(40, 8), "transformer.wte.weight": torch.zeros(40, 8),
        "lm_head.weight": torch.zeros(40, 8), "classifier.weight": torch.zeros(3, 8), "mlp.router.weight": torch.zeros(4, 8),
        "layers.0.embed_proj.weight": torch.zeros(8, 8), "layers.0.head_mixer.weight": torch.zeros(8, 8),
        "layers.0.attn_gate.weight": torch.zeros(8, 8), "layers.0.fc.bias": torch.zeros(8),
        "layers.0.norm.weight": torch.zeros(8), "cls_token": torch.zeros(1, 1, 8), "experts.up_bias": torch.zeros(4, 8),
    }  # fmt: skip
    table = route_named_parameters(named.items())
    assert [route.name for route in table.matrices] == [
        "layers.0.embed_proj.weight", "layers.0.head_mixer.weight", "layers.0.attn_gate.weight",
    ]  # fmt: skip
    assert all(route.reason.startswith("by name") for route in table)
    assert [route.name for route in table if not route.decay] == [
        "layers.0.fc.bias", "layers.0.norm.weight", "experts.up_bias",
    ]  # fmt: skip
    forced = route_named_parameters(named.items(), matrix_modules="lm_head", aux_modules="attn_gate")
    assert {a.name for a, b in zip(forced, table, strict=True) if a.kind != b.kind} == {
        "lm_head.weight", "layers.0.attn_gate.weight",
    }  # fmt: skip


def test_by_name_refuses_what_only_modules_tell() -> None:
    named = [("conv.weight", torch.zeros(8, 4, 3, 3))]
    with pytest.raises(ValueError, match=r"conv\.weight has shape .*Pass the model"):
        route_named_parameters(named)
    assert route_named_parameters(named, aux_modules="conv")[0].kind == "aux"
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        route_named_parameters([("a", torch.zeros(2, 2)), ("a", torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=r"'cnov' matches no parameter.*conv"):
        route_named_parameters(named, aux_modules="cnov")


def test_without_names() -> None:
    shared = torch.zeros(4, 3)
    table = route_parameters_list([shared, torch.zeros(3), shared, torch.zeros(())])
    assert [(r.name, r.kind, r.decay) for r in table] == [
        ("param.0", "matrix", True), ("param.1", "aux", False), ("param.3", "aux", False),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"param\.0 has shape"):
        route_parameters_list([torch.zeros(2, 3, 4)])


# --- the table --------------------------------------------------------------------------------------------------------


def test_table_counts_and_folds() -> None:
    table = route_parameters(build("gpt_oss"))
    total = sum(parameter.numel() for parameter in build("gpt_oss").parameters())
    assert table.matrix_numel + table.aux_numel == total
    assert table.matrix_count == 2 * (4 + 4 + 4 + 4)  # per layer: q, k, v, o; gate, up, down of four experts
    text = str(table)
    line = next(line for line in text.splitlines() if "experts.gate_up_proj " in line)
    assert "model.layers.{0,1}.mlp.experts.gate_up_proj" in line
    assert " x2 " in line
    assert "4x256x384" in line
    assert "gate 4x192x256, up 4x192x256" in line
    assert f"{table.matrix_numel:,} of {total:,} elements ({100 * table.matrix_numel / total:.1f} %)" in text
    assert sum(row["numel"] for row in table.collapsed()) == total
    assert sum(row["count"] for row in table.collapsed()) == len(table)


def test_folding_never_names_what_is_not_there() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)]) for _ in range(2)])
    model[0][0] = nn.Linear(4, 5, bias=False)
    folded = {row["name"]: row["count"] for row in route_parameters(model).collapsed()}
    assert folded == {"0.0.weight": 1, "0.{1,2}.weight": 2, "1.{0..2}.weight": 3}


def test_table_as_data() -> None:
    table = route_parameters(build("phi3"))
    data = json.loads(json.dumps(table.to_dict()))
    assert len(data["parameters"]) == len(table)
    entry = next(e for e in data["parameters"] if e["name"] == "model.layers.0.self_attn.qkv_proj.weight")
    assert entry["units"][1] == {"name": "k", "shape": [1, 64, 256]}
    assert entry["module_type"] == "Linear"
    assert data["totals"]["matrix_numel"] == table.matrix_numel
    assert table[:3] == RouteTable(list(table)[:3])
    assert table[0] in table
    assert "nowhere" not in table.by_name


def test_coverage_warning() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(1000, 8)
            self.kernel = nn.Parameter(torch.zeros(8, 9))
            self.fc = nn.Linear(8, 8, bias=False)

    table = route_parameters(Opaque(), matrix_modules="fc")
    message = coverage_warning(table)
    assert message is not None
    assert "47.1 % of the 136 elements" in message
    assert "kernel 8x9" in message
    assert coverage_warning(table, threshold=0.4) is None
    assert coverage_warning(route_parameters(build("llama"))) is None
    assert coverage_warning(RouteTable([])) is None


def test_routing_imports_no_library_above_torch() -> None:
    forbidden = {"transformers", "peft", "accelerate", "deepspeed"}
    for path in Path(hf_emopt.routing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert not roots & forbidden, path
            assert not any(
                name.startswith(("hf_emopt.rules", "hf_emopt.distributed", "torch.distributed")) for name in names
            )
