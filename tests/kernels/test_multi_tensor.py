"""Passes over runs of many tensors, in Triton's interpreter, against torch's foreach functions."""

from __future__ import annotations

import pytest
import torch
from interpreted import INTERPRETING
from torch import Tensor

from hf_emopt.kernels.multi_tensor import flat_span


@pytest.mark.parametrize(
    ("where", "shape", "expected"),
    [
        ((slice(0, 3), slice(0, 4)), (3, 4), (0, 12)),
        ((slice(1, 3), slice(0, 4)), (3, 4), (4, 8)),
        ((slice(1, 2), slice(1, 3)), (3, 4), (5, 2)),
        ((slice(0, 2), slice(1, 3)), (3, 4), None),
        ((slice(1, 2), slice(1, 3), slice(0, 5)), (2, 4, 5), (25, 10)),
        ((slice(0, 2), slice(1, 3), slice(0, 5)), (2, 4, 5), None),
        ((slice(2, 5),), (9,), (2, 3)),
        ((), (), (0, 1)),
    ],
)
def test_regions_that_are_runs(where, shape, expected):
    assert flat_span(where, shape) == expected
    if expected is not None:
        values = torch.arange(max(1, torch.Size(shape).numel())).view(shape)
        offset, numel = expected
        assert torch.equal(values.reshape(-1)[offset : offset + numel], values[where].reshape(-1))


