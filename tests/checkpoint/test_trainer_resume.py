"""``Trainer`` and Accelerate: checkpoints of other layouts and of AdamW, and all that is kept of a run."""

from __future__ import annotations

import hashlib
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from harness import World, Worlds
from ranks import fresh_accelerate, make_accelerator, make_trainer, tiny_llama, train, weights, whole
from safetensors.torch import load_file
from saved_runs import digest
from torch import Tensor, nn
from zoo import assert_close

import hf_emopt
from hf_emopt.integrations import checkpoints
from hf_emopt.integrations.registry import unwrap_optimizer

SETTINGS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7, "lr_scheduler_type": "cosine"}
SOAP = {"optim": "soap", "optim_args": "transport_dtype=float32,aux_lr=5e-4,precondition_frequency=3"}


def go(worlds: Worlds, layout: str, ranks: int, folder: Path, **kwargs: Any) -> list[dict[str, Any]]:
    kwargs = {"folder": str(folder), "layout": layout, "world_size": ranks, **SETTINGS, **kwargs}
    return [train(**kwargs)] if ranks == 1 else worlds[ranks].run(train, **kwargs)


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (("one", 1), ("ddp", 2)),
        (("fsdp2", 2), ("one", 1)),
        (("fsdp2_sharded_checkpoint", 2), ("ddp", 2)),
        *(
            pytest.param(saver, loader, marks=pytest.mark.second_tier)
            for saver, loader in (
                (("ddp", 2), ("one", 1)),
                (("ddp", 2), ("fsdp2", 2)),
                (("fsdp2_sharded_checkpoint", 2), ("fsdp2_sharded_checkpoint", 4)),
                (("hsdp", 4), ("fsdp2", 4)),
            )
        ),
    ],
    ids=lambda run: f"{run[0]}{run[1]}",
)
def test_checkpoint_of_another_layout(
    worlds: Worlds, tmp_path: Path, saver: tuple[str, int], loader: tuple[str, int]
) -> None:
    """Muon in float64 would need a model of its own; in float32 two layouts differ by rounding alone."""
    first = go(worlds, *saver, tmp_path / "whole")
    resumed = go(worlds, *loader, tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    for run in resumed:
        assert_close(run["weights"], first[0]["weights"], 2e-5)
        assert len(run["logs"]) == len(first[0]["logs"]) == 7, "the log goes on where it was"


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_oldest_of_several_checkpoints(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    """``save_total_limit`` keeps three, whose states are not each other's."""
    first = go(worlds, layout, 2, tmp_path / "whole", save_steps=1, save_total_limit=3, **SOAP)
    kept = sorted(p.name for p in (tmp_path / "whole").glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6", "checkpoint-7"]
    resumed = go(worlds, layout, 2, tmp_path / "on", resume=str(tmp_path / "whole" / "checkpoint-5"), **SOAP)
    for a, b in zip(first, resumed, strict=True):
        assert [n for n in a["weights"] if not torch.equal(a["weights"][n], b["weights"][n])] == []


def best(folder: str, layout: str) -> dict[str, Any]:
    """Weights after a run that ends by loading its best checkpoint, and those that this checkpoint has."""
    with fresh_accelerate(layout):
        trainer = make_trainer(
            folder, layout, dist.get_world_size(), save_strategy="steps", save_steps=1,
            eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
            greater_is_better=True,  # so that it is not the last
        )  # fmt: skip
        trainer.train()
        chosen = trainer.state.best_model_checkpoint
        return {"weights": weights(trainer.model), "best": chosen, "last": trainer.state.global_step}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_best_model_is_loaded_on_all_ranks(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    results = worlds[2].run(best, folder=str(tmp_path), layout=layout)
    (chosen,) = {result["best"] for result in results}
    assert not chosen.endswith(f"-{results[0]['last']}")
    kept = load_file(Path(chosen) / "model.safetensors")
    for result in results:
        for name, value in result["weights"].items():
            assert torch.equal(value, kept[name]), name


# ---------------------------------------------------------------------------------------------- from AdamW


def adamw_checkpoint(folder: Path, layout: str = "one", worlds: Worlds | None = None, **kwargs: Any) -> Path:
    """A run of plain AdamW, saved at step 2."""
    settings = {"optim": "adamw_torch", "optim_args": None, "weight_decay": 0.1, **SETTINGS, **kwargs}
    if layout == "one":
        run_adamw(str(folder), layout, 1, settings)
    else:
        assert worlds is not None
        worlds[2].run(run_adamw, folder=str(folder), layout=layout, world_size=2, settings=settings)
    return folder / "checkpoint-2"


def run_adamw(folder: str, layout: str, world_size: int, settings: dict[str, Any]) -> None:
    with fresh_accelerate(layout):
        make_trainer(folder, layout, world_size, **settings).train()


def resumed_at(folder: str, layout: str, world_size: int, checkpoint: str) -> dict[str, Any]:
    """State by name right after a Trainer has loaded an AdamW checkpoint, and rates afterwards."""
    found: dict[str, Any] = {}
    with fresh_accelerate(layout), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(folder, layout, world_size, **{**SETTINGS, "save_strategy": "no"})
        load = trainer._load_optimizer_and_scheduler

        def loading(path: str) -> None:
            load(path)
            optimizer = unwrap_optimizer(trainer.optimizer)
            assert optimizer is not None
            for group in optimizer.param_groups:
                for name, p in zip(group["param_names"], group["params"]):
                    found[name] = (group["kind"], sorted(k for k, v in optimizer.state.get(p, {}).items() if v.numel()))
            found["rates"] = [group["lr"] for group in optimizer.param_groups]
            found["peaks"] = [group["initial_lr"] for group in optimizer.param_groups]
            optimizer.consolidate_state_dict(to=None)
            state = optimizer.state_dict()
            names = [n for g in optimizer.param_groups for n in g["param_names"]]
            found["state"] = {names[i]: {k: whole(v) for k, v in e.items()} for i, e in state["state"].items()}

        trainer._load_optimizer_and_scheduler = loading
        trainer.train(resume_from_checkpoint=checkpoint)
        found["warnings"] = [str(w.message) for w in caught if "AdamW" in str(w.message)]
        found["last"] = [g["lr"] for g in trainer.optimizer.param_groups]
    return found


@pytest.mark.parametrize(
    ("saver", "loader"), [("one", "one"), ("one", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "fsdp2"), ("fsdp2", "one")]
)
def test_trainer_goes_on_from_adamw(worlds: Worlds, tmp_path: Path, saver: str, loader: str) -> None:
    checkpoint = adamw_checkpoint(tmp_path / "adamw", saver, worlds)
    saved = next(p for p in (checkpoint / "optimizer.pt", checkpoint / "optimizer.bin") if p.exists())
    state = torch.load(saved, weights_only=True)
    kwargs = {"folder": str(tmp_path / "on"), "layout": loader, "checkpoint": str(checkpoint)}
    if loader == "one":
        results = [resumed_at(world_size=1, **kwargs)]
    else:
        results = worlds[2].run(resumed_at, world_size=2, **kwargs)
    moments = {tensor_hash(e["exp_avg"]): e for e in state["state"].values()}
    for found in results:
        (message,) = found["warnings"]
        kinds = {n: v[0] for n, v in found.items() if isinstance(v, tuple)}
        aux = [n for n, kind in kinds.items() if kind == "aux"]
        assert len(aux) == 7
        assert f"{len(kinds) - 7} matrices start with fresh muon state" in message
        assert "moments of 7 auxiliary" in message
        for name in aux:
            entry = found["state"][name]
            assert int(entry["step"]) == 2
            assert tensor_hash(entry["exp_avg"]) in moments, name
            assert torch.equal(entry["exp_avg_sq"], moments[tensor_hash(entry["exp_avg"])]["exp_avg_sq"])
        for name in set(kinds) - set(aux):
            entry = found["state"].get(name)
            assert entry is None or (int(entry["step"]) == 0 and not entry["momentum_buffer"].any())
        # Cosine from step 2 of 7: every group is as far from its own peak.
        for rate, peak in zip(found["rates"], found["peaks"], strict=True):
            assert rate == pytest.approx(peak * 0.5 * (1 + torch.cos(torch.tensor(2 / 7 * torch.pi)).item()), rel=1e-5)
        assert all(rate == pytest.approx(0.0, abs=1e-12) for rate in found["last"]), "all groups followed the schedule"


def tensor_hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layer, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embed(x))))


def trained_adamw(groups: Any, model: Net) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_names_of_adamw_state_come_from_groups_or_from_the_order() -> None:
    model = Net()
    wanted = None
    pairs = list(model.named_parameters())
    decayed = ["embed.weight", "layer.weight", "head.weight"]
    for groups in (
        [{"params": pairs[::-1]}],
        [p for _, p in pairs],
        [{"params": [p for n, p in pairs if n in decayed]}, {"params": [p for n, p in pairs if n not in decayed]}],
    ):
        model.zero_grad()
        torch.manual_seed(0)
        state = trained_adamw(groups, model)
        optimizer = hf_emopt.Muon(model, lr=0.5, muon_modules="layer")
        with pytest.warns(UserWarning, match=r"1 matrices start with fresh muon state.*of 5 auxiliary"):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert not optimizer.state.get(model.layer.weight)
        adam = torch.optim.AdamW(groups)
        adam.load_state_dict(state)
        for name, p in pairs:
            if name != "layer.weight":
                assert torch.equal(optimizer.state[p]["exp_avg"], adam.state[p]["exp_avg"]), name
        wanted = wanted or optimizer
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        assert int(optimizer.state[model.layer.bias]["step"]) == 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 1, 4), r"groups of \[1, 1, 4\] parameters and no param_names"), ((2,), r"groups of \[2\]")],
)
def test_adamw_state_without_names_that_cannot_be_told_apart_is_refused(sizes: Any, message: str) -> None:
    model = Net()
    parameters = iter(list(model.parameters()))
    groups = [{"params": [next(parameters) for _ in range(size)]} for size in sizes]
    state = trained_adamw(groups, model)
    optimizer = hf_emopt.Muon(model, muon_modules="layer")
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert not any(optimizer.state.values())


