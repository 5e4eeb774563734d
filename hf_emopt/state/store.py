"""The state of a rank, made at the first use of a parameter, and looked up by parameter, by bucket and by batch.

Elementwise state is laid out as its parameter. Where ranks hold copies of a parameter, a rank has the state of the regions
that it owns. State of whole matrices is one tensor for all matrices of a batch, and ``optimizer.state`` has views of it.

Between steps an entry may be packed in fewer bits, and its tensor may be a host copy. A phase that reads or writes state
swaps it in: unpacked, and on the device of the mathematics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_emopt.distributed.layout import Grid, compute_device, is_sharded, local_tensor, whole_shape
from hf_emopt.distributed.plan import Batch, Bucket, OwnedRegion
from hf_emopt.formats.master_weights import weight_state_key
from hf_emopt.formats.moments import unpacked, update_packed
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.state.forms import (
    elementwise_state,
    is_foreign,
    is_offloadable,
    is_weight_state,
    laid_out,
    matrix_state,
    part_of,
    shape_of_entry,
)
from hf_emopt.state.host_transfer import host_copy_of
from hf_emopt.state.offload import StateOffload

State = dict[str, Tensor]


def _all(key: str) -> bool:
    return True


@dataclass(frozen=True)
class SwapIn:
    """The state that a phase of a step needs.

    Attributes:
        name: of the piece of work, the same in every step: the offload learns the order of names.
        device: of the mathematics.
        dtype: of moments while they are swapped in.
        wanted: chooses entries by key.
        ok: scalar bool on the device; ``False`` keeps packed moments as they were.
        noise: makes a generator on the device that rounds moments when they are packed.
        rows: index on the device of the matrices whose moments are written; ``None`` for all.
        on_device: the states are copies on the device already, fetched with their parameters.
    """

    name: Hashable
    device: torch.device
    dtype: torch.dtype
    wanted: Callable[[str], bool] = _all
    ok: Tensor | None = None
    noise: Callable[[], torch.Generator] | None = None
    rows: Tensor | None = None
    on_device: bool = False


class StateSnapshot:
    """States of parameters that are stepped together, kept from one step to the next while nobody replaces a tensor.

    Attributes:
        params: the parameters.
        states: the state of each, as ``optimizer.state`` has it.
        local: the state of each as this rank holds it, by its index in the bucket, without state of whole matrices.
        keys: of ``local``.
    """

    def __init__(self, params: list[Tensor], states: list[State], local: dict[int, State]) -> None:
        self.params, self.states, self.local = params, states, local
        self.keys = tuple(local)
        self._names = list(chain.from_iterable(states))
        # Kept, so that no other tensor gets their identity.
        self._entries = list(chain.from_iterable(map(dict.values, states)))

    def is_current(self, state: dict[Tensor, Any], params: list[Tensor] | None = None) -> bool:
        """Whether ``state`` has the same dictionaries with the same tensors, and ``params``, if given, are the parameters.

        This is asked in every step, so nothing of Python's runs for each of them.
        """
        if params is not None and (len(params) != len(self.params) or not all(map(is_, params, self.params))):
            return False
        now = list(map(state.get, self.params))
        if not all(map(is_, now, self.states)):
            return False
        entries = list(chain.from_iterable(map(dict.values, self.states)))
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        return list(chain.from_iterable(self.states)) == self._names


class StateStore:
    """State of the parameters that are planned together, as this rank holds it.

    Args:
        rule: makes the state of a matrix.
        groups: the optimizer's parameter groups.
        params: their parameters, as they were planned.
        state: the optimizer's ``state``, filled here.
        grids: the ranks of every parameter, by name.
        offload: swaps state in, where it is on the host between steps; ``None`` where it stays on the device.

    Attributes:
        state, offload: as given.
        by_batch: state of whole matrices, by bucket and batch.
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
        self._rule, self._groups, self._params, self.state = rule, groups, params, state
        self._positions = {name: grid.position for name, grid in grids.items()}
        self.offload = offload
        self.by_batch: dict[tuple[int, int], State] = {}
        self._local: dict[int, tuple[tuple[Any, ...], State]] = {}
        self._of_buckets: dict[int, StateSnapshot] = {}
        self._own: dict[tuple[int, int], StateSnapshot] = {}
        self._owned: dict[int, dict[int, list[OwnedRegion]]] = {}
        self._views: dict[tuple[int, int], tuple[StateSnapshot | None, list[tuple[Tensor, str, Tensor]]]] = {}
        self.move_to_host()

    def move_to_host(self) -> None:
        """Makes host copies of all state that came from elsewhere, such as a checkpoint."""
        if self.offload is None:
            return
        for group, params in zip(self._groups, self._params):
            for param in params:
                state = self.state.get(param, {})
                for key in [key for key in state if not is_foreign(self._rule, group, key)]:
                    state[key] = self.host_copy(key, state[key], compute_device(param) if "." in key else param.device)

    def kept_device(self, param: Tensor, key: str) -> torch.device:
        """The device of an entry of a parameter's elementwise state between steps."""
        return param.device if self.offload is None or key == "step" else torch.device("cpu")

    def host_copy(self, key: str, value: Tensor, device: torch.device) -> Tensor:
        """An entry as it is kept between steps.

        Args:
            device: of the mathematics.
        """
        if self.offload is None or not is_offloadable(key):
            return value
        if not isinstance(value, DTensor):
            return host_copy_of(value, device)
        local = local_tensor(value)
        copy = host_copy_of(local, device)
        return value if copy is local else laid_out(copy, value, value.shape)

    def is_direct(self, group: dict[str, Any], on_device: bool = False) -> bool:
        """Whether a step uses state as it is kept: neither packed nor offloaded."""
        return group["state_dtype"] == "float32" and (on_device or self.offload is None)

    def swapped_in(
        self, states: Sequence[State], group: dict[str, Any], request: SwapIn
    ) -> AbstractContextManager[list[State]]:
        """States whose wanted entries are on the device, and may be written to.

        The end of the block keeps the entries and empties the dictionaries.

        Args:
            states: plain tensors by key.
            group: hyperparameters; ``state_dtype`` is the form in which moments are kept.
        """
        if self.is_direct(group, request.on_device):
            return nullcontext(list(states))
        return self._swapped_in(states, group["state_dtype"] != "float32", request)

    @contextmanager
    def _swapped_in(self, states: Sequence[State], packed: bool, request: SwapIn) -> Iterator[list[State]]:
        kept = [{k: v for k, v in s.items() if request.wanted(k) and is_offloadable(k)} for s in states]
        flat = [value for s in kept for value in s.values()]
        offload = self.offload if flat and not request.on_device else None
        if offload is not None:
            copies = offload.swap_in(request.name, flat, request.device)
            kept = [{k: copies.pop(0) for k in s} for s in kept]
        swapped = [
            {**{k: v for k, v in s.items() if k not in here}, **(unpacked(here, request.dtype) if packed else here)}
            for s, here in zip(states, kept)
        ]
        try:
            yield swapped
            if packed:
                generator = request.noise() if request.noise is not None else None
                for here, s in zip(kept, swapped):
                    update_packed(here, s, request.ok, generator, request.rows)
        finally:
            for s in (*swapped, *kept):  # the next piece reuses their memory
                s.clear()
            if offload is not None:
                offload.swap_out(request.name)

    # ------------------------------------------------------------------ of a parameter

    def ready(self, param: Tensor, group: Group, owned: Sequence[OwnedRegion] | None = None) -> State:
        """The parameter's state, made at its first use.

        Args:
            owned: this rank's owned regions, where every rank holds the parameter whole: only they have state here.
        """
        state: State = self.state[param]
        if _has_all(state, param, group):
            return state
        begun = "step" in state
        if not begun:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        like = local_tensor(param) if owned is None else part_of(param, owned)
        if like is None:
            return state
        for key, value in elementwise_state(self._rule, group, like, whole_shape(param)).items():
            # State without low bits is of wider weights; the low bits of 16-bit ones begin now.
            if key not in state and (is_weight_state(key) or not begun):
                whole = shape_of_entry(key, param.shape)
                state[key] = self.host_copy(key, laid_out(value, param, whole), param.device)
        return state

    def of(self, bucket: Bucket, i: int) -> State:
        """State of the ``i``-th parameter of a bucket."""
        param, group = self._parameter(bucket, i), self._groups[bucket.group]
        state: State = self.state[param]
        if _has_all(state, param, group):
            return state
        owned = self.owned(bucket, i)
        # A parameter of other owners has its count alone here.
        return state if owned == [] and "step" in state else self.ready(param, group, owned)

    def local(self, bucket: Bucket, i: int) -> State:
        """:meth:`of` as this rank holds it, without state of whole matrices; the same object while no entry is replaced."""
        param, state = self._parameter(bucket, i), self.of(bucket, i)
        entries = tuple(state.values())
        known = self._local.get(id(param))  # by the state's id, entries of replaced states would stay
        if known is not None and tuple(map(id, known[0])) == tuple(map(id, entries)):
            return known[1]
        local = self._own_local(state, self._groups[bucket.group])
        # The entries are kept, so that no other tensor gets their identity.
        self._local[id(param)] = entries, local
        return local

    def _own_local(self, state: State, group: Group) -> State:
        """This rank's part of elementwise state, without what other tools keep there."""
        own = [key for key in state if "." not in key and not is_foreign(self._rule, group, key)]
        return {key: local_tensor(state[key]) for key in own}

    def owned(self, bucket: Bucket, i: int) -> list[OwnedRegion] | None:
        """This rank's owned regions of a parameter whose state its owners hold; ``None`` where state is laid out as the
        parameter."""
        if not self.has_owners(bucket):
            return None
        if id(bucket) not in self._owned:  # the plan keeps its buckets, so ids stay unique
            by_parameter: dict[int, list[OwnedRegion]] = defaultdict(list)
            for owned_region in self._owned_in(bucket):
                by_parameter[owned_region.parameter].append(owned_region)
            self._owned[id(bucket)] = dict(by_parameter)
        return self._owned[id(bucket)].get(i, [])

    def has_owners(self, bucket: Bucket) -> bool:
        """Whether every rank holds the bucket's parameters whole, and their owners hold the state."""
        return bucket.storage.world_size > 1 and not is_sharded(self._parameter(bucket, 0))

    # ------------------------------------------------------------------ of several

    def of_bucket(self, index: int, bucket: Bucket, present: Sequence[int]) -> StateSnapshot:
        """:meth:`of` and :meth:`local` of some of a bucket's matrices; one object while they stay the same."""
        # One snapshot a bucket: more of them would keep replaced tensors alive.
        known = self._of_buckets.get(index)
        if known is not None and known.keys == tuple(present) and known.is_current(self.state):
            return known
        params = [self._parameter(bucket, i) for i in present]
        states = [self.of(bucket, i) for i in present]
        local = {i: self.local(bucket, i) for i in present}
        self._of_buckets[index] = StateSnapshot(params, states, local)
        return self._of_buckets[index]

    def elementwise(self, key: tuple[int, int], params: list[Tensor], group: Group) -> list[State]:
        """:meth:`ready` of parameters that are stepped element by element, as this rank holds it.

        Args:
            key: names the parameters that are stepped together, mostly the same in every step.
        """
        known = self._own.get(key)
        if known is None or not known.is_current(self.state, params):
            states = [self.ready(p, group) for p in params]
            local = {i: self._own_local(state, group) for i, state in enumerate(states)}
            known = self._own[key] = StateSnapshot(list(params), states, local)
        return [{**state} for state in known.local.values()]

    def of_batch(self, key: tuple[int, int], bucket: Bucket, batch: Batch, group: Group) -> State:
        """State of a batch of matrices, one tensor for all of them; ``state`` holds views of it by parameter.

        It is made at the first use of a batch, from the entries of ``state`` (a loaded checkpoint) or from the rule's start,
        and again after somebody has replaced or removed an entry of ``state``.
        """
        known = self.by_batch.get(key)
        if known is not None:
            if not known or self._are_views(key):
                return known
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
            there_already = self.state.get(param, {})
            like = torch.empty(0, dtype=param.dtype, device=compute_device(param))
            for name, value in matrix_state(self._rule, group, (size, *batch.shape), like).items():
                there = value if self.offload is None else self.host_copy(name, value, value.device)
                parts[name].append(there_already.get(f"{name}.{u}", there).to(there.device))
        device = compute_device(self._parameter(bucket, runs[0][0]))
        storage = {name: self.host_copy(name, torch.cat(values), device) for name, values in parts.items()}
        views = []
        for name, value in storage.items():
            for view, (i, u, _) in zip(value.split([size for _, _, size in runs]), runs):
                param = self._parameter(bucket, i)
                self.state[param][f"{name}.{u}"] = view
                views.append((param, f"{name}.{u}", view))
        self.by_batch[key], self._views[key] = storage, (None, views)
        return storage

    def _are_views(self, key: tuple[int, int]) -> bool:
        """Whether ``state`` still has a batch's views. One check serves each snapshot of :meth:`of_bucket`, which is new when
        anything was replaced."""
        kept, (seen, views) = self._of_buckets.get(key[0]), self._views[key]
        if kept is not None and kept is seen:
            return True
        nothing: State = {}
        if not all(self.state.get(param, nothing).get(name) is view for param, name, view in views):
            return False
        self._views[key] = kept, views
        return True

    def _parameter(self, bucket: Bucket, i: int) -> Tensor:
        return self._params[bucket.group][bucket.parameters[i].position]

    def _owned_in(self, bucket: Bucket) -> tuple[OwnedRegion, ...]:
        return bucket.owned(self._positions[bucket.parameters[0].name])


def _has_all(state: State, param: Tensor, group: Group) -> bool:
    """Whether there is elementwise state, also for the dtype that the parameter has now."""
    key = weight_state_key(param.dtype, group["low_precision_weights"])
    return "step" in state and (key is None or key in state)
