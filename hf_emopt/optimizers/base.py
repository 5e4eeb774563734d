"""The hall where the three questions meet: what an update is, which parameters are matrices, and where they lie."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_emopt.checkpoint.flat_state_dict import emitted_runs, is_runs, loaded_runs
from hf_emopt.checkpoint.gather import keep_owned
from hf_emopt.checkpoint.matching import STATE_VERSION
from hf_emopt.checkpoint.state_dict import consolidate, emitted, left_behind, loaded
from hf_emopt.distributed.layout import LOST, Grid, ProcessGroupArgument, build_grids
from hf_emopt.distributed.plan import Plan, PlannedParameter
from hf_emopt.distributed.planner import hyperparameters, plan_of, planned_copies, planned_matrices, world_size
from hf_emopt.distributed.tensor_parallel_choice import Choice, ModeOverrides, describe
from hf_emopt.engine.delayed_gather import DelayedUpdates, check_overlap
from hf_emopt.engine.engine import Engine
from hf_emopt.engine.prefetch import EarlyFetch
from hf_emopt.optimizers.changed_groups import ChangedGroups
from hf_emopt.optimizers.diagnostics import Diagnostics, Level
from hf_emopt.optimizers.flat_groups import Flattened
from hf_emopt.optimizers.model_changes import refresh
from hf_emopt.optimizers.param_groups import GroupBuilder, ParamsArgument, check_lora_options, describe_torch_group
from hf_emopt.optimizers.step import step_together
from hf_emopt.optimizers.validation import (
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

__all__ = ["MatrixOptimizer"]

_kind_of = attrgetter("shape", "dtype", "device")


class MatrixOptimizer(torch.optim.Optimizer):
    """One ``torch.optim.Optimizer`` that gives matrices to a rule and everything else to AdamW.

    Args:
        params: a model; an iterable of ``(name, parameter)``; an iterable of parameters; or groups of these, where
            ``"kind": "matrix"`` or ``"aux"`` may say what a group is. Only a model can be routed by module type.
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
        process_group: ProcessGroupArgument = None,
        tensor_parallel_modules: str | Sequence[str] | Mapping[str, str] | None = None,
        lora_lr_ratio: float = 1.0,
        lora: LoraMode = "separate",
        lora_defaults: Callable[[int], Group] | None = None,
        offload_state: OffloadState | None = None,
    ) -> None:
        check_lora_options(rule, lora, lora_lr_ratio)
        check_flags(
            {
                "allow_no_matrices": allow_no_matrices,
                "skip_nonfinite": skip_nonfinite,
                "per_head": per_head,
                "overlap_param_gather": overlap_param_gather,
            }
        )
        self.rule = rule
        self._modes = ModeOverrides(tensor_parallel_modules, rule.tensor_parallel_modes)
        self._choices: list[Choice] = []
        self.skip_nonfinite = skip_nonfinite
        self.transport_dtype = transport_name(transport_dtype)
        self.overlap_param_gather = overlap_param_gather
        self.process_group = checked_process_group(process_group)
        self.offload_state = offload_place(offload_state)
        if overlap_param_gather and not isinstance(params, nn.Module):
            raise ValueError("overlap_param_gather=True puts hooks on the model: pass the model as params")
        self._model = weakref.ref(params) if isinstance(params, nn.Module) else None
        self._delayed = DelayedUpdates()
        self._early = EarlyFetch()
        self._diagnostics = Diagnostics()
        self._skipped: dict[torch.device, Tensor] = {}
        # Of steps that a wrapper (DeepSpeed) skipped for the same reason before it came to ask for them.
        self._skipped_by_wrapper: Callable[[], int] | None = None
        self._transforms = 0
        self._engine: Engine | None = None
        self._flattened: Flattened | None = None
        self._planned_for: tuple[Any, ...] = ()
        self._priced: list[Group] = []  # hyperparameters when owners were first given out
        self._last_present: frozenset[str] | None = None
        self._since_look = 0
        self._consolidated: dict[str, dict[str, Any]] | None = None
        self._only_initialized = False
        self._builder = GroupBuilder(
            {
                "matrix": {
                    "state_version": STATE_VERSION,
                    "rule": rule.name,
                    "tensor_parallel": "auto",
                    **matrix_defaults,
                },
                "aux": {"state_version": STATE_VERSION, **aux_defaults},
            },
            matrix_modules,
            aux_modules,
            per_head,
            lora,
            lora_lr_ratio,
            lora_defaults,
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
            raise ValueError(no_matrices_message(table, rule.name, self.matrix_option))
        self._modes.check_matched([route.name for route in table.matrices])
        message = coverage_warning(table) if table.matrices else None
        if message:
            warnings.warn(message.replace("matrix_modules", self.matrix_option), stacklevel=4)

    # ------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """Adds a group (``{"params": ...}`` as the constructor takes it); a mixed one becomes one group of each kind."""
        routes: list[ParameterRoute] = []
        if "state_version" in param_group and all(isinstance(p, tuple) for p in param_group["params"]):  # the builder's
            complete = [param_group]
        else:  # a group of the user's, or a copy of one of ours
            complete, routes = self._builder.from_group(param_group)
        for group in complete:
            validate_group(group, self.rule, self.param_groups, self.defaults)
            super().add_param_group(group)
        self._routes.extend(routes)
        self._planned_for = ()
        self._consolidated = None  # which knows nothing of the new parameters

    def refresh_parameters(self, model: nn.Module | None = None) -> tuple[list[str], list[str]]:
        """Follows a model to which adapters were added, or from which they were deleted, since the optimizer was built.

        New trainable parameters are routed as the constructor would and join the group of their kind with its
        hyperparameters as they are now; parameters that the model no longer has are dropped with their state. Those that are
        only frozen, such as adapters that are switched off, stay with their state. All ranks call it together.

        Args:
            model: the model, as it was given to the constructor; ``None`` for that one.

        Returns:
            Names of the parameters that were added and of those that were removed.

        Raises:
            ValueError: the optimizer was not built from a model, and none is given; or what the constructor raises.
            UnsupportedLayoutError: under DeepSpeed, which has flattened the parameters.
        """
        model = model if model is not None else self._model() if self._model is not None else None
        if model is None:
            raise ValueError("the optimizer was built from parameters, so it knows no model: pass the model")
        self.synchronize()
        return refresh(self, model)

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """State by parameter. With ``offload_state``, asking for it waits until all of it is on the host; in any case, the
        current stream waits for refreshes that run beside what follows a step.

        So what is read is what the last step left, and what is written is what the next one starts from, also where it is
        written through ``.data`` or NumPy. After every step ask anew: a tensor that was kept from before may still be
        written to when the step has returned.
        """
        engine = vars(self).get("_engine")
        if engine is not None and engine.offload is not None:
            engine.offload.settle()
        self._join()
        return vars(self)["state"]  # type: ignore[no-any-return]

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        if vars(self).get("_engine") is not None:
            priced = self._priced  # owners stay who they are
            self._forget_plan()
            self._priced = priced
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
        with self._as_built():
            rule_line = next((self.rule.describe(g) for g in self.param_groups if g["kind"] == "matrix"), "no matrices")
            groups = "\n".join("  " + describe_torch_group(g) for g in self.param_groups)
            memory = describe_memory(self.rule, self.param_groups, self.offload_state)
            if self._engine is not None and self._planned_for == self._identity():
                plan = self._engine.plan
            else:  # of its own: to plan anew in the middle of a run takes all ranks
                plan = self._plan_anew()
        return "\n".join(
            part
            for part in (str(self.routes), rule_line, "groups:", groups, memory, str(plan), describe(self._choices))
            if part
        )

    def _plan_anew(self) -> Plan:
        grids = self._grids()
        matrices, offloads = self.planned_parameters(grids), self.offload_state is not None
        return plan_of(matrices, self.rule, self.param_groups, world_size(grids), offloads, self._overlaps)

    def _as_built(self) -> AbstractContextManager[None]:
        """Inside, groups have all parameters, also where a wrapper has put flat tensors in their place."""
        return nullcontext() if self._flattened is None else self._flattened.exposed(self)

    @property
    def transform_count(self) -> int:
        """Matrices that this process has transformed so far; summed over ranks, each matrix counts once a step."""
        return self._transforms + (0 if self._engine is None else self._engine.transform_count)

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
        return self._diagnostics.measuring(self, level)

    # ------------------------------------------------------------------ step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step: each matrix with a gradient is transformed once, after accumulation and clipping.

        Parameters without a gradient keep their weight and their state. Gradients are read, never written. Where several
        ranks share parameters, all of them must call it.

        Raises:
            RuntimeError: when a parameter is laid out in a way that cannot be stepped correctly here, or ranks differ in
                what they would step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        if self._flattened is None:
            step_together(self, None)
        else:
            with self._flattened.stepping(self) as names:
                step_together(self, names)
        return loss

    @property
    def _overlaps(self) -> bool:
        """Whether updates are put off; a copy of the optimizer has no model to put hooks on, and does without."""
        return self.overlap_param_gather and self._model is not None and self._model() is not None

    def synchronize(self) -> None:
        """Finishes updates that ``overlap_param_gather`` has put off, so that all parameters are as after the step; and makes
        the current stream wait for refreshes that run beside what follows a step, so that all state is."""
        self._delayed.finish()
        self._join()

    def _join(self) -> None:
        engine = vars(self).get("_engine")
        if engine is not None:
            engine.join()

    def _current_engine(self) -> Engine:
        """The plans for the parameters as they are now; wrappers swap Parameter objects after construction."""
        identity = self._identity()
        if self._engine is None or identity != self._planned_for:
            self._engine, self._planned_for = self._make_engine(), identity
        return self._engine

    def _identity(self) -> tuple[Any, ...]:
        # Shapes too: a wrapper may leave the Parameter and put another tensor into it.
        params = [p for g in self.param_groups for p in g["params"]]
        # A DTensor's layout says shape and dtype, is one object as long as nothing is swapped, and takes a tenth of the time.
        kinds = [(p._spec, p._local_tensor.device) if type(p) is DTensor else _kind_of(p) for p in params]
        return (*map(id, params), *kinds)

    def _make_engine(self) -> Engine:
        model = self._model() if self._overlaps and self._model is not None else None
        if model is not None:
            check_overlap(model, self.param_groups)
        whole = left_behind(self)
        self._priced = self._priced or hyperparameters(self.param_groups)
        grids = self._grids()
        check_state_options(self.rule, self.param_groups, self.offload_state)
        self._changed = ChangedGroups(self.rule, self.param_groups)
        engine = Engine(
            self.rule,
            self.param_groups,
            self.state,
            self.planned_parameters(grids),
            planned_copies(self.param_groups, grids),
            grids,
            self.transport_dtype,
            self._overlaps,
            self.offload_state is not None,
        )
        if whole is not None:
            keep_owned(engine, whole)
        self._delayed.attach(model, (p for params in engine.params for p in params))
        self._early.attach(engine, [route.name for route in self._routes])
        return engine

    def _grids(self) -> dict[str, Grid]:
        named = [(n, p) for g in self.param_groups for n, p in zip(g["param_names"], g["params"])]
        return build_grids(named, self.process_group)

    def planned_parameters(self, grids: dict[str, Grid] | None = None) -> list[PlannedParameter]:
        """What the planner needs to know of each matrix parameter; see
        :func:`~hf_emopt.distributed.planner.planned_matrices`."""
        planned, self._choices = planned_matrices(
            self.rule, self.param_groups, grids, self._modes, self.transport_dtype, self._priced
        )
        return planned

    def matrix_views_of_slices(self) -> dict[str, tuple[MatrixView, ...]]:
        """For parameters whose slices are matrices of their own, these matrices."""
        groups = [g for g in self.param_groups if g["kind"] == "matrix"]
        if not any(self._modes.mode(n, g["tensor_parallel"]) == "blockwise" for g in groups for n in g["param_names"]):
            return {}
        return {p.name: p.matrix_views for p in self.planned_parameters(self._grids()) if p.whole_shapes}

    # ------------------------------------------------------------------ checkpoints

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
            self._consolidated = consolidate(self, to)

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
            with self._as_built():
                made = (emitted if self._flattened is None else emitted_runs)(self, super().state_dict)
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for hook in hooks.values():
            changed = hook(self, made)
            made = made if changed is None else changed
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole ``state_dict()``, of any layout, or one of ``torch.optim.AdamW``; each rank keeps its part.

        dtypes of state are kept, and hyperparameters are the checkpoint's. From AdamW, matrices start with fresh state, the
        auxiliary parameters keep their moments, and hyperparameters are this optimizer's.

        Raises:
            ValueError: when groups, names or shapes do not fit; the optimizer is then as it was.
        """
        self.synchronize()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state_dict = without_async_refresh(state_dict)
        with self._as_built():
            (loaded if self._flattened is None or not is_runs(state_dict) else loaded_runs)(self, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _forget_plan(self) -> None:
        """Before state is put in place of the one that there is: plans and what belongs to them are made anew."""
        if self._engine is not None:
            self.rule.forget()  # a refresh that failed too often must not keep an earlier checkpoint from being loaded
            self._engine.settle()
            self._transforms += self._engine.transform_count
        self._early.attach(None)
        self._engine, self._consolidated, self._only_initialized = None, None, False
        self._priced = []

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is rebuilt at the next step; torch's own would drop the routes and the rule.

        Hooks are dropped, as torch does, and so is the ``step`` that a scheduler puts on the object: it is bound to the
        original, which a copy would step in its own stead.
        """
        self.synchronize()
        if self._engine is not None:
            self._engine.settle()
        kept = {k: v for k, v in self.__dict__.items() if k != "step" and not k.startswith("_optimizer_")}
        return {
            **kept,
            "_engine": None,
            "_planned_for": (),
            "_transforms": self.transform_count,
            "_consolidated": None,
            "_model": None,
            "_flattened": None,
            "_skipped_by_wrapper": None,
            "_diagnostics": Diagnostics(),
            "process_group": self.process_group if self.process_group in (None, "self") else LOST,
        }
