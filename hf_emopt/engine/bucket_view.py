"""What one rank works on in a bucket: weights, gradients and state, lent to it for a phase.

State lies as :mod:`hf_emopt.state.forms` keeps it; a phase of a step borrows what it needs of it, in the form and on the
device in which it computes, and only as long as nothing waits for other ranks meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.layout import is_sharded, local_gradient, local_gradients, local_tensor, local_tensors
from hf_emopt.distributed.plan import Bucket, OwnedRegion
from hf_emopt.engine.cpu_params import InPlace
from hf_emopt.engine.elementwise import Part
from hf_emopt.engine.engine import Engine
from hf_emopt.formats.master_weights import needs_master
from hf_emopt.formats.moments import is_moment, is_scale
from hf_emopt.formats.rounding_noise import moment_noise
from hf_emopt.rules.base import Group, state_dtype
from hf_emopt.state.forms import is_weight_state
from hf_emopt.state.keys import is_shaped
from hf_emopt.state.placement import compute_device, is_offloaded

__all__ = ["AUX_PIECES", "Workplace", "gradient", "gradients", "home_states", "lent_states", "owned_parts"]

State = dict[str, Tensor]

AUX_PIECES = 2**16
"""From here on, numbers of pieces of state are those of auxiliary parameters; before, of batches of matrices."""


def home_states(engine: Engine, bucket: Bucket, which: Sequence[int]) -> dict[int, State]:
    """This rank's state of some of a bucket's parameters as it is kept, without that of whole matrices."""
    return {i: engine.states.local(bucket, i) for i in which}


def lent_states(
    engine: Engine,
    name: tuple[Any, ...],
    bucket: Bucket,
    home: dict[int, State],
    wanted: Callable[[str], bool],
    group: Group,
    ok: Tensor | None = None,
    noise: Callable[[], torch.Generator] | None = None,
) -> AbstractContextManager[dict[int, State]]:
    """States of a bucket's parameters as a phase needs them; see :meth:`~hf_emopt.state.forms.Lender.lent`."""
    if not home or engine.states.lender.lends_as_kept(group):
        return nullcontext(home)
    return _lent_states(engine, name, bucket, home, wanted, group, ok, noise)


@contextmanager
def _lent_states(
    engine: Engine,
    name: tuple[Any, ...],
    bucket: Bucket,
    home: dict[int, State],
    wanted: Callable[[str], bool],
    group: Group,
    ok: Tensor | None,
    noise: Callable[[], torch.Generator] | None,
) -> Iterator[dict[int, State]]:
    param, states = engine.parameter(bucket, next(iter(home))), list(home.values())
    args = (name, states, compute_device(param), wanted, state_dtype(param), group, ok, noise, is_offloaded(param))
    with engine.states.lender.lent(*args) as lent:
        yield dict(zip(home, lent))


class Workplace:
    """Where this rank steps its part of a bucket of matrices: its shards, or the owned regions that it owns.

    Args:
        engine: whose parameters and state they are.
        index: of the bucket.
        present: indices of the bucket's parameters with a gradient.
        owned: this rank's owned regions of them.
    """

    def __init__(
        self, engine: Engine, index: int, bucket: Bucket, present: Sequence[int], owned: Sequence[OwnedRegion]
    ) -> None:
        self.engine, self.index, self.bucket, self.present, self.owned = engine, index, bucket, present, owned
        known = engine.states.of_bucket(index, bucket, present)
        self.states, self.params = known.states, known.params
        """State of all present parameters, as the optimizer has it."""
        self.sharded, self.device = is_sharded(self.params[0]), compute_device(self.params[0])
        self.home = known.local if self.sharded else {i: known.local[i] for i in sorted({s.parameter for s in owned})}
        self._fetched: InPlace | None = None
        if is_offloaded(self.params[0]):  # which sharded parameters are, and no others
            self._fetched = engine.fetch(self.params, self.parts(self.home))

    @property
    def early(self) -> bool:
        """Whether parameters are on their way from the host, and others can be computed with meanwhile."""
        return self._fetched is not None and self._fetched.early

    def wait(self) -> None:
        """Until they are here."""
        if self._fetched is not None:
            self.home = {i: part.state for i, part in zip(self.present, self._fetched.wait())}

    def store(self) -> None:
        """After the last write to them."""
        if self._fetched is not None:
            self._fetched.store()

    def parts(self, states: dict[int, State]) -> list[Part]:
        """Weights, gradients and the given states, as they are kept or as they are lent."""
        if self._fetched is not None:
            return [Part(p.weight, p.grad, states[i]) for p, i in zip(self._fetched.parts, self.present)]
        if not self.sharded:
            return owned_parts(self.engine, self.bucket, self.owned, states)
        weights, grads = local_tensors(self.params), gradients(self.params)
        return [Part(w, g, states[i]) for w, g, i in zip(weights, grads, self.present)]

    def lent_moments(self, group: Group, ok: Tensor | None) -> AbstractContextManager[dict[int, State]]:
        """Moments, for the phase that accumulates."""
        shard = self.engine.grid_of_bucket(self.bucket).shard
        noise = moment_noise(self.index, group, self.device, shard)
        name = ("moments", self.index)
        return lent_states(self.engine, name, self.bucket, self.home, is_moment, group, ok, noise)

    @contextmanager
    def weighed(self, group: Group, parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
        """The parts with what 16-bit weights cannot hold, for the phase that steps them; wide ones have no such state."""
        if not needs_master(self.params[0]):
            yield parts
            return
        name = ("weights", self.index)
        with lent_states(self.engine, name, self.bucket, self.home, is_weight_state, group) as lent:
            yield self.parts(lent)

    def apart(self, tensors: Sequence[Tensor | None], lent: dict[int, State]) -> list[Tensor | None]:
        """The same tensors, copied where they are memory of the offload, which is another's once it is given back."""
        if self.engine.offload is None:
            return list(tensors)
        taken = {t.untyped_storage().data_ptr() for state in lent.values() for t in state.values()}
        return [x.clone() if x is not None and x.untyped_storage().data_ptr() in taken else x for x in tensors]


def owned_parts(engine: Engine, bucket: Bucket, owned: Sequence[OwnedRegion], states: dict[int, State]) -> list[Part]:
    """The owned regions that this rank owns of parameters that it holds whole."""
    parts = []
    offsets: dict[int, int] = defaultdict(int)
    params = [engine.parameter(bucket, owned_region.parameter) for owned_region in owned]
    for owned_region, param, local, grad in zip(owned, params, local_tensors(params), gradients(params)):
        state = states[owned_region.parameter]
        if owned_region.shape == param.shape:
            parts.append(Part(local, grad, state))
            continue
        where = tuple(slice(a, b) for a, b in owned_region.region)
        start, length = offsets[owned_region.parameter], owned_region.shape[owned_region.dim]
        offsets[owned_region.parameter] += length
        shaped = [key for key in state if is_shaped(key) and not is_scale(key)]
        mine = {key: state[key].narrow(owned_region.dim, start, length) for key in shaped}
        # Each part counts for itself; only the first is the parameter's own count.
        mine["step"] = state["step"] if start == 0 else state["step"].clone()
        parts.append(Part(param[where], grad[where], mine))
    return parts


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """:func:`gradient` of each."""
    found = local_gradients(params)
    return [torch.zeros_like(local_tensor(p)) if grad is None else grad for p, grad in zip(params, found)]


def gradient(param: Tensor) -> Tensor:
    """The local gradient; zeros where only other ranks have one (the step is then skipped, but must not hang)."""
    grad = local_gradient(param)
    return torch.zeros_like(local_tensor(param)) if grad is None else grad
