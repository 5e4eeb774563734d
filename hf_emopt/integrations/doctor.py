"""``hf-emopt doctor``: what is installed, what would run how on this machine, and which settings would be refused."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from hf_emopt._version import __version__
from hf_emopt.integrations.accelerate import ENVIRONMENT_PREFIX, EmoptPlugin
from hf_emopt.integrations.callback import level_of_environment
from hf_emopt.integrations.config_files import problems_of_config
from hf_emopt.integrations.sharded_checkpoints import can_save
from hf_emopt.kernels.triton import configs, runtime

Status = Literal["ok", "note", "problem"]

TESTED = {
    "torch": "2.13", "transformers": "5.24", "accelerate": "1.15", "deepspeed": "0.19", "peft": "0.21", "triton": "3.9",
}  # fmt: skip
"""Newest versions that the tests have run with."""

_WHAT_FOR = {"deepspeed": "training under DeepSpeed", "peft": "LoRA and its kin", "triton": "kernels on NVIDIA GPUs"}
"""Optional packages that a user may miss."""


@dataclass(frozen=True)
class Finding:
    """One line of the report. A ``"problem"`` has its fix in the text, and makes the exit status 1."""

    section: str
    name: str
    status: Status
    text: str


def examine(config: str | Path | None = None) -> list[Finding]:
    """Examines this machine and, if given, a configuration file. Errors as for ``config_files.problems_of_config``."""
    findings = [*_environment(), *_versions(), *_backends(), *_kernels()]
    if config is not None:
        findings += _config(config)
    return findings


def run(config: str | None, as_json: bool) -> int:
    """Prints what :func:`examine` finds; 1 when there is a problem."""
    findings = examine(config)
    problems = [f for f in findings if f.status == "problem"]
    if as_json:
        print(json.dumps({"ok": not problems, "findings": [asdict(f) for f in findings]}))
        return int(bool(problems))
    marks = {"ok": "  ", "note": "- ", "problem": "! "}
    width = max(len(f.name) for f in findings)
    for section, lines in groupby(findings, key=lambda f: f.section):
        print(f"{section}:")
        for finding in lines:
            print(f"  {marks[finding.status]}{finding.name:<{width}}  {finding.text}")
    print(f"{len(problems)} problem(s)" if problems else "no problem found")
    return int(bool(problems))


def _environment() -> Iterator[Finding]:
    section = "environment"
    yield Finding(section, "python", "ok", f"{platform.python_version()} on {platform.platform()}")
    yield Finding(section, "hf_emopt", "ok", f"{__version__} from {Path(__file__).parent.parent}")
    yield Finding(section, "cpu", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch")
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        text = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm_{card.major}{card.minor}"
        yield Finding(section, f"gpu {index}", "ok", text)
    if not torch.cuda.device_count():
        yield Finding(section, "gpu", "ok", f"none that torch {torch.__version__} sees")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        yield Finding(section, "launched as", "ok", f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    for variable in sorted(v for v in os.environ if v.startswith((ENVIRONMENT_PREFIX, "HF_EMOPT_"))):
        yield Finding(section, variable, "ok", os.environ[variable])
    for check in (EmoptPlugin, level_of_environment):
        try:
            check()
        except ValueError as error:
            yield Finding(section, "variables", "problem", str(error))


def _versions() -> Iterator[Finding]:
    try:
        wanted = requires("hf-emopt") or []
    except PackageNotFoundError:
        text = "run from a folder that is not installed: no ranges to check against"
        yield Finding("versions", "hf-emopt", "note", text)
        wanted = []
    found: dict[str, Requirement] = {}
    for requirement in map(Requirement, wanted):
        name = requirement.name.lower()
        extras = ("", *_WHAT_FOR) if name in _WHAT_FOR else ("",)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras):
            found.setdefault(name, requirement)
    for name in dict.fromkeys((*found, *_WHAT_FOR)):
        yield _package(name, found.get(name) or Requirement(name))


def _package(name: str, requirement: Requirement) -> Finding:
    wanted = f"{name}{requirement.specifier}"
    try:
        found = version(name)
    except PackageNotFoundError:
        if name in _WHAT_FOR:
            return Finding("versions", name, "note", f"not installed; for {_WHAT_FOR[name]}: pip install '{wanted}'")
        return Finding("versions", name, "problem", f"not installed: pip install '{wanted}'")
    if not requirement.specifier.contains(found, prereleases=True):
        text = f"{found} is outside {requirement.specifier}: pip install '{wanted}'"
        return Finding("versions", name, "problem", text)
    tested = TESTED.get(name)
    if tested is not None and Version(found).release[:2] > Version(tested).release[:2]:
        return Finding("versions", name, "note", f"{found}, newer than the newest tested, {tested}")
    return Finding("versions", name, "ok", f"{found} ({requirement.specifier or 'any'})")


def _backends() -> Iterator[Finding]:
    gpus = torch.cuda.device_count()
    wire = "bfloat16" if gpus else "float32"
    several = f"{gpus} GPUs over nccl" if gpus > 1 else f"processes on the CPU over gloo ({gpus} GPU)"
    section = "backends"
    where = f"{torch.cuda.get_device_name(0)}" if gpus else "the CPU"
    yield Finding(section, "one process", "ok", f"every matrix is transformed on {where}")
    if not torch.distributed.is_available():
        yield Finding(section, "several", "note", "this build of torch has no torch.distributed: one process only")
        return
    text = f"{several}; one owner a matrix, its state there alone, updates gathered in {wire}"
    yield Finding(section, "DDP", "ok", text)
    yield Finding(section, "FSDP2", "ok", f"{several}; shards go to the owner of a matrix and updates back, in {wire}")
    yield Finding(section, "HSDP", "ok", "as FSDP2 within a replica; all replicas share the work. Needs 4 processes")
    yield Finding(section, "FSDP1", "note", "refused: it flattens matrices. Use FSDP2 (fsdp_version: 2)")
    yield _tensor_parallelism()
    try:
        text = 'ZeRO 0 to 3 without an "optimizer" block; gradients are clipped before the transform'
        yield Finding(section, "DeepSpeed", "ok", f"{version('deepspeed')}: {text}")
    except PackageNotFoundError:
        yield Finding(section, "DeepSpeed", "note", "not installed")


def _tensor_parallelism() -> Finding:
    import transformers.distributed

    status: Status = "note"
    text = "transformers has no DistributedConfig: upgrade it to shard models while they load"
    if hasattr(transformers.distributed, "DistributedConfig"):
        text = "trains; saving the optimizer of a model that was sharded while it was loaded takes transformers 5.20"
        if can_save():
            status, way = "ok", "tensor_parallel=auto picks the cheapest way for each matrix"
            text = f"transformers' DistributedConfig (tp_size, ep_size); {way}"
    return Finding("backends", "tensor parallel", status, text)


def _kernels() -> Iterator[Finding]:
    """Which products run as Triton kernels, and why the others do not."""
    section, device = "kernels", torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu")
    reason = _no_kernels(device)
    if reason is not None:
        status: Status = "note" if device.type == "cuda" else "ok"
        yield Finding(section, "triton", status, f"off, torch's products run: {reason}")
        return
    yield Finding(section, "triton", "ok", f"on for {device}{' (interpreter)' if runtime.interpreting() else ''}")
    capability = runtime.architecture(device)
    if capability is None:
        return
    path, entries = configs.table_path(capability), configs.load_table(capability)
    text = f"{path.name} has {len(entries)} measured problems: symmetric products and the Gram form run as kernels"
    if not entries:
        text = (
            f"no table for sm_{capability}: orthogonalization runs in torch, elementwise passes as kernels. Measure one with "
            f"`hf-emopt bench kernels --tune TABLE` and set {configs.TABLE_VARIABLE}=TABLE"
        )
    yield Finding(section, f"table sm_{capability}", "ok" if entries else "note", text)


def _no_kernels(device: torch.device) -> str | None:
    if runtime.supported(device):
        return None
    if runtime.kernels_disabled():
        return f"{runtime.DISABLE_VARIABLE}={os.environ[runtime.DISABLE_VARIABLE]} in the environment; unset it"
    if device.type != "cuda":
        return "they need an NVIDIA GPU"
    if not runtime.triton_installed():
        return "they need Triton 3.4 or later: pip install 'hf-emopt[triton]'"
    if torch.version.hip is not None:
        return "they are for NVIDIA GPUs, and this torch is built for ROCm"
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"they need compute capability 8.0, and this GPU has {capability}"


def _config(path: str | Path) -> Iterator[Finding]:
    kind, problems = problems_of_config(path)
    for problem in problems:
        yield Finding("config", str(path), "problem", problem)
    if not problems:
        yield Finding("config", str(path), "ok", f"a configuration of {kind}: nothing in it would be refused")
