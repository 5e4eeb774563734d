"""What state in fewer bits and state on the host cost and save: milliseconds of a step, bytes, and the same weights.

    python benchmarks/state_memory.py --json state.json
    torchrun --nproc-per-node 2 benchmarks/state_memory.py --layout fsdp2

Every variant is an optimizer, a ``state_dtype`` and, with ``+cpu``, ``offload_state="cpu"``, on a model that is built anew:

* ``step``: of forward, backward and optimizer, the mean over a run of steps with no synchronization between them (what is
  written to the host may hide behind the next forward pass), the median of several runs; ``ratio`` to the same state without
  offload. ``--wait`` has the host wait for each backward pass, as a loop does that looks at its loss;
* ``state``: bytes of the optimizer's state on device and host, which must be what the planner says;
* ``left``, ``lent``: the most bytes of offloaded state that were on the device between steps and in a step; at most the
  largest piece, and three times that (or ``HF_EMOPT_OFFLOAD_BUCKETS`` times);
* ``ready``: bytes of it that were there, or on their way, when the last step began: more than ``left`` where the backward
  pass has brought state before the step;
* ``host_ahead_ms``: how long the device takes to be through with a backward pass when the host is. Where that is long, what
  is asked for when a step begins is asked for early anyway;
* ``peak``: of allocated memory;
* with ``--profile``, of one optimizer step: its milliseconds on the device, and those in which copies to the device, copies
  to the host and its own kernels ran, by ``torch.profiler``; of the copies to the device also those before it began
  (``early``) and those while it ran (``meanwhile``). The host waits for the device before that step.

Then, on two layers and gradients that are the same numbers every time, weights after ``--parity-steps`` steps: of offload
against the same without, to the bit, also where a checkpoint of one is resumed by the other, and of each ``state_dtype``
against float32. Anything else than equality of bits and of bytes ends in an error.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import hf_emopt
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.state.offload import budget_in_buckets
from hf_emopt.tools.bench.step import process_group, refresh_schedule
from hf_emopt.tools.bench.step_models import MODELS, build_model, lay_out
from hf_emopt.tools.estimate import estimate

RULES = {
    "muon": (hf_emopt.Muon, {}),
    "normuon": (hf_emopt.NorMuon, {}),
    "soap": (hf_emopt.SOAP, {"oversize": "block", "max_preconditioner_dim": 2048, "matmul_precision": "tf32"}),
    "shampoo": (hf_emopt.Shampoo, {"max_preconditioner_dim": 2048, "matmul_precision": "tf32"}),
}
DEFAULT = ("muon:float32", "muon:float32+cpu", "muon:bfloat16", "muon:bfloat16+cpu", "muon:int8", "muon:int8+cpu")


def build(variant: str, model: nn.Module, lr: float = 1e-4) -> MatrixOptimizer:
    rule, _, rest = variant.partition(":")
    state_dtype, _, offload = rest.partition("+")
    cls, options = RULES[rule]
    where = {"offload_state": offload} if offload else {}
    optimizer: MatrixOptimizer = cls(  # type: ignore[operator]
        model, lr=lr, weight_decay=0.1, state_dtype=state_dtype or "float32", **options, **where
    )
    return optimizer


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(optimizer: MatrixOptimizer) -> dict[str, int]:
    """Bytes of this rank's state by kind of device."""
    found: dict[str, int] = {}
    for state in optimizer.state.values():
        for value in state.values():
            value = local(value)
            found[value.device.type] = found.get(value.device.type, 0) + value.nbytes
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def link(device: torch.device, nbytes: int = 2**28, repeats: int = 8) -> dict[str, float]:
    """GB/s between page-locked host memory and the device: to it, from it, and each of both at once."""
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def run(ways: tuple[int, ...]) -> float:
        wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    source, target = (hosts[0], there[0]) if way == 0 else (there[1], hosts[1])
                    target.copy_(source, non_blocking=True)
        wait(device)
        return repeats * nbytes / (time.perf_counter() - start) / 1e9

    run((0, 1))
    return {"to_device": run((0,)), "to_host": run((1,)), "each_of_both": run((0, 1))}


