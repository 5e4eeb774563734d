"""Every command that the README and the documentation give a reader is parsed, and executed in the order of the page.

The first tier parses: bash reads the line, the program is there, and its own parser takes all arguments. The second executes.
A block of shell commands is a test. It runs in bash, in a folder that looks like a checkout (links to it) and has what pages
take a reader to have: ``path/to/model``, ``path/to/texts``, a script of their own ``run_clm.py``. :mod:`commands` lists what
is changed: flags that make a run small, and the names of things that are not here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import BEFORE, BLOCKS, ELSEWHERE, PAGES, ROOT, SHELL, TOGETHER, Block, blocks_of, executed
from preloaded_python import PreloadedPython
from transformers import LlamaConfig, LlamaForCausalLM

from text_data import text_documents, train_tokenizer

HERE = Path(__file__).parent
LIMIT = 200.0
"""Seconds for a block."""

PROGRAMS = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "torchrun": "torch.distributed.run",
    "hf-emopt": "hf_emopt.tools.cli",
    "pip": "pip",
}
"""Console scripts that are modules."""

OWN_SCRIPT = '''"""A training script that knows nothing of hf_emopt."""
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.max_steps, args.per_device_train_batch_size, args.report_to, args.save_strategy = 2, 2, [], "no"
tokens = AutoTokenizer.from_pretrained("path/to/model")("matrix gradient momentum")["input_ids"]
rows = [{"input_ids": tokens, "labels": tokens}] * 4
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained("path/to/model"), args=args, train_dataset=rows)
trainer.train()
trainer.save_metrics("eval", {"global_step": trainer.state.global_step,
                              "matrix_transforms": trainer.optimizer.optimizer.transform_count})
'''


def text(seed: int) -> str:
    words = ["matrix", "gradient", "momentum", "update", "weight", "layer", "rank", "norm", "batch", "token"]
    return "".join(f"{i} {words[(i * (seed + 3)) % 10]} {words[(i * i + seed) % 10]}.\n" for i in range(1500))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this session have."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    dropped = ("PYTEST_", "ACCELERATE_", "EMOPT_", "FSDP_", "MAKE", "MFLAGS")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    return {
        **kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "DS_IGNORE_CUDA_DETECTION": "1", "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE / "cpu_ranks")]), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }  # fmt: skip


@pytest.fixture(scope="session")
def programs(shared: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for ``PATH`` with python and the console scripts."""
    server = PreloadedPython(shared, environment)
    folder = tmp_path_factory.mktemp("bin")
    server.install(folder / "python")
    for name, module in PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec "{folder}/python" -m {module} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)
    yield folder
    server.close()


@pytest.fixture(scope="session")
def belongings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages take a reader to have."""
    folder = tmp_path_factory.mktemp("belongings")
    texts, model = folder / "path" / "to" / "texts", folder / "path" / "to" / "model"
    texts.mkdir(parents=True)
    for seed in range(8):
        (texts / f"{seed}.txt").write_text(text(seed), encoding="utf-8")
    tokenizer = train_tokenizer(text_documents(texts), vocab_size=300)
    tokenizer.save_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(model)
    rows = [{"text": f"{'fine' if i % 2 else 'poor'} {i} {text(i)[:60]}", "label": "ud"[i % 2]} for i in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "run_clm.py").write_text(OWN_SCRIPT, encoding="utf-8")
    return folder


@pytest.fixture
def checkout(tmp_path: Path, belongings: Path, programs: Path) -> Path:
    """A folder in which commands find the repository and write without touching it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in {Path(path).parts[0] for path in tracked}:
        (folder / name).symlink_to(ROOT / name)
    for path in belongings.iterdir():
        (folder / path.name).symlink_to(path)
    # `make` finds its virtual environment there, with everything installed.
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(programs / "python")
    for extras in ("examples", "test"):
        (folder / ".venv" / f".installed-{extras}").touch()
    return folder


def run(command: str, folder: Path, programs: Path, environment: dict[str, str]) -> str:
    """Executes one command line in bash; returns what it printed."""
    paths = os.pathsep.join([str(programs), environment["PATH"]])
    process = subprocess.Popen(
        ["bash", "-ec", command], cwd=folder, env={**environment, "PATH": paths}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command}\ntook longer than {LIMIT} s:\n{output[-6000:]}")
    assert process.returncode == 0, f"{command}\n{output[-8000:]}"
    return output


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------------------------------------- parsed


