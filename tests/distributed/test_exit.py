"""The end of a process whose last step has ended with a collective over gloo."""

from __future__ import annotations

import atexit
from unittest import mock

from harness import World
from zoo import build, matrices, train, wrap

from hf_emopt.distributed import rank_groups


def handlers() -> list[str]:
    """What optimizers have registered and unregistered for the end of the process."""
    calls: list[str] = []
    with (
        mock.patch.object(atexit, "register", lambda f: calls.append(f"+{f.__name__}")),
        mock.patch.object(atexit, "unregister", lambda f: calls.append(f"-{f.__name__}")),
    ):
        for _ in range(2):
            model = wrap(matrices([(8, 6)]), "ddp")
            train(model, build(model, "muon"), 1)
    return [call for call in calls if call.endswith(rank_groups._let_threads_finish.__name__)]


def test_threads_of_gloo_have_time_to_finish_before_the_interpreter_ends(two: World) -> None:
    for calls in two.run(handlers):
        assert calls == ["-_let_threads_finish", "+_let_threads_finish"] * 2
