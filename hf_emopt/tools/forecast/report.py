"""Forecasts as text and as plain values, with the source of each figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_emopt.distributed.assignment import BUCKET_VARIABLE
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.rules.muon import MuonRule
from hf_emopt.tools.forecast.hardware import EFFICIENCY, GPUS
from hf_emopt.tools.forecast.products import has_kernels
from hf_emopt.tools.forecast.step import Forecast, Machine

MEASURED_RANKS = 4
"""The most ranks for which predicted steps are compared with measured ones."""


def model_seconds(model: nn.Module, tokens: int, machine: Machine) -> float:
    """Forward and backward of so many tokens on one GPU: six operations a parameter and token, attention left out."""
    parameters = sum(p.numel() for p in model.parameters())
    return 6 * parameters * tokens / (EFFICIENCY.model * machine.gpu.bf16 * 1e12)


def sources(machine: Machine, world_size: int, optimizers: Sequence[MatrixOptimizer]) -> dict[str, str]:
    """The source of each part of a forecast: ``measured ...``, ``datasheet ...``, ``extrapolated ...`` or ``given ...``."""
    gpu, network = machine.gpu, machine.network
    given = gpu.source.get("bf16") == "given"
    rate = "given" if given else "datasheet"
    products = f"extrapolated: {rate} rate, the H200's curve over sizes, no kernels of ours"
    if has_kernels(gpu):
        products = "measured on an H200, kernel by kernel; sizes between are interpolated"
        products += f", and scaled to {gpu.bf16:g} TFLOP/s as given" if given else ""
    where, link = (gpu.source.get(key, "datasheet") for key in ("memory_tb_s", "nvlink_gb_s"))
    found = {
        "products": products,
        "passes": f"{where} bandwidth, {EFFICIENCY.memory:.0%} of it as measured on an H200",
        "NVLink": f"{link} bandwidth, {EFFICIENCY.nvlink:.0%} of it as measured on two H200",
        "host": "measured beside two H200; another processor takes another time",
    }
    if world_size > gpu.per_node:
        found["network"] = (
            f"extrapolated: {network.source}, {EFFICIENCY.network:.0%} of it and {network.latency_us:g} us assumed"
        )
    if not all(isinstance(o.rule, MuonRule) for o in optimizers):
        same = gpu.tf32 == GPUS["h200"].tf32 and gpu.bf16 == GPUS["h200"].bf16
        # Fitted with TF32 products; what runs in float32 is scaled.
        same = same and all(g.get("matmul_precision", "tf32") == "tf32" for o in optimizers for g in o.param_groups)
        scaled = "" if same else "; scaled by the rate: extrapolated"
        found["refreshes"] = f"measured on an H200, sides of 2048{scaled}"
    if world_size > MEASURED_RANKS:
        found["step"] = f"extrapolated: steps were measured on up to {MEASURED_RANKS} GPUs, here are {world_size}"
    return found


def figures(name: str, f: Forecast, machine: Machine, model_s: float | None = None) -> dict[str, Any]:
    """One forecast as plain values: times in ms, bytes of the rank with most."""
    m = f.memory
    row: dict[str, Any] = {
        "optim": name,
        "layout": f.placed.layout.name,
        "world_size": f.placed.layout.world_size,
        "step_ms": 1e3 * f.seconds,
        "largest_step_ms": 1e3 * f.largest_seconds,
        "products_ms": 1e3 * f.products,
        "refresh_ms": 1e3 * f.refresh,
        "passes_ms": 1e3 * f.passes,
        "exchange_ms": 1e3 * f.exchange,
        "exposed_exchange_ms": 1e3 * f.exposed_exchange,
        "team_sums_ms": 1e3 * f.compute_group_sums,
        "host_ms": 1e3 * f.host,
        "received_bytes": f.received_bytes,
        "sent_bytes": f.sent_bytes,
        "weight_bytes": float(m.weights.max()),
        "gradient_bytes": float(m.gradients.max()),
        "state_bytes": float(m.state.max()),
        "state_bytes_mean": float(m.state.mean()),
        "fits": float((m.weights + m.gradients + m.state).max()) <= machine.gpu.memory_gib * 2**30,
        "flops_balance": f.flops_balance,
        "time_balance": f.time_balance,
        "bytes_balance": f.bytes_balance,
        "buckets": f.buckets,
        "parameters_in_teams": f.compute_groups,
    }
    row["adamw"] = {"step_ms": 1e3 * f.adamw.seconds, "host_ms": 1e3 * f.adamw.host, "state_bytes": f.adamw.state_bytes}
    if model_s is not None:
        row["forward_backward_ms"] = 1e3 * model_s
        row["share_of_step"] = f.seconds / (f.seconds + model_s)
        row["adamw"]["share_of_step"] = f.adamw.seconds / (f.adamw.seconds + model_s)
    return row


_HEADS = "step,products,passes,exchange,exposed,host,received,sent,weights,grads,state,max/mean"


def table(rows: Sequence[dict[str, Any]], machine: Machine, known: dict[str, str]) -> str:
    """Forecasts as text, one line each, with a line for AdamW below those of each layout."""
    share = " of step" if "share_of_step" in rows[0] else ""
    lines = [_cells("ms a step; a rank with most", _HEADS.split(",")) + share]
    for number, row in enumerate(rows):
        lines.append(_line(row))
        if number + 1 == len(rows) or rows[number + 1]["layout"] != row["layout"]:
            lines.append(_adamw_line(row))
    for row in rows:
        lines += _remarks(row, machine)
    lines.append("what this rests on:")
    lines += [f"  {part}: {source}" for part, source in known.items()]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    products = row["products_ms"] + row["refresh_ms"]
    rest = (row[f"{key}_ms"] for key in ("passes", "exchange", "exposed_exchange", "host"))
    cells = [f"{ms:.2f}" for ms in (row["step_ms"], products, *rest)]
    cells += [_bytes(row[f"{key}_bytes"]) for key in ("received", "sent", "weight", "gradient", "state")]
    cells.append(f"{row['time_balance']:.3f}")
    return _cells(f"{row['layout']}, {row['optim']}", cells) + _share(row)


def _adamw_line(row: dict[str, Any]) -> str:
    adamw = row["adamw"]
    step, host = adamw["step_ms"], adamw["host_ms"]
    cells = [f"{step:.2f}", "-", f"{step - host:.2f}", "-", "-", f"{host:.2f}", "0", "0"]
    cells += [_bytes(count) for count in (row["weight_bytes"], row["gradient_bytes"], adamw["state_bytes"])]
    return _cells(f"{row['layout']}, AdamW fused", [*cells, "-"]) + _share(adamw)


def _cells(name: str, cells: Sequence[str]) -> str:
    return f"{name:28}" + "".join(f"{cell:>10}" for cell in cells)


def _share(figures: dict[str, Any]) -> str:
    return f"{figures['share_of_step']:8.1%}" if "share_of_step" in figures else ""


def _remarks(row: dict[str, Any], machine: Machine) -> list[str]:
    where = f"{row['layout']}, {row['optim']}"
    lines = []
    if not row["fits"]:
        needed = row["weight_bytes"] + row["gradient_bytes"] + row["state_bytes"]
        lines.append(
            f"{where}: does not fit: {_bytes(needed)} before activations, and a GPU has {machine.gpu.memory_gib:g}G"
        )
    if row["time_balance"] > 1.5:
        lines.append(f"{where}: uneven: the busiest rank transforms {row['time_balance']:.2f} times the mean")
    if row["largest_step_ms"] > 1.3 * row["step_ms"]:
        lines.append(f"{where}: the longest step of a period takes {row['largest_step_ms']:.1f} ms")
    if row["host_ms"] >= row["step_ms"]:
        fewer = f": buckets of more elements would help ({BUCKET_VARIABLE})" if row["buckets"] > 1 else ""
        lines.append(f"{where}: bound by the host{fewer}")
    if row["parameters_in_teams"]:
        lines.append(
            f"{where}: {row['parameters_in_teams']} matrices are each transformed by several ranks, with "
            f"{row['team_sums_ms']:.2f} ms of sums on the way"
        )
    return lines


def _bytes(count: float) -> str:
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"
