"""Models, layouts and a training loop whose gradients are the same numbers on any number of processes.

A sample's gradient of a weight is a tensor of small integers over a power of two, so that sums over samples and ranks are
exact in any order, and a difference between layouts is the optimizer's. (An eigenbasis needs it: a matrix that is not
square has a singular factor, and rounding alone turns the basis of its null space by any angle.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, MixtralConfig, Phi3Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.phi3.modeling_phi3 import Phi3Attention

import hf_emopt
from hf_emopt.optimizers.base import MatrixOptimizer

SAMPLES = 12
"""Samples of a global batch: shared evenly by 1, 2, 3 or 4 ranks."""

Optimizer = tuple[type[MatrixOptimizer], dict[str, Any]]

_KRONECKER = {"precondition_frequency": 2, "weight_decay": 0.1, "lr": 0.02}
RULES: dict[str, Optimizer] = {
    "muon": (hf_emopt.Muon, {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "float32"}),
    "normuon": (hf_emopt.NorMuon, {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "float32"}),
    "soap": (hf_emopt.SOAP, {**_KRONECKER, "refresh": "synchronous"}),
    "soap-staggered": (hf_emopt.SOAP, {**_KRONECKER, "refresh": "staggered"}),
    "shampoo": (hf_emopt.Shampoo, {**_KRONECKER, "refresh": "synchronous"}),
    "shampoo-staggered": (hf_emopt.Shampoo, {**_KRONECKER, "refresh": "staggered"}),
    "klshampoo": (hf_emopt.KLShampoo, {**_KRONECKER, "refresh": "synchronous"}),
    "klshampoo-staggered": (hf_emopt.KLShampoo, {**_KRONECKER, "refresh": "staggered"}),
}


TINY: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
"""Configuration of language models that transformers can shard while it loads them."""

TINY_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


class Block(nn.Module):
    """Modules as a model would hold them; the loss is linear in their weights, with prescribed coefficients."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        terms = [
            (parameter.double() * coefficients[name].double()).sum()
            for name, parameter in self.named_parameters()
            if name in coefficients
        ]
        return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, requires_grad=True)


class Zoo(nn.Module):
    """Blocks by name; each is sharded on its own."""

    def __init__(self, **blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, coefficients: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for name, block in self.blocks.items():
            prefix = f"blocks.{name}."
            parts.append(block({k.removeprefix(prefix): v for k, v in coefficients.items() if k.startswith(prefix)}))
        return torch.stack(parts).sum()


def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(columns, rows, bias=bias)


def zoo(dtype: torch.dtype = torch.float32) -> Zoo:
    """Every storage form: odd shapes, fewer rows than ranks, equal shapes, fused, transposed, stacked, and no matrix."""
    torch.manual_seed(0)
    gpt2 = GPT2Config(n_embd=12, n_head=2, n_layer=1)
    mixtral = MixtralConfig(hidden_size=10, intermediate_size=6, num_local_experts=5)
    # 28 rows: q 20, k 4, v 4, so that no cut is where a shard of 2, 3 or 4 ranks ends.
    phi3 = Phi3Config(
        hidden_size=20, num_attention_heads=5, num_key_value_heads=1, intermediate_size=8, num_hidden_layers=1,
        pad_token_id=0,
    )  # fmt: skip
    model = Zoo(
        linears=Block(a=linear(33, 17), b=linear(33, 17, bias=True), c=linear(7, 40), d=linear(40, 7)),
        square=Block(a=linear(64, 64), b=linear(64, 64), c=linear(64, 64)),
        short=Block(**{f"rows{n}": linear(n, 9, bias=True) for n in (1, 2, 3, 4, 5, 13)}),
        gpt2=Block(attn=GPT2Attention(gpt2, layer_idx=0), norm=nn.LayerNorm(12)),
        phi3=Block(attn=Phi3Attention(phi3, layer_idx=0)),
        moe=Block(experts=MixtralExperts(mixtral), embedding=nn.Embedding(11, 6)),
    ).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # bare parameters of experts are not initialized by their module
            parameter.normal_(std=0.25)
    return model


def matrices(shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.float32) -> Zoo:
    """A block of plain matrices and nothing else."""
    torch.manual_seed(0)
    return Zoo(only=Block(**{f"m{i}": linear(*shape) for i, shape in enumerate(shapes)})).to(dtype)


def shard(model: nn.Module, mesh: Any = None) -> nn.Module:
    """``fully_shard`` on every block, then on what is left."""
    blocks: Iterable[nn.Module] = model.blocks.values() if isinstance(model, Zoo) else ()
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def distribute(model: nn.Module, mesh: Any, placements: Callable[[str], Sequence[Any] | None]) -> nn.Module:
    """Parameters become DTensors, where ``placements`` has some for their name; no bytes are sent."""
    for name, parameter in list(model.named_parameters()):
        where = placements(name)
        if where is not None:
            owner, _, leaf = name.rpartition(".")
            value = distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value))
    return model


