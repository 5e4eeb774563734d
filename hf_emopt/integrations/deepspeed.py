"""DeepSpeed: what lies where in the flat tensors that ZeRO puts into the optimizer's groups, and what is refused.

DeepSpeed takes the optimizer as its client and wraps it. Every wrapper is known here by its class, because they differ in
what they hand over: ZeRO-1 and 2 and ``BF16_Optimizer`` lay a group's parameters one behind the other and cut the row in
equal runs, ZeRO-3 cuts each parameter, and stage 0 leaves parameters whole. An unknown one is an error: what it hands over
might look like parameters and be none.

:func:`watch` has every ``deepspeed.initialize`` attach an optimizer of ours; ``import hf_emopt`` calls it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from types import ModuleType
from typing import Any

import accelerate.accelerator  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from hf_emopt.distributed.flat_params import FlatTensor, cut_each, cut_together
from hf_emopt.distributed.layout import Grid, UnsupportedLayoutError
from hf_emopt.integrations.checkpoints import MARK
from hf_emopt.integrations.deepspeed_refusals import (
    config_problem,
    refuse_config,
    refuse_engine,
    refuse_native_muon,
    unknown_wrapper,
)
from hf_emopt.integrations.deepspeed_resume import hook_trainer_resume, load_weights
from hf_emopt.optimizers.base import MatrixOptimizer

__all__ = ["attach", "load_weights", "watch"]

ENGINE_MODULE = "deepspeed.runtime.engine"


def attach(engine: Any) -> None:
    """Tells an optimizer of this package how a DeepSpeed engine has laid out its parameters.

    Done by itself in ``deepspeed.initialize`` once ``hf_emopt`` is imported.

    Args:
        engine: a ``DeepSpeedEngine`` whose client optimizer is one of this package.

    Raises:
        UnsupportedLayoutError: for a wrapper that is not known, or parallelism that cuts parameters in other ways.
    """
    optimizer, wrapper = engine.basic_optimizer, engine.optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        raise TypeError(f"the engine's optimizer is {type(optimizer).__name__}, none of hf_emopt")
    refuse_engine(engine, optimizer)
    optimizer.process_group = engine.seq_data_parallel_group
    if wrapper is not optimizer:
        optimizer.attach_wrapper(skipped_steps=lambda: int(engine.skipped_steps))
    if wrapper is optimizer or _is(wrapper, "fp16.unfused_optimizer", "FP16_UnfusedOptimizer"):
        _consolidate_before_saving(engine, optimizer)  # parameters are whole: as under DistributedDataParallel
        return
    if _is(wrapper, "zero.stage_1_and_2", "DeepSpeedZeroOptimizer"):
        flats = _of_stage_1_and_2(wrapper, optimizer)
        if optimizer.skip_nonfinite:
            wrapper.check_grad_overflow = True  # off for bfloat16: groups would then skip one by one
    elif _is(wrapper, "bf16_optimizer", "BF16_Optimizer"):
        flats = _of_bf16_optimizer(wrapper, optimizer)
    elif _is(wrapper, "zero.stage3", "DeepSpeedZeroOptimizer_Stage3"):
        flats = _of_stage_3(wrapper, optimizer)
    else:
        raise unknown_wrapper(wrapper, optimizer)
    # All of them look at the gradients, or at their norm, before the first group's step.
    optimizer.attach_wrapper(flats)


def _is(wrapper: Any, module: str, name: str) -> bool:
    """Whether an object is of exactly this class; a subclass may hand over something else."""
    return type(wrapper).__module__ == f"deepspeed.runtime.{module}" and type(wrapper).__name__ == name


# ---------------------------------------------------------------------- what lies where


class _Grids:
    """One grid for each process group."""

    def __init__(self) -> None:
        self._known: dict[int, Grid] = {}

    def of(self, group: Any) -> Grid:
        if id(group) not in self._known:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._known[id(group)] = Grid((ranks,), 0, dist.get_rank(group), group if len(ranks) > 1 else None)
        return self._known[id(group)]


def _of_stage_1_and_2(wrapper: Any, optimizer: MatrixOptimizer) -> list[FlatTensor]:
    grids, flats = _Grids(), []
    for index, flat in enumerate(wrapper.single_partition_of_fp32_groups):
        grid = grids.of(wrapper.real_dp_process_group[index])
        count = len(wrapper.bit16_groups[index])
        _check_complete(optimizer, index, count)
        where = wrapper.round_robin_bit16_indices[index]  # round_robin_gradients puts parameters in another order
        order = [where[position] for position in range(count)]
        shapes = [tuple(wrapper.round_robin_bit16_meta[index][k].shape) for k in order]
        offsets = [int(wrapper.round_robin_bit16_offsets[index][k]) for k in order]
        places = cut_together(shapes, offsets, flat.numel(), grid.shards, grid.shard)
        compute = _device_of(wrapper.bit16_groups_flat[index])
        pinned = wrapper.cpu_offload and wrapper.cpu_offload_pin_memory
        flats.append(FlatTensor(flat, index, places, grid, compute, wrapper.cpu_offload, pinned))
    return flats


def _of_bf16_optimizer(wrapper: Any, optimizer: MatrixOptimizer) -> list[FlatTensor]:
    grids, flats = _Grids(), []
    for index, flat in enumerate(wrapper.fp32_groups_flat_partition):
        grid = grids.of(wrapper.real_dp_process_group[index])
        members = wrapper.bf16_groups[index]
        _check_complete(optimizer, index, len(members))
        shapes = [tuple(param.shape) for param in members]
        offsets = [0, *accumulate(math.prod(shape) for shape in shapes)][:-1]
        places = cut_together(shapes, offsets, flat.numel(), grid.shards, grid.shard)
        flats.append(FlatTensor(flat, index, places, grid, flat.device))
    return flats


def _of_stage_3(wrapper: Any, optimizer: MatrixOptimizer) -> list[FlatTensor]:
    from deepspeed.accelerator import get_accelerator

    grids, flats = _Grids(), []
    first = [0] * len(optimizer.param_groups)
    for sub_group, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        index = wrapper.sub_group_to_group_id[sub_group]
        members = wrapper.fp16_groups[sub_group]
        grid = grids.of(wrapper.sub_group_process_groups[sub_group])
        shapes = [tuple(param.ds_shape) for param in members]
        places = cut_each(shapes, grid.shards, grid.shard, first[index])
        for param, place in zip(members, places):
            size = param.partition_numel()
            start, stop = place.spans[grid.shard]
            if size != -(-param.ds_numel // grid.shards) or stop - start > size:
                raise UnsupportedLayoutError(
                    f"ZeRO-3 holds {size} elements of a parameter of {param.ds_numel} on each of {grid.shards} ranks, "
                    "which is not how it was cut when this version of hf_emopt was written"
                )
        offloaded, pinned = wrapper.offload_optimizer, wrapper.offload_optimizer_pin_memory
        if offloaded and pinned:  # at this stage DeepSpeed pins gradients only
            flat.data = get_accelerator().pin_memory(flat.data)
        flats.append(FlatTensor(flat, index, places, grid, _device_of(members[0]), offloaded, pinned))
        first[index] += len(members)
    for index, count in enumerate(first):
        _check_complete(optimizer, index, count)
    return flats


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Where the model computes; its parameters may be offloaded."""
    if tensor.device.type == "cpu" and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type != "cpu":
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return tensor.device


