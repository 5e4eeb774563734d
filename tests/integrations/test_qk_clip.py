"""What a clip does to logits and to weights, in families that store and treat query and key in different ways."""

from __future__ import annotations

import pytest
import torch
from attention_zoo import batch, build
from eager_scores import scores
from torch import Tensor, nn

import hf_emopt
from hf_emopt import MaxLogits, qk_clip
from hf_emopt.formats.master_weights import load_weights

_SHARED = {"qwen3", "qwen3_next", "gemma3", "persimmon"}
"""Families in which one norm weight stands for all heads."""

# Which parameters a clip may change, in part or as a whole.
_ACTED_ON = {
    "llama": {"q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"},
    "mistral-window": {"q_proj.weight", "k_proj.weight"},
    "gpt2": {"c_attn.weight", "c_attn.bias"},
    "gpt_neox": {"query_key_value.weight", "query_key_value.bias"},
    "phi3": {"qkv_proj.weight"},
    "gemma2": {"q_proj.weight", "k_proj.weight"},
    "gemma3": {"q_norm.weight", "k_norm.weight"},
    "qwen3": {"q_norm.weight", "k_norm.weight"},
    "qwen3_next": {"q_norm.weight", "k_norm.weight"},
    "olmo2": {"q_norm.weight", "k_norm.weight"},
    "cohere": {"q_norm.weight", "k_norm.weight"},
    "deepseek_v3": {"q_b_proj.weight", "kv_b_proj.weight"},
    "deepseek_v2": {"q_proj.weight", "kv_b_proj.weight"},
    "codegen": {"qkv_proj.weight"},
    "gpt_bigcode": {"c_attn.weight", "c_attn.bias"},
    "persimmon": {"q_layernorm.weight", "q_layernorm.bias", "k_layernorm.weight", "k_layernorm.bias"},
    "bert": {"query.weight", "query.bias", "key.weight", "key.bias"},
    "modernbert": {"Wqkv.weight"},
}


def measured(model: nn.Module) -> dict[str, Tensor]:
    with torch.no_grad(), MaxLogits(model) as recorder:
        model(**batch("left"))
    return {name: value.double() for name, value in recorder.max_logits().items()}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", _ACTED_ON)
def test_each_head_over_the_threshold_comes_down_to_it(family: str) -> None:
    model = build(family)
    ((name, before),) = measured(model).items()
    kept = snapshot(model)
    threshold = float(before.min()) * 1.01  # one head stays as it is, and with it a shared key
    report = qk_clip(model, {name: before}, threshold)
    assert report.max_logit == pytest.approx(float(before.max()))
    assert [(n, h) for n, h, _ in report.clipped] == [(name, h) for h in range(4) if before[h] > threshold]
    # The layer's input comes of the embeddings, so it is the same; and eager attention is asked, not the recorder.
    modules = {name: model.get_submodule(name)}
    with torch.no_grad(), scores(modules) as found:
        model(**batch("left"))
    after = found[name]
    if family == "gemma2":
        after = 30 * torch.atanh(after / 30)  # what the soft cap was handed
    expected = before * threshold / before.max() if family in _SHARED else before.clamp(max=threshold)
    torch.testing.assert_close(after, expected, rtol=2e-5, atol=1e-5)
    changed = {n.split(".", 1)[1].rsplit(".", 2)[-2:][0] + "." + n.rsplit(".", 1)[1] for n, p in model.named_parameters()
               if not torch.equal(p, kept[n])}  # fmt: skip
    assert changed == _ACTED_ON[family]


def test_balance_divides_the_factor() -> None:
    for balance in (0.0, 0.3, 1.0):
        model = build("gpt_neox")
        ((name, before),) = measured(model).items()
        kept = snapshot(model)
        qk_clip(model, {name: before}, float(before.max()) / 4, balance)
        gamma = (before.max() / 4 / before).clamp(max=1).float()
        weight = "gpt_neox.layers.0.attention.query_key_value.weight"
        heads = kept[weight].view(4, 3, 8, 32)
        want = torch.stack(
            [heads[:, part] * gamma.pow(share)[:, None, None] for part, share in enumerate((balance, 1 - balance, 0))],
            dim=1,
        )
        torch.testing.assert_close(model.get_parameter(weight), want.view(96, 32), rtol=1e-6, atol=0)


