"""Moments in 16 and 8 bits: what is kept, that it resumes to the bit, what it takes, and how near float32 it stays."""

from __future__ import annotations

import copy
import importlib.util
import io
import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_emopt
from hf_emopt.distributed.layout import UnsupportedLayoutError
from hf_emopt.formats import moments
from hf_emopt.formats.moments import packed_like, unpacked, update_packed
from hf_emopt.formats.rounding_noise import moment_noise, weight_noise
from hf_emopt.integrations.optim_args import parse_optim_args
from hf_emopt.state.forms import check_state_options
from hf_emopt.tools.cli import main as cli
from hf_emopt.tools.estimate import estimate

OPTIMIZERS = {
    "muon": (hf_emopt.Muon, {"ns_dtype": "float32"}),
    "normuon": (hf_emopt.NorMuon, {"ns_dtype": "float32"}),
    "soap": (hf_emopt.SOAP, {"precondition_frequency": 3}),
    "shampoo": (hf_emopt.Shampoo, {"precondition_frequency": 3, "momentum": 0.5}),
    "klshampoo": (hf_emopt.KLShampoo, {"precondition_frequency": 3}),
}
INT8 = pytest.param(
    "int8",
    marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
)
DTYPES = ["float32", "bfloat16", INT8]
NARROW = ["bfloat16", INT8]


class Net(nn.Module):
    """A table, matrices with rows of 64, 160 and 96, and a head that is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 64)
        self.up = nn.Linear(64, 160)
        self.down = nn.Linear(160, 96)
        self.head = nn.Linear(96, 200)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.down(torch.relu(self.up(self.table(x))))))  # type: ignore[no-any-return]


def make(rule: str, state_dtype: str, dtype: torch.dtype = torch.float32, lr: float = 2e-3, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net().to(dtype)
    cls, defaults = OPTIMIZERS[rule]
    return model, cls(model, lr=lr, state_dtype=state_dtype, **{**defaults, **options})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    classes = torch.randint(0, 200, (200,), generator=torch.Generator().manual_seed(9))
    losses = []
    for step in steps:
        x = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), classes[x])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def through_disk(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def kept(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]


def wide(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state, of which it has one matrix view, with moments in float32."""
    return unpacked({key.removesuffix(".0"): value for key, value in state.items()}, torch.float32)


def assert_same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> None:
    for x, y in zip(a, b, strict=True):
        assert {k: v.dtype for k, v in x.items()} == {k: v.dtype for k, v in y.items()}
        assert [k for k in x if not torch.equal(x[k], y[k])] == []


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_resumed_equals_uninterrupted(rule: str, state_dtype: str) -> None:
    """Weights and state, bit for bit and in their dtypes, four steps on; bfloat16 weights under half of them."""
    dtype = torch.bfloat16 if rule in ("muon", "soap") else torch.float32
    model, optimizer = make(rule, state_dtype, dtype)
    train(model, optimizer, range(4))
    saved = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    before = kept(optimizer)
    train(model, optimizer, range(4, 8))
    resumed, again = make(rule, state_dtype, dtype)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert_same(before, kept(again))
    train(resumed, again, range(4, 8))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))
    assert_same(kept(optimizer), kept(again))


@pytest.mark.parametrize("state_dtype", NARROW)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_every_large_moment_is_narrow(rule: str, state_dtype: str) -> None:
    model, optimizer = make(rule, state_dtype)
    train(model, optimizer, range(2))
    wanted = torch.bfloat16 if state_dtype == "bfloat16" else torch.uint8
    of = {key: value for state in optimizer.state.values() for key, value in state.items() if moments.is_moment(key)}
    large = {k: v for k, v in of.items() if not moments.is_scale(k) and v.ndim > 1}
    assert large
    assert {v.dtype for v in large.values()} == {wanted}
    matrix = optimizer.state[model.up.weight]
    assert matrix["step"].dtype is torch.float32