def busy(spans: list[tuple[float, float]]) -> float:
    """Milliseconds in which at least one of them, in microseconds, runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e3


def profiled(passes: Any, update: Any, device: torch.device) -> dict[str, float]:
    """Where the time of an optimizer's step goes, with a forward and backward pass before and after it.

    The host waits for the pass before, so that what comes then is of the step, or leaves behind the pass after it.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        passes()
        wait(device)
        with torch.profiler.record_function("update"):
            marks[0].record()
            update()
            marks[1].record()
        passes()
        wait(device)
    events = list(profile.events())
    took = marks[0].elapsed_time(marks[1])
    begin = next(e.time_range.start for e in events if e.name == "update" and e.device_type.name == "CPU")
    spans: dict[str, list[tuple[float, float]]] = {
        "to_device": [], "to_host": [], "kernels": [], "early_to_device": [], "meanwhile_to_device": []
    }  # fmt: skip
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        if event.device_type.name != "CUDA" or event.name == "update":
            continue
        if "HtoD" in event.name:
            spans["early_to_device"].append((min(start, begin), min(end, begin)))
            spans["meanwhile_to_device"].append(
                (min(max(start, begin), begin + 1e3 * took), min(max(end, begin), begin + 1e3 * took))
            )
        if start < begin:
            continue
        if "HtoD" in event.name or "DtoH" in event.name:
            spans["to_device" if "HtoD" in event.name else "to_host"].append((start, end))
        elif end < begin + 1e3 * took:
            spans["kernels"].append((start, end))
    return {"update_ms": took, **{f"{kind}_ms": busy(found) for kind, found in spans.items()}}


