"""Rules on matrices that are cut over ranks give what they give on whole ones; ranks are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slices import ComputeGroup, cuts
from torch import Tensor

from hf_emopt.linalg import newton_schulz_flops
from hf_emopt.linalg.newton_schulz_sharded import Shard
from hf_emopt.optimizers import SOAP, Muon, NorMuon
from hf_emopt.rules.base import Group, RefreshClock
from hf_emopt.rules.muon import ADJUST_LR_FNS, MuonRule, NorMuonRule
from hf_emopt.rules.soap import SoapRule

RULES = {"muon": (MuonRule, Muon), "normuon": (NorMuonRule, NorMuon)}
CLOCK = RefreshClock((1, 1))


def group_of(name: str, **options: Any) -> Group:
    weight = torch.nn.Parameter(torch.zeros(4, 6))
    return RULES[name][1]([("w", weight)], lr=0.1, ns_dtype="float64", **options).param_groups[0]


class Ranks:
    """Whole matrices and the same matrices cut over ranks, each with its matrix state, step by step."""

    def __init__(self, name: str, shape: tuple[int, int, int], dim: int, parts: int, kind: str, group: Group) -> None:
        self.rule, self.group, self.dim, self.shape = RULES[name][0](), group, dim, shape
        self.compute_group, self.bounds = ComputeGroup(parts), cuts(shape[dim], parts, kind)
        self.whole_state = self.rule.init_matrix_state(shape, group, torch.empty(0, dtype=torch.float64))
        self.states = []
        for first, last in self.bounds:
            part = list(shape)
            part[dim] = last - first
            like = torch.empty(0, dtype=torch.float64)
            self.states.append(self.rule.init_matrix_state((part[0], part[1], part[2]), group, like))

    def step(self, x: Tensor, ok: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The update of the whole, and the updates of all ranks put together."""
        expected = self.rule.transform(x, self.whole_state, self.group, ok, CLOCK)

        def rank(r: int) -> Tensor:
            first, last = self.bounds[r]
            shard = Shard(
                self.dim,
                self.shape[1:],
                first,
                last,
                self.compute_group.sum(r),
                self.compute_group.max(r),
                parts=self.compute_group.size,
            )
            part = x.narrow(self.dim, first, last - first)
            return self.rule.transform_shard(part, self.states[r], self.group, ok, CLOCK, shard)

        return expected, torch.cat(self.compute_group.run(rank), self.dim)

    def moments(self) -> Tensor:
        """Row moments of all ranks, put together where rows are cut."""
        values = [state["row_second_moment"] for state in self.states]
        if self.dim == -2:
            return torch.cat(values, -2)
        assert all(torch.equal(values[0], value) for value in values)
        return values[0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("shape", "dim"), [((2, 9, 23), -1), ((2, 23, 9), -2), ((2, 12, 12), -1), ((2, 12, 12), -2)])
