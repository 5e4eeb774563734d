"""Pairs of LoRA factors: ``scaling B A`` as our matrix views cut them is what PEFT adds to the weight."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d
from transformers.pytorch_utils import Conv1D

from hf_emopt.routing.lora import Adapter, pack_adapter, unpack_adapter
from hf_emopt.routing.route import route_parameters


def product(model: nn.Module, layer: str) -> tuple[Tensor, Adapter]:
    """``scaling B A`` of a layer as ``(N, outputs, inputs)``, and what its B says of the adapter."""
    routes = [r for r in route_parameters(model, lora="joint") if r.name.startswith(f"{layer}.lora_")]
    a, b = sorted(routes, key=lambda route: route.adapter.side if route.adapter else "")
    assert a.adapter is not None
    assert b.adapter is not None
    assert (a.adapter.partner, b.adapter.partner) == (b.name, a.name)
    assert (a.matrix_count, b.matrix_count) == (0, b.matrix_views[0].shape[0])
    params = dict(model.named_parameters())
    columns = [route.matrix_views[0].extract(params[route.name].detach()) for route in (a, b)]
    return b.adapter.scaling * columns[1] @ columns[0].mT, b.adapter


def test_products_are_peft_s() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"linear": nn.Linear(7, 5), "conv1d": Conv1D(6, 4), "conv": nn.Conv2d(3, 8, 3), "table": nn.Embedding(11, 6)}
    )
    config = peft.LoraConfig(r=2, lora_alpha=5, target_modules=list(model), init_lora_weights=False, use_rslora=True)
    peft.inject_adapter_in_model(config, model)
    for name, transposed in (("linear", False), ("conv1d", True), ("conv", False), ("table", True)):
        found, adapter = product(model, name)
        delta = model[name].get_delta_weight("default").detach()
        wanted = delta.mT if transposed else delta.flatten(1)
        torch.testing.assert_close(found, wanted[None], rtol=1e-5, atol=1e-6)
        assert (adapter.outputs, adapter.inputs, adapter.rank) == (*wanted.shape, 2)
        assert adapter.scaling == pytest.approx(5 / 2**0.5)
        assert adapter.zero_init is (name != "table")  # an embedding's A is the one that PEFT makes zero
        assert unpack_adapter(pack_adapter(adapter)) == adapter


def test_a_grouped_convolution_has_a_pair_for_each_group() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"conv": nn.Conv2d(6, 8, 3, groups=2)})
    config = peft.LoraConfig(r=4, target_modules=["conv"], init_lora_weights=False)
    with pytest.warns(UserWarning, match="groups > 1"):
        peft.inject_adapter_in_model(config, model)
    found, adapter = product(model, "conv")
    assert found.shape == (2, 4, 6 * 9)
    assert adapter.rank == 2
    x, layer = torch.randn(1, 6, 5, 5), model["conv"]
    wanted = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
    torch.testing.assert_close(conv2d(x, found.reshape(8, 6, 3, 3)), wanted, rtol=1e-4, atol=1e-5)


def test_three_factors_are_no_pair() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    adalora = peft.get_peft_model(model, peft.AdaLoraConfig(total_step=10, init_r=2, target_modules=["0"]))
    assert len(route_parameters(adalora).matrices) == 2
    with pytest.raises(ValueError, match=r"AdaLoRA, whose product is B diag\(E\) A"):
        route_parameters(adalora, lora="joint")
