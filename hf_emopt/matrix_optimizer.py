"""The hall where the three questions meet: what an update is, which parameters are matrices, and where they lie."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_emopt.distributed.layout import check_layout
from hf_emopt.distributed.plan import (
    MAX_BUCKET_NUMEL,
    Batch,
    Bucket,
    Plan,
    PlannedParameter,
    make_plan,
)
from hf_emopt.distributed.slots import Matrix, assign_slots
from hf_emopt.groups import GroupBuilder, ParamsArgument, describe_torch_group, unpack_units
from hf_emopt.routing.route import ParameterRoute, RouteTable, coverage_warning
from hf_emopt.rules.base import Clock, Group, MatrixRule
from hf_emopt.rules.elementwise import adamw_step, apply_updates, init_adamw_state, validate_adamw
from hf_emopt.rules.masters import LOW_PRECISION_WEIGHTS, needs_master
from hf_emopt.state import STATE_VERSION, load_into, matched

__all__ = ["MatrixOptimizer"]

State = dict[str, Tensor]


class MatrixOptimizer(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` that gives matrices to a rule and everything else to AdamW.

    Args:
        params: a model; an iterable of ``(name, parameter)``; an iterable of parameters; or groups of these, where
            ``"kind": "matrix"`` or ``"aux"`` may say what a group is. Only a model can be routed by module type.
        rule: the update of a matrix.
        matrix_defaults: ``lr``, ``weight_decay`` and the rule's hyperparameters.
        aux_defaults: ``lr``, ``weight_decay``, ``betas``, ``eps`` of AdamW for the other parameters.
        matrix_modules, aux_modules, per_head: see :func:`hf_emopt.route_parameters`.
        allow_no_matrices: accept a model in which nothing is a matrix.
        skip_nonfinite: leave weights and state untouched in a step with a gradient that is not finite. Decided on the
            device, without a host sync; read :attr:`skipped_steps` for their number.

    Raises:
        ValueError: when a hyperparameter is out of range, nothing is left to train, or no parameter is a matrix.
    """

    matrix_option: ClassVar[str] = "matrix_modules"
    """What the optimizer's own argument for ``matrix_modules`` is called, for messages."""

    def __init__(
        self,
        params: ParamsArgument,
        rule: MatrixRule,
        matrix_defaults: Group,
        aux_defaults: Group,
        *,
        matrix_modules: str | Sequence[str] | None = None,
        aux_modules: str | Sequence[str] | None = None,
        per_head: bool = False,
        allow_no_matrices: bool = False,
        skip_nonfinite: bool = True,
    ) -> None:
        self.rule = rule
        self.skip_nonfinite = skip_nonfinite
        self.transform_count = 0
        self._skipped: dict[torch.device, Tensor] = {}
        self._plan: Plan | None = None
        self._planned_for: tuple[Any, ...] = ()
        self._unit_states: dict[tuple[int, int], State] = {}
        self._slots: dict[Matrix, tuple[int, ...]] = {}
        self._builder = GroupBuilder(
            {
                "matrix": {"state_version": STATE_VERSION, "rule": rule.name, **matrix_defaults},
                "aux": {"state_version": STATE_VERSION, **aux_defaults},
            },
            matrix_modules,
            aux_modules,
            per_head,
        )
        self._routes: list[ParameterRoute] = []
        try:
            groups, table = self._builder.build(params)
        except ValueError as error:  # routing speaks of matrix_modules
            raise ValueError(str(error).replace("matrix_modules", self.matrix_option)) from error
        # torch fills defaults into every group; what belongs to one kind is filled in by the builder.
        super().__init__(groups, {"lr": matrix_defaults["lr"], "weight_decay": matrix_defaults["weight_decay"]})
        self._routes = list(table)
        if not table.matrices and not allow_no_matrices:
            raise ValueError(_no_matrices_message(table, rule.name, self.matrix_option))
        message = coverage_warning(table) if table.matrices else None
        if message:
            warnings.warn(message.replace("matrix_modules", self.matrix_option), stacklevel=3)

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group (``{"params": ...}`` as the constructor takes it); a mixed one becomes one group of each kind."""
        routes: list[ParameterRoute] = []
        if "state_version" in param_group and all(isinstance(p, tuple) for p in param_group["params"]):  # the builder's
            complete = [param_group]
        else:  # a group of the user's, or a copy of one of ours
            complete, routes = self._builder.from_group(param_group)
        for group in complete:
            self._validate(group)
            super().add_param_group(group)
        self._routes.extend(routes)
        self._plan = None

    def _validate(self, group: Group) -> None:
        for key in ("lr", "weight_decay"):
            value = group[key]
            if not isinstance(value, (int, float, Tensor)) or not 0.0 <= float(value) < math.inf:
                prefix = "aux_" if group["kind"] == "aux" and value is not self.defaults[key] else ""
                raise ValueError(f"{prefix}{key}={value!r} must be a finite number that is not negative")
        known = {name for other in self.param_groups for name in other["param_names"]}
        for name, _ in group["params"]:
            if name in known:
                raise ValueError(
                    f"two parameters are named {name!r}; names identify state in checkpoints, so make them unique"
                )
        if group["low_precision_weights"] not in LOW_PRECISION_WEIGHTS:
            raise ValueError(
                f"low_precision_weights={group['low_precision_weights']!r} is not one of {', '.join(LOW_PRECISION_WEIGHTS)}"
            )
        for name, param in group["params"]:
            if not param.dtype.is_floating_point:
                raise ValueError(f"{name} has dtype {param.dtype}; only real floating-point parameters can be trained")
            if group["low_precision_weights"] == "stochastic" and param.dtype is torch.float16:
                raise ValueError(
                    f"{name} is float16, and low_precision_weights='stochastic' rounds to bfloat16; use 'split'"
                )
        if group["kind"] == "matrix":
            self.rule.validate(group)
        else:
            validate_adamw(group)

    @property
    def routes(self) -> RouteTable:
        """Which parameter goes where, and why."""
        return RouteTable(self._routes)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite. Reading it waits for the device."""
        return max((int(count) for count in self._skipped.values()), default=0)

    def explain(self) -> str:
        """The route table, the groups, what a step does and how it is batched, as text."""
        rule_line = next((self.rule.describe(g) for g in self.param_groups if g["kind"] == "matrix"), "no matrices")
        groups = "\n".join("  " + describe_torch_group(g) for g in self.param_groups)
        plan = self._current_plan()
        return f"{self.routes}\n{rule_line}\ngroups:\n{groups}\n{plan}"

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step: each matrix with a gradient is transformed once, after accumulation and clipping.

        Parameters without a gradient keep their weight and their state. Gradients are read, never written.

        Raises:
            RuntimeError: when a parameter is laid out in a way that cannot be stepped correctly here.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan()
        checks = self._finite_flags()
        for index, bucket in enumerate(plan.buckets):
            self._step_bucket(index, bucket, checks)
        for group_index, group in enumerate(self.param_groups):
            if group["kind"] == "aux":
                self._step_aux(group_index, group, checks)
        return loss

    def _current_plan(self) -> Plan:
        """The plan for the parameters as they are now; wrappers swap Parameter objects after construction."""
        # Shapes too: a wrapper may leave the Parameter and put another tensor into it.
        identity = tuple((id(p), p.shape, p.dtype, p.device) for g in self.param_groups for p in g["params"])
        if self._plan is None or identity != self._planned_for:
            self._settle()
            self._plan, self._planned_for = make_plan(self.planned_parameters()), identity
            self._unit_states.clear()
            self._slots = self._assign_slots(self._plan)
        return self._plan

    def _assign_slots(self, plan: Plan) -> dict[Matrix, tuple[int, ...]]:
        """When, within its period, each piece of a rule's periodic work is done."""
        slots: dict[Matrix, tuple[int, ...]] = {}
        for index, group in enumerate(self.param_groups):
            batches = [
                (
                    [(bucket.parameters[i].name, u, b) for (i, u), n in zip(batch.jobs, batch.sizes) for b in range(n)],
                    self.rule.periodic_costs(*batch.shape, group),
                )
                for bucket in plan.buckets
                if bucket.group == index
                for batch in bucket.batches
            ]
            slots |= assign_slots(batches, self.rule.period(group)) if batches else {}
        return slots

    def planned_parameters(self) -> list[PlannedParameter]:
        """What the planner needs to know of each matrix parameter.

        Raises:
            UnsupportedLayoutError: when a wrapper has laid a parameter out so that its matrices cannot be had.
        """
        planned = []
        for group_index, group in enumerate(self.param_groups):
            if group["kind"] != "matrix":
                continue
            for position, (name, param) in enumerate(zip(group["param_names"], group["params"])):
                units = unpack_units(group["units"][position])
                check_layout(name, param, units)
                if param.numel() == 0:
                    continue
                costs = tuple(u.shape[0] * self.rule.cost(*u.shape[1:], group) for u in units)
                tag = f"{param.dtype} {param.device}"
                planned.append(PlannedParameter(name, group_index, position, units, costs, tag))
        return planned

    def _finite_flags(self) -> dict[torch.device, Tensor]:
        """For each device, a scalar that says whether all gradients everywhere are finite; empty when not checked."""
        if not self.skip_nonfinite:
            return {}
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for group in self.param_groups:
            for name, param in zip(group["param_names"], group["params"]):
                if param.grad is None or param.grad.numel() == 0:
                    continue
                if param.grad.is_sparse:
                    raise RuntimeError(f"{name} has a sparse gradient; use an embedding with sparse=False")
                by_device[param.grad.device].append(param.grad)
        # The largest absolute value overflows only where a gradient itself has, unlike a sum of squares.
        parts = {
            device: torch.isfinite(torch.stack([n.float() for n in torch._foreach_norm(grads, ord=float("inf"))])).all()
            for device, grads in by_device.items()
            if grads
        }
        flags = {}
        for device in parts:
            flag = torch.stack([part.to(device, non_blocking=True) for part in parts.values()]).all()
            flags[device] = flag
            self._skipped.setdefault(device, torch.zeros((), device=device)).add_((~flag).float())
        return flags

    def _ready_state(self, param: Tensor, group: Group) -> State:
        state: State = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            fresh = self.rule.init_state(param, group) if group["kind"] == "matrix" else init_adamw_state(param)
            for key, value in fresh.items():
                state.setdefault(key, value)
        return state

    def _generator(self, group_index: int, group: Group, device: torch.device) -> torch.Generator | None:
        """Noise for stochastic rounding: a function of the step, so that replicas agree and a resumed run repeats it."""
        if group["low_precision_weights"] != "stochastic":
            return None
        group["rounding_seed"] = group.get("rounding_seed", 0) + 1
        return torch.Generator(device).manual_seed(group["rounding_seed"] * 65_537 + group_index)

    # ------------------------------------------------------------------ matrices

    def _step_bucket(self, index: int, bucket: Bucket, checks: dict[torch.device, Tensor]) -> None:
        group = self.param_groups[bucket.group]
        params = [group["params"][p.position] for p in bucket.parameters]
        present = [i for i, p in enumerate(params) if p.grad is not None]
        if not present:
            return
        states = [self._ready_state(params[i], group) for i in present]
        chosen = [params[i] for i in present]
        ok = checks.get(chosen[0].device)
        messages = self.rule.accumulate(chosen, [p.grad for p in chosen], states, group, ok)  # type: ignore[misc]
        updates = [torch.empty(m.shape, dtype=m.dtype, device=m.device) for m in messages]
        row_of = {i: k for k, i in enumerate(present)}
        rounds = [self._next_round(state) for state in states]
        for batch_index, batch in enumerate(bucket.batches):
            jobs = [(row_of[i], bucket.parameters[i].units[u]) for i, u in batch.jobs if i in row_of]
            storage = self._unit_storage((index, batch_index), bucket, batch, group)
            whole = len(present) == len(params)
            rows = [] if whole else _rows_of(batch, row_of)
            if not whole:
                self.rule.settle((index, batch_index), storage)
            unit_state = storage if whole else {key: value[rows] for key, value in storage.items()}
            x = _stack([unit.extract(messages[k]) for k, unit in jobs])
            clock = self._clock(bucket, batch, rounds, row_of, (index, batch_index) if whole else None)
            out = self.rule.transform(x, unit_state, group, ok, clock)
            self.transform_count += x.shape[0]
            if not whole:
                for key, value in unit_state.items():
                    storage[key][rows] = value
            for part, (k, unit) in zip(out.split([unit.shape[0] for _, unit in jobs]), jobs):
                unit.insert(updates[k], part)
        counted = torch.ones((), device=chosen[0].device) if ok is None else ok.float()
        # A list, since adding one tensor to many makes torch wait for the device to read it.
        torch._foreach_add_([s["step"] for s in states], [counted] * len(states))
        warmup = self.rule.warmup_rounds(group)
        moving = [k for k in range(len(chosen)) if rounds[k] > warmup]
        apply_updates(
            [chosen[k] for k in moving],
            [updates[k] for k in moving],
            [states[k] for k in moving],
            group,
            ok,
            self._generator(index, group, chosen[0].device),
        )

    def _next_round(self, state: State) -> int:
        """Counts the optimizer steps that a parameter took part in, on the host, for rules with a schedule."""
        if not self.rule.scheduled:
            return 1
        state.setdefault("rounds", torch.zeros((), dtype=torch.int64)).add_(1)
        return int(state["rounds"])

    def _clock(
        self, bucket: Bucket, batch: Batch, rounds: list[int], row_of: dict[int, int], key: tuple[int, int] | None
    ) -> Clock:
        """Rounds and slots of the matrices of a batch whose parameter has a gradient."""
        if not self.rule.scheduled:
            return Clock((1,) * batch.count)
        jobs = [(i, u, size) for (i, u), size in zip(batch.jobs, batch.sizes) if i in row_of]
        return Clock(
            tuple(rounds[row_of[i]] for i, _, size in jobs for _ in range(size)),
            tuple(self._slots[bucket.parameters[i].name, u, b] for i, u, size in jobs for b in range(size)),
            key,
        )

    def _unit_storage(self, key: tuple[int, int], bucket: Bucket, batch: Batch, group: Group) -> State:
        """State of a batch of matrices, one tensor for all of them; ``self.state`` holds views of it by parameter.

        Made when a batch is first met, from what ``self.state`` has (a loaded checkpoint) or from the rule's start.
        """
        if key in self._unit_states:
            return self._unit_states[key]
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for i, u in batch.jobs:
            planned = bucket.parameters[i]
            param = group["params"][planned.position]
            known = self.state.get(param, {})
            for name, value in self.rule.init_unit_state(planned.units[u].shape, group, param).items():
                parts[name].append(known.get(f"{name}.{u}", value))
        storage = {name: torch.cat(values) for name, values in parts.items()}
        for name, value in storage.items():
            for view, (i, u) in zip(value.split(batch.sizes), batch.jobs):
                self.state[group["params"][bucket.parameters[i].position]][f"{name}.{u}"] = view
        self._unit_states[key] = storage
        return storage

    # ------------------------------------------------------------------ everything else

    def _step_aux(self, group_index: int, group: Group, checks: dict[torch.device, Tensor]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for name, param in zip(group["param_names"], group["params"]):
            if param.grad is not None:
                check_layout(name, param, ())
                alike[param.device, param.dtype].append(param)
        for (device, _), members in alike.items():
            for params in _chunks(members, MAX_BUCKET_NUMEL) if needs_master(members[0]) else [members]:
                states = [self._ready_state(p, group) for p in params]
                grads = [p.grad for p in params]
                generator = self._generator(group_index, group, device)
                adamw_step(params, grads, states, group, checks.get(device), generator)  # type: ignore[arg-type]

    # ------------------------------------------------------------------ checkpoints

    def _settle(self) -> None:
        """Finishes what a rule computes in the background, so that ``self.state`` says all there is to say."""
        for key, storage in self._unit_states.items():
            self.rule.settle(key, storage)

    def state_dict(self) -> dict[str, Any]:
        """State and groups by position, as torch's; groups hold ``param_names``."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict()``; dtypes of state are kept, and hyperparameters are the checkpoint's.

        Raises:
            ValueError: when groups, names or shapes do not fit; the optimizer is then as it was.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        by_name = matched(self, state_dict)
        self._settle()
        load_into(self, by_name, state_dict["param_groups"])
        self._plan = None
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is rebuilt at the next step; torch's own would drop the routes and the rule.

        Hooks are dropped, as torch does, and so is the ``step`` that a scheduler puts on the object: it is bound to the
        original, which a copy would step in its own stead.
        """
        self._settle()
        kept = {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
        return {**kept, "_plan": None, "_planned_for": (), "_unit_states": {}}


def _rows_of(batch: Batch, row_of: dict[int, int]) -> list[int]:
    """Indices, in the batch, of the matrices whose parameter is among the given ones."""
    rows: list[int] = []
    offset = 0
    for (i, _), size in zip(batch.jobs, batch.sizes):
        if i in row_of:
            rows.extend(range(offset, offset + size))
        offset += size
    return rows


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunks(params: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Runs of parameters of bounded size, so that float32 copies of 16-bit weights never all exist at once."""
    chunks: list[list[Tensor]] = [[]]
    size = 0
    for param in params:
        if chunks[-1] and size + param.numel() > limit:
            chunks.append([])
            size = 0
        chunks[-1].append(param)
        size += param.numel()
    return chunks


def _no_matrices_message(table: RouteTable, rule: str, matrix_option: str) -> str:
    shown = "\n".join(f"  {r.name} {r.shape}: {r.reason}" for r in list(table)[:8])
    flat = all(len(r.shape) < 2 for r in table)
    hint = (
        " Every parameter is one-dimensional: FSDP1 and ZeRO flatten parameters; create the optimizer from the model "
        "before it is wrapped, under FSDP2 or DDP."
        if flat
        else ""
    )
    return (
        f"no trainable parameter is a matrix for {rule}, so everything would be trained by AdamW.{hint} Name the matrices "
        f"with {matrix_option}, or pass allow_no_matrices=True if AdamW alone is meant. Trainable parameters:\n{shown}"
    )
