"""Tiny models of five families, as transformers (or a hand) shards them: every rule in every exact mode as in one process.

Gradients are given, as everywhere where rules are compared; what transformers makes of a forward pass on several ranks is
not this package's. The models that have no plan for tensor parallelism are cut as a plan would cut them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from zoo import RULES, TINY, TINY_EXPERTS, build, distribute, give_gradients, steps_of, weights

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "llama-one-kv-head": lambda: LlamaForCausalLM(LlamaConfig(**{**TINY, "num_key_value_heads": 1})),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**TINY, tie_word_embeddings=True)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **TINY_EXPERTS)),
    "gpt-oss": lambda: GptOssForCausalLM(GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=32, n_head=4, n_layer=1, n_positions=32, bos_token_id=0, eos_token_id=0)
    ),
}
BY_HAND = {
    # What a column-wise and a row-wise plan cut, in each family's way of storing.
    "gpt2": {r"c_attn\.weight|c_fc\.weight": 1, r"c_proj\.weight": 0},
    "gpt-oss": {r"[qkv]_proj\.weight": 0, r"o_proj\.weight": 1, r"gate_up_proj$": 2, r"experts\.down_proj$": 1},
}
MODES = {"muon": ("layerwise", "duplicated", "distributed", "auto"), "normuon": ("duplicated", "distributed")}

# Two steps of 32 x 128 leave 64 directions of the longer side empty. Their eigenvalues are rounding, 1e-8 of the largest and
# far above the default epsilon of 1e-12, so the root weighs them by it: where eigh runs in two threads and in one, weights
# differ by 0.6 of the largest. With this ridge gradients changed by 1e-7 change weights by 3e-6 at most, and that in float32.
CONDITIONED = {rule: {"relative_epsilon": 1e-2} for rule in RULES if "shampoo" in rule}


def fresh(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():  # some start at zero, of which a relative difference says nothing
            parameter.add_(torch.randint(-8, 9, parameter.shape).float() / 64)
    return model


def sharded(family: str, folder: str, sizes: dict[str, int]) -> nn.Module:
    """The model on this rank."""
    from transformers.distributed import DistributedConfig

    if family not in BY_HAND or "tp_size" not in sizes:
        return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    model = fresh(family)
    tp, fsdp = sizes["tp_size"], sizes.get("fsdp_size", 1)
    names = ("fsdp", "tp") if fsdp > 1 else ("tp",)
    mesh = init_device_mesh("cpu", (fsdp, tp) if fsdp > 1 else (tp,), mesh_dim_names=names)

    def placements(name: str) -> list[Any] | None:
        dim = next((d for pattern, d in BY_HAND[family].items() if re.search(pattern, name)), None)
        if fsdp == 1:
            return None if dim is None else [Shard(dim)]
        rows: Any = _StridedShard(0, split_factor=tp) if dim == 0 else Shard(0)
        return [rows, Replicate() if dim is None else Shard(dim)]

    distribute(model, mesh, placements)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def stepped(model: nn.Module, rule: str, **options: Any) -> dict[str, Any]:
    """Some steps from the model's weights, which are put back; every gradient is given."""
    before = [(p, p.detach().clone()) for p in model.parameters()]
    optimizer = build(model, rule, **CONDITIONED.get(rule, {}), **options)
    for step in range(steps_of(rule)):
        give_gradients(model, step)
        optimizer.step()
    modes = {choice.mode for choice in optimizer._choices}
    found = {"weights": weights(model), "transforms": optimizer.transform_count, "modes": modes}
    with torch.no_grad():
        for parameter, value in before:
            parameter.copy_(value)
            parameter.grad = None
    return found


