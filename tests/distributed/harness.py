"""Runs functions on several ranks of one gloo process group, and turns every way of failing into a test failure.

A :class:`World` keeps its processes and its process group between cases, so that a case costs milliseconds and is still
a test of its own. A case is a module-level function of keyword arguments, called on every rank at once. A rank that
raises, dies or does not come back fails the case with every rank's traceback, or with its stack where it hangs; the
processes are then killed and the next case gets new ones, since nobody knows what a broken group still has in flight.

Processes are forked from a server that has imported the package and does nothing else, so a new world takes no imports.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["RankFailure", "World", "Worlds", "run_alone"]

TIMEOUT = 120.0
"""Seconds that a case may take: a hang is a failure."""

GRACE = 10.0
"""Seconds that the other ranks get to report after one has failed."""

MOST_GROUPS = 48
"""Process groups that ranks may have before they are replaced: every device mesh leaves some behind, and each of them has
threads that wake up all the time."""

PRELOADED = ["torch.distributed.fsdp", "accelerate", "hf_emopt"]
"""What cases import anyway, once for all processes. A module that starts threads when it is imported would break forking."""

START_TIMEOUT = 180.0
"""Seconds to import the package once and to form a process group."""


class RankFailure(AssertionError):
    """A case failed on some rank; the message has every rank's traceback or stack."""


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    stack_file: Path


@dataclass
class World:
    """``size`` processes in one gloo group.

    Attributes:
        size: number of ranks.
        timeout: seconds that a case may take before all ranks are killed.
        grace: seconds that the others get once one rank has failed.
        grouped: whether the processes form a group; a case may otherwise form its own.
        starts: how often processes were started; again after a failure, and when they have too many process groups.
    """

    size: int
    timeout: float = TIMEOUT
    grace: float = GRACE
    grouped: bool = True
    starts: int = 0
    _ranks: list[_Rank] = field(default_factory=list)
    _folder: Path | None = None
    _groups: int = 0

    def run(self, function: Callable[..., Any], /, **kwargs: Any) -> list[Any]:
        """Calls ``function(**kwargs)`` on every rank and returns what each rank returned, by rank.

        Args:
            function: importable by name; its result may hold tensors, and is copied.
            kwargs: picklable.

        Raises:
            RankFailure: when a rank raised, died or did not return in time.
        """
        if self._groups > MOST_GROUPS:
            self.kill()
        if not self._ranks:
            self._start()
        task = pickle.dumps((function.__module__, function.__qualname__, kwargs))
        for rank in self._ranks:
            rank.pipe.send_bytes(task)
        return self._collect(f"{function.__qualname__}({', '.join(f'{k}={v!r}' for k, v in kwargs.items())})")

    def _collect(self, what: str, timeout: float | None = None) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        waiting = dict(enumerate(self._ranks))
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([r.pipe for r in waiting.values()], timeout=remaining)
            for number, rank in list(waiting.items()):
                if rank.pipe not in ready:
                    continue
                del waiting[number]
                try:
                    succeeded, value, self._groups = _loads(rank.pipe.recv_bytes())
                except (EOFError, OSError):
                    rank.process.join(5)
                    succeeded, value = False, f"the process died with exit code {rank.process.exitcode}"
                if succeeded:
                    results[number] = value
                else:
                    failures[number] = value
                    deadline = min(deadline, time.monotonic() + self.grace)
        if not waiting and not failures:
            return [results[number] for number in range(self.size)]
        for number, stack in self._stacks(list(waiting)).items():
            failures[number] = f"still running after {limit:.0f} s at most; its stack:\n{stack}"
        self.kill()
        lines = [f"{what} failed on ranks {sorted(failures)} of {self.size}"]
        for number in range(self.size):
            lines.append(f"--- rank {number}: {failures.get(number, 'returned')}")
        raise RankFailure("\n".join(lines))

    def _stacks(self, numbers: list[int]) -> dict[int, str]:
        """Where each of these ranks is, by faulthandler, which needs no cooperation of the interpreter."""
        for number in numbers:
            if self._ranks[number].process.is_alive():
                os.kill(self._ranks[number].process.pid, signal.SIGUSR1)
        if numbers:
            time.sleep(1)
        return {n: self._ranks[n].stack_file.read_text() or "(it wrote none)" for n in numbers}

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = Path(tempfile.mkdtemp(prefix="world"))
        self.starts += 1
        store = str(self._folder / "store") if self.grouped else None
        for number in range(self.size):
            ours, theirs = context.Pipe()
            stack_file = self._folder / f"stack{number}"
            stack_file.touch()
            process = context.Process(
                target=_rank_main,
                args=(number, self.size, theirs, store, str(stack_file), list(sys.path)),
                daemon=True,
            )
            # The server inherits the environment of the moment at which the first process is started.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, ours, stack_file))
        self._collect("forming the process group", START_TIMEOUT)

    def kill(self) -> None:
        """Ends all processes at once; the next case starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()
        self._ranks.clear()
        self._groups = 0
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class Worlds:
    """Worlds by size, started when first needed."""

    def __init__(self) -> None:
        self._by_size: dict[int, World] = {}

    def __getitem__(self, size: int) -> World:
        return self._by_size.setdefault(size, World(size))

    def kill(self) -> None:
        for world in self._by_size.values():
            world.kill()


def run_alone(function: Callable[[], None]) -> None:
    """Calls a function in a new process, which takes no imports, and raises what it raised.

    Args:
        function: importable by name.

    Raises:
        RankFailure: with the traceback of the process, or when it has died or did not return in time.
    """
    world = World(1, grouped=False)
    try:
        world.run(function)
    finally:
        world.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _dumps(value: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _rank_main(number: int, size: int, pipe: Connection, store: str | None, stack_file: str, path: list[str]) -> None:
    """Main function of a process: joins the group, then runs cases until it is killed or the pipe is closed."""
    with open(stack_file, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        # What torchrun would set, for libraries that read it.
        os.environ.update(
            RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1",
        )  # fmt: skip
        sys.path[:] = path
        gc.freeze()  # what was imported stays: a collection after every case that went through it took longer than the case
        try:
            if store is not None:
                _form_group(number, size, store)
            pipe.send_bytes(_dumps((True, None, 1)))
            while True:
                _run_case(pipe, *pickle.loads(pipe.recv_bytes()))
        except EOFError:
            pass
        except BaseException:
            pipe.send_bytes(_dumps((False, traceback.format_exc(), 0)))
            raise


def _form_group(number: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A store in a file needs no port, so nobody else can take it. Collectives give up after the case's own limit, so that
    # a hang shows as a stack of every rank and not as a time-out of one.
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size)
    dist.barrier()


def groups() -> int:
    """Process groups of this rank."""
    from torch.distributed import distributed_c10d

    return len(distributed_c10d._world.pg_map)


def _run_case(pipe: Connection, module: str, qualname: str, kwargs: dict[str, Any]) -> None:
    import torch

    environment = dict(os.environ)  # libraries leave settings there, which the next case would read
    try:
        torch.manual_seed(0)
        function = importlib.import_module(module)
        for part in qualname.split("."):
            function = getattr(function, part)
        answer = _dumps((True, function(**kwargs), groups()))  # type: ignore[operator]
    except BaseException:
        answer = _dumps((False, traceback.format_exc(), groups()))
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()
    pipe.send_bytes(answer)
