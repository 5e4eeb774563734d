"""A parameter of another shape, and a list that was edited, on ranks that hold each other's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import World
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from zoo import Block, Zoo, assert_close, build, distribute, full, give_gradients, linear, weights, wrap

from hf_emopt.distributed.layout import UnsupportedLayoutError

NAMES = {"embedding": "blocks.tokens.embedding.weight", "matrix": "blocks.linears.d.weight"}

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain": ("embedding", 2, {}),
    "offloaded": ("matrix", -3, {"offload_state": "cpu"}),
    "int8 state": ("matrix", 2, {"state_dtype": "int8"}),
    "bfloat16 weights": ("embedding", -3, {}),
}
"""What is resized, by how many rows, and options."""


def laid_out(layout: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    linears = Block(a=linear(33, 17), b=linear(33, 17, bias=True), c=linear(7, 40), d=linear(40, 7, bias=True))
    model: Any = Zoo(linears=linears, tokens=Block(embedding=nn.Embedding(11, 6), norm=nn.LayerNorm(6))).to(dtype)
    if layout in ("fsdp2", "hsdp"):
        return wrap(model, layout)
    if layout == "tensor parallel":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return distribute(model, mesh, lambda n: [Shard(0)] if "linears" in n or "embedding" in n else None)
    return model  # one process, or copies


def resize(model: Zoo, optimizer: Any, name: str, rows: int) -> None:
    """Copies get another tensor, as ``resize_token_embeddings`` does; a DTensor cannot, so that a new one takes its place."""
    param = model.get_parameter(name)
    whole = full(param)
    generator = torch.Generator().manual_seed(3)
    added = torch.randn(max(rows, 0), whole.shape[1], generator=generator).to(whole.dtype)
    whole = torch.cat([whole, added]) if rows > 0 else whole[:rows].clone()
    if not isinstance(param, DTensor):
        param.data = whole
        return
    owner, _, leaf = name.rpartition(".")
    new = nn.Parameter(distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None))
    setattr(model.get_submodule(owner), leaf, new)
    for group in optimizer.param_groups:
        group["params"] = [new if p is param else p for p in group["params"]]


def steps(model: nn.Module, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        give_gradients(model, number)
        optimizer.step()


def resized(rule: str, layout: str, case: str) -> dict[str, Any]:
    what, rows, options = CASES[case]
    model = laid_out(layout, torch.bfloat16 if case == "bfloat16 weights" else torch.float32)
    optimizer = build(model, rule, **options)
    steps(model, optimizer, range(3))
    name = NAMES[what]
    was = tuple(model.get_parameter(name).shape)
    resize(model, optimizer, name, rows)
    now = tuple(model.get_parameter(name).shape)
    before = weights(model)
    give_gradients(model, 3)
    for use in (optimizer.step, optimizer.consolidate_state_dict):
        with pytest.raises(UnsupportedLayoutError) as raised:
            use()
        message = str(raised.value)
        for part in (f"{name} was {was} ", f" is {now} ", "refresh_parameters()"):
            assert part in message
    assert all(torch.equal(before[n], value) for n, value in weights(model).items())
    assert optimizer.refresh_parameters() == ([name], [name])
    steps(model, optimizer, range(3, 6))
    optimizer.consolidate_state_dict(to=None)
    saved = optimizer.state_dict()
    names = [n for group in saved["param_groups"] for n in group["param_names"]]
    counts = {n: float(saved["state"][index]["step"]) for index, n in enumerate(names)}
    assert counts == {n: 3.0 if n == name else 6.0 for n in names}
    state: dict[str, Tensor] = {k: full(v) for k, v in saved["state"][names.index(name)].items() if v.ndim}
    other = build(model, rule, **options)
    other.load_state_dict(saved)
    return {"weights": weights(model), "state": state, "skipped": optimizer.skipped_steps}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp", "tensor parallel"])
@pytest.mark.parametrize("rule", ["muon", "normuon", "soap", "shampoo", "klshampoo"])
def test_a_resized_parameter_starts_anew_on_all_ranks(two: World, rule: str, layout: str, case: str) -> None:
    wanted = resized(rule, "single", case)
    for result in two.run(resized, rule=rule, layout=layout, case=case):
        assert result["skipped"] == wanted["skipped"] == 0
        assert {k: v.shape for k, v in result["state"].items()} == {k: v.shape for k, v in wanted["state"].items()}
        assert all(value.isfinite().all() for value in result["weights"].values())
        if case in ("plain", "offloaded"):
            assert_close(result["weights"], wanted["weights"], 1e-5)


def edited(layout: str, when: int) -> list[str]:
    model = laid_out(layout, torch.float32)
    optimizer = build(model, "muon")
    steps(model, optimizer, range(when))
    give_gradients(model, when)
    messages = []
    params = next(g["params"] for g in optimizer.param_groups if g["kind"] == "aux" and len(g["params"]) > 1)
    for edit, undo in (
        (params.reverse, params.reverse),
        (lambda: params.append(nn.Parameter(torch.randn(3))), params.pop),
    ):
        edit()
        with pytest.raises(UnsupportedLayoutError) as raised:
            optimizer.step()
        messages.append(str(raised.value))
        undo()
    optimizer.step()
    return messages


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_edited_lists_are_refused_on_all_ranks(two: World, layout: str, when: int) -> None:
    for messages in two.run(edited, layout=layout, when=when):
        assert all("were edited in place" in message and "add_param_group" in message for message in messages)
