"""The shell commands of the documentation, and what stands in for what a reader has and this machine has not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh", "shell", "console")


@dataclass(frozen=True)
class Block:
    """One fenced block of shell commands.

    Attributes:
        page: path under the repository's root.
        number: among the blocks of the page.
        commands: lines without comments, continued lines joined.
    """

    page: str
    number: int
    commands: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.number}"


def blocks_of(page: Path, root: Path = ROOT) -> list[Block]:
    """The shell blocks of a page, in its order."""
    found = re.findall(
        rf"^```(?:{'|'.join(SHELL)})\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    blocks = []
    for number, text in enumerate(found):
        lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
        blocks.append(Block(str(page.relative_to(root)), number, tuple(" ".join(x.split()) for x in lines if x)))
    return blocks


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

ELSEWHERE = {
    "make lint": "continuous integration is this command: .ci/run has it on a line of its own, before the tests",
    "make docs": "likewise",
    "make test-minimum": "likewise; it makes an environment of its own",
    "make test-all": "likewise, without what `make test` has run",
}
"""Commands that no test runs, and why. Anything else in a shell block is run."""

TOGETHER = {
    "docs/diagnostics.md:1": "docs/diagnostics.md:0",  # the report of the run above it
    "docs/environments/deepspeed.md:2": "docs/environments/deepspeed.md:1",  # converts that run's checkpoint
}
"""Blocks that need what another has written, which is run first, in the same folder."""

BEFORE = {
    "docs/checkpoints.md:0": "python examples/run_clm.py configs/run_clm.yaml --output_dir output "
    "--save_strategy steps --save_steps 1",
}
"""What a page takes to have happened already."""

TINY_LLAMA = (
    "hidden_size=32,intermediate_size=48,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=2,head_dim=16"
)
TEXT = (
    "--train_file path/to/texts --held_out_every 4 --piece_chars 400 --block_size 16 --max_train_blocks 16 "
    "--max_eval_blocks 4"
)
SHORT = (
    "--max_steps 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --logging_steps 1 --eval_strategy no"
)
CPU = "--use_cpu true --disable_tqdm true"

REPLACED = {
    r"\bHuggingFaceTB/SmolLM2-135M\b": "path/to/model",  # no Hub
    r"\bcheckpoint-\d+\b": "checkpoint-1",  # runs have two steps
    r"--save_steps \d+": "--save_steps 1",
    r"^(accelerate|hf-emopt) launch (?!.*--main_process_port)": r"\1 launch --main_process_port {port} ",
    r"^torchrun ": "torchrun --standalone ",  # a free port, for tests beside this one
    r"^(torchrun .*--tp_size)": r"SHARDED_ON_CPU=1 \1",
    r"^(torchrun .*step_time_deepspeed)": r"DEEPSPEED_ON_CPU=1 \1",
    r" --bf16\b": "",  # Trainer has that autocast for GPUs
    r"--(search|lengths) (\w+):\d+": r"--\1 \2:2",
    r"\bpip install ": "pip install --dry-run ",  # up to where files would be written
}
"""Patterns of a command and what they become. `path/to/model`, `path/to/texts` and `run_clm.py` need none: they are there."""

ADDED = {
    r"examples/run_clm\.py .*--model_name_or_path": f"{TEXT} {SHORT} {CPU}",
    r"examples/run_clm\.py": f"{TEXT} --vocab_size 300 --config_overrides {TINY_LLAMA} {SHORT} {CPU}",
    r"examples/run_classification\.py": "--train_file rows.jsonl --hidden_size 32 --num_layers 1 --vocab_size 400 "
    f"--max_length 32 {SHORT} {CPU}",
    r"examples/train_vision\.py": f"{SHORT} {CPU}",
    r"examples/pretrain_demo\.py": "--train_file path/to/texts --max_steps 2 --batch_size 2 --block_size 16 --eval_blocks 4",
    r"^make demo": "DEMO_ARGS='--train_file path/to/texts --max_steps 2 --batch_size 2 --block_size 16 --vocab_size 300 "
    "--hidden_size 32 --num_layers 1 --eval_blocks 4'",
    r"^make test": "PYTEST_ARGS='tests/distributed/test_refresh_steps.py -q -p no:cacheprovider'",  # not itself again
    r"run_clm\.py --optim": "",  # the reader's own script, tiny as it is
    r"finetune_sweep\.py run": "--lr 1e-3 --seeds 0 --max_steps 2 --length 16 --batch_size 2 --train_rows 8 "
    "--eval_rows 4 --processes 1",
    r"convergence\.py tokens": "--vocab_size 300 --held_out_every 4 --piece_chars 400",
    r"convergence\.py run": "--hidden 64 --layers 1 --mlp 64 --length 16 --batch 2 --eval_blocks 2 --warmup 1 "
    "--precision fp32",
    r"benchmarks/step_time\.py": "--model tiny --tokens 64 --length 32 --steps 1 --warmup 1",
    r"benchmarks/step_time_deepspeed\.py": "--model tiny --optimizers muon --sequences 1 --length 32 --steps 1 "
    "--warmup 1",
    r"benchmarks/tensor_parallel\.py": "--shapes 32x64 --steps 1 --warmup 1",
    r"hf-emopt bench step": "--tokens 32 --length 16 --steps 1 --warmup 1 --no-alternatives",
}
"""Flags that make a command small, appended where the pattern is found; the first that is found counts."""


def executed(command: str, port: int) -> str:
    """The command line that is run for one of the documentation."""
    for pattern, replacement in REPLACED.items():
        command = re.sub(pattern, replacement, command)
    added = next((flags for pattern, flags in ADDED.items() if re.search(pattern, command)), "")
    return f"{command} {added}".strip().replace("{port}", str(port))
