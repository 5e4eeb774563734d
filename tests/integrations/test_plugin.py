"""EmoptPlugin: where each field comes from, what a bad one says, and what an accelerator does with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from ranks import accelerate_steps, fresh_accelerate, samples, tiny_llama
from torch import nn
from transformers import Trainer, TrainingArguments

import hf_emopt
from hf_emopt.integrations.accelerate import overruled_environment
from hf_emopt.integrations.registry import unwrap_optimizer


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OPTIM", "LR", "AUX_LR", "WEIGHT_DECAY", "TRANSPORT_DTYPE", "OVERLAP_PARAM_GATHER", "OPTIM_ARGS"):
        monkeypatch.delenv(f"EMOPT_{name}", raising=False)
    with fresh_accelerate():
        yield


FIELDS: list[tuple[str, Any, str, Any, Any]] = [
    # field, given, in the environment, what the environment means, default
    ("optim", "soap", "normuon", "normuon", "muon"),
    ("lr", 0.5, "1e-3", 1e-3, None),
    ("aux_lr", 0.5, "2e-3", 2e-3, None),
    ("weight_decay", 0.5, "0", 0.0, None),
    ("transport_dtype", torch.float32, "bf16", torch.bfloat16, None),
    ("overlap_param_gather", False, "true", True, None),
    ("optim_args", {"ns_steps": 7}, "ns_steps=6", "ns_steps=6", None),
]


@pytest.mark.parametrize(("field", "given", "text", "meant", "default"), FIELDS, ids=[f[0] for f in FIELDS])
def test_given_value_then_environment_then_default(
    field: str, given: Any, text: str, meant: Any, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(hf_emopt.EmoptPlugin(), field) == default
    monkeypatch.setenv(f"EMOPT_{field.upper()}", f" {text} ")
    assert getattr(hf_emopt.EmoptPlugin(), field) == meant
    values: dict[str, Any] = {field: given}
    assert getattr(hf_emopt.EmoptPlugin(**values), field) == given
    monkeypatch.setenv(f"EMOPT_{field.upper()}", "")
    assert getattr(hf_emopt.EmoptPlugin(), field) == default


BAD: list[tuple[str, Any, str, str]] = [
    # field, given, in the environment, accepted
    ("optim", "mun", "mun", r"muon, normuon, soap, shampoo, kl_shampoo; did you mean 'muon'\?"),
    ("lr", "fast", "fast", "NUMBER"),
    ("lr", -1.0, "-1", "a finite NUMBER that is not negative"),
    ("aux_lr", True, "inf", "NUMBER"),
    ("weight_decay", [1], "nan", "NUMBER"),
    ("transport_dtype", torch.float16, "fp16", "bfloat16, float32, float64"),
    ("transport_dtype", 16, "int8", "bfloat16, float32, float64"),
    ("overlap_param_gather", "maybe", "2", r"true\|false"),
    ("optim_args", "ns_step=5", "ns_step=5", "Keys: adjust_lr_fn"),
]


@pytest.mark.parametrize(("field", "given", "text", "accepted"), BAD)
def test_bad_value_names_field_variable_and_what_is_accepted(
    field: str, given: Any, text: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"EMOPT_{field.upper()}"
    values: dict[str, Any] = {field: given}
    with pytest.raises(ValueError, match=rf"(?s)EmoptPlugin\.{field} \(.*{variable}.*{accepted}"):
        hf_emopt.EmoptPlugin(**values)
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"(?s){variable}.*{accepted}"):
        hf_emopt.EmoptPlugin()


def test_fields_reach_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMOPT_AUX_LR", "3e-4")
    plugin = hf_emopt.EmoptPlugin(
        optim="emopt_soap", lr=1e-3, weight_decay=0.2, transport_dtype="fp32", optim_args="betas=0.8:0.9"
    )
    optimizer = plugin.build(tiny_llama())
    assert type(optimizer) is hf_emopt.SOAP
    aux = next(g for g in optimizer.param_groups if g["kind"] == "aux" and g["weight_decay"] != 0)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (1e-3, 0.2)
    assert (aux["lr"], aux["betas"]) == (3e-4, (0.9, 0.95))
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9), "SOAP's own betas are those of matrices"
    assert optimizer.transport_dtype == "float32"
    assert optimizer.overlap_param_gather is False
    defaults = hf_emopt.EmoptPlugin(aux_lr=1e-2).build(tiny_llama())
    assert (type(defaults), defaults.param_groups[0]["lr"]) == (hf_emopt.Muon, 1e-3)


def test_what_is_written_into_the_script_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMOPT_AUX_LR", "1")
    monkeypatch.setenv("EMOPT_OPTIM_ARGS", "aux_lr=2, ns_steps=9")
    assert hf_emopt.EmoptPlugin().optimizer_kwargs == {"aux_lr": 1.0, "ns_steps": 9}
    assert hf_emopt.EmoptPlugin(optim_args="aux_lr=3").optimizer_kwargs == {"aux_lr": 3.0}
    assert hf_emopt.EmoptPlugin(aux_lr=4).optimizer_kwargs == {"aux_lr": 4.0, "ns_steps": 9}
    with pytest.raises(ValueError, match="'aux_lr' is given both as a field and in optim_args"):
        hf_emopt.EmoptPlugin(aux_lr=4, optim_args="aux_lr=3")


def test_accelerator_pulls_the_plugin_out_of_the_handlers() -> None:
    plugin = hf_emopt.EmoptPlugin(optim="normuon")
    other = DistributedDataParallelKwargs(bucket_cap_mb=3)
    accelerator = hf_emopt.Accelerator(cpu=True, kwargs_handlers=[plugin, other])
    assert accelerator.emopt_plugin is plugin
    assert accelerator.ddp_handler is other
    with pytest.raises(KeyError):  # what Accelerate itself does with a handler that it does not know
        accelerate.Accelerator(cpu=True, kwargs_handlers=[plugin])
    with pytest.raises(ValueError, match="2 EmoptPlugin objects; pass one"):
        hf_emopt.Accelerator(cpu=True, kwargs_handlers=[plugin, plugin])


def test_accelerator_without_plugin_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMOPT_OPTIM", "shampoo")
    assert hf_emopt.Accelerator(cpu=True).emopt_plugin.optimizer_cls is hf_emopt.Shampoo


class Calls:
    """Stands in for two methods of an optimizer and writes down when they are called."""

    def __init__(self, optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        monkeypatch.setattr(optimizer, "synchronize", lambda: self.made.append("synchronize"))
        monkeypatch.setattr(optimizer, "consolidate_state_dict", lambda to=0: self.made.append(f"consolidate {to}"))


@pytest.mark.parametrize("how", ["plain", "Accelerator"])
def test_state_is_brought_together_before_it_is_saved(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = hf_emopt.EmoptPlugin(lr=1e-2)
    if how == "plain":
        accelerator = accelerate.Accelerator(cpu=True)
    else:
        accelerator = hf_emopt.Accelerator(cpu=True, kwargs_handlers=[plugin])
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model, optimizer = accelerator.prepare(model, plugin.build(model))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    calls = Calls(unwrap_optimizer(optimizer), monkeypatch)
    accelerator.save_state(str(tmp_path))
    assert calls.made.count("consolidate 0") == 1
    assert calls.made.index("synchronize") < calls.made.index("consolidate 0")
    calls.made.clear()
    accelerator.load_state(str(tmp_path))
    assert calls.made[:1] == ["synchronize"]
    calls.made.clear()
    accelerator.get_state_dict(model)
    assert calls.made == ["synchronize"]


def test_saved_and_loaded_loop_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = accelerate_steps("one", 0, 1, steps=range(4))
    accelerate_steps("one", 0, 1, steps=range(2), save=folder)
    resumed = accelerate_steps("one", 0, 1, steps=range(2, 4), load=folder)
    assert all(torch.equal(whole["weights"][n], resumed["weights"][n]) for n in whole["weights"])
    assert any(not torch.equal(whole["weights"][n], whole["before"][n]) for n in whole["weights"])


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (DistributedType.FSDP, 1, "cannot run under FSDP1.*fsdp_version=2.*default is 1"),
        (DistributedType.FSDP, 2, None),
        (DistributedType.DEEPSPEED, None, "under DeepSpeed: .*an optimizer of its own, AdamW"),
        (DistributedType.MEGATRON_LM, None, "does not run under Megatron-LM"),
        (DistributedType.MULTI_GPU, None, None),
    ],
)
def test_accelerators_set_up_for_something_else_are_refused(
    kind: Any, version: int | None, message: str | None
) -> None:
    fsdp = None if version is None else SimpleNamespace(fsdp_version=version)
    accelerator: Any = SimpleNamespace(
        distributed_type=kind,
        state=SimpleNamespace(
            fsdp_plugin=fsdp, deepspeed_plugin=SimpleNamespace(deepspeed_config={"optimizer": {"type": "AdamW"}})
        ),
    )
    plugin = hf_emopt.EmoptPlugin()
    if message is None:
        plugin.attach(accelerator)
        return
    with pytest.raises(ValueError, match=rf"EmoptPlugin\(optim='muon'\) {message}"):
        plugin.attach(accelerator)


# ---------------------------------------------------------------------------------------------- Trainer


def trainer_with(tmp_path: Path, **kwargs: Any) -> Trainer:
    settings: dict[str, Any] = {
        "optim": "muon",
        "max_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    args = TrainingArguments(str(tmp_path), disable_tqdm=True, **{**settings, **kwargs})
    return Trainer(tiny_llama(), args, train_dataset=samples(8))


def test_environment_reaches_a_trainer_below_its_optim_args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMOPT_TRANSPORT_DTYPE", "float32")
    monkeypatch.setenv("EMOPT_AUX_LR", "3e-4")
    monkeypatch.setenv("EMOPT_OPTIM_ARGS", "ns_steps=3, momentum=0.5")
    optimizer = unwrap_optimizer(trainer_with(tmp_path, optim_args="ns_steps=4").create_optimizer())
    assert optimizer is not None
    matrix, aux = (next(g for g in optimizer.param_groups if g["kind"] == kind) for kind in ("matrix", "aux"))
    assert (matrix["ns_steps"], matrix["momentum"], aux["lr"]) == (4, 0.5, 3e-4)
    assert optimizer.transport_dtype == "float32"
    monkeypatch.setenv("EMOPT_OPTIM_ARGS", "ns_step=3")
    with pytest.raises(ValueError, match=r"EMOPT_OPTIM_ARGS.*did you mean 'ns_steps'"):
        trainer_with(tmp_path).create_optimizer()


def test_fields_of_training_arguments_overrule_the_environment_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMOPT_OPTIM", "soap")
    monkeypatch.setenv("EMOPT_LR", "1")
    trainer = trainer_with(tmp_path, learning_rate=2e-3)
    optimizer = unwrap_optimizer(trainer.create_optimizer())
    assert optimizer is not None
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (hf_emopt.Muon, 2e-3)
    assert overruled_environment(trainer.args) == [
        "EMOPT_OPTIM=soap is not used: a Trainer takes TrainingArguments.optim, which is muon.",
        "EMOPT_LR=1.0 is not used: a Trainer takes TrainingArguments.learning_rate, which is 0.002.",
    ]
    monkeypatch.setenv("EMOPT_OPTIM", "muon")
    monkeypatch.setenv("EMOPT_LR", "0.002")
    assert overruled_environment(trainer.args) == []
