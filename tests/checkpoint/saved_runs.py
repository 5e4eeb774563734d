"""A run that saves and goes on, and one that begins where it saved: what every rank of them does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from zoo import RULES, backward, build, weights, wrap, zoo

from hf_emopt.optimizers.base import MatrixOptimizer

STEPS = 5
DEAD = ("blocks.linears.d.weight", "blocks.short.rows3.bias")
FROZEN = ("blocks.square.b.weight", "blocks.gpt2.norm.weight")
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
RULE_NAMES = tuple(RULES)


def digest(tensors: dict[str, Tensor]) -> str:
    """A hash of names and values."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def make(
    rule: str, layout: str, dtype: str = "float32", frozen: bool = True, **options: Any
) -> tuple[nn.Module, MatrixOptimizer]:
    """A model in its layout (``"single"``: as it is) and its optimizer; two parameters are frozen."""
    kind = getattr(torch, dtype)
    model: nn.Module = zoo(kind)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in FROZEN)
    if layout == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif layout != "single":
        model = wrap(model, layout)
    if dtype == "float64":
        options = {"transport_dtype": "float64", **options}
        if "muon" in rule:
            options["ns_dtype"] = "float64"
    return model, build(model, rule, **options)


def train(model: nn.Module, optimizer: MatrixOptimizer, steps: range) -> None:
    """Steps whose gradients stay on until the next; two parameters never have one."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, without=lambda name: name in (*DEAD, *FROZEN))
        optimizer.step()
    optimizer.synchronize()


def save(model: nn.Module, optimizer: MatrixOptimizer, folder: Path, how: str) -> None:
    """Weights and state into a folder.

    Args:
        how: ``"file"``: a whole ``state_dict()``; ``"full"``: torch's FULL state dict by name; ``"sharded"``: a folder of
            ``torch.distributed.checkpoint``; ``"flat"``: the same with flattened keys; ``"async"``: in the background.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    if dist.is_initialized():
        dist.barrier()
    kept = weights(model)
    if how == "file":
        optimizer.consolidate_state_dict()
        state = optimizer.state_dict()
    elif how == "full":
        optimizer.consolidate_state_dict(to=None)
        state = get_optimizer_state_dict(model, optimizer, options=FULL)
    else:
        optimizer.consolidate_state_dict(to=None)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=_sharded(how))}
        if how == "async":
            dcp.async_save(state, checkpoint_id=str(folder / "state")).result()
        else:
            dcp.save(state, checkpoint_id=str(folder / "state"))
    if first:
        torch.save(kept, folder / "weights.pt")
        if how in ("file", "full"):
            torch.save(state, folder / "state.pt")
    if dist.is_initialized():
        dist.barrier()


def load(model: nn.Module, optimizer: MatrixOptimizer, folder: Path, how: str) -> None:
    """The inverse of :func:`save`."""
    set_model_state_dict(model, torch.load(folder / "weights.pt", weights_only=True), options=FULL)
    if how == "file":
        optimizer.load_state_dict(torch.load(folder / "state.pt", weights_only=True, mmap=True))
    elif how == "full":
        state = torch.load(folder / "state.pt", weights_only=True)
        set_optimizer_state_dict(model, optimizer, state, options=FULL)
    else:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=_sharded(how))}
        dcp.load(state, checkpoint_id=str(folder / "state"))
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_sharded(how))


def _sharded(how: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=how == "flat")


def shapes(optimizer: MatrixOptimizer) -> dict[str, dict[str, Any]]:
    """dtype and whole shape of all state that this rank has, by parameter and key."""
    named = [(n, p) for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"])]
    return {
        n.removeprefix("module."): {k: str(v.dtype) for k, v in optimizer.state.get(p, {}).items() if v.numel()}
        for n, p in named
    }


def keys(optimizer: MatrixOptimizer) -> dict[str, list[str]]:
    """Keys of ``optimizer.state`` by parameter, and whether it belongs to live parameters only."""
    named = {p: n for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"])}
    assert set(optimizer.state) <= set(named)
    return {named[p]: sorted(state) for p, state in optimizer.state.items()}


def saved_run(rule: str, layout: str, at: int, folder: str, how: str, **options: Any) -> dict[str, Any]:
    """Trains ``at`` steps, saves, trains on.

    Returns:
        Weights at the end, a hash of those saved, and the keys of the state.
    """
    model, optimizer = make(rule, layout, **options)
    train(model, optimizer, range(at))
    save(model, optimizer, Path(folder), how)
    kept, held = digest(weights(model)), keys(optimizer)
    train(model, optimizer, range(at, at + STEPS))
    return {"weights": weights(model), "saved": kept, "keys": held}


def resumed_run(
    rule: str, layout: str, at: int, folder: str, how: str, twice: bool = False, **options: Any
) -> dict[str, Any]:
    """Loads and trains on; ``twice``: into an optimizer that has trained on something else before."""
    model, optimizer = make(rule, layout, **options)
    if twice:
        train(model, optimizer, range(50, 52))
        load(model, optimizer, Path(folder), how)
        train(model, optimizer, range(60, 61))
        optimizer.consolidate_state_dict(to=None)
        optimizer.zero_grad()
    load(model, optimizer, Path(folder), how)
    loaded = digest(weights(model))
    train(model, optimizer, range(at, at + STEPS))
    held = [v for g in optimizer.param_groups for p in g["params"] for v in optimizer.state.get(p, {}).values()]
    assert all(torch.isfinite(v.to_local() if isinstance(v, DTensor) else v).all() for v in held)
    return {"weights": weights(model), "loaded": loaded, "dtypes": shapes(optimizer)}