if INTERPRETING:
    from hf_emopt.kernels.multi_tensor import MultiTensorTable, all_finite, kernels_run_on

    MultiTensorTable.BLOCK = 64
    SIZES = [(7, 9), (48,), (3, 80), (1,)]

    @pytest.fixture(autouse=True)
    def _seed() -> None:
        torch.manual_seed(0)

    def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(size).to(dtype) for size in SIZES]

    def into_one_buffer(order: list[int]) -> tuple[MultiTensorTable, int]:
        """The tensors one after another in another order, three elements apart, the third in two parts."""
        runs, offset = [], 5
        for k in order:
            size = torch.Size(SIZES[k]).numel()
            parts = [(0, 100), (100, size - 100)] if k == 2 else [(0, size)]
            for start, count in parts:
                runs.append((k, start, 0, offset, count))
                offset += count + 3
        return MultiTensorTable(runs), offset

    def gathered(runs: MultiTensorTable, buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
        out = [torch.full(t.shape, float("nan")) for t in like]
        for k, a, b, n in zip(runs.left, runs.left_offset, runs.right_offset, runs.numel):
            out[k].view(-1)[a : a + n] = buffer[b : b + n].float()
        return out

    def test_runs_work_here() -> None:
        assert kernels_run_on(torch.device("cpu"))

    @pytest.mark.parametrize("aligned", [False, True])
    @pytest.mark.parametrize("ok", [None, True, False])
    @pytest.mark.parametrize("nesterov", [False, True])
    @pytest.mark.parametrize("mu", [0.3, 0.95])
    def test_momentum_as_torch_lerp(mu: float, nesterov: bool, ok: bool | None, aligned: bool) -> None:
        grads, buffers = tensors(), tensors()
        runs, size = into_one_buffer([2, 0, 3, 1])
        if aligned:
            grads, buffers = [torch.randn(16, 16), torch.randn(32)], [torch.randn(16, 16), torch.randn(32)]
            runs, size = MultiTensorTable([(0, 0, 0, 32, 256), (1, 0, 0, 0, 32)]), 288
        buffer = torch.full((size,), float("nan"))
        inputs = [b.clone() if ok is False else g for g, b in zip(grads, buffers)]
        wanted = [b.clone() for b in buffers]
        torch._foreach_lerp_(wanted, inputs, 1.0 - mu)
        sent = torch._foreach_lerp(inputs, wanted, mu) if nesterov else wanted
        runs.momentum(grads, buffers, [buffer], mu, nesterov, None if ok is None else torch.tensor(ok))
        for ours, theirs in zip([*buffers, *gathered(runs, buffer, grads)], [*wanted, *sent]):
            torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=1e-7)
        assert int(buffer.isnan().sum()) == size - sum(g.numel() for g in grads), "nothing else is written"

    def test_momentum_of_coarse_gradients() -> None:
        grads, buffers = tensors(torch.bfloat16), tensors()
        runs, size = into_one_buffer([0, 1, 2, 3])
        buffer, wanted = torch.zeros(size, dtype=torch.float16), [b.clone() for b in buffers]
        torch._foreach_lerp_(wanted, [g.float() for g in grads], 0.05)
        runs.momentum(grads, buffers, [buffer], 0.95, False, None)
        for ours, theirs, state in zip(gathered(runs, buffer, grads), wanted, buffers):
            torch.testing.assert_close(state, theirs, rtol=3e-7, atol=1e-7)
            torch.testing.assert_close(ours, theirs.half().float(), rtol=1e-3, atol=1e-6)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_there_and_back(scaled: bool) -> None:
        left = tensors()
        runs, size = into_one_buffer([1, 3, 0, 2])
        buffer = torch.full((size,), float("nan"), dtype=torch.float32)
        scales = [0.5, 2.0, 3.0, 0.25] if scaled else [1.0] * 4
        runs.to_right(left, [buffer], scales if scaled else None)
        back = [torch.zeros_like(t) for t in left]
        runs.to_left([buffer], back)
        for ours, theirs, scale in zip(back, left, scales):
            assert torch.equal(ours, theirs * scale)

    @pytest.mark.parametrize("counts", [True, False])
    def test_what_does_not_count_is_zero_whatever_it_was(counts: bool) -> None:
        left = tensors()
        left[1].view(-1)[2] = float("nan")
        runs, size = into_one_buffer([1, 3, 0, 2])
        buffer = torch.full((size,), -7.0)
        runs.to_right(left, [buffer], ok=torch.tensor(counts))
        for ours, theirs in zip(gathered(runs, buffer, left), left):
            torch.testing.assert_close(ours, theirs if counts else torch.zeros_like(theirs), equal_nan=True)
        assert int((buffer == -7.0).sum()) == size - sum(t.numel() for t in left), "nothing else is written"

    @pytest.mark.parametrize("decay", ["none", "before", "after", "cautious"])
    @pytest.mark.parametrize("ok", [None, True, False])
    def test_apply_as_the_foreach_functions(decay: str, ok: bool | None) -> None:
        from hf_emopt.rules.adamw import apply_updates

        group = {
            "lr": 0.1,
            "weight_decay": 0.0 if decay == "none" else 0.3,
            "low_precision_weights": "none",
            "decay_after": decay == "after",
            "cautious_weight_decay": decay == "cautious",
        }
        weights, updates = tensors(), tensors()
        runs, size = into_one_buffer([3, 2, 1, 0])
        buffer = torch.zeros(size)
        runs.to_right(updates, [buffer])
        flag = None if ok is None else torch.tensor(ok)
        wanted = [w.clone() for w in weights]
        apply_updates(wanted, [u * 2.0 for u in updates], [{} for _ in wanted], group, flag)
        shrink = group["lr"] * group["weight_decay"]
        runs.apply(weights, [buffer], 0.1, shrink, flag, [2.0], decay if decay in ("cautious", "after") else "before")
        for ours, theirs in zip(weights, wanted):
            torch.testing.assert_close(ours, theirs, rtol=2e-7, atol=1e-8)

    @pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")])
    @pytest.mark.parametrize("place", [(0, 0), (2, 239)])
    def test_all_finite(bad: float | None, place: tuple[int, int]) -> None:
        values = tensors()
        values[1][3] = 3e38
        if bad is not None:
            values[place[0]].view(-1)[place[1]] = bad
        assert bool(all_finite(values)) is (bad is None)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_tensors_that_are_parts_of_larger_ones(scaled: bool) -> None:
        """Lists of two stacks, of which the tensors are rows in another order: the same numbers, and scales by tensor."""
        sizes, where = [32, 48, 16, 5], [(1, 0), (0, 16), (0, 0), (1, 32)]
        runs = MultiTensorTable([(k, 0, 0, 10 + sum(sizes[:k]), size) for k, size in enumerate(sizes)])
        stacks = [torch.randn(64), torch.randn(37)]
        apart = [stacks[s][start : start + size].clone() for (s, start), size in zip(where, sizes)]
        scales = [0.5, 2.0, 3.0, 0.25] if scaled else None
        wanted, found = torch.zeros(120), torch.zeros(120)
        runs.to_right(apart, [wanted], scales)
        runs.within(left=where).to_right(stacks, [found], scales)
        assert torch.equal(found, wanted)
        assert int((wanted != 0).sum()) == sum(sizes)
        back = [torch.zeros(64), torch.zeros(37)]
        runs.within(left=where).to_left([found], back)
        for (s, start), size, k in zip(where, sizes, range(4)):
            assert torch.equal(back[s][start : start + size], apart[k] * (scales[k] if scales else 1.0))
        weights = [torch.randn(size) for size in sizes]
        turned = MultiTensorTable([(k, 0, k, 0, size) for k, size in enumerate(sizes)])
        ours, theirs = [w.clone() for w in weights], [w.clone() for w in weights]
        turned.apply(theirs, apart, 0.1, 0.3, None, scales)
        turned.within(right=where).apply(ours, stacks, 0.1, 0.3, None, scales)
        for a, b, before in zip(ours, theirs, weights):
            assert torch.equal(a, b)
            assert not torch.equal(a, before)

    def test_parts_of_nothing() -> None:
        MultiTensorTable([]).within(left=[], right=[]).to_left([], [])

    def test_no_runs() -> None:
        MultiTensorTable([]).to_right([], [])
        assert bool(all_finite([torch.empty(0)]))
