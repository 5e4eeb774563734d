"""Milliseconds of a training step and of its optimizer on the ranks of this process group.

Random tokens, float32 weights, bfloat16 compute, a new model for each optimizer. Times are medians over steps of the slowest
rank: ``step`` of whole steps that follow each other without a wait, as in training, and ``optimizer`` of ``step()`` alone,
between two synchronizations, in other steps. ``exposed`` is ``step`` less a step without an optimizer. Memory is that of the
rank with most: ``peak_gib`` allocated, ``reserved_gib`` with the reserve of the allocator and graphs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_emopt.distributed.layout import local_tensor
from hf_emopt.engine.context import StepContext
from hf_emopt.kernels import cuda_graphs
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.tools.bench.step_models import Laid, build_model, lay_out
from hf_emopt.tools.bench.timeline import timeline

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        model: a key of :data:`~hf_emopt.tools.bench.step_models.MODELS`, or a configuration.
        tokens: of a rank in a step, a multiple of ``length``: of a sequence.
        steps, warmup: steps that are measured and left out before; more where refreshes make periods.
        replicas, tp_size: of the layouts ``"hsdp"`` and ``"fsdp2+tp"``.
        options: keyword arguments for this package's optimizers, over the makers' own.
        environment: variables that are set while the optimizer is built and stepped.
    """

    model: str = "llama-1.1b"
    layout: str = "fsdp2"
    tokens: int = 8192
    length: int = 2048
    steps: int = 10
    warmup: int = 4
    replicas: int = 2
    tp_size: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.length < 2 or self.tokens < self.length:
            raise ValueError(
                f"{self.tokens} tokens a rank are no whole sequence of {self.length}: more tokens, or shorter ones"
            )
        if self.tokens % self.length:
            fewer = self.tokens - self.tokens % self.length
            raise ValueError(
                f"{self.tokens} tokens a rank are no whole number of sequences of {self.length}, so some would be counted "
                f"and not trained: {fewer} or {fewer + self.length} tokens are"
            )
        if self.steps < 1 or self.warmup < 1:
            raise ValueError(f"steps={self.steps} and warmup={self.warmup} must be at least 1")


Maker = Callable[[nn.Module, Settings], torch.optim.Optimizer]
"""Builds an optimizer of a module that has been laid out."""


class TransformCountError(RuntimeError):
    """Matrices were left out of a step, or transformed twice."""


class Unavailable(RuntimeError):
    """An optimizer cannot be had here: its package is not installed, or it does not know the layout."""


