"""Offloaded state that a backward pass has brought before the step begins: what is there when, and that not a bit differs."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from late_copies import TwoStreams, swapped_in, two_streams
from test_state_dtypes import OPTIMIZERS, through_disk
from torch import Tensor, nn

import hf_emopt
from hf_emopt.engine.prefetch import late_in_backward
from hf_emopt.optimizers.base import MatrixOptimizer
from hf_emopt.state.offload import StateOffload, budget_in_buckets

LAYERS = 12


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece for each matrix."""
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", "1100")
    monkeypatch.setattr("hf_emopt.engine.adamw_step.MAX_BUCKET_NUMEL", 2000)
    monkeypatch.setattr("hf_emopt.state.offload.CHUNK_BYTES", 2**10)


class Chain(nn.Module):
    """An embedding, and matrices one after the other."""

    def __init__(self, rows: int = 48) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(LAYERS))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def built(rule: str = "muon", offload: str | None = "cpu", **options: Any) -> tuple[Chain, MatrixOptimizer]:
    torch.manual_seed(0)
    model = Chain()
    cls, defaults = OPTIMIZERS[rule]
    return model, cls(model, lr=2e-3, weight_decay=0.1, offload_state=offload, **{**defaults, **options})


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 48, (16,), generator=generator)
    nn.functional.cross_entropy(model(x), torch.randint(0, 10, (16,), generator=generator)).backward()


def step(model: nn.Module, optimizer: MatrixOptimizer, seed: int, passes: int = 1) -> None:
    for index in range(passes):
        backward(model, 100 * seed + index)
    optimizer.step()
    optimizer.zero_grad()


def offload_of(optimizer: MatrixOptimizer) -> StateOffload:
    offload = vars(optimizer)["_context"].store.offload
    assert isinstance(offload, StateOffload)
    return offload


def hooked(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p._post_accumulate_grad_hooks]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


# ---------------------------------------------------------------------- what is there when


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_the_room_of_a_step_is_filled_before_it_begins(early: bool) -> None:
    with two_streams(early):
        model, optimizer = built()
        for seed in range(2):  # the second is the first interval whose calls were counted
            step(model, optimizer, seed)
        offload = offload_of(optimizer)
        for seed in range(2, 5):
            moved, late = offload.moved_bytes, offload.fetched_late
            assert 0 < offload.resident_bytes <= offload.largest_bytes
            backward(model, seed)
            held = offload.resident_bytes
            assert 2 * offload.largest_bytes < held <= budget_in_buckets() * offload.largest_bytes
            assert offload.moved_bytes - moved == held - offload.left_bytes
            optimizer.step()
            assert offload.ready_bytes == held
            assert offload.fetched_late == late
            everything = sum(v.nbytes for s in vars(optimizer)["state"].values() for k, v in s.items() if k != "step")
            assert offload.moved_bytes - moved == everything, "each byte once: nothing that was brought is dropped"
            assert offload.left_bytes <= offload.largest_bytes
            assert offload.peak_bytes <= budget_in_buckets() * offload.largest_bytes


def test_of_several_backward_passes_the_last_one() -> None:
    """The last as of the longer of two intervals; a change of their number makes it late, or early, and nothing else."""
    model, optimizer = built()
    plain, other = built(offload=None)
    found, bucket = [], 0
    for seed, passes in enumerate((3, 3, 3, 3, 1, 3, 5, 5, 2, 2, 2, 2)):
        held = []
        for index in range(passes):
            backward(model, 100 * seed + index)
            offload = offload_of(optimizer) if seed else None
            held.append(offload is not None and offload.resident_bytes > offload.largest_bytes)
        found.append((passes, held.index(True) + 1 if True in held else None))
        optimizer.step()
        optimizer.zero_grad()
        step(plain, other, seed, passes)
        bucket = max(bucket, offload_of(optimizer).resident_bytes)
    assert found == [
        (3, None), (3, None), (3, 3), (3, 3),
        (1, None), (3, 3),  # a shorter one is late, and the next one is not early
        (5, 3), (5, 5),  # a longer one is early once
        (2, None), (2, None), (2, 2), (2, 2),
    ]  # fmt: skip
    assert bucket <= offload_of(optimizer).largest_bytes
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


