"""Which mode a matrix gets: the user's word by group and by module, the model of costs, and what cannot be."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from harness import World, Worlds
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from zoo import RULES, assert_close, build, distribute, full, give_gradients, matrices, weights

import hf_emopt
from hf_emopt.distributed.assignment import make_plan
from hf_emopt.distributed.layout import build_grids
from hf_emopt.distributed.tensor_parallel_choice import ModeOverrides
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.linalg.newton_schulz import newton_schulz_flops


def cut(model: nn.Module, dims: dict[str, int], names: tuple[str, ...] | None = ("tp",), size: int = 2) -> nn.Module:
    """Parameters whose names have a key of ``dims`` in them as DTensors."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=names)
    return distribute(model, mesh, lambda name: next(([Shard(d)] for part, d in dims.items() if part in name), None))


def choices(shapes: list[tuple[int, int]], dims: dict[str, int], **options: Any) -> dict[str, Any]:
    """Planned on the meta device: sizes are those of large models."""
    names = options.pop("names", ("tp",))
    rule = options.pop("rule", "muon")
    with torch.device("meta"):
        model = nn.ModuleDict({f"m{i}": nn.Linear(n, m, bias=False) for i, (m, n) in enumerate(shapes)})
    model = cut(model, dims, names)
    optimizer = build(model, rule, **options)
    text = optimizer.explain()
    return {"modes": {c.name: c.mode for c in optimizer._choices}, "explained": text}


LARGE = (4096, 14336)


class TestAuto:
    def test_one_matrix_is_shared(self, two: World) -> None:
        for found in two.run(choices, shapes=[LARGE], dims={"m": 1}, ns_dtype=None):
            assert found["modes"] == {"m0.weight": "distributed"}
            assert "distributed (auto); each layerwise" in found["explained"]

    def test_one_for_each_rank_is_transformed_whole(self, two: World) -> None:
        for found in two.run(choices, shapes=[LARGE] * 4, dims={"m": 1}):
            assert set(found["modes"].values()) == {"layerwise"}

    def test_a_small_matrix_is_not_worth_two_messages(self, two: World) -> None:
        for found in two.run(choices, shapes=[(64, 64)], dims={"m": 1}):
            assert found["modes"] == {"m0.weight": "duplicated"}

    @pytest.mark.parametrize("rule", ["soap", "shampoo", "klshampoo"])
    def test_rules_with_owned_state_are_layerwise(self, two: World, rule: str) -> None:
        for found in two.run(choices, shapes=[(64, 64)], dims={"m": 1}, rule=rule):
            assert found["modes"] == {"m0.weight": "layerwise"}

    def test_blockwise_is_never_chosen(self, two: World) -> None:
        for found in two.run(choices, shapes=[LARGE, (64, 64), (8, 8)], dims={"m": 0}):
            assert "blockwise" not in found["modes"].values()
            assert "blockwise" not in found["explained"]


def loads(mode: str, placements: tuple[Any, ...]) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = distribute(matrices([(64, 64)] * 4), mesh, lambda name: placements)
    return make_plan(
        build(model, "muon", tensor_parallel=mode).planned_parameters(build_grids(list(model.named_parameters()), None))
    ).loads()


@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (_StridedShard(0, split_factor=2), Shard(0))])
@pytest.mark.parametrize("mode", ["layerwise", "duplicated", "distributed"])
def test_work_is_even_over_both_dimensions(worlds: Worlds, mode: str, placements: tuple[Any, ...]) -> None:
    """Four matrices of one size: one to each rank, or two to each pair of ranks that transforms them together."""
    each = newton_schulz_flops(64, 64) * (2 if mode == "duplicated" else 1)
    for found in worlds[4].run(loads, mode=mode, placements=placements):
        assert len(set(found)) == 1
        assert mode == "distributed" or found == [each] * 4


class TestMeshes:
    """What is tensor parallel is said by the mesh, or shown by a placement; never guessed from the number of dimensions."""

    @pytest.mark.parametrize("names", [("fsdp",), ("dp_shard_cp",), ("ep",)])
    def test_other_dimensions_are_not(self, two: World, names: tuple[str, ...]) -> None:
        for found in two.run(choices, shapes=[(64, 64)], dims={"m": 0}, names=names, tensor_parallel="distributed"):
            assert found["modes"] == {}

    def test_without_names_rows_are_those_of_fsdp(self, two: World) -> None:
        for found in two.run(choices, shapes=[(64, 64)] * 2, dims={"m": 0}, names=None):
            assert found["modes"] == {}

    def test_without_names_columns_show_what_it_is(self, two: World) -> None:
        shapes = [(64, 64)] * 2
        for found in two.run(choices, shapes=shapes, dims={"m0": 0, "m1": 1}, names=None, tensor_parallel="duplicated"):
            assert found["modes"] == dict.fromkeys(("m0.weight", "m1.weight"), "duplicated")


