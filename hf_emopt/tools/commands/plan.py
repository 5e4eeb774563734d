"""``hf-emopt plan``: what an optimizer would do with a model, and what a step would take on ranks that one does not have."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from hf_emopt.optimizers.base import MatrixOptimizer


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand's options."""
    plan = commands.add_parser(
        "plan",
        help="route table, state bytes and FLOPs a step, from a configuration alone; and the step's time on many GPUs",
        description="Prints which parameter is trained by which rule, the bytes of optimizer state against AdamW's, and the "
        "floating-point operations of a step. With --layout, --gpu or --network it also predicts the time of an optimizer "
        "step, what travels, the memory of a rank and how even the work is. Needs a configuration, not weights.",
    )
    plan.set_defaults(run=run)
    plan.add_argument("model", nargs="?", help="a Hub id, a folder with a config.json, or such a file")
    plan.add_argument("--model", dest="model_option", metavar="MODEL", help="the same")
    plan.add_argument("--optim", nargs="+", default=["muon"], help="optimizer names (default: muon)")
    plan.add_argument("--optim_args", default=None, help='options as for TrainingArguments, "ns_steps=6,aux_lr=1e-5"')
    plan.add_argument("--world-size", type=int, default=1, help="ranks that share the matrices (default: 1)")
    plan.add_argument("--dtype", default=None, help="dtype of the trained weights (default: the configuration's)")
    plan.add_argument(
        "--trust-remote-code", action="store_true", help="run modelling code that the Hub repository ships"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    many = plan.add_argument_group("a step on many GPUs")
    for flag, kind, text in _FORECAST:
        many.add_argument(flag, type=kind, nargs="+" if flag == "--layout" else None, default=None, help=text)


_FORECAST: tuple[tuple[str, type, str], ...] = (
    ("--layout", str, "of ddp, fsdp2, hsdp, fsdp2+tp (default: ddp and fsdp2)"),
    ("--gpu", str, "a100, h100, h200 or b200 (default: h100)"),
    ("--network", str, "between nodes: nvlink, ib400, ib200 or eth100 (default: ib400)"),
    ("--tokens-per-gpu", int, "tokens of a rank in a step, for the optimizer's share"),
    (
        "--shard-size",
        int,
        "ranks that hold one copy under hsdp (default: a node, or half of the ranks where they are one node)",
    ),
    ("--tp-size", int, "ranks that share a matrix under fsdp2+tp (default: a node)"),
    ("--gpu-tflops", float, "dense 16-bit TFLOP/s, over --gpu's"),
    ("--gpu-bandwidth", float, "of memory in TB/s, over --gpu's"),
    ("--gpu-memory", float, "in GiB, over --gpu's"),
    ("--gpus-per-node", int, "default: 8"),
    ("--nvlink-gbytes", float, "GB/s of a GPU inside a node, one direction"),
    ("--network-gbytes", float, "GB/s of a GPU between nodes, one direction"),
    ("--network-latency", float, "of a collective in microseconds"),
)
"""Options that ask for a forecast, with the type and help of each."""


def build_optimizer(name: str, model: nn.Module, optim_args: str | None) -> MatrixOptimizer:
    """The optimizer that ``TrainingArguments(optim=name, optim_args=optim_args)`` would train ``model`` with.

    Raises:
        ValueError: for an unknown name, or options that do not fit.
    """
    from hf_emopt.integrations.optim_args import parse_optim_args
    from hf_emopt.integrations.registry import optimizer_class

    try:
        optimizer_cls = optimizer_class(name)
    except ValueError as error:
        raise ValueError(f"--optim {error}") from None
    return optimizer_cls(model, **parse_optim_args(optim_args, optimizer_cls))


def run(options: argparse.Namespace) -> int:
    """``hf-emopt plan``."""
    from hf_emopt.tools.estimate import estimate, storage_choices

    if options.world_size < 1:
        raise ValueError(f"--world-size {options.world_size} must be at least 1")
    given = [m for m in (options.model, options.model_option) if m is not None]
    if len(given) != 1:
        raise ValueError("give one model: hf-emopt plan path/to/config.json")
    model = _load(given[0], options)
    optimizers = {name: build_optimizer(name, model, options.optim_args) for name in options.optim}
    asked = any(getattr(options, flag[2:].replace("-", "_")) is not None for flag, _, _ in _FORECAST)
    # With layouts, each forecast has its own ranks.
    ranks = 1 if asked else options.world_size
    found = _forecasts(options, model, optimizers) if asked else None
    if options.json:
        described: dict[str, dict[str, Any]] = {
            name: {
                "routes": optimizer.routes.to_dict(),
                **estimate(optimizer, ranks).to_dict(),
                "bytes_per_parameter_by_factor_storage": storage_choices(optimizer),
            }
            for name, optimizer in optimizers.items()
        }
        one = len(optimizers) == 1
        content = {"optim": options.optim[0], **described[options.optim[0]]} if one else {"optimizers": described}
        if found is not None:
            content["forecast"] = found[0]
        print(json.dumps({"model": given[0], **content}))
        return 0
    blocks = []
    for name, optimizer in optimizers.items():
        lines = [f"{name}:"] if len(optimizers) > 1 else []
        lines += [str(optimizer.routes), str(estimate(optimizer, ranks))]
        if choices := storage_choices(optimizer):
            each = ", ".join(f"{storage} {size:.2f}" for storage, size in choices.items())
            lines.append(f"bytes a parameter by factor_storage: {each}")
        blocks.append("\n".join(lines))
    print("\n\n".join(blocks))
    if found is not None:
        print(found[1])
    return 0


def _load(source: str, options: argparse.Namespace) -> nn.Module:
    import torch

    from hf_emopt.integrations.models import load_meta_model
    from hf_emopt.integrations.optim_args import parse_value

    model = load_meta_model(source, options.trust_remote_code)
    if options.dtype is None:
        return model
    try:
        dtype = parse_value(options.dtype, torch.dtype)
    except ValueError:
        dtype = getattr(torch, options.dtype, None)  # of eight bits, say
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"--dtype {options.dtype} is no floating-point dtype; try float32, bfloat16 or float16")
    return model.to(dtype)


