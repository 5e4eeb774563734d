"""The recorder against what eager attention hands to softmax, under every attention function."""

from __future__ import annotations

import pytest
import torch
from attention_zoo import batch, build
from eager_scores import scores
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import AttentionInterface

from hf_emopt import MaxLogits
from hf_emopt.integrations.visibility import visible_of
from hf_emopt.linalg.attention_logits import max_logit

_SDPA = [
    "llama", "mistral-window", "gpt2", "gpt_neox", "phi3", "gemma3", "qwen3", "qwen3_next", "olmo2", "cohere", "deepseek_v3",
    "deepseek_v2", "bert", "modernbert", "bart",
]  # fmt: skip


def eager_logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a model set to eager attention hands to softmax."""
    modules = {name: query_key.module for name, query_key in MaxLogits(model).found.items()}
    with torch.no_grad(), scores(modules) as found:
        model(**inputs)
    assert set(found) == set(modules)
    return found


@pytest.mark.parametrize("family", _SDPA)
def test_logits_are_those_of_eager_attention(family: str) -> None:
    model = build(family, "eager")
    for padding in ("none", "left", "right"):
        inputs = batch(padding)
        model.set_attn_implementation("eager")
        with MaxLogits(model) as eager:
            expected = eager_logits(model, inputs)
        model.set_attn_implementation("sdpa")
        with torch.no_grad(), MaxLogits(model) as sdpa:
            model(**inputs)
        for recorder in (eager, sdpa):
            found = recorder.max_logits()
            assert set(found) == set(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-5)


def test_a_soft_cap_is_handed_what_is_measured() -> None:
    model = build("gemma2")
    with torch.no_grad(), MaxLogits(model) as recorder:
        model(**batch())
    for name, value in eager_logits(model, batch()).items():
        capped = 30.0 * torch.tanh(recorder.max_logits()[name].double() / 30.0)
        torch.testing.assert_close(capped, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bart"])
def test_the_bound_is_above(family: str) -> None:
    model = build(family, "sdpa")
    with torch.no_grad(), MaxLogits(model) as exact, MaxLogits(model, "bound") as bound:
        model(**batch("left"))
    for name, value in exact.max_logits().items():
        assert (bound.max_logits()[name] >= value).all()


def test_the_maximum_is_over_forward_passes_until_reset() -> None:
    model = build("llama", "sdpa")
    first, second = batch("none"), {"input_ids": batch("none")["input_ids"].flip(0)[:2, :5] % 7 + 5}
    alone = []
    for inputs in (first, second):
        with torch.no_grad(), MaxLogits(model) as recorder:
            model(**inputs)
        alone.append(recorder.max_logits())
    with torch.no_grad(), MaxLogits(model) as recorder:
        model(**first)
        model(**second)
        both = recorder.max_logits()
        recorder.reset()
        model(**second)
    for name, value in both.items():
        assert torch.equal(value, torch.maximum(alone[0][name], alone[1][name]))
        assert torch.equal(recorder.max_logits()[name], alone[1][name])


def test_gradient_checkpointing_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("hf_emopt.integrations.max_logits.max_logit", lambda *a: calls.append(1) or max_logit(*a))
    for reentrant in (False, True):
        model = build("llama-two-layers", "sdpa").train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        calls.clear()
        with MaxLogits(model) as recorder:
            model(**batch(), labels=batch()["input_ids"]).loss.backward()
        assert len(calls) == 2  # one for each layer
        plain = build("llama-two-layers", "sdpa")
        with torch.no_grad(), MaxLogits(plain) as other:
            plain(**batch())
        assert all(torch.equal(value, other.max_logits()[name]) for name, value in recorder.max_logits().items())


def test_modules_in_eval_mode_are_left_out_on_request() -> None:
    model = build("llama", "sdpa")
    with torch.no_grad(), MaxLogits(model, training_only=True) as recorder:
        model(**batch())
    assert all((value == -torch.inf).all() for value in recorder.max_logits().values())


def test_the_interface_is_as_before_after_the_last_recorder() -> None:
    original = AttentionInterface.get_interface
    model = build("llama")
    with MaxLogits(model):
        with MaxLogits(model):
            assert AttentionInterface.get_interface is not original
        assert AttentionInterface.get_interface is not original
    assert AttentionInterface.get_interface is original
    assert not any(module._forward_hooks for module in model.modules())


def test_only_the_named_modules_are_measured() -> None:
    model = build("llama-two-layers")
    assert set(MaxLogits(model, modules=r"layers\.1").found) == {"model.layers.1.self_attn"}
    with pytest.raises(
        ValueError, match=r"matches no attention module with a query and a key; there are model\.layers\.0"
    ):
        MaxLogits(model, modules=r"layers\.7")


def test_attention_that_computes_itself_raises() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.head_dim = 2, 4
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.q_proj(x) @ self.k_proj(x).transpose(-1, -2)).softmax(-1) @ x

    model = nn.Sequential(Attention())
    with MaxLogits(model) as recorder:
        model(torch.randn(1, 3, 8))
    with pytest.raises(ValueError, match="0 \\(Attention\\) computes its attention itself"):
        recorder.max_logits()


def test_a_model_without_attention_raises() -> None:
    with pytest.raises(ValueError, match="Linear has no attention module with a query and a key"):
        MaxLogits(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="mode='fast' is not one of 'exact', 'bound'"):
        MaxLogits(build("llama"), "fast")  # type: ignore[arg-type]


# --- arguments as FlashAttention and FlexAttention get them, which run on accelerators only ---------------------------


class Module(nn.Module):
    is_causal = True


def qk(batch_size: int = 2, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch_size, 4, length, 8, generator=generator), torch.randn(
        batch_size, 2, length, 8, generator=generator
    )


def one_by_one(query: torch.Tensor, key: torch.Tensor, pieces: list[tuple[int, slice]], **kwargs: int) -> torch.Tensor:
    """The maximum over sequences that each are computed alone, without padding and packing."""
    found = []
    for row, piece in pieces:
        q, k = query[row : row + 1, :, piece], key[row : row + 1, :, piece]
        found.append(max_logit(q, k, 0.5, visible_of("flash_attention_2", Module(), q, k, None, dict(kwargs))))
    return torch.stack(found).amax(0)


@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_with_padding(window: int | None) -> None:
    query, key = qk()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4], mask[1, -5:] = 0, 0
    kwargs = {} if window is None else {"sliding_window": window}
    found = max_logit(query, key, 0.5, visible_of("flash_attention_2", Module(), query, key, mask, dict(kwargs)))
    torch.testing.assert_close(found, one_by_one(query, key, [(0, slice(4, 12)), (1, slice(0, 7))], **kwargs))


@pytest.mark.parametrize("form", ["lengths", "positions"])
def test_flash_attention_with_packed_sequences(form: str) -> None:
    query, key = qk(1)
    starts = torch.tensor([0, 3, 8, 12], dtype=torch.int32)
    kwargs = (
        {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        if form == "lengths"
        else {"position_ids": torch.cat([torch.arange(n) for n in (3, 5, 4)])[None]}
    )
    found = max_logit(query, key, 0.5, visible_of("flash_attention_3", Module(), query, key, None, kwargs))
    torch.testing.assert_close(found, one_by_one(query, key, [(0, slice(0, 3)), (0, slice(3, 8)), (0, slice(8, 12))]))


def test_flash_attention_is_causal_and_in_windows() -> None:
    query, key = qk()
    i, j = torch.arange(12)[:, None], torch.arange(12)[None, :]
    for kwargs, seen in (
        ({}, j <= i),
        ({"is_causal": False}, j < 12),
        ({"sliding_window": 4}, (j <= i) & (i - j <= 3)),
        ({"sliding_window": 4, "is_causal": False}, (i - j).abs() <= 3),
    ):
        logits = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
        found = max_logit(query, key, 0.5, visible_of("flash_attention_2", Module(), query, key, None, dict(kwargs)))
        torch.testing.assert_close(found, logits.masked_fill(~seen, -torch.inf).amax((0, 2, 3)))


def test_flex_attention_is_masked_by_its_function() -> None:
    query, key = qk()
    lengths = torch.tensor([5, 12])
    mask = create_block_mask(
        lambda b, h, i, j: (j <= i) & (j < lengths[b]), B=2, H=None, Q_LEN=12, KV_LEN=12, device="cpu"
    )
    seen = (torch.arange(12)[None, :] <= torch.arange(12)[:, None]) & (torch.arange(12) < lengths[:, None])[
        :, None, None
    ]
    logits = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    found = max_logit(query, key, 0.5, visible_of("flex_attention", Module(), query, key, mask, {}))
    torch.testing.assert_close(found, logits.masked_fill(~seen, -torch.inf).amax((0, 2, 3)))


def test_a_mask_of_an_unknown_form_raises() -> None:
    query, key = qk()
    with pytest.raises(ValueError, match=r"'sdpa' attention got a mask of form \(2, 12, 12\)"):
        visible_of("sdpa", Module(), query, key, torch.ones(2, 12, 12), {})