def wrap(model: nn.Module, layout: str) -> nn.Module:
    """``"ddp"``, ``"fsdp2"``, or ``"hsdp"`` with at least two replicas where the world has them; ``"hsdp1"`` with one."""
    size = dist.get_world_size()
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "fsdp2":
        return shard(model, init_device_mesh("cpu", (size,)))
    replicas = {"hsdp": 2 if size == 4 else size, "hsdp1": 1}[layout]
    mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
    return shard(model, mesh)


def bare(name: str) -> str:
    return name.removeprefix("module.")


def coefficients(model: nn.Module, step: int, samples: range, scale: float) -> dict[str, Tensor]:
    """The sum over samples of their gradients, times ``scale``, by name and in the parameters' global shapes."""
    sums = {}
    for name, parameter in model.named_parameters():
        generator = torch.Generator()
        total = torch.zeros(parameter.shape)
        for sample in samples:
            generator.manual_seed(zlib.crc32(f"{bare(name)} {step} {sample}".encode()))
            total += torch.randint(-2, 3, tuple(parameter.shape), generator=generator).float()
        sums[bare(name)] = total * scale
    return sums


def own_samples() -> range:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    each = SAMPLES // size
    return range(rank * each, (rank + 1) * each)


def backward(
    model: nn.Module, step: int, samples: range | None = None, without: Callable[[str], bool] = lambda name: False
) -> None:
    """Adds to ``.grad`` the global batch's gradient, each rank from its own samples (wrappers average over ranks)."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    wanted = coefficients(model, step, own_samples() if samples is None else samples, size / 32)
    model({name: value for name, value in wanted.items() if not without(name)}).backward()


def give_gradients(model: nn.Module, step: int, placements: Sequence[Any] | None = None) -> None:
    """Sets every gradient to the global batch's, laid out as its parameter or, of DTensors, as ``placements`` says."""
    wanted = coefficients(model, step, range(SAMPLES), 1 / 32)
    for name, parameter in model.named_parameters():
        grad = wanted[name].to(parameter.dtype)
        if isinstance(parameter, DTensor):
            where = parameter.placements if placements is None else placements
            grad = distribute_tensor(grad, parameter.device_mesh, where, src_data_rank=None)
        parameter.grad = grad


def build(model: nn.Module, rule: str | Optimizer, **options: Any) -> MatrixOptimizer:
    cls, defaults = RULES[rule] if isinstance(rule, str) else rule
    return cls(model, **{"transport_dtype": "float32", **defaults, **options})


def train(model: nn.Module, optimizer: MatrixOptimizer, steps: int | range) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor; collective where it is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {bare(name): full(parameter) for name, parameter in model.named_parameters()}


def steps_of(rule: str) -> int:
    """Three, and two more where a refreshed basis or root is only used from the third on."""
    return 3 if "muon" in rule else 5


def single(rule: str, steps: int, make: Callable[..., Zoo] = zoo, options: Any = (), **model: Any) -> dict[str, Tensor]:
    """Weights after training in one process."""
    assert not dist.is_initialized()
    reference = make(**model)
    train(reference, build(reference, rule, **dict(options)), steps)
    return weights(reference)


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], limit: float) -> None:
    """Largest difference over largest value, weight by weight."""
    assert set(found) == set(wanted)
    errors = {
        name: float((found[name].double() - value.double()).abs().max() / value.double().abs().max())
        for name, value in wanted.items()
    }
    bad = {name: error for name, error in errors.items() if not error <= limit}
    assert not bad, f"relative differences above {limit:g}: {bad}"


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
