"""A step that goes on beside the next forward pass, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.linalg import cuda_graphs
from hf_emopt.matrix_optimizer import MatrixOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(512, 1024)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.head = nn.Linear(1024, 512, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def trained(cls: type[MatrixOptimizer], wait: bool, set_to_none: bool) -> list[Tensor]:
    cuda_graphs.clear()
    model = Net().cuda()
    options = {} if cls is hf_emopt.Muon else {"precondition_frequency": 2, "matmul_precision": "fp16"}
    optimizer = cls(model, lr=1e-2, overlap_param_gather=True, **options)  # type: ignore[arg-type]
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(10):
        ids = torch.randint(0, 512, (8, 256), device="cuda", generator=generator)
        model(ids).square().mean().backward()
        optimizer.step()
        if wait:
            optimizer.synchronize()
            torch.cuda.synchronize()
        optimizer.zero_grad(set_to_none=set_to_none)
        rubbish = [torch.full((2**k,), 1e4, device="cuda") for k in range(10, 24)]  # where gradients were
        del rubbish
    return [value.clone() for p in model.parameters() for value in (*optimizer.state[p].values(), p.detach())]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cls", [hf_emopt.Muon, hf_emopt.SOAP, hf_emopt.Shampoo])
def test_weights_and_state_are_those_of_steps_that_are_waited_for(
    cls: type[MatrixOptimizer], set_to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with several buckets, and with gradients that are gone or zero when the step has returned."""
    monkeypatch.setenv("HF_EMOPT_MAX_BUCKET_NUMEL", str(2**21))
    taken, run = [], MatrixOptimizer._run_aside

    def counted(self: MatrixOptimizer, engine: object, matrices: list[object], *args: object) -> None:
        taken.append(len(matrices))
        run(self, engine, matrices, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MatrixOptimizer, "_run_aside", counted)
    free = trained(cls, False, set_to_none)
    waited = trained(cls, True, set_to_none)
    assert len(taken) == 20
    assert min(taken) > 1
    assert len(free) == len(waited)
    assert all(torch.equal(a, b) for a, b in zip(free, waited))
