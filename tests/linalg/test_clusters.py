"""Products on clusters of two multiprocessors, without one: who computes what, and what the compiler makes of the source."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_emopt.kernels.hopper import compile, launch
from hf_emopt.kernels.hopper.schedule import COLS, END, NOTHING, ROWS, SHARED, SQUARE, TILE, Work, schedule, table
from hf_emopt.kernels.triton import configs, symmetric_launch, variants
from hf_emopt.kernels.triton.configs import CANDIDATES, Config, Entry
from hf_emopt.kernels.triton.symmetric_launch import symmetric_product
from hf_emopt.tools.bench.kernels import best_entries

SIZES = [(8, 1), (128, 1), (130, 3), (256, 2), (384, 5), (768, 12), (1000, 3), (1024, 24), (2048, 6), (4096, 1)]
CLUSTERS = 66


@pytest.mark.parametrize(("m", "batch"), SIZES)
@pytest.mark.parametrize("clusters", [1, 3, CLUSTERS])
def test_every_square_is_computed_once(m: int, batch: int, clusters: int) -> None:
    """In units of 128 by 128, of all that are not above the diagonal."""
    side = -(-m // ROWS)
    count = torch.zeros(batch, side, side + 1, dtype=torch.int64)
    for items in schedule(m, batch, clusters, 8):
        for w in (w for item in items for w in item if w.kind != NOTHING):
            width = 1 if w.kind == SQUARE else COLS // ROWS
            assert (w.row % ROWS, w.col % COLS) == (0, 0)
            count[w.batch, w.row // ROWS, w.col // ROWS : w.col // ROWS + width] += 1
    lower = torch.ones(side, side + 1, dtype=torch.int64).tril()
    assert torch.equal(count * lower, lower.expand_as(count))
    # Above the diagonal there are only the right halves of tiles on it, none of a tile of its own.
    assert int(count.sum() - lower.sum() * batch) <= batch * (side // 2)


@pytest.mark.parametrize(("m", "batch"), SIZES)
def test_both_of_a_cluster_keep_in_step(m: int, batch: int) -> None:
    """Who shares has the other's columns and other rows; a square is paired with a square, or with nothing that says so."""
    for items in schedule(m, batch, CLUSTERS, 8):
        for one, other in items:
            kinds = {one.kind, other.kind}
            assert kinds in ({SHARED}, {TILE}, {SQUARE}, {TILE, NOTHING}, {SQUARE, NOTHING})
            if one.kind == SHARED:
                assert (one.batch, one.col) == (other.batch, other.col)
                assert one.row != other.row
            if other.kind == NOTHING:
                assert other.row == one.kind


