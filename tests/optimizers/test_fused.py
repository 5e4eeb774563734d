"""A fused, transposed or stacked weight steps as the separate matrices inside it would."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_emopt

LR = 0.1


def tiny(name: str, **kwargs) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**kwargs)
    architecture = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, architecture)(config)


COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 24,
}


def stepped(model: nn.Module, name: str, gradient: Tensor, cls=hf_emopt.Muon, **kwargs) -> Tensor:
    """The change of one parameter in one step."""
    optimizer = cls(model, lr=LR, weight_decay=0.0, **kwargs)
    parameter = dict(model.named_parameters())[name]
    before = parameter.detach().clone()
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach() - before


def separately(matrices: list[Tensor], cls=hf_emopt.Muon) -> list[Tensor]:
    """The changes of matrices (out, in) with these gradients, each on its own."""
    params = [nn.Parameter(torch.zeros_like(m)) for m in matrices]
    optimizer = cls([{"params": params, "kind": "matrix"}], lr=LR, weight_decay=0.0)
    for p, g in zip(params, matrices):
        p.grad = g.contiguous()
    optimizer.step()
    return [p.detach() for p in params]


def gradient(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cls", [hf_emopt.Muon, hf_emopt.NorMuon])
def test_gpt2_qkv_is_three_transposed_matrices(cls) -> None:
    """c_attn is stored (in, 3 in): split along dim 1, and rows of the update are its columns."""
    model = tiny("GPT2", vocab_size=32, n_embd=16, n_layer=1, n_head=4)
    g = gradient(16, 48)
    g[:, 32:] *= 30  # a value gradient that would drown the others in one orthogonalization
    moved = stepped(model, "transformer.h.0.attn.c_attn.weight", g, cls)
    parts = separately([g[:, i : i + 16].T for i in (0, 16, 32)], cls)
    torch.testing.assert_close(moved, torch.cat([p.T for p in parts], dim=1), rtol=1e-4, atol=1e-5)
    norms = [moved[:, i : i + 16].norm() for i in (0, 16, 32)]
    assert max(norms) < 1.2 * min(norms)


def test_gpt2_mlp_scale_is_that_of_the_linear_map() -> None:
    """c_fc maps 16 to 64 and is stored (16, 64): "original" scales it by 2, the stored shape would say 1."""
    model = tiny("GPT2", vocab_size=32, n_embd=16, n_layer=1, n_head=4)
    moved = stepped(model, "transformer.h.0.mlp.c_fc.weight", gradient(16, 64), adjust_lr_fn="original")
    assert torch.linalg.matrix_norm(moved, ord=2) / LR == pytest.approx(2.0, rel=0.3)


def test_phi3_projections_are_their_parts() -> None:
    model = tiny("Phi3", **COMMON, num_key_value_heads=2, pad_token_id=0)
    g = gradient(16 + 8 + 8, 16)
    g[24:] *= 30
    moved = stepped(model, "model.layers.0.self_attn.qkv_proj.weight", g)
    torch.testing.assert_close(moved, torch.cat(separately([g[:16], g[16:24], g[24:]])), rtol=1e-4, atol=1e-5)
    g = gradient(48, 16)
    moved = stepped(model, "model.layers.0.mlp.gate_up_proj.weight", g)
    torch.testing.assert_close(moved, torch.cat(separately([g[:24], g[24:]])), rtol=1e-4, atol=1e-5)


def test_gpt_neox_interleaves_by_head() -> None:
    model = tiny("GPTNeoX", **COMMON)
    g = gradient(48, 16)
    by_head = g.view(4, 3, 4, 16)
    parts = separately([by_head[:, i].reshape(16, 16) for i in range(3)])
    wanted = torch.stack([p.view(4, 4, 16) for p in parts], dim=1).reshape(48, 16)
    moved = stepped(model, "gpt_neox.layers.0.attention.query_key_value.weight", g)
    torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ns_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("coefficients", ["jordan", "polar_express", "aol"])
def test_mixtral_experts_are_a_batch_under_every_orthogonalization(ns_dtype: str, coefficients: str) -> None:
    model = tiny("Mixtral", **COMMON, num_key_value_heads=2, num_local_experts=3)
    g = gradient(3, 48, 16)
    options = {"ns_dtype": ns_dtype, "ns_coefficients": coefficients}
    moved = stepped(model, "model.layers.0.mlp.experts.gate_up_proj", g, **options)
    for expert in range(3):
        for half in (slice(0, 24), slice(24, 48)):
            alone = nn.Parameter(torch.zeros(24, 16))
            alone.grad = g[expert, half].clone()
            hf_emopt.Muon([alone], lr=LR, weight_decay=0.0, **options).step()
            tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[ns_dtype]
            assert (moved[expert, half] - alone).norm() <= tolerance * alone.norm()


def test_gpt_oss_experts_are_transposed_and_interleaved() -> None:
    model = tiny("GptOss", **COMMON, num_key_value_heads=2, num_local_experts=3, head_dim=4)
    g = gradient(3, 16, 48)
    moved = stepped(model, "model.layers.0.mlp.experts.gate_up_proj", g)
    gate = separately([g[e, :, 0::2].T for e in range(3)])
    up = separately([g[e, :, 1::2].T for e in range(3)])
    for e in range(3):
        torch.testing.assert_close(moved[e, :, 0::2], gate[e].T, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(moved[e, :, 1::2], up[e].T, rtol=1e-4, atol=1e-5)


def test_per_head_is_a_loop_over_heads() -> None:
    model = tiny("Llama", **COMMON, num_key_value_heads=2)
    g = gradient(16, 16)
    moved = stepped(model, "model.layers.0.self_attn.q_proj.weight", g, per_head=True)
    torch.testing.assert_close(moved, torch.cat(separately(list(g.split(4)))), rtol=1e-4, atol=1e-5)
    g = gradient(8, 16)
    moved = stepped(model, "model.layers.0.self_attn.k_proj.weight", g, per_head=True)
    torch.testing.assert_close(moved, torch.cat(separately(list(g.split(4)))), rtol=1e-4, atol=1e-5)
    g = gradient(16, 16)
    whole = stepped(model, "model.layers.0.self_attn.o_proj.weight", g, per_head=True)
    torch.testing.assert_close(whole, separately([g])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_tied_weights_step_once_in_either_order(order: tuple[str, str]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first, second = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
            second.weight = first.weight
            modules = {"a": first, "b": second}
            for name in order:
                self.add_module(name, modules[name])
            self.inner = nn.Linear(6, 6)

    model = Tied()
    optimizer = hf_emopt.Muon(model, lr=LR, weight_decay=0.0)
    tied = model.a.weight
    assert sum(p is tied for g in optimizer.param_groups for p in g["params"]) == 1
    assert next(g for g in optimizer.param_groups if any(p is tied for p in g["params"]))["kind"] == "aux"
    before, tied.grad = tied.detach().clone(), torch.ones_like(tied)
    optimizer.step()
    torch.testing.assert_close(before - tied.detach(), torch.full_like(tied, LR))  # one AdamW step of the sign
    assert list(optimizer.state) == [tied]
