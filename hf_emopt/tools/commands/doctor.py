"""``hf-emopt doctor``: its options; what it does is in :mod:`hf_emopt.integrations.doctor`."""

from __future__ import annotations

import argparse

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand's options."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed, what would run how on this machine, and what in a configuration would be refused",
        description="Prints environment, versions against the supported ranges, what each backend would do here, and which "
        "kernels are active and why. Exit status 1 when something has to be changed before a run.",
    )
    parser.add_argument(
        "--config", default=None, help="YAML of Accelerate or TrainingArguments, or JSON of DeepSpeed, to check"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """``hf-emopt doctor``; 1 when there is a problem."""
    from hf_emopt.integrations import doctor

    return doctor.run(options.config, options.json)
