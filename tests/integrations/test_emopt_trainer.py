"""EmoptTrainer and its mixin: in one process what they add, on several ranks the same weights as one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Worlds
from ranks import (
    MATRICES,
    accelerate_refusal,
    accelerate_steps,
    distributed_accelerate_steps,
    fresh_accelerate,
    make_trainer,
    mesh_of_context_parallel,
    poisoned,
    refusal,
    train,
    trainer_class,
)
from transformers import Trainer, TrainerCallback, trainer
from transformers.training_args import ParallelMode

import hf_emopt
from hf_emopt.integrations import checkpoints
from hf_emopt.integrations.patching import MARK
from hf_emopt.integrations.registry import unwrap_optimizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- one process


def test_hooks_are_in_every_trainer_once() -> None:
    for name in (*checkpoints.SYNCHRONIZED, *checkpoints.CONSOLIDATED):
        original = getattr(getattr(Trainer, name), MARK)
        assert not hasattr(original, MARK), name
    hf_emopt.register()
    for name in (*checkpoints.SYNCHRONIZED, *checkpoints.CONSOLIDATED):
        assert getattr(Trainer, name).__wrapped__ is getattr(getattr(Trainer, name), MARK)


@pytest.mark.parametrize("name", ["Trainer", "EmoptTrainer", "SFT"])
def test_parameters_are_current_and_state_is_whole_when_they_are_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def noting(what: str, function: Any, when: Any = lambda *_: True) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                made.append(what)
            return function(*args, **kwargs)

        return noted

    class Steps(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            made.append("step")

    with fresh_accelerate():
        made_trainer = make_trainer(
            str(tmp_path), "one", 1, name, max_steps=2, save_strategy="steps", save_steps=2, eval_strategy="steps",
            eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        )  # fmt: skip
        optimizer = unwrap_optimizer(made_trainer.create_optimizer())
        monkeypatch.setattr(optimizer, "synchronize", lambda: made.append("synchronize"))
        monkeypatch.setattr(optimizer, "consolidate_state_dict", lambda to=0: made.append(f"consolidate {to}"))
        monkeypatch.setattr(made_trainer, "evaluation_loop", noting("evaluate", made_trainer.evaluation_loop))
        monkeypatch.setattr(made_trainer, "_save", noting("save model", made_trainer._save))
        monkeypatch.setattr(
            torch, "save", noting("save optimizer", torch.save, lambda _, path: "optimizer.pt" in str(path))
        )
        library = trainer.safetensors.torch
        monkeypatch.setattr(library, "load_file", noting("load best", library.load_file))
        made_trainer.add_callback(Steps)
        made_trainer.train()
    actions = [entry for entry in made if " 0" not in entry and entry != "synchronize"]
    assert actions == ["step", "evaluate", "step", "evaluate", "save model", "save optimizer", "load best"]
    since: set[str] = set()
    for entry in made:
        if entry in actions:
            assert entry == "step" or ("consolidate 0" if entry == "save optimizer" else "synchronize") in since, (
                entry,
                made,
            )
            since = set()
        else:
            since.add(entry)
    assert "synchronize" in since  # and at the end of training


@pytest.mark.parametrize("name", ["Trainer", "EmoptTrainer"])
def test_logs_hold_rates_of_every_kind_of_group_and_skipped_steps(name: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class First(TrainerCallback):
        def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
            seen.append(dict(logs))

    class Poison(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 1:
                next(model.parameters()).grad.fill_(float("inf"))

    with fresh_accelerate():
        trainer = make_trainer(str(tmp_path), "one", 1, name, max_grad_norm=0.0, max_steps=3)
        trainer.callback_handler.callbacks.insert(0, First())
        trainer.add_callback(Poison)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry.get("skipped_steps") for entry in logs] == [None, 1, 1]
    for entry in logs:
        assert entry["lr/matrix"] == entry["learning_rate"]
        assert entry["lr/aux"] == pytest.approx(0.25 * entry["learning_rate"], rel=1e-9)
    # A plain Trainer tells the callbacks that come after DefaultCallback, an EmoptTrainer all.
    assert all(("lr/aux" in entry) == (name == "EmoptTrainer") for entry in seen if "learning_rate" in entry)


def test_plan_is_shown_at_the_start(tmp_path: Path, messages: list[logging.LogRecord]) -> None:
    for cls, shown in (("Trainer", 1), ("EmoptTrainer", 2)):
        messages.clear()
        with fresh_accelerate():
            make_trainer(str(tmp_path), "one", 1, cls, max_steps=1).train()
        texts = [r.getMessage() for r in messages if r.levelno >= logging.WARNING]
        assert len(texts) == shown
        assert any("groups:" in text and "q_proj" in text for text in texts) == (shown == 2)


def test_other_optimizers_train_as_they_do_and_are_named(tmp_path: Path, messages: list[logging.LogRecord]) -> None:
    with fresh_accelerate():
        trainer = make_trainer(
            str(tmp_path), "one", 1, "EmoptTrainer", optim="adamw_torch", optim_args=None, max_steps=1
        )
        trainer.train()
    assert any("EmoptTrainer trains with optim='adamw_torch'" in r.getMessage() for r in messages)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
    assert not any("lr/matrix" in entry for entry in trainer.state.log_history)


def test_mixin_alone_is_a_mistake() -> None:
    class Lonely(hf_emopt.EmoptTrainerMixin):
        pass

    with pytest.raises(TypeError, match=r"Lonely must also derive from transformers\.Trainer"):
        Lonely()


class Reader(TrainerCallback):
    """A callback that might read parameters."""


@pytest.mark.parametrize(
    ("change", "applies"),
    [
        ({}, True),
        ({"local": 2}, False),
        ({"local": None}, False),
        ({"world_size": 1}, False),
        ({"parallel_mode": ParallelMode.NOT_DISTRIBUTED}, False),
        ({"torch_compile": True}, False),
        ({"use_vllm": True}, False),
        ({"is_fsdp_enabled": True}, False),
        ({"callback": Reader()}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_overlap_is_on_between_nodes_where_nothing_reads_parameters_in_between(
    change: dict[str, Any], applies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    local = change.get("local", 1)  # ranks of a node, if the launcher says so
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    trainer: Any = object.__new__(hf_emopt.EmoptTrainer)
    settings = {"world_size": 2, "parallel_mode": ParallelMode.DISTRIBUTED, "torch_compile": False}
    trainer.args = SimpleNamespace(**{**settings, **change})
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = change.get("is_fsdp_enabled", False), False
    known = [cls() for cls in (hf_emopt.integrations.transformers.DefaultCallback, *trainer_defaults())]
    trainer.callback_handler = SimpleNamespace(
        callbacks=[*known, *([change["callback"]] if "callback" in change else [])]
    )
    assert trainer.overlap_applies() is applies


def trainer_defaults() -> list[type]:
    return [trainer.DefaultFlowCallback, trainer.PrinterCallback]


@pytest.mark.parametrize(("text", "expected"), [("", False), (",overlap_param_gather=true", True)])
def test_overlap_is_the_users_to_choose(text: str, expected: bool, tmp_path: Path) -> None:
    with fresh_accelerate():
        made = make_trainer(str(tmp_path), "one", 1, "EmoptTrainer", optim_args=f"ns_steps=4{text}")
        optimizer = unwrap_optimizer(made.create_optimizer())
        assert optimizer is not None
        assert optimizer.overlap_param_gather is expected  # one process: off unless asked for
        assert made.optimizer_cls_and_kwargs is None
        assert unwrap_optimizer(made.create_optimizer()) is optimizer


# ---------------------------------------------------------------------------------------------- several ranks

pytestmark = pytest.mark.timeout(400)  # a case has 120 s of its own, see the harness


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        difference = (a[name] - b[name]).abs().max() / b[name].abs().max()
        assert difference <= tolerance, f"{name}: {difference:.2e}"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training in one process, on the global batch."""
    return train(str(tmp_path_factory.mktemp("single")), "one", 1, eval_strategy="steps", eval_steps=2)