@pytest.mark.parametrize("state_dtype", NARROW)
@pytest.mark.parametrize("rule", ["muon", "soap", "shampoo"])
def test_a_skipped_step_leaves_all_state_as_it_was(rule: str, state_dtype: str) -> None:
    model, optimizer = make(rule, state_dtype)
    train(model, optimizer, range(4))
    before, weights = kept(optimizer), [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights))
    after = kept(optimizer)
    for state in (*before, *after):
        state.pop("rounds", None)  # the host does not know of it
    assert_same(before, after)


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("state_dtype", NARROW)
@pytest.mark.parametrize("rule", ["soap", "shampoo", "klshampoo"])
def test_without_a_gradient_all_state_stays_to_the_bit(rule: str, state_dtype: str, offload: str | None) -> None:
    """Of matrices that are transformed together with others; 8-bit codes of codes would lose some each time."""
    cls, options = OPTIMIZERS[rule]
    params = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    optimizer = cls(params, lr=1e-2, state_dtype=state_dtype, offload_state=offload, **options)

    def steps(number: int, among: list[nn.Parameter]) -> None:
        for _ in range(number):
            for p in params:
                p.grad = torch.randn(64, 64) if any(p is q for q in among) else None
            optimizer.step()

    steps(4, params)
    before = copy.deepcopy([optimizer.state[p] for p in params])
    steps(20, [params[0], params[2]])
    after = [optimizer.state[p] for p in params]
    assert_same(before[1:2], after[1:2])
    assert not torch.equal(before[2]["factor.0.0.0"], after[2]["factor.0.0.0"])
    moment = next(key for key in before[2] if moments.is_moment(key))
    assert not torch.equal(before[2][moment], after[2][moment])


