"""Text for the examples: sources, a hold-out that does not leak, a tokenizer, and packing into blocks.

Everything here runs offline and needs only `torch`, `transformers` and `tokenizers`.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Third-party code is not the standard library; the test suites are left out because some distributions do not ship
# them, so that the corpus is the same text everywhere for one Python version.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".text"})


def stdlib_files() -> list[Path]:
    """Every `*.py` of the running interpreter's standard library, sorted, without tests and third-party packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED_FOLDERS)
        found += [Path(folder) / name for name in sorted(files) if name.endswith(".py")]
    if not found:
        raise FileNotFoundError(
            f"no Python source under {root}: this interpreter ships its standard library compiled or zipped. "
            "Give text of your own with --train_file."
        )
    return found


def read_documents(paths: Iterable[Path]) -> list[str]:
    """Text of each file, undecodable files skipped, exact duplicates and empty files dropped (order kept)."""
    documents: dict[str, None] = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few standard library files declare another encoding
        if text.strip():
            documents.setdefault(text)
    return list(documents)


def stdlib_documents() -> list[str]:
    """The standard library's modules as text, one document per file."""
    return read_documents(stdlib_files())


def text_documents(source: str | Path) -> list[str]:
    """Documents from one text file, or from every text file below a folder (`.txt .md .rst .py .text`).

    Raises:
        FileNotFoundError: `source` does not exist, or the folder holds no text file.
    """
    path = Path(source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in _TEXT_SUFFIXES and f.is_file())
    else:
        raise FileNotFoundError(f"no such text file or folder: {path}")
    documents = read_documents(files)
    if not documents:
        raise FileNotFoundError(
            f"{path} holds no text: expected a UTF-8 file, or a folder with {sorted(_TEXT_SUFFIXES)}"
        )
    return documents


def split_documents(
    documents: Sequence[str], every: int = 50, piece_chars: int = 4096
) -> tuple[list[list[str]], list[list[str]]]:
    """Cut every document into pieces and hold out each `every`-th piece of the whole corpus.

    The cut is made in the text, before a tokenizer is trained or anything is packed, so no held-out character reaches
    the vocabulary or a training block. Every `every`-th piece rather than the tail is held out because documents
    usually stand in alphabetical or date order.

    Returns:
        `(train, held_out)`, each a list of runs; a run is a list of consecutive pieces of one document. Runs never
        continue across a held-out piece or a document's end.

    Raises:
        ValueError: the corpus is too small to hold anything out.
    """
    train: list[list[str]] = []
    held_out: list[list[str]] = []
    index = 0
    for document in documents:
        run: list[str] = []
        for start in range(0, len(document), piece_chars):
            piece = document[start : start + piece_chars]
            index += 1
            if index % every == 0:
                held_out.append([piece])
                if run:
                    train.append(run)
                run = []
            else:
                run.append(piece)
        if run:
            train.append(run)
    if not train or not held_out:
        raise ValueError(
            f"the text makes {index} pieces of {piece_chars} characters, too few to hold out every {every}th: "
            "give more text, a smaller --held_out_every, or a --validation_file."
        )
    return train, held_out


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 4096, max_chars: int = 10_000_000, *, for_classification: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on up to `max_chars` characters of `texts`.

    With `for_classification`, encoded sequences are wrapped as `[CLS] ... [SEP]` as BERT-like models expect.
    """

    def sample() -> Iterable[str]:
        left = max_chars
        for text in texts:
            if left <= 0:
                return
            yield text[:left]
            left -= len(text)

    special = ["[PAD]", "[CLS]", "[SEP]"] if for_classification else ["<|endoftext|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        sample(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if not for_classification:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


def pack_blocks(
    runs: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    max_blocks: int | None = None,
) -> torch.Tensor:
    """Tokenize runs, join them with the end-of-text token and cut the stream into blocks.

    Returns:
        int64 token ids of shape `(blocks, block_size)`; the remainder of the stream is dropped.

    Raises:
        ValueError: the tokenizer has no end-of-text token, or the text does not fill one block.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token to put between documents: set one before packing.")
    stream: list[int] = []
    batch = 64
    for start in range(0, len(runs), batch):
        texts = ["".join(run) for run in runs[start : start + batch]]
        # verbose=False: whole documents are longer than the model's context on purpose; they are cut right below.
        for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
        if max_blocks is not None and len(stream) >= max_blocks * block_size:
            break
    blocks = len(stream) // block_size
    if max_blocks is not None:
        blocks = min(blocks, max_blocks)
    if blocks == 0:
        raise ValueError(f"the text gives {len(stream)} tokens, less than one block of {block_size}: give more text.")
    return torch.tensor(stream[: blocks * block_size], dtype=torch.int64).view(blocks, block_size)


class BlockDataset(Dataset[dict[str, torch.Tensor]]):
    """Blocks of token ids, `(blocks, block_size)`, as causal-LM samples; `labels` are `input_ids`, the model shifts."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return self.blocks.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index]
        return {"input_ids": block, "labels": block}