@pytest.mark.parametrize(
    ("layout", "world_size", "name", "nodes"),
    [
        ("ddp", 2, "Trainer", 1),
        ("ddp", 2, "EmoptTrainer", 1),
        ("ddp", 2, "EmoptTrainer", 2),
        ("fsdp2", 2, "Trainer", 1),
        ("fsdp2", 2, "EmoptTrainer", 2),
        ("hsdp", 4, "Trainer", 1),
    ],
)
def test_ranks_end_with_the_weights_of_one_process(
    layout: str, world_size: int, name: str, nodes: int, single: dict[str, Any], worlds: Worlds, tmp_path: Path
) -> None:
    runs = worlds[world_size].run(
        train,
        folder=str(tmp_path),
        layout=layout,
        world_size=world_size,
        trainer=name,
        nodes=nodes,
        eval_strategy="steps",
        eval_steps=2,
    )
    for run in runs:
        close(run["weights"], single["weights"])
        assert all(torch.equal(run["weights"][n], runs[0]["weights"][n]) for n in run["weights"])
        assert run["evaluations"] == pytest.approx(single["evaluations"], rel=1e-5)
    assert sum(run["transforms"] for run in runs) == single["transforms"] == 4 * MATRICES
    assert all(run["transforms"] < single["transforms"] for run in runs)
    assert sum(run["momentum_bytes"] for run in runs) == single["momentum_bytes"] * (2 if layout == "hsdp" else 1)
    for mine, theirs in zip(runs[0]["logs"], single["logs"], strict=True):
        for key in ("loss", "grad_norm", "learning_rate", "lr/matrix", "lr/aux"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4), key
    assert runs[0]["overlap"] is (layout == "ddp" and name == "EmoptTrainer" and nodes > 1)


