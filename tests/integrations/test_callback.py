"""``EmoptCallback``: figures in every reporter's logs, nothing done on other steps, and the same weights."""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import World
from ranks import fresh_accelerate, make_trainer, tiny_llama, weights
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

import hf_emopt
from hf_emopt.integrations.registry import unwrap_optimizer

Q = "emopt/layers/model.layers.0.self_attn.q_proj.weight/"


class Operators(TorchDispatchMode):
    """Counts operators between the beginning of an optimizer step and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__")


@contextmanager
def reads() -> Iterator[Counter[str]]:
    """Counts what brings a tensor's value to the host."""
    found: Counter[str] = Counter()
    originals = {name: getattr(torch.Tensor, name) for name in READS}

    def counted(name: str) -> Any:
        def call(tensor: torch.Tensor, *args: Any) -> Any:
            found[name] += 1
            return originals[name](tensor, *args)

        return call

    try:
        for name in READS:
            setattr(torch.Tensor, name, counted(name))
        yield found
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


class Spy(TrainerCallback):
    """Operators and reads of every step, from its beginning to its end; first and last in the list of callbacks."""

    def __init__(self) -> None:
        self.steps: list[tuple[Counter[str], Counter[str]]] = []


class First(Spy):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.operators, self.reading = Operators(), reads()
        self.operators.__enter__()
        self.read = self.reading.__enter__()


class Last(Spy):
    def __init__(self, first: First) -> None:
        super().__init__()
        self.first = first

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.first.reading.__exit__(None, None, None)
        self.first.operators.__exit__(None, None, None)
        self.steps.append((self.first.operators.count, self.first.read))


def run(folder: Path, callbacks: list[Any], cls: str = "Trainer", **kwargs: Any) -> tuple[Any, list[Any]]:
    """A training and what each of its steps did."""
    with fresh_accelerate():
        trainer = make_trainer(str(folder), "one", 1, cls, **kwargs)
        for callback in callbacks:
            trainer.add_callback(callback)
        first = First()
        last = Last(first)
        trainer.callback_handler.callbacks.insert(0, first)
        trainer.callback_handler.callbacks.append(last)
        trainer.train()
    return trainer, last.steps


def step_logs(trainer: Any) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize("optim", ["muon", "soap"])
def test_only_logged_steps_are_measured_once_and_weights_stay(optim: str, tmp_path: Path) -> None:
    options = {"optim": optim, "optim_args": "aux_lr=5e-4", "max_steps": 4, "logging_steps": 2}
    if optim == "soap":
        run(tmp_path, [], **options)  # fills caches that later runs of the process have
    plain, without = run(tmp_path, [], **options)
    watched, measured = run(tmp_path, [hf_emopt.EmoptCallback("layers")], **options)
    for name, weight in weights(plain.model).items():
        assert weight.equal(weights(watched.model)[name])
    for step, ((there, before), (here, read)) in enumerate(zip(without, measured, strict=True), start=1):
        if step % 2:
            assert here == there
            assert read == before
        else:
            assert sum(here.values()) > sum(there.values())
            assert read - before == Counter(tolist=1)
    assert [Q + "update_rms" in entry for entry in step_logs(watched)] == [True, True]
    assert not any(key.startswith("emopt/") for entry in step_logs(plain) for key in entry)


def test_a_step_that_nobody_measures_calls_nothing_that_measures() -> None:
    """The price of diagnostics in a step without them."""
    model = tiny_llama()
    optimizer = hf_emopt.Muon(model, lr=1e-3)
    batch = torch.arange(1, 13).view(1, -1)

    def files_of_a_step() -> set[str]:
        model(input_ids=batch, labels=batch).loss.backward()
        called: set[str] = set()
        sys.setprofile(lambda frame, event, _: called.add(Path(frame.f_code.co_filename).name))
        optimizer.step()
        sys.setprofile(None)
        return called

    measuring = {"step_metrics.py", "stopwatch.py", "diagnostics.py"}
    assert not files_of_a_step() & measuring
    with optimizer.diagnostics():
        assert files_of_a_step() & measuring
    assert not files_of_a_step() & measuring