def test_from_another_thread() -> None:
    """As on accelerators, where a backward pass runs on threads of autograd."""
    ends = []
    for offload in ("cpu", None):
        model, optimizer = built(offload=offload)
        for seed in range(5):
            thread = threading.Thread(target=backward, args=(model, seed))
            thread.start()
            thread.join()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
        if offload:
            assert offload_of(optimizer).ready_bytes > 2 * offload_of(optimizer).largest_bytes
    assert all(torch.equal(a, b) for a, b in zip(*ends))


# ---------------------------------------------------------------------- between the backward pass and the step


def between(how: str, model: Chain, optimizer: MatrixOptimizer) -> None:
    """What people do before a step; all but ``evaluation`` and ``broken`` ask for state, which must leave nothing behind."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if how == "evaluation":
        with torch.no_grad():
            model.eval()(torch.arange(9))
            model.train()
    elif how == "broken":
        backward(model, 5)
        model.zero_grad()
        with pytest.raises(IndexError):
            model(torch.tensor([1000]))
        backward(model, 6)
    elif how == "saved":
        optimizer.state_dict()
    elif how == "loaded":
        optimizer.load_state_dict(through_disk(optimizer.state_dict()))
    elif how == "replaced":
        for p in params:
            optimizer.state[p] = {k: v * 0.5 if v.ndim else v for k, v in optimizer.state[p].items() if "." not in k}
    else:
        for p in params:
            for value in optimizer.state[p].values():
                if value.is_floating_point() and value.ndim:
                    (value if how == "in place" else value.data).mul_(0.5)


@pytest.mark.parametrize("how", ["evaluation", "broken", "saved", "loaded", "replaced", "in place", "by .data"])
def test_state_in_the_step_is_what_lies_at_home(how: str) -> None:
    with two_streams(early=True):
        (model, optimizer), (plain, other) = built(), built(offload=None)
        for seed in range(10):
            for m, o in ((model, optimizer), (plain, other)):
                backward(m, seed)
                if seed in (3, 6):
                    before = offload_of(optimizer)
                    if m is model:
                        assert before.resident_bytes > before.largest_bytes
                    between(how, m, o)
                    if m is model and how not in ("evaluation", "broken"):
                        assert before.resident_bytes == 0
                        assert not before._ahead
                o.step()
                o.zero_grad()
            assert offload_of(optimizer).resident_bytes <= offload_of(optimizer).largest_bytes
        assert offload_of(optimizer).ready_bytes > offload_of(optimizer).largest_bytes, "it goes on early"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_weights_of_a_run_without_offload(rule: str, state_dtype: str) -> None:
    ends = []
    for offload in ("cpu", None):
        with two_streams(early=False):
            model, optimizer = built(rule, offload, state_dtype=state_dtype)
            for seed in range(7):
                step(model, optimizer, seed, passes=2)
            ends.append(weights(model))
            if offload:
                assert offload_of(optimizer).ready_bytes > offload_of(optimizer).largest_bytes
    assert all(torch.equal(a, b) for a, b in zip(*ends))


def test_a_step_that_never_comes_leaves_nothing_when_state_is_asked_for() -> None:
    model, optimizer = built()
    for seed in range(2):
        step(model, optimizer, seed)
    offload = offload_of(optimizer)
    for seed in range(3):
        backward(model, seed)
        assert offload.largest_bytes < offload.resident_bytes <= budget_in_buckets() * offload.largest_bytes
    assert optimizer.state
    assert offload.resident_bytes == 0
    backward(model, 4)
    assert offload.resident_bytes == 0, "after more passes than there ever were"


def test_pieces_that_are_swapped_in_outside_of_a_step_are_not_taken_for_its_first() -> None:
    homes = {f"piece{i}": [torch.zeros(20)] for i in range(4)}
    offload, cpu = StateOffload(), torch.device("cpu")

    def whole_step() -> None:
        offload.begin()
        for name, home in homes.items():
            with swapped_in(offload, name, home, cpu) as copies:
                copies[0].add_(1.0)
        offload.finish()

    whole_step()
    for _ in range(2):
        with swapped_in(offload, "settled", homes["piece2"], cpu) as copies:
            copies[0].mul_(2.0)
        assert offload.resident_bytes <= offload.largest_bytes
        offload.approach()
        late = offload.fetched_late
        whole_step()
        offload.approach()
        offload.settle()  # nothing of it is left at the next swap-in
        assert offload.fetched_late == late
    assert [int(home[0][0]) for home in homes.values()] == [3, 3, 7, 3]


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_what_is_written_to_after_it_was_brought_is_brought_again(early: bool) -> None:
    homes, cpu = {f"piece{i}": [torch.zeros(20)] for i in range(5)}, torch.device("cpu")
    with two_streams(early):
        offload = StateOffload()
        for index in range(2):
            if index:
                offload.approach()
                assert offload.resident_bytes == 3 * offload.largest_bytes
                homes["piece2"][0].add_(10.0)
            late = offload.fetched_late
            offload.begin()
            for name, home in homes.items():
                with swapped_in(offload, name, home, cpu) as copies:
                    copies[0].add_(1.0)
            offload.finish()
            offload.synchronize()
        assert offload.fetched_late == late + 1
    assert [int(home[0][0]) for home in homes.values()] == [2, 2, 12, 2, 2]


def test_no_memory_left_is_said_once_and_state_comes_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (model, optimizer), (plain, other) = built(), built(offload=None)
    for seed in range(3):
        step(model, optimizer, seed)
        step(plain, other, seed)
    bring = hf_emopt.state.offload.StateOffload._copy_next
    calls = []

    def full(self: StateOffload, swapped_in: Any) -> None:
        if self._near:
            calls.append(swapped_in)
            if len(calls) % 2 == 0:
                raise torch.OutOfMemoryError("full")
        bring(self, swapped_in)

    monkeypatch.setattr("hf_emopt.state.offload.StateOffload._copy_next", full)
    with pytest.warns(UserWarning, match="no memory for offloaded state during the backward pass"):
        step(model, optimizer, 3)
    step(plain, other, 3)
    for seed in range(4, 6):
        step(model, optimizer, seed)
        step(plain, other, seed)
    assert len(calls) == 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))


# ---------------------------------------------------------------------- the hook


def test_a_matrix_that_is_late_in_the_backward_pass() -> None:
    model, optimizer = built()
    assert hooked(model) == []
    step(model, optimizer, 0)
    assert hooked(model) == [f"blocks.{LAYERS // 4 - 1}.weight"]
    large = Chain(rows=4000)  # more elements than all else
    keep = hf_emopt.Muon(large, offload_state="cpu")
    step(large, keep, 0)
    assert hooked(large) == hooked(model)
    frozen = Chain()
    frozen.blocks[:4].requires_grad_(False)
    kept = hf_emopt.Muon(frozen, offload_state="cpu")
    step(frozen, kept, 0)
    assert hooked(frozen) == ["blocks.5.weight"], "among those that are stepped"
    plain, other = built(offload=None)
    step(plain, other, 0)
    assert hooked(plain) == []


def test_the_order_is_the_model_s_and_not_that_of_groups() -> None:
    model = Chain()
    named = dict(model.named_parameters())
    halves = [
        [(f"blocks.{i}.weight", named[f"blocks.{i}.weight"]) for i in half] for half in ((4, 5, 6, 7), (0, 1, 2, 3))
    ]
    optimizer = hf_emopt.Muon([{"params": half} for half in halves], offload_state="cpu")
    engine = optimizer.current_context()
    names = [f"blocks.{i}.weight" for i in range(8)]
    assert late_in_backward(engine, names) is named["blocks.1.weight"]
    assert late_in_backward(engine, [names[7], *names[:7]]) is named["blocks.0.weight"]


@pytest.mark.parametrize(("room", "block"), [("2", 2), ("3", 2), ("4", 4), ("5", 5), ("9", 5)])
def test_more_room_is_filled_earlier(room: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the pass for the two buckets that three leave, up to half of it for more. The room is the engine's own."""
    monkeypatch.setenv("HF_EMOPT_OFFLOAD_BUCKETS", room)
    model, optimizer = built()
    engine = optimizer.current_context()
    monkeypatch.setenv("HF_EMOPT_OFFLOAD_BUCKETS", "3")
    named = dict(model.named_parameters())
    found = late_in_backward(engine, list(named))
    assert found is named[f"blocks.{block}.weight"]