def test_adamw_state_in_another_order_is_refused() -> None:
    model = Net()
    state = trained_adamw(list(model.parameters())[::-1], model)
    with pytest.raises(ValueError, match=r"has shape .* in another order"):
        hf_emopt.Muon(model, muon_modules="layer").load_state_dict(state)


# ---------------------------------------------------------------------------------------------- Accelerate


def accelerate_run(folder: str, layout: str, load: bool, rule: str = "SOAP", plain: bool = False) -> dict[str, Any]:
    """``save_state`` after two steps and two more; or ``load_state`` and these two, from other weights."""
    with fresh_accelerate(layout):
        accelerator = make_accelerator(layout, plain=plain)
        model = tiny_llama()
        if load:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2.0)
        model, optimizer = accelerator.prepare(model, hf_emopt.EmoptPlugin(optim=rule, lr=1e-3).build(model))
        loaded = None
        if load:
            accelerator.load_state(folder)
            loaded = digest(weights(model))
        for step in range(2 if load else 0, 4):
            if step == 2 and not load:
                accelerator.save_state(folder, safe_serialization=not plain)
                loaded = digest(weights(model))
            batch = torch.randint(
                1, 64, (2, 8), generator=torch.Generator().manual_seed(step + accelerator.process_index)
            )
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        return {"loaded": loaded, "weights": weights(model)}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("rule", "plain"), [("muon", True), ("soap", True), ("soap", False)])
def test_accelerate_save_state_and_load_state(
    worlds: Worlds, tmp_path: Path, layout: str, rule: str, plain: bool
) -> None:
    options = {"folder": str(tmp_path / "s"), "layout": layout, "rule": rule, "plain": plain}
    first = worlds[2].run(accelerate_run, load=False, **options)
    again = worlds[2].run(accelerate_run, load=True, **options)
    assert len({r["loaded"] for r in first + again}) == 1, "hash of weights: saved, and loaded on each rank"
    for a, b in zip(first, again, strict=True):
        assert [n for n in a["weights"] if not torch.equal(a["weights"][n], b["weights"][n])] == []


def saved_in_part(folder: str) -> list[str]:
    """What a program is told that saves the state by hand, or has one process save it."""
    errors = []
    with fresh_accelerate("ddp"):
        accelerator = Accelerator(cpu=True)
        model = tiny_llama()
        model, optimizer = accelerator.prepare(model, hf_emopt.Muon(model))
        batch = torch.ones(2, 8, dtype=torch.int64)
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        with pytest.raises(RuntimeError) as error:
            optimizer.state_dict()
        errors.append(str(error.value))
        if accelerator.is_main_process:
            short = mock.patch.object(checkpoints, "PATIENCE", timedelta(seconds=0.1))
            with short, pytest.raises(RuntimeError) as error:
                accelerator.save_state(folder)
            errors.append(str(error.value))
        accelerator.wait_for_everyone()
    return errors


def test_state_of_owners_is_never_saved_in_part(two: World, tmp_path: Path) -> None:
    (by_hand, alone), (same,) = two.run(saved_in_part, folder=str(tmp_path / "s"))
    assert "call optimizer.consolidate_state_dict() on all ranks first" in by_hand == same
    assert "on rank 0 and, within 0:00:00.100000, not on all ranks" in alone
    assert not (tmp_path / "s").exists()
