"""The models that a step is timed on, and how they are laid over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hf_emopt.tools.forecast.layouts import tensor_parallel_plan

LAYOUTS = ("single", "ddp", "fsdp2", "hsdp", "fsdp2+tp")

MODELS: dict[str, dict[str, Any]] = {
    "llama-1.1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                   "num_key_value_heads": 4},
    "llama-8b-slice": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
                       "num_attention_heads": 32, "num_key_value_heads": 8},
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
"""Llamas by name, with a vocabulary of 32,000 unless they say otherwise; any other name is a configuration's."""


@dataclass(frozen=True)
class Laid:
    """A model on its ranks.

    Attributes:
        model, raw: the module to call, which may be DDP's wrapper, and the one that an optimizer is built of.
        data_ranks: ranks that see different tokens; ranks of one tensor-parallel group see the same.
        autocast: whether the forward pass needs autocast for bfloat16 products.
    """

    model: nn.Module
    raw: nn.Module
    data_ranks: int
    autocast: bool


def check_layout(layout: str, world_size: int, replicas: int, tp_size: int) -> None:
    """Raises ``ValueError`` where a layout does not fit the number of ranks."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout == "single" and world_size > 1:
        raise ValueError(f"layout single is one process, not {world_size}: use ddp or fsdp2")
    if layout == "hsdp" and (replicas < 1 or world_size % replicas or world_size == replicas):
        raise ValueError(
            f"layout hsdp with {replicas} replicas needs a multiple of {replicas} ranks, at least {2 * replicas}, not "
            f"{world_size}"
        )
    if layout == "fsdp2+tp" and (tp_size < 2 or world_size % tp_size):
        raise ValueError(
            f"layout fsdp2+tp needs slices on at least two ranks and a multiple of them: {tp_size} on {world_size} do not fit"
        )


def build_model(name: str, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """A language model with random float32 weights, the same in every process, whole on ``device`` and in training mode.

    ``name`` is a key of :data:`MODELS`, or a source for :func:`~hf_emopt.integrations.models.random_language_model`, which
    also says what is raised.
    """
    from hf_emopt.integrations.models import random_language_model

    torch.manual_seed(0)
    if name not in MODELS:
        return random_language_model(name, device, trust_remote_code)
    return random_language_model({"vocab_size": 32000, "max_position_embeddings": 4096, **MODELS[name]}, device)


def lay_out(model: nn.Module, layout: str, device: torch.device, replicas: int = 2, tp_size: int = 2) -> Laid:
    """The model, whole and with the same weights on every rank, on the ranks of the default process group.

    Raises:
        ValueError: when the layout does not fit the ranks, or the model's plan of tensor parallelism is not known here.
    """
    world = dist.get_world_size()
    check_layout(layout, world, replicas, tp_size)
    if layout == "single" or (layout == "ddp" and world == 1):
        return Laid(model, model, world, True)
    if layout == "ddp":
        ids = None if device.type == "cpu" else [device.index]
        return Laid(DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True), model, world, True)
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "fsdp2": ((world,), ("shard",)),
        "hsdp": ((replicas, world // replicas), ("replicate", "shard")),
        "fsdp2+tp": ((world // tp_size, tp_size), ("shard", "tensor")),
    }
    shape, names = shapes[layout]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    data_ranks = world
    if layout == "fsdp2+tp":
        slice_matrices(model, mesh["tensor"])
        mesh, data_ranks = mesh["shard"], world // tp_size
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    for module in (*max(lists, key=len, default=[]), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return Laid(model, model, data_ranks, False)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
}


def slice_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts matrices over the ranks of a mesh as the model's own plan says; raises as :func:`tensor_parallel_plan`."""
    plan = tensor_parallel_plan(model, _STYLES, "time it under fsdp2, or time a Llama under fsdp2+tp")
    parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in plan.items()})
