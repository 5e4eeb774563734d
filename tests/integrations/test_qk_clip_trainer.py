"""The callback in a Trainer: what it measures, when it clips, and that logits stay under the threshold through a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_zoo import build
from eager_scores import scores
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_emopt import MaxLogits, QKClipCallback, qk_clip
from hf_emopt.optimizers.qk_clip import ClipReport


def rows(count: int, start: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(5, 48, (start + count, 12), generator=generator)[start:]
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(
    model: nn.Module, folder: Path, data: list[dict[str, Tensor]], callbacks: list[TrainerCallback], **options: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "optim": "sgd", "learning_rate": 0.0, "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=rows(4, 30), callbacks=callbacks)
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(  # in order
        data, batch_size=arguments.per_device_train_batch_size
    )
    trainer.train()
    return trainer


def logits_of(model: nn.Module, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    with torch.no_grad(), MaxLogits(model) as recorder:
        model(input_ids=torch.stack([row["input_ids"] for row in data]))
    return recorder.max_logits()


def half(logits: dict[str, Tensor]) -> float:
    return float(max(value.max() for value in logits.values())) / 2


def equal(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_the_maximum_is_over_the_micro_batches_of_a_step(tmp_path: Path, checkpointing: bool) -> None:
    data = rows(8)
    model, reference = build("llama-two-layers", "sdpa"), build("llama-two-layers", "sdpa")
    logits = logits_of(reference, data)
    callback = QKClipCallback(threshold=half(logits), margin=0.25)
    options = {"gradient_accumulation_steps": 4, "gradient_checkpointing": checkpointing}
    trainer = train(model, tmp_path, data, [callback], **options)
    report = qk_clip(reference, logits, 0.75 * half(logits))
    assert report.clipped_heads > 1
    equal(model, reference)
    (entry,) = (log for log in trainer.state.log_history if "loss" in log)
    assert entry["qk_clip/max_logit"] == pytest.approx(report.max_logit, rel=1e-5)
    assert entry["qk_clip/clipped_heads"] == report.clipped_heads


def test_evaluation_is_not_measured(tmp_path: Path) -> None:
    """The loudest sequences are those of the evaluation, which comes between the steps."""
    data, model, reference = rows(4), build("llama-two-layers", "sdpa"), build("llama-two-layers", "sdpa")
    trained, evaluated = half(logits_of(model, data)) * 2, half(logits_of(model, rows(4, 30))) * 2
    assert evaluated > 1.2 * trained
    threshold = (trained + evaluated) / 2
    seen: list[float] = []

    class Spy(TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            seen.append(1.0)

    callback = QKClipCallback(threshold=threshold)
    train(model, tmp_path, data, [callback, Spy()], max_steps=2, eval_strategy="steps", eval_steps=1)
    assert len(seen) == 2
    equal(model, reference)


def test_every_second_step_clips_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = rows(8), build("llama-two-layers", "sdpa")
    measured: list[int] = []
    clips: list[int] = []

    def clip(*_: Any) -> ClipReport:
        clips.append(len(measured))
        return ClipReport(0.0, ())

    monkeypatch.setattr(MaxLogits, "_measure", lambda *_: measured.append(1))
    monkeypatch.setattr(MaxLogits, "max_logits", lambda self: {})
    monkeypatch.setattr("hf_emopt.integrations.qk_clip_callback.clip_found", clip)
    train(model, tmp_path, data, [QKClipCallback(every=2)], max_steps=4)
    assert clips == [2, 4]  # two layers, in steps 2 and 4


class Watch(TrainerCallback):
    """The largest logit after every step, as eager attention computes it."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.largest = data, []

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        modules = {f"layer {i}": layer.self_attn for i, layer in enumerate(model.model.layers)}
        implementation = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.no_grad(), scores(modules) as found:
            model(input_ids=self.data)
        model.set_attn_implementation(implementation)
        self.largest.append(max(float(value.max()) for value in found.values()))