class Parsed(BaseException):
    """Ends a program as soon as its parser has taken its arguments."""

    def __init__(self, found: argparse.Namespace) -> None:
        self.found = found


@pytest.fixture
def only_parsing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs end where they have parsed their arguments; the folder looks like a checkout."""
    parse, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_and_end(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            found, rest = parse(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth:  # a subcommand's
            return found, rest
        assert not rest, f"nobody takes {rest}"
        raise Parsed(found)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_end)
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "run_clm.py").write_text(OWN_SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def parse_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs ``script argument ...`` or ``-m module argument ...`` up to its parser, then what it would launch."""
    module, words = (True, words[1:]) if words[0] == "-m" else (False, words)
    monkeypatch.setattr(sys, "argv", words)
    run = runpy.run_module if module else runpy.run_path
    with pytest.raises(Parsed) as parsed:
        run(words[0], run_name="__main__")
    if (script := getattr(parsed.value.found, "training_script", None)) is not None:
        kind = ["-m"] if parsed.value.found.module else []
        parse_program([*kind, script, *parsed.value.found.training_script_args], monkeypatch)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_commands_parse(block: Block, only_parsing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE))
    for command in block.commands:
        subprocess.run(["bash", "-nc", command], check=True)
        words = shlex.split(command)
        while "=" in words[0]:
            words = words[1:]
        if words[0] == "make":
            assert targets >= {word for word in words[1:] if "=" not in word}
        elif words[0] == "pip":
            assert extras >= set(re.findall(r"\.\[(\w+)\]", command))
        elif words[0] == "python":
            parse_program(words[1:], monkeypatch)
        else:
            parse_program(["-m", PROGRAMS[words[0]], *words[1:]], monkeypatch)


# ---------------------------------------------------------------------------------------------- executed


FOLLOWING = set(TOGETHER)
LEADING = {block.name: block for block in BLOCKS}
SCENES = [
    [LEADING[name] for name in (block.name, *(k for k, v in TOGETHER.items() if v == block.name))]
    for block in BLOCKS
    if block.name not in FOLLOWING and set(block.commands) - ELSEWHERE.keys()
]


@pytest.mark.second_tier
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: "+".join(block.name for block in scene))
def test_commands_run(scene: list[Block], checkout: Path, programs: Path, environment: dict[str, str]) -> None:
    commands = [BEFORE[block.name] for block in scene if block.name in BEFORE]
    commands += [command for block in scene for command in block.commands if command not in ELSEWHERE]
    for command in commands:
        line = executed(command, free_port())
        output = run(line, checkout, programs, environment)
        check(line, output, checkout)


# ---------------------------------------------------------------------------------------------- what they leave


def check(command: str, output: str, folder: Path) -> None:
    """What every command of a kind must leave behind; two steps are what all training runs are cut to."""
    words = shlex.split(command)
    for flag, value in itertools.pairwise(words):
        if flag in ("--out", "--output", "--png", "--plot") or (flag == "--json" and value.endswith(".json")):
            assert (folder / value).stat().st_size > 0, f"{command} wrote no {value}"
    if re.search(r"\brun_\w+\.py|train_vision\.py", command):
        check_training(command, folder)
    for pattern, wanted in PRINTED.items():
        if re.search(pattern, command):
            assert re.search(wanted, output), f"{command} printed no {wanted!r}:\n{output[-4000:]}"
    if "hf-emopt report" in command:
        check_report((folder / "report.html").read_text(encoding="utf-8"))
    if re.search("pretrain_demo|make demo", command):
        assert (folder / "demo-out" / "curves.png").read_bytes().startswith(b"\x89PNG")
        runs = json.loads((folder / "demo-out" / "losses.json").read_text())["runs"]
        assert [run["matrix_transforms"] for run in runs] == [0, 2 * 7]


MATRICES = 7
"""Of the Llama (q, k, v, o, gate, up, down) and the BERT (four of attention, two of its MLP, the pooler) of one layer."""