@contextlib.contextmanager
def process_group() -> Iterator[torch.device]:
    """The process group of ``torchrun``'s ranks, or of this process alone; gives the rank's device."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    for key, value in alone.items():
        os.environ.setdefault(key, value)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Clock:
    """Times between synchronizations and barriers, or between marks on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self, barrier: bool = False) -> float:
        self.wait()
        if barrier and dist.get_world_size() > 1:
            dist.barrier()
        return time.perf_counter()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event | float:
        """A mark of the moment at which the device has done the work queued so far; does not wait."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
        """Milliseconds between two marks, when the device has passed both."""
        if isinstance(first, float) or isinstance(second, float):
            return 1e3 * (float(second) - float(first))  # type: ignore[arg-type]
        return first.elapsed_time(second)


def measure_all(
    names: Sequence[str], makers: Mapping[str, Maker], settings: Settings, device: torch.device
) -> list[Row]:
    """A row for each name, ``"none"`` being a step without an optimizer. What fails has ``error`` in place of figures."""
    return [attempt(name, makers.get(name), settings, device) for name in names]


def attempt(
    name: str, maker: Maker | None, settings: Settings, device: torch.device, label: str = "", unlike: str | None = None
) -> Row:
    """:func:`measure`; where it fails the row says why. ``label`` is printed after the name when it is done."""
    try:
        row = measure(name, maker, settings, device, unlike)
    except Unavailable as error:
        row = {"optimizer_name": name, "unavailable": str(error)}
    except Exception as error:
        row = {"optimizer_name": name, "error": f"{type(error).__name__}: {error}"}
    clean(device)
    if dist.get_rank() == 0:
        result = row.get("error") or row.get("unavailable") or "done"
        print(f"{name}{', ' if label else ''}{label}: {result}", flush=True)
    return row


def clean(device: torch.device) -> None:
    """Frees the memory of the last measurement."""
    gc.collect()
    cuda_graphs.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {key: os.environ[key] for key in environment if key in os.environ}
    os.environ.update(environment)
    try:
        yield
    finally:
        for key in environment:
            os.environ.pop(key, None)
        os.environ.update(before)


def measure(name: str, maker: Maker | None, settings: Settings, device: torch.device, unlike: str | None = None) -> Row:
    """Figures of one optimizer, or with ``None`` of a step without one; see the module.

    Args:
        unlike: a row's ``plan``, which is not measured again: only noise would differ.

    Raises:
        TransformCountError: when not every matrix was transformed exactly once a step.
        Unavailable: when the plan is ``unlike``.
    """
    with _set(settings.environment):
        run = _Run(maker, settings, device)
        optimizer = run.optimizer
        if isinstance(optimizer, MatrixOptimizer) and unlike and _plan_of(optimizer.current_context()) == unlike:
            raise Unavailable("makes the same plan")
        times, loss = run.times()
        figures: Row = {"optimizer_name": name, "loss": loss}
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.synchronize()
            figures |= check_transforms(optimizer, run.warmup + 1 + 2 * run.steps, device)
        if optimizer is not None:
            figures["state_gib"] = _largest(_state_bytes(optimizer), device) / 2**30
    return figures | summary(times, settings.tokens * run.laid.data_ranks, device, run.scheduled)


def add_profiles(
    rows: Sequence[Row], maker_of: Callable[[str], Maker | None], settings: Settings, device: torch.device
) -> None:
    """Adds ``profile`` to the rows of measured optimizers, or ``profile_error``: the time of a step by kernel and operator.

    Call it after all measurements: a process that has profiled launches kernels more slowly ever after.
    """
    for row in rows:
        maker = maker_of(row["optimizer_name"])
        if maker is None or "step" not in row:
            continue
        try:
            with _set(settings.environment):
                row["profile"] = _Run(maker, settings, device).profile()
        except Exception as error:  # the measured figures stay
            row["profile_error"] = f"{type(error).__name__}: {error}"
        clean(device)


def counted(row: Row) -> float:
    """The milliseconds of a step by which it counts: the median, or where a schedule makes steps differ the mean."""
    return float(row["step_mean" if row.get("scheduled") else "step"])


def reason(row: Row) -> str:
    """Why a row without figures has none, in one line."""
    return str(row.get("unavailable") or row.get("error", "")).splitlines()[0]


def refresh_schedule(optimizer: torch.optim.Optimizer | None) -> tuple[int, int]:
    """Steps before which factors have not been refreshed once, and the steps of a period; ``(0, 1)`` without a schedule."""
    groups = [] if optimizer is None else optimizer.param_groups
    first = max((int(group.get("start_preconditioning_step") or 0) for group in groups), default=0)
    return first, max((int(group.get("precondition_frequency") or 1) for group in groups), default=1)


def summary(times: Mapping[str, list[float]], tokens: int, device: torch.device, scheduled: bool = False) -> Row:
    """Medians, means, maxima and all of this rank's milliseconds by kind, as of the slowest rank; a collective.

    ``tokens`` are those of all ranks in a step. With ``scheduled`` steps differ, and times are of whole periods.
    """
    figures: Row = {"scheduled": True} if scheduled else {}
    slowest = torch.tensor(list(times.values()), device=device)
    means = slowest.mean(dim=1)
    for values in (slowest, means):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    for key, row, mean in zip(times, slowest.tolist(), means.tolist()):
        figures[key] = statistics.median(row)
        figures[f"{key}_all"] = [round(t, 3) for t in row]
        # Ranks begin a whole step where they ended the one before: the delay of one lengthens two intervals.
        figures[f"{key}_mean"] = mean if key == "step" else statistics.fmean(row)
        figures[f"{key}_max"] = max(row)
    figures["tokens_per_second"] = tokens / counted(figures) * 1e3
    if device.type == "cuda":
        figures["peak_gib"] = _largest(torch.cuda.max_memory_allocated(), device) / 2**30
        figures["reserved_gib"] = _largest(torch.cuda.max_memory_reserved(), device) / 2**30
    return figures


class _Run:
    """Steps of one model with one optimizer."""

    def __init__(self, maker: Maker | None, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        model = build_model(settings.model, device, settings.trust_remote_code)
        self.laid: Laid = lay_out(model, settings.layout, device, settings.replicas, settings.tp_size)
        self.optimizer = None if maker is None else maker(self.laid.raw, settings)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        config: Any = self.laid.raw.config
        shape = (settings.tokens // settings.length, settings.length)
        self.ids = torch.randint(0, int(config.vocab_size), shape, device=device)
        self.clock = Clock(device)
        first, period = refresh_schedule(self.optimizer)
        self.scheduled = period > 1
        # Refreshes differ in how many sides they are of, and the second of a kind is recorded as a graph.
        self.warmup = max(settings.warmup, first) + (2 * period if self.scheduled else 0)
        self.steps = -(-settings.steps // period) * period

    def forward(self) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.laid.autocast):
            loss: Tensor = self.laid.model(input_ids=self.ids, labels=self.ids).loss
        return loss

    def step(self) -> None:
        """A whole step, without a wait for the device."""
        self.forward().backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.laid.model.zero_grad(set_to_none=True)

    def times(self) -> tuple[dict[str, list[float]], float]:
        """Milliseconds of this rank by kind, and the last loss. Whole steps come first, then those cut in two."""
        for _ in range(self.warmup):
            self.step()
        whole = self.running()
        forward_backward, optimizer, loss = self.apart()
        return {"step": whole, "optimizer": optimizer, "forward_backward": forward_backward}, loss

    def running(self) -> list[float]:
        """Milliseconds from the end of each step to the end of the next."""
        clock = self.clock
        clock.now(barrier=True)
        self.step()
        marks = [clock.mark()]
        for _ in range(self.steps):
            self.step()
            marks.append(clock.mark())
        clock.wait()
        return [clock.between(a, b) for a, b in itertools.pairwise(marks)]

    def apart(self) -> tuple[list[float], list[float], float]:
        """Milliseconds of forward and backward passes, and of the optimizer's steps, each waited for; and the last loss."""
        clock = self.clock
        passes, steps = [], []
        for _ in range(self.steps):
            start = clock.now(barrier=True)
            loss = self.forward()
            loss.backward()
            middle = clock.now(barrier=True)
            if self.optimizer is not None:
                self.optimizer.step()
            end = clock.now()
            self.laid.model.zero_grad(set_to_none=True)
            passes.append(1e3 * (middle - start))
            steps.append(1e3 * (end - middle))
        return passes, steps, float(loss.detach())

    def profile(self) -> str:
        assert self.optimizer is not None
        for _ in range(self.warmup):
            self.step()
        self.forward().backward()
        self.clock.now(barrier=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as trace:
            self.optimizer.step()
            self.clock.wait()
        host = trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60)
        return f"{timeline(trace)}\n{host}"