def _forecasts(
    options: argparse.Namespace, model: nn.Module, optimizers: dict[str, MatrixOptimizer]
) -> tuple[dict[str, Any], str]:
    """As plain values, and as text."""
    from hf_emopt.tools.forecast.hardware import custom_gpu, custom_network
    from hf_emopt.tools.forecast.layouts import check_sizes, layout_on
    from hf_emopt.tools.forecast.report import figures, model_seconds, sources, table
    from hf_emopt.tools.forecast.step import Machine, forecast

    gpu = custom_gpu(
        options.gpu or "h100", bf16=options.gpu_tflops, memory_tb_s=options.gpu_bandwidth, memory_gib=options.gpu_memory,
        nvlink_gb_s=options.nvlink_gbytes, per_node=options.gpus_per_node,
    )  # fmt: skip
    link = {"gb_s": options.network_gbytes, "latency_us": options.network_latency}
    machine = Machine(gpu, custom_network(options.network or "ib400", **link))
    if options.tokens_per_gpu is not None and options.tokens_per_gpu < 1:
        raise ValueError(f"--tokens-per-gpu {options.tokens_per_gpu} must be at least 1")
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    rows = []
    names = options.layout or ["ddp", "fsdp2"]
    check_sizes(names, options.shard_size, options.tp_size)
    for name in names:
        layout = layout_on(name, options.world_size, machine.gpu.per_node, options.shard_size, options.tp_size)
        tokens = options.tokens_per_gpu
        model_s = None if tokens is None else model_seconds(model, tokens, machine)
        if model_s is not None and name == "fsdp2+tp":
            model_s /= layout.tp_size  # the ranks that share a matrix share its products
        for optim, optimizer in optimizers.items():
            made = forecast(optimizer, layout, machine, model, frozen_bytes=frozen)
            rows.append(figures(optim, made, machine, model_s))
    known = sources(machine, options.world_size, list(optimizers.values()))
    head = f"{options.world_size} x {machine.gpu.name}, {machine.gpu.per_node} a node, {machine.network.name} between nodes"
    content = {"gpu": machine.gpu.name, "network": machine.network.name, "rows": rows, "sources": known}
    return content, f"\n{head}\n{table(rows, machine, known)}"