def test_a_shared_key_takes_what_all_its_queries_need() -> None:
    """Heads 0 and 1 share a key head, 2 and 3 another."""
    model = build("mistral-window")
    kept = snapshot(model)
    name = "model.layers.0.self_attn"
    qk_clip(model, {name: torch.tensor([400.0, 160.0, 80.0, 1000.0])}, 100.0)
    q, k = (model.get_parameter(f"{name}.{x}_proj.weight").view(-1, 8, 32) for x in "qk")
    q_factor = q.flatten(1).norm(dim=1) / kept[f"{name}.q_proj.weight"].view(4, -1).norm(dim=1)
    k_factor = k.flatten(1).norm(dim=1) / kept[f"{name}.k_proj.weight"].view(2, -1).norm(dim=1)
    common = 0.625**0.5
    torch.testing.assert_close(k_factor, torch.tensor([common, 1.0]))
    torch.testing.assert_close(q_factor, torch.tensor([0.25 / common, common, 1.0, 0.1]))
    assert torch.equal(q[2], kept[f"{name}.q_proj.weight"].view(4, 8, 32)[2])
    assert torch.equal(k[1], kept[f"{name}.k_proj.weight"].view(2, 8, 32)[1])


def test_latent_attention_leaves_the_shared_rotary_key_and_the_values() -> None:
    model = build("deepseek_v3")
    kept = snapshot(model)
    name = "model.layers.0.self_attn"
    qk_clip(model, {name: torch.tensor([400.0, 1.0, 1.0, 1.0])}, 100.0, balance=0.3)
    q, kv = ((model.get_parameter(f"{name}.{x}.weight"), kept[f"{name}.{x}.weight"]) for x in ("q_b_proj", "kv_b_proj"))
    ratio = (q[0] / q[1]).view(4, 12, -1)
    torch.testing.assert_close(ratio[0, :8], torch.full_like(ratio[0, :8], 0.25**0.3))  # without position
    torch.testing.assert_close(ratio[0, 8:], torch.full_like(ratio[0, 8:], 0.25))  # rotary
    assert torch.equal(ratio[1:], torch.ones_like(ratio[1:]))
    ratio = (kv[0] / kv[1]).view(4, 14, -1)
    torch.testing.assert_close(ratio[0, :8], torch.full_like(ratio[0, :8], 0.25**0.7))
    assert torch.equal(ratio[0, 8:], torch.ones_like(ratio[0, 8:]))  # values
    assert torch.equal(ratio[1:], torch.ones_like(ratio[1:]))


def test_where_one_side_does_not_train_the_other_takes_the_whole() -> None:
    for frozen, acting in (("q_proj", "k_proj"), ("k_proj", "q_proj")):
        model = build("mistral-window")
        ((name, before),) = measured(model).items()
        kept = snapshot(model)
        model.get_parameter(f"{name}.{frozen}.weight").requires_grad_(False)
        threshold = float(before.min()) / 2
        qk_clip(model, {name: before}, threshold)
        assert torch.equal(model.get_parameter(f"{name}.{frozen}.weight"), kept[f"{name}.{frozen}.weight"])
        after = measured(model)[name]
        if acting == "q_proj":
            torch.testing.assert_close(after, torch.full_like(after, threshold), rtol=1e-5, atol=0)
        else:  # the worst query head of the group decides
            groups = threshold / before.view(2, 2).amax(1)
            torch.testing.assert_close(after, before * groups.repeat_interleave(2), rtol=1e-5, atol=0)


def test_nothing_is_touched_under_the_threshold() -> None:
    model = build("llama")
    kept = snapshot(model)
    found = measured(model)
    report = qk_clip(model, found, float(max(v.max() for v in found.values())))
    assert report.clipped == ()
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters())