@pytest.mark.parametrize(("parts", "kind"), [(1, "even"), (2, "even"), (3, "uneven"), (4, "uneven")])
def test_three_steps_on_parts_are_three_steps_on_the_whole(
    name: str, shape: tuple[int, int, int], dim: int, parts: int, kind: str
) -> None:
    ranks = Ranks(name, shape, dim, parts, kind, group_of(name))
    for _ in range(3):
        expected, result = ranks.step(torch.randn(shape, dtype=torch.float64))
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
    if name == "normuon":
        torch.testing.assert_close(ranks.moments(), ranks.whole_state["row_second_moment"], rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("adjust_lr_fn", ADJUST_LR_FNS)
@pytest.mark.parametrize(("shape", "dim"), [((2, 9, 23), -1), ((2, 23, 9), -2)])
def test_the_scale_is_that_of_the_whole_shape(
    name: str, adjust_lr_fn: str, shape: tuple[int, int, int], dim: int
) -> None:
    ranks = Ranks(name, shape, dim, 3, "even", group_of(name, adjust_lr_fn=adjust_lr_fn))
    expected, result = ranks.step(torch.randn(shape, dtype=torch.float64))
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", [{"eps": 1e-3}, {"ns_coefficients": "polar_express", "ns_steps": 6}])
def test_constants_of_the_group_are_used(name: str, options: dict[str, Any]) -> None:
    ranks = Ranks(name, (2, 9, 23), -1, 2, "even", group_of(name, **options))
    x = torch.randn(2, 9, 23, dtype=torch.float64) * 1e-5
    expected, result = ranks.step(x)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
    default, _ = Ranks(name, (2, 9, 23), -1, 2, "even", group_of(name)).step(x)
    assert not torch.allclose(default, expected, rtol=1e-3)


@pytest.mark.parametrize("dim", [-1, -2])
def test_zero_matrices_give_zeros(dim: int) -> None:
    ranks = Ranks("normuon", (2, 8, 8), dim, 2, "even", group_of("normuon"))
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    x[1] = 0
    _, result = ranks.step(x)
    assert torch.equal(result[1], torch.zeros(8, 8, dtype=torch.float64))
    assert result[0].norm() > 0


@pytest.mark.parametrize(("shape", "dim"), [((2, 9, 23), -1), ((2, 23, 9), -2)])
def test_a_skipped_step_leaves_the_moments(shape: tuple[int, int, int], dim: int) -> None:
    ranks = Ranks("normuon", shape, dim, 3, "uneven", group_of("normuon"))
    ranks.step(torch.randn(shape, dtype=torch.float64), torch.tensor(True))
    before = ranks.moments().clone()
    ranks.step(torch.randn(shape, dtype=torch.float64), torch.tensor(False))
    assert torch.equal(ranks.moments(), before)
    ranks.step(torch.randn(shape, dtype=torch.float64), torch.tensor(True))
    assert not torch.equal(ranks.moments(), before)


def test_float32_parts_differ_by_rounding_alone() -> None:
    for name in RULES:
        group = {**group_of(name), "ns_dtype": "float32"}
        for shape, dim in (((2, 33, 80), -1), ((2, 80, 33), -2)):
            ranks = Ranks(name, shape, dim, 4, "even", group)
            ranks.whole_state = {k: v.float() for k, v in ranks.whole_state.items()}
            ranks.states = [{k: v.float() for k, v in state.items()} for state in ranks.states]
            for _ in range(3):
                expected, result = ranks.step(torch.randn(shape))
                assert result.dtype == torch.float32
                assert (result - expected).norm() <= 1e-5 * expected.norm()


class TestWhatCanBeCut:
    def test_muon_and_normuon_in_our_own_arithmetic(self) -> None:
        assert MuonRule().can_shard(group_of("muon"))
        assert NorMuonRule().can_shard(group_of("normuon"))
        assert MuonRule().can_shard(group_of("muon", eps=1e-7))

    @pytest.mark.parametrize("options", [{"compat": "torch"}, {"ns_coefficients": "aol", "ns_steps": 4}])
    def test_others_say_no_and_refuse(self, options: dict[str, Any]) -> None:
        rule, group = MuonRule(), group_of("muon", **options)
        assert not rule.can_shard(group)
        assert rule.shard_cost(64, 128, 4, group) == rule.cost(64, 128, group)
        shard = Shard(-1, (4, 8), 0, 4, lambda t: t, lambda t: t, parts=2)
        with pytest.raises(NotImplementedError, match=r"muon.*whole matrices"):
            rule.transform_shard(torch.ones(1, 4, 4), {}, group, None, CLOCK, shard)

    def test_rules_without_it_need_whole_matrices(self) -> None:
        rule = SoapRule()
        group = SOAP([("w", torch.nn.Parameter(torch.zeros(4, 6)))], lr=0.1).param_groups[0]
        assert not rule.can_shard(group)
        assert rule.shard_cost(64, 128, 4, group) == rule.cost(64, 128, group)
        shard = Shard(-1, (4, 8), 0, 4, lambda t: t, lambda t: t, parts=2)
        with pytest.raises(NotImplementedError, match=r"soap needs whole matrices"):
            rule.transform_shard(torch.ones(1, 4, 4), {}, group, None, CLOCK, shard)

    def test_cost_falls_with_ranks(self) -> None:
        rule, group = MuonRule(), group_of("muon", ns_steps=7)
        assert (
            rule.shard_cost(4096, 4096, 1, group) == rule.cost(4096, 4096, group) == newton_schulz_flops(4096, 4096, 7)
        )
        assert rule.shard_cost(4096, 4096, 8, group) * 8 == rule.cost(4096, 4096, group)
        costs = [rule.shard_cost(4096, 14336, k, group) for k in (1, 2, 4, 8, 16)]
        assert costs == sorted(costs, reverse=True)
        assert len(set(costs)) == 5
