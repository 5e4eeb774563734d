"""Orthogonalizations and refreshes that are recorded as CUDA graphs in memory that they share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from hf_emopt import SOAP, Shampoo
from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.cuda_graphs import DISABLE_VARIABLE, replayed
from hf_emopt.kernels.streams import SideStreams
from hf_emopt.linalg import inverse_root, newton_schulz
from hf_emopt.linalg.newton_schulz import Method
from hf_emopt.rules.refresh import RefreshingRule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _clean() -> None:
    torch.manual_seed(0)
    cuda_graphs.clear()


def covariances(n: int, d: int) -> Tensor:
    g = torch.randn(n, d, 2 * d, device="cuda")
    return g @ g.mT / (2 * d)


def root(a: Tensor) -> tuple[Tensor, Tensor]:
    result = inverse_root(a, 0.25, solver="coupled_newton", relative_epsilon=1e-5, precision="fp16", fallback=False)
    return result.value, result.failed


def test_results_belong_to_the_caller_and_follow_the_input() -> None:
    """Graphs of several sizes use the same memory; each result is kept while the others run."""
    sizes = [(3, 512), (1, 1024), (5, 512), (3, 512), (2, 1024)]
    for _ in range(4):  # launched, recorded, replayed
        inputs = [covariances(*size) for size in sizes]
        results = [replayed("root", (a,), root) for a in inputs]
        for a, (value, failed) in zip(inputs, results):
            torch.testing.assert_close(value, root(a)[0], rtol=1e-5, atol=1e-5)
            assert not failed.any()
    held = cuda_graphs._replays
    assert sum(isinstance(known, cuda_graphs._Recording) for known in held.values()) == 4
    assert len(cuda_graphs._rooms) == 1


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_orthogonalizations_share_a_room(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape comes later, for which the room is made anew; each result is right though the next shape uses the same
    memory."""
    shapes = [(2, 256, 512), (3, 768, 512), (4, 512, 2048), (2, 2048, 2048)]
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    for number in range(6):  # launched, recorded, recorded anew, replayed
        inputs = [torch.randn(*shape, device="cuda") for shape in shapes[: 3 if number < 2 else 4]]
        results = [newton_schulz(x, method=method, dtype=torch.float16) for x in inputs]
        with monkeypatch.context() as without:
            without.setenv(DISABLE_VARIABLE, "1")
            for x, result in zip(inputs, results):
                assert torch.equal(result, newton_schulz(x, method=method, dtype=torch.float16))
    known = list(cuda_graphs._recordings.values())
    assert len(known) == len(shapes)
    assert all(isinstance(one, cuda_graphs._Recording) for one in known)
    (room,) = cuda_graphs._recorded_in.values()
    del inputs, results, x, result
    torch._C._cuda_clearCublasWorkspaces()  # one of each stream; nothing is replayed any more
    assert torch.cuda.memory_allocated() - before <= room.buffer.numel() + 2**20
    cuda_graphs.clear()


def test_large_batches_are_replayed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MAX_REPLAYED_ELEMENTS", 3 * 512 * 512)
    for _ in range(3):
        a = covariances(7, 512)
        value, failed = replayed("root", (a,), root)
        torch.testing.assert_close(value, root(a)[0], rtol=1e-5, atol=1e-5)
        assert failed.shape == (7,)
    assert (
        sum(isinstance(known, cuda_graphs._Recording) for known in cuda_graphs._replays.values()) == 2
    )  # of 3 and of 2


def test_large_matrices_and_the_variable_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MAX_REPLAYED_ELEMENTS", 512 * 512)
    for _ in range(3):
        replayed("root", (covariances(2, 640),), root)
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    for _ in range(3):
        replayed("root", (covariances(1, 512),), root)
    assert not cuda_graphs._replays


