"""Predicted steps: by hand on small numbers, and beside every step that is stored."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

import forecast_errors
import hf_emopt
from forecast_errors import OLDER, PREDICTED
from hf_emopt.distributed.assignment import BUCKET_VARIABLE
from hf_emopt.tools.cli import main
from hf_emopt.tools.forecast.hardware import EFFICIENCY, GPUS, HOST, NETWORKS, custom_gpu
from hf_emopt.tools.forecast.layouts import Layout, layout_on, place
from hf_emopt.tools.forecast.products import newton_schulz_seconds, product_seconds
from hf_emopt.tools.forecast.refreshes import refreshes
from hf_emopt.tools.forecast.report import MEASURED_RANKS, sources
from hf_emopt.tools.forecast.step import Machine, forecast

M = Machine(GPUS["h100"], NETWORKS["ib400"])
N, SIDE = 8, 16


def squares(count: int = N, side: int = SIDE, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Matrices alone: ``count`` of ``side x side``."""
    with torch.device("meta"):
        return nn.ModuleList([nn.Linear(side, side, bias=False, dtype=dtype) for _ in range(count)])


P = N * SIDE * SIDE


def llama(**sizes: Any) -> LlamaForCausalLM:
    default = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
               "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**{**default, **sizes}))


# ---------------------------------------------------------------------- bytes, memory, balance, by hand


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_that_travel(world: int) -> None:
    """2 P / W to owners and back under FSDP2, P (W - 1) / W of other ranks' updates under DDP, two bytes each."""
    sharded = forecast(hf_emopt.Muon(squares()), Layout("fsdp2", world), M)
    assert sharded.received_bytes == sharded.sent_bytes == 2 * (2 * P / world)
    copies = forecast(hf_emopt.Muon(squares()), Layout("ddp", world), M)
    assert copies.received_bytes == copies.sent_bytes == 2 * (P * (world - 1) / world)
    assert sharded.flops_balance == sharded.bytes_balance == copies.flops_balance == 1.0


def test_bytes_under_hsdp_and_on_one_rank() -> None:
    """Two replicas of four shards: P / 8 twice within a replica, and from the other replica half of a shard's P / 4."""
    made = forecast(hf_emopt.Muon(squares()), Layout("hsdp", 8, shards=4), M)
    assert made.received_bytes == 2 * (2 * P / 8 + P / 4 / 2)
    alone = forecast(hf_emopt.Muon(squares()), Layout("ddp", 1), M)
    assert alone.received_bytes == alone.sent_bytes == alone.exchange == 0.0


def test_wire_of_four_bytes_and_weights_of_the_others() -> None:
    """Under DDP what AdamW has stepped travels as it is: all but a rank's own part of embedding, head and norms."""
    model = llama(vocab_size=2048)
    wide = forecast(hf_emopt.Muon(model, transport_dtype="float32"), Layout("ddp", 2), M)
    narrow = forecast(hf_emopt.Muon(model), Layout("ddp", 2), M)
    matrices = sum(p.numel() for n, p in model.named_parameters() if "proj" in n)
    assert wide.received_bytes - narrow.received_bytes == pytest.approx(2 * matrices / 2, rel=0.05)
    others = sum(p.numel() for n, p in model.named_parameters() if "proj" not in n)
    assert narrow.received_bytes == pytest.approx(2 * matrices / 2 + 4 * others / 2, rel=0.05)


@pytest.mark.parametrize(("layout", "weights", "state"), [("ddp", 4 * P, P), ("fsdp2", P, P), ("hsdp", 2 * P, 2 * P)])
def test_memory_on_four_ranks(layout: str, weights: int, state: int) -> None:
    """Momentum of four bytes an element lies with owners under DDP, and as weights do elsewhere; a counter a matrix."""
    made = forecast(hf_emopt.Muon(squares()), Layout(layout, 4, shards=2), M)
    assert made.memory.weights.tolist() == made.memory.gradients.tolist() == [weights] * 4
    assert made.memory.state.tolist() == [state + 4 * N] * 4
    assert made.adamw.state_bytes == 2 * weights + 4 * N


def test_balance_of_uneven_work() -> None:
    """Three equal matrices whose factors cannot be cut, on two ranks: one has two of them, so 2 / 1.5."""
    optimizer = hf_emopt.Shampoo(squares(3))
    made = forecast(optimizer, Layout("fsdp2", 2), M)
    assert made.flops_balance == pytest.approx(4 / 3)
    assert made.time_balance == pytest.approx(4 / 3)