def everything(family: str, folder: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Every rule in every mode that it has, but blockwise."""
    model = sharded(family, folder, sizes)
    found = {
        (rule, mode): stepped(model, rule, tensor_parallel=mode)
        for rule in RULES
        for mode in MODES.get(rule, ("auto",))
    }
    placements = {tuple(map(str, p.placements)) for p in model.parameters() if isinstance(p, DTensor)}
    return {"found": found, "placements": placements}


@functools.cache
def alone(family: str, rule: str) -> dict[str, Any]:
    """In as many threads as a rank has. SOAP has no ridge, and float64 is no help: which basis it takes of directions that no
    gradient has reached yet is a matter of the last bit, so that 1e-14 of a gradient is worth 0.1 of a weight."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return stepped(fresh(family), rule)
    finally:
        torch.set_num_threads(threads)


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    assert set(found) == set(wanted)
    return {
        name: float((found[name].double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in wanted.items()
    }


EXTRA = pytest.mark.second_tier
CASES = [
    pytest.param("llama", {"tp_size": 2}, id="llama-tp2"),
    pytest.param("llama-one-kv-head", {"tp_size": 2}, id="llama-one-kv-head-tp2"),
    pytest.param("gemma3", {"tp_size": 2}, id="gemma3-tp2"),
    pytest.param("qwen3-moe", {"tp_size": 2}, id="qwen3-moe-tp2"),
    pytest.param("gpt-oss", {"tp_size": 2}, id="gpt-oss-tp2"),
    pytest.param("gpt2", {"tp_size": 2}, id="gpt2-tp2"),
    pytest.param("llama", {"tp_size": 4}, id="llama-tp4", marks=EXTRA),
    pytest.param("llama-one-kv-head", {"tp_size": 4}, id="llama-one-kv-head-tp4", marks=EXTRA),
    pytest.param("gemma3", {"tp_size": 4}, id="gemma3-tp4", marks=EXTRA),
    pytest.param("qwen3-moe", {"tp_size": 4}, id="qwen3-moe-tp4", marks=EXTRA),
    pytest.param("gpt-oss", {"tp_size": 4}, id="gpt-oss-tp4", marks=EXTRA),
    pytest.param("gpt2", {"tp_size": 4}, id="gpt2-tp4", marks=EXTRA),
    pytest.param("llama", {"tp_size": 2, "fsdp_size": 2}, id="llama-fsdp2-tp2", marks=EXTRA),
    pytest.param("gemma3", {"tp_size": 2, "fsdp_size": 2}, id="gemma3-fsdp2-tp2", marks=EXTRA),
    pytest.param("qwen3-moe", {"tp_size": 2, "fsdp_size": 2}, id="qwen3-moe-fsdp2-tp2", marks=EXTRA),
    pytest.param("gpt-oss", {"tp_size": 2, "fsdp_size": 2}, id="gpt-oss-fsdp2-tp2", marks=EXTRA),
    pytest.param("gpt2", {"tp_size": 2, "fsdp_size": 2}, id="gpt2-fsdp2-tp2", marks=EXTRA),
    pytest.param("llama", {"fsdp_size": 2, "dp_replicate_size": 2}, id="llama-hsdp", marks=EXTRA),
    pytest.param("qwen3-moe", {"fsdp_size": 2, "dp_replicate_size": 2}, id="qwen3-moe-hsdp", marks=EXTRA),
    pytest.param("gemma3", {"fsdp_size": 2, "dp_replicate_size": 2}, id="gemma3-hsdp", marks=EXTRA),
    pytest.param("gpt-oss", {"fsdp_size": 2, "dp_replicate_size": 2}, id="gpt-oss-hsdp", marks=EXTRA),
    pytest.param("gpt2", {"fsdp_size": 2, "dp_replicate_size": 2}, id="gpt2-hsdp", marks=EXTRA),
    pytest.param("qwen3-moe", {"fsdp_size": 4, "ep_size": 2}, id="qwen3-moe-fsdp2-ep2", marks=EXTRA),
    pytest.param("gpt-oss", {"fsdp_size": 4, "ep_size": 2}, id="gpt-oss-fsdp2-ep2", marks=EXTRA),
]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_weights_are_those_of_one_process(worlds: Worlds, tmp_path: Path, family: str, sizes: dict[str, int]) -> None:
    fresh(family).save_pretrained(tmp_path)  # type: ignore[operator]
    size = sizes.get("tp_size", 1) * sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    results = worlds[size].run(everything, family=family, folder=str(tmp_path), sizes=sizes)
    assert all(result["placements"] for result in results)
    bad = {}
    for key in results[0]["found"]:
        wanted = alone(family, key[0])
        for rank, result in enumerate(results):
            found = errors(result["found"][key]["weights"], wanted["weights"])
            bad |= {(*key, rank, name): error for name, error in found.items() if not error <= 1e-5}
            if "tp_size" in sizes and key[1] in ("duplicated", "distributed"):
                assert key[1] in result["found"][key]["modes"]
        assert sum(result["found"][key]["transforms"] for result in results) == wanted["transforms"]
    assert not bad
