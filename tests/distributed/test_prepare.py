"""Models and optimizers as Accelerate, FSDP and compilers leave them: parameters replaced, renamed, flattened."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsdp_on_cpu
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from harness import World, Worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import RULES, Optimizer, assert_close, backward, build, full, shard, single, train, weights, wrap, zoo

import hf_emopt
from hf_emopt.distributed.layout import UnsupportedLayoutError

VOCABULARY = 32


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens(step: int) -> Tensor:
    """The global batch of a step: four sequences."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, VOCABULARY, (4, 12), generator=generator)


def own(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


MUON: Optimizer = (hf_emopt.Muon, {**RULES["muon"][1], "aux_lr": 1e-3})


@contextmanager
def accelerate_on_cpu(fsdp: bool) -> Iterator[None]:
    """Lets Accelerate use FSDP on CPU ranks; leaves nothing behind for the next case."""
    before, init = dict(os.environ), PartialState.__init__
    if fsdp:
        fsdp_on_cpu.enable()
    try:
        yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState.__init__ = init  # type: ignore[method-assign]
        os.environ.clear()
        os.environ.update(before)
        gc.collect()


def fsdp2(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )


def canonical(name: str) -> str:
    wrappers = {"module", "_orig_mod", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in wrappers)


def routes_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {name: group["kind"] for group in optimizer.param_groups for name in group["param_names"]}


def run_llama(model: nn.Module, optimizer: Any, accelerator: Accelerator | None, clip: float | None) -> dict[str, Any]:
    """Three steps; returns weights, gradient norms and whether the optimizer's parameters are the model's."""
    norms = []
    for step in range(3):
        batch = own(tokens(step))
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss) if accelerator else loss.backward()
        if clip is not None:
            clip_function = accelerator.clip_grad_norm_ if accelerator else nn.utils.clip_grad_norm_
            norms.append(float(full(clip_function(model.parameters(), clip))))
        optimizer.step()
        optimizer.zero_grad()
    inner = optimizer.optimizer if accelerator else optimizer
    inner.synchronize()
    held = {id(p) for group in inner.param_groups for p in group["params"]}
    return {
        "weights": {canonical(name): full(parameter) for name, parameter in model.named_parameters()},
        "norms": norms,
        "known": all(id(p) in held for p in model.parameters()),
        "transforms": inner.transform_count,
    }


def prepared(kind: str, clip: float | None = None) -> dict[str, Any]:
    """The optimizer is made before Accelerate replaces, wraps and renames what it was made from."""
    with accelerate_on_cpu(fsdp=kind != "ddp"):
        model = llama(tied=kind == "tied")
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.note = "lost when the parameter is replaced"  # type: ignore[attr-defined]
        plugin = {
            "ddp": lambda: None,
            "activation_checkpointing": lambda: fsdp2(activation_checkpointing=True),
            "cpu_ram_efficient_loading": lambda: fsdp2(cpu_ram_efficient_loading=True),
        }.get(kind, fsdp2)()
        options: dict[str, Any] = {"dynamo_backend": "eager"} if kind == "compile" else {}
        if kind == "gradient_checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = build(model, MUON)
        routes = routes_of(optimizer)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
        model, wrapped = accelerator.prepare(model, optimizer)
        result = run_llama(model, wrapped, accelerator, clip)
        result["same_routes"] = routes_of(wrapped.optimizer) == routes
        result["lost"] = all(not hasattr(parameter, "note") for parameter in model.parameters())
        result["moved"] = {n: not torch.equal(result["weights"][n], value) for n, value in before.items()}
    return result


