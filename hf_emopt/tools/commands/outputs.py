"""Checks of output paths before a command works for minutes, and errors of the system in one line."""

from __future__ import annotations

import os
from pathlib import Path

_FIXES: dict[type[OSError], str] = {
    IsADirectoryError: "it is a folder: name a file",
    NotADirectoryError: "a part of the path is a file: name a folder there, or another place",
    FileExistsError: "it is there already: name another place",
    PermissionError: "name a place that you may read or write, or change its permissions",
}


def check_output(flag: str, path: str | Path, folder: bool = False, make_parents: bool = True) -> None:
    """Refuses a path that could not be written.

    Args:
        flag: that the path was given by, for the message.
        folder: a folder is to be made there, not a file.
        make_parents: folders around it are made where there are none.

    Raises:
        ValueError: with the path and the fix.
    """
    target = Path(path)
    if not folder and target.is_dir():
        raise ValueError(f"{flag} {path} is a folder: name a file, in it or elsewhere")
    above = next(parent for parent in (target, *target.absolute().parents) if os.path.exists(parent))
    if not above.is_dir() and (folder or above != target):
        raise ValueError(f"{flag} {path}: {above} is a file, and no folder to write into: name another place")
    if not make_parents and above != target and above != target.absolute().parent:
        raise ValueError(f"{flag} {path}: there is no folder {target.parent}: make it, or name another")
    if not os.access(above, os.W_OK):
        raise ValueError(f"{flag} {path}: {above} may not be written: name another place, or change its permissions")


def said(error: OSError) -> str:
    """The cause, the file and the fix in one line; the bare message of an error that has no file."""
    if error.filename is None or error.strerror is None:
        return str(error)
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    fix = next((text for kind, text in _FIXES.items() if isinstance(error, kind)), "")
    return f"{names}: {error.strerror}" + (f"; {fix}" if fix else "")