def _check_complete(optimizer: MatrixOptimizer, index: int, count: int) -> None:
    group = optimizer.param_groups[index]
    if len(group["param_names"]) != count:
        raise UnsupportedLayoutError(
            f"group {group['name']!r} was built of {len(group['param_names'])} parameters, and DeepSpeed trains {count} of "
            "them: some were frozen in between, or have no elements. Freeze layers first, then build the optimizer"
        )


def _consolidate_before_saving(engine: Any, optimizer: MatrixOptimizer) -> None:
    """Has ``engine.save_checkpoint``, which all ranks call, bring the state that lies with owners together first."""
    original = engine.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        optimizer.consolidate_state_dict(to=None)
        return original(*args, **kwargs)

    engine.save_checkpoint = save_checkpoint


# ---------------------------------------------------------------------- deepspeed.initialize


def watch() -> None:
    """Has DeepSpeed's engine attach optimizers of this package, now or when it is imported. Idempotent."""
    _watch_accelerate()
    hook_trainer_resume()
    module = sys.modules.get(ENGINE_MODULE)
    if module is not None:
        _hook(module)
    elif not any(getattr(finder, MARK, False) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _watch_accelerate() -> None:
    """Has Accelerate refuse to replace an optimizer of this package by DeepSpeedCPUAdam, which it does without a word."""
    name = "map_pytorch_optim_to_deepspeed"
    original = getattr(accelerate.accelerator, name, None)
    original = getattr(original, MARK, original)
    if original is None:
        return

    @functools.wraps(original)
    def replaced(optimizer: Any) -> Any:
        if isinstance(optimizer, MatrixOptimizer):
            problem = config_problem({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
            raise ValueError(f"{type(optimizer).__name__} under DeepSpeed: {problem}.")
        return original(optimizer)

    setattr(replaced, MARK, original)
    setattr(accelerate.accelerator, name, replaced)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing but the engine's module, and hooks it once it has run. Importing DeepSpeed here would take seconds."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != ENGINE_MODULE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run: Any = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


setattr(_Finder, MARK, True)


@contextmanager
def _without_steps(optimizer: MatrixOptimizer) -> Iterator[None]:
    """``FP16_UnfusedOptimizer`` makes state by a step on gradients of zero, which would decay weights and count."""
    kept = optimizer.__dict__.get("step")  # of a scheduler
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del optimizer.step
        if kept is not None:
            optimizer.step = kept  # type: ignore[method-assign]


def _hook(module: ModuleType) -> None:
    engine_cls = module.DeepSpeedEngine
    original = getattr(engine_cls._configure_optimizer, MARK, engine_cls._configure_optimizer)

    @functools.wraps(original)
    def configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        if client_optimizer is None:
            refuse_native_muon(self)
        with ExitStack() as stack:

            def checked(optimizer: Any) -> Any:
                if isinstance(optimizer, MatrixOptimizer):
                    refuse_config(self, optimizer)
                    stack.enter_context(_without_steps(optimizer))
                return optimizer

            client = checked(client_optimizer)
            if callable(client):  # makes the optimizer of the parameters
                client = lambda parameters: checked(client_optimizer(parameters))  # noqa: E731
            original(self, client, model_parameters)
        if isinstance(self.basic_optimizer, MatrixOptimizer):
            attach(self)

    setattr(configure_optimizer, MARK, original)
    engine_cls._configure_optimizer = configure_optimizer