@pytest.mark.parametrize(("m", "batch"), [(1024, 24), (2048, 16), (4096, 8), (8192, 1), (768, 128)])
def test_clusters_are_level(m: int, batch: int) -> None:
    loads = [sum(1 if one.kind == SQUARE else 2 for one, _ in items) for items in schedule(m, batch, CLUSTERS, 8)]
    assert max(loads) - min(loads) <= 2
    assert max(loads) <= -(-sum(loads) // CLUSTERS) + 1
    assert sum(loads) * ROWS * COLS >= batch * m * (m + 1) // 2  # of two halves each


def test_matrices_come_one_after_another() -> None:
    """Tiles that are begun at the same time belong to few matrices, so that each is read from memory once: of 24, 66 pairs of
    tiles are a little more than seven."""
    begun: dict[int, set[int]] = {}
    for items in schedule(1024, 24, CLUSTERS, 8):
        time = 0
        for item in items:
            if item[0].kind != SQUARE:
                begun.setdefault(time // 2, set()).update(w.batch for w in item if w.kind != NOTHING)
            time += 1 if item[0].kind == SQUARE else 2
    assert len(begun) == 3
    for matrices in begun.values():
        assert max(matrices) - min(matrices) < 10


def test_the_table_ends_every_cluster() -> None:
    found = table(1024, 24, CLUSTERS, 8, torch.device("cpu"))
    given = schedule(1024, 24, CLUSTERS, 8)
    assert found.dtype == torch.int32
    for row, items in zip(found.tolist(), given, strict=True):
        works = [tuple(Work(*w) for w in pair) for pair in row]
        assert works[: len(items)] == items
        assert {w.kind for pair in works[len(items) :] for w in pair} == {END}
        assert len(works) > len(items)


def computed(a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float, diagonal: float) -> Tensor:
    """The result by the schedule, as the kernel stores it."""
    batch, m, _ = a.shape
    out = torch.full((batch, m, m), float("nan"), dtype=torch.float64)
    for w in (w for items in schedule(m, batch, 5, 2) for item in items for w in item if w.kind != NOTHING):
        end = w.col + (ROWS if w.kind == SQUARE else COLS)
        for row in range(w.row, min(w.row + ROWS, m), 64):
            for col in range(w.col, min(end, row + 1), 64):
                r, s = slice(row, min(row + 64, m)), slice(col, min(col + 64, m))
                value = alpha * (a[w.batch, r] @ b[w.batch, s].mT) + beta * c[w.batch, r, s]
                if row == col:
                    value += diagonal * torch.eye(len(value))
                    value = value.tril() + value.tril(-1).mT
                out[w.batch, r, s] = value
                out[w.batch, s, r] = value.mT
    return out


@pytest.mark.parametrize(("m", "batch"), [(8, 1), (328, 3), (640, 2)])
def test_values_by_the_schedule(m: int, batch: int) -> None:
    torch.manual_seed(0)
    a = torch.randint(-2, 3, (batch, m, 24), dtype=torch.float64)
    c = torch.randint(-2, 3, (batch, m, m), dtype=torch.float64)
    c = c.tril() + c.tril(-1).mT
    expected = 0.5 * a @ a.mT + 2 * c + 3 * torch.eye(m)
    assert torch.equal(computed(a, a, c, 0.5, 2.0, 3.0), expected)


# ---------------------------------------------------------------------- compiled


needs_nvrtc = pytest.mark.skipif(not compile.available(), reason="NVRTC is not here: pip install nvidia-cuda-nvrtc")
FORMS = [
    (dtype, same, added)
    for dtype in (torch.float16, torch.bfloat16)
    for same in (True, False)
    for added in (True, False)
]


def machine_code(cubin: bytes, folder: Path) -> str:
    triton = pytest.importorskip("triton", reason="nvdisasm comes with Triton, which has no wheel for this platform")
    (folder / "product.cubin").write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([tool, "-c", folder / "product.cubin"], check=True, capture_output=True, text=True).stdout


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "same", "added"), FORMS, ids=str)
def test_compiled(dtype: torch.dtype, same: bool, added: bool, tmp_path: Path) -> None:
    cubin, log = compile.compiled(dtype, same, added)
    assert "serialized" not in log
    assert "setmaxnreg ignored" not in log
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill", log)]
    assert len(spilled) == 2
    code = machine_code(cubin, tmp_path)
    # Some registers of a tile's, where there is a C, and none in between two matrix instructions.
    assert sum(spilled) <= (64 if added else 0)
    products = [part for part in code.split("WARPGROUP.ARRIVE")[1:] if "HGMMA" in part.split("WARPGROUP.DEPBAR")[0]]
    assert len(products) >= 10
    assert all(not re.search(r"\b(LDL|STL)\b", part.split("WARPGROUP.DEPBAR")[0]) for part in products)
    element = "BF16" if dtype == torch.bfloat16 else "F32"
    assert re.search(rf"HGMMA\.64x256x16\.F32(\.{element})?\b", code)
    assert "HGMMA.64x128x16" in code
    assert code.count("UTMALDG.3D.MULTICAST") == 1
    # Only where barriers are made known to the cluster. An arrival that waits for memory doubles the kernel's time.
    assert code.count("MEMBAR.ALL.GPU") <= 2


@needs_nvrtc
def test_a_source_that_does_not_compile_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "source", lambda *_: "nonsense;")
    with pytest.raises(
        RuntimeError,
        match=r"(?s)cannot compile symmetric_product\.cu for sm_90a: .*nonsense.*HF_EMOPT_KERNEL_VARIANTS=estimate,diagonal",
    ):
        compile.compiled.__wrapped__(torch.float16, True, False)


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_names", lambda: iter(("libnothing.so",)))
    monkeypatch.setattr(compile, "_library", compile._library.__wrapped__)
    assert not compile.available()
    with pytest.raises(RuntimeError, match="install torch for CUDA"):
        compile.compiled.__wrapped__(torch.float16, True, False)


def test_shared_memory_fits_a_multiprocessor() -> None:
    assert launch._SHARED_BYTES <= 232448 - 1024
    source = compile.source(torch.float16, True, False)
    kinds = {"NOTHING": NOTHING, "TILE": TILE, "SQUARE": SQUARE, "SHARED": SHARED, "END": END}
    for name, value in {"BLOCK_K": launch._BLOCK_K, **kinds}.items():
        assert re.search(rf"constexpr int {name} = {value};", source)


# ---------------------------------------------------------------------- chosen


def test_the_cpu_takes_none() -> None:
    a = torch.randn(2, 64, 64, dtype=torch.float16)
    assert not launch.takes(a, a, None, torch.empty_like(a))