@pytest.mark.parametrize(
    ("layout", "name", "optim"),
    [
        ("ddp", "Trainer", "muon"),
        ("ddp", "EmoptTrainer", "soap"),
        ("fsdp2", "Trainer", "soap"),
        ("fsdp2_sharded_checkpoint", "Trainer", "muon"),
    ],
)
def test_resumed_training_equals_an_uninterrupted_one(
    layout: str, name: str, optim: str, worlds: Worlds, tmp_path: Path
) -> None:
    world = worlds[2]
    settings: dict[str, Any] = {
        "layout": layout, "world_size": 2, "trainer": name, "optim": optim, "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    if optim == "soap":
        settings["optim_args"] = "transport_dtype=float32,aux_lr=5e-4"
    whole = world.run(train, folder=str(tmp_path / "whole"), **settings)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = world.run(train, folder=str(tmp_path / "resumed"), resume=checkpoint, **settings)
    for a, b in zip(whole, resumed, strict=True):
        assert all(torch.equal(a["weights"][n], b["weights"][n]) for n in a["weights"])
    if layout == "ddp":  # a file of the whole state, so that any number of processes can go on with it
        saved = torch.load(Path(checkpoint) / "optimizer.pt", weights_only=True)
        assert len(saved["state"]) == len(whole[0]["weights"])
        for entry in saved["state"].values():
            assert {key.split(".")[0] for key in entry} & {"momentum_buffer", "exp_avg"}, entry.keys()
        if optim == "muon":
            alone = train(str(tmp_path / "alone"), "one", 1, resume=checkpoint, save_strategy="no")
            close(alone["weights"], whole[0]["weights"])


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(worlds: Worlds, tmp_path: Path) -> None:
    for logs in worlds[2].run(poisoned, folder=str(tmp_path), world_size=2):
        assert [entry.get("skipped_steps") for entry in logs] == [None, 1, 1, 1]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_sft_trainer_with_the_mixin(layout: str, worlds: Worlds, tmp_path: Path) -> None:
    alone = train(str(tmp_path / "alone"), "one", 1, trainer="SFT")
    runs = worlds[2].run(train, folder=str(tmp_path / "two"), layout=layout, world_size=2, trainer="SFT")
    assert issubclass(trainer_class("SFT"), hf_emopt.EmoptTrainerMixin)
    for run in runs:
        close(run["weights"], alone["weights"])
    assert sum(run["transforms"] for run in runs) == 4 * MATRICES


def test_fsdp1_is_refused_on_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    for name in ("Trainer", "EmoptTrainer"):
        for stage, message in worlds[2].run(refusal, folder=str(tmp_path), layout="fsdp1", world_size=2, trainer=name):
            assert stage == "making", "before the model is wrapped"
            assert message.startswith("ValueError: optim='muon' cannot run under FSDP1")
            assert "Use FSDP2" in message
    for message in worlds[2].run(accelerate_refusal, layout="fsdp1"):
        assert message.startswith("EmoptPlugin(optim='muon') cannot run under FSDP1")


# ---------------------------------------------------------------------------------------------- Accelerate


@pytest.fixture(scope="module")
def loop() -> dict[str, Any]:
    """Four steps of a loop in one process."""
    return accelerate_steps("one", 0, 1, steps=range(4), transport_dtype="float32")


@pytest.mark.parametrize(
    ("layout", "world_size", "overlap"), [("ddp", 2, False), ("ddp", 2, True), ("fsdp2", 2, False), ("hsdp", 4, False)]
)
def test_accelerate_loop_saved_and_loaded_ends_as_one_process(
    layout: str, world_size: int, overlap: bool, loop: dict[str, Any], worlds: Worlds, tmp_path: Path
) -> None:
    common: dict[str, Any] = {
        "layout": layout, "world_size": world_size, "transport_dtype": "float32", "overlap_param_gather": overlap,
    }  # fmt: skip
    folder = str(tmp_path / "state")
    world = worlds[world_size]
    whole = world.run(distributed_accelerate_steps, steps=range(4), **common)
    world.run(distributed_accelerate_steps, steps=range(2), save=folder, **common)
    resumed = world.run(distributed_accelerate_steps, steps=range(2, 4), load=folder, **common)
    for first, second in zip(whole, resumed, strict=True):
        close(first["weights"], loop["weights"])
        assert all(torch.equal(first["weights"][n], second["weights"][n]) for n in first["weights"])
    state = {name.removeprefix("module."): value for name, value in whole[0]["state"].items()}
    assert all(torch.equal(state[n], whole[0]["weights"][n]) for n in state)
    assert sum(run["transforms"] for run in whole) == 4 * MATRICES


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True},
        pytest.param({"compiled": True}, marks=pytest.mark.second_tier),
        {"checkpointed": True},
        {"gradient_checkpointing": True},
        pytest.param({"compiled": True, "checkpointed": True, "tied": True}, marks=pytest.mark.second_tier),
    ],
    ids=lambda o: "+".join(o) or "plain",
)
def test_every_parameter_moves_after_fsdp2_has_replaced_it(options: dict[str, bool], worlds: Worlds) -> None:
    """Wrappers rename modules and put new Parameters into the optimizer's groups; routes go by name and survive."""
    alone = accelerate_steps("one", 0, 1, steps=range(1), tied=options.get("tied", False))
    runs = worlds[2].run(
        distributed_accelerate_steps, layout="fsdp2", world_size=2, steps=range(1), transport_dtype="float32", **options
    )
    for run in runs:
        assert run["weights"].keys() == run["before"].keys() == alone["weights"].keys()
        assert [n for n in run["before"] if torch.equal(run["before"][n], run["weights"][n])] == []
        close(run["weights"], alone["weights"])
        assert run["kinds"] == alone["kinds"]
    assert sum(run["transforms"] for run in runs) == alone["transforms"] == MATRICES


def test_mesh_dimensions_mean_what_placements_say(worlds: Worlds) -> None:
    """A data and a context dimension made one are a shard dimension, not replicas of shards."""
    runs = worlds[2].run(mesh_of_context_parallel, world_size=2)
    assert sum(run["flat"]["transforms"] for run in runs) == 2
    assert sum(run["replicate and shard"]["transforms"] for run in runs) == 2
    for run in runs:
        close(run["flat"]["weights"], run["replicate and shard"]["weights"])
