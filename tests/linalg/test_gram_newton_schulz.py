"""The Gram form and the symmetric products in torch, with the rounding points of the kernels, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_emopt.kernels.triton import configs, runtime
from hf_emopt.linalg import NS_COEFFICIENTS, ResolvedCoefficients, newton_schulz, symmetric_products
from hf_emopt.linalg.gram_newton_schulz import _worst_ratio, find_restart_steps, iterate
from hf_emopt.linalg.symmetric_products import normalize_cast, symmul, syrk

FROBENIUS_SETS = [name for name, entry in NS_COEFFICIENTS.items() if entry.scaling == "frobenius"]
SEEDS = 20
KINDS = ["gaussian", "badly_scaled", "rank_1", "rank_8_and_noise", "condition_1e6", "tiny"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def matrices(kind: str, m: int, n: int, seeds: int = SEEDS) -> Tensor:
    if kind == "gaussian":
        return torch.randn(seeds, m, n)
    if kind == "tiny":
        return 1e-12 * torch.randn(seeds, m, n)
    if kind == "badly_scaled":
        return torch.randn(seeds, m, n) * torch.logspace(0, -4, m)[:, None]
    if kind == "rank_1":
        return torch.randn(seeds, m, 1) @ torch.randn(seeds, 1, n)
    if kind == "rank_8_and_noise":
        return torch.randn(seeds, m, 8) @ torch.randn(seeds, 8, n) + 1e-2 * torch.randn(seeds, m, n)
    u = torch.linalg.qr(torch.randn(seeds, m, m)).Q
    v = torch.linalg.qr(torch.randn(seeds, n, m)).Q
    return (u * torch.logspace(0, -6, m)) @ v.mT


def exact(x: Tensor, resolved: ResolvedCoefficients) -> Tensor:
    return iterate(x.double(), resolved.steps, None, resolved.safety_factor, torch.float64)


def bfloat16_iteration(x: Tensor, resolved: ResolvedCoefficients) -> Tensor:
    """What torch.compile of the usual iteration computes: norm and division in float32, each sum rounded once."""
    y = (x / (torch.linalg.matrix_norm(x, keepdim=True) * resolved.safety_factor)).bfloat16()
    for a, b, c in resolved.steps:
        gram = (y.float() @ y.float().mT).bfloat16()
        polynomial = (b * gram.float() + c * (gram.float() @ gram.float())).bfloat16()
        y = (a * y.float() + polynomial.float() @ y.float()).bfloat16()
    return y


def errors(y: Tensor, expected: Tensor) -> Tensor:
    return (y.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


class TestAccuracy:
    @pytest.mark.parametrize("name", FROBENIUS_SETS)
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("form", ["standard", "gram"])
    def test_no_worse_than_the_bfloat16_iteration(self, form: str, kind: str, name: str) -> None:
        """On every seed. The Gram form where it is used: long side at least 1.5 times the short one."""
        resolved = NS_COEFFICIENTS[name].resolve()
        x = matrices(kind, 64, 96 if form == "gram" else 64)
        restarts = find_restart_steps(resolved.steps) if form == "gram" else None
        expected = exact(x, resolved)
        ours = errors(iterate(x, resolved.steps, restarts, resolved.safety_factor, torch.float16), expected)
        theirs = errors(bfloat16_iteration(x, resolved), expected)
        assert (ours <= theirs).all(), (ours / theirs).max()

    @pytest.mark.parametrize("name", FROBENIUS_SETS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_singular_values_in_the_sets_band(self, kind: str, name: str) -> None:
        entry = NS_COEFFICIENTS[name]
        x = matrices(kind, 48, 128).double()
        start = torch.linalg.svdvals(x / torch.linalg.matrix_norm(x, keepdim=True))
        reached = (start >= entry.lower_bound).sum(-1)
        result = torch.linalg.svdvals(newton_schulz(x.float(), None, name, torch.float16, method="gram").double())
        low, high = entry.singular_value_band
        # What rounding in float16 may add to a singular value, by the rule that places restarts.
        slack = 0.06
        assert result.max() <= high + slack
        assert result.gather(-1, reached[:, None] - 1).min() >= low - slack

    def test_a_long_matrix(self) -> None:
        """At 256 x 8,192 the entries of the normalized matrix and of its Gram matrix are near the end of float16's range; the
        powers of two keep them as accurate as those of a small matrix."""
        x = torch.randn(1, 256, 8192)
        resolved = NS_COEFFICIENTS["jordan"].resolve()
        restarts = find_restart_steps(resolved.steps)
        result = iterate(x, resolved.steps, restarts, 1.0, torch.float16)
        assert errors(result, exact(x, resolved)).item() < 2.5e-3

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 24, 60), (2, 2, 5, 9)])
    def test_gram_form_without_16_bits(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = torch.randn(shape, dtype=dtype)
        gram, standard = (newton_schulz(x, 5, "jordan", dtype, method=method) for method in ("gram", "standard"))
        bound = 2e-5 if dtype == torch.float32 else 1e-10
        assert (gram - standard).norm() <= bound * standard.norm()

    @pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
    def test_zero_and_not_finite(self, value: float) -> None:
        x = torch.randn(3, 16, 40)
        x[1] = value
        result = newton_schulz(x, dtype=torch.float16, method="gram")
        assert result[[0, 2]].isfinite().all()
        assert result[1].count_nonzero() == 0 if value == 0 else not result[1].isfinite().any()


class TestRestarts:
    def test_places(self) -> None:
        assert find_restart_steps(NS_COEFFICIENTS["jordan"].resolve().steps) == (3,)
        assert find_restart_steps(NS_COEFFICIENTS["polar_express"].resolve().steps) == (3,)
        assert find_restart_steps(NS_COEFFICIENTS["you"].resolve().steps) == (2,)
        assert len(find_restart_steps(NS_COEFFICIENTS["deepseek_v4"].resolve().steps)) == 3
        assert find_restart_steps(((1.875, -1.25, 0.375),)) == ()

    @pytest.mark.parametrize("restarts", [1, 2])
    def test_best_of_all(self, restarts: int) -> None:
        import itertools

        steps = NS_COEFFICIENTS["you"].resolve().steps
        every = list(itertools.combinations(range(1, 5), restarts))
        chosen = _worst_ratio(steps, [find_restart_steps(steps, restarts)])
        assert chosen[0] == min(_worst_ratio(steps, every))

    def test_none_is_what_makes_the_form_fail(self) -> None:
        """The reason for restarts, and a check that the error model and the arithmetic tell the same story."""
        resolved = NS_COEFFICIENTS["polar_express"].resolve()
        x = matrices("condition_1e6", 64, 128, 4)
        expected = exact(x, resolved)
        without = errors(iterate(x, resolved.steps, (), 1.0, torch.float16), expected)
        placed = errors(iterate(x, resolved.steps, find_restart_steps(resolved.steps), 1.0, torch.float16), expected)
        assert placed.max() < 0.1
        assert not (without < 0.5).any()

    def test_too_many(self) -> None:
        with pytest.raises(ValueError, match="5 restarts do not fit"):
            find_restart_steps(NS_COEFFICIENTS["jordan"].resolve().steps, 5)


class TestArguments:
    def test_gram_needs_more_than_bfloat16(self) -> None:
        with pytest.raises(ValueError, match="more bits than bfloat16"):
            newton_schulz(torch.ones(4, 6), dtype=torch.bfloat16, method="gram")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"method": "newton"}, "one of auto, standard, gram"),
            ({"method": "gram", "normalization": "clamp"}, "no normalization='clamp'"),
            ({"method": "gram", "coefficients": "aol", "steps": 4}, "no coefficient set that rescales"),
        ],
    )
    def test_others(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            newton_schulz(torch.ones(4, 6), dtype=torch.float16, **arguments)  # type: ignore[arg-type]

    def test_products(self) -> None:
        x = torch.ones(3, 4, 5).half()
        with pytest.raises(ValueError, match="backend='auto'"):
            syrk(x, backend="triton")
        with pytest.raises(ValueError, match=r"result's shape \(3, 4, 4\)"):
            syrk(x, torch.ones(4, 4).half())
        with pytest.raises(ValueError, match="agree on the result's dtype"):
            syrk(x, torch.ones(3, 4, 4).half(), out_dtype=torch.float32)
        with pytest.raises(ValueError, match=r"not torch\.float64"):
            syrk(x, out_dtype=torch.float64)
        with pytest.raises(ValueError, match="of one dtype"):
            symmul(x, x.float())


class TestProducts:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("trans", [False, True])
    def test_syrk(self, dtype: torch.dtype, trans: bool) -> None:
        x = torch.randint(-2, 3, (2, 12, 20)).to(dtype)
        c = torch.randint(-2, 3, (2, 12, 12)).to(dtype)
        result = syrk(x.mT if trans else x, c, alpha=0.5, beta=2.0, diagonal=1.0, trans=trans)
        lower = c.tril() + c.tril(-1).mT
        expected = 0.5 * x.double() @ x.double().mT + 2 * lower.double() + torch.eye(12)
        assert torch.equal(result.double(), expected)

    def test_factors_accumulate_in_float32(self) -> None:
        """1,000 steps into one matrix: in bfloat16 the sum would stop growing."""
        g, factor = torch.ones(4, 8).bfloat16() / 8, torch.zeros(4, 4)
        for _ in range(1000):
            assert syrk(g, factor, beta=1.0, out=factor) is factor
        torch.testing.assert_close(factor, torch.full((4, 4), 125.0))

    @pytest.mark.parametrize("exponent", [-120, 0, 100])
    def test_normalize_cast(self, exponent: int) -> None:
        x = torch.randn(3, 8, 12)
        result = normalize_cast(x * 2.0**exponent, torch.float16, 4.0)
        torch.testing.assert_close(torch.linalg.matrix_norm(result.float()), torch.full((3,), 4.0), rtol=1e-3, atol=0)
        assert torch.equal(result, normalize_cast(x, torch.float16, 4.0))


class TestOperators:
    def test_compiled_without_graph_breaks(self) -> None:
        x = torch.randn(2, 16, 40)

        def step(x: Tensor) -> Tensor:
            return newton_schulz(x, dtype=torch.float16, method="gram").float() + syrk(x.half()).float().mean()

        torch._dynamo.reset()
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), step(x))

    @pytest.mark.parametrize("transposed", [False, True])
    def test_fake_kernels(self, transposed: bool) -> None:
        x = torch.randn(2, 24, 16).mT if transposed else torch.randn(2, 16, 24)
        flat = [3.4445, -4.7750, 2.0315] * 5
        ops = torch.ops.hf_emopt
        torch.library.opcheck(ops.newton_schulz.default, (x, flat, [2], 1.0, torch.float16, "auto"))
        torch.library.opcheck(ops.newton_schulz.default, (x, flat, None, 1.0, torch.bfloat16, "auto"))
        torch.library.opcheck(ops.normalize_cast.default, (x, torch.float16, 2.0, "auto"))
        torch.library.opcheck(ops.symmul.default, (x, x, None, 1.0, 0.0, 0.0, torch.float32, "auto"))


class TestDispatch:
    def test_nothing_runs_on_a_cpu_by_itself(self) -> None:
        from hf_emopt.linalg.symmetric_products import kernels_pay

        assert not kernels_pay(torch.device("cpu"))

    @pytest.mark.second_tier
    def test_without_triton(self) -> None:
        """The package computes the same where Triton cannot be imported."""
        code = (
            "import sys; sys.modules['triton'] = None\n"
            "import torch\nfrom hf_emopt.linalg import newton_schulz\n"
            "torch.manual_seed(0)\n"
            "y = newton_schulz(torch.randn(8, 24), dtype=torch.float16, method='gram')\n"
            "print(float(y.float().norm()))"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        torch.manual_seed(0)
        expected = newton_schulz(torch.randn(8, 24), dtype=torch.float16, method="gram").float().norm()
        assert float(done.stdout) == pytest.approx(float(expected), rel=1e-3)

    def test_table(self) -> None:
        """Every measured problem gets its own configuration back, and others that of a neighbour."""
        entries = configs.load_table(90)
        assert len(entries) >= 30
        assert configs.measured(90)
        assert not configs.measured(80)
        assert not configs.measured(100)
        for entry in entries:
            problem = (entry.batch, entry.m, entry.k, entry.with_c)
            assert configs.choose(90, *problem) == entry.config
            assert entry.config in configs.CANDIDATES[90]
        assert configs.choose(90, 7, 4100, 4000) == configs.choose(90, 8, 4096, 4096)

    def test_other_table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "table.json"
        entry = configs.Entry(1, 64, 64, False, configs.Config(64, 64, 64, 4, 2), 0.1, 0.2)
        configs.save_table(path, [entry], device="test")
        monkeypatch.setenv(configs.TABLE_VARIABLE, str(path))
        configs.choose.cache_clear()
        try:
            assert configs.load_table(90) == (entry,)
            assert configs.choose(90, 4, 512, 512) == entry.config
        finally:
            configs.choose.cache_clear()

    def test_tables_of_earlier_versions(self, tmp_path: Path) -> None:
        """What was measured with kernels that are gone is left out, and a table of nothing else is refused."""
        entry = configs.Entry(1, 512, 512, False, configs.CANDIDATES[90][0], 1.0, 2.0)
        path = tmp_path / "table.json"
        configs.save_table(path, [entry])
        content = json.loads(path.read_text())
        (row,) = content["entries"]
        old = {**row["config"], "descriptors": True, "clusters": False}
        kept, pointers, clusters = (
            {**row, "config": {**old, **c}} for c in ({}, {"descriptors": False}, {"clusters": True})
        )

        def read(*rows: dict[str, object]) -> tuple[configs.Entry, ...]:
            path.write_text(json.dumps({"entries": rows}))
            return configs._read.__wrapped__(path)

        assert read(kept, pointers, clusters, row) == (entry, entry)
        with pytest.raises(ValueError, match=r"kernels that are gone.*--tune table\.json"):
            read(pointers, clusters)
        with pytest.raises(ValueError, match=r"persistent.*--tune table\.json"):
            read({**row, "config": {**row["config"], "persistent": True}})

    def test_variants_are_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_EMOPT_KERNEL_VARIANTS", "estimate,clusters")
        symmetric_products._pay.cache_clear()
        with pytest.raises(ValueError, match=r"HF_EMOPT_KERNEL_VARIANTS is no longer read.*HF_EMOPT_DISABLE_TRITON=1"):
            newton_schulz(torch.randn(4, 8))
        monkeypatch.delenv("HF_EMOPT_KERNEL_VARIANTS")
        newton_schulz(torch.randn(4, 8))

    @pytest.mark.parametrize(("value", "disabled"), [("1", True), ("0", False), ("", False), ("yes", True)])
    def test_disabling(self, value: str, disabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(runtime.DISABLE_VARIABLE, value)
        assert runtime.kernels_disabled() == disabled
