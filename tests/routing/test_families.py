"""Families of transformers: golden routes, and matrix views compared with what the modules themselves compute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES, GOLDEN, build, summary
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_emopt.routing import MatrixView, route_parameters

with GOLDEN.open(encoding="utf-8") as _file:
    _GOLDEN: dict[str, Any] = json.load(_file)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    assert summary(route_parameters(build(family))) == _GOLDEN[family]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_views_partition_every_matrix(family: str, per_head: bool) -> None:
    seen: set[tuple[tuple[int, ...], tuple[MatrixView, ...]]] = set()
    for route in route_parameters(build(family), per_head=per_head).matrices:
        if (route.shape, route.matrix_views) in seen:
            continue
        seen.add((route.shape, route.matrix_views))
        source = torch.arange(route.numel, dtype=torch.int32).reshape(route.shape)
        target = torch.full_like(source, -1)
        for matrix_view in route.matrix_views:
            # The cut of the target must be untouched so far: matrix views are disjoint.
            assert matrix_view.extract(target).eq(-1).all(), (route.name, matrix_view)
            matrix_view.insert(target, matrix_view.extract(source))
        assert target.equal(source), route.name


@pytest.mark.parametrize("family", FAMILIES)
def test_decay_is_that_of_trainer(family: str) -> None:
    model = build(family)
    theirs = set(tf.Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    for route in route_parameters(model):
        if route.decay:
            assert route.name in theirs, route.name
        elif route.name in theirs:  # we spare vectors and tokens such as (1, 1, width)
            assert route.kind == "aux", route.name
            assert sum(size > 1 for size in route.shape) < 2, route.name


def test_one_route_per_trainable_parameter() -> None:
    for family in ("t5", "bert", "whisper", "gpt2"):
        model = build(family)
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert [route.name for route in route_parameters(model)] == trainable


def test_resnet18_is_nearly_all_matrices() -> None:
    table = route_parameters(build("resnet18"))
    share = table.matrix_numel / sum(p.numel() for p in build("resnet18").parameters())
    body = table.matrix_numel / (table.matrix_numel + table.aux_numel - table.by_name["classifier.1.weight"].numel)
    assert share > 0.95
    assert body > 0.99


# --- attention: compare with the q, k, v that the module hands to its attention function ------------------------------


@pytest.fixture
def captured() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Registers an attention function ``capture`` that notes q, k, v ``(batch, heads, tokens, head_dim)``."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def capture(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        calls.append((q, k, v))
        out = torch.ones(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
        return out, None

    ALL_ATTENTION_FUNCTIONS.register("capture", capture)
    yield calls
    del ALL_ATTENTION_FUNCTIONS._global_mapping["capture"]


def _inputs(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for name, module in modules.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].detach()))
    return seen


SMALL: dict[str, tuple[type[nn.Module], Any, str, tuple[str, ...]]] = {
    "gpt2": (
        tf.GPT2Model, tf.GPT2Config(n_embd=24, n_head=4, n_layer=1, vocab_size=32, n_positions=16),
        "h.0.attn", ("c_attn",),
    ),
    "gpt_neox": (
        tf.GPTNeoXModel,
        tf.GPTNeoXConfig(
            hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=32
        ),
        "layers.0.attention", ("query_key_value",),
    ),
    "phi3": (
        tf.Phi3Model,
        tf.Phi3Config(
            hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=32,
            vocab_size=32, pad_token_id=0,
        ),
        "layers.0.self_attn", ("qkv_proj",),
    ),
    "modernbert": (
        tf.ModernBertModel,
        tf.ModernBertConfig(
            hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=32,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        ),
        "layers.0.attn", ("Wqkv",),
    ),
    "llama": (
        tf.LlamaModel,
        tf.LlamaConfig(
            hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=32,
            vocab_size=32,
        ),
        "layers.0.self_attn", ("q_proj", "k_proj", "v_proj"),
    ),
    "bert": (
        tf.BertModel,
        tf.BertConfig(hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=32),
        "encoder.layer.0.attention.self", ("query", "key", "value"),
    ),
    "persimmon": (
        tf.PersimmonModel,
        tf.PersimmonConfig(
            hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=32,
            qk_layernorm=False,
        ),
        "layers.0.self_attn", ("query_key_value",),
    ),
    "gpt_bigcode": (
        tf.GPTBigCodeModel, tf.GPTBigCodeConfig(n_embd=24, n_head=4, n_layer=1, vocab_size=32, n_positions=16),
        "h.0.attn", ("c_attn",),
    ),
    "gpt_bigcode_mha": (
        tf.GPTBigCodeModel,
        tf.GPTBigCodeConfig(n_embd=24, n_head=4, n_layer=1, vocab_size=32, n_positions=16, multi_query=False),
        "h.0.attn", ("c_attn",),
    ),
    "dbrx": (
        tf.DbrxModel,
        tf.DbrxConfig(
            d_model=24, n_heads=4, n_layers=1, vocab_size=32,
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 1e6},
            ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "hidden_size": 24},
        ),
        "blocks.0.norm_attn_norm.attn", ("Wqkv",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("family", SMALL)
def test_matrix_views_are_the_projections_of_forward(family: str, per_head: bool, captured: list[Any]) -> None:
    cls, config, path, leaves = SMALL[family]
    model = cls(config).eval()
    for parameter in model.parameters():  # biases too, so that a row in the wrong place shows
        nn.init.normal_(parameter)
    model.config._attn_implementation = "capture"
    attention = model.get_submodule(path)
    seen = _inputs({leaf: attention.get_submodule(leaf) for leaf in leaves})
    model(input_ids=torch.randint(3, 32, (2, 5)))
    q, k, v = captured[0]
    table = route_parameters(model, per_head=per_head)
    names = {"q_proj": "q", "query": "q", "k_proj": "k", "key": "k", "v_proj": "v", "value": "v"}
    found = set()
    for leaf in leaves:
        parameter = attention.get_submodule(leaf).weight
        bias = attention.get_submodule(leaf).bias
        for matrix_view in table.by_name[f"{path}.{leaf}.weight"].matrix_views:
            part = names.get(leaf, matrix_view.name)
            expected = {"q": q, "k": k, "v": v}[part][:, :, 0]  # token 0: rotary position embeddings do nothing there
            weight = matrix_view.extract(parameter.detach())
            # The bias of a row is found by the same cut of a parameter whose every column is the bias.
            shift = 0.0
            if bias is not None:
                columns = bias.detach().expand(weight.shape[-1], -1) if leaf == "c_attn" and family == "gpt2" else None
                stored = columns if columns is not None else bias.detach()[:, None].expand(-1, weight.shape[-1])
                shift = matrix_view.extract(stored.contiguous())[..., 0]
            ours = torch.einsum("bmn,tn->tbm", weight, seen[leaf][:, 0]) + shift
            if per_head:
                assert matrix_view.shape[0] == expected.shape[1], "one matrix per head"
            torch.testing.assert_close(ours.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)
            found.add(part)
    assert found == {"q", "k", "v"}


@pytest.mark.parametrize(
    "variant",
    [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": True}, {"multi_query": False}],
    ids=["grouped", "multi-query", "per head"],
)
def test_falcon(variant: dict[str, Any]) -> None:
    config = tf.FalconConfig(
        hidden_size=24, num_attention_heads=4, num_hidden_layers=1, vocab_size=32,
        **{"new_decoder_architecture": False, **variant},
    )  # fmt: skip
    model = tf.FalconModel(config)
    attention = model.h[0].self_attention
    x = torch.randn(2, 3, 24)
    q, k, v = attention._split_heads(attention.query_key_value(x))
    if variant.get("new_decoder_architecture"):  # theirs repeats k and v for every query head of the group
        k, v = k[:, :, ::2], v[:, :, ::2]
    for per_head in (False, True):
        route = route_parameters(model, per_head=per_head).by_name["h.0.self_attention.query_key_value.weight"]
        for matrix_view, expected in zip(route.matrix_views, (q, k, v), strict=True):
            ours = torch.einsum("bmn,xtn->xtbm", matrix_view.extract(attention.query_key_value.weight.detach()), x)
            torch.testing.assert_close(ours.reshape(expected.shape), expected.detach())


def test_bloom() -> None:
    model = tf.BloomModel(tf.BloomConfig(hidden_size=24, n_head=4, n_layer=1, vocab_size=32))
    attention = model.h[0].self_attention
    x = torch.randn(2, 3, 24)
    fused = torch.nn.functional.linear(x, attention.query_key_value.weight)
    route = route_parameters(model, per_head=True).by_name["h.0.self_attention.query_key_value.weight"]
    for matrix_view, expected in zip(route.matrix_views, attention._reshape(fused), strict=True):
        ours = torch.einsum("hmn,xtn->xhtm", matrix_view.extract(attention.query_key_value.weight.detach()), x)
        torch.testing.assert_close(ours, expected.detach())


def test_codegen_order_is_query_value_key() -> None:
    config = tf.CodeGenConfig(n_embd=32, n_head=8, n_layer=1, vocab_size=32, rotary_dim=4, n_positions=16)
    model = tf.CodeGenModel(config)
    attention = model.h[0].attn
    weight = attention.qkv_proj.weight.detach()
    local = 32 // attention.mp_num
    pieces = weight.view(attention.mp_num, 3 * local, 32).split(local, dim=1)  # as in its forward
    route = route_parameters(model).by_name["h.0.attn.qkv_proj.weight"]
    assert [matrix_view.name for matrix_view in route.matrix_views] == ["q", "v", "k"]
    for matrix_view, piece in zip(route.matrix_views, pieces, strict=True):
        assert matrix_view.extract(weight)[0].equal(piece.reshape(-1, 32))


def test_gpt2_cross_attention(captured: list[Any]) -> None:
    config = tf.GPT2Config(
        n_embd=24, n_head=4, n_layer=1, vocab_size=32, n_positions=16, add_cross_attention=True, is_decoder=True
    )
    model = tf.GPT2Model(config).eval()
    model.config._attn_implementation = "capture"
    memory = torch.randn(1, 3, 24)
    model(input_ids=torch.randint(0, 32, (1, 4)), encoder_hidden_states=memory)
    _, k, v = captured[1]
    weight = model.h[0].crossattention.c_attn.weight.detach()
    route = route_parameters(model, per_head=True).by_name["h.0.crossattention.c_attn.weight"]
    for matrix_view, expected in zip(route.matrix_views, (k, v), strict=True):
        ours = torch.einsum("hmn,xtn->xhtm", matrix_view.extract(weight), memory)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-5)


def test_qwen3_next_gated_query(captured: list[Any]) -> None:
    model = build("qwen3_next", device="cpu").eval()
    model.config._attn_implementation = "capture"
    attention = model.model.layers[1].self_attn
    seen = _inputs({"q_proj": attention.q_proj, "o_proj": attention.o_proj})
    model(input_ids=torch.randint(0, 32, (1, 4)))
    matrix_view_q, matrix_view_gate = (
        route_parameters(model).by_name["model.layers.1.self_attn.q_proj.weight"].matrix_views
    )
    weight, x = attention.q_proj.weight.detach(), seen["q_proj"]
    q = attention.q_norm((x @ matrix_view_q.extract(weight)[0].T).view(1, 4, 8, 32))
    torch.testing.assert_close(q[:, 0], captured[-1][0][:, :, 0], rtol=1e-4, atol=1e-5)
    # The captured attention gives ones, so what enters o_proj is sigmoid(gate).
    gate = torch.sigmoid(x @ matrix_view_gate.extract(weight)[0].T)
    torch.testing.assert_close(gate, seen["o_proj"], rtol=1e-4, atol=1e-5)


def test_qwen3_next_gated_delta_net() -> None:
    model = build("qwen3_next", device="cpu")
    layer = model.model.layers[0].linear_attn
    x = torch.randn(1, 3, 256)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    table = route_parameters(model)
    for leaf, parts in (("in_proj_qkvz", (q, k, v, z)), ("in_proj_ba", (b, a))):
        weight = layer.get_submodule(leaf).weight.detach()
        matrix_views = table.by_name[f"model.layers.0.linear_attn.{leaf}.weight"].matrix_views
        for matrix_view, expected in zip(matrix_views, parts, strict=True):
            ours = x @ matrix_view.extract(weight)[0].T
            torch.testing.assert_close(ours, expected.detach().reshape(1, 3, -1), rtol=1e-4, atol=1e-5)


def test_latent_attention_of_deepseek() -> None:
    model = build("deepseek_v3", device="cpu").eval()
    attention = model.model.layers[0].self_attn
    seen = _inputs({"norm": attention.kv_a_layernorm, "kv_a": attention.kv_a_proj_with_mqa})
    model(input_ids=torch.randint(0, 32, (1, 4)))
    name = "model.layers.0.self_attn"
    latent, rope = route_parameters(model).by_name[f"{name}.kv_a_proj_with_mqa.weight"].matrix_views
    assert latent.shape == (1, 48, 256)
    assert rope.shape == (1, 16, 256)
    ours = seen["kv_a"] @ latent.extract(attention.kv_a_proj_with_mqa.weight.detach())[0].T
    torch.testing.assert_close(ours.reshape(seen["norm"].shape), seen["norm"])

    whole = route_parameters(model).by_name[f"{name}.kv_b_proj.weight"]
    assert [matrix_view.shape for matrix_view in whole.matrix_views] == [(1, 8 * (24 + 32), 48)]
    assert "whole" in whole.reason
    weight = attention.kv_b_proj.weight.detach()
    z = torch.randn(1, 1, 4, 48)
    keys, values = attention.expand_kv(z, torch.zeros(1, 1, 4, 16))
    matrix_view_k, matrix_view_v = (
        route_parameters(model, per_head=True).by_name[f"{name}.kv_b_proj.weight"].matrix_views
    )
    for matrix_view, expected in ((matrix_view_k, keys[..., :24]), (matrix_view_v, values)):
        ours = torch.einsum("hmn,xytn->xhtm", matrix_view.extract(weight), z)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-4, atol=1e-5)
    q_b = route_parameters(model, per_head=True).by_name[f"{name}.q_b_proj.weight"]
    assert [matrix_view.shape for matrix_view in q_b.matrix_views] == [(8, 40, 64)]


def test_output_projection_stays_whole_per_head() -> None:
    route = route_parameters(build("llama"), per_head=True).by_name["model.layers.0.self_attn.o_proj.weight"]
    assert [matrix_view.shape for matrix_view in route.matrix_views] == [(1, 256, 256)]
    assert "heads lie along its inputs" in route.reason


# --- state space models -----------------------------------------------------------------------------------------------


def test_mamba2_packed_projection() -> None:
    model = build("mamba2", device="cpu").eval()
    mixer = model.backbone.layers[0].mixer
    seen = _inputs({"in_proj": mixer.in_proj})
    gates: list[Tensor] = []
    mixer.norm.register_forward_pre_hook(lambda _, args: gates.append(args[1].detach()))
    model(input_ids=torch.randint(0, 32, (1, 4)))
    weight, x = mixer.in_proj.weight.detach(), seen["in_proj"]
    matrix_views = route_parameters(model).by_name["backbone.layers.0.mixer.in_proj.weight"].matrix_views
    parts = {matrix_view.name: x @ matrix_view.extract(weight)[0].T for matrix_view in matrix_views}
    torch.testing.assert_close(parts["z"], gates[0].reshape(parts["z"].shape))
    inner, state = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    _, mixed, dt = mixer.in_proj(x).split([inner, mixer.conv_dim, mixer.num_heads], dim=-1)  # as in its forward
    for name, expected in zip(("x", "B", "C"), mixed.split([inner, state, state], dim=-1), strict=True):
        torch.testing.assert_close(parts[name], expected.detach())
    torch.testing.assert_close(parts["dt"], dt.detach())


# --- experts and gated MLPs: the whole forward, rebuilt from matrix views
# ----------------------------------------------------


def _by_expert(matrix_view: MatrixView, parameter: Tensor, x: Tensor) -> Tensor:
    """``(E, tokens, in) -> (E, tokens, out)``."""
    return x @ matrix_view.extract(parameter.detach()).mT


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_of_a_stack(family: str) -> None:
    model = build(family, device="cpu")
    name, experts = next((n, m) for n, m in model.named_modules() if n.endswith(".experts"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.config._experts_implementation = "eager"
    table = route_parameters(model)
    gate, up = table.by_name[f"{name}.gate_up_proj"].matrix_views
    (down,) = table.by_name[f"{name}.down_proj"].matrix_views
    count = experts.gate_up_proj.shape[0]
    x = torch.randn(count, 256)  # token i goes to expert i
    chosen, weights = torch.arange(count)[:, None], torch.ones(count, 1)
    theirs = experts(x, chosen, weights)
    g, u = (_by_expert(matrix_view, experts.gate_up_proj, x[:, None]) for matrix_view in (gate, up))
    if family == "gpt_oss":
        bias = experts.gate_up_proj_bias[:, None]
        fused = torch.stack([g, u], dim=-1).flatten(-2) + bias  # interleaved again, for its own activation
        hidden = experts._apply_gate(fused)
        ours = _by_expert(down, experts.down_proj, hidden) + experts.down_proj_bias[:, None]
    else:
        ours = _by_expert(down, experts.down_proj, experts.act_fn(g) * u)
    torch.testing.assert_close(ours[:, 0], theirs, rtol=1e-4, atol=1e-5)


def test_experts_of_llama4() -> None:
    model = build("llama4", device="cpu")
    experts = model.model.layers[1].feed_forward.experts
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    table = route_parameters(model)
    name = "model.layers.1.feed_forward.experts"
    gate, up = table.by_name[f"{name}.gate_up_proj"].matrix_views
    (down,) = table.by_name[f"{name}.down_proj"].matrix_views
    x = torch.randn(4, 3, 256)
    g, u = (_by_expert(matrix_view, experts.gate_up_proj, x) for matrix_view in (gate, up))
    ours = _by_expert(down, experts.down_proj, experts.act_fn(g) * u)
    torch.testing.assert_close(ours.reshape(-1, 256), experts(x.reshape(-1, 256)), rtol=1e-4, atol=1e-5)


def test_experts_of_dbrx() -> None:
    model = build("dbrx", device="cpu")
    name, experts = next((n, m) for n, m in model.named_modules() if n.endswith(".experts"))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    table = route_parameters(model)
    (w1,), (v1,), (w2,) = (table.by_name[f"{name}.mlp.{leaf}"].matrix_views for leaf in ("w1", "v1", "w2"))
    x = torch.randn(4, 128)
    theirs = experts(x, torch.arange(4)[:, None], torch.ones(4, 1))
    hidden = experts.mlp.activation_fn(_by_expert(w1, experts.mlp.w1, x[:, None]))
    hidden = hidden * _by_expert(v1, experts.mlp.v1, x[:, None])
    torch.testing.assert_close(
        _by_expert(w2, experts.mlp.w2, hidden)[:, 0], theirs.reshape(4, 128), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("family", "name", "fused", "down"),
    [
        ("phi3", "model.layers.0.mlp", "gate_up_proj", "down_proj"),
        ("modernbert", "model.layers.0.mlp", "Wi", "Wo"),
    ],
)
def test_gated_mlp(family: str, name: str, fused: str, down: str) -> None:
    model = build(family, device="cpu").eval()
    mlp = model.get_submodule(name)
    x = torch.randn(3, 256)
    weight = mlp.get_submodule(fused).weight.detach()
    activated, factor = (
        x @ u.extract(weight)[0].T for u in route_parameters(model).by_name[f"{name}.{fused}.weight"].matrix_views
    )
    activation = mlp.activation_fn if family == "phi3" else mlp.act
    ours = mlp.get_submodule(down)(activation(activated) * factor)
    torch.testing.assert_close(ours, mlp(x), rtol=1e-4, atol=1e-5)


def test_bare_projection_of_gemma3() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    vision = {"hidden_size": 12, "image_size": 8, "patch_size": 2}
    config = tf.Gemma3Config(text_config={"hidden_size": 16}, vision_config=vision, mm_tokens_per_image=16)
    projector = Gemma3MultiModalProjector(config)
    nn.init.normal_(projector.mm_input_projection_weight)
    (matrix_view,) = route_parameters(projector).by_name["mm_input_projection_weight"].matrix_views
    x = torch.randn(1, 16, 12)
    ours = projector.mm_soft_emb_norm(x) @ matrix_view.extract(projector.mm_input_projection_weight.detach())[0].T
    torch.testing.assert_close(ours, projector(x))


def test_flags_of_experts_are_read() -> None:
    """Every combination of the flags that transformers writes on its experts, on a stand-in of the same form."""

    class Experts(nn.Module):
        def __init__(self, transposed: bool, concatenated: bool, gated: bool) -> None:
            super().__init__()
            self.is_transposed, self.is_concatenated, self.has_gate = transposed, concatenated, gated
            out = 12 if gated else 6
            name = "gate_up_proj" if gated else "up_proj"
            self.register_parameter(
                name, nn.Parameter(torch.randn(2, 5, out) if transposed else torch.randn(2, out, 5))
            )

    for transposed in (False, True):
        for concatenated in (False, True):
            model = Experts(transposed, concatenated, True)
            stack = model.gate_up_proj.detach().mT if transposed else model.gate_up_proj.detach()
            expected = stack.chunk(2, dim=1) if concatenated else (stack[:, ::2], stack[:, 1::2])
            (route,) = route_parameters(model)
            for matrix_view, part in zip(route.matrix_views, expected, strict=True):
                assert matrix_view.extract(model.gate_up_proj.detach()).equal(part)
        (route,) = route_parameters(Experts(transposed, True, False))
        assert [matrix_view.shape for matrix_view in route.matrix_views] == [(2, 6, 5)]