def test_parameters_on_the_host_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = built()
    first = [model.blocks[i].weight for i in range(5)]
    monkeypatch.setattr("hf_emopt.engine.prefetch.is_offloaded", lambda p: any(p is q for q in first))
    step(model, optimizer, 0)
    assert hooked(model) == ["blocks.6.weight"]
    monkeypatch.setattr("hf_emopt.engine.prefetch.is_offloaded", lambda p: True)
    model, optimizer = built()
    for seed in range(3):
        step(model, optimizer, seed)
    assert hooked(model) == []
    assert offload_of(optimizer).ready_bytes <= offload_of(optimizer).largest_bytes


def test_none_is_left_when_the_engine_is_built_anew() -> None:
    model, optimizer = built()
    for seed in range(3):
        step(model, optimizer, seed)
    saved = optimizer.state_dict()
    old = model.blocks[2].weight
    model.blocks[2].weight = nn.Parameter(old.detach().clone())  # as a wrapper does
    for group in optimizer.param_groups:
        group["params"] = [model.blocks[2].weight if p is old else p for p in group["params"]]
    for seed in range(3, 6):
        step(model, optimizer, seed)
    assert not old._post_accumulate_grad_hooks
    assert hooked(model) == ["blocks.2.weight"]
    assert len(model.blocks[2].weight._post_accumulate_grad_hooks) == 1
    assert offload_of(optimizer).ready_bytes > offload_of(optimizer).largest_bytes
    optimizer.load_state_dict(saved)
    step(model, optimizer, 6)
    assert [len(model.blocks[2].weight._post_accumulate_grad_hooks), len(hooked(model))] == [1, 1]
    forgotten = weakref.ref(offload_of(optimizer))
    optimizer.load_state_dict(built()[1].state_dict())  # without state, so that there is no engine until the next step
    gc.collect()
    assert forgotten() is None
    assert hooked(model) == []
    step(model, optimizer, 7)
    assert hooked(model) == ["blocks.2.weight"]
    dead = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert dead() is None, "the model keeps no optimizer"
    assert hooked(model) == []


