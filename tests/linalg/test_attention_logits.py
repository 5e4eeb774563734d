"""The largest logit of every head in blocks, against all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_emopt.linalg.attention_logits import Visible, logit_bound, max_logit

B, H, GROUPS, Q, K, D = 3, 6, 2, 11, 11, 5


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def dense(query: Tensor, key: Tensor, scaling: float, seen: Tensor) -> Tensor:
    """All logits at once, with key heads repeated."""
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (query.double() @ repeated.double().transpose(-1, -2)) * scaling
    return logits.masked_fill(~seen.expand_as(logits), -torch.inf).amax(dim=(0, 2, 3))


def distance(offset: int = 0) -> Tensor:
    return torch.arange(K)[None, :] - torch.arange(Q)[:, None] - offset


def padding(length: int) -> Tensor:
    lengths = torch.tensor([length, 4, 7])
    return torch.arange(length)[None, :] >= (length - lengths)[:, None]


SEQUENCES = torch.tensor([[0] * 4 + [1] * 7])
CAUSAL = distance() <= 0
FLOAT_MASK = torch.where(CAUSAL & padding(K)[:, None, None, :], 0.5, torch.finfo(torch.float32).min)
CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "all": ({}, torch.ones(1, 1, Q, K, dtype=torch.bool)),
    "causal": ({"causal": True}, CAUSAL),
    "causal-offset": ({"causal": True, "offset": 3}, distance(3) <= 0),
    "window": ({"window": (2, 1)}, (distance() >= -2) & (distance() <= 1)),
    "causal-window": ({"causal": True, "window": (2, 2)}, CAUSAL & (distance() >= -2)),
    "padding": (
        {"keys": padding(K), "queries": padding(Q)},
        padding(K)[:, None, None, :] & padding(Q)[:, None, :, None],
    ),
    "bool-mask": ({"mask": CAUSAL[None, None].expand(B, 1, Q, K)}, CAUSAL),
    "mask-by-head": ({"mask": random(B, H, Q, K) > 0}, random(B, H, Q, K) > 0),
    "added-mask": ({"mask": FLOAT_MASK}, FLOAT_MASK > -1),
    "packed": (
        {"causal": True, "query_segments": SEQUENCES, "key_segments": SEQUENCES},
        CAUSAL & (SEQUENCES[:, None, :, None] == SEQUENCES[:, None, None, :]),
    ),
    "function": ({"function": lambda b, h, i, j: (i >= j) & (j != b) & (h != 6)}, torch.empty(0)),
}


@pytest.mark.parametrize("block_numel", [1, 3 * B * H * K, 2**24], ids=["row", "3-rows", "one-block"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_find_what_all_logits_at_once_have(case: str, block_numel: int) -> None:
    query, key = random(B, H, Q, D), random(B, GROUPS, K, D)
    options, seen = CASES[case]
    if case == "function":
        seen = torch.stack([CAUSAL & (torch.arange(K) != b)[None, :] for b in range(B)])[:, None]
    found = max_logit(query, key, 0.3, Visible(**options), block_numel)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), dense(query, key, 0.3, seen), rtol=1e-5, atol=1e-6)


def test_a_head_that_sees_nothing_has_no_logit() -> None:
    mask = torch.ones(1, H, Q, K, dtype=torch.bool)
    mask[:, 2] = False
    found = max_logit(random(B, H, Q, D), random(B, H, K, D), 1.0, Visible(mask=mask))
    assert found[2] == -torch.inf
    assert found.isfinite().sum() == H - 1


def test_sixteen_bit_products_are_not_rounded_to_sixteen_bits() -> None:
    query, key = random(B, H, Q, 64).bfloat16(), random(B, GROUPS, K, 64).bfloat16()
    everything = torch.ones(1, 1, Q, K, dtype=torch.bool)
    found = max_logit(query, key, 0.125, Visible())
    torch.testing.assert_close(found.double(), dense(query, key, 0.125, everything), rtol=1e-6, atol=0)


def test_float64_stays() -> None:
    query, key = random(B, H, Q, D).double(), random(B, GROUPS, K, D).double()
    found = max_logit(query, key, 0.3, Visible(causal=True))
    torch.testing.assert_close(found, dense(query, key, 0.3, CAUSAL), rtol=1e-14, atol=0)


def test_the_bound_holds_and_is_met_by_parallel_vectors() -> None:
    query, key = random(B, H, Q, D), random(B, GROUPS, K, D)
    bound = logit_bound(query, key, 0.3)
    assert (bound >= max_logit(query, key, 0.3, Visible())).all()
    key[1, :, 4] = 100 * query[1, ::3, 7]  # of heads 0 and 3
    query[1, ::3, 7] *= 10
    bound, exact = logit_bound(query, key, 0.3), max_logit(query, key, 0.3, Visible())
    torch.testing.assert_close(bound[::3], exact[::3], rtol=1e-6, atol=0)


def test_the_bound_multiplies_lengths_of_one_sequence_only() -> None:
    query, key = torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4)
    query[0] *= 10
    key[1] *= 10
    assert float(logit_bound(query, key, 1.0)) == pytest.approx(40.0)
