"""``hf-emopt``: what an optimizer would do with a model, before anything is trained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from hf_emopt.matrix_optimizer import MatrixOptimizer

__all__ = ["main"]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="hf-emopt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="route table, state bytes and FLOPs a step, from a configuration alone",
        description="Prints which parameter is trained by which rule, the bytes of optimizer state against AdamW's, and the "
        "floating-point operations of a step. Needs a configuration, not weights.",
    )
    plan.add_argument("model", help="a Hub id, a folder with a config.json, or such a file")
    plan.add_argument("--optim", default="muon", help="optimizer name (default: muon)")
    plan.add_argument("--optim_args", default=None, help='options as for TrainingArguments, "ns_steps=6,aux_lr=1e-5"')
    plan.add_argument("--world-size", type=int, default=1, help="ranks that share the matrices (default: 1)")
    plan.add_argument("--dtype", default=None, help="dtype of the trained weights (default: the configuration's)")
    plan.add_argument(
        "--trust-remote-code", action="store_true", help="run modelling code that the Hub repository ships"
    )
    plan.add_argument("--json", action="store_true", help="print JSON")
    commands.add_parser(
        "launch",
        help="accelerate launch, with an emopt_config block in its YAML",
        description="hf-emopt launch --config_file FILE SCRIPT ...: options are those of `accelerate launch`.",
        add_help=False,
    )
    _add_inspect(commands)
    _add_convert(commands)
    _add_bench(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="what is in a checkpoint: rules, steps, dtypes and bytes of each parameter",
        description="Describes the optimizer's state in a Trainer or Accelerate checkpoint, in a file such as optimizer.pt, "
        "or in a folder of torch.distributed.checkpoint or of DeepSpeed. Runs no code from it and reads no tensors.",
    )
    inspect.add_argument("checkpoint", help="a folder or a file")
    inspect.add_argument("--json", action="store_true", help="print JSON")


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    convert = commands.add_parser(
        "convert",
        help="a DeepSpeed checkpoint as one that every layout and number of ranks resumes from",
        description="Brings the optimizer state and the float32 weights of all ranks of a DeepSpeed checkpoint together, so "
        "that another ZeRO stage, another number of ranks, FSDP2, DDP or one process can resume. Needs no DeepSpeed.",
    )
    convert.add_argument("checkpoint", help="a checkpoint of Trainer, of Accelerate or of engine.save_checkpoint")
    convert.add_argument("output", help="a folder to make")


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measurements on this machine")
    kernels = bench.add_subparsers(dest="bench", required=True).add_parser(
        "kernels",
        help="orthogonalization on this GPU, against other implementations that are installed",
        description="Times Newton-Schulz by this package, torch.compile, torch.optim.Muon and, where installed, "
        "gram-newton-schulz, dion and Emerging-Optimizers. Prints a table, writes JSON and a plot.",
    )
    kernels.add_argument(
        "--shapes", nargs="*", default=None, metavar="BxMxN", help="default: twelve shapes of language models"
    )
    kernels.add_argument(
        "--output", default="kernels.json", help="JSON file; the plot lies beside it (default: kernels.json)"
    )
    kernels.add_argument("--no-plot", action="store_true", help="write no plot")
    kernels.add_argument(
        "--tune",
        default=None,
        metavar="TABLE",
        help="instead, find the best tiles for the shapes and write them to TABLE",
    )


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


def run_plan(options: argparse.Namespace) -> int:
    """``hf-emopt plan``."""
    import torch

    from hf_emopt.integrations.meta_model import load_meta_model
    from hf_emopt.planning import estimate, storage_choices

    if options.world_size < 1:
        raise ValueError(f"--world-size {options.world_size} must be at least 1")
    model = load_meta_model(options.model, options.trust_remote_code)
    if options.dtype is not None:
        dtype = getattr(torch, options.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"--dtype {options.dtype} is no floating-point dtype; try float32, bfloat16 or float16")
        model = model.to(dtype)
    optimizer = build_optimizer(options.optim, model, options.optim_args)
    figures = estimate(optimizer, options.world_size)
    choices = storage_choices(optimizer)
    if options.json:
        print(
            json.dumps(
                {
                    "model": options.model,
                    "optim": options.optim,
                    "routes": optimizer.routes.to_dict(),
                    **figures.to_dict(),
                    "bytes_per_parameter_by_factor_storage": choices,
                }
            )
        )
    else:
        print(optimizer.routes)
        print(figures)
        if choices:
            print("bytes a parameter by factor_storage: " + ", ".join(f"{k} {v:.2f}" for k, v in choices.items()))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status, 2 with one line on standard error for bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["launch"]:  # parsed by Accelerate
            from hf_emopt.integrations.launch import launch

            return launch(arguments[1:])
        options = build_parser().parse_args(arguments)
        if options.command == "bench":
            from hf_emopt.bench.kernels import run

            return run(options.shapes, options.output, options.tune, not options.no_plot)
        if options.command == "convert":
            from hf_emopt.deepspeed_files import convert

            print(f"{options.output}: {', '.join(convert(options.checkpoint, options.output))}")
            return 0
        if options.command == "inspect":
            from hf_emopt.inspection import inspect_checkpoint

            report = inspect_checkpoint(options.checkpoint)
            print(json.dumps(report.to_dict()) if options.json else report)
            return 0
        return run_plan(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"hf-emopt: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
