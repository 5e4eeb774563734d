"""SOAP and Shampoo in use: stability, schedules, failures, storage, checkpoints, layouts of weights."""

from __future__ import annotations

import copy
import importlib
import io
import math

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_emopt
from hf_emopt.formats.kronecker_factors import FACTOR_STORAGE, init_factor, load_factor, store_factor
from hf_emopt.linalg.matmul_precision import scaled_half
from hf_emopt.tools.estimate import estimate

RULES = (hf_emopt.SOAP, hf_emopt.Shampoo, hf_emopt.KLShampoo)
POLICIES = ("staggered", "synchronous")
SHAPES = ((12, 8), (8, 12), (12, 8), (10, 6), (9,))


def make(cls, seed: int = 0, dtype: torch.dtype = torch.float32, **options):
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(0.1 * torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    return params, cls(params, **{"lr": 0.01, "precondition_frequency": 4, "max_preconditioner_dim": 8, **options})


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def run(params, optimizer, steps: range, idle=lambda step, i: False) -> None:
    for step in steps:
        for i, (p, g) in enumerate(zip(params, gradients(step, params[0].dtype))):
            p.grad = None if idle(step, i) else g
        optimizer.step()


def values(params) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def assert_equal(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


# ---------------------------------------------------------------------- stability


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def updates_rms(model: nn.Module, before: list[Tensor], lr: float) -> float:
    return max(float((p.detach() - b).square().mean().sqrt()) / lr for p, b in zip(model.parameters(), before))


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("start", [1, None])
def test_two_hundred_steps_of_batch_one(cls, start: int | None) -> None:
    """Gradients of rank one at first, a spike of 1e4, zeros, one NaN step: finite throughout, steps bounded, none silent."""
    model = tiny_llama()
    lr = 1e-3
    extra = {"start_preconditioning_step": start} if cls is not hf_emopt.SOAP and start else {}
    optimizer = cls(model, lr=lr, weight_decay=0.0, precondition_frequency=5, **extra)
    batches = torch.randint(0, 8, (2, 1, 12), generator=torch.Generator().manual_seed(1))  # to be known by heart
    first = last = largest = 0.0
    for step in range(1, 201):
        ids = batches[step % 2]
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for p in model.parameters():
            if step == 5:
                p.grad *= 1e4
            elif step == 20:
                p.grad.zero_()
            elif step == 30:
                p.grad.view(-1)[0] = math.nan
        before = values(model.parameters())
        optimizer.step()
        if step == 30:
            assert_equal(before, values(model.parameters()))
        assert all(torch.isfinite(p).all() for p in model.parameters())
        largest = max(largest, updates_rms(model, before, lr))
        first, last = first or float(loss.detach()), float(loss.detach())
    assert optimizer.skipped_steps == 1
    assert optimizer.rule.failures == 0
    assert largest <= 10.0  # Adam's own bound at a spike is (1 - beta1) / sqrt(1 - beta2)
    print(f"{last / first:.3f} of the first loss, largest update {largest:.2f}")
    assert last < 0.9 * first  # the spike stays in a second moment of beta 0.999 for the rest of the run


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("kind", ["rank one", "zeros", "tiny", "huge", "one row", "constant"])
def test_degenerate_gradients(cls, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(12, 20))
    extra = {} if cls is hf_emopt.SOAP else {"start_preconditioning_step": 1}
    optimizer = cls([p], lr=1.0, weight_decay=0.0, precondition_frequency=2, **extra)
    for _ in range(20):
        noise = torch.randn(12, 20, generator=generator)
        p.grad = {
            "rank one": torch.randn(12, 1, generator=generator) @ torch.randn(1, 20, generator=generator),
            "zeros": torch.zeros(12, 20),
            "tiny": 1e-12 * noise,
            "huge": 1e12 * noise,
            "one row": noise * (torch.arange(12) == 3).unsqueeze(1),
            "constant": torch.ones(12, 20),
        }[kind]
        before = p.detach().clone()
        optimizer.step()
        rms = float((p.detach() - before).square().mean().sqrt())
        assert rms <= 4.0  # false for NaN
    if kind == "zeros":
        assert torch.equal(p, torch.zeros(12, 20))
    assert optimizer.rule.failures == 0


def covariances(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Roots of a covariance of 12 rows and one of 20 columns, eigenvalues from 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    turns = [torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in (12, 20)]
    left, right = [q @ torch.diag(torch.logspace(-0.5, 0.5, len(q))) @ q.T for q in turns]
    return left, right


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (hf_emopt.KLShampoo, {"start_preconditioning_step": 1}),
        (hf_emopt.KLShampoo, {}),
        (hf_emopt.SOAP, {"kl": True}),
    ],
    ids=["KLShampoo at once", "KLShampoo later", "SOAP kl"],
)
def test_kl_factors_follow_the_gradients(cls, options: dict, size: float) -> None:
    """No period outweighs the others, and factors become those of what gradients have turned into."""
    generator = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.zeros(12, 20))
    optimizer = cls([p], lr=0.0, weight_decay=0.0, betas=(0.9, 0.95), precondition_frequency=5, **options)
    means = []
    for step in range(160):
        left, right = covariances(0 if step < 60 else 7)
        p.grad = size * left @ torch.randn(12, 20, generator=generator) @ right
        optimizer.step()
        factor = optimizer.state[p]["factor.0.0.0"][0, 0]
        if step >= 5:
            means.append(factor.diagonal().mean().item())
    assert max(means) < 30 * sorted(means)[len(means) // 2]
    left, _ = covariances(7)
    old, _ = covariances(0)
    now = factor / factor.trace()
    assert (now - left @ left / (left @ left).trace()).norm() < 0.35 * (now - old @ old / (old @ old).trace()).norm()


def test_kl_without_grafting_whitens() -> None:
    """Elements of the update have the variance one, whatever the size of the gradients."""
    generator = torch.Generator().manual_seed(1)
    left, right = covariances(0)
    for size in (1e-4, 1.0, 1e3):
        p = nn.Parameter(torch.zeros(12, 20))
        optimizer = hf_emopt.KLShampoo(
            [p], lr=1.0, weight_decay=0.0, betas=(0.0, 0.98), precondition_frequency=2, grafting="none", epsilon=1e-20
        )
        squares = []
        for _ in range(150):
            p.grad = size * left @ torch.randn(12, 20, generator=generator) @ right
            before = p.detach().clone()
            optimizer.step()
            squares.append((p.detach() - before).square())
        whitened = torch.stack(squares[75:]).mean(0)
        assert whitened.mean().sqrt().item() == pytest.approx(1.0, abs=0.15)
        assert (whitened.max() / whitened.min()).item() < 4.0


@pytest.mark.parametrize("cls", RULES)
def test_a_spike_with_tf32_allowed_leaves_the_flags_alone(cls) -> None:
    """Factor maths follows matmul_precision, not the process's flag, and puts the flag back."""
    torch.set_float32_matmul_precision("high")
    try:
        params, optimizer = make(cls)
        for step in range(12):
            for p, g in zip(params, gradients(step)):
                p.grad = g * (1e4 if step == 5 else 1.0)
            optimizer.step()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.isfinite(p).all() for p in params)


