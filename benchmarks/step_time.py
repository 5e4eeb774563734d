"""Milliseconds of a training step and of its optimizer, on any number of GPUs, beside AdamW and the peers installed.

    torchrun --nproc-per-node 2 benchmarks/step_time.py --layout fsdp2 ddp --optimizers none adamw muon soap --json out.json

Several layouts are measured one after another. Each has a file of its own (``out_fsdp2.json``, ``out_ddp.json``), written
after every optimizer: a run that is cut short keeps what it has.

What is measured, and how, is said in ``hf_emopt/bench/step.py``; ``hf-emopt bench step`` is the same for a model of one's
own, without the peers and with alternatives. Layouts: DDP, FSDP2, HSDP (``--replicas 2`` on 4 GPUs is 2x2, on 8 2x4), FSDP2
over tensor parallelism (``--tp-size 2``). A peer that is not installed, or does not know the layout, is a line that says so.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_emopt.tools.bench.step import Maker, Row, Settings, Unavailable, add_profiles, attempt, process_group
from hf_emopt.tools.bench.step_models import LAYOUTS, MODELS
from hf_emopt.tools.bench.step_optimizers import (
    DECAY,
    LR,
    MATRIX_OPTIMIZERS,
    OPTIMIZERS,
    Several,
    adamw,
    by_mesh,
    split,
)
from hf_emopt.tools.bench.step_report import about, plot, save, table


def dion_muon(model: nn.Module, triton: bool = False) -> torch.optim.Optimizer:
    from dion import Muon  # type: ignore[import-not-found]

    matrices, rest = split(model)
    mesh = getattr(matrices[0], "device_mesh", None)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": LR}]
    where = mesh if mesh is not None else dist.group.WORLD if dist.get_world_size() > 1 else None
    return Muon(groups, distributed_mesh=where, lr=LR, nesterov=True, adjust_lr="rms_norm", use_triton=triton)  # type: ignore[no-any-return]


def heavyball_muon(model: nn.Module) -> torch.optim.Optimizer:
    from heavyball import Muon  # type: ignore[import-not-found]

    matrices, rest = split(model)
    return Several(Muon(matrices, lr=LR, betas=(0.95, 0.99), weight_decay=DECAY, nesterov=True), adamw(rest))


def heavyball_soap(model: nn.Module) -> torch.optim.Optimizer:
    from heavyball import SOAP  # type: ignore[import-not-found]

    matrices, rest = split(model)
    soap = SOAP(
        matrices, lr=LR, weight_decay=DECAY, precondition_frequency=10, max_precond_dim=2048, merge_dims=False,
        use_precond_schedule=False,
    )  # fmt: skip
    return Several(soap, adamw(rest))


def emerging_muon(model: nn.Module) -> torch.optim.Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import Muon  # type: ignore[import-not-found]

    matrices, rest = split(model)
    muon = Muon(
        matrices, lr=LR, momentum=0.95, weight_decay=DECAY, nesterov=True, extra_scale_factor=0.2,
        use_syrk=torch.cuda.is_available(),
    )  # fmt: skip
    return Several(muon, adamw(rest))


def gram_newton_schulz_muon(model: nn.Module) -> torch.optim.Optimizer:
    from gram_newton_schulz import Muon  # type: ignore[import-not-found]

    matrices, rest = split(model)
    muon = Muon(matrices, lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True, adjust_lr="rms_norm")
    return Several(muon, adamw(rest))


# name -> module that must be installed, constructor, whether parameters may be sharded
PEERS: dict[str, tuple[str, Callable[[nn.Module], torch.optim.Optimizer], bool]] = {
    "dion": ("dion", dion_muon, True),
    "dion-triton": ("dion", lambda model: dion_muon(model, triton=True), True),
    "heavyball-muon": ("heavyball", heavyball_muon, False),
    "heavyball-soap": ("heavyball", heavyball_soap, False),
    "emerging-muon": ("emerging_optimizers", emerging_muon, False),
    "gram-newton-schulz": ("gram_newton_schulz", gram_newton_schulz_muon, False),
}


def peer(name: str) -> Maker:
    module, make, sharded = PEERS[name]

    def maker(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        if importlib.util.find_spec(module) is None:
            raise Unavailable(f"the package {module} is not installed")
        if not sharded and len(by_mesh(model.parameters())) + (settings.layout not in ("single", "ddp")) > 1:
            raise Unavailable(f"{module} transforms whole matrices in one process; it does not know {settings.layout}")
        return make(model)

    return maker


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["none", *OPTIMIZERS, *PEERS]
    parser.add_argument("--model", default="llama-1.1b", help=f"{', '.join(MODELS)}, or a configuration")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["fsdp2"])
    parser.add_argument("--replicas", type=int, default=2, help="of the layout hsdp")
    parser.add_argument("--tp-size", type=int, default=2, help="ranks that share a matrix under fsdp2+tp")
    parser.add_argument("--optimizers", nargs="+", default=["none", "adamw", "muon"], choices=names, metavar="NAME",
                        help=", ".join(names))  # fmt: skip
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank in a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--transport", default=None, help="transport_dtype of our optimizers")
    parser.add_argument("--profile", action="store_true",
                        help="add a profile of a step of each to the JSON, made when all is measured")  # fmt: skip
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None, help="a PNG; needs matplotlib")
    return parser.parse_args()


def named(path: Path | None, layout: str, several: bool) -> Path | None:
    """The file of a layout, where several share a name."""
    return path.with_stem(f"{path.stem}_{layout.replace('+', '_')}") if path is not None and several else path


def maker_of(name: str) -> Maker | None:
    return peer(name) if name in PEERS else OPTIMIZERS.get(name)


def keep(settings: Settings, options: argparse.Namespace, rows: list[Row]) -> None:
    path = named(options.json, settings.layout, len(options.layout) > 1)
    if dist.get_rank() == 0 and path is not None:
        table(rows)  # adds what follows from several rows
        save(path, {**about(settings, dist.get_world_size()), "optimizers": options.optimizers}, rows)


def measure_layout(settings: Settings, options: argparse.Namespace, device: torch.device) -> list[Row]:
    """Rows of all optimizers under one layout, printed and kept."""
    several, world = len(options.layout) > 1, dist.get_world_size()
    rows: list[Row] = []
    for name in options.optimizers:
        rows.append(attempt(name, maker_of(name), settings, device))
        keep(settings, options, rows)
    if dist.get_rank() == 0:
        print(f"{settings.model}, {settings.layout}, {world} ranks, {settings.tokens} tokens a rank")
        print(table(rows), flush=True)
        path = named(options.plot, settings.layout, several)
        if path is not None:
            plot(path, {**about(settings, world), "optimizers": options.optimizers}, rows)
    return rows


def main() -> int:
    options = arguments()
    ours: dict[str, Any] = {} if options.transport is None else {"transport_dtype": options.transport}
    with process_group() as device:
        measured = []
        for layout in options.layout:
            settings = Settings(
                options.model, layout, options.tokens, options.length, options.steps, options.warmup, options.replicas,
                options.tp_size, ours,
            )  # fmt: skip
            measured.append((settings, measure_layout(settings, options, device)))
        for settings, rows in measured if options.profile else []:
            add_profiles(rows, maker_of, settings, device)
            keep(settings, options, rows)
    rows = [row for _, rows in measured for row in rows]
    failed = [r["optimizer_name"] for r in rows if "error" in r and r["optimizer_name"] in MATRIX_OPTIMIZERS]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
