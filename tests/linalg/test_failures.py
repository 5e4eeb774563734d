"""The ladder: who fails, on which rung a block is solved, and what the counts say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from spectra import host_reads, matrices
from torch import Tensor

from hf_emopt.linalg import LadderReport, eigenbasis, inverse_root, refresh_eigenbasis, with_ladder

NAMES = ["condition_1e2", "identity", "duplicates", "condition_1e4"]
LinAlgError: Any = torch.linalg.LinAlgError


class Root(NamedTuple):
    value: Tensor
    failed: Tensor


def root(a: Tensor) -> tuple[Tensor, ...]:
    return inverse_root(a, 0.25)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Tensor], bool]], list[Tensor]]:
    """Makes ``eigh`` raise for batches with a block of which the condition holds; returns its inputs."""

    def install(condition: Callable[[Tensor], bool]) -> list[Tensor]:
        eigh, inputs = torch.linalg.eigh, []

        def refusing(a: Tensor) -> Any:
            inputs.append(a)
            if any(condition(block) for block in a):
                raise LinAlgError("linalg.eigh: the algorithm failed to converge")
            return eigh(a)

        monkeypatch.setattr(torch.linalg, "eigh", refusing)
        return inputs

    return install


def is_identity(block: Tensor) -> bool:
    return bool((block / block[0, 0] - torch.eye(block.shape[-1])).abs().max() < 1e-3)


def test_clean() -> None:
    a = matrices(NAMES, torch.float32)
    before = a.clone()
    outcome = with_ladder(root, a)
    assert outcome.report == LadderReport(blocks=4)
    assert outcome.report.clean
    assert outcome.failed_blocks == ()
    assert not outcome.failed.any()
    assert torch.equal(outcome.value[0], inverse_root(a, 0.25).value)
    assert torch.equal(a, before)


def test_one_host_read_where_all_goes_well(monkeypatch: pytest.MonkeyPatch) -> None:
    a = matrices(NAMES, torch.float32)
    root(a)
    shapes, tolist = [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: shapes.append(x.shape) or tolist(x))
    with host_reads() as reads:
        with_ladder(root, a)
    assert shapes == [(len(NAMES),)]
    assert reads.count == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nonfinite_block_fails_at_once_and_alone(poison: float) -> None:
    a = matrices(NAMES, torch.float32)
    clean = inverse_root(a, 0.25).value
    a[2, 0, 1] = poison
    calls = []

    def counted(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x)
        return root(x)

    outcome = with_ladder(counted, a)
    assert len(calls) == 1
    assert outcome.failed.tolist() == [False, False, True, False]
    assert outcome.failed_blocks == (2,)
    assert outcome.report == LadderReport(blocks=4, nonfinite=1, failed=1)
    torch.testing.assert_close(outcome.value[0][[0, 1, 3]], clean[[0, 1, 3]])


def test_raises_in_float32_and_is_solved_in_float64(refuse: Any) -> None:
    a = matrices(NAMES, torch.float32)
    clean = inverse_root(a, 0.25).value
    refuse(lambda block: block.dtype == torch.float32 and is_identity(block))
    outcome = with_ladder(root, a)
    assert outcome.report == LadderReport(blocks=4, float64=1)
    assert not outcome.report.clean
    assert outcome.value.value.dtype == torch.float32
    assert not outcome.failed.any()
    assert not outcome.value.failed.any()
    torch.testing.assert_close(outcome.value.value, clean, rtol=1e-5, atol=1e-5)


def test_raises_until_epsilon_grows(refuse: Any) -> None:
    """A float64 identity is refused until its diagonal is 1 + 1e-9: two smaller epsilons were tried in vain."""
    a = matrices(NAMES)
    # Blocks are scaled by a power of two before the decomposition, the identity to itself.
    inputs = refuse(
        lambda block: is_identity(block) and block[0, 0] / 2.0 ** math.floor(math.log2(block[0, 0])) < 1 + 5e-10
    )
    outcome = with_ladder(root, a)
    assert outcome.report == LadderReport(blocks=4, epsilon=1)
    assert len(inputs) == 1 + 4 + 3  # all at once; each alone; 1e-15, 1e-12, 1e-9
    torch.testing.assert_close(outcome.value.value[1], (1 + 1e-9) ** -0.25 * torch.eye(24).double(), rtol=0, atol=1e-11)


def test_failed_block_is_reported_after_the_last_rung(refuse: Any) -> None:
    a = matrices(NAMES, torch.float32)
    clean = inverse_root(a, 0.25).value
    # The steepest spectrum, told by a number that neither scaling nor a small epsilon changes.
    spread = a.diagonal(dim1=-2, dim2=-1).sum(-1) / a.flatten(1).norm(dim=1)
    assert spread.sort().values.diff().min() > 0.1
    refused = [int(spread.argmin())]
    refuse(lambda block: abs(block.trace() / block.norm() - spread.min()) < 0.01)
    outcome = with_ladder(root, a)
    assert outcome.failed_blocks == tuple(refused)
    assert outcome.report == LadderReport(blocks=4, failed=1)
    assert outcome.value.failed.tolist() == outcome.failed.tolist()
    assert outcome.value.value[refused].isnan().all()
    kept = [i for i in range(4) if i not in refused]
    torch.testing.assert_close(outcome.value.value[kept], clean[kept])


def test_nonfinite_result_climbs() -> None:
    """No exception, but a NaN, as some libraries give."""
    a = matrices(NAMES, torch.float32)

    def overflows(x: Tensor) -> tuple[Tensor]:
        value = x.clone()
        if x.dtype == torch.float32:
            value[x[:, 0, 0] < a[:, 0, 0].max()] = math.nan
        return (value,)

    outcome = with_ladder(overflows, a)
    assert outcome.report == LadderReport(blocks=4, float64=3)
    assert torch.equal(outcome.value[0], a)


def test_reported_failure_climbs() -> None:
    def only_double(x: Tensor) -> Root:
        return Root(x * 2, torch.full(x.shape[:1], x.dtype != torch.float64))

    a = matrices(NAMES, torch.float32)
    outcome = with_ladder(only_double, a)
    assert outcome.report == LadderReport(blocks=4, float64=4)
    assert isinstance(outcome.value, Root)
    assert not outcome.value.failed.any()
    torch.testing.assert_close(outcome.value.value, a * 2)


def test_aligned_tensors_follow_their_blocks(refuse: Any) -> None:
    a = matrices(NAMES, torch.float32)
    q_old = eigenbasis(a).roll(1, -1)
    clean = refresh_eigenbasis(a, q_old, "eigh")
    refuse(lambda block: block.dtype == torch.float32 and is_identity(block))
    outcome = with_ladder(lambda x, q: refresh_eigenbasis(x, q, "eigh"), a, q_old)
    assert outcome.report == LadderReport(blocks=4, float64=1)
    assert torch.equal(outcome.value.permutation[[0, 2, 3]], clean.permutation[[0, 2, 3]])
    assert outcome.value.permutation.dtype == torch.int64
    torch.testing.assert_close(outcome.value.q[[0, 2, 3]], clean.q[[0, 2, 3]])


def test_failed_refresh_keeps_the_old_basis() -> None:
    a = matrices(NAMES, torch.float32)
    q_old = eigenbasis(a)
    a[3, 1, 1] = math.nan
    outcome = with_ladder(refresh_eigenbasis, a, q_old)
    assert outcome.failed_blocks == (3,)
    merged = torch.where(outcome.failed[:, None, None], q_old, outcome.value.q)
    assert torch.equal(merged[3], q_old[3])


def test_duplicate_rows() -> None:
    """Two equal rows and columns: singular, and no reason to fail."""
    a = matrices(NAMES, torch.float32)
    a[:, 1] = a[:, 0]
    a[:, :, 1] = a[:, :, 0]
    outcome = with_ladder(root, a)
    assert outcome.report.clean
    assert outcome.value.value.isfinite().all()


def test_every_block_refused(refuse: Any) -> None:
    a = matrices(["condition_1e2", "duplicates"], torch.float32)
    refuse(lambda block: not is_identity(block))
    outcome = with_ladder(root, a)
    assert outcome.report == LadderReport(blocks=2, failed=2)
    assert outcome.value.value.isnan().all()


def test_broken_solver_raises(refuse: Any) -> None:
    refuse(lambda block: True)
    with pytest.raises(LinAlgError, match="failed to converge"):
        with_ladder(root, matrices(NAMES, torch.float32))


def test_other_errors_are_not_swallowed() -> None:
    def out_of_memory(a: Tensor) -> tuple[Tensor]:
        raise RuntimeError("CUDA out of memory in cusolver")

    def typo(a: Tensor) -> tuple[Tensor]:
        raise ValueError("a typo")

    a = matrices(NAMES, torch.float32)
    with pytest.raises(RuntimeError, match="out of memory"):
        with_ladder(out_of_memory, a)
    with pytest.raises(ValueError, match="typo"):
        with_ladder(typo, a)
    with pytest.raises(ValueError, match=r"\(N, d, d\)"):
        with_ladder(root, a[0])


def test_reports_add_up() -> None:
    total = LadderReport(blocks=3, float64=1) + LadderReport(blocks=2, cpu=1, epsilon=1, nonfinite=1, failed=2)
    assert total == LadderReport(blocks=5, float64=1, cpu=1, epsilon=1, nonfinite=1, failed=2)
