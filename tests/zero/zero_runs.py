"""Training under DeepSpeed on several ranks, and the same in one process to compare with."""

from __future__ import annotations

import copy
import functools
import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from late_copies import late_copies
from safetensors.torch import load_file
from torch import Tensor, nn
from zoo import Zoo, build, coefficients, weights, wrap, zoo

from hf_emopt.integrations.deepspeed import load_weights
from hf_emopt.optimizers.base import MatrixOptimizer

SAMPLES = 24
"""Of a global batch: shared evenly by 2 or 3 ranks with 1 or 4 micro-batches each."""

SCALE = 64
"""Of losses in float16, at the beginning."""


STAGES = {
    ("fp32", 0): None,
    ("fp32", 1): "DeepSpeedZeroOptimizer",
    ("fp32", 2): "DeepSpeedZeroOptimizer",
    ("fp32", 3): "DeepSpeedZeroOptimizer_Stage3",
    ("bf16", 0): "FP16_UnfusedOptimizer",
    ("bf16", 1): "DeepSpeedZeroOptimizer",
    ("bf16", 2): "DeepSpeedZeroOptimizer",
    ("bf16", 3): "DeepSpeedZeroOptimizer_Stage3",
    ("bf16-fp32", 1): "BF16_Optimizer",
    ("bf16-fp32", 2): "DeepSpeedZeroOptimizer",
    ("bf16-fp32", 3): "DeepSpeedZeroOptimizer_Stage3",
}
"""Precision and stage to what DeepSpeed wraps the optimizer in; it has no stage 0 with other accumulation."""


def config(
    stage: int, precision: str = "fp32", clip: float = 0.0, accumulation: int = 1, **zero: Any
) -> dict[str, Any]:
    """A DeepSpeed configuration.

    Args:
        stage: of ZeRO.
        precision: ``"fp32"``, ``"bf16"``, ``"bf16-fp32"`` for bfloat16 whose gradients are accumulated in float32,
            ``"fp16"`` with a static loss scale of 64, or ``"fp16-dynamic"`` with one that begins at 64 and doubles after
            two good steps.
        clip: gradient norm.
        accumulation: micro-batches.
        zero: into ``zero_optimization``.
    """
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, **zero},
        "steps_per_print": 10**9,
    }
    if precision.startswith("bf16"):
        result["bf16"] = {"enabled": True}
    if precision == "fp16":
        result["fp16"] = {"enabled": True, "loss_scale": SCALE}
    if precision == "fp16-dynamic":
        result["fp16"] = {
            "enabled": True, "loss_scale": 0, "initial_scale_power": SCALE.bit_length() - 1, "loss_scale_window": 2,
            "hysteresis": 1,
        }  # fmt: skip
    if precision == "bf16-fp32":
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def call_every_module(model: nn.Module) -> None:
    """Gives the zoo's modules a forward pass over their own parameters: ZeRO-3 gathers those of modules that are called."""

    def own_terms(module: nn.Module, prefix: str, wanted: dict[str, Tensor]) -> Tensor:
        terms = [
            (p.double() * wanted[prefix + name].double()).sum()
            for name, p in module._parameters.items()
            if p is not None
        ]
        return torch.stack(terms).sum()

    owners = [
        (name, module)
        for name, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
    ]
    for name, module in owners:
        module.forward = functools.partial(own_terms, module, f"{name}.")  # type: ignore[method-assign]
    model.forward = lambda wanted: torch.stack([module(wanted) for _, module in owners]).sum()  # type: ignore[method-assign]