FAILING = """
import logging, torch
from hf_emopt.kernels import cuda_graphs
from hf_emopt.kernels.cuda_graphs import replayed
said = []
logging.getLogger("hf_emopt").addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, r: said.append(r)})())
a = torch.ones(2, 8, 8, device="cuda")
for _ in range(4):
    assert torch.equal(replayed("reads", (a,), lambda x: (x * float(x.sum()),))[0], a * 128)
for _ in range(3):
    assert torch.equal(replayed("squares", (a,), lambda x: (x @ x,))[0], a @ a)
assert len(said) == 1 and "HF_EMOPT_DISABLE_CUDA_GRAPHS" in said[0].getMessage()
assert not any(isinstance(known, cuda_graphs._Recording) for known in cuda_graphs._replays.values())
assert torch.randn(3, device="cuda").isfinite().all()
torch.cuda.empty_cache()
"""


def test_what_cannot_be_recorded_is_launched_and_said() -> None:
    """In a process of its own: nothing is recorded any more in one where a recording has failed."""
    subprocess.run([sys.executable, "-c", FAILING], check=True, timeout=120)


@pytest.mark.parametrize("cls", [Shampoo, SOAP])
def test_weights_are_those_without_graphs(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(640, 768, bias=False), nn.Linear(768, 512, bias=False)).cuda()
        options = {"precondition_frequency": 2, "max_preconditioner_dim": 512, "matmul_precision": "fp16"}
        optimizer = cls(model, lr=1e-2, **options)
        generator = torch.Generator("cuda").manual_seed(2)
        for _ in range(14):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, device="cuda", generator=generator)
            optimizer.step()
        optimizer.synchronize()
        return [p.detach().clone() for p in model.parameters()]

    graphs = run()
    assert any(isinstance(known, cuda_graphs._Recording) for known in cuda_graphs._replays.values())
    cuda_graphs.clear()
    monkeypatch.setenv(DISABLE_VARIABLE, "1")
    for with_graphs, without in zip(graphs, run()):
        torch.testing.assert_close(with_graphs, without, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "recorded"), [("orthogonal_iteration", "1"), ("orthogonal_iteration", "0"), ("qr", "1")]
)
def test_refreshes_beside_the_step_give_the_same_weights(
    method: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On streams of their own, with the work of other buckets and of what follows a step beside them, bases change the same
    numbers."""
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", str(2**20))
    monkeypatch.setenv(DISABLE_VARIABLE, str(1 - int(recorded)))

    def run() -> list[Tensor]:
        cuda_graphs.clear()
        torch.manual_seed(1)
        shapes = [(1024, 1024), (1024, 640), (640, 1536), (1536, 1024)] * 3
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes)).cuda()
        options = {"max_preconditioner_dim": 1024, "matmul_precision": "fp16", "basis_method": method}
        optimizer = SOAP(model, lr=1e-3, precondition_frequency=3, **options)
        generator = torch.Generator("cuda").manual_seed(2)
        for _ in range(16):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, device="cuda", generator=generator)
            optimizer.step()
            passing = [torch.full((2**k,), 7.0, device="cuda") for k in range(10, 24)]  # a forward pass's memory
            del passing
        return [x.clone() for p in model.parameters() for x in (p.detach(), *optimizer.state[p].values())]

    entered, on = [], SideStreams.on

    @contextmanager
    def counted(
        self: SideStreams, device: torch.device, index: int = 0, reads: Sequence[Tensor] = ()
    ) -> Iterator[None]:
        with on(self, device, index, reads):
            entered.append(index % self.count)
            yield

    monkeypatch.setattr(SideStreams, "on", counted)
    beside = run()
    assert len(entered) >= 14  # in every step after the first at least one, not merely asked for
    assert len(set(entered)) > 1
    monkeypatch.setattr(RefreshingRule, "refresh_on_side_stream", lambda self, *args: self.refresh(*args[:4]))
    after = run()
    assert len(beside) == len(after)
    assert all(torch.equal(x, y) for x, y in zip(beside, after))
