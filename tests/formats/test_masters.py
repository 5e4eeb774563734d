"""16-bit weights: what each policy keeps, and that a fine-tuning step really lands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.formats.master_weights import load_weights, store_weights


def round_trip(weight: Tensor, dtype: torch.dtype, policy: str) -> tuple[Tensor, Tensor, dict]:
    param, state = weight.to(dtype), {}
    store_weights([param], [weight], [state], policy)
    return load_weights([param], [state], policy)[0], param, state


def all_kinds_of_floats() -> Tensor:
    """Random bit patterns of finite float32, with ties and subnormals among them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[:1000] = (bits[:1000] & -(2**16)) | 2**15  # exactly between two bfloat16
    bits[1000:2000] &= 0x0000FFFF  # smaller than any bfloat16 but zero and the smallest subnormals
    values = bits.view(torch.float32)
    return values[torch.isfinite(values) & torch.isfinite(values.to(torch.bfloat16))]


def test_split_is_exactly_float32_for_bfloat16() -> None:
    weight = all_kinds_of_floats()
    back, param, state = round_trip(weight, torch.bfloat16, "split")
    assert torch.equal(param, weight.to(torch.bfloat16))
    assert state["weight_low_bits"].dtype is torch.int16
    off = back.view(torch.int32) - weight.view(torch.int32)
    tie = (weight.view(torch.int32) & 0xFFFF) == 2**15
    assert torch.equal(off[~tie], torch.zeros_like(off[~tie]))
    assert off[tie].abs().max() <= 1  # one float32 spacing


@pytest.mark.parametrize("policy", ["split", "kahan"])
def test_compensation_keeps_float16_to_22_bits(policy: str) -> None:
    weight = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    back, _, _ = round_trip(weight, torch.float16, policy)
    assert ((back - weight).abs() / weight.abs().clamp_min(1e-3)).max() < 2**-20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kahan_keeps_twice_the_bits(dtype: torch.dtype) -> None:
    weight = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    back, param, _ = round_trip(weight, dtype, "kahan")
    assert (back - weight).abs().max() < 0.01 * (param.float() - weight).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounding_left_is_never_taken_for_stale(dtype: torch.dtype) -> None:
    """Ties among it, and what would round to one: next to a number whose last bit is odd these would round away from it."""
    near = torch.tensor([0.0, 1.0, 511.0, 511.99, 512.0]) / 1024
    weight = torch.stack(
        [sign * (1 + (k + sign * near) * torch.finfo(dtype).eps) for k in range(9) for sign in (1, -1)]
    )
    weight = torch.cat([weight, weight.flip(0) * 2.0**-9])
    back, param, _ = round_trip(weight, dtype, "kahan")
    assert (param.float() != weight).any()
    assert ((back - weight).abs() <= 2**-8 * (param.float() - weight).abs()).all()


def test_stochastic_rounding_is_unbiased_and_repeatable() -> None:
    weight = torch.full((100_000,), 1.0 + 2**-9)  # a quarter of the way to the next bfloat16
    params = []
    for _ in range(2):
        param = torch.empty(100_000, dtype=torch.bfloat16)
        store_weights([param], [weight], [{}], "stochastic", torch.Generator().manual_seed(3))
        params.append(param)
    assert torch.equal(*params)
    assert set(params[0].float().unique().tolist()) == {1.0, 1.0 + 2**-7}
    assert abs((params[0].float() > 1.0).float().mean() - 0.25) < 0.01


