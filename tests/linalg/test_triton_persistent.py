"""Symmetric products on programs that stay: who computes what, and the same values as the other kernels to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import INTERPRETING, run_in_interpreter, small_integers
from torch import Tensor

from hf_emopt.linalg.triton import configs, persistent_launch
from hf_emopt.linalg.triton.configs import Config

if not INTERPRETING:

    def test_persistent_products_in_the_interpreter() -> None:
        run_in_interpreter(__file__)

    @pytest.mark.parametrize(("m", "batch", "programs"), [(70, 3, 4), (256, 2, 5), (31, 4, 3), (320, 1, 100)])
    def test_every_tile_belongs_to_one_program(m: int, batch: int, programs: int) -> None:
        found = persistent_launch.schedule(m, batch, programs, 32, group=2)
        assert [start for start, *_ in found.bounds] == [0, *(end for *_, end in found.bounds[:-1])]
        assert found.bounds[-1][-1] == len(found.tiles)
        for below, on, end in found.bounds:
            assert below <= on <= end
            for t in range(below, end):
                _, row, col = found.tiles[t]
                assert (row == col) == (t >= on)
        assert len(set(found.tiles)) == len(found.tiles)
        starts = range(0, m, 32)
        assert set(found.tiles) == {(b, i, j) for b in range(batch) for i in starts for j in starts if j <= i}

    def test_programs_are_level() -> None:
        """8 x 4096 on 132 multiprocessors: none has more than one tile over the mean."""
        found = persistent_launch.schedule(4096, 8, 264, 128, 4)
        loads = [end - below for below, _, end in found.bounds]
        assert sum(loads) == 8 * 32 * 33 // 2
        assert {max(loads), min(loads)} == {16}
        # Tiles that start together are of one neighbourhood.
        first = [found.tiles[below] for below, *_ in found.bounds]
        assert {b for b, *_ in first} == {0}

    def test_where_it_was_measured_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(configs.TABLE_VARIABLE, raising=False)
        staying = Config(128, 128, 64, 4, 3, group=4, persistent=True)
        assert configs.choose(90, 1, 4096, 4096) == configs.choose(90, 2, 4096, 4096) == staying
        assert configs.choose(90, 8, 4096, 4096) == configs.choose(90, 1, 8192, 8192) == Config(256, 128, 64, 8, 4)
        assert configs.choose(90, 24, 1024, 4096) == Config(128, 128, 64, 8, 4)
        staying_entries = {(e.batch, e.m, e.k, e.with_c) for e in configs.load_table(90) if e.config.persistent}
        assert staying_entries == {(1, 4096, 4096, False), (2, 4096, 4096, False)}


if INTERPRETING:
    from hf_emopt.linalg import resolve_coefficients
    from hf_emopt.linalg.gram_newton_schulz import iterate
    from hf_emopt.linalg.triton.symmetric_launch import symmetric_product

    CONFIGS = [Config(32, 32, depth, 4, 1, group=2, persistent=True) for depth in (32, 64)]

    @pytest.fixture(autouse=True)
    def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        monkeypatch.setattr(persistent_launch, "multiprocessors", lambda device: 2)

    @pytest.fixture
    def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many programs each persistent launch had."""
        counts: list[int] = []
        original = persistent_launch.launch
        monkeypatch.setattr(persistent_launch, "launch", lambda *a, **k: (counts.append(a[2]), original(*a, **k))[1])
        return counts

    def both(a: Tensor, b: Tensor, dtype: torch.dtype, config: Config, **kwargs: object) -> list[Tensor]:
        """By programs of one tile and by programs that stay, into memory of NaN with rows of 16 bytes."""
        m = a.shape[-2]
        results = []
        for one in (replace(config, persistent=False), config):
            wide = torch.full((*a.shape[:-1], -(-m // 8) * 8), float("nan"), dtype=dtype)
            symmetric_product(a, b, None, wide[..., :m], config=one, **kwargs)  # type: ignore[arg-type]
            assert wide[..., m:].isnan().all()
            results.append(wide[..., :m])
        return results

    def rows_of_16_bytes(x: Tensor) -> Tensor:
        """The same numbers in memory that descriptors can read."""
        wide = torch.full((*x.shape[:-1], -(-x.shape[-1] // 8) * 8), float("nan"), dtype=x.dtype)
        view = wide[..., : x.shape[-1]]
        view.copy_(x)
        return view

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("shape", [(3, 70, 48), (2, 1, 5)])
    @pytest.mark.parametrize(
        ("same", "power", "dtype", "trans"),
        [(True, 2, torch.bfloat16, False), (False, 1, torch.float16, False), (False, 2, torch.float16, True)],
    )
    def test_the_same_bits(
        config: Config,
        shape: tuple[int, ...],
        same: bool,
        power: int,
        dtype: torch.dtype,
        trans: bool,
        launches: list[int],
    ) -> None:
        """Integers: exact whatever the order of sums, so that every element must be right."""
        x = small_integers(*shape).to(dtype)
        x = rows_of_16_bytes(x.mT).mT if trans else rows_of_16_bytes(x)
        y = x if same else x + x
        if not same:
            y = rows_of_16_bytes(y.mT).mT if trans else rows_of_16_bytes(y)
        t = torch.tensor([0.5, 2.0, 1.0])[: shape[0] if len(shape) == 3 else 1]
        numbers = {"alpha": 0.5, "beta": 0.0, "diagonal": 3.0, "correction": t, "power": power}
        plain, ours = both(x, y, dtype, config, **numbers)
        assert len(launches) == 1
        assert torch.equal(ours, ours.mT)
        assert torch.equal(ours, plain)
        factor = t.double().view(-1, *[1] * (len(shape) - 1))
        product, eye = 0.5 * (x.double() @ y.double().mT), 3 * torch.eye(shape[-2]).double()
        assert torch.equal(ours.double(), factor**power * product + (factor if power == 1 else 1) * eye)

    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    @pytest.mark.parametrize("same", [True, False])
    def test_the_same_bits_of_sums_that_are_rounded(config: Config, same: bool, launches: list[int]) -> None:
        """Sums that the interpreter takes in the same order."""
        a = torch.randn(3, 136, 72).half()
        b = a if same else a.clone()
        plain, ours = both(a, b, torch.float16, config, alpha=0.3, beta=0.0, diagonal=0.7)
        assert launches == [4]
        assert torch.equal(ours, plain)
        assert torch.equal(ours, ours.mT)

    @pytest.mark.parametrize("count", [1, 3, 1000])
    def test_any_number_of_programs(count: int, monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> None:
        monkeypatch.setattr(persistent_launch, "multiprocessors", lambda device: count)
        a = torch.randn(2, 104, 40).half()
        plain, ours = both(a, a, torch.float16, CONFIGS[0], alpha=1.0, beta=0.0)
        assert launches == [min(2 * count, 20)]
        assert torch.equal(ours, plain)

    def test_what_it_leaves_to_the_other_kernels(launches: list[int]) -> None:
        x = small_integers(2, 40, 24).half()
        c = small_integers(2, 40, 40).half()
        c = c.tril() + c.tril(-1).mT
        exact = x.double() @ x.double().mT
        out = torch.empty(2, 40, 40, dtype=torch.float16)
        for config in (CONFIGS[1], Config(32, 32, 32, 4, 1, False, persistent=True)):
            symmetric_product(x, x, c, out, alpha=1.0, beta=2.0, config=config)
            assert torch.equal(out.double(), exact + 2 * c.double())
        symmetric_product(x, x, None, out, alpha=1.0, beta=0.0, config=Config(32, 32, 32, 4, 1, False, persistent=True))
        assert torch.equal(out.double(), exact)
        wide = torch.empty(2, 40, 40)
        symmetric_product(x, x, None, wide, alpha=1.0, beta=0.0, config=CONFIGS[1])
        assert torch.equal(wide.double(), exact)
        odd = small_integers(2, 41, 25).half()[:, 1:, 1:]
        symmetric_product(odd, odd, None, out, alpha=1.0, beta=0.0, config=CONFIGS[1])
        assert torch.equal(out.double(), odd.double() @ odd.double().mT)
        symmetric_product(x, x, None, out, alpha=1.0, beta=0.0, config=Config(64, 32, 32, 4, 1, persistent=True))
        assert torch.equal(out.double(), exact)
        assert not launches
        symmetric_product(x, x, None, out, alpha=1.0, beta=0.0, config=CONFIGS[1])
        assert len(launches) == 1

    @pytest.mark.parametrize("shape", [(3, 48, 48), (2, 40, 96)])
    def test_iterations_agree(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> None:
        resolved = resolve_coefficients("jordan", 5)
        x = torch.randn(shape)
        exact = iterate(x.double(), resolved.steps, None, 1.0, torch.float64, "torch")
        errors = []
        for config in (replace(CONFIGS[0], persistent=False), CONFIGS[0]):
            monkeypatch.setattr(configs, "choose", lambda *_, config=config: config)
            y = iterate(x, resolved.steps, None, 1.0, torch.float16, "triton")
            errors.append(((y.double() - exact).norm() / exact.norm()).item())
        assert len(launches) == 10
        assert errors[1] <= 1.2 * errors[0]
        assert errors[0] < 1e-2