# ---------------------------------------------------------------------- failures


@pytest.mark.parametrize("cls", RULES)
def test_a_failing_refresh_keeps_the_previous_one_and_is_counted(cls, monkeypatch: pytest.MonkeyPatch) -> None:
    params, optimizer = make(cls, refresh="synchronous", tolerated_failures=2)
    run(params, optimizer, range(9))
    kept = {k: v.clone() for p in params[:4] for k, v in optimizer.state[p].items() if k.startswith(("root", "basis"))}
    healthy = optimizer.rule.compute

    def broken(snapshot, group, first, deferred=False):
        new = healthy(snapshot, group, first)
        return type(new)(new.tensors, torch.ones_like(new.failed))

    monkeypatch.setattr(optimizer.rule, "compute", broken)
    run(params, optimizer, range(9, 13))
    assert optimizer.rule.failures == sides_of(params, optimizer)
    now = {k: v for p in params[:4] for k, v in optimizer.state[p].items() if k.startswith(("root", "basis"))}
    assert all(torch.equal(kept[k], now[k]) for k in kept)
    with pytest.raises(RuntimeError, match="3 times in a row"):
        run(params, optimizer, range(13, 30))


@pytest.mark.parametrize("cls", RULES)
def test_a_decomposition_that_raises_climbs_the_ladder(cls, monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuSOLVER does now and then: float32 raises, float64 works, and the update is the same."""
    wanted, reference = make(cls, refresh="synchronous")
    run(wanted, reference, range(8))
    real = torch.linalg.eigh

    def moody(a, *args, **kwargs):
        if a.dtype is torch.float32 and not torch.equal(a, torch.eye(a.shape[-1]).expand_as(a)):
            raise torch.linalg.LinAlgError("did not converge")
        return real(a, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", moody)
    params, optimizer = make(cls, refresh="synchronous")
    run(params, optimizer, range(8))
    assert optimizer.rule.failures == 0
    assert optimizer.rule.ladder.float64 > 0
    assert reference.rule.ladder.float64 == 0
    for p, q in zip(params, wanted):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-3)


# ---------------------------------------------------------------------- schedules


def sides_of(params, optimizer) -> int:
    """Preconditioned sides of all blocks: each has a count of failures."""
    return sum(v.numel() for p in params[:4] for k, v in optimizer.state[p].items() if k.startswith("failures"))


class Counting:
    """Counts the sides of blocks that a rule refreshes at each step, and the cubes of their sizes."""

    def __init__(self, optimizer) -> None:
        self.counts: list[int] = []
        self.cubes: list[int] = []
        original = optimizer.rule.snapshot

        def snapshot(factor_dim, group):
            taken = original(factor_dim, group)
            self.counts[-1] += len(taken["factor"])
            self.cubes[-1] += len(taken["factor"]) * taken["factor"].shape[-1] ** 3
            return taken

        optimizer.rule.snapshot = snapshot

    def step(self) -> None:
        self.counts.append(0)
        self.cubes.append(0)


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_side_is_refreshed_once_a_period(cls, policy: str) -> None:
    extra = {} if cls is hf_emopt.SOAP else {"start_preconditioning_step": 1}
    params, optimizer = make(cls, refresh=policy, **extra)
    counting = Counting(optimizer)
    for step in range(17):
        counting.step()
        run(params, optimizer, range(step, step + 1))
    sides = sides_of(params, optimizer)
    assert counting.counts[0] == sides  # the first time all of them
    for period in range(4):
        assert sum(counting.counts[1 + 4 * period : 5 + 4 * period]) == sides
    later = counting.cubes[1:]
    if policy == "synchronous":
        assert counting.counts[1:5] == [0, 0, 0, sides]
    else:
        assert max(later) <= 0.6 * counting.cubes[0]
        assert max(counting.counts[1:]) <= 0.6 * sides


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_absent_gradients_do_not_disturb_others(cls, policy: str) -> None:
    """A matrix whose batch mates come and go takes the steps that it would take alone."""
    options = {"refresh": policy} | ({} if policy == "synchronous" else {"precondition_frequency": 2})
    together, both = make(cls, **options)
    start = together[2].detach().clone()
    alone = nn.Parameter(start.clone())
    single = cls([alone], lr=0.01, max_preconditioner_dim=8, **{"precondition_frequency": 4, **options})
    single.current_context()
    both.current_context()
    # The place in the period is a matter of the whole plan; here it is the step that is compared.
    single.context.schedule.steps = {("param.0", 0, 0): both.context.schedule.steps["param.2", 0, 0]}
    for step in range(10):
        grads = gradients(step)
        for i, p in enumerate(together):
            p.grad = grads[i] if i == 2 or (step + i) % 3 else None
        alone.grad = grads[2].clone()
        both.step(), single.step()
    torch.testing.assert_close(together[2], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cls", RULES)
def test_results_change_on_their_refresh_step_alone(cls) -> None:
    extra = {} if cls is hf_emopt.SOAP else {"start_preconditioning_step": 1}
    p = nn.Parameter(torch.zeros(6, 6))
    optimizer = cls([p], precondition_frequency=6, **extra)
    name = "basis" if cls is hf_emopt.SOAP else "root"
    changes: list[list[int]] = [[], []]
    generator = torch.Generator().manual_seed(0)
    previous: list[Tensor] = []
    for step in range(14):
        p.grad = torch.randn(6, 6, generator=generator)
        optimizer.step()
        current = [optimizer.state[p][f"{name}.0.{d}.0"].clone() for d in range(2)]
        for d, old in enumerate(previous):
            if not torch.equal(old, current[d]):
                changes[d].append(step)
        previous = current
    # The first refresh is on the first step; later ones on the step of the period that each factor has.
    for d, due in enumerate(optimizer.context.schedule.steps["param.0", 0, 0]):
        assert changes[d] == [t for t in range(1, 14) if t % 6 == due]


# ---------------------------------------------------------------------- refresh="async" of earlier versions


@pytest.mark.parametrize("cls", RULES)
def test_asynchronous_refresh_is_refused_with_its_replacement(cls) -> None:
    with pytest.raises(ValueError, match=r"refresh='async' was removed.*refresh='staggered'"):
        make(cls, refresh="async")


@pytest.mark.parametrize("cls", RULES)
def test_state_that_was_saved_with_asynchronous_refresh_goes_on_staggered(cls) -> None:
    params, optimizer = make(cls)
    run(params, optimizer, range(5))
    weights, saved = values(params), copy.deepcopy(optimizer.state_dict())
    # As an earlier version saved it: a counter, two flags and room for the next results of each factor.
    old = copy.deepcopy(saved)
    old["param_groups"][0] |= {"refresh": "async", "async_delay": 2}
    added = 0
    for entry in old["state"].values():
        for key in [key for key in entry if key.startswith("failures.")]:
            rest, shape = key.removeprefix("failures."), entry[key].shape
            entry[f"pending.{rest}"] = torch.ones(shape, dtype=torch.int64)
            entry |= {f"next_{flag}.{rest}": torch.zeros(shape, dtype=torch.bool) for flag in ("failed", "skipped")}
            for name in [n for n in ("root", "basis", "eigenvalues") if f"{n}.{rest}" in entry]:
                entry[f"next_{name}.{rest}"] = torch.full_like(entry[f"{name}.{rest}"], math.nan)
                added += 1
    assert added
    found = []
    for state in (saved, old):
        others, resumed = make(cls)
        for p, w in zip(others, weights):
            p.data.copy_(w)
        if state is old:
            with pytest.warns(UserWarning, match="goes on with refresh='staggered'"):
                resumed.load_state_dict(state)
        else:
            resumed.load_state_dict(state)
        assert resumed.param_groups[0]["refresh"] == "staggered"
        assert "async_delay" not in resumed.param_groups[0]
        assert not any(key.startswith(("pending", "next_")) for p in others for key in resumed.state[p])
        run(others, resumed, range(5, 11))
        found.append(values(others))
    assert_equal(*found)


# ---------------------------------------------------------------------- precision


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("shape", [(24, 16), (16, 40), (48, 16), (16, 16)])
def test_float16_products_step_as_exact_ones_do(cls, shape: tuple[int, int]) -> None:
    """On gradients of any scale, cut into blocks or not: the same steps within the rounding of TF32."""
    moved = {}
    for precision in ("highest", "tf32_emulated", "fp16"):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(shape, generator=generator))
        before = weight.detach().clone()
        solver = {} if cls is hf_emopt.SOAP else {"root_solver": "coupled_newton", "relative_epsilon": 1e-3}
        optimizer = cls(
            [weight], lr=0.01, precondition_frequency=3, max_preconditioner_dim=16, matmul_precision=precision, **solver
        )  # fmt: skip
        for _ in range(5):
            weight.grad = 1e-7 * torch.randn(shape, generator=generator)
            optimizer.step()
        moved[precision] = weight.detach() - before
    errors = {k: ((v - moved["highest"]).norm() / moved["highest"].norm()).item() for k, v in moved.items()}
    assert errors["fp16"] > 0  # it is another computation
    assert errors["fp16"] < max(2 * errors["tf32_emulated"], 2e-3)


def test_a_basis_is_rounded_once_for_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step without refresh: the gradient, for bases and factors, two bases, and the update on its way back."""
    rounded = []

    def counted(x: Tensor, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rounded.append(tuple(x.shape))
        return scaled_half(x, peak)

    weight = nn.Parameter(torch.randn(16, 12))
    optimizer = hf_emopt.SOAP([weight], matmul_precision="fp16", precondition_frequency=100)
    for _ in range(3):
        weight.grad = torch.randn(16, 12)
        optimizer.step()
    for module in ("blocks", "kronecker"):
        monkeypatch.setattr(importlib.import_module(f"hf_emopt.rules.{module}"), "scaled_half", counted)
    optimizer.step()
    assert sorted(rounded) == [(1, 12, 12), (1, 16, 12), (1, 16, 12), (1, 16, 16)]


def test_refreshes_in_float16_leave_no_direction_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of every step have 11 bits. Refreshes split their factors, and roots are damped by 1e-5 (the first by 3e-5)
    and not by TF32's 1e-3: what 11 bits leave alone costs a run 0.05 to 0.35 (docs/convergence.md)."""
    asked = []

    def recorded(function):
        def call(*arguments, **options):
            asked.append((function.__name__, options["precision"], options.get("relative_epsilon")))
            return function(*arguments, **options)

        return call

    soap, shampoo = (importlib.import_module(f"hf_emopt.rules.{name}") for name in ("soap", "shampoo"))
    monkeypatch.setattr(soap, "refresh_eigenbasis", recorded(soap.refresh_eigenbasis))
    monkeypatch.setattr(shampoo, "inverse_root", recorded(shampoo.inverse_root))
    for cls, options in ((hf_emopt.SOAP, {}), (hf_emopt.Shampoo, {"root_solver": "coupled_newton"})):
        params, optimizer = make(cls, matmul_precision="fp16", **options)
        run(params, optimizer, range(6))
    assert set(asked) == {
        ("refresh_eigenbasis", "fp16", None),
        ("inverse_root", "fp16", 3e-5),
        ("inverse_root", "fp16", 1e-5),
    }


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("storage", FACTOR_STORAGE)
def test_a_step_that_is_skipped_leaves_factors_in_every_storage(cls, storage: str) -> None:
    params, optimizer = make(cls, matmul_precision="fp16", factor_storage=storage)
    run(params, optimizer, range(3))
    state = {(i, k): v.clone() for i, p in enumerate(params) for k, v in optimizer.state[p].items() if "factor" in k}
    for p in params:
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    after = {(i, k): v for i, p in enumerate(params) for k, v in optimizer.state[p].items() if "factor" in k}
    assert state
    assert_equal(list(state.values()), list(after.values()))


def start_late(cls, policy: str, skipped: bool):
    """Parameters and an optimizer whose first refresh was due, in step 3 (SOAP: 1), when it could not be made."""
    start = 1 if cls is hf_emopt.SOAP else 3
    own = {} if cls is hf_emopt.SOAP else {"start_preconditioning_step": 3}
    params, optimizer = make(cls, refresh=policy, precondition_frequency=4, **own)
    for step in range(start):
        for p, g in zip(params, gradients(step)):
            p.grad = g if skipped else torch.zeros_like(g)
        if skipped and step == start - 1:
            params[0].grad.view(-1)[0] = math.nan
        optimizer.step()
    return params, optimizer, start


def counts(params, optimizer) -> list[int]:
    found = [v for p in params for k, v in optimizer.state[p].items() if k.startswith("failures")]
    return torch.cat([v.flatten() for v in found]).tolist()


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("skipped", [True, False])
def test_a_first_refresh_without_a_gradient_is_made_up_for(
    cls, policy: str, skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the side is due next, and in full; until then Shampoo steps as it did before, and so does a resumed run."""
    params, optimizer, start = start_late(cls, policy, skipped)
    number = len(counts(params, optimizer))
    assert counts(params, optimizer) == [-1] * number
    file = io.BytesIO()
    torch.save({"weights": values(params), "optimizer": optimizer.state_dict()}, file)
    firsts = []

    def compute(snapshot, group, first, deferred=False):
        firsts.extend([first] * len(snapshot.tensors["factor"]))
        return real(snapshot, group, first, deferred)

    real = optimizer.rule.compute
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.rule, "compute", compute)
        run(params, optimizer, range(start, start + 4))
    assert firsts == [True] * number
    assert counts(params, optimizer) == [0] * number
    run(params, optimizer, range(start + 4, start + 7))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others, resumed, _ = start_late(cls, policy, skipped)
    for p, w in zip(others, saved["weights"]):
        p.data.copy_(w)
    resumed.load_state_dict(saved["optimizer"])
    run(others, resumed, range(start, start + 7))
    assert_equal(values(params), values(others))


@pytest.mark.parametrize("cls", [hf_emopt.Shampoo, hf_emopt.KLShampoo])
def test_without_roots_yet_the_grafted_direction_is_taken(cls) -> None:
    found = []
    for start in (3, 100):
        params, optimizer = make(cls, refresh="synchronous", precondition_frequency=4, start_preconditioning_step=start)
        run(params, optimizer, range(2))
        for p in params:
            p.grad = torch.full_like(p, math.nan)
        optimizer.step()
        run(params, optimizer, range(3, 6))  # the fourth refreshes
        found.append(values(params))
    assert_equal(*found)


@pytest.mark.parametrize("cls", RULES)
def test_sides_that_come_late_alone_are_found_again_together(cls) -> None:
    """A matrix that begins after others, which are known to be refreshed, in a step without them."""
    start = {} if cls is hf_emopt.SOAP else {"start_preconditioning_step": 1}
    params = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2)]
    optimizer = cls(params, refresh="synchronous", precondition_frequency=3, **start)
    for step in range(5):
        params[0].grad = torch.randn(8, 8) if step != 1 else None
        params[1].grad = torch.randn(8, 8) if step > 1 else torch.full((8, 8), math.nan) if step else None
        optimizer.step()
        assert counts(params[1:], optimizer) == ([0, 0] if step in (0, 4) else [-1, -1])
    assert counts(params[:1], optimizer) == [0, 0]


def test_a_basis_that_comes_late_is_an_eigenbasis() -> None:
    """Not a turn of the identity by one step of an iteration."""
    params, optimizer = make(hf_emopt.SOAP, refresh="synchronous", precondition_frequency=4)
    for p in params:
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    run(params, optimizer, range(4))
    for state in (optimizer.state[p] for p in params):
        for name in [k for k in state if k.startswith("factor")]:
            basis, factor = state[name.replace("factor", "basis")], state[name]
            ramp = torch.linspace(0.1, 0.0, factor.shape[-1], dtype=factor.dtype)  # orders a null space
            mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
            inside = basis.mT @ (factor + torch.diag_embed(mean * ramp)) @ basis
            off = inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))
            assert off.norm() < 1e-5 * inside.norm()


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("saved_at", [0, 1, 4, 7])
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_resumed_equals_uninterrupted(cls, policy: str, saved_at: int, storage: str) -> None:
    """Bit for bit, also in the middle of a period and with results under way, and with a parameter never trained."""

    def never(step: int, i: int) -> bool:
        return i == 3

    options = {"refresh": policy, "factor_storage": storage}
    params, optimizer = make(cls, **options)
    run(params, optimizer, range(saved_at), never)
    file = io.BytesIO()
    torch.save({"weights": values(params), "optimizer": optimizer.state_dict()}, file)
    run(params, optimizer, range(saved_at, saved_at + 6), never)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others, loaded = make(cls, **options)
    for p, w in zip(others, saved["weights"]):
        p.data.copy_(w)
    loaded.load_state_dict(saved["optimizer"])
    run(others, loaded, range(saved_at, saved_at + 6), never)
    assert_equal(values(params), values(others))


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_copies_train_on_alike(cls, policy: str) -> None:
    params, optimizer = make(cls, refresh=policy)
    run(params, optimizer, range(5))
    others, copied = copy.deepcopy((params, optimizer))
    run(params, optimizer, range(5, 12))
    run(others, copied, range(5, 12))
    assert_equal(values(params), values(others))


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bad_step_changes_no_state(cls, policy: str) -> None:
    params, optimizer = make(cls, refresh=policy)
    run(params, optimizer, range(6))
    before = copy.deepcopy(optimizer.state_dict()["state"])
    weights = values(params)
    for p, g in zip(params, gradients(6)):
        p.grad = g
    params[0].grad[0, 0] = math.inf
    optimizer.step()
    assert_equal(weights, values(params))
    clock = ("rounds", "failures")  # these tell the time
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            if not key.startswith(clock):
                torch.testing.assert_close(value, before[index][key], rtol=1e-6, atol=1e-8)


def test_state_of_a_sibling_is_refused_by_name() -> None:
    """Shampoo and KL-Shampoo keep tensors of the same shapes that mean different things."""
    params, optimizer = make(hf_emopt.Shampoo)
    run(params, optimizer, range(2))
    with pytest.raises(ValueError, match="is of shampoo, this optimizer is kl_shampoo"):
        make(hf_emopt.KLShampoo)[1].load_state_dict(optimizer.state_dict())


# ---------------------------------------------------------------------- dtypes and memory


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_steps(cls, dtype: torch.dtype) -> None:
    params, optimizer = make(cls, dtype=dtype)
    before = values(params)
    run(params, optimizer, range(10))
    for a, p in zip(before, params):
        assert p.dtype is dtype
        assert torch.isfinite(p).all()
        assert not torch.equal(a, p)
    factor = next(v for k, v in optimizer.state[params[0]].items() if k.startswith("factor"))
    assert factor.dtype is torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("storage", FACTOR_STORAGE)
def test_weights_in_float64_step_with_factors_in_every_storage(cls, storage: str) -> None:
    params, optimizer = make(cls, dtype=torch.float64, factor_storage=storage)
    run(params, optimizer, range(3))
    assert all(torch.isfinite(p).all() for p in params)
    state = optimizer.state[params[0]]
    assert next(v for k, v in state.items() if k.startswith("exp_avg")).dtype is torch.float64


@pytest.mark.parametrize("storage", FACTOR_STORAGE)
def test_stored_factors_come_back(storage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(3, 2, 16, 40, generator=generator) * torch.logspace(-6, 3, 16).view(16, 1)
    a = g @ g.mT
    state = init_factor("factor", (3, 2), 16, storage, a)
    store_factor(state, "factor", a, storage, generator)
    back = load_factor(state, "factor", 16, storage)
    scale = (a.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * a.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)).sqrt()
    bound = {"float32": 0.0, "packed": 1e-6, "bfloat16": 4e-3, "float16": 5e-4, "int8": 1 / 127}[storage]
    assert ((back - a).abs() / scale).max() <= bound * 1.01 + 1e-7
    torch.testing.assert_close(back.diagonal(dim1=-2, dim2=-1), a.diagonal(dim1=-2, dim2=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(back, back.mT, rtol=0, atol=0)


def test_a_correlation_of_one_keeps_its_sign_in_eight_bits() -> None:
    """A factor of rank one has no other; with noise that rounds up to 1 it would be a level that int8 does not have."""
    diagonal = torch.rand(1024, 1, generator=torch.Generator().manual_seed(0)) + 0.5
    a = (diagonal @ diagonal.mT)[None]
    state = init_factor("factor", (1,), 1024, "int8", a)
    for seed in range(3):
        store_factor(state, "factor", a, "int8", torch.Generator().manual_seed(seed))
        assert int(state["factor"].min()) > 0


@pytest.mark.parametrize(
    ("storage", "beta", "far"), [("int8", 0.995, 0.05), ("bfloat16", 0.9975, 5e-3), ("float16", 0.9998, 1e-3)]
)
def test_narrow_correlations_follow_a_slow_average(storage: str, beta: float, far: float) -> None:
    """Nearest rounding would never leave the first value: each step moves by less than one level."""
    generator = torch.Generator().manual_seed(0)
    off = torch.ones(8, 8) - torch.eye(8)
    # From zero on, where 16 bits have spacings without end, averages stop further up.
    old, new = torch.eye(8) + (0.0 if storage == "int8" else 0.3) * off, torch.eye(8) + 0.5 * off
    state = init_factor("factor", (64, 1), 8, storage, old)
    store_factor(state, "factor", old.expand(64, 1, 8, 8), storage, generator)
    exact = old.clone()
    for _ in range(300):
        exact = beta * exact + (1.0 - beta) * new
        average = beta * load_factor(state, "factor", 8, storage) + (1.0 - beta) * new
        store_factor(state, "factor", average, storage, generator)
    reached = load_factor(state, "factor", 8, storage).mean(dim=(0, 1))
    assert (reached - exact).abs().max() < far
    assert exact[0, 1] > old[0, 1] + 5 * far


def test_float16_correlations_are_rounded_to_their_neighbours() -> None:
    """Of all sizes, subnormal numbers among them, and to both in the shares that make the expectation exact."""
    exact = torch.tensor([1.0, -1.0, 0.0, 0.3, -0.9999, 2**-14 * 1.0003, 1e-5, -3e-7, 2**-24 / 3])
    entries = torch.diag_embed(torch.zeros(2)).expand(len(exact), 1, 2, 2).clone()
    entries[:, 0].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    entries[:, 0, 0, 1] = entries[:, 0, 1, 0] = exact
    total = torch.zeros(len(exact), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        state = init_factor("factor", (len(exact), 1), 2, "float16", entries)
        store_factor(state, "factor", entries, "float16", generator)
        kept = state["factor"].flatten()
        nearest = exact.half()
        steps = (kept.view(torch.int16).int() - nearest.view(torch.int16).int()).abs()
        assert ((steps <= 1) | (kept == 0)).all()
        assert (kept == nearest)[:3].all()
        total += kept.double()
    spacing = (2.0 ** (torch.frexp(exact).exponent.clamp_min(-13) - 11)).double()
    assert ((total / 400 - exact.double()).abs() < 0.08 * spacing).all()


@pytest.mark.parametrize("cls", RULES)
@pytest.mark.parametrize("storage", FACTOR_STORAGE)
@pytest.mark.parametrize("policy", POLICIES)
def test_planned_bytes_are_those_of_a_real_step(cls, storage: str, policy: str) -> None:
    params, optimizer = make(cls, factor_storage=storage, refresh=policy)
    planned = estimate(optimizer)
    run(params, optimizer, range(2))
    measured = sum(v.nbytes for entry in optimizer.state_dict()["state"].values() for v in entry.values())
    assert planned.matrix_state_bytes + planned.aux_state_bytes == measured


def test_a_side_above_the_limit_really_has_no_factor() -> None:
    p = nn.Parameter(torch.zeros(8, 200))
    optimizer = hf_emopt.SOAP([p], max_preconditioner_dim=64)
    p.grad = torch.randn(8, 200)
    optimizer.step()
    held = {k: tuple(v.shape) for k, v in optimizer.state[p].items() if k.startswith(("factor", "basis"))}
    assert held == {"factor.0.0.0": (1, 1, 8, 8), "basis.0.0.0": (1, 1, 8, 8)}


def test_low_precision_factors_are_smaller() -> None:
    sizes = {}
    for storage in FACTOR_STORAGE:
        p = nn.Parameter(torch.zeros(128, 128))
        optimizer = hf_emopt.SOAP([p], factor_storage=storage)
        p.grad = torch.randn(128, 128)
        optimizer.step()
        sizes[storage] = sum(v.nbytes for k, v in optimizer.state[p].items() if k.startswith("factor")) / (
            2 * 128 * 128
        )
    bytes_per_element = {"float32": 4.0, "packed": 2.0, "bfloat16": 1.0, "float16": 1.0, "int8": 0.5}
    assert sizes == pytest.approx(bytes_per_element, abs=0.05)


@pytest.mark.parametrize("cls", RULES)
def test_conv_expert_and_fused_weights_go_the_same_way_as_with_muon(cls) -> None:
    conv = nn.Conv2d(8, 6, 3, bias=False)
    optimizer = cls(nn.Sequential(conv), lr=0.1)
    conv.weight.grad = torch.randn_like(conv.weight)
    optimizer.step()
    assert optimizer.param_groups[0]["units"][0][0][1] == (6, 8, 3, 3)
    factor = optimizer.state[conv.weight]["factor.0.1.0"]
    assert factor.shape == (1, 1, 72, 72)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    optimizer = cls(model, lr=0.1)
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    stack.grad = torch.randn_like(stack)
    optimizer.step()
    assert optimizer.state[stack]["factor.0.0.0"].shape == (3, 1, 24, 24)
    assert optimizer.transform_count == 6


@pytest.mark.parametrize("cls", RULES)
def test_a_shorter_period_refreshes_every_side_in_time(cls) -> None:
    """A slot of the old period may lie past the new one, where it would never come."""
    params, optimizer = make(cls, precondition_frequency=10, refresh="staggered")
    run(params, optimizer, range(3))
    optimizer.param_groups[0]["precondition_frequency"] = 2
    run(params, optimizer, range(3, 4))
    assert {slot for pieces in optimizer.context.schedule.steps.values() for slot in pieces} <= {0, 1}