@pytest.mark.parametrize("policy", ["split", "master", "kahan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -0.0, 0.75])
def test_a_weight_changed_from_outside_wins(policy: str, dtype: torch.dtype, value: float) -> None:
    """A checkpoint loaded into the model between steps must not be overwritten by a stale copy, nor become a NaN."""
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    _, param, state = round_trip(weight, dtype, policy)
    param.fill_(value)
    back = load_weights([param], [state], policy)[0]
    # Half a spacing of the new weights is the most that a stale remainder can add: that of 0.75 is one of 0.5.
    info = torch.finfo(dtype)
    assert (back - value).abs().max() <= max(0.5 * bool(value), info.tiny) * info.eps / 2
    assert torch.isfinite(back).all()


def fine_tune(dtype: torch.dtype, policy: str, steps: int = 200, lr: float = 1e-5) -> list[Tensor]:
    """Weights of N(0, 0.02^2) after steps of a noisy quadratic at a fine-tuning learning rate."""
    generator = torch.Generator().manual_seed(0)
    start = [
        (0.02 * torch.randn(shape, generator=generator)).bfloat16().float() for shape in ((64, 48), (48, 64), (64,))
    ]
    target = [w + 0.01 * torch.randn(w.shape, generator=generator) for w in start]
    params = [nn.Parameter(w.to(dtype, copy=True)) for w in start]
    optimizer = hf_emopt.Muon(params, lr=lr, weight_decay=0.1, ns_dtype="float32", low_precision_weights=policy)
    for step in range(steps):
        noise = torch.Generator().manual_seed(step)
        for p, t, s in zip(params, target, start):
            # The gradient of the start weights, so that every run sees the same ones.
            p.grad = (s - t + 0.01 * torch.randn(s.shape, generator=noise)).to(dtype)
        optimizer.step()
    return [p.detach().float() - w for p, w in zip(params, start)]


def test_bfloat16_weights_train_as_float32_at_a_fine_tuning_rate() -> None:
    """200 steps at 1e-5: the default moves as float32 does; plain bfloat16 does not move where it should."""
    wanted = fine_tune(torch.float32, "none")
    error = {}
    for policy in ("split", "master", "kahan", "stochastic", "none"):
        moved = fine_tune(torch.bfloat16, policy)
        error[policy] = max(float((m - w).norm() / w.norm()) for m, w in zip(moved, wanted))
    assert error["none"] > 0.9
    # What the stored bfloat16 cannot show is its own half spacing; the master behind it is compared below.
    assert error["split"] < 0.15
    assert error["master"] < 0.15
    assert error["kahan"] < 0.15


def test_stochastic_rounding_goes_the_way_of_float32_at_a_fine_tuning_rate() -> None:
    """200 steps at 1e-5: of the way that float32 goes, all but 3 percent; plain bfloat16 goes a twentieth of it."""
    wanted = torch.cat([m.flatten() for m in fine_tune(torch.float32, "none")])
    part = {}
    for policy in ("stochastic", "none"):
        moved = torch.cat([m.flatten() for m in fine_tune(torch.bfloat16, policy)])
        part[policy] = float(moved @ wanted / (wanted @ wanted))
    assert abs(part["stochastic"] - 1.0) < 0.03
    assert part["none"] < 0.1


@pytest.mark.parametrize(("policy", "bound"), [("split", 1e-3), ("master", 1e-3), ("kahan", 3e-2)])
def test_the_master_behind_bfloat16_weights_follows_float32(policy: str, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = (0.02 * torch.randn(64, 48, generator=generator)).bfloat16()
    wide, narrow = nn.Parameter(start.float()), nn.Parameter(start.clone())
    optimizers = [
        hf_emopt.Muon([p], lr=1e-5, weight_decay=0.1, ns_dtype="float32", low_precision_weights=policy)
        for p in (wide, narrow)
    ]
    for _step in range(200):
        g = torch.randn(64, 48, generator=generator).bfloat16()
        wide.grad, narrow.grad = g.float(), g
        for optimizer in optimizers:
            optimizer.step()
    master = load_weights([narrow.detach()], [optimizers[1].state[narrow]], policy)[0]
    moved = wide.detach() - start.float()
    assert (master - wide.detach()).norm() / moved.norm() < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_bytes_of_the_default(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.randn(32, 16).to(dtype))
    p.grad = torch.randn(32, 16).to(dtype)
    optimizer = hf_emopt.Muon([p])
    optimizer.step()
    per_weight = sum(t.element_size() * t.numel() for k, t in optimizer.state[p].items() if k != "step") / p.numel()
    assert per_weight == 4 + 2  # float32 momentum, 16 low bits


def test_stochastic_rounding_refuses_float16() -> None:
    with pytest.raises(ValueError, match="use 'split'"):
        hf_emopt.Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))], low_precision_weights="stochastic")


def test_stochastic_rounding_never_draws_from_the_trainings_generator() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="generator of its own"):
        store_weights([torch.ones(4, dtype=torch.bfloat16)], [torch.full((4,), 1.001)], [{}], "stochastic")
    assert torch.equal(torch.get_rng_state(), before)