class TestTheUsersWord:
    def test_by_module(self, two: World) -> None:
        options = {"tensor_parallel": "distributed", "tensor_parallel_modules": "m0:duplicated;m[12]:layerwise"}
        for found in two.run(choices, shapes=[(64, 96)] * 4, dims={"m": 1}, **options):
            assert list(found["modes"].values()) == ["duplicated", "layerwise", "layerwise", "distributed"]

    def test_by_group(self, two: World) -> None:
        for found in two.run(grouped):
            assert found == ["blockwise", "distributed"]

    def test_in_optim_args(self) -> None:
        text = "tensor_parallel=distributed, tensor_parallel_modules=o_proj:duplicated;k_proj:layerwise"
        assert parse_optim_args(text, hf_emopt.Muon) == {
            "tensor_parallel": "distributed",
            "tensor_parallel_modules": "o_proj:duplicated;k_proj:layerwise",
        }
        with pytest.raises(ValueError, match=r"tensor_parallel=auto\|layerwise\|blockwise"):
            parse_optim_args("tensor_parallel=distributed", hf_emopt.SOAP)

    def test_mistakes_are_named(self) -> None:
        layer = nn.Linear(4, 6)
        with pytest.raises(ValueError, match="tensor_parallel='sliced' is none of the modes of muon: auto, layerwise"):
            hf_emopt.Muon(layer, tensor_parallel="sliced")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tensor_parallel='distributed' is none of the modes of soap"):
            hf_emopt.SOAP(layer, tensor_parallel="distributed")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'weight:sliced' must be PATTERN:MODE"):
            hf_emopt.Muon(layer, tensor_parallel_modules="weight:sliced")
        with pytest.raises(ValueError, match="tensor_parallel_modules: 'o_proj' matches no parameter"):
            hf_emopt.Muon(layer, tensor_parallel_modules="o_proj:duplicated")

    def test_a_mapping_or_a_sequence(self) -> None:
        for entries in ({"a": "layerwise", r"(?:b|c)": "duplicated"}, ["a:layerwise", r"(?:b|c):duplicated"]):
            modes = ModeOverrides(entries)
            assert [modes.mode(name, "auto") for name in ("x.a.weight", "c", "d")] == [
                "layerwise",
                "duplicated",
                "auto",
            ]

    def test_a_checkpoint_does_not_bring_its_mode(self) -> None:
        layer = nn.Linear(4, 6)
        saved = hf_emopt.Muon(layer, tensor_parallel="distributed").state_dict()
        optimizer = hf_emopt.Muon(layer, tensor_parallel="layerwise")
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["tensor_parallel"] == "layerwise"


def grouped() -> list[str]:
    model = cut(matrices([(24, 24), (24, 24)]), {"m": 1})
    first, second = model.named_parameters()
    optimizer = hf_emopt.Muon(
        [
            {"params": [first], "kind": "matrix", "tensor_parallel": "blockwise"},
            {"params": [second], "kind": "matrix", "tensor_parallel": "distributed"},
        ],
        lr=0.1,
    )
    with pytest.warns(UserWarning, match="blockwise"):
        optimizer.explain()
    return [choice.mode for choice in optimizer._choices]


