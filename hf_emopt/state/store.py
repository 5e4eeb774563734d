"""The state that a rank holds: made when a parameter is first met, found again by parameter, by bucket and by batch.

Elementwise state lies as its parameter does, or, where ranks hold copies of a parameter, in the parts that a rank owns. State
of whole matrices is one tensor for all matrices of a batch, of which ``optimizer.state`` has views.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.layout import Grid, is_sharded, local_tensor, whole_shape
from hf_emopt.distributed.plan import Batch, Bucket, OwnedRegion
from hf_emopt.formats.master_weights import weight_state_key
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.state.forms import Lender, elementwise_state, is_weight_state, laid_out, matrix_state, shape_of_entry
from hf_emopt.state.offload import StateOffload
from hf_emopt.state.placement import compute_device, part_of
from hf_emopt.state.snapshot import KeptStates

__all__ = ["HeldStates"]

State = dict[str, Tensor]


class HeldStates:
    """State of the parameters that are planned together, as this rank holds it.

    Args:
        rule: says what state a matrix has.
        groups: the optimizer's parameter groups.
        params: their parameters, as they were planned.
        state: the optimizer's ``state``, filled here.
        grids: the ranks of every parameter, by name.
        offload: where state lies on the host between steps.

    Attributes:
        by_batch: state of whole matrices, by bucket and batch.
        lender: gives state out in the form in which it is computed with.
    """

    def __init__(
        self,
        rule: MatrixRule,
        groups: Sequence[Group],
        params: Sequence[Sequence[Tensor]],
        state: dict[Tensor, Any],
        grids: dict[str, Grid],
        offload: StateOffload | None,
    ) -> None:
        self._rule, self._groups, self._params, self._state = rule, groups, params, state
        self._positions = {name: grid.position for name, grid in grids.items()}
        self._offload = offload
        self.lender = Lender(offload)
        self.by_batch: dict[tuple[int, int], State] = {}
        self._local: dict[int, tuple[tuple[Any, ...], State]] = {}
        self._of_buckets: dict[int, KeptStates] = {}
        self._own: dict[tuple[int, int], KeptStates] = {}
        self._owned: dict[int, dict[int, list[OwnedRegion]]] = {}
        self._views: dict[tuple[int, int], tuple[KeptStates | None, list[tuple[Tensor, str, Tensor]]]] = {}
        self.bring_home()

    def bring_home(self) -> None:
        """Puts all state where it lies between steps; for state that came from elsewhere."""
        if self._offload is None:
            return
        for param, state in self._state.items():
            for key, value in state.items():
                state[key] = self.lender.home(key, value, compute_device(param) if "." in key else param.device)

    def home_device(self, param: Tensor, key: str) -> torch.device:
        """Where an entry of a parameter's elementwise state lies between steps."""
        return param.device if self._offload is None or key == "step" else torch.device("cpu")

    # ------------------------------------------------------------------ of a parameter

    def ready(self, param: Tensor, group: Group, owned: Sequence[OwnedRegion] | None = None) -> State:
        """The parameter's state, made when it is first met.

        Args:
            owned: this rank's owned regions, where ranks share a parameter that each holds whole: state is theirs alone.
        """
        state: State = self._state[param]
        if _is_whole(state, param, group):
            return state
        begun = "step" in state
        if not begun:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        like = local_tensor(param) if owned is None else part_of(param, owned)
        if like is None:
            return state
        for key, value in elementwise_state(self._rule, group, like, whole_shape(param)).items():
            # Where state is there, its weights were wider: what 16 bits cannot hold is new.
            if key not in state and (is_weight_state(key) or not begun):
                whole = shape_of_entry(key, param.shape)
                state[key] = self.lender.home(key, laid_out(value, param, whole), param.device)
        return state

    def of(self, bucket: Bucket, i: int) -> State:
        """State of the ``i``-th parameter of a bucket."""
        param, group = self._parameter(bucket, i), self._groups[bucket.group]
        state: State = self._state[param]
        if _is_whole(state, param, group):
            return state
        owned = self.owned(bucket, i)
        # Of what others own there is the count alone, which nothing can be missing beside.
        return state if owned == [] and "step" in state else self.ready(param, group, owned)

    def local(self, bucket: Bucket, i: int) -> State:
        """:meth:`of` as this rank holds it, without that of whole matrices; the same object while it is the same."""
        param, state = self._parameter(bucket, i), self.of(bucket, i)
        entries = tuple(state.values())
        known = self._local.get(id(param))  # not that of the state: of one that was replaced entries would stay
        if known is not None and tuple(map(id, known[0])) == tuple(map(id, entries)):
            return known[1]
        local = {key: local_tensor(value) for key, value in state.items() if "." not in key}
        # The entries are kept, so that no other tensor gets their identity.
        self._local[id(param)] = entries, local
        return local

    def owned(self, bucket: Bucket, i: int) -> list[OwnedRegion] | None:
        """This rank's owned regions of a parameter whose state lies with owners; ``None`` where it lies as the parameter
        does."""
        if not self.has_owners(bucket):
            return None
        if id(bucket) not in self._owned:  # a bucket of the plan, which is kept as long as this is
            by_parameter: dict[int, list[OwnedRegion]] = defaultdict(list)
            for owned_region in self._owned_in(bucket):
                by_parameter[owned_region.parameter].append(owned_region)
            self._owned[id(bucket)] = dict(by_parameter)
        return self._owned[id(bucket)].get(i, [])

    def has_owners(self, bucket: Bucket) -> bool:
        """Whether every rank holds the bucket's parameters whole and their state lies with owners."""
        return bucket.storage.world_size > 1 and not is_sharded(self._parameter(bucket, 0))

    # ------------------------------------------------------------------ of several

    def of_bucket(self, index: int, bucket: Bucket, present: Sequence[int]) -> KeptStates:
        """:meth:`of` and :meth:`local` of some of a bucket's matrices; one object while they stay the same."""
        # One for a bucket: those of other parameters would keep tensors alive that have been replaced.
        known = self._of_buckets.get(index)
        if known is not None and known.keys == tuple(present) and known.still(self._state):
            return known
        params = [self._parameter(bucket, i) for i in present]
        states = [self.of(bucket, i) for i in present]
        local = {i: self.local(bucket, i) for i in present}
        self._of_buckets[index] = KeptStates(params, states, local)
        return self._of_buckets[index]

    def elementwise(self, key: tuple[int, int], params: list[Tensor], group: Group) -> list[State]:
        """:meth:`ready` of parameters that are stepped element by element, as this rank holds it.

        Args:
            key: of the parameters that are stepped together, mostly the same in every step.
        """
        known = self._own.get(key)
        if known is None or not known.still(self._state, params):
            states = [self.ready(p, group) for p in params]
            local = {i: {k: local_tensor(v) for k, v in state.items()} for i, state in enumerate(states)}
            known = self._own[key] = KeptStates(list(params), states, local)
        return [{**state} for state in known.local.values()]

    def of_batch(self, key: tuple[int, int], bucket: Bucket, batch: Batch, group: Group) -> State:
        """State of a batch of matrices, one tensor for all of them; ``state`` holds views of it by parameter.

        Made when a batch is first met, from what ``state`` has (a loaded checkpoint) or from the rule's start; and again
        where somebody has put something else into ``state``, or taken it out.
        """
        if key in self.by_batch:
            if self._are_views(key):
                return self.by_batch[key]
            self._rule.forget(key)
        owned = self._owned_in(bucket)
        runs: list[tuple[int, int, int]] = []  # parameter, matrix view, matrices: neighbours of one parameter are one
        for (i, place), size in zip(batch.jobs, batch.sizes):
            which, u = owned[i].parameter, owned[i].index(place)
            if runs and runs[-1][:2] == (which, u):
                size += runs.pop()[2]
            runs.append((which, u, size))
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for i, u, size in runs:
            param = self._parameter(bucket, i)
            known = self._state.get(param, {})
            like = torch.empty(0, dtype=param.dtype, device=compute_device(param))
            for name, value in matrix_state(self._rule, group, (size, *batch.shape), like).items():
                there = value if self._offload is None else self.lender.home(name, value, value.device)
                parts[name].append(known.get(f"{name}.{u}", there).to(there.device))
        device = compute_device(self._parameter(bucket, runs[0][0]))
        storage = {name: self.lender.home(name, torch.cat(values), device) for name, values in parts.items()}
        views = []
        for name, value in storage.items():
            for view, (i, u, _) in zip(value.split([size for _, _, size in runs]), runs):
                param = self._parameter(bucket, i)
                self._state[param][f"{name}.{u}"] = view
                views.append((param, f"{name}.{u}", view))
        self.by_batch[key], self._views[key] = storage, (None, views)
        return storage

    def _are_views(self, key: tuple[int, int]) -> bool:
        """Whether ``state`` still has a batch's views. Looked at once for each object of :meth:`of_bucket`, which says that
        nothing was replaced since."""
        kept, (seen, views) = self._of_buckets.get(key[0]), self._views[key]
        if kept is not None and kept is seen:
            return True
        nothing: State = {}
        if not all(self._state.get(param, nothing).get(name) is view for param, name, view in views):
            return False
        self._views[key] = kept, views
        return True

    def _parameter(self, bucket: Bucket, i: int) -> Tensor:
        return self._params[bucket.group][bucket.parameters[i].position]

    def _owned_in(self, bucket: Bucket) -> tuple[OwnedRegion, ...]:
        return bucket.owned(self._positions[bucket.parameters[0].name])


def _is_whole(state: State, param: Tensor, group: Group) -> bool:
    """Whether there is elementwise state, also for the dtype that the parameter has now."""
    key = weight_state_key(param.dtype, group["low_precision_weights"])
    return "step" in state and (key is None or key in state)
