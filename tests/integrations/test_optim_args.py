"""optim_args: types, errors, and which error a user of the Trainer sees."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from transformers import Trainer, TrainingArguments

import hf_emopt
from hf_emopt.integrations.optim_args import ELSEWHERE, optimizer_options, parse_optim_args
from hf_emopt.integrations.transformers import OPTIMIZERS


class Example:
    """One argument of every kind of annotation that an optimizer uses."""

    def __init__(
        self,
        params: object,
        lr: float = 1e-3,
        *,
        decay: float = 0.0,
        steps: int = 5,
        nesterov: bool = True,
        name: str | Sequence[tuple[float, float, float]] = "jordan",
        dtype: torch.dtype | None = None,
        mode: Literal["torch", "keller"] | None = None,
        aux_lr: float | None = None,
        aux_betas: tuple[float, float] = (0.9, 0.95),
        modules: str | Sequence[str] | None = None,
        ladder: Sequence[int] = (1,),
        callback: Any = None,
    ) -> None: ...


class Derived(Example):
    def __init__(self, params: object, *, beta2: float = 0.95, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decay=1e-2", {"decay": 0.01}),
        ("decay=1", {"decay": 1.0}),
        ("steps = 6 , aux_lr = 1e-5", {"steps": 6, "aux_lr": 1e-5}),
        ("aux_lr=none", {"aux_lr": None}),
        ("nesterov=False", {"nesterov": False}),
        ("nesterov=yes", {"nesterov": True}),
        ("betas=0.9:0.95", {"aux_betas": (0.9, 0.95)}),
        ("aux_betas=0.8/0.99", {"aux_betas": (0.8, 0.99)}),
        ("ladder=1:2:3", {"ladder": (1, 2, 3)}),
        ("name=polar_express", {"name": "polar_express"}),
        ("name=3.4:-4.7:2.0/1:2:3", {"name": ((3.4, -4.7, 2.0), (1.0, 2.0, 3.0))}),
        ("dtype=bfloat16", {"dtype": torch.bfloat16}),
        ("dtype=fp32", {"dtype": torch.float32}),
        ("dtype=torch.float64", {"dtype": torch.float64}),
        ("dtype=none", {"dtype": None}),
        ("mode=keller", {"mode": "keller"}),
        ("modules=layers\\.(0|1)\\..*(?:q|k)_proj$", {"modules": "layers\\.(0|1)\\..*(?:q|k)_proj$"}),
        (
            '{"modules": "a{1,2}=b", "aux_lr": 1, "betas": [0.9, 0.95]}',
            {"modules": "a{1,2}=b", "aux_lr": 1.0, "aux_betas": (0.9, 0.95)},
        ),
        ("", {}),
        ("  ", {}),
        (None, {}),
    ],
)
def test_text_gets_the_type_of_the_signature(text: str | None, expected: dict[str, Any]) -> None:
    parsed = parse_optim_args(text, Example)
    assert parsed == expected
    assert {key: type(value) for key, value in parsed.items()} == {key: type(value) for key, value in expected.items()}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_betas_are_those_of_the_matrices_where_they_have_any(name: str) -> None:
    own = "betas" in inspect.signature(OPTIMIZERS[name].__init__).parameters
    assert own is (name not in ("muon", "normuon"))
    for given in ("betas=0.8:0.9", {"betas": [0.8, 0.9]}):
        assert parse_optim_args(given, OPTIMIZERS[name]) == {"betas" if own else "aux_betas": (0.8, 0.9)}
    if own:
        both = parse_optim_args("betas=0.8:0.9, aux_betas=0.7:0.9", OPTIMIZERS[name])
        assert both == {"betas": (0.8, 0.9), "aux_betas": (0.7, 0.9)}


def test_mapping_keeps_types_and_reads_strings() -> None:
    modules = ["q_proj", "k_proj"]
    given = {
        "decay": 1,
        "betas": [0.9, 0.95],
        "dtype": "bf16",
        "steps": "7",
        "modules": modules,
        "mode": None,
        "callback": print,
    }
    assert parse_optim_args(given, Example) == {
        "decay": 1.0,
        "aux_betas": (0.9, 0.95),
        "dtype": torch.bfloat16,
        "steps": 7,
        "modules": ("q_proj", "k_proj"),
        "mode": None,
        "callback": print,
    }


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ("step=6", ["unknown key 'step'", "did you mean 'steps'"]),
        ("ladders=6", ["'ladders'", "'ladder'"]),
        ("steps=6.5", ["bad value '6.5'", "'steps'", "steps=INTEGER"]),
        ("decay=high", ["'high'", "decay=NUMBER"]),
        ("decay=nan", ["'nan'", "decay=NUMBER"]),
        ("nesterov=maybe", ["'maybe'", "nesterov=true|false"]),
        ("mode=other", ["'other'", "mode=none or torch|keller"]),
        ("dtype=int8", ["'int8'", "dtype=none or bfloat16|float16|float32|float64"]),
        ("betas=0.9", ["'betas'", "betas=NUMBER:NUMBER"]),
        ("betas=(0.9,0.95)", ["'(0.9'", "betas=NUMBER:NUMBER"]),
        ("nesterov", ["'nesterov' has no value", "nesterov=true|false"]),
        ("nesterv", ["'nesterv' has no value", "did you mean 'nesterov'"]),
        ("steps=6,", ["ends with a comma"]),
        ("steps=6,,decay=1", ["empty entry"]),
        ("steps=", ["empty value", "steps="]),
        ("=6", ["empty key"]),
        ("steps=6=7", ["more than one '='", "steps=6=7"]),
        ("steps=6,steps=7", ["'steps' is given twice"]),
        ("betas=0.9:0.95,aux_betas=0.9:0.95", ["'aux_betas' is given twice"]),
        ("lr=1e-3", ["'lr' cannot be set here", "learning_rate"]),
        ("params=1", ["'params' cannot be set here"]),
        ({"steps": True}, ["bad value True", "steps=INTEGER"]),
        ({"decay": True}, ["bad value True"]),
        ({"betas": 0.9}, ["bad value 0.9"]),
        ({"betas": [0.9, "x"]}, ["bad value [0.9, 'x']"]),
        ({"unknown": 1}, ["unknown key 'unknown'"]),
        ('{"steps": 6', ["not valid JSON"]),
        (6, ["expected a string or a mapping, got int"]),
    ],
)
def test_errors_name_the_key_the_form_and_all_keys(given: Any, fragments: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_optim_args(given, Example)
    message = str(caught.value)
    for fragment in [*fragments, "Example", "Accepted form: optim_args=", "Keys: aux_betas, aux_lr, betas,"]:
        assert fragment in message, message


def test_keyword_arguments_passed_on_to_a_base_class_are_keys() -> None:
    assert list(optimizer_options(Derived)) == ["beta2", *optimizer_options(Example)]
    assert parse_optim_args("beta2=0.9, steps=3", Derived) == {"beta2": 0.9, "steps": 3}


def test_argument_without_annotation_is_an_error_of_the_optimizer() -> None:
    class Bare:
        def __init__(self, params, momentum=0.9):  # type: ignore[no-untyped-def]
            pass

    with pytest.raises(TypeError, match="'momentum' needs an annotation"):
        optimizer_options(Bare)


@pytest.mark.parametrize("optimizer_cls", [hf_emopt.Muon, hf_emopt.NorMuon])
def test_every_argument_of_the_optimizers_is_a_key(optimizer_cls: type) -> None:
    import inspect

    # What `help(hf_emopt.NorMuon)` shows is what optim_args takes.
    names = set(inspect.signature(optimizer_cls).parameters) - set(ELSEWHERE)
    assert names == set(optimizer_options(optimizer_cls))
    assert ("beta2" in names) == (optimizer_cls is hf_emopt.NorMuon)


TEXT = "ns_steps=6, aux_lr=1e-5, betas=0.9:0.95, nesterov=false, adjust_lr_fn=spectral, aux_modules=lm_head"


def test_values_for_muon() -> None:
    parsed = parse_optim_args(TEXT, hf_emopt.Muon)
    assert parsed["ns_steps"] == 6
    assert type(parsed["ns_steps"]) is int
    assert parsed["aux_lr"] == 1e-5
    assert parsed["aux_betas"] == (0.9, 0.95)
    assert parsed["nesterov"] is False
    assert parsed["adjust_lr_fn"] == "spectral"
    assert parsed["aux_modules"] == "lm_head"
    for text in ("adjust_lr_fn=keller", "compat=jax"):
        with pytest.raises(ValueError, match=f"bad value '{text.split('=')[1]}'"):
            parse_optim_args(text, hf_emopt.Muon)


@pytest.mark.parametrize("optim", ["muon", "emopt_normuon"])
@pytest.mark.parametrize(
    "bad", ["nesterov", "ns_steps=5,", "betas=(0.9,0.95)", "ns_steps=5=6", "ns_step=5", {"ns_step": 5}]
)
def test_the_trainer_shows_our_error(optim: str, bad: Any, tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), optim=optim, optim_args=bad, use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"optim_args for .*Muon: .*Keys: adjust_lr_fn, "):
        Trainer.get_optimizer_cls_and_kwargs(args)


def test_other_optimizers_keep_transformers_parser(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), optim="sgd", optim_args="momentum=0.9", use_cpu=True, report_to=[])
    optimizer_cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    assert optimizer_cls is torch.optim.SGD
    assert kwargs["momentum"] == 0.9
    args.optim_args = "momentum"
    with pytest.raises(ValueError, match="not enough values to unpack"):
        Trainer.get_optimizer_cls_and_kwargs(args)
