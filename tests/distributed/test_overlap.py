"""Updates that arrive behind the next forward pass, and parameters of every number of dimensions under DDP."""

from __future__ import annotations

import contextlib
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import World
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from zoo import assert_close, weights

import hf_emopt


class Net(nn.Module):
    """An embedding, blocks, a head, and a gain without a dimension (as CLIP's ``logit_scale``)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x) * self.scale
        return out


def run(steps: int = 3, overlap: bool = False, tensor_lr: bool = False, rule: str = "Muon") -> dict[str, Any]:
    model = Net()
    lr = torch.tensor(0.02) if tensor_lr else 0.02
    options = {"ns_dtype": "float32"} if rule == "Muon" else {
        "precondition_frequency": 1, "relative_epsilon": 1e-2, "skip_nonfinite": False,
    }  # fmt: skip
    optimizer = getattr(hf_emopt, rule)(model, lr=lr, overlap_param_gather=overlap, **options)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    waiting: list[int] = []
    model.blocks[0].register_forward_hook(lambda *_: waiting.append(len(optimizer._delayed)))
    embedded = []
    for step in range(steps):
        ids = torch.randint(0, 16, (4, 8), generator=torch.Generator().manual_seed(step))
        wrapped(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if tensor_lr:
            optimizer.param_groups[0]["lr"].mul_(0.5)  # as a scheduler does, before the update has arrived
        with torch.no_grad():
            embedded.append(model.embed(ids[:1, :1]).clone())  # a part of the model by itself
    optimizer.synchronize()
    return {"weights": weights(model), "waiting": waiting, "embedded": embedded}


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_everything_reads_the_new_weights(two: World, tensor_lr: bool) -> None:
    alone = run(tensor_lr=tensor_lr)
    for overlap in (False, True):
        for result in two.run(run, overlap=overlap, tensor_lr=tensor_lr):
            assert_close(result["weights"], alone["weights"], 1e-5)
            for found, wanted in zip(result["embedded"], alone["embedded"], strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def many_buckets(rule: str = "Muon") -> dict[str, Any]:
    import hf_emopt.distributed.assignment as plan

    limit, plan.MAX_BUCKET_NUMEL = plan.MAX_BUCKET_NUMEL, 200
    defaults, plan.make_plan.__defaults__ = plan.make_plan.__defaults__, (200, False, False)
    try:
        return run(overlap=True, rule=rule)
    finally:
        plan.MAX_BUCKET_NUMEL, plan.make_plan.__defaults__ = limit, defaults


def test_blocks_begin_while_later_ones_wait(two: World) -> None:
    for result in two.run(many_buckets):
        assert result["waiting"][0] == 0
        assert all(count > 0 for count in result["waiting"][1:])


class Stream:
    """Of a GPU that there is none of: all is done at once, in the order in which it is queued."""

    device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = record_stream = wait_stream


class Event:
    def record(self, stream: Stream) -> None:
        pass


def aside(rule: str, keep_gradients: bool) -> dict[str, Any]:
    """As on a GPU, where the step goes on when it has returned: gradients are gone as soon as the caller may touch them.

    Gives also how many matrices have been transformed by then, in each step.
    """
    from hf_emopt.distributed.delayed import DelayedUpdates
    from hf_emopt.matrix_optimizer import MatrixOptimizer
    from hf_emopt.passes import Passes

    let_go, transformed = DelayedUpdates.let_go, []

    def freed(self: DelayedUpdates) -> None:
        let_go(self)
        (optimizer,) = (x for x in gc.get_objects() if isinstance(x, MatrixOptimizer) and x._delayed is self)
        transformed.append(optimizer.transform_count)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr("hf_emopt.rules.background._stream_beside", lambda device, name, lane: Stream())
        patch.setattr(MatrixOptimizer, "_hides_on", lambda self, engine: torch.device("cpu"))
        patch.setattr(DelayedUpdates, "let_go", freed)
        if keep_gradients:  # what is stacked may be the gradients themselves
            patch.setattr(Passes, "possible", lambda self, runs: False)
        return {**many_buckets(rule), "transformed": transformed}


@pytest.mark.parametrize("rule", ["Muon", "Shampoo"])
@pytest.mark.parametrize("keep_gradients", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_goes_on_beside_the_forward_pass_has_read_its_gradients(
    two: World, ranks: int, keep_gradients: bool, rule: str
) -> None:
    alone = run(rule=rule)
    results = [aside(rule, keep_gradients)] if ranks == 1 else two.run(aside, keep_gradients=keep_gradients, rule=rule)
    for result in results:
        assert_close(result["weights"], alone["weights"], 1e-5)
        assert all(count > 0 for count in result["waiting"][1:])
        first, second, third = result["transformed"]
        assert first == 0
        assert 2 * second == third > 0  # none of the step at hand


def test_a_model_with_hooks_can_be_pickled() -> None:
    model = Net()
    optimizer = hf_emopt.Muon(model, overlap_param_gather=True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    copy = pickle.loads(pickle.dumps(model))
    assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), model.parameters(), strict=True))


def compiled() -> None:
    model = Net()
    model.compile(backend="eager")
    optimizer = hf_emopt.Muon(model, overlap_param_gather=True)
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()


def test_compiled_models_are_refused() -> None:
    with pytest.raises(RuntimeError, match="compiled model"):
        compiled()
