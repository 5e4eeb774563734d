"""``hf-emopt``: plans, launches, measures and examines training with the optimizers of this package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hf_emopt._version import __version__
from hf_emopt.tools.commands import bench, doctor, plan, report
from hf_emopt.tools.commands.outputs import check_output, said
from hf_emopt.tools.commands.parsing import Parser

__all__ = ["main"]

_DESCRIPTION = (
    "Muon, NorMuon, SOAP, Shampoo and KL-Shampoo for Hugging Face Trainer and Accelerate: plan a run before it, launch and "
    "measure it, and look into its logs and checkpoints. `hf-emopt COMMAND --help` has the options of a command."
)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser: argparse.ArgumentParser = Parser(prog="hf-emopt", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"hf-emopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    plan.add(commands)
    commands.add_parser(
        "launch",
        help="accelerate launch, with an emopt_config block in its YAML",
        add_help=False,
    )
    _add_inspect(commands)
    _add_convert(commands)
    bench.add(commands)
    report.add(commands)
    doctor.add(commands)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status, 2 with one line on standard error for bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["launch"]:  # parsed by Accelerate
            from hf_emopt.integrations.launch import launch

            return launch(arguments[1:])
        options = build_parser().parse_args(arguments)
        if options.command == "bench":
            return bench.run(options)
        if options.command == "report":
            return report.run(options)
        if options.command == "doctor":
            return doctor.run(options)
        if options.command == "convert":
            from hf_emopt.checkpoint.deepspeed_files import convert

            check_output("output", options.output, folder=True)
            print(f"{options.output}: {', '.join(convert(options.checkpoint, options.output))}")
            return 0
        if options.command == "inspect":
            from hf_emopt.checkpoint.inspection import inspect_checkpoint

            content = inspect_checkpoint(options.checkpoint)
            print(json.dumps(content.to_dict()) if options.json else content)
            return 0
        return plan.run(options)
    except (ValueError, OSError) as error:
        print(f"hf-emopt: {said(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