def test_matrices_without_a_factor_are_shared_out_too() -> None:
    """SOAP of one-sided factors leaves sides above the limit alone: such matrices cost their elements, not nothing."""
    optimizer = hf_emopt.SOAP(squares(4), max_preconditioner_dim=8)
    group = optimizer.param_groups[0]
    assert optimizer.rule.cost(SIDE, SIDE, group) == SIDE * SIDE
    placed = place(optimizer, Layout("ddp", 4))
    assert sorted(placed.plan.numels()) == [SIDE * SIDE] * 4


def test_refreshes_are_counted_by_step_and_rank() -> None:
    """Sixteen sides of 16 a period, in matrix views of 2048 cubed; all on one step when they are synchronous."""
    for schedule in ("synchronous", "staggered"):
        optimizer = hf_emopt.Shampoo(squares(), refresh=schedule, precondition_frequency=4)
        found = refreshes(optimizer, place(optimizer, Layout("fsdp2", 2)))
        assert found is not None
        assert found.sides.shape == (4, 2)
        assert found.sides.sum() == pytest.approx(2 * N * (SIDE / 2048) ** 3)
        assert (found.sides.sum(axis=1) > 0).sum() == (
            1 if schedule == "synchronous" else (found.calls > 0).any(axis=1).sum()
        )
    assert refreshes(hf_emopt.Muon(squares()), place(hf_emopt.Muon(squares()), Layout("ddp", 1))) is None


# ---------------------------------------------------------------------- time, by hand


def test_a_collective_inside_a_node_and_between_nodes() -> None:
    """Of 16 ranks on two nodes 7 others are near and 8 far; the slower of the two links decides, and peers cost messages."""
    received = 16e9
    near = received * 7 / 16 / (450e9 * EFFICIENCY.nvlink)
    far = received * 8 / 16 / (50e9 * EFFICIENCY.network)
    assert far > near
    assert M.exchange_seconds(received, range(16)) == pytest.approx(far + (30 + 8) * 1e-6)
    assert M.exchange_seconds(received, range(8)) == pytest.approx(
        received * 7 / 8 / (450e9 * EFFICIENCY.nvlink) + 20e-6
    )
    assert M.exchange_seconds(received, range(1)) == M.exchange_seconds(0.0, range(8)) == 0.0


def test_passes_are_bytes_over_bandwidth() -> None:
    """FSDP2, two ranks, an element: momentum 14 (gradient, momentum twice, wire), step 10, look for numbers that are not
    finite 4; of an owned one unpacked 4, norm and cast 4, packed 4."""
    made = forecast(hf_emopt.Muon(squares()), Layout("fsdp2", 2), M)
    local = P / 2
    assert made.passes == pytest.approx(local * (14 + 10 + 4 + 4 + 4 + 4) / M.bandwidth)
    without = forecast(hf_emopt.Muon(squares(), skip_nonfinite=False), Layout("fsdp2", 2), M)
    assert made.passes - without.passes == pytest.approx(local * 4 / M.bandwidth)


def test_the_host_bounds_small_steps() -> None:
    """One bucket and one batch, after a part for each matrix."""
    model = squares()
    before = sum(p.ndim == 2 for p in model.parameters()) * HOST.parameter_ms
    made = forecast(hf_emopt.Muon(model), Layout("ddp", 1), M)
    assert made.host == pytest.approx(1e-3 * (before + HOST.bucket_ms + HOST.batch_ms))
    assert made.seconds == pytest.approx(max(made.device + 1e-3 * (before + HOST.bucket_ms), made.host))


def test_overlap_hides_all_but_the_first_and_the_last_message() -> None:
    model, layout = squares(64, 512), Layout("fsdp2", 2)
    whole = forecast(hf_emopt.Muon(model), layout, M)
    assert (whole.buckets, whole.exposed_exchange) == (1, whole.exchange)
    cut = forecast(hf_emopt.Muon(model), layout, M, max_bucket_numel=4 * 512 * 512)
    assert cut.buckets == 8
    assert cut.exposed_exchange == pytest.approx(cut.exchange / 8)


