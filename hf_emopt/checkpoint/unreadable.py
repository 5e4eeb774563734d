"""Why ``torch.load`` could not read a file, in words that help: its own recommend to run code from it, or are a number."""

from __future__ import annotations

import codecs
import re
import zipfile
from pathlib import Path

__all__ = ["why_unreadable"]

_INTERRUPTED = (
    "If the save was interrupted, resume from an older checkpoint; hf_emopt.newest_checkpoint(output_dir) finds the newest "
    "that is whole"
)
_OTHER = "Name a checkpoint's folder, or the file with the optimizer's state in it (optimizer.pt, optimizer.bin)"
_CLASS = re.compile(r"GLOBAL ([\w.]+)")  # of torch's unpickler, which names what it does not allow
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def why_unreadable(path: Path, error: Exception) -> str:
    """Cause and fix.

    Args:
        path: a file.
        error: what ``torch.load(path, weights_only=True)`` raised.
    """
    with path.open("rb") as file:
        head = file.read(64)
    foreign = _CLASS.search(str(error))
    if not head:
        return f"it is empty. {_INTERRUPTED}"
    if foreign is not None:
        return f"it holds an object of {foreign[1]}, and no code is run from a file. {_OTHER}"
    if zipfile.is_zipfile(path):
        first = next(iter(_COLOURS.sub("", str(error)).strip().splitlines()), type(error).__name__)
        return f"it is damaged, or a zip file that torch.save has not written ({first}). {_INTERRUPTED}"
    if head.startswith(b"PK"):
        return f"it is cut short: it has no directory at its end. {_INTERRUPTED}"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        return f"it is a file of safetensors, which holds weights and no state of an optimizer. {_OTHER}"
    if head.startswith(b"\x80"):
        return f"it is a pickle that torch.save has not written, or is cut short. {_INTERRUPTED}"
    kind = "a text, and" if _is_text(head) else "no file of safetensors and"
    return f"it is {kind} no file of torch.save. {_OTHER}"


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # which may end within a character
    except UnicodeDecodeError:
        return False
    return all(character >= " " or character in "\t\r\n" for character in text)