def test_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = run(tmp_path, [hf_emopt.EmoptCallback()], max_steps=1)
    (log,) = step_logs(trainer)
    assert log["emopt/muon/update_rms"] > 0.0
    assert log["emopt/adamw/weight_rms"] > 0.0
    assert not any(key.startswith("emopt/layers/") for key in log)
    monkeypatch.setenv("EMOPT_DIAGNOSTICS", "layers")
    trainer, _ = run(tmp_path, [], max_steps=1)
    (log,) = step_logs(trainer)
    assert log[Q + "effective_lr"] == pytest.approx(log["lr/matrix"] * 0.2 * math.sqrt(32), rel=1e-6)
    monkeypatch.setenv("EMOPT_DIAGNOSTICS", "everything")
    with pytest.raises(ValueError, match="EMOPT_DIAGNOSTICS='everything' is not one of summary, layers"):
        run(tmp_path, [], max_steps=1)
    with pytest.raises(ValueError, match="level='all' is not one of"):
        hf_emopt.EmoptCallback("all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "strategy"),
    [
        (
            "Trainer",
            {"logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 8},
        ),
        ("EmoptTrainer", {"logging_first_step": True, "logging_steps": 2, "max_steps": 2}),
    ],
    ids=["epoch", "first"],
)
def test_every_log_of_a_step_has_them(cls: str, strategy: dict[str, Any], tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, [hf_emopt.EmoptCallback()], cls, **strategy)
    logs = step_logs(trainer)
    assert len(logs) == 2
    assert all("emopt/muon/update_ratio" in log for log in logs)


def test_reporters_get_them(tmp_path: Path) -> None:
    """What comes to a callback after the default ones, where Trainer puts TensorBoard, W&B and trackio."""
    seen: list[dict[str, float]] = []

    class Reporter(TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            seen.append(dict(logs))

    with fresh_accelerate():
        trainer = make_trainer(str(tmp_path), "one", 1, max_steps=1)
        trainer.add_callback(Reporter())
        trainer.add_callback(hf_emopt.EmoptCallback("layers"))  # after the reporter, as Trainer's argument would
        trainer.train()
    assert Q + "orthogonality_error" in seen[0]
    assert all(isinstance(value, (int, float)) for value in seen[0].values())
    names = [type(c).__name__ for c in trainer.callback_handler.callbacks]
    assert names.index("DefaultCallback") < names.index("Reporter")


def test_tensorboard_files(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with fresh_accelerate():
        trainer = make_trainer(str(tmp_path), "one", 1, max_steps=1, report_to=["tensorboard"])
        trainer.add_callback(hf_emopt.EmoptCallback("layers"))
        trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    accumulator = events.EventAccumulator(str(folder))
    accumulator.Reload()
    (scalar,) = accumulator.Scalars(f"train/{Q}update_rms")
    assert scalar.value == pytest.approx(step_logs(trainer)[0][Q + "update_rms"], rel=1e-6)


def test_without_the_default_callback(tmp_path: Path) -> None:
    with fresh_accelerate():
        trainer = make_trainer(str(tmp_path), "one", 1, max_steps=1)
        trainer.remove_callback(hf_emopt.integrations.transformers.DefaultCallback)
        trainer.add_callback(hf_emopt.EmoptCallback("layers"))
        trainer.train()
    assert Q + "weight_rms" in step_logs(trainer)[0]


def test_another_optimizer_is_named(tmp_path: Path, messages: list[logging.LogRecord]) -> None:
    trainer, _ = run(tmp_path, [hf_emopt.EmoptCallback("layers")], optim="adamw_torch", optim_args=None, max_steps=1)
    assert any("EmoptCallback measures optimizers of hf_emopt" in r.getMessage() for r in messages)
    assert not any(key.startswith("emopt/") for entry in step_logs(trainer) for key in entry)


def test_a_second_callback_of_the_users_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fresh_accelerate():
        trainer = make_trainer(str(tmp_path), "one", 1)
        trainer.add_callback(hf_emopt.EmoptCallback("layers"))
    assert "already one" not in caplog.text


def test_skipped_steps(tmp_path: Path) -> None:
    class Poison(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 1:
                next(model.parameters()).grad.fill_(float("inf"))

    trainer, steps = run(tmp_path, [hf_emopt.EmoptCallback("layers"), Poison()], max_grad_norm=0.0, max_steps=3)
    logs = step_logs(trainer)
    assert [log["emopt/skipped_steps"] for log in logs] == [0, 1, 1]
    assert [log["emopt/muon/update_rms"] > 0.0 for log in logs] == [True, False, True]
    assert logs[1]["emopt/muon/effective_lr"] == 0.0
    assert "emopt/muon/orthogonality_error" not in logs[1]
    assert [log.get("skipped_steps") for log in logs] == [None, 1, 1]
    assert all(read["tolist"] == 1 for _, read in steps)


def distributed(folder: str, layout: str) -> list[dict[str, float]]:
    with fresh_accelerate(layout):
        trainer = make_trainer(folder, layout, 2, "EmoptTrainer", max_steps=2)
        trainer.add_callback(hf_emopt.EmoptCallback("layers"))
        trainer.train()
        return step_logs(trainer)


def test_the_first_of_two_ranks_logs(two: World, tmp_path: Path) -> None:
    first, second = two.run(distributed, folder=str(tmp_path), layout="ddp")
    one, _ = run(tmp_path, [hf_emopt.EmoptCallback("layers")], max_steps=2)
    for here, there in zip(first, step_logs(one), strict=True):
        for name in (Q + "update_rms", Q + "momentum_norm", "emopt/adamw/update_ratio", "emopt/muon/effective_lr"):
            assert here[name] == pytest.approx(there[name], rel=1e-3)
        assert here["emopt/exposed_communication_ms"] > 0.0
    assert not any(key.startswith("emopt/") for log in second for key in log)


def test_updates_that_are_put_off_are_not_waited_for(two: World, tmp_path: Path) -> None:
    """A measured step leaves the gather to the next forward, as every step does."""
    assert two.run(delayed) == [True, True]


def delayed() -> bool:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = hf_emopt.Muon(model, lr=1e-3, overlap_param_gather=True)
    model(torch.ones(2, 8)).sum().backward()
    with optimizer.diagnostics() as values:
        optimizer.step()
    waiting = len(optimizer._delayed) > 0
    optimizer.synchronize()
    return waiting and (torch.distributed.get_rank() > 0 or values["emopt/muon/update_rms"] > 0.0)


def test_unwrapping_for_a_loop_with_accelerate() -> None:
    with fresh_accelerate():
        accelerator = hf_emopt.Accelerator(cpu=True, kwargs_handlers=[hf_emopt.EmoptPlugin(optim="muon")])
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, accelerator.emopt_plugin.build(model))
        batch = torch.arange(1, 13).view(1, -1)
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        with optimizer.optimizer.diagnostics("summary") as values:
            optimizer.step()
    assert values["emopt/muon/update_rms"] > 0.0
    assert unwrap_optimizer(optimizer) is optimizer.optimizer