@pytest.mark.parametrize("state_dtype", NARROW)
@pytest.mark.parametrize("rule", ["soap", "shampoo"])
def test_asking_for_state_does_not_change_the_run(rule: str, state_dtype: str) -> None:
    """It reads which refreshes failed; moments and torch's own noise are not touched."""
    found = []
    for asks in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(64, 64))]
        cls, options = OPTIMIZERS[rule]
        optimizer = cls(params, lr=1e-2, state_dtype=state_dtype, **options)
        optimizer.rule.read_later = frozenset({"cpu"})
        for _ in range(8):
            params[0].grad = torch.randn(64, 64)
            optimizer.step()
            if asks:
                optimizer.state_dict()
        optimizer.state_dict()
        found.append((params[0], optimizer.state[params[0]], torch.get_rng_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert_same([found[0][1]], [found[1][1]])
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize(("state_dtype", "far", "worse"), [("bfloat16", 0.1, 1.05), (*INT8.values, 0.15, 1.1)])
@pytest.mark.parametrize("rule", ["muon", "soap", "shampoo"])
@pytest.mark.first_tier("rule")
def test_two_hundred_steps_stay_near_float32(rule: str, state_dtype: str, far: float, worse: float) -> None:
    """Weights within ``far`` of the way that float32 state takes them, and as far in the gradients' direction but for 5 or 10
    percent. Gradients are given: those of a training would carry a rounding of the first step to the last in any size.
    """
    if state_dtype == "int8":
        pytest.importorskip("bitsandbytes")
    start = [p.detach().clone() for p in make(rule, "float32")[0].parameters()]
    generator = torch.Generator().manual_seed(3)
    mean = [torch.randn(p.shape, generator=generator) for p in start]
    ends, progress = [], []
    for name in ("float32", state_dtype):
        model, optimizer = make(rule, name)
        generator.manual_seed(4)
        for _ in range(200):
            for p, m in zip(model.parameters(), mean):
                p.grad = 1e-2 * (m + torch.randn(p.shape, generator=generator))
            optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
        progress.append(sum(float(((s - e) * m).sum()) for s, e, m in zip(start, ends[-1], mean)))
    apart = sum(float((a - b).square().sum()) for a, b in zip(*ends)) ** 0.5
    gone = sum(float((a - s).square().sum()) for a, s in zip(ends[0], start)) ** 0.5
    print(f"{rule} {state_dtype}: {apart / gone:.4f} of the way apart, progress {progress[1] / progress[0]:.4f}")
    assert 0.0 < apart / gone < far
    assert progress[0] / worse < progress[1] < worse * progress[0]


def test_a_slow_average_in_bfloat16_arrives() -> None:
    """Rounded to nearest, an average of decay 0.999 stops where its steps are below half a spacing."""
    state = packed_like({"exp_avg_sq": torch.zeros(4096)}, "bfloat16", (64, 64))
    nearest = torch.zeros(4096, dtype=torch.bfloat16)
    for step in range(5000):
        wide = unpacked(state, torch.float32)
        wide["exp_avg_sq"].lerp_(torch.ones(4096), 0.001)
        update_packed(state, wide, None, torch.Generator().manual_seed(step))
        nearest = nearest.float().lerp(torch.ones(4096), 0.001).bfloat16()
    assert nearest.float().mean() < 0.6
    assert abs(float(state["exp_avg_sq"].float().mean()) - (1.0 - 0.999**5000)) < 0.01


@pytest.mark.parametrize("shape", [(64, 64), (40, 130), (9, 700), (3, 20, 90)])
def test_eight_bits_are_as_near_as_their_map_is_fine(shape: tuple[int, ...]) -> None:
    """A hundredth of the largest value of a block at most, rows that end inside a block included."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    values = {"momentum_buffer": torch.randn(shape), "exp_avg_sq": torch.rand(shape) ** 4}
    state = packed_like({k: torch.zeros(shape) for k in values}, "int8", shape)
    assert state["momentum_buffer_codes"].shape == shape
    assert state["momentum_buffer_scale"].shape == moments.scale_shape(shape)
    update_packed(state, values, None, None)
    back = unpacked(state, torch.float32)
    assert (back["momentum_buffer"] - values["momentum_buffer"]).abs().max() < 0.02 * values[
        "momentum_buffer"
    ].abs().max()
    roots = [back["exp_avg_sq"].sqrt(), values["exp_avg_sq"].sqrt()]
    assert (roots[0] - roots[1]).abs().max() < 0.01


def test_codes_are_of_the_nearest_values_and_zero_is_zero() -> None:
    pytest.importorskip("bitsandbytes")
    values = torch.linspace(-1, 1, 1024).view(4, 256) ** 5
    values[:, 7] = 0.0
    state = packed_like({"momentum_buffer": torch.zeros(16, 256)}, "int8", (16, 256))
    update_packed(state, {"momentum_buffer": values.repeat(4, 1)}, None, None)
    scale, known = values.abs().amax(1, keepdim=True), moments._map(True, torch.device("cpu"))
    nearest = (values / scale).unsqueeze(-1).sub(known).abs().argmin(-1)
    assert torch.equal(state["momentum_buffer_codes"][:4].long(), nearest)
    assert (unpacked(state, torch.float32)["momentum_buffer"][:, 7] == 0.0).all()


def test_a_second_moment_is_never_rounded_to_nothing() -> None:
    """A first moment over the root of nothing would be a step without bound."""
    pytest.importorskip("bitsandbytes")
    values = torch.zeros(16, 256)
    values[:, 0], values[:, 1] = 1.0, 1e-20
    state = packed_like({"exp_avg_sq": torch.zeros(16, 256)}, "int8", (16, 256))
    update_packed(state, {"exp_avg_sq": values}, None, None)
    back = unpacked(state, torch.float32)["exp_avg_sq"]
    assert (back[:, 1] > 0.0).all()
    assert (back[:, 2:] == 0.0).all()


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_measured_bytes_are_the_planned_ones(rule: str, state_dtype: str) -> None:
    model, optimizer = make(rule, state_dtype, torch.bfloat16)
    figures = estimate(optimizer)
    train(model, optimizer, range(2))
    measured = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert measured == figures.matrix_state_bytes + figures.aux_state_bytes
    assert f"state: {measured:,} bytes" in optimizer.explain()


@pytest.fixture
def llama(tmp_path: Any) -> str:
    import transformers

    transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4,
        vocab_size=32000, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # fmt: skip
    return str(tmp_path)


def test_eight_bit_muon_takes_a_sixth_of_adamw(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A Llama of 1.1 B with embeddings and head, as ``hf-emopt plan`` has it, which needs no library."""
    import json

    assert cli(["plan", llama, "--optim", "muon", "--optim_args", "state_dtype=8bit", "--json"]) == 0
    text = capsys.readouterr().out
    figures = json.loads(text[text.index("{") :])
    figures = figures.get("figures", figures)
    state = figures["matrix_state_bytes"] + figures["aux_state_bytes"]
    assert state < 0.15 * figures["adamw_state_bytes"]


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("float32", "int8"), ("int8", "float32"), ("bfloat16", "int8")])
@pytest.mark.parametrize("rule", ["muon", "soap", "shampoo"])
def test_a_checkpoint_is_converted_to_the_live_dtype(rule: str, saved_as: str, loaded_as: str) -> None:
    pytest.importorskip("bitsandbytes")
    model, optimizer = make(rule, saved_as)
    train(model, optimizer, range(4))
    other, loaded = make(rule, loaded_as)
    loaded.load_state_dict(through_disk(optimizer.state_dict()))
    assert {g["state_dtype"] for g in loaded.param_groups} == {loaded_as}
    for p, q in zip(model.parameters(), other.parameters()):
        one, two = (wide(o.state[x]) for o, x in ((optimizer, p), (loaded, q)))
        assert set(one) == set(two)
        for key in one:
            a, b = (x[key].sqrt() if "sq" in key else x[key].float() for x in (one, two))
            assert (a - b).abs().max() <= 0.02 * a.abs().max()
    other.load_state_dict(model.state_dict())
    train(other, loaded, range(4, 6))


