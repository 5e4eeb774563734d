"""A parser of a command line whose mistakes are answered where they were made."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know itself: argparse leaves that to the parser around the subcommands, with its usage."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As of argparse, but nothing unknown is left over: the first such option ends it, with the nearest known one."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            named = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            close = difflib.get_close_matches(named[0], self._option_string_actions, n=1) if named else []
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown
