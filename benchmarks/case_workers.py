"""Cases of a benchmark on several ranks, in processes that are replaced when a case fails or takes too long.

Every rank of ``torchrun`` keeps one worker process, which has the accelerator; workers form a process group of their own. A
case that raises on some rank, dies, or outlasts its time costs its own figures alone: all workers are then killed, since
nobody knows what a broken group still has in flight, and the next case gets new ones.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

__all__ = ["Ranks", "Unavailable"]

_GRACE = 5.0
"""Seconds that a rank gets to report after another has failed."""


class Unavailable(Exception):
    """A case cannot be run here, which all ranks find out alike and before their first collective."""


class Ranks:
    """This rank's part of all.

    Args:
        function: importable; called as ``function(device, **case)`` in the worker, with its process group formed. Returns
            figures that JSON can hold.
        budget: seconds for all cases together.
        limit: seconds for one case.
    """

    def __init__(self, function: Callable[..., dict[str, Any]], budget: float, limit: float) -> None:
        self.function, self.budget, self.limit = function, budget, limit
        self.begin = time.monotonic()
        self.store, self.rank, self.size = next(iter(rendezvous("env://")))
        self.store.set_timeout(timedelta(seconds=budget + limit))
        self._generation, self._number = 0, 0
        self._process: Any = None
        self._pipe: Connection | None = None
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            # One folder of this run: a worker that is killed while it compiles leaves a lock there, for which all wait.
            if self.rank == 0:
                self.store.set("extensions", tempfile.mkdtemp(prefix="extensions"))
            os.environ["TORCH_EXTENSIONS_DIR"] = self.store.get("extensions").decode()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.begin

    def run(self, **case: Any) -> dict[str, Any]:
        """Figures of a case as rank 0 has them, or ``{"unavailable": reason}`` or ``{"failed": reason}``, on all ranks."""
        self._number += 1
        key = f"case-{self._number}"
        if self.rank == 0:
            self.store.set(f"{key}/seconds", str(min(self.limit, self.budget - self.seconds)))
        seconds = float(self.store.get(f"{key}/seconds"))
        if seconds <= 0:
            return {"unavailable": f"not run: the {self.budget:.0f} s of all cases were over"}
        self.store.set(f"{key}/{self.rank}", json.dumps(self._outcome(key, case, seconds)))
        outcomes = [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.size)]
        failed = [f"rank {rank}: {found['failed']}" for rank, found in enumerate(outcomes) if "failed" in found]
        unavailable = [found for found in outcomes if "unavailable" in found]
        if not failed and len(unavailable) in (0, self.size):
            return outcomes[0]  # type: ignore[no-any-return]
        self._replace(key)
        # Of a rank that was only waiting for another the reason says nothing.
        reasons = [reason for reason in failed if "another rank" not in reason] or failed
        return {"failed": reasons[0]} if reasons else unavailable[0]

    def _outcome(self, key: str, case: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What this rank's worker answers, which it gets ``seconds`` for."""
        if self._process is None:
            self._start()
        assert self._pipe is not None
        deadline, others_failed = time.monotonic() + seconds, False
        try:
            self._pipe.send(case)
            while time.monotonic() < deadline:
                if self._pipe.poll(0.5):
                    found: dict[str, Any] = self._pipe.recv()
                    if "failed" in found:
                        self.store.set(f"{key}/failed", "")
                    return found
                if not others_failed and self.store.check([f"{key}/failed"]):
                    others_failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        except (EOFError, OSError):
            self._process.join(5)
            self.store.set(f"{key}/failed", "")
            return {"failed": f"the process died with exit code {self._process.exitcode}"}
        return {"failed": "another rank failed" if others_failed else f"took longer than {seconds:.0f} s"}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self.function, theirs, self._generation), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """Ends this rank's worker."""
        if self._process is not None:
            for number in (
                signal.SIGTERM,
                signal.SIGKILL,
            ):  # ninja ends the compilers it has started, if it is asked to
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                self._process.join(3)
        self._process = None

    def _replace(self, key: str) -> None:
        self.close()
        self._generation += 1
        self.store.set(f"{key}/gone-{self.rank}", "")
        self.store.wait([f"{key}/gone-{rank}" for rank in range(self.size)])
        if self.rank == 0:
            for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).rglob("lock"):
                lock.unlink(missing_ok=True)
            self.store.set(f"{key}/clean", "")
        self.store.wait([f"{key}/clean"])


def _work(function: Callable[..., dict[str, Any]], pipe: Connection, generation: int) -> None:
    """Main function of a worker."""
    os.setpgrp()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store, rank, size = next(iter(rendezvous("env://")))
    store = dist.PrefixStore(f"workers-{generation}", store)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size)
    while True:
        case = pipe.recv()
        try:
            answer = function(device, **case)
        except Unavailable as error:
            answer = {"unavailable": _first_line(error.__cause__ or error)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"failed": _first_line(error)}
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        pipe.send(answer)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
