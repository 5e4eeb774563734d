"""``python`` for tests that run dozens of commands: a server that has imported what they import, and forks for each.

A command of the documentation starts up to five interpreters (a launcher and its ranks), and each would import torch and
transformers for six seconds. Here ``bin/python`` is a client that hands its arguments, environment, folder and standard
streams to the server, and ends as the forked process ends. What that process does is what ``python`` does: options, ``-c``,
``-m`` or a script, ``sys.path``, ``sitecustomize``, exit status. Only this package is not imported beforehand, since *when* a
script imports it is a thing to test.

The server ends when the last of the connections that tests hold open is closed.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

PRELOADED = [
    "torch", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "numpy",
    "accelerate", "accelerate.commands.launch", "transformers", "transformers.trainer", "datasets", "peft",
    "sklearn.datasets", "matplotlib.pyplot", "tokenizers", "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
]  # fmt: skip

START_TIMEOUT = 180.0
"""Seconds in which the server has to have imported everything."""

CLIENT = """#!{python} -SE
import array, json, os, socket, sys
real, path = {python!r}, {socket!r}
words = sys.argv[1:]
while words[:1] == ["-u"]:
    del words[0]
if not words or (words[0].startswith("-") and words[0] not in ("-c", "-m")):
    os.execv(real, [real, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect(path)
message = json.dumps([words, dict(os.environ), os.getcwd(), sys.argv[0]]).encode()
socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
server.sendall(message)
status = server.recv(4)
sys.exit(int.from_bytes(status, "big", signed=True) if len(status) == 4 else "the process died")
"""


class PreloadedPython:
    """A connection to the server of this test session, which is started if there is none.

    Args:
        folder: shared by all workers of the session; holds the socket and the log.
        environment: of the server. Variables that are read on import (``OMP_NUM_THREADS``) have effect here only.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        from filelock import FileLock

        self.socket = folder / "python.socket"
        with FileLock(str(folder / "python.lock")):
            try:
                self.lease = self._connect()
            except OSError:
                self._start(folder, environment)
                self.lease = self._connect()

    def install(self, path: Path) -> None:
        """Writes ``python`` to a path."""
        path.write_text(CLIENT.format(python=sys.executable, socket=str(self.socket)), encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def close(self) -> None:
        """Ends the server, if nobody else holds a connection."""
        self.lease.close()

    def _connect(self) -> socket.socket:
        lease = socket.socket(socket.AF_UNIX)
        lease.connect(str(self.socket))
        lease.sendall((0).to_bytes(8, "big"))
        return lease

    def _start(self, folder: Path, environment: dict[str, str]) -> None:
        self.socket.unlink(missing_ok=True)
        log = folder / "python.log"
        with log.open("wb") as file:
            server = subprocess.Popen(
                [sys.executable, __file__, str(self.socket)], env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT
        while not self.socket.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise RuntimeError(f"the server of preloaded_python.py did not start: {log.read_text()[-4000:]}")
            time.sleep(0.05)


# ---------------------------------------------------------------------------------------------- the server


def serve(path: str) -> None:
    """Forks a process for each connection until no test holds one."""
    for name in PRELOADED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # complete as soon as it is there
    leases: set[socket.socket] = set()
    begun = time.monotonic()
    while leases or time.monotonic() < begun + START_TIMEOUT:
        ready, _, _ = select.select([listener, *leases], [], [], 1.0)
        for lease in leases & set(ready):  # closed
            leases.remove(lease)
            lease.close()
            begun = -START_TIMEOUT
        if listener in ready:
            connection, _ = listener.accept()
            head, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            size = int.from_bytes(head, "big")
            if size == 0:
                leases.add(connection)
            elif os.fork() == 0:
                for other in (listener, *leases):
                    other.close()
                _become(connection, _exactly(connection, size), descriptors)
            else:
                connection.close()
                for descriptor in descriptors:
                    os.close(descriptor)
        _reap()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of processor time in forked processes")


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            os._exit(1)
        parts += part
    return parts


def _become(connection: socket.socket, message: bytes, descriptors: list[int]) -> None:
    """The forked process: what the client asked for, and the exit status to it, last of all."""
    words, environment, folder, executable = json.loads(message)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = sys._base_executable = executable  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = [1]
    atexit.register(lambda: connection.sendall(struct.pack(">i", status[0])))  # the first that is registered runs last
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        _run(words)
        status[0] = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status[0] = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    raise SystemExit(status[0])


def _end_with(connection: socket.socket) -> None:
    """A client that was killed takes its process, and what that started, with it."""
    connection.recv(1)
    os.killpg(0, signal.SIGKILL)


def _run(words: list[str]) -> None:
    """As ``python`` does with these arguments."""
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    script = words[0] not in ("-c", "-m")
    first = str(Path(words[0]).resolve().parent) if script else os.getcwd()
    known = [entry for entry in sys.path[1:] if entry not in added]  # [0] is where this file lies
    sys.path[:] = [first, *added, *known]
    for entry in added:
        custom = Path(entry, "sitecustomize.py")
        if custom.is_file():
            runpy.run_path(str(custom), run_name="sitecustomize")
    if script:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *words[2:]]
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(words[1], "<string>", "exec"), scope)


if __name__ == "__main__":
    serve(sys.argv[1])
