"""The names in transformers: every way in, every round trip, and what is left where the package is absent."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames

import hf_emopt
from hf_emopt.optimizers import enum_members

NAMES = ["muon", "normuon", "emopt_muon", "emopt_normuon"]
CLASSES = {name: hf_emopt.NorMuon if "nor" in name else hf_emopt.Muon for name in NAMES}
ROOT = Path(hf_emopt.__file__).parents[1]


def arguments(tmp_path: Path, cls: type = TrainingArguments, **kwargs: object) -> TrainingArguments:
    return cls(output_dir=str(tmp_path), use_cpu=True, report_to=[], **kwargs)


def run_python(code: str, *argv: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *argv], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", NAMES)
def test_name_is_a_member_like_any_other(name: str) -> None:
    member = OptimizerNames(name)
    assert isinstance(member, OptimizerNames)
    assert OptimizerNames[name.upper()] is member
    assert getattr(OptimizerNames, name.upper()) is member
    assert [m for m in OptimizerNames if m.value == name] == [member]
    assert member == name
    assert hash(member) == hash(name)
    assert member.value == name
    assert member in OptimizerNames
    assert _OPTIMIZER_HANDLERS[member] is _OPTIMIZER_HANDLERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_training_arguments_round_trips(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, optim=name, optim_args="ns_steps=6")
    member = OptimizerNames(name)
    assert args.optim is member
    assert args.to_dict()["optim"] == name
    assert type(args.to_dict()["optim"]) is str
    assert json.loads(args.to_json_string())["optim"] == name
    assert args.to_sanitized_dict()["optim"] in (name, str(member))
    again = TrainingArguments(
        **{k: v for k, v in args.to_dict().items() if k in ("optim", "optim_args", "output_dir")}, use_cpu=True
    )
    assert again.optim is member
    assert again.optim_args == "ns_steps=6"
    assert dataclasses.replace(args, learning_rate=1.0).optim is member
    assert copy.deepcopy(args).optim is member
    assert arguments(tmp_path).set_optimizer(name=name).optim is member
    for unpickled in (pickle.loads(pickle.dumps(args)), copy.copy(args)):
        assert unpickled.optim == name
        factory, kwargs = Trainer.get_optimizer_cls_and_kwargs(unpickled)
        assert factory.optimizer_cls is CLASSES[name]
        assert kwargs["ns_steps"] == 6


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_member_pickles_as_a_plain_string(protocol: int) -> None:
    data = pickle.dumps({"optim": OptimizerNames("muon")}, protocol)
    assert b"OptimizerNames" not in data
    assert b"emopt" not in data
    assert type(pickle.loads(data)["optim"]) is str
    assert pickle.loads(pickle.dumps(OptimizerNames.SGD, protocol)) is OptimizerNames.SGD


def test_argument_parsers(tmp_path: Path) -> None:
    from trl import SFTConfig, TrlParser

    for cls in (TrainingArguments, Seq2SeqTrainingArguments, SFTConfig):
        for name in NAMES:
            (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(
                ["--output_dir", str(tmp_path), "--optim", name, "--use_cpu"]
            )
            assert args.optim is OptimizerNames(name), cls
    (args,) = TrlParser(SFTConfig).parse_args_and_config(
        ["--output_dir", str(tmp_path), "--optim", "muon", "--use_cpu"]
    )
    assert args.optim is OptimizerNames("muon")
    (args,) = HfArgumentParser(TrainingArguments).parse_dict(
        {"output_dir": str(tmp_path), "use_cpu": True, "optim": "muon", "optim_args": {"ns_steps": 6}}
    )
    assert Trainer.get_optimizer_cls_and_kwargs(args)[1]["ns_steps"] == 6


def test_unknown_name_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"muom is not a valid OptimizerNames.*'emopt_muon'"):
        arguments(tmp_path, optim="muom")


UNUSED = (
    "bitsandbytes",
    "peft",
    "trl",
    "deepspeed",
    "datasets",
    "triton",
    "transformers",
    "accelerate",
    "torch._dynamo",
    "scipy",
)
ALONE = f"""
import sys, hf_emopt
found = [name for name in {UNUSED} if name in sys.modules]
assert not found, found
import torch
hf_emopt.Muon(torch.nn.Sequential(torch.nn.Linear(4, 4))).step()
hf_emopt.newton_schulz(torch.eye(4)), hf_emopt.route_parameters(torch.nn.Linear(4, 4))
assert "transformers" not in sys.modules
"""


def test_the_package_alone_imports_and_prints_nothing_that_muon_does_not_use() -> None:
    done = run_python(ALONE)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


REGISTERED = """
from transformers import Trainer, TrainingArguments
import hf_emopt
assert TrainingArguments("unused", optim="muon", use_cpu=True).optim == "muon"
assert hasattr(Trainer.create_optimizer, "__hf_emopt__")
args = TrainingArguments("unused", optim="emopt_soap", use_cpu=True)
assert Trainer.get_optimizer_cls_and_kwargs(args)[0].optimizer_cls is hf_emopt.SOAP
print("fine")
"""


@pytest.mark.second_tier
@pytest.mark.parametrize(
    "first",
    [
        "import hf_emopt; from transformers import TrainingArguments as A; A('unused', optim='muon', use_cpu=True)",
        "import hf_emopt; from transformers import TrainerCallback",
        "import hf_emopt, accelerate; from hf_emopt import Accelerator",
        "from transformers import Trainer; import hf_emopt",
        "import hf_emopt.integrations.qk_clip_callback",
        "import hf_emopt.integrations.transformers",
    ],
)
def test_names_are_there_in_whatever_order_modules_are_imported(first: str) -> None:
    done = run_python(f"{first}\n{REGISTERED}")
    assert done.stdout.strip() == "fine", done.stderr


RELOADED = """
import importlib
import hf_emopt
import hf_emopt.integrations.transformers as integration
from transformers import Trainer, trainer
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
from transformers.training_args import OptimizerNames
before = list(OptimizerNames)
hf_emopt.register()
reloaded = importlib.reload(integration)
reloaded.register()
reloaded.register()
assert list(OptimizerNames) == before
assert [c.__name__ for c in trainer.DEFAULT_CALLBACKS].count("DefaultCallback") == 1
assert trainer.DEFAULT_CALLBACKS[-1] is reloaded.DefaultCallback
original = Trainer.get_optimizer_cls_and_kwargs.__hf_emopt__
assert not hasattr(original, "__hf_emopt__")
assert _OPTIMIZER_HANDLERS[OptimizerNames("muon")].__globals__ is vars(reloaded)
print("fine")
"""


@pytest.mark.second_tier
def test_registering_again_and_reloading_change_nothing() -> None:
    """In a process of its own: a reloaded module has other classes than those that other modules have imported."""
    done = run_python(RELOADED)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.second_tier
def test_training_args_bin_loads_where_the_package_is_absent(tmp_path: Path) -> None:
    torch.save(arguments(tmp_path, optim="muon"), tmp_path / "training_args.bin")
    done = run_python(
        "import sys, torch\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'hf_emopt': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "args = torch.load(sys.argv[1], weights_only=False)\n"
        "assert not any(name.startswith('hf_emopt') for name in sys.modules)\n"
        "print(type(args).__name__, type(args.optim).__name__, args.optim)\n"
        "try:\n"
        "    type(args)(output_dir='/tmp/unused', optim='muon', use_cpu=True)\n"
        "except ValueError as error:\n"
        "    print('muon is not a valid OptimizerNames' in str(error))\n",
        str(tmp_path / "training_args.bin"),
    )
    assert done.stdout.split() == ["TrainingArguments", "str", "muon", "True"], done.stderr


NATIVE = """
import sys
from transformers import trainer, trainer_optimizer, training_args, Trainer, TrainingArguments
sys.path.insert(0, sys.argv[1])
from enum_members import add_string_member