@pytest.mark.parametrize("how", ["copied", "pickled", "saved"])
def test_copies_have_hooks_of_their_own(how: str) -> None:
    model, optimizer = built()
    for seed in range(3):
        step(model, optimizer, seed)
    twin: Chain
    other: MatrixOptimizer
    if how == "copied":
        twin, other = copy.deepcopy((model, optimizer))
    elif how == "pickled":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        twin, other = torch.load(file, weights_only=False)
    assert hooked(model) == ["blocks.2.weight"]
    assert hooked(twin) == []
    for seed in range(3, 7):
        for m, o in ((model, optimizer), (twin, other)):
            step(m, o, seed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    for o in (optimizer, other):
        assert offload_of(o).ready_bytes > offload_of(o).largest_bytes
    assert hooked(twin) == ["blocks.2.weight"]


def test_a_compiled_model_calls_it_too() -> None:
    model, optimizer = built()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in range(4):
        step(compiled, optimizer, seed)
    assert offload_of(optimizer).ready_bytes > offload_of(optimizer).largest_bytes


def test_channels_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same streams bring state before a step and in it: their order is what keeps memory from being written to twice."""
    made = []
    monkeypatch.setattr(
        "hf_emopt.state.offload.copy_stream_to", lambda device: made.append(device) or TwoStreams(False)
    )
    model, optimizer = built()
    for seed in range(4):
        step(model, optimizer, seed)
    assert len(made) == 1
