"""Runs an unmodified training script with this package imported: its optimizer names are known to the script's parser.

.. code-block:: bash

    python -m hf_emopt.run run_clm.py --optim muon ...
    accelerate launch -m hf_emopt.run run_clm.py --optim muon ...
    torchrun --nproc_per_node 2 -m hf_emopt.run -m package.module --optim muon ...
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

import hf_emopt  # noqa: F401 - registers the optimizers

USAGE = "usage: python -m hf_emopt.run SCRIPT [ARGUMENTS ...]\n       python -m hf_emopt.run -m MODULE [ARGUMENTS ...]"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs ``argv[0]`` as ``__main__`` with the rest as its arguments, as the Python interpreter would.

    Args:
        argv: script and its arguments, or ``-m``, module and its arguments; ``sys.argv[1:]`` by default.

    Raises:
        SystemExit: no script, or one that does not exist; the message says how to call.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_module = arguments[:1] == ["-m"]
    target = arguments[is_module : is_module + 1]
    if target and target[0] in ("-h", "--help"):
        print(USAGE)
        return
    if not target or target[0].startswith("-"):
        raise SystemExit(USAGE)
    sys.argv = arguments[is_module:]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(target[0]):
        raise SystemExit(f"no such script: {target[0]}\n{USAGE}")
    sys.path[0] = os.path.dirname(os.path.abspath(target[0]))
    runpy.run_path(target[0], run_name="__main__")


if __name__ == "__main__":
    main()
