"""``MatrixOptimizer``: gives matrices to a rule and all other parameters to AdamW, wherever they are laid out."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_emopt.checkpoint.flat_state_dict import check_owned_runs, emitted_runs, is_runs, matched_runs, owned_runs
from hf_emopt.checkpoint.from_adamw import from_adamw, is_adamw
from hf_emopt.checkpoint.gather import keep_owned, materialize
from hf_emopt.checkpoint.matching import STATE_VERSION, loaded_state, matched
from hf_emopt.checkpoint.state_dict import consolidated, emitted, is_state_init_step, left_behind, with_low_bits
from hf_emopt.distributed.assignment import make_plan
from hf_emopt.distributed.flat_params import FlatTensor
from hf_emopt.distributed.layout import (
    LOST,
    Grid,
    Partition,
    ProcessGroupArgument,
    UnsupportedLayoutError,
    build_grids,
    whole_shape,
)
from hf_emopt.distributed.plan import Plan, PlannedParameter
from hf_emopt.distributed.planner import hyperparameters, plan_of, planned_copies, planned_matrices, world_size
from hf_emopt.distributed.rank_groups import RankGroups, check_gradients
from hf_emopt.distributed.replica_gradients import average_gradients
from hf_emopt.distributed.tensor_parallel_choice import Choice, ModeOverrides, describe
from hf_emopt.engine.context import ApplyStream, RefreshSchedule, Step, StepContext
from hf_emopt.engine.delayed_gather import DelayedUpdates, check_overlap
from hf_emopt.engine.pipeline import begin_delayed, run_step
from hf_emopt.engine.prefetch import EarlyFetch
from hf_emopt.linalg.matmul_precision import plain_arithmetic
from hf_emopt.optimizers.changed_groups import ChangedGroups, KnownParameters
from hf_emopt.optimizers.diagnostics import Diagnostics, Level, check_level
from hf_emopt.optimizers.flat_groups import Flattened
from hf_emopt.optimizers.param_groups import (
    GroupBuilder,
    ParamsArgument,
    check_lora_options,
    describe_torch_group,
    keep_parameters,
    take_in,
    warn_of_unnamed,
)
from hf_emopt.optimizers.untracked import CHECK_EVERY, UntrackedParameters
from hf_emopt.optimizers.validation import (
    check_average,
    checked_process_group,
    no_matrices_message,
    offload_place,
    transport_name,
    validate_group,
)
from hf_emopt.routing.lora import LoraMode
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.route import ParameterRoute, RouteTable, coverage_warning
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.rules.options import check_flags
from hf_emopt.rules.refresh import without_async_refresh
from hf_emopt.state.forms import OffloadState, check_state_options, describe_memory
from hf_emopt.state.offload import StateOffload
from hf_emopt.state.store import StateStore

_kind_of = attrgetter("shape", "dtype", "device")


class MatrixOptimizer(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` that gives matrices to a rule and everything else to AdamW.

    Args:
        params: a model; an iterable of ``(name, parameter)``; an iterable of parameters; or groups of these, where
            ``"kind": "matrix"`` or ``"aux"`` may say what a group is; ``(model, groups)`` routes them by module type.
            Without names, the order must be one on all ranks: it alone says which shards are of one parameter.
        rule: the update of a matrix.
        matrix_defaults: ``lr``, ``weight_decay`` and the rule's hyperparameters.
        aux_defaults: ``lr``, ``weight_decay``, ``betas``, ``eps`` of AdamW for the other parameters.
        matrix_modules, aux_modules, per_head, lora: see :func:`hf_emopt.route_parameters`.
        lora_lr_ratio: learning rate of the B factors of LoRA adapters over that of everything else of their kind (LoRA+,
            S. Hayou et al., arXiv:2402.12354); other than 1, they get groups of their own, ``lora_B`` in the logs.
        lora_defaults: hyperparameters of adapter matrices by rank, see
            :class:`~hf_emopt.optimizers.param_groups.GroupBuilder`.
        allow_no_matrices: accept a model in which nothing is a matrix.
        skip_nonfinite: leave weights and state untouched in a step with a gradient that is not finite. Decided on the
            device, without a host sync; read :attr:`skipped_steps` for their number.
        transport_dtype: of matrices on their way between ranks: ``"bfloat16"``, ``"float32"`` or ``"float64"``; ``None`` is
            bfloat16 on accelerators and float32 on the CPU.
        overlap_param_gather: where ranks hold copies of a model (DDP), updates arrive behind the next forward pass. What
            reads or writes parameters in another way than a forward pass or the model's ``state_dict`` and
            ``load_state_dict`` has to call :meth:`synchronize` first: what was put off comes on top of what it wrote.
        average_gradients: average the gradients of plain parameters over ``process_group`` at the beginning of each step,
            where nothing else does.
        process_group: the ranks that hold copies of plain parameters; ``None`` for all of them, ``"self"`` where each
            process trains a model of its own. Sharded parameters know their ranks.
        tensor_parallel_modules: modes of tensor parallelism for single parameters, ``"pattern:mode"`` with ``;`` between,
            or a mapping; the others have their group's ``"tensor_parallel"``.
        offload_state: ``"cpu"`` keeps all state in host memory between steps; see :mod:`hf_emopt.state.offload`.

    Raises:
        ImportError: when a group's ``state_dtype`` needs a library that is not there.
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
        transport_dtype: torch.dtype | str | None = None,
        overlap_param_gather: bool = False,
        average_gradients: bool = False,
        process_group: ProcessGroupArgument = None,
        tensor_parallel_modules: str | Sequence[str] | Mapping[str, str] | None = None,
        lora_lr_ratio: float = 1.0,
        lora: LoraMode = "separate",
        lora_defaults: Callable[[int], Group] | None = None,
        offload_state: OffloadState | None = None,
    ) -> None:
        check_lora_options(rule, lora, lora_lr_ratio)
        flags = {"allow_no_matrices": allow_no_matrices, "skip_nonfinite": skip_nonfinite, "per_head": per_head}
        check_flags(flags | {"overlap_param_gather": overlap_param_gather, "average_gradients": average_gradients})
        self.rule = rule
        self.mode_overrides = ModeOverrides(tensor_parallel_modules, rule.tensor_parallel_modes)
        self._choices: list[Choice] = []
        self.skip_nonfinite = skip_nonfinite
        self.transport_dtype = transport_name(transport_dtype)
        self.overlap_param_gather, self.average_gradients = overlap_param_gather, average_gradients
        self.process_group = checked_process_group(process_group)
        self.offload_state = offload_place(offload_state)
        if overlap_param_gather and not isinstance(params, nn.Module):
            raise ValueError("overlap_param_gather=True puts hooks on the model: pass the model as params")
        self._model = weakref.ref(params) if isinstance(params, nn.Module) else None
        self._delayed = DelayedUpdates()
        self._early = EarlyFetch()
        self.diagnostics_state = Diagnostics()
        """What is measured, and the figures of the last step that was; see :meth:`diagnostics`."""
        self._untracked, self._known = UntrackedParameters(), KnownParameters()
        self._skipped: dict[torch.device, Tensor] = {}
        # Of steps that a wrapper (DeepSpeed) skipped for the same reason before it came to ask for them.
        self._skipped_by_wrapper: Callable[[], int] | None = None
        self._transforms = 0
        self._context: StepContext | None = None
        self._flattened: Flattened | None = None
        self._planned_for: tuple[Any, ...] = ()
        self._cost_snapshot: list[Group] = []  # hyperparameters when owners were first assigned
        self._consolidated: dict[str, dict[str, Any]] | None = None
        self._only_initialized = False
        matrix = {"state_version": STATE_VERSION, "rule": rule.name, "tensor_parallel": "auto", **matrix_defaults}
        kinds = {"matrix": matrix, "aux": {"state_version": STATE_VERSION, **aux_defaults}}
        self._builder = GroupBuilder(kinds, matrix_modules, aux_modules, per_head, lora, lora_lr_ratio, lora_defaults)
        self._routes: list[ParameterRoute] = []
        self._given: list[tuple[int, float]] = []  # for each group, which of the user's it is of, and its learning rate
        try:
            groups, table = self._builder.build(params)
        except ValueError as error:  # routing speaks of matrix_modules
            raise ValueError(str(error).replace("matrix_modules", self.matrix_option)) from error
        # torch fills defaults into every group; what belongs to one kind is filled in by the builder.
        defaults = {key: matrix_defaults[key] for key in ("lr", "weight_decay")}
        if "momentum" in matrix_defaults if "betas" not in matrix_defaults else not matrix_defaults.get("momentum"):
            defaults["momentum"] = matrix_defaults.get("momentum", 0.0)  # without it OneCycleLR and CyclicLR refuse
        super().__init__(groups, defaults)
        self._routes = list(table)
        if average_gradients:
            check_average(self.process_group, self.param_groups)
        if not table.matrices and not allow_no_matrices:
            raise ValueError(no_matrices_message(table, rule.name, self.matrix_option))
        self.mode_overrides.check_matched([route.name for route in table.matrices])
        warn_of_unnamed(table, stacklevel=5)
        message = coverage_warning(table) if table.matrices else None
        if message:
            warnings.warn(message.replace("matrix_modules", self.matrix_option), stacklevel=4)

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group (``{"params": ...}`` as the constructor takes it); a mixed one becomes one group of each kind."""
        position = len(self.user_groups)
        routes: list[ParameterRoute] = []
        if "state_version" in param_group and all(isinstance(p, tuple) for p in param_group["params"]):  # the builder's
            complete = [param_group]
        else:  # a group of the user's, or a copy of one of ours
            complete, routes = self._builder.from_group(param_group)
            warn_of_unnamed(routes, stacklevel=3)
            complete = [{**group, "user_group": position} for group in complete]
        for group in complete:
            given = group.pop("user_group", 0)
            validate_group(group, self.rule, self.param_groups, self.defaults)
            has_momentum = "momentum" in group
            super().add_param_group(group)
            self._known.note(self.param_groups[-1:])
            if not has_momentum:  # which torch took from the defaults
                group.pop("momentum", None)
            self._given.append((given, float(group["initial_lr"] if "initial_lr" in group else group["lr"])))
        self._routes.extend(routes)
        self._planned_for = ()
        self._consolidated = None  # which knows nothing of the new parameters

    @property
    def user_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each group as it was given, the positions in ``param_groups`` of what was made of it: a mixed group became two,
        and one with nothing to train an empty one. A model, or a list without groups, counts as one group."""
        given = [index for index, _ in self._given]
        return tuple(tuple(i for i, g in enumerate(given) if g == index) for index in range(max(given, default=-1) + 1))

    def expand(self, values: Sequence[Any]) -> list[Any]:
        """One value for each of ``param_groups``, which schedulers take, from one for each of :attr:`user_groups`:
        ``LambdaLR(optimizer, optimizer.expand([f, g]))``. ``ValueError`` for another number of them."""
        if len(values) != len(self.user_groups):
            raise ValueError(f"{len(values)} values for the {len(self.user_groups)} groups that there were given")
        return [values[index] for index, _ in self._given]

    @plain_arithmetic()
    def refresh_parameters(self, model: nn.Module | None = None) -> tuple[list[str], list[str]]:
        """Follows a model that has got or lost parameters since the optimizer was built, or resized some of them.

        New trainable parameters are routed as the constructor would and join the group of their kind with its
        hyperparameters as they are now; parameters that the model no longer has are dropped with their state. One of another
        shape than before (``resize_token_embeddings``) is dropped and added, so its state starts anew, also for the rows that
        stay. Those that are only frozen, such as adapters that are switched off, stay with their state. All ranks call it
        together.

        Args:
            model: the model, as it was given to the constructor; ``None`` for that one.

        Returns:
            Names of the parameters that were added and of those that were removed; both have those that were resized.

        Raises:
            ValueError: the optimizer was not built from a model, and none is given; or what the constructor raises.
            UnsupportedLayoutError: a group's lists were edited in place; or under DeepSpeed, which has flattened parameters.
        """
        model = model if model is not None else self._model() if self._model is not None else None
        if model is None:
            raise ValueError("the optimizer was built from parameters, so it knows no model: pass the model")
        self.synchronize()
        if self._flattened is not None:
            raise UnsupportedLayoutError(
                "DeepSpeed has flattened the parameters that there were: build a new optimizer and engine for this model"
            )
        changed = self._known.changed(self.param_groups)
        built, table = self._builder.build(model)
        for group in built:
            validate_group(group, self.rule, [], self.defaults)
        whole = self._leave_behind(changed)
        self._context, self._consolidated, self._planned_for = None, None, ()
        known = {id(p) for g in self.param_groups for n, p in zip(g["param_names"], g["params"]) if n not in changed}
        removed = keep_parameters(self.param_groups, known & {id(param) for param in model.parameters()})
        current = {param for group in self.param_groups for param in group["params"]}
        for param in [param for param in self.state if param not in current]:
            del self.state[param]
        added, new_kinds = take_in(self.param_groups, built, known)
        for group in new_kinds:
            self._add_scheduled(group)
        self._known = KnownParameters()
        self._known.note(self.param_groups)
        routes = [route for route in self._routes if route.name not in set(removed)]
        self._routes = [*routes, *(route for route in table if route.name in set(added))]
        if whole is not None:
            context = self.current_context()
            if context.ranks.world_size > 1:
                keep_owned(context, {name: state for name, state in whole.items() if name not in set(removed)})
                materialize(context)
        return added, removed

    def _add_scheduled(self, group: Group) -> None:
        """Adds a group of a kind that there was none of, as far along the schedule as the others are."""
        scheduled = [g for g in self.param_groups if float(g.get("initial_lr", 0.0)) > 0.0]
        if scheduled:
            relative = float(scheduled[0]["lr"]) / float(scheduled[0]["initial_lr"])
            group = {**group, "initial_lr": group["lr"], "lr": group["lr"] * relative}
        self.add_param_group(group)
        if scheduled:
            warnings.warn(
                f"the optimizer has got a group {group['name']!r} that it had not: a scheduler knows the groups that there "
                "were when it was made, and torch's stop at another number of them. Make the scheduler anew, with last_epoch "
                "as the old one's",
                stacklevel=3,
            )

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State by parameter. With ``offload_state``, asking for it waits until all of it is on the host; in any case, the
        current stream waits for refreshes that run beside what follows a step.

        So what is read is what the last step left, and what is written is what the next one starts from, also where it is
        written through ``.data`` or NumPy. After every step ask anew: a tensor that was kept from before may still be
        written to when the step has returned.
        """
        context = self.context
        if context is not None:
            if context.store.offload is not None:
                context.store.offload.settle()
            self.rule.join()
        return vars(self)["state"]  # type: ignore[no-any-return]

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if self.context is not None:
            snapshot = self._cost_snapshot  # owners stay who they are
            self._forget_plan()
            self._cost_snapshot = snapshot
        vars(self)["state"] = value

    @property
    def routes(self) -> RouteTable:
        """Which parameter goes where, and why."""
        return RouteTable(self._routes)

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because a gradient was not finite. Reading it waits for the device."""
        by_wrapper = 0 if self._skipped_by_wrapper is None else self._skipped_by_wrapper()
        return by_wrapper + max((int(count) for count in self._skipped.values()), default=0)

    def explain(self) -> str:
        """The route table, the groups, what a step does and how it is batched, as text."""
        with self.as_built():
            rule_line = next((self.rule.describe(g) for g in self.param_groups if g["kind"] == "matrix"), "no matrices")
            groups = "\n".join("  " + describe_torch_group(g) for g in self.param_groups)
            memory = describe_memory(self.rule, self.param_groups, self.offload_state)
            if self._context is not None and self._planned_for == self._identity():
                plan = self._context.plan
            else:  # not the context's: to make a context in the middle of a run takes all ranks
                plan = self._new_plan(self._cost_snapshot)
        return "\n".join(
            part
            for part in (str(self.routes), rule_line, "groups:", groups, memory, str(plan), describe(self._choices))
            if part
        )

    def _new_plan(self, cost_snapshot: list[Group]) -> Plan:
        grids = self._grids()
        matrices, offloads = self.planned_parameters(grids, cost_snapshot), self.offload_state is not None
        return plan_of(matrices, self.rule, self.param_groups, world_size(grids), offloads, self._overlaps)

    # ------------------------------------------------------------------ wrappers that flatten parameters

    def attach_wrapper(
        self, flats: Sequence[FlatTensor] | None = None, skipped_steps: Callable[[], int] | None = None
    ) -> None:
        """Follows a wrapper (DeepSpeed's ZeRO) that puts other tensors into the groups, or skips steps by itself.

        Args:
            flats: the flat tensors that it puts there, whose gradients it checks; ``None`` where it puts none.
            skipped_steps: gives the number of steps that it has skipped.
        """
        if skipped_steps is not None:
            self._skipped_by_wrapper = skipped_steps
        if flats is not None:
            self._flattened = Flattened(self.param_groups, flats, checked=True)

    @property
    def is_flattened(self) -> bool:
        """Whether a wrapper has flattened the parameters: then groups hold flat tensors outside of :meth:`as_built`."""
        return self._flattened is not None

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """Inside, groups have all parameters and their state, also where a wrapper has put flat tensors in their place."""
        flattened = self._flattened
        if flattened is None or flattened.is_exposed:
            yield
            return
        shown, shown_state = self.param_groups, self.state
        entered = self.param_groups = flattened.expose(shown)
        vars(self)["state"] = flattened.state  # not by the property, which would forget the plan
        try:
            yield
        finally:
            flattened.hide(list(self.param_groups), self.state)
            # A loaded checkpoint has put other groups in their place.
            self.param_groups = shown if self.param_groups is entered else flattened.groups
            vars(self)["state"] = shown_state

    @plain_arithmetic()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies whole weights into the parameters, sharded, flattened or not.

        Args:
            weights: by the names that the optimizer knows; others are ignored.

        Raises:
            ValueError: naming parameters that are missing, or that have another shape; nothing was changed by then.
        """
        missing = [n for group in self.param_groups for n in group["param_names"] if n not in weights]
        if missing:
            raise ValueError(f"no weights of {', '.join(missing[:5])} ({len(missing)} trained parameters in all)")
        with self.as_built():
            named = [(n, p) for group in self.param_groups for n, p in zip(group["param_names"], group["params"])]
            for name, param in named:
                if tuple(weights[name].shape) != whole_shape(param):
                    raise ValueError(
                        f"{name} has shape {tuple(weights[name].shape)}, the parameter {whole_shape(param)}"
                    )
            for name, param in named:
                if isinstance(param, Partition):
                    start, stop = param.span
                    param.local.copy_(weights[name].reshape(-1)[start:stop])
                else:
                    param.copy_(weights[name])

    @property
    def transform_count(self) -> int:
        """Matrices that this process has transformed so far; summed over ranks, each matrix counts once a step."""
        return self._transforms + (0 if self._context is None else self._context.counts["transforms"])

    def diagnostics(self, level: Level = "layers") -> AbstractContextManager[dict[str, float]]:
        """Measures the last step that is taken inside; the dictionary it gives is filled at the end of the block.

        .. code-block:: python

            with optimizer.diagnostics() as values:
                optimizer.step()
            values["emopt/muon/update_rms"]

        Where ranks share parameters all of them must enter, and the first one has the values. See
        :mod:`hf_emopt.optimizers.diagnostics` for what is measured; weights are the same with and without it.

        Args:
            level: ``"summary"`` for figures by rule, ``"layers"`` for those of each parameter too.

        Raises:
            ValueError: for another level.
            RuntimeError: when no step was taken inside.
        """
        check_level(level, "level")
        return self._measuring(level)

    @contextmanager
    def _measuring(self, level: Level) -> Iterator[dict[str, float]]:
        values: dict[str, float] = {}
        self.diagnostics_state.start()
        try:
            yield values
        except BaseException:
            self.diagnostics_state.stop()
            raise
        if not self.read_diagnostics(level):
            raise RuntimeError("diagnostics() measured nothing: call optimizer.step() inside the with block")
        values.update(self.diagnostics_state.values)

    @plain_arithmetic()
    def read_diagnostics(self, level: Level) -> bool:
        """Reads what was measured since ``diagnostics_state.start()`` into ``diagnostics_state.values``. Collective.

        Returns:
            ``False`` when no step was measured.
        """
        by_wrapper = 0 if self._skipped_by_wrapper is None else self._skipped_by_wrapper()
        return self.diagnostics_state.read(level, self._skipped, by_wrapper)

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step: each matrix with a gradient is transformed once, after accumulation and clipping.

        Parameters without a gradient keep their weight and their state. Gradients are read, and written only with
        ``average_gradients``. Where several ranks share parameters, all of them must call it.

        Raises:
            RuntimeError: when a parameter is laid out in a way that cannot be stepped correctly here, or ranks differ in
                what they would step or in the gradients of copies.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        if self._flattened is None:
            self._step(None)
            return loss
        flats = [param for group in self.param_groups for param in group["params"]]
        self._flattened.check(flats)
        with self.as_built(), self._flattened.with_gradients(flats) as names:
            self._step(names)
        return loss

    @plain_arithmetic()
    def _step(self, among: frozenset[str] | None) -> None:
        """A step of the parameters with these names, or of all."""
        flattened, groups = self._flattened, self.param_groups
        # First: a GPU checks all numbers while the host goes through all parameters.
        gradients = check_gradients(groups, self.skip_nonfinite and not (flattened is not None and flattened.checked))
        context, overlaps = self.current_context(), self._overlaps
        if not context.ranks.is_open:
            context.open_ranks()
        if self.average_gradients:
            gradients = replace(gradients, present=average_gradients(context.ranks.copies, gradients.present))
        self._consolidated, self._only_initialized = None, False
        if among is None and not any("step" in state for state in vars(self)["state"].values()):
            self._only_initialized = is_state_init_step(context, groups)
            if self._only_initialized:
                return
        if context.store.offload is not None:
            context.store.offload.begin()
            self._early.count()
        self._changed.check()
        if self.rule.scheduled:
            context.schedule.follow_periods()
        observer, consensus = self.diagnostics_state.observer, context.ranks.consensus
        waits = observer is not None and consensus.group is not None
        with observer.stopwatch.running(consensus.device) if waits and observer is not None else nullcontext():
            verdict = (consensus if among is None else consensus.subset(among)).agree(
                gradients.finite, gradients.present
            )
        if context.ranks.world_size > 1 and verdict.ok is not None:
            context.ranks.compare_gradients(verdict.ok)
        if observer is not None:
            observer.begin(context, verdict.ok, among)
        untracked = self._untracked
        if among is None and (verdict.present != untracked.present or untracked.steps >= CHECK_EVERY):
            untracked.check(None if self._model is None else self._model(), groups, verdict.present)
        untracked.steps += 1
        if verdict.ok is not None:
            if verdict.ok.device not in self._skipped:
                self._skipped[verdict.ok.device] = torch.zeros((), dtype=torch.float32, device=verdict.ok.device)
            self._skipped[verdict.ok.device].add_(~verdict.ok)
        for group in groups:
            if group["low_precision_weights"] == "stochastic" or group["state_dtype"] == "bfloat16":
                group["rounding_seed"] = group.get("rounding_seed", 0) + 1
        if overlaps and context.ranks.world_size > 1:
            # A scheduler may change a learning rate before an update that was put off is applied.
            applied = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in groups]
            begin_delayed(Step(context, verdict, applied, observer), self._delayed)
        else:
            # Whoever measures reads the state of each bucket. Flat parameters are somebody else's between steps.
            run_step(Step(context, verdict, groups, observer, observer is None), flattened is None)

    @property
    def _overlaps(self) -> bool:
        """Whether updates are put off; a copy of the optimizer has no model to put hooks on, and does without."""
        return self.overlap_param_gather and self._model is not None and self._model() is not None

    def synchronize(self) -> None:
        """Finishes updates that ``overlap_param_gather`` has put off, so that all parameters are as after the step; and makes
        the current stream wait for refreshes that run beside what follows a step, so that all state is."""
        if self.overlap_param_gather:
            self._delayed.finish()
        if self._context is not None and self.rule.scheduled:
            self.rule.join()

    @property
    def context(self) -> StepContext | None:
        """The plans of the last step, their ranks and state, to be read; ``None`` before the first."""
        return vars(self).get("_context")

    def current_context(self) -> StepContext:
        """The plans of the parameters as they are now: wrappers swap Parameter objects after construction."""
        identity = self._identity()
        if self._context is None or identity != self._planned_for:
            self._context, self._planned_for = self._make_context(), identity
        return self._context

    def _identity(self) -> tuple[Any, ...]:
        # Shapes too: a wrapper may leave the Parameter and put another tensor into it.
        params = [p for g in self.param_groups for p in g["params"]]
        # A DTensor's layout says shape and dtype, is one object as long as nothing is swapped, and takes a tenth of the time.
        kinds = [(p._spec, p._local_tensor.device) if type(p) is DTensor else _kind_of(p) for p in params]
        sizes = [(len(g["params"]), len(g["param_names"])) for g in self.param_groups]
        return (*map(id, params), *kinds, *sizes)

    def _make_context(self) -> StepContext:
        overlaps, groups = self._overlaps, self.param_groups
        model = self._model() if overlaps and self._model is not None else None
        if model is not None:
            check_overlap(model, groups)
        grids, offloads = self._grids(), self.offload_state is not None
        if self.average_gradients:
            check_average(self.process_group, groups)
        whole = self._leave_behind()
        self._cost_snapshot = self._cost_snapshot or hyperparameters(groups)
        check_state_options(self.rule, groups, self.offload_state)
        self.rule.forget()
        params, ranks = [list(group["params"]) for group in groups], RankGroups(grids, own_replica_groups=overlaps)
        matrices = self.planned_parameters(grids, self._cost_snapshot)
        plan = plan_of(matrices, self.rule, groups, ranks.world_size, offloads, overlaps)
        offload = StateOffload() if offloads else None
        cuda = {p.device for members in params for p in members if p.device.type == "cuda"}
        apply_stream = ApplyStream(cuda) if cuda and ranks.world_size > 1 and offload is None else None
        aux_plan = make_plan(planned_copies(groups, grids), forward_order=overlaps)
        store = StateStore(self.rule, groups, params, self.state, grids, offload)
        schedule, dtype = RefreshSchedule(self.rule, groups, plan), self.transport_dtype
        context = StepContext(self.rule, groups, params, plan, aux_plan, ranks, store, schedule, dtype, apply_stream)
        self._changed = ChangedGroups(self.rule, groups, self._builder.kind_of, [rate for _, rate in self._given])
        if whole is not None:
            keep_owned(context, whole)
        self._delayed.attach(model, (p for members in params for p in members))
        self._early.attach(context, [route.name for route in self._routes])
        return context

    def _leave_behind(self, without: Container[str] = ()) -> dict[str, dict[str, Any]] | None:
        """State by name, for the next plan; ``None`` where there is none."""
        context = self._context
        if context is None:
            return None
        context.finish_pending()
        self._transforms += context.counts["transforms"]
        return left_behind(context, self.state, self.param_groups, without)

    def _grids(self) -> dict[str, Grid]:
        has_state = any("step" in state for state in vars(self)["state"].values())
        self._known.changed(self.param_groups, "all" if has_state else "matrices")
        self._known.note(self.param_groups)
        named = [(n, p) for g in self.param_groups for n, p in zip(g["param_names"], g["params"])]
        return build_grids(named, self.process_group)

    def planned_parameters(
        self, grids: dict[str, Grid] | None = None, cost_snapshot: Sequence[Group] | None = None
    ) -> list[PlannedParameter]:
        """What the planner needs to know of each matrix parameter.

        Args:
            grids: the ranks of every parameter, by name; ``None`` for one process.
            cost_snapshot: hyperparameters that decide on costs; ``None`` for those of the first plan.
        """
        snapshot = self._cost_snapshot if cost_snapshot is None else cost_snapshot
        planned, self._choices = planned_matrices(
            self.rule, self.param_groups, grids, self.mode_overrides, self.transport_dtype, snapshot
        )
        return planned

    def matrix_views_of_slices(self) -> dict[str, tuple[MatrixView, ...]]:
        """For parameters whose slices are matrices of their own, these matrices."""
        groups = [g for g in self.param_groups if g["kind"] == "matrix"]
        if not any(
            self.mode_overrides.mode(n, g["tensor_parallel"]) == "blockwise" for g in groups for n in g["param_names"]
        ):
            return {}
        return {p.name: p.matrix_views for p in self.planned_parameters(self._grids()) if p.whole_shapes}

    # ------------------------------------------------------------------ checkpoints

    @plain_arithmetic()
    def consolidate_state_dict(self, to: int | Literal["first"] | None = "first") -> None:
        """Collective: brings the state that lies with owners to one rank, whose :meth:`state_dict` is then whole.

        Good until the next step or :meth:`add_param_group`. Where nothing lies with owners (one process, FSDP2) it does
        nothing.

        Args:
            to: global rank; ``"first"`` is rank 0, or the first one of a ``process_group`` without it; ``None`` for all, as
                ``torch.distributed.checkpoint`` needs it.

        Raises:
            ValueError: on all ranks, when ``to`` is not among those that share the parameters.
        """
        self.synchronize()
        if self._flattened is None:  # else a checkpoint has a file for each rank
            self._consolidated = consolidated(self.current_context(), to)

    @plain_arithmetic()
    def state_dict(self) -> dict[str, Any]:
        """State and groups by position, as torch's; groups hold ``param_names``.

        On sharded parameters a collective for rules that have state of whole matrices, whose tensors come out sharded. On
        ranks that :meth:`consolidate_state_dict` did not bring the state to, groups alone.

        Raises:
            RuntimeError: when state lies with owners and :meth:`consolidate_state_dict` was not called since the last step
                or the last group that was added.
        """
        self.synchronize()
        # Of those that others registered: torch would call them on what it makes, of which state is taken from here.
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            with self.as_built():
                made = self._emitted(super().state_dict)
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for hook in hooks.values():
            changed = hook(self, made)
            made = made if changed is None else changed
        return made

    @plain_arithmetic()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole ``state_dict()``, of any layout, or one of ``torch.optim.AdamW``; each rank keeps its part.

        dtypes of state are kept, and hyperparameters are the checkpoint's. From AdamW, matrices start with fresh state, the
        auxiliary parameters keep their moments, and hyperparameters are this optimizer's.

        Raises:
            ValueError: when groups, names or shapes do not fit; the optimizer is then as it was.
            UnsupportedLayoutError: a parameter has another shape than when the optimizer took it in; as above.
        """
        self.synchronize()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = without_async_refresh(state_dict)
        with self.as_built():
            (self._load_runs if self._flattened is not None and is_runs(state_dict) else self._load_whole)(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _emitted(self, plain_state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        has_state = any("step" in state for state in self.state.values())
        context, whole = self._context, self._consolidated
        if self._flattened is not None:
            if has_state and context is None:  # state was loaded, and no step has made plans since
                context = self.current_context()
            groups, snapshot = self.param_groups, self._cost_snapshot
            return emitted_runs(context, self._flattened.where, groups, snapshot, has_state, plain_state_dict)
        if not has_state:
            return plain_state_dict()
        unready = whole is None and not self._only_initialized
        # Asked of the plan as it is: a new one is a collective, and this may be one rank alone.
        if context is None or not ((unready or whole is not None) and context.has_owned_state):
            context = self.current_context()
        context.finish_pending()
        return emitted(context, self.param_groups, whole, unready, plain_state_dict)

    def _load_whole(self, state_dict: dict[str, Any]) -> None:
        """Puts a whole ``state_dict`` of any layout, or one of AdamW, into the optimizer; each rank keeps its part."""
        # Where ranks share parameters, each takes its own part of the state, and no more, to its device.
        shared = any(grid.world_size > 1 for grid in self._grids().values())
        if is_adamw(state_dict):
            model = None if self._model is None else self._model()
            by_name, groups = from_adamw(self.rule, self.param_groups, state_dict, model)
        else:
            by_name, groups = matched(self.rule, self.param_groups, state_dict, self.matrix_views_of_slices)
        by_name = with_low_bits(by_name)
        self._forget_plan()
        there = {name: {} for name in by_name} if shared else by_name
        self.__setstate__(loaded_state(self.rule, self.param_groups, there, groups, self.offload_state is not None))
        if any(by_name.values()):  # a context knows whose state it is when parameters are replaced later
            context = self.current_context()
            if shared:
                keep_owned(context, by_name)
                materialize(context)

    def _load_runs(self, state_dict: dict[str, Any]) -> None:
        """Puts this rank's part of flattened parameters back."""
        found = matched_runs(self.rule, self.param_groups, state_dict)
        if found.has_state:
            check_owned_runs(found.owned, owned_runs(self._new_plan(found.cost_snapshot), self._grids()))
        self._forget_plan()
        state = loaded_state(self.rule, self.param_groups, found.by_name, found.groups, self.offload_state is not None)
        self.__setstate__(state)
        self._cost_snapshot = found.cost_snapshot

    def _forget_plan(self) -> None:
        """Before state is put in place of the one that there is: plans and what belongs to them are made again."""
        if self._context is not None:
            self.rule.forget()  # a refresh that failed too often must not keep an earlier checkpoint from being loaded
            self._context.finish_pending()
            self._transforms += self._context.counts["transforms"]
        self._early.attach(None)
        self._context, self._consolidated, self._only_initialized = None, None, False
        self._cost_snapshot = []

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is rebuilt at the next step; torch's own would drop the routes and the rule.

        Hooks are dropped, as torch does, and so is the ``step`` that a scheduler puts on the object: it is bound to the
        original, which a copy would step in its own stead.
        """
        self.synchronize()
        if self._context is not None:
            self._context.finish_pending()
        kept = {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
        return {
            **kept,
            "_context": None,
            "_planned_for": (),
            "_transforms": self.transform_count,
            "_consolidated": None,
            "_model": None,
            "_flattened": None,
            "_skipped_by_wrapper": None,
            "diagnostics_state": Diagnostics(),
            "process_group": self.process_group if self.process_group in (None, "self") else LOST,
        }
