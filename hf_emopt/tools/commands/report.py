"""``hf-emopt report``."""

from __future__ import annotations

import argparse

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand's options."""
    parser = commands.add_parser(
        "report",
        help="a run's log as one HTML page: layers over steps, loss, learning rates, skipped steps",
        description="Makes one self-contained HTML file with plots from a log with the figures of hf_emopt.EmoptCallback. "
        "The page needs no network.",
    )
    parser.add_argument("run", help="Trainer's output_dir, a checkpoint, a trainer_state.json or a file of JSON lines")
    parser.add_argument("--out", default="report.html", help="file to write (default: report.html)")


def run(options: argparse.Namespace) -> int:
    """Writes the page and says where."""
    from hf_emopt.tools.commands.outputs import check_output
    from hf_emopt.tools.report import write_report

    check_output("--out", options.out)
    print(f"wrote {write_report(options.run, options.out)}")
    return 0