def native(context):
    return "native", {}

member, added = add_string_member(training_args.OptimizerNames, "MUON", "muon")
assert added
trainer_optimizer._OPTIMIZER_HANDLERS[member] = native

def pick(name):
    args = TrainingArguments("/tmp/unused", optim=name, use_cpu=True, report_to=[])
    return Trainer.get_optimizer_cls_and_kwargs(args)[0]

import hf_emopt
hf_emopt.register()
assert pick("muon") == "native"
assert pick("emopt_muon").optimizer_cls is hf_emopt.Muon
assert pick("normuon").optimizer_cls is hf_emopt.NorMuon

first = hf_emopt.Muon
# The package imported anew, as a notebook does after an upgrade.
del trainer_optimizer._OPTIMIZER_HANDLERS[member]
count = len(training_args.OptimizerNames)
for name in [m for m in sys.modules if m.startswith("hf_emopt")]:
    del sys.modules[name]
import hf_emopt as second
assert second.Muon is not first
assert len(training_args.OptimizerNames) == count
assert [c.__name__ for c in trainer.DEFAULT_CALLBACKS] == ["DefaultFlowCallback", "DefaultCallback"]
assert pick("muon").optimizer_cls is second.Muon and pick("emopt_normuon").optimizer_cls is second.NorMuon
print("fine")
"""


@pytest.mark.second_tier  # a start of Python that imports transformers twice
def test_an_optimizer_that_transformers_ships_stays_and_a_second_copy_of_ours_takes_over(tmp_path: Path) -> None:
    shutil.copy(enum_members.__file__, tmp_path / "enum_members.py")
    done = run_python(NATIVE, str(tmp_path))
    assert done.stdout.strip() == "fine", done.stderr
    assert done.stderr.count("use optim='emopt_muon' for hf_emopt's") == 1, done.stderr
    assert "optim='emopt_emopt_muon'" not in done.stderr
    assert "optim='emopt_normuon'" not in done.stderr


def test_a_name_taken_by_another_member_does_not_hide_it() -> None:
    from enum import Enum

    class Names(str, Enum):
        MUON = "other"

    member, added = enum_members.add_string_member(Names, "MUON", "muon")
    assert added
    assert Names.MUON.value == "other"
    assert Names("muon") is member
    assert member.name == "EMOPT_MUON"
    with pytest.raises(TypeError, match="must derive from str and Enum"):
        enum_members.add_string_member(Enum("Plain", "A"), "B", "b")


ENUM_CHECK = """
import argparse, copy, importlib.util, pickle, sys
from enum import Enum
spec = importlib.util.spec_from_file_location("enum_members", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

class Explicit(str, Enum):
    @classmethod
    def _missing_(cls, value):
        raise ValueError(value)

class Names(Explicit):
    ADAMW = "adamw"
    SGD = "sgd"

member, added = module.add_string_member(Names, "MUON", "muon")
assert added and module.add_string_member(Names, "MUON", "muon") == (member, False)
assert Names("muon") is member and Names["MUON"] is member and Names.MUON is member
assert list(Names) == [Names.ADAMW, Names.SGD, member] and len(Names) == 3 and list(Names.__members__)[-1] == "MUON"
assert member in Names and member == "muon" and {"muon": 1}[member] == 1 and {member: 1}["muon"] == 1
assert isinstance(member, Names) and (member.name, member.value) == ("MUON", "muon")
assert copy.deepcopy({"a": member})["a"] is member
for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    back = pickle.loads(pickle.dumps(member, protocol))
    assert type(back) is str and back == "muon" and Names(back) is member
    assert pickle.loads(pickle.dumps(Names.SGD, protocol)) is Names.SGD
if sys.version_info >= (3, 12):
    assert "muon" in Names and "other" not in Names
assert "MUON" in repr(member) and "MUON" in dir(Names)
try:
    Names("other")
except ValueError:
    print("fine")
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_enum_tables_of_other_python_versions(version: str) -> None:
    wanted = tuple(map(int, version.split(".")))
    candidates = [sys.executable] if sys.version_info[:2] == wanted else []
    candidates += [str(p) for p in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    candidates += [path for path in [shutil.which(f"python{version}")] if path and "shims" not in path]
    if not candidates:
        pytest.skip(f"no Python {version} on this machine to run the standard-library-only module with")
    done = subprocess.run(
        [candidates[0], "-I", "-c", ENUM_CHECK, enum_members.__file__], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "fine", done.stderr


SCRIPT = """
import sys
from dataclasses import dataclass, field
from transformers import HfArgumentParser, Trainer, TrainingArguments

@dataclass
class ScriptArguments:
    text: str = field(default="none")

if __name__ == "__main__":
    import helper
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    factory, kwargs = Trainer.get_optimizer_cls_and_kwargs(args)
    print(helper.WORD, script.text, factory.optimizer_cls.__name__, kwargs["ns_steps"], sys.argv[0])
"""


def script_and_options(tmp_path: Path) -> list[str]:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("WORD = 'beside'\n")
    settings = {"output_dir": tmp_path, "optim": "muon", "optim_args": "ns_steps=6", "text": "seen"}
    return ["--use_cpu", *(str(part) for key, value in settings.items() for part in (f"--{key}", value))]


def test_run_gives_an_unmodified_script_the_names(tmp_path: Path) -> None:
    options = script_and_options(tmp_path)
    command = [sys.executable, "-m", "hf_emopt.run", str(tmp_path / "script.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["beside", "seen", "Muon", "6", str(tmp_path / "script.py")], done.stderr


def test_run_takes_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hf_emopt.run import main

    options = script_and_options(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", [])
    main(["-m", "script", *options])
    assert capsys.readouterr().out.split() == ["beside", "seen", "Muon", "6", str(tmp_path / "script.py")]
    assert sys.path[0] == str(tmp_path)


def test_run_without_a_script_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    from hf_emopt.run import main

    for argv, message in (
        ([], "usage:"),
        (["--optim", "muon"], "usage:"),
        (["-m"], "usage:"),
        (["absent.py"], "no such script: absent.py"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(argv)
    main(["--help"])
    assert "python -m hf_emopt.run SCRIPT" in capsys.readouterr().out