def test_measured_products_are_given_back() -> None:
    """Neighbours count at a measured size too: within 15 % of the table, 25 % for small matrices. 16 times the batch takes
    10 to 17 times as long."""
    from hf_emopt.kernels.triton.configs import load_table

    for entry in load_table(90):
        found = 1e3 * product_seconds(
            GPUS["h100"], entry.batch, entry.m, entry.m, entry.k, symmetric=True, with_c=entry.with_c
        )
        assert found == pytest.approx(entry.ms, rel=0.25 if entry.m < 1024 else 0.15)
    one, many = (product_seconds(GPUS["h100"], b, 2048, 2048, 2048) for b in (1, 16))
    assert 10 < many / one < 17


def test_other_cards_go_by_their_datasheets() -> None:
    """General products of the standard form, at the H200's rates times the ratio of datasheets."""
    group = hf_emopt.Muon(squares()).param_groups[0]
    a100, b200 = (newton_schulz_seconds(GPUS[name], 4, 4096, 4096, group) for name in ("a100", "b200"))
    assert a100 / b200 == pytest.approx(2250 / 312)
    gpu = custom_gpu("h100", bf16=2 * 989)
    assert newton_schulz_seconds(gpu, 4, 4096, 4096, group) == pytest.approx(
        newton_schulz_seconds(GPUS["h100"], 4, 4096, 4096, group) / 2
    )


# ---------------------------------------------------------------------- beside what was measured


@pytest.fixture(scope="module")
def points() -> list[forecast_errors.Point]:
    return forecast_errors.points()


def test_a_forecast_is_of_its_own_optimizer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Python gives an optimizer the address of one that is gone."""
    monkeypatch.setattr("hf_emopt.tools.forecast.step.id", lambda value: 1, raising=False)

    def products(steps: int) -> float:
        return forecast(hf_emopt.Muon(squares(), ns_steps=steps), Layout("ddp", 1), M).products

    found = [(products(3), products(9)) for _ in range(2)]
    assert found[0][0] < found[0][1]
    assert len(set(found)) == 1


def test_muons_steps_are_within_15_percent(points: list[forecast_errors.Point]) -> None:
    """Every stored step of Muon by the code as it is, on one, two and four GPUs."""
    found = [p for p in points if p.optim.startswith("muon") and p.role == PREDICTED]
    assert len(found) >= 37
    assert sum("4 GPUs" in p.what for p in found) >= 8
    wrong = [p for p in found if not 0.85 <= p.ratio <= 1.15]
    assert not wrong


def test_shampoo_and_soap_in_float16_are_within_15_percent(points: list[forecast_errors.Point]) -> None:
    found = [p for p in points if p.optim in ("shampoo", "soap") and p.role == PREDICTED]
    assert {p.precision for p in found} == {"fp16"}
    assert sum(p.optim == "shampoo" for p in found) == 6
    assert sum("4 GPUs" in p.what for p in found) == 5
    scattered = [p for p in found if not 0.85 <= p.ratio <= 1.15]
    assert not scattered


def test_the_bounds_that_hold_for_the_others(points: list[forecast_errors.Point]) -> None:
    """AdamW within 16 %, but for a model of 13 M. Older code took longer."""
    for p in points:
        small = "hidden 512" in p.what
        if p.optim == "adamw":
            assert 0.89 <= p.ratio <= (1.7 if small else 1.16)
        elif p.role == OLDER and not small:
            assert (0.55 if p.optim == "shampoo" else 0.45) <= p.ratio <= 1.0


def test_orthogonalizations_are_within_15_percent() -> None:
    for p in forecast_errors.kernels("h200"):
        assert 0.85 <= p.ratio <= 1.15, p


def rows_of(text: str, columns: int) -> list[list[str]]:
    """Cells of the tables that have so many columns, without their heads."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [c for c in cells if len(c) == columns and c[0] not in ("step", "file") and not c[0].startswith("---")]


def test_every_measured_step_is_in_the_stored_table(points: list[forecast_errors.Point]) -> None:
    """Ratios to the second digit, and nothing else is there; `benchmarks/forecast_errors.py --write` makes it."""
    found = points + forecast_errors.kernels("h200")
    said = rows_of(forecast_errors.LONG.read_text(), 8)
    assert [row[:5] for row in said] == [[p.file, p.commit, p.what, p.name, p.role] for p in found]
    assert [float(row[7]) for row in said] == pytest.approx([p.ratio for p in found], abs=0.011)