def imported() -> Any:
    """DeepSpeed, as it is where its own collectives for CPUs, which take minutes to compile, are not to be had."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Nothing is multiplied in float16 here, and not every CPU can.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    return deepspeed


@contextmanager
def initialized(
    model: nn.Module, optimizer: MatrixOptimizer | None, settings: dict[str, Any], by_module: bool = True
) -> Iterator[Any]:
    """A DeepSpeed engine, destroyed afterwards; with ``by_module`` for the zoo."""
    deepspeed = imported()
    if by_module:
        call_every_module(model)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    try:
        yield engine
    finally:
        engine.destroy()
        gc.collect()


def train(engine: Any, shapes: nn.Module, steps: range) -> None:
    """Optimizer steps on the global batch, each rank with its own samples.

    Args:
        engine: of DeepSpeed.
        shapes: a model with whole parameters, on the meta device or not.
        steps: numbers of the steps, which decide the gradients.
    """
    rank, size, micro = dist.get_rank(), dist.get_world_size(), engine.gradient_accumulation_steps()
    each = SAMPLES // (size * micro)
    for step in steps:
        for part in range(micro):
            first = (rank * micro + part) * each
            wanted = coefficients(shapes, step, range(first, first + each), size * micro / 32)
            engine.backward(engine(wanted))  # which divides by the number of micro-batches
            engine.step()


def master_weights(engine: Any) -> dict[str, Tensor]:
    """Whole float32 weights by name. A collective under ZeRO."""
    from deepspeed.utils import safe_get_full_fp32_param

    wrapper = engine.optimizer
    if hasattr(wrapper, "fp32_groups"):  # FP16_UnfusedOptimizer
        names = {id(p): name for name, p in engine.module.named_parameters()}
        pairs = [(a, b) for low, high in zip(wrapper.fp16_groups, wrapper.fp32_groups) for a, b in zip(low, high)]
        return {names[id(low)]: high.detach().clone() for low, high in pairs}
    if wrapper is engine.basic_optimizer:
        return weights(engine.module)
    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def model_weights(engine: Any) -> dict[str, Tensor]:
    """Whole weights that the forward pass uses."""
    import deepspeed

    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name] = p.detach().clone()
    return found


class Gradients:
    """Gradients that reach the optimizer, clipped: this rank's runs of them, by name."""

    def __init__(self, optimizer: MatrixOptimizer) -> None:
        self.steps: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if optimizer._flattened is None:
                for name, param in zip(group["param_names"], group["params"]):
                    self.steps[name].append((0, param.grad.flatten().clone()))
                continue
            for flat in group["params"]:
                for part, offset, name in optimizer._flattened._inside[id(flat)]:
                    run = flat.grad[offset : offset + part.numel()].clone()
                    self.steps[name].append((part.span[0], run))


def whole_gradients(parts: list[dict[str, list[tuple[int, Tensor]]]]) -> list[dict[str, Tensor]]:
    """Flat gradients by step and name, from what each rank noted."""
    found: list[dict[str, Tensor]] = []
    for name in parts[0]:
        for step in range(len(parts[0][name])):
            runs = dict(rank[name][step] for rank in parts if rank[name][step][1].numel())
            if step == len(found):
                found.append({})
            found[step][name] = torch.cat([runs[start] for start in sorted(runs)])
    return found


def trained_late(**kwargs: Any) -> dict[str, Any]:
    """:func:`trained`, with copies of offloaded parameters as late as they may be."""
    with late_copies() as late:
        result = trained(**kwargs)
        assert late.events.count("bring") == late.events.count("take") > 0
        offload = kwargs["settings"]["zero_optimization"]["offload_optimizer"]
        assert bool(late.pinned) == offload["pin_memory"]
    return result


