"""The summary of a device trace, on spans whose answer is known."""

from __future__ import annotations

import pytest

from hf_emopt.tools.bench.timeline import kind_of, sum_up

MS = 1_000_000


def test_kinds():
    assert kind_of("ncclDevKernel_SendRecv(...)") == "collective"
    assert kind_of("nvjet_hsh_128x256_64x4") == "product"
    assert kind_of("symmetric_product_kernel") == "product"
    assert kind_of("Memcpy DtoD (Device -> Device)") == "copy"
    assert kind_of("multi_tensor_apply_kernel<Lerp>") == "elementwise"


def test_overlap_is_counted_once_and_gaps_not_at_all():
    spans = [
        (0, 4 * MS, "gemm", 7),
        (2 * MS, 6 * MS, "nccl_all_to_all", 20),
        (10 * MS, 11 * MS, "lerp", 7),
        (11 * MS, 12 * MS, "lerp", 7),
    ]
    result = sum_up(spans)
    assert (result.span, result.busy, result.kernels) == pytest.approx((12.0, 8.0, 4))
    assert result.by_kind == pytest.approx({"product": 4.0, "collective": 4.0, "elementwise": 2.0})
    assert result.alone == pytest.approx({"product": 2.0, "collective": 2.0, "elementwise": 2.0})
    assert result.by_stream == pytest.approx({"7": 6.0, "20": 4.0})
    assert result.largest[-1] == ("lerp", pytest.approx(2.0), 2)
    assert "4 kernels in 12.00 ms, 8.00 ms busy" in str(result)


def test_nothing_ran():
    assert sum_up([]).busy == 0.0