def test_the_page_has_a_row_for_each_case_and_optimizer(points: list[forecast_errors.Point]) -> None:
    page = forecast_errors.PAGE.read_text().split(forecast_errors.MARKS[0])[1].split(forecast_errors.MARKS[1])[0]
    now = forecast_errors.summary(points + forecast_errors.kernels("h200"))
    said, made = rows_of(page, 4), rows_of(now, 4)
    numbers = r"\d+\.\d+"
    assert [[re.sub(rf"{numbers}( to {numbers})?", "", c) for c in row] for row in said] == [
        [re.sub(rf"{numbers}( to {numbers})?", "", c) for c in row] for row in made
    ]
    for old, new in zip(said, made):
        for was, is_now in zip(old[2:], new[2:]):
            ends = [[float(x) for x in re.findall(numbers, c)] for c in (was, is_now)]
            assert all(abs(a[i] - b[i]) < 0.011 for a, b in [ends] if a and b for i in (0, -1)), (old, new)


def test_a_summary_counts_steps_and_spans_ratios() -> None:
    def point(role: str, measured: float, precision: str = "") -> forecast_errors.Point:
        return forecast_errors.Point("file", "abc", "two GPUs", "soap", role, measured, 10.0, precision)

    found = [point(PREDICTED, 8.0), point(PREDICTED, 20.0), point(OLDER, 40.0, "fp16")]
    assert rows_of(forecast_errors.summary(found), 4) == [
        ["two GPUs", "soap", "2: 0.50 to 1.25", ""], ["two GPUs", "soap, fp16", "", "1: 0.25"],
    ]  # fmt: skip


# ---------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    return str(tmp_path)


ALL = ["--layout", "ddp", "fsdp2", "hsdp", "fsdp2+tp", "--tp-size", "2", "--shard-size", "4"]


