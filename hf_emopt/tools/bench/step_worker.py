"""The program of each rank under ``hf-emopt bench step``, started with ``torchrun``; its argument is a JSON of settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_emopt.tools.bench.advice import exposed_share, measure_alternatives, report
from hf_emopt.tools.bench.step import Settings, add_profiles, measure_all, process_group
from hf_emopt.tools.bench.step_optimizers import MATRIX_OPTIMIZERS, OPTIMIZERS
from hf_emopt.tools.bench.step_report import about, plot, save, table


def main(arguments: list[str] | None = None) -> int:
    """Measures, and on rank 0 prints and writes; 1 where an optimizer of this package could not be measured."""
    given: dict[str, Any] = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    settings = Settings(**given["settings"])
    names = ["none", *(n for n in given["optimizers"] if n != "none")]
    with process_group() as device:
        world = dist.get_world_size()
        rows = measure_all(names, OPTIMIZERS, settings, device)
        verdicts, shares = [], {}
        if given["alternatives"]:
            verdicts = measure_alternatives(rows, OPTIMIZERS, settings, world, device)
            shares = exposed_share(rows, OPTIMIZERS, settings, device)
        first = dist.get_rank() == 0
        if first:
            print(f"\n{settings.model}, {settings.layout}, {world} ranks, {settings.tokens} tokens a rank, ms")
            print(table(rows))
            if given["alternatives"]:
                print("\n" + report(verdicts, shares))
        facts = about(settings, world)
        found = [{**vars(v), "verdict": v.word} for v in verdicts]
        if first and given["output"] is not None:
            save(Path(given["output"]), facts, rows, alternatives=found, exposed_share=shares)
        if first and given["plot"]:
            plot(Path(given["output"]).with_suffix(".png"), facts, rows)
        if given["profile"]:
            add_profiles(rows, OPTIMIZERS.get, settings, device)
            if first and given["output"] is not None:
                save(Path(given["output"]), facts, rows, alternatives=found, exposed_share=shares)
    failed = [r["optimizer_name"] for r in rows if "error" in r and r["optimizer_name"] in MATRIX_OPTIMIZERS]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
