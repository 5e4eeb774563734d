"""A run that is killed while it saves, many times, and each time goes on from the newest checkpoint that is whole."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_runs import digest
from torch import Tensor, nn

import hf_emopt
from hf_emopt.checkpoint.files import problem_with, read_optimizer_state

LAST = 10_000


class Tiny(nn.Module):
    """Two matrices; large enough that a save takes milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": (self.down(torch.tanh(self.up(x))) - x).square().mean()}


def trainer(folder: str, steps: int, pipe: Any = None) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            if pipe is not None:
                weights = {n: p.detach() for n, p in self.model.named_parameters()}
                pipe.send((self.state.global_step, digest(weights)))
            super()._save_checkpoint(*args, **kwargs)
            if pipe is not None:
                pipe.send(None)

    class Loaded(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if pipe is not None:
                pipe.send((state.global_step, digest({n: p.detach() for n, p in model.named_parameters()})))

    args = TrainingArguments(
        output_dir=folder, optim="soap", learning_rate=1e-2, max_steps=steps, per_device_train_batch_size=4,
        save_strategy="steps", save_steps=1, save_total_limit=4, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_strategy="no", lr_scheduler_type="constant", remove_unused_columns=False,
        optim_args="precondition_frequency=5",
    )  # fmt: skip
    data = [{"x": torch.randn(64, generator=torch.Generator().manual_seed(i))} for i in range(64)]
    return Saving(model=Tiny(), args=args, train_dataset=data, callbacks=[Loaded()])


def victim(folder: str, pipe: Any, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    trainer(folder, LAST, pipe).train(resume_from_checkpoint=hf_emopt.newest_checkpoint(folder))


def survivor(folder: str, steps: int, pipe: Any, path: list[str]) -> None:
    """A run without saves, in a process like the victims': sums of several threads come out in another order."""
    sys.path[:] = path
    torch.set_num_threads(1)
    alone = trainer(folder, steps)
    alone.args.save_strategy = "no"
    alone.train()
    pipe.send(digest({n: p.detach() for n, p in alone.model.named_parameters()}))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.second_tier)])
def test_killed_while_saving(tmp_path: Path, kills: int) -> None:
    """Earlier checkpoints stay whole, weights of a step are the same in every life, and what died is an error to load."""
    chance = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.trainer", "hf_emopt"])
    hashes: dict[int, str] = {}
    saved, died = 0, 0
    for _ in range(kills):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=victim, args=(str(tmp_path), theirs, list(sys.path)), daemon=True)
        process.start()
        theirs.close()
        start, loaded = ours.recv()
        assert start == saved, "goes on from the newest that is whole"
        if start:
            assert loaded == hashes[start], "with the weights that were saved"
        for _ in range(chance.randint(1, 3)):  # whole saves before the last one
            saved = record(ours, hashes)
            began = time.monotonic()
            assert ours.recv() is None
            took = time.monotonic() - began
        step = record(ours, hashes)
        time.sleep(chance.uniform(0.0, 1.1) * took)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        drain(ours, hashes)
        newest = hf_emopt.newest_checkpoint(tmp_path)
        assert newest is not None
        saved = int(newest.name.rpartition("-")[2])
        assert saved >= step - 1, "nothing that was whole is lost"
        for folder in tmp_path.glob("checkpoint-*"):
            if int(folder.name.rpartition("-")[2]) > saved:
                died += 1
                assert problem_with(folder) is not None
                state = folder / "optimizer.pt"
                if not (folder / "scheduler.pt").exists() and state.exists() and problem_with_file(state):
                    with pytest.raises(hf_emopt.CheckpointError, match=r"optimizer\.pt .*cannot be read"):
                        read_optimizer_state(folder)
    assert died > kills // 10, "some kills hit a save"
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=survivor, args=(str(tmp_path / "alone"), saved, theirs, list(sys.path)), daemon=True
    )
    process.start()
    theirs.close()
    assert ours.recv() == hashes[saved], "as if never killed"
    process.join()


def problem_with_file(path: Path) -> bool:
    import zipfile

    return not zipfile.is_zipfile(path)


def drain(pipe: Any, hashes: dict[int, str]) -> None:
    """What it had still said: it may have got as far as later saves."""
    try:
        while pipe.poll(0):
            message = pipe.recv()
            if message is not None:
                assert hashes.setdefault(*message) == message[1]
    except (EOFError, OSError):
        pass


def record(pipe: Any, hashes: dict[int, str]) -> int:
    """The step that a save begins at; its weights are those of every earlier life."""
    message = pipe.recv()
    while message is None:
        message = pipe.recv()
    step, value = message
    assert hashes.setdefault(step, value) == value
    return int(step)