def test_every_optimizer_under_every_layout(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["muon", "normuon", "soap", "shampoo", "kl_shampoo"]
    arguments = [
        "plan",
        "--model",
        folder,
        "--optim",
        *names,
        "--world-size",
        "8",
        *ALL,
        "--json",
        "--tokens-per-gpu",
        "64",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)["forecast"]
    assert [(r["layout"], r["optim"]) for r in found["rows"]] == [(x, n) for x in ALL[1:5] for n in names]
    for row in found["rows"]:
        assert all(math.isfinite(v) and v >= 0 for v in row.values() if isinstance(v, (int, float)))
        assert row["step_ms"] > 0
        assert row["state_bytes"] > 0
        assert 0 < row["share_of_step"] < 1
    assert found["sources"]["step"].startswith("extrapolated")
    assert found["sources"]["products"].startswith("measured")


def test_the_table_says_what_is_measured(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", folder, "--world-size", "16", "--layout", "fsdp2", "--gpu", "b200", "--network", "eth100"]) == 0
    )
    out = capsys.readouterr().out
    for expected in ("16 x b200, 8 a node", "fsdp2, muon", "fsdp2, AdamW fused", "what this rests on:",
                     "products: extrapolated", "network: extrapolated: datasheet", "assumed"):  # fmt: skip
        assert expected in out


@pytest.mark.parametrize("world", [1, 2, 4, 5, 8])
def test_steps_are_extrapolated_beyond_the_ranks_that_were_measured(world: int) -> None:
    """The stored steps are the measure."""
    stored = [json.loads(path.read_text()) for path in forecast_errors.RESULTS.glob("step_*.json")]
    most = max(content["about"]["world_size"] for content in stored if "about" in content)
    assert most == MEASURED_RANKS == 4
    said = sources(M, world, [hf_emopt.Muon(squares())]).get("step", "")
    assert said == (f"extrapolated: steps were measured on up to 4 GPUs, here are {world}" if world > 4 else "")


def test_given_figures_are_called_given(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu-tflops", "2000", "--gpu-bandwidth", "6", "--network-gbytes", "100", "--gpus-per-node", "4"]
    assert main(["plan", folder, "--world-size", "8", *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["forecast"]["sources"]
    assert "as given" in found["products"]
    assert found["passes"].startswith("given bandwidth")
    assert "given, 80% of it" in found["network"]


def test_larger_buckets_are_spoken_of_where_there_are_several(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["plan", folder, "--layout", "ddp"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "ddp, muon: bound by the host\n" in out
    assert BUCKET_VARIABLE not in out
    monkeypatch.setenv(BUCKET_VARIABLE, "2048")
    assert main(arguments) == 0
    assert f"bound by the host: buckets of more elements would help ({BUCKET_VARIABLE})" in capsys.readouterr().out


def test_what_does_not_fit_is_said(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "--layout", "ddp", "--gpu-memory", "1e-5"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "v100"], "--gpu v100 is not one of a100"),
        (["--network", "token-ring"], "--network token-ring is not one of nvlink"),
        (["--layout", "zero"], "--layout zero is not one of ddp"),
        (["--layout", "hsdp", "--world-size", "12"], "--shard-size 8 has not; --shard-size 2, 3, 4, 6 would fit"),
        (
            ["--layout", "hsdp", "--world-size", "3"],
            "--world-size 3 with --shard-size 1 has not; no --shard-size fits it",
        ),
        (["--layout", "hsdp", "--world-size", "8", "--shard-size", "8"], "--shard-size 2, 4 would fit"),
        (["--layout", "hsdp", "--world-size", "8", "--shard-size", "0"], "--shard-size 0 has not"),
        (["--layout", "fsdp2", "--shard-size", "4"], "--shard-size 4 is for --layout hsdp, and the layouts are fsdp2"),
        (
            ["--world-size", "4", "--tp-size", "2"],
            "--tp-size 2 is for --layout fsdp2+tp, and the layouts are ddp, fsdp2",
        ),
        (["--layout", "fsdp2+tp", "--world-size", "4", "--tp-size", "3"], "--tp-size divides"),
        (["--layout", "ddp", "--gpu-tflops", "-1"], "--gpu-tflops -1.0 must be above 0"),
        (["--layout", "ddp", "--gpu-bandwidth", "nan"], "--gpu-bandwidth nan must be above 0"),
        (["--layout", "ddp", "--gpu-memory", "0"], "--gpu-memory 0.0 must be above 0"),
        (["--layout", "ddp", "--nvlink-gbytes", "0"], "--nvlink-gbytes 0.0 must be above 0"),
        (["--layout", "ddp", "--gpus-per-node", "0"], "--gpus-per-node 0 must be above 0"),
        (["--layout", "ddp", "--network-gbytes", "0"], "--network-gbytes 0.0 must be above 0"),
        (["--layout", "ddp", "--tokens-per-gpu", "0"], "--tokens-per-gpu 0 must be at least 1"),
        (["--model", "other"], "give one model"),
        (["--layout", "ddp", "--optim_args", "offload_state=cpu"], "leave it out of --optim_args"),
    ],
)
def test_bad_input_says_what_to_do(
    folder: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", folder, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("world", "per_node", "shards"), [(4, 8, 2), (6, 8, 3), (8, 8, 4), (16, 8, 8), (32, 4, 4)])
def test_hsdp_has_two_replicas_or_more(world: int, per_node: int, shards: int) -> None:
    """A replica is a node; of one node it is half, as on a page of four processes in two replicas."""
    layout = layout_on("hsdp", world, per_node)
    assert layout.shards == shards
    sharded = forecast(hf_emopt.Muon(squares()), Layout("fsdp2", world), M)
    assert forecast(hf_emopt.Muon(squares()), layout, M).memory.weights[0] > sharded.memory.weights[0]


def test_a_model_without_a_plan_of_tensor_parallelism_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    assert main(["plan", str(tmp_path), "--layout", "fsdp2+tp", "--world-size", "4", "--tp-size", "2"]) == 2
    assert "replicated_with_grad_allreduce; plan it with --layout fsdp2 or hsdp" in capsys.readouterr().err


def test_a_70_b_model_on_1024_ranks() -> None:
    """Every matrix is owned, every rank has work, and what ranks hold adds up to the model."""
    model = llama(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    )  # fmt: skip
    made = forecast(hf_emopt.Muon(model), Layout("fsdp2", 1024), M)
    assert made.matrices == 560
    assert made.memory.weights.sum() == 4 * sum(p.numel() for p in model.parameters())
    assert np.all(np.array(made.placed.plan.loads()) > 0)
    assert made.flops_balance < 1.1


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_a_matrix_has_no_more_slices_than_rows(name: str) -> None:
    """Seven small matrices on 1,024 ranks, where more slices would cost less on paper."""
    plan = place(hf_emopt.Muon(llama(num_hidden_layers=1)), Layout(name, 1024)).plan
    for bucket in plan.buckets:
        for index, parameter in enumerate(bucket.parameters):
            mine = [s for s in bucket.owned_regions if s.parameter == index]
            assert len(mine) <= max(parameter.storage.shape)
            assert sum(math.prod(stop - start for start, stop in s.region) for s in mine) == parameter.numel
