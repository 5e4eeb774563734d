"""``hf-emopt bench``: measurements on this machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The subcommand's options."""
    bench = commands.add_parser("bench", help="measurements on this machine")
    bench.set_defaults(run=run)
    kinds = bench.add_subparsers(dest="bench", required=True)
    kernels = kinds.add_parser(
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
    _add_step(kinds)


def _add_step(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    step = kinds.add_parser(
        "step",
        help="milliseconds of a training step and of its optimizer on this machine's GPUs, and what would be faster",
        description="Builds a causal language model with random weights, trains it on random tokens with each optimizer, and "
        "prints the time of a step, of the optimizer alone, what of it is not hidden, tokens a second and memory. Then it "
        "measures alternatives (size of buckets, overlap, layout, form of the orthogonalization, schedule, twice the tokens) "
        "and says which are faster. The model is built whole on each GPU before it is sharded.",
    )
    step.add_argument(
        "--model", required=True, help="llama-1.1b, llama-8b-slice, tiny, a Hub id, a folder or a config.json"
    )
    step.add_argument("--nproc", type=int, default=None, help="processes (default: one a GPU, or one)")
    step.add_argument("--optim", nargs="+", default=["adamw", "muon"], help="default: adamw muon")
    step.add_argument(
        "--optim_args", default=None, help='options of our optimizers, "ns_steps=6,overlap_param_gather=true"'
    )
    step.add_argument("--layout", default=None, help="single, ddp, fsdp2, hsdp or fsdp2+tp (default: ddp)")
    step.add_argument("--replicas", type=int, default=2, help="of the layout hsdp (default: 2)")
    step.add_argument("--tp-size", type=int, default=2, help="ranks that share a matrix under fsdp2+tp (default: 2)")
    step.add_argument("--tokens", type=int, default=8192, help="of a rank in a step (default: 8192)")
    step.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default: 2048)")
    step.add_argument("--steps", type=int, default=10, help="measured steps (default: 10)")
    step.add_argument("--warmup", type=int, default=4, help="steps left out before (default: 4)")
    step.add_argument("--profile", action="store_true", help="add a profile of a step of each to the JSON")
    step.add_argument("--no-alternatives", action="store_true", help="measure no alternatives")
    step.add_argument("--output", default=None, help="a JSON file to write; the plot lies beside it")
    step.add_argument("--no-plot", action="store_true", help="write no plot")
    step.add_argument(
        "--trust-remote-code", action="store_true", help="run modelling code that the Hub repository ships"
    )


def run(options: argparse.Namespace) -> int:
    """``hf-emopt bench kernels`` and ``hf-emopt bench step``."""
    if options.bench == "kernels":
        from hf_emopt.tools.bench.kernels import run as run_kernels

        if options.tune is None:
            _check_figures(options.output)
        else:
            check_output("--tune", options.tune, make_parents=False)
        return run_kernels(options.shapes, options.output, options.tune, not options.no_plot)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(_processes(options)),
        "-m", "hf_emopt.tools.bench.step_worker", json.dumps(_settings(options)),
    ]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def check_output(flag: str, path: str | Path, folder: bool = False, make_parents: bool = True) -> None:
    """Raises ``ValueError`` with the fix for a path that could not be written, before a command works for minutes.

    With ``folder`` a folder is to be made there, not a file; with ``make_parents`` folders around it are made.
    """
    target = Path(path)
    if not folder and target.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file, in it or elsewhere")
    above = next(parent for parent in (target, *target.absolute().parents) if os.path.exists(parent))
    if not above.is_dir() and (folder or above != target):
        raise ValueError(f"{flag} {path}: {above} is a file, and no folder to write into: name another place")
    if not make_parents and above != target and above != target.absolute().parent:
        raise ValueError(f"{flag} {path}: there is no folder {target.parent}: make it, or name another")
    if not os.access(above, os.W_OK):
        raise ValueError(f"{flag} {path}: {above} may not be written: name another place, or change its permissions")


def _check_figures(path: str) -> None:
    """Refuses a name for figures that cannot be written, or that their plot would have."""
    check_output("--output", path, make_parents=False)
    if path.endswith(".png"):
        raise ValueError(
            f"--output {path}: figures are JSON, and their plot goes beside them: name it {path[:-4]}.json"
        )


def _processes(options: argparse.Namespace) -> int:
    """The number of processes, checked against the GPUs of this machine."""
    import torch

    gpus = torch.cuda.device_count()
    count = int(options.nproc if options.nproc is not None else max(1, gpus))
    if count < 1:
        raise ValueError(f"--nproc {count} must be at least 1")
    if gpus and count > gpus:
        raise ValueError(
            f"--nproc {count} is more than the {gpus} GPUs here: processes that share a GPU are no measurement"
        )
    return count


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """For the worker; everything that can be wrong is found here, before processes are started."""
    from hf_emopt.tools.bench.step import Settings
    from hf_emopt.tools.bench.step_models import MODELS, check_layout
    from hf_emopt.tools.bench.step_optimizers import MATRIX_OPTIMIZERS, OPTIMIZERS

    if options.output is not None:
        _check_figures(options.output)
    processes = _processes(options)
    layout = options.layout or "ddp"
    check_layout(layout, processes, options.replicas, options.tp_size)
    names = [n.removeprefix("emopt_") for n in options.optim]
    for name in names:
        if name not in OPTIMIZERS:
            raise ValueError(f"--optim {name} is not one of {', '.join(OPTIMIZERS)}")
    if options.model not in MODELS:
        from hf_emopt.integrations.models import load_config

        load_config(options.model, options.trust_remote_code)
    ours = _options(options.optim_args, [n for n in names if n in MATRIX_OPTIMIZERS])
    given = {field.name: getattr(options, field.name) for field in fields(Settings) if hasattr(options, field.name)}
    return {
        "settings": asdict(Settings(**{**given, "layout": layout, "options": ours})),
        "optimizers": names,
        "profile": options.profile,
        "alternatives": not options.no_alternatives,
        "output": options.output,
        "plot": options.output is not None and not options.no_plot,
    }


def _options(text: str | None, names: list[str]) -> dict[str, Any]:
    """Typed options that every one of the named optimizers has."""
    from hf_emopt.integrations.optim_args import parse_optim_args
    from hf_emopt.integrations.registry import optimizer_class

    if text is None:
        return {}
    if not names:
        raise ValueError("--optim_args is for this package's optimizers, and --optim names none")
    parsed = [parse_optim_args(text, optimizer_class(n.removesuffix("-overlap"))) for n in names]
    plain = (int, float, str, bool, list, tuple, type(None))
    return {k: v if isinstance(v, plain) else str(v) for k, v in parsed[0].items()}
