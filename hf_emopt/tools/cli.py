"""``hf-emopt``: plans, launches, measures and examines training with the optimizers of this package."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Sequence
from typing import Any

from hf_emopt._version import __version__
from hf_emopt.tools.commands import bench, plan
from hf_emopt.tools.commands.bench import check_output

_DESCRIPTION = (
    "Muon, NorMuon, SOAP, Shampoo and KL-Shampoo for Hugging Face Trainer and Accelerate: plan a run before it, launch and "
    "measure it, and look into its logs and checkpoints. `hf-emopt COMMAND --help` has the options of a command."
)

_FIXES: dict[type[OSError], str] = {
    IsADirectoryError: "it is a folder: name a file",
    NotADirectoryError: "a part of the path is a file: name a folder there, or another place",
    FileExistsError: "it is there already: name another place",
    PermissionError: "name a place that you may read or write, or change its permissions",
}


class Parser(argparse.ArgumentParser):
    """Refuses unknown options itself; argparse leaves them to the parser around the subcommands and prints its usage."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, but the first unknown option ends the program with the nearest known one."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            named = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            close = difflib.get_close_matches(named[0], self._option_string_actions, n=1) if named else []
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    """The command line; each command sets ``run``, which takes the options and returns the exit status."""
    parser: argparse.ArgumentParser = Parser(prog="hf-emopt", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"hf-emopt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    plan.add(commands)
    commands.add_parser("launch", help="accelerate launch, with an emopt_config block in its YAML", add_help=False)

    inspect = commands.add_parser(
        "inspect",
        help="what is in a checkpoint: rules, steps, dtypes and bytes of each parameter",
        description="Describes the optimizer's state in a Trainer or Accelerate checkpoint, in a file such as optimizer.pt, "
        "or in a folder of torch.distributed.checkpoint or of DeepSpeed. Runs no code from it and reads no tensors.",
    )
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("checkpoint", help="a folder or a file")
    inspect.add_argument("--json", action="store_true", help="print JSON")

    convert = commands.add_parser(
        "convert",
        help="a DeepSpeed checkpoint as one that every layout and number of ranks resumes from",
        description="Brings the optimizer state and the float32 weights of all ranks of a DeepSpeed checkpoint together, so "
        "that another ZeRO stage, another number of ranks, FSDP2, DDP or one process can resume. Needs no DeepSpeed.",
    )
    convert.set_defaults(run=_convert)
    convert.add_argument("checkpoint", help="a checkpoint of Trainer, of Accelerate or of engine.save_checkpoint")
    convert.add_argument("output", help="a folder to make")

    bench.add(commands)

    report = commands.add_parser(
        "report",
        help="a run's log as one HTML page: layers over steps, loss, learning rates, skipped steps",
        description="Makes one self-contained HTML file with plots from a log with the figures of hf_emopt.EmoptCallback. "
        "The page needs no network.",
    )
    report.set_defaults(run=_report)
    report.add_argument(
        "run_log",
        metavar="run",
        help="Trainer's output_dir, a checkpoint, a trainer_state.json or a file of JSON lines",
    )
    report.add_argument("--out", default="report.html", help="file to write (default: report.html)")

    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what would run how on this machine, and what in a configuration would be refused",
        description="Prints environment, versions against the supported ranges, what each backend would do here, and which "
        "kernels are active and why. Exit status 1 when something has to be changed before a run.",
    )
    doctor.set_defaults(run=_doctor)
    doctor.add_argument(
        "--config", default=None, help="YAML of Accelerate or TrainingArguments, or JSON of DeepSpeed, to check"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _inspect(options: argparse.Namespace) -> int:
    from hf_emopt.checkpoint.inspection import inspect_checkpoint

    content = inspect_checkpoint(options.checkpoint)
    print(json.dumps(content.to_dict()) if options.json else content)
    return 0


def _convert(options: argparse.Namespace) -> int:
    from hf_emopt.checkpoint.deepspeed_files import convert

    check_output("output", options.output, folder=True)
    print(f"{options.output}: {', '.join(convert(options.checkpoint, options.output))}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from hf_emopt.tools.report import write_report

    check_output("--out", options.out)
    print(f"wrote {write_report(options.run_log, options.out)}")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from hf_emopt.integrations import doctor

    return doctor.run(options.config, options.json)


def said(error: OSError) -> str:
    """The cause, the file and the fix in one line; the bare message of an error that has no file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    fix = next((text for kind, text in _FIXES.items() if isinstance(error, kind)), "")
    return f"{names}: {error.strerror}" + (f"; {fix}" if fix else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status, 2 with one line on standard error for bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["launch"]:  # parsed by Accelerate
            from hf_emopt.integrations.launch import launch

            return launch(arguments[1:])
        options = build_parser().parse_args(arguments)
        return int(options.run(options))
    except (ValueError, OSError) as error:
        print(f"hf-emopt: {said(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