class TestWhatCannotBe:
    @pytest.mark.parametrize("options", [{"compat": "torch"}, {"ns_coefficients": "aol", "ns_steps": 4}])
    def test_an_exact_mode_gives_way_to_another_and_says_so(self, two: World, options: dict[str, Any]) -> None:
        for found in two.run(choices, shapes=[(24, 40)], dims={"m": 1}, tensor_parallel="distributed", **options):
            assert found["modes"] == {"m0.weight": "layerwise"}
            assert "distributed cannot be: muon needs whole matrices" in found["explained"]

    def test_blockwise_never_gives_way(self, worlds: Worlds) -> None:
        for message in worlds[4].run(interleaved, mode="blockwise"):
            assert "tensor_parallel='blockwise' cannot be for" in message
            assert "tensor_parallel_modules" in message

    def test_experts_that_a_rank_has_whole_are_no_slices(self, two: World) -> None:
        for found in two.run(whole_experts):
            assert found["modes"] == ["layerwise"] * 2
            assert "blockwise cannot be: every rank has whole matrices" in found["explained"]

    @pytest.mark.parametrize("rule", ["normuon", "soap", "shampoo"])
    def test_state_of_slices_is_not_that_of_the_whole(self, two: World, rule: str) -> None:
        """Also of NorMuon, whose row moments have one shape for the whole and for slices of it."""
        saved = two.run(state_of_slices, rule=rule)[0]
        with pytest.raises(ValueError, match="tensor_parallel='blockwise' on another number of ranks"):
            build(matrices([(24, 32)]), rule).load_state_dict(saved)

    def test_slices_that_are_not_runs_are_exact_when_left_to_the_optimizer(self, worlds: Worlds) -> None:
        assert set(worlds[4].run(interleaved, mode="auto")) == {""}


def whole_experts() -> dict[str, Any]:
    with torch.device("meta"):
        model = MixtralExperts(MixtralConfig(hidden_size=10, intermediate_size=6, num_local_experts=4))
    optimizer = build(cut(model, {"_proj": 0}), "muon", tensor_parallel="blockwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is another update than that of one process
        text = optimizer.explain()
    return {"modes": [choice.mode for choice in optimizer._choices], "explained": text}


def state_of_slices(rule: str) -> dict[str, Any]:
    """A whole state dict after a step."""
    model = cut(matrices([(24, 32)]), {"m": 1})
    optimizer = build(model, rule, tensor_parallel="blockwise")
    give_gradients(model, 0)
    with pytest.warns(UserWarning, match="blockwise"):
        optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {index: {k: full(v) for k, v in entry.items()} for index, entry in state["state"].items()}
    return state


def interleaved(mode: str) -> str:
    """Cut by both dimensions of a mesh in an order that is not TP under FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = distribute(matrices([(24, 24)]), mesh, lambda name: [Shard(0), _StridedShard(0, split_factor=3)])
    optimizer = build(model, "muon", tensor_parallel=mode)
    try:
        optimizer.explain()
    except ValueError as error:
        return str(error)
    return ""


# ---------------------------------------------------------------------- what went wrong elsewhere


def square(mode: str, dim: int, size: int) -> dict[str, Tensor]:
    model = cut(matrices([(64, 64)]), {"m": dim}, size=size)
    return stepped(model, tensor_parallel=mode)


def stepped(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    optimizer = build(model, "muon", **options)
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.second_tier)])
def test_by_default_weights_do_not_depend_on_the_number_of_ranks(worlds: Worlds, size: int, dim: int) -> None:
    """A square matrix by rows, then by columns: equal but for blockwise, which differs by a good deal."""
    wanted = stepped(matrices([(64, 64)]))
    for found in worlds[size].run(square, mode="auto", dim=dim, size=size):
        assert_close(found, wanted, 1e-5)
    (name,) = wanted
    before = dict(matrices([(64, 64)]).named_parameters())[name].detach()
    for found in worlds[size].run(square, mode="blockwise", dim=dim, size=size):
        assert (found[name] - wanted[name]).norm() > 0.2 * (wanted[name] - before).norm()


def heads(key_heads: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=key_heads, head_dim=8, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def per_head(key_heads: int, mode: str) -> dict[str, Tensor]:
    cuts = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    return stepped(cut(heads(key_heads), cuts), per_head=True, tensor_parallel=mode)


@functools.cache
def per_head_alone(key_heads: int) -> dict[str, Tensor]:
    return stepped(heads(key_heads), per_head=True)


@pytest.mark.parametrize("mode", ["auto", "layerwise", "duplicated", "distributed"])
@pytest.mark.parametrize("key_heads", [1, 8])
def test_heads_are_those_of_the_whole_matrix(two: World, key_heads: int, mode: str) -> None:
    """Eight heads on two ranks stay eight of the same width, and one key head is not split into two."""
    for found in two.run(per_head, key_heads=key_heads, mode=mode):
        assert_close(found, per_head_alone(key_heads), 1e-5)


def test_every_rule_has_modes() -> None:
    for cls, options in RULES.values():
        optimizer = cls(nn.Linear(4, 6), **options)
        assert {"auto", "layerwise", "blockwise"} <= set(optimizer.rule.tensor_parallel_modes)