def trained(rule: str, settings: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """Trains the zoo under a configuration.

    Returns:
        Master weights, model weights, matrices transformed on this rank, the name of DeepSpeed's wrapper (``None`` for
        none), and this rank's runs of the gradients.
    """
    model = zoo()
    optimizer = build(model, rule, **options)
    before, gradients = weights(model), Gradients(optimizer)
    with initialized(model, optimizer, settings) as engine:
        train(engine, zoo(), range(steps))
        after = master_weights(engine)
        assert all(not torch.equal(before[name], after[name]) for name in after)
        return {
            "weights": after,
            "model": model_weights(engine),
            "transforms": optimizer.transform_count,
            "wrapper": None if engine.optimizer is optimizer else type(engine.optimizer).__name__,
            "gradients": dict(gradients.steps),
        }


def reference(
    rule: str,
    steps: int,
    clip: float = 0.0,
    dtype: torch.dtype = torch.float32,
    clipped: list[dict[str, Tensor]] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Weights after the same steps in one process, from weights rounded to ``dtype``, in float32.

    Args:
        clipped: flat gradients to use, after it has been seen that they are the clipped ones. A matrix that is not square
            has a null space whose basis is turned by any angle by the rounding of a norm.
        options: of the optimizer.
    """
    assert not dist.is_initialized()
    model: Zoo = zoo().to(dtype).float()
    optimizer = build(model, rule, **options)
    for step in range(steps):
        model(coefficients(model, step, range(SAMPLES), 1 / 32)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for name, p in model.named_parameters() if clipped else ():
            assert p.grad is not None
            given = clipped[step][name].view_as(p)  # type: ignore[index]
            torch.testing.assert_close(given, p.grad, rtol=1e-6, atol=0.0)
            p.grad = given
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def resumed(rule: str, settings: dict[str, Any], folder: str, steps: tuple[int, int]) -> dict[str, Any]:
    """Master weights after all steps, and after a checkpoint between them, loaded into a fresh engine.

    ``different`` says whether weights move at all after the checkpoint.
    """
    first, second = steps

    def made() -> tuple[nn.Module, MatrixOptimizer]:
        model = zoo()
        return model, build(model, rule)

    with initialized(*made(), settings) as engine:
        train(engine, zoo(), range(first))
        between = master_weights(engine)
        engine.save_checkpoint(folder)
        train(engine, zoo(), range(first, first + second))
        straight = master_weights(engine)
    with initialized(*made(), settings) as engine:
        engine.load_checkpoint(folder)
        train(engine, zoo(), range(first, first + second))
        after = master_weights(engine)
    return {
        "straight": straight,
        "resumed": after,
        "different": all(not torch.equal(straight[name], value) for name, value in between.items()),
    }


def saved(rule: str, settings: dict[str, Any], folder: str, steps: int) -> None:
    """Trains and saves."""
    model = zoo()
    with initialized(model, build(model, rule), settings) as engine:
        train(engine, zoo(), range(steps))
        engine.save_checkpoint(folder)


def saved_again(rule: str, settings: dict[str, Any], folder: str, again: str) -> None:
    """Loads, and saves without a step between."""
    model = zoo()
    with initialized(model, build(model, rule), settings) as engine:
        engine.load_checkpoint(folder)
        engine.save_checkpoint(again)


def continued(rule: str, settings: dict[str, Any], folder: str, steps: tuple[int, int]) -> dict[str, Tensor]:
    """Master weights after more steps from a converted checkpoint, under DeepSpeed."""
    model = zoo()
    with initialized(model, build(model, rule), settings) as engine:
        load_weights(engine, load_file(f"{folder}/model.safetensors"))
        engine.basic_optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", weights_only=True))
        train(engine, zoo(), range(*steps))
        return master_weights(engine)


def continued_plainly(rule: str, folder: str, steps: tuple[int, int], layout: str | None = None) -> dict[str, Tensor]:
    """The same in one process, or under FSDP2 or DDP."""
    model: nn.Module = zoo()
    model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    if layout is not None:
        model = wrap(model, layout)
    optimizer = build(model, rule)
    optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt", weights_only=True))
    rank, size = (dist.get_rank(), dist.get_world_size()) if layout else (0, 1)
    each = SAMPLES // size
    for step in range(*steps):
        wanted = coefficients(model, step, range(rank * each, (rank + 1) * each), size / 32)
        model(wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def bad_step(settings: dict[str, Any]) -> dict[str, Any]:
    """A step in which one rank has a gradient that is not finite, and one in which all are."""
    model = zoo()
    optimizer = build(model, "muon")
    with initialized(model, optimizer, settings) as engine:
        train(engine, zoo(), range(1))
        before = master_weights(engine)
        poisoned = coefficients(zoo(), 1, range(4), 1 / 32)
        if dist.get_rank() == 1:
            poisoned["blocks.linears.a.weight"][0, 0] = float("nan")
        engine.backward(engine(poisoned))
        engine.step()
        between = master_weights(engine)
        train(engine, zoo(), range(2, 3))
        after = master_weights(engine)
        return {
            "parameters": len(before),
            "unchanged": sum(torch.equal(before[name], between[name]) for name in before),
            "moved": sum(not torch.equal(after[name], between[name]) for name in before),
            "skipped": optimizer.skipped_steps,
        }


def copies_of_state(optimizer: MatrixOptimizer) -> list[dict[str, Tensor]]:
    """This rank's."""
    with optimizer.as_built():
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return [copy.deepcopy(optimizer.state.get(p, {})) for p in params]


def scaled_steps(settings: dict[str, Any]) -> dict[str, Any]:
    """Seven steps in float16, the third of which overflows on one rank.

    Returns:
        Of each step the scale after it, the parameters that it moved, and the steps skipped by then; and whether the third
        left moments and counts as they were.
    """
    model = zoo()
    optimizer = build(model, "muon")
    found: dict[str, Any] = {"scales": [], "moved": [], "skipped": []}
    with initialized(model, optimizer, settings) as engine:
        found["parameters"] = len(master_weights(engine))
        for step in range(7):
            before, states = master_weights(engine), copies_of_state(optimizer)
            wanted = coefficients(zoo(), step, range(4), 1 / 32)
            if step == 2 and dist.get_rank() == 1:
                wanted["blocks.linears.a.weight"][0, 0] = 2.0**15
            engine.backward(engine(wanted))
            engine.step()
            after = master_weights(engine)
            found["scales"].append(float(engine.optimizer.loss_scale))
            found["moved"].append(sum(not torch.equal(before[name], after[name]) for name in before))
            found["skipped"].append(optimizer.skipped_steps)
            if step == 2:
                torch.testing.assert_close(copies_of_state(optimizer), states, rtol=0, atol=0)
    return found