def test_configurations_of_clusters_are_kept_in_tables(tmp_path: Path) -> None:
    (config,) = (config for config in CANDIDATES[90] if config.clusters)
    entries = [Entry(1, 512, 512, False, config, 1.0, 2.0), Entry(1, 64, 64, False, CANDIDATES[90][0], 1.0, 2.0)]
    path = tmp_path / "table.json"
    configs.save_table(path, entries)
    assert configs._read.__wrapped__(path)[1] == tuple(entries)
    content = json.loads(path.read_text())
    content["entries"][0]["config"]["persistent"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"persistent.*--tune table\.json"):
        configs._read.__wrapped__(path)


def test_large_products_are_on_clusters_by_the_table() -> None:
    assert all(
        configs.choose(90, b, m, k, clusters=True).clusters
        for b, m, k in [(24, 1024, 4096), (16, 2048, 2048), (1, 8192, 8192)]
    )
    assert not configs.choose(90, 1, 2048, 2048, clusters=True).clusters
    assert not configs.choose(90, 24, 1024, 4096, clusters=False).clusters
    assert not any(entry.config.clusters for arch in (80, 100) for entry in configs.load_table(arch))


def test_beside_collectives_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variants.VARIABLE, raising=False)
    assert variants.on_clusters()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert variants.on_clusters()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not variants.on_clusters()
    monkeypatch.setenv(variants.VARIABLE, "estimate,clusters")
    assert variants.on_clusters()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv(variants.VARIABLE, "estimate")
    assert not variants.on_clusters()


def test_who_can_run_on_clusters_is_asked_where_the_table_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 x 1024 x 256 has an entry near with them; a matrix of 64 has none, and nobody asks."""
    chosen: list[Config] = []
    asked: list[tuple[int, ...]] = []
    on: list[Tensor] = []

    def takes(a: Tensor, *_: Tensor | None) -> bool:
        asked.append(tuple(a.shape))
        return True

    monkeypatch.setattr(symmetric_launch, "architecture", lambda device: 90)
    monkeypatch.setattr(symmetric_launch, "interpreting", lambda: False)
    monkeypatch.setattr(symmetric_launch, "_launch_descriptors", lambda *args: chosen.append(args[4]))
    monkeypatch.setattr(symmetric_launch, "_launch_pointers", lambda *args: chosen.append(args[5]))
    monkeypatch.setattr(symmetric_launch.cluster_launch, "takes", takes)
    monkeypatch.setattr(symmetric_launch.cluster_launch, "cluster_product", lambda a, *_, **__: on.append(a))
    large, small = torch.zeros(24, 1024, 256, dtype=torch.float16), torch.zeros(1, 64, 64, dtype=torch.float16)
    for a in (large, small, large.mT.contiguous().mT):
        symmetric_product(a, a, None, a.new_empty(a.shape[0], a.shape[1], a.shape[1]), alpha=1.0, beta=0.0)
    assert asked == [(24, 1024, 256)]  # nor of the transposed one, which they do not take
    assert [x is large or x.data_ptr() == large.data_ptr() for x in on] == [True]
    assert [config.clusters for config in chosen] == [False, False]
    monkeypatch.setattr(symmetric_launch.variants, "on_clusters", lambda: False)
    symmetric_product(large, large, None, large.new_empty(24, 1024, 1024), alpha=1.0, beta=0.0)
    assert chosen[-1] == configs.choose(90, 24, 1024, 256)
    assert len(on) == 1


def test_tuning_keeps_the_best_without_clusters_too() -> None:
    one, two, clusters = Config(64, 64, 64, 4, 4), Config(128, 128, 64, 4, 3), Config(128, 256, 64, 8, 4, clusters=True)
    shape = (2, 512, 512)
    kept = best_entries(shape, False, {one: 3.0, two: 2.0, clusters: 1.0}, 4.0)
    assert kept == [Entry(*shape, False, two, 2.0, 4.0), Entry(*shape, False, clusters, 1.0, 4.0)]
    assert best_entries(shape, True, {one: 3.0, two: 2.0, clusters: 2.5}, 4.0) == [Entry(*shape, True, two, 2.0, 4.0)]


def test_where_clusters_cannot_run_the_other_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []
    monkeypatch.setattr(symmetric_launch, "_launch_pointers", lambda *args: seen.append(args[5]))
    a = torch.randn(2, 64, 64, dtype=torch.float16)
    config = Config(128, 256, 64, 8, 4, descriptors=False, clusters=True)
    symmetric_product(a, a, None, torch.empty_like(a), alpha=1.0, beta=0.0, config=config)
    assert [c.clusters for c in seen] == [False]