def check_training(command: str, folder: Path) -> None:
    newest = max(folder.rglob("eval_results.json"), key=lambda path: path.stat().st_mtime_ns)
    metrics = json.loads(newest.read_text())
    assert metrics["global_step"] == 2
    counted = metrics["matrix_transforms"]
    if "--resume_from_checkpoint" in command:
        assert counted == MATRICES  # the second step alone
    elif "tp_size" in command:
        assert counted == 2 * MATRICES  # so small that every process transforms all
    elif re.search(r"ddp|fsdp|hsdp|deepspeed", command):
        assert 0 < counted < 2 * MATRICES  # the first process has its share
    elif "train_vision" not in command:
        assert counted == 2 * MATRICES


PRINTED = {
    "hf-emopt doctor$": "no problem found",
    "hf-emopt doctor --json": '"ok": true',
    "hf-emopt doctor --config": "nothing in it would be refused",
    "hf-emopt inspect [^ ]*$": rf"(?s)({'momentum_buffer float32.*' * MATRICES})",
    "hf-emopt convert": "optimizer",
    "make test": "passed",
    "pip install --dry-run -e": "Would install hf-emopt",
    "hf-emopt plan path": "model.layers.0.mlp.down_proj.weight",
    "hf-emopt plan --model": "(?s)fsdp2.*hsdp",
}


def check_report(page: str) -> None:
    """Figures of both steps, of every matrix."""
    (data,) = re.findall(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    content = json.loads(data)
    assert content["heat"]["steps"] == [1, 2]
    assert len(content["heat"]["quantities"]["orthogonality_error"]["layers"]) == MATRICES


# ---------------------------------------------------------------------------------------------- nothing is left out


def test_every_block_of_shell_is_found() -> None:
    """Fences are opened and closed, and those of shells have a name that is looked for."""
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert not any(fences[1::2]), page
        assert set(fences[::2]) <= {*SHELL, "python", "json", "yaml", "text", ""}, page
        assert len([name for name in fences[::2] if name in SHELL]) == len(blocks_of(page))


def test_unnamed_blocks_hold_no_commands() -> None:
    for page in PAGES:
        for block in re.findall(r"^```(?:text)?\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
            assert not re.search(rf"^\s*(\$ |{COMMAND})", block, flags=re.MULTILINE), f"{page.name}: call it bash"


def test_stand_ins_are_for_blocks_that_are_there() -> None:
    names = {block.name for block in BLOCKS}
    assert {*TOGETHER, *TOGETHER.values(), *BEFORE} <= names
    commands = {command for block in BLOCKS for command in block.commands}
    assert ELSEWHERE.keys() <= commands


def test_continuous_integration_runs_what_is_not_run_here() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [re.sub(r"(\s#.*| TIERS=second_tier.*)", "", line) for line in lines]
    assert ELSEWHERE.keys() <= set(commands)
    assert commands[-2:] == ["make test", "make test-all"]


COMMAND = r"(?:[A-Z_]+=\S+ )*(?:pip3?|python3?|accelerate|torchrun|deepspeed|hf-emopt|make|pre-commit|apt-get|git) "

IN_TEXT = {
    "accelerate launch": "a name",
    "apt-get install chromium": ".ci/run does it",
    "pre-commit install": "writes into .git; tests/project/test_packaging.py has the hooks, and `make lint` runs them",
    "python benchmarks/forecast_errors.py": "tests/tools/test_forecast.py calls all of it",
    "python benchmarks/forecast_errors.py --write": "likewise, and compares what is written",
    "hf-emopt bench kernels": "needs a GPU; tests/linalg/test_triton_interpreter.py has its code",
    "hf-emopt bench kernels --tune table.json": "likewise",
}
"""Commands between backquotes in a sentence that are not the beginning of one that is executed, and why not."""


def test_commands_in_sentences_are_those_that_are_executed() -> None:
    """What stands in a sentence is a short form of a command of some block, or needs a reason."""
    known = {" ".join(command.split()) for block in BLOCKS for command in block.commands}
    starts = {tuple(plain(command)[:2]) for command in known}
    missing = set()
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
            command = " ".join(span.split())
            if re.match(COMMAND, command) and command not in IN_TEXT and tuple(plain(command)[:2]) not in starts:
                missing.add(f"{page.name}: {command}")
    assert not missing


def plain(command: str) -> list[str]:
    """The words of a command without variables in front; of ``hf-emopt bench``, also which."""
    words = [word for word in shlex.split(command) if not re.match("[A-Z_]+=", word)]
    return [" ".join(words[:2]), *words[2:]] if words[:2] == ["hf-emopt", "bench"] else words
