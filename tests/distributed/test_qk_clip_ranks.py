"""QK-clip on several ranks: one maximum for all, and weights as in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from zoo import TINY, assert_close, weights

import hf_emopt
from hf_emopt import MaxLogits, qk_clip

GROUPED: dict[str, Any] = {**TINY, "num_hidden_layers": 2}
FAMILIES = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**GROUPED, attention_bias=True)),
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"},
             bos_token_id=1, eos_token_id=2)),
}  # fmt: skip


def fresh(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(dtype)


def tokens() -> Tensor:
    return torch.randint(1, 48, (4, 9), generator=torch.Generator().manual_seed(4))


def own_tokens(layout: str) -> Tensor:
    if not dist.is_initialized() or layout == "tp":
        return tokens()
    each = 4 // dist.get_world_size()
    return tokens()[dist.get_rank() * each : (dist.get_rank() + 1) * each]


def wrap(model: nn.Module, layout: str) -> nn.Module:
    size = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (size,)) if layout == "fsdp2" else init_device_mesh(
        "cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")
    )  # fmt: skip
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def clipped(model: nn.Module, layout: str, optimizer: Any = None) -> dict[str, Any]:
    """One forward pass of this rank's sequences, then a clip of about half the heads."""
    with torch.no_grad(), MaxLogits(model) as recorder:
        model(input_ids=own_tokens(layout))
    logits = recorder.max_logits()
    threshold = float(torch.cat(list(logits.values())).median())
    report = qk_clip(model, logits, threshold, optimizer=optimizer)
    return {"logits": {n: v.clone() for n, v in logits.items()}, "report": report.clipped, "weights": weights(model)}


def sharded(family: str, layout: str, folder: str) -> dict[str, Any]:
    if layout == "tp":
        from transformers.distributed import DistributedConfig

        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    else:
        model = wrap(fresh(family), layout)
    return clipped(model, layout)


@functools.cache
def alone(family: str) -> dict[str, Any]:
    return clipped(fresh(family), "one")


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp", "tp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_one_process(worlds: Worlds, family: str, layout: str, tmp_path: Path) -> None:
    if layout == "tp":
        fresh(family).save_pretrained(tmp_path)
    expected = alone(family)
    for result in worlds[2].run(sharded, family=family, layout=layout, folder=str(tmp_path)):
        assert set(result["logits"]) == set(expected["logits"])
        for name, value in expected["logits"].items():
            torch.testing.assert_close(result["logits"][name], value, rtol=1e-5, atol=1e-5)
        assert [(n, h) for n, h, _ in result["report"]] == [(n, h) for n, h, _ in expected["report"]]
        assert_close(result["weights"], expected["weights"], 1e-5)


def trained(policy: str, wrapped: bool) -> dict[str, Any]:
    """Steps of Muon and clips of bfloat16 weights, from gradients that are the same everywhere."""
    model = fresh("llama", torch.bfloat16)
    whole = DistributedDataParallel(model) if wrapped else model
    optimizer = hf_emopt.Muon(
        model, lr=2e-3, low_precision_weights=policy, transport_dtype="float32", ns_dtype="float32"
    )
    reports = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()
        with torch.no_grad(), MaxLogits(whole) as recorder:
            whole(input_ids=tokens())
        logits = recorder.max_logits()
        threshold = float(torch.cat(list(logits.values())).max()) * 0.995  # a factor that bfloat16 could hardly show
        reports.append(qk_clip(whole, logits, threshold, optimizer=optimizer).clipped_heads)
    return {"weights": weights(model), "reports": reports}


@pytest.mark.parametrize("policy", ["split", "master", "none"])
def test_sixteen_bit_weights_are_equal_on_all_ranks_and_those_of_one_process(worlds: Worlds, policy: str) -> None:
    expected = trained(policy, False)
    assert sum(expected["reports"]) > 0
    for result in worlds[2].run(trained, policy=policy, wrapped=True):
        assert result["reports"] == expected["reports"]
        for name, value in expected["weights"].items():
            assert torch.equal(result["weights"][name], value), name