@pytest.mark.parametrize(
    ("key", "shape", "named"),
    [
        ("momentum_buffer_codes", (80, 128), r"up\.weight.*momentum_buffer_codes has shape \(80, 128\), the parameter"),
        ("momentum_buffer_scale", (160, 2), r"up\.weight.*momentum_buffer_scale has shape \(160, 2\), scales"),
    ],
)
def test_codes_of_another_shape_are_named(key: str, shape: tuple[int, ...], named: str) -> None:
    pytest.importorskip("bitsandbytes")
    model, optimizer = make("muon", "int8")
    train(model, optimizer, range(2))
    saved = through_disk(optimizer.state_dict())
    index = next(
        i for i, s in saved["state"].items() if tuple(s.get("momentum_buffer_codes", torch.empty(0)).shape) == (160, 64)
    )
    saved["state"][index][key] = saved["state"][index][key].new_zeros(shape)
    _, loaded = make("muon", "int8")
    with pytest.raises(ValueError, match=named):
        loaded.load_state_dict(saved)


def test_moments_of_adamw_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    model, _ = make("muon", "float32")
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    train(model, adamw, range(3))
    other, optimizer = make("muon", "int8")
    with pytest.warns(UserWarning, match="saved by AdamW"):
        optimizer.load_state_dict(adamw.state_dict())
    state = optimizer.state[other.table.weight]
    assert state["exp_avg_codes"].dtype is torch.uint8
    wanted = adamw.state[model.table.weight]["exp_avg"]
    assert (unpacked(state, torch.float32)["exp_avg"] - wanted).abs().max() <= 0.02 * wanted.abs().max()


def test_stochastic_state_repeats_and_differs_from_the_weights_noise() -> None:
    ends = []
    for seed in (1, 2):
        model, optimizer = make("muon", "bfloat16", torch.bfloat16, low_precision_weights="stochastic")
        torch.manual_seed(seed)
        train(model, optimizer, range(3))
        ends.append(kept(optimizer))
    assert_same(*ends)
    group = optimizer.param_groups[0]
    noise = [moment_noise(0, group, torch.device("cpu"))(), weight_noise(0, group, torch.device("cpu"))]
    draws = [torch.randint(0, 2**16, (8,), generator=g) for g in noise]
    assert not torch.equal(*draws)


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-emopt\[8bit\]'"):
        make("muon", "int8")


def test_arguments() -> None:
    for rule, (cls, _) in OPTIMIZERS.items():
        wanted = {"state_dtype": "bfloat16", "offload_state": "cpu"}
        assert parse_optim_args("state_dtype=bfloat16, offload_state=cpu", cls) == wanted, rule
    with pytest.raises(ValueError, match="state_dtype='fp8' is not one of float32, bfloat16, int8"):
        make("muon", "fp8")
    with pytest.raises(ValueError, match="offload_state='nvme' must be 'cpu'"):
        make("muon", "float32", offload_state="nvme")
    _, optimizer = make("muon", "bf16")
    assert {g["state_dtype"] for g in optimizer.param_groups} == {"bfloat16"}


def test_flattened_parameters_are_refused() -> None:
    from hf_emopt.distributed.layout import Partition, Storage, single_grid

    grid = single_grid()
    storage = Storage((4096,), ((((0, 4096),),),), grid.ranks)
    part = Partition.of(torch.zeros(4096), storage, grid, (64, 64))
    optimizer = make("muon", "bfloat16")[1]
    group = {**optimizer.param_groups[0], "params": [part], "param_names": ["w"]}
    with pytest.raises(UnsupportedLayoutError, match="use state_dtype='float32', or FSDP2"):
        check_state_options(optimizer.rule, [group], None)
    with pytest.raises(UnsupportedLayoutError, match="offload_optimizer"):
        check_state_options(optimizer.rule, [{**group, "state_dtype": "float32"}], "cpu")