def timed(variant: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model = build_model(options.model, device)
    planned = None
    laid = lay_out(model, options.layout, device)
    adamw = variant == "adamw"
    optimizer: Any = (
        torch.optim.AdamW(laid.raw.parameters(), lr=1e-4, fused=True) if adamw else build(variant, laid.raw)
    )
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, vocabulary, (options.tokens // options.length, options.length), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def passes() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=laid.autocast):
            loss: Tensor = laid.model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        laid.model.zero_grad(set_to_none=True)

    def step() -> Tensor:
        loss = passes()
        if options.wait:
            wait(device)
        update()
        return loss

    def host_ahead() -> float:
        """Milliseconds from where the host has queued a backward pass to where the device is through with it."""
        for _ in range(2):
            step()
        passes()
        start = time.perf_counter()
        wait(device)
        found = 1e3 * (time.perf_counter() - start)
        update()
        return found

    for _ in range(max(options.warmup, refresh_schedule(optimizer)[0])):
        loss = step()
    runs = []
    for _ in range(options.runs):
        wait(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        wait(device)
        runs.append(1e3 * (time.perf_counter() - start) / options.steps)
    slowest = torch.tensor(runs, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    row: dict[str, Any] = {
        "variant": variant,
        "step_ms": statistics.median(slowest.tolist()),
        "runs_ms": slowest.tolist(),
        "loss": float(loss),
        "host_ahead_ms": host_ahead(),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }
    offload = None if adamw else optimizer.current_context().store.offload
    if offload is not None:  # before state is asked for, which brings all of it home
        row |= {
            "lent_bytes": offload.peak_bytes, "largest_piece": offload.largest_bytes, "left_bytes": offload.left_bytes,
            "ready_bytes": offload.ready_bytes, "left_now": offload.resident_bytes,
            "ahead": offload.fetched_ahead, "late": offload.fetched_late,
        }  # fmt: skip
        assert offload.peak_bytes <= budget_in_buckets() * offload.largest_bytes
        assert offload.resident_bytes <= offload.left_bytes <= offload.largest_bytes
    if options.profile and device.type == "cuda":
        row["profile"] = profiled(passes, update, device)
    if adamw:
        row["state_bytes"] = {device.type: sum(local(t).nbytes for s in optimizer.state.values() for t in s.values())}
        return row
    row["state_bytes"] = state_bytes(optimizer)
    if dist.get_world_size() == 1:
        figures = estimate(optimizer)
        planned = figures.matrix_state_bytes + figures.aux_state_bytes
        assert sum(row["state_bytes"].values()) == planned, (row["state_bytes"], planned)
        row["of_adamw"] = planned / figures.adamw_state_bytes
    row["planned_bytes"] = planned
    return row


def train(
    variant: str, options: argparse.Namespace, device: torch.device, resume_by: str | None = None
) -> list[Tensor]:
    """Weights after steps on gradients that depend on the step alone; the second half by another variant's optimizer."""
    sizes = MODELS[options.model]
    MODELS["_parity"] = {**sizes, "num_hidden_layers": 2, "vocab_size": min(4096, sizes.get("vocab_size", 32000))}
    laid = lay_out(build_model("_parity", device), options.layout, device)
    optimizer = build(variant, laid.raw, lr=1e-3)
    for index in range(options.parity_steps):
        if resume_by is not None and index == options.parity_steps // 2:
            state = optimizer.state_dict()
            optimizer = build(resume_by, laid.raw, lr=1e-3)
            optimizer.load_state_dict(state)
        generator = torch.Generator(device).manual_seed(index)
        for parameter in laid.raw.parameters():
            grad = torch.randn(local(parameter).shape, generator=generator, device=device)
            if isinstance(parameter, DTensor):
                grad = DTensor.from_local(
                    grad, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
                    stride=parameter.stride(),
                )  # fmt: skip
            parameter.grad = grad
        optimizer.step()
    wait(device)
    return [local(p).detach().clone() for p in laid.raw.parameters()]


def distance(a: list[Tensor], b: list[Tensor], start: list[Tensor]) -> float:
    """Of two runs, relative to how far the second one went."""
    apart = sum(float((x - y).double().square().sum()) for x, y in zip(a, b))
    gone = sum(float((y - z).double().square().sum()) for y, z in zip(b, start))
    return (apart / gone) ** 0.5  # type: ignore[no-any-return]


def parity(variants: list[str], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    known: dict[str, list[Tensor]] = {}
    nothing = argparse.Namespace(**{**vars(options), "parity_steps": 0})
    for variant in variants:
        home, _, offload = variant.partition("+")
        rule = home.partition(":")[0]
        for wanted in (home, f"{rule}:float32"):
            if wanted not in known:
                known[wanted] = train(wanted, options, device)
        if offload:
            same = all(torch.equal(a, b) for a, b in zip(train(variant, options, device), known[home]))
            there = train(variant, options, device, resume_by=home)
            back = train(home, options, device, resume_by=variant)
            resumed = all(torch.equal(a, b) for run in (there, back) for a, b in zip(run, known[home]))
            figures[variant] = {"bit_equal": same, "resumed_either_way_bit_equal": resumed}
            assert all(figures[variant].values()), (variant, figures[variant])
        else:
            figures[variant] = {
                "from_float32": distance(known[home], known[f"{rule}:float32"], train(home, nothing, device))
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["adamw", *DEFAULT], metavar="RULE:DTYPE[+cpu]")
    parser.add_argument("--model", choices=MODELS, default="llama-1.1b")
    parser.add_argument("--layout", choices=("single", "ddp", "fsdp2"), default="single")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank in a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run; of SOAP and Shampoo whole periods")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--parity-steps", type=int, default=20, help="0 leaves the comparison of weights out")
    parser.add_argument("--wait", action="store_true", help="the host waits for every backward pass")
    parser.add_argument("--profile", action="store_true", help="of one step: what the link and the kernels take")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with process_group() as device:

        def keep(**more: Any) -> None:
            """What there is so far: a run that is cut short keeps it."""
            if options.json is None or dist.get_rank() != 0:
                return
            card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
            facts = {
                **{k: str(v) for k, v in vars(options).items() if k != "json"},
                "torch": torch.__version__,
                "card": card,
            }
            options.json.write_text(json.dumps({"about": facts, "rows": rows, **more}, indent=1))

        for variant in options.variants:
            rows.append(timed(variant, options, device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
            keep()
        figures = parity([v for v in options.variants if v != "adamw"], options, device) if options.parity_steps else {}
        if dist.get_rank() == 0:
            steps = {row["variant"]: row["step_ms"] for row in rows}
            print(
                f"{'':22}{'step ms':>9}{'ratio':>7}{'device MiB':>12}{'host MiB':>10}{'left MiB':>10}{'ready MiB':>10}"
                f"{'lent MiB':>10}{'peak GiB':>10}"
            )
            for row in rows:
                base = steps.get(row["variant"].partition("+")[0], row["step_ms"])
                host = row["state_bytes"].get("cpu", 0) if device.type == "cuda" else 0
                print(
                    f"{row['variant']:22}{row['step_ms']:9.2f}{row['step_ms'] / base:7.3f}"
                    f"{row['state_bytes'].get(device.type, 0) / 2**20:12.1f}{host / 2**20:10.1f}"
                    f"{row.get('left_bytes', 0) / 2**20:10.1f}{row.get('ready_bytes', 0) / 2**20:10.1f}"
                    f"{row.get('lent_bytes', 0) / 2**20:10.1f}{row['peak_bytes'] / 2**30:10.2f}"
                )
                if "profile" in row:
                    print("  " + ", ".join(f"{name} {value:.1f}" for name, value in row["profile"].items()))
            rates = link(device) if device.type == "cuda" else {}
            if rates:
                print("link, GB/s: " + ", ".join(f"{name} {value:.1f}" for name, value in rates.items()))
            print("parity:", json.dumps(figures))
            keep(link=rates, parity=figures)


if __name__ == "__main__":
    main()