def test_what_cannot_act_raises() -> None:
    name = "model.layers.0.self_attn"
    over = {name: torch.full((4,), 200.0)}
    model = build("mistral-window")
    for side in "qk":
        model.get_parameter(f"{name}.{side}_proj.weight").requires_grad_(False)
    with pytest.raises(
        ValueError, match="has a logit of 200 over 100, and neither its query nor its key has a weight that trains"
    ):
        qk_clip(model, over)
    with pytest.raises(ValueError, match="the model has no attention module 'nowhere'"):
        qk_clip(model, {"nowhere": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"has 4 query heads, but max_logits has shape \(3,\)"):
        qk_clip(model, {name: torch.zeros(3)})
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match=r"a logit of .* is infinite or no number"):
            qk_clip(build("mistral-window"), {name: torch.tensor([1.0, bad, 1.0, 1.0])})
    for options, message in (({"threshold": 0.0}, "threshold=0.0 must be"), ({"balance": 1.5}, "balance=1.5 must lie")):
        with pytest.raises(ValueError, match=message):
            qk_clip(model, {name: torch.zeros(4)}, **options)


def test_adapters_raise() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("mistral-window"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(
        ValueError, match="an adapter computes its query or key together with a weight that does not train"
    ):
        qk_clip(model, {"model.layers.0.self_attn": torch.full((4,), 200.0)})


# --- 16-bit weights ---------------------------------------------------------------------------------------------------


def as_stepped(optimizer: torch.optim.Optimizer, name: str, model: nn.Module, policy: str) -> Tensor:
    """The float32 weight that the optimizer goes on from."""
    parameter = model.get_parameter(name)
    return load_weights([parameter.detach()], [optimizer.state[parameter]], policy)[0].clone()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["split", "master", "kahan"])
def test_the_bits_beside_sixteen_bit_weights_are_scaled_too(family: str, policy: str) -> None:
    model = build(family).bfloat16()
    optimizer = hf_emopt.Muon(model, lr=1e-3, weight_decay=0.0, low_precision_weights=policy)
    for _ in range(3):
        model(**batch(), labels=batch()["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "model.layers.0.self_attn"
    names = [f"{name}.{x}" for x in (("q_proj.weight", "q_proj.bias") if family == "llama" else ("q_norm.weight",))]
    before = {n: as_stepped(optimizer, n, model, policy) for n in names}
    assert any(not torch.equal(before[n], model.get_parameter(n).float()) for n in names)  # there are such bits
    # A factor nearer to 1 than two bfloat16 are to each other.
    qk_clip(model, {name: torch.full((4,), 100.1)}, 100.0, balance=1.0, optimizer=optimizer)
    gamma = 100 / 100.1
    moved = {n: as_stepped(optimizer, n, model, policy) for n in names}
    precision = 2e-7 if policy != "kahan" else 2**-15
    for n, value in before.items():
        want = value * gamma + (gamma - 1 if family == "gemma3" else 0.0)
        torch.testing.assert_close(moved[n], want, rtol=precision, atol=precision)
    # The next step goes on from there.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    optimizer.step()
    for n in names:
        torch.testing.assert_close(as_stepped(optimizer, n, model, policy), moved[n], rtol=precision, atol=precision)
        torch.testing.assert_close(model.get_parameter(n).float(), moved[n], rtol=2**-8, atol=0)


def test_stochastic_rounding_keeps_a_small_factor_in_the_mean() -> None:
    model = build("mistral-window").bfloat16()
    optimizer = hf_emopt.Muon(model, lr=1e-3, low_precision_weights="stochastic")
    model(**batch(), labels=batch()["input_ids"]).loss.backward()
    optimizer.step()
    name = "model.layers.0.self_attn"
    weight = model.get_parameter(f"{name}.q_proj.weight")
    before = weight.detach().float().clone()
    for _ in range(20):
        qk_clip(model, {name: torch.full((4,), 100.1)}, 100.0, balance=1.0, optimizer=optimizer)
        optimizer.state[weight]["step"] += 1  # each step rounds by noise of its own
    ratio = float((weight.detach().float() * before).sum() / before.square().sum())
    assert ratio == pytest.approx((100 / 100.1) ** 20, abs=2e-3)  # plain rounding would leave it at 1


def test_weights_of_other_optimizers_are_scaled_as_they_are() -> None:
    model = build("mistral-window").bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    name = "model.layers.0.self_attn"
    before = model.get_parameter(f"{name}.q_proj.weight").detach().clone()
    qk_clip(model, {name: torch.full((4,), 200.0)}, 100.0, balance=1.0, optimizer=optimizer)
    assert torch.equal(model.get_parameter(f"{name}.q_proj.weight"), before / 2)