class Others(TrainerCallback):
    """Says whether what stands between the two of them in the list of callbacks left all but queries and keys alone."""

    def __init__(self, before: Others | None = None) -> None:
        self.before, self.clips = before, 0
        self.weights: dict[str, Tensor] = {}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        if self.before is not None:
            changed = {n for n, value in self.weights.items() if not torch.equal(value, self.before.weights[n])}
            assert all("q_proj" in name or "k_proj" in name for name in changed)
            self.clips += bool(changed)


class Growing(TrainerCallback):
    """Queries grow by a fixed part after every step, so that logits pass the threshold whatever the training does."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(GROWTH)


STEPS, THRESHOLD, GROWTH = 50, 40.0, 1.03


def run(folder: Path, clip: QKClipCallback | None) -> tuple[list[float], int]:
    """50 steps of Muon on 16 sequences that say everything twice: the largest logit after each, and the number of clips.

    Queries are scaled so that the largest logit of the first step is three quarters of the threshold. From there it grows
    by three percent a step, to more than three times the threshold, and steps at this rate move it by far less than that.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    tokens = torch.randint(48, (16, 8), generator=torch.Generator().manual_seed(1)).repeat(1, 2)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(20.0)
        model.model.layers[0].self_attn.q_proj.weight.mul_(0.75 * THRESHOLD / (2 * half(logits_of(model, data))))
    watch, before = Watch(tokens), Others()
    after = Others(before)
    train(
        model, folder, data, [Growing(), watch] if clip is None else [Growing(), before, clip, after, watch],
        optim="muon", learning_rate=0.001, max_steps=STEPS, per_device_train_batch_size=16, logging_strategy="no",
        max_grad_norm=0.0,
    )  # fmt: skip
    assert len(watch.largest) == STEPS
    return watch.largest, after.clips


def test_logits_stay_under_the_threshold_through_a_run(tmp_path: Path) -> None:
    without, _ = run(tmp_path, None)
    assert max(without) > 1.3 * THRESHOLD
    for mode in ("exact", "bound"):
        held, clips = run(tmp_path, QKClipCallback(THRESHOLD, mode=mode))
        assert clips > 10
        assert max(held) <= THRESHOLD
        print(mode, max(held), clips)
    # The exact maximum is that of weights before the step, so that without a margin a step's growth comes on top.
    over, _ = run(tmp_path, QKClipCallback(THRESHOLD, margin=0.0))
    assert max(over) > THRESHOLD
    print(max(without), max(over))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -1.0}, "threshold=-1.0 must be a positive number"),
        ({"balance": 2.0}, "balance=2.0 must lie between"),
        ({"margin": 1.0}, "margin=1.0 must be a part of the threshold"),
        ({"every": 0}, "every=0 must be a whole number"),
        ({"mode": "fast"}, "mode='fast' is not one of"),
    ],
)
def test_bad_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QKClipCallback(**options)


def test_models_on_which_nothing_can_act_raise_at_the_start(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ValueError, match="comes of an adapter and a weight that does not train"):
        train(adapted, tmp_path, rows(2), [QKClipCallback()])
    frozen = build("mistral-window")
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_("self_attn" not in name)
    with pytest.raises(ValueError, match="no attention module has a query or key that trains"):
        train(frozen, tmp_path, rows(2), [QKClipCallback()])


def test_graphs_that_would_not_measure_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"QKClipCallback\(every=2\): a graph that torch_compile makes"):
        train(build("llama"), tmp_path, rows(2), [QKClipCallback(every=2)], torch_compile=True)


def test_deepspeed_and_cut_sequences_raise(tmp_path: Path) -> None:
    class Config:
        cp_enabled, sp_enabled = False, True

    for name, value, message in (
        ("deepspeed", {"zero_optimization": {}}, "DeepSpeed keeps the weights"),
        ("parallelism_config", Config(), r"cuts sequences among processes \(sp_size\)"),
    ):
        arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
        object.__setattr__(arguments, name, value)
        with pytest.raises(ValueError, match=message):
            QKClipCallback().on_train_begin(arguments, None, None, model=build("llama"))