def check_transforms(optimizer: MatrixOptimizer, steps: int, device: torch.device) -> Row:
    """Counts of all ranks, which must be those of every matrix in every step."""
    count = torch.tensor([optimizer.transform_count], device=device)
    dist.all_reduce(count)
    wanted = steps * sum(unit.shape[0] for route in optimizer.routes.matrices for unit in route.matrix_views)
    if int(count) != wanted:
        raise TransformCountError(f"{int(count)} matrices were transformed in {steps} steps, {wanted} were to be")
    if optimizer.skipped_steps:
        raise TransformCountError(f"{optimizer.skipped_steps} steps were skipped: a gradient was not finite")
    context = optimizer.context  # that of the last step: between steps DeepSpeed's parameters are flat and make no plan
    assert context is not None
    return {"transforms": int(count), "imbalance": context.plan.imbalance, "plan": _plan_of(context)}


def _plan_of(context: StepContext) -> str:
    """Equal for plans with the same buckets and owners, of matrices and of copies of other parameters."""
    return f"{context.plan.digest()[:16]} {context.aux_plan.digest()[:16]}"


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state on this rank, counters on the host included."""
    parts = getattr(optimizer, "parts", (optimizer,))
    leaves = tree_leaves([entry for part in parts for entry in part.state.values()])
    return sum(local_tensor(leaf).nbytes for leaf in leaves if isinstance(leaf, Tensor))


def _largest(value: int, device: torch.device) -> int:
    tensor = torch.tensor([value], device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)