@pytest.mark.parametrize(
    "kind",
    [
        "ddp", "plain", "tied", "compile", "gradient_checkpointing", "activation_checkpointing",
        "cpu_ram_efficient_loading",
    ],
)  # fmt: skip
def test_accelerate_prepare(two: World, kind: str) -> None:
    """Every parameter keeps its route, is stepped, and gets the weights of one process."""
    model = llama(tied=kind == "tied")
    wanted = run_llama(model, build(model, MUON), None, None)
    results = two.run(prepared, kind=kind)
    for result in results:
        assert result["same_routes"]
        assert result["known"]
        assert result["lost"] is (kind != "ddp")
        assert all(result["moved"].values()), result["moved"]
        assert_close(result["weights"], wanted["weights"], 1e-5)
    assert sum(result["transforms"] for result in results) == 7 * 2 * 3


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_clipping_and_gradient_norm_are_those_of_one_process(two: World, kind: str) -> None:
    model = llama()
    wanted = run_llama(model, build(model, MUON), None, 0.5)
    assert min(wanted["norms"]) > 0.5
    for result in two.run(prepared, kind=kind, clip=0.5):
        assert result["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        assert_close(result["weights"], wanted["weights"], 1e-5)


def fsdp1() -> dict[str, Any]:
    """What FSDP1 needs to run on CPUs."""
    return {"device_id": torch.device("cpu")}


def flattened_after() -> None:
    """FSDP1 keeps the Parameters and leaves flat parts of them inside, none of which is a matrix any more."""
    model = zoo()
    optimizer = build(model, "muon")
    flat = FullyShardedDataParallel(model, use_orig_params=True, **fsdp1())
    assert all(parameter.ndim == 1 for parameter in flat.parameters())
    for parameter in flat.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(UnsupportedLayoutError, match="FSDP2"):
        optimizer.step()


def flattened_before(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(zoo(), use_orig_params=use_orig_params, **fsdp1())
    with pytest.raises(ValueError, match="FSDP2"):
        build(model, "muon")


def test_fsdp1_is_refused_by_name(two: World) -> None:
    two.run(flattened_after)
    two.run(flattened_before, use_orig_params=True)
    two.run(flattened_before, use_orig_params=False)


def replaced_in_groups() -> dict[str, Tensor]:
    """``fully_shard`` after the optimizer was made; groups are then pointed at the new parameters, as Accelerate does."""
    model = zoo()
    optimizer = build(model, "muon")
    positions = {id(parameter): name for name, parameter in model.named_parameters()}
    shard(model)
    new = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[positions[id(parameter)]] for parameter in group["params"]]
    train(model, optimizer, 3)
    return weights(model)


def test_parameters_replaced_after_the_optimizer_was_made(two: World) -> None:
    for found in two.run(replaced_in_groups):
        assert_close(found, single("muon", 3), 1e-5)


def replaced_between_steps() -> dict[str, Tensor]:
    """The plan follows parameters that are replaced between two steps, though nothing says so."""
    model = zoo()
    optimizer = build(model, "muon")
    shard(model)
    names = [list(group["param_names"]) for group in optimizer.param_groups]
    for step in range(3):
        for group, group_names in zip(optimizer.param_groups, names):
            current = dict(model.named_parameters())
            group["params"] = [current[name] for name in group_names]
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_plans_follow_the_parameters(two: World) -> None:
    for found in two.run(replaced_between_steps):
        assert_close(found, single("muon", 3), 1e-5)


def resumed(rule: str, layout: str, dtype: torch.dtype) -> None:
    """Save, load into a new optimizer, and go on: bit by bit what the first one does, with state in its own dtypes."""
    model = wrap(zoo(dtype), layout)
    optimizer = build(model, rule)
    train(model, optimizer, 3)
    saved_weights = copy.deepcopy(model.state_dict())
    if layout == "ddp":
        optimizer.consolidate_state_dict(to=0)
        region = [optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(region, src=0)
        state = region[0]
    else:
        state = copy.deepcopy(optimizer.state_dict())
    kinds = dtypes(optimizer)
    train(model, optimizer, range(3, 6))
    wanted = weights(model)

    torch.manual_seed(1)
    again = wrap(zoo(dtype), layout)
    again.load_state_dict(saved_weights)
    other = build(again, rule)
    other.load_state_dict(state)
    train(again, other, range(3, 6))
    assert dtypes(other) == kinds
    for name, value in weights(again).items():
        assert torch.equal(value, wanted[name]), name


def dtypes(optimizer: torch.optim.Optimizer) -> dict[str, torch.dtype]:
    names = {id(p): name for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"])}
    return {
        f"{names[id(parameter)]}/{key}": value.dtype
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("muon", "float32"), ("muon", "bfloat16"), ("normuon", "bfloat16"), ("soap", "bfloat16"),
        ("shampoo-staggered", "bfloat16"),
    ],
)  # fmt: skip
def test_resuming_is_exact(two: World, rule: str, layout: str, dtype: str) -> None:
    two.run(resumed, rule=rule, layout=layout, dtype=getattr(torch, dtype))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize("rule", ["normuon", "soap"])
def test_resuming_is_exact_where_a_rank_has_several_parts_of_a_stack(worlds: Worlds, rule: str, layout: str) -> None:
    """Five experts on three ranks."""
    worlds[3].run(resumed, rule=rule, layout=layout, dtype=torch.float32)


def offloaded() -> dict[str, Tensor]:
    """Shards kept on the host; pinned memory, which needs a GPU, apart."""
    model = zoo()
    policy = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks.values():
        fully_shard(block, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    train(model, build(model, "normuon"), 3)
    return weights(model)


def test_offloaded_shards(two: World) -> None:
    for found in two.run(offloaded):
        assert_close(found, single("normuon", 3), 1e-5)


def sharded_inside_a_larger_mesh(rule: str, flat: bool) -> dict[str, Any]:
    """Four ranks as (dp, cp). Sharded over both as one dimension, or over cp alone, with dp as independent copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = shard(zoo(), mesh._flatten("dp_cp") if flat else mesh["cp"])
    optimizer = build(model, rule)
    for step in range(3):
        # Every rank of a dp row sees what its cp shard sees; the row's two ranks share the batch.
        size, rank = (4, dist.get_rank()) if flat else (2, mesh.get_local_rank("cp"))
        each = 12 // size
        backward(model, step, range(rank * each, (rank + 1) * each))
        if not flat:  # backward() scales by the world, FSDP2 averages over its two ranks
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return {"weights": weights(model), "transforms": optimizer.transform_count}


@pytest.mark.parametrize("rule", ["muon", "normuon"])
@pytest.mark.parametrize("flat", [True, False])
def test_owners_are_those_that_the_placement_names(worlds: Worlds, rule: str, flat: bool) -> None:
    """Never a guess from the number of mesh dimensions."""
    results = worlds[4].run(sharded_inside_a_larger_mesh, rule=rule, flat=flat)
    wanted = single(rule, 3)
    for result in results:
        assert_close(result["weights"], wanted, 1e-5)
    assert sum(result["transforms"] for result in results) == 35 * 3 * (1 if flat else 2)


def different_models(layout: str) -> None:
    """One rank has frozen a layer that the other trains."""
    model = zoo()
    if dist.get_rank() == 1:
        model.blocks["square"].b.weight.requires_grad_(False)
    wrapped = shard(model) if layout == "fsdp2" else model
    optimizer = build(wrapped, "muon")
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match="rank"):
        optimizer.step()


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_ranks_that_train_different_parameters_are_told(two: World, layout: str) -> None:
    two.run(different_models, layout=layout)


def not_replicas(kind: str) -> None:
    """Models that nobody keeps equal: seeds differ by rank, and nothing broadcasts."""
    model, size = zoo(), dist.get_world_size()
    weight = model.blocks["square"].a.weight
    with torch.no_grad():
        if kind == "of one norm":
            weight.copy_(weight.roll(dist.get_rank(), dims=0))
        else:
            weight.add_(dist.get_rank() // 2 if kind == "hsdp" else dist.get_rank())
    if kind == "hsdp":  # alike within a replica
        shard(model, init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "dtensor":
        mesh = init_device_mesh("cpu", (size,))
        as_it_is = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
        model.blocks["square"].a.weight = nn.Parameter(as_it_is)
    optimizer = build(model, "muon")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=r"square\.a\.weight"):
        optimizer.step()


@pytest.mark.parametrize(("kind", "size"), [("plain", 2), ("of one norm", 2), ("dtensor", 2), ("hsdp", 4)])
def test_weights_that_are_not_replicas_are_refused(worlds: Worlds, kind: str, size: int) -> None:
    worlds[size].run(not_replicas, kind=kind)


def alone() -> dict[str, Tensor]:
    """Two independent trainings in one job."""
    model = zoo()
    optimizer = build(model, "muon", process_group="self", lr=0.02 * (1 + dist.get_rank()))
    for step in range(3):
        backward(model, step, range(12))
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_each_process_on_its_own(two: World) -> None:
    results = two.run(alone)
    for rank, found in enumerate(results):
        assert_close(found, single("muon", 3, options=(("lr", 0.02 * (1 + rank)),)), 1e-5)


def partial_sums() -> None:
    mesh = init_device_mesh("cpu", (2,))
    optimizer = hf_emopt.Muon(
        [("layer.weight", nn.Parameter(DTensor.from_local(torch.randn(8, 3), mesh, [Partial()])))]
    )
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(UnsupportedLayoutError, match=r"layer\.weight is a DTensor with placements \(Partial"):
        optimizer.step()


def test_unsupported_placements_are_refused_by_name(two: World) -> None:
    two.run(partial_sums)
