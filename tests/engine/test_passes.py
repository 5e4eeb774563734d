"""A step with the passes over runs, in Triton's interpreter: the weights of one process, and so many launches.

The interpreter has to be chosen before Triton is imported, so these cases run in a process of their own.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from interpreted import INTERPRETING

if INTERPRETING:
    from harness import World
    from zoo import assert_close, backward, build, single, steps_of, train, weights, wrap, zoo

    def launches(rule: str, layout: str, steps: int) -> dict[str, Any]:
        """Weights after some steps, and how often each kernel was launched for a bucket of matrices."""
        from hf_emopt.kernels.triton import multi_tensor_kernels as run_launch

        counts: Counter[str] = Counter()
        plain = run_launch.launch_spans

        def counted(kernel: Any, *args: Any) -> None:
            counts[kernel.__name__] += 1
            plain(kernel, *args)

        run_launch.launch_spans = counted
        try:
            model = wrap(zoo(), layout)
            optimizer = build(model, rule)
            train(model, optimizer, steps)
        finally:
            run_launch.launch_spans = plain
        buckets = len(optimizer.current_context().plan.buckets)
        return {"weights": weights(model), "counts": dict(counts), "buckets": buckets}

    def coming_and_going(layout: str) -> dict[str, Any]:
        """Weights after steps in which parameters take part or do not, with rates that change."""
        model = zoo() if layout == "single" else wrap(zoo(), layout)
        optimizer = build(model, "muon")
        matrices = [name for name, param in model.named_parameters() if param.ndim >= 2]
        for step, idle in enumerate(([], matrices[::2], matrices[:1], [], matrices[1::2], [])):
            backward(model, step)
            for name, param in model.named_parameters():
                if name in idle:
                    param.grad = None
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    @pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
    def test_what_is_kept_for_the_parameters_that_took_part(two: World, layout: str) -> None:
        os.environ["HF_EMOPT_DISABLE_TRITON"] = "1"
        try:
            wanted = coming_and_going("single")
        finally:
            del os.environ["HF_EMOPT_DISABLE_TRITON"]
        for found in two.run(coming_and_going, layout=layout):
            assert_close(found, wanted, 1e-5)

    @pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp"])
    @pytest.mark.parametrize("rule", ["muon", "soap"])
    def test_weights_are_those_of_one_process(two: World, rule: str, layout: str) -> None:
        steps = steps_of(rule)
        os.environ["HF_EMOPT_DISABLE_TRITON"] = "1"
        try:
            wanted = single(rule, steps)
        finally:
            del os.environ["HF_EMOPT_DISABLE_TRITON"]
        for result in two.run(launches, rule=rule, layout=layout, steps=steps):
            assert_close(result["weights"], wanted, 1e-5)
            counts = result["counts"]
            assert counts["finite_kernel"] == steps
            assert counts["apply_kernel"] >= steps
            if rule == "muon":
                assert counts["momentum_kernel"] >= steps
            else:
                assert "momentum_kernel" not in counts
            # Nothing is launched by parameter.
            assert counts["apply_kernel"] <= steps * result["buckets"]

    @pytest.mark.parametrize("kind", ["l2", "independent", "corrected"])
    def test_kinds_of_decay(kind: str) -> None:
        """The launch that applies updates knows all kinds; the momentum's, which reads no weights, makes way for ``l2``."""
        from test_parity import scheduled

        case: dict[str, Any] = {"rule": "muon", "layout": "single", "kind": kind, "dtype": torch.float32}
        os.environ["HF_EMOPT_DISABLE_TRITON"] = "1"
        try:
            wanted = scheduled(**case)
        finally:
            del os.environ["HF_EMOPT_DISABLE_TRITON"]
        assert_close(scheduled(**case), wanted, 1e-5)
