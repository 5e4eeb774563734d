"""Parameters that their wrapper keeps on the host: copied to the device of the step, a bucket at a time, and stored back.

A bucket's gradients, weights and moments are fetched before its step begins, while the bucket before it is computed. What
changed is stored while the next bucket is computed: a step's task fetches, yields, and goes on when the pipeline has
begun the next task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_emopt.distributed.layout import Partition, compute_device
from hf_emopt.engine.context import StepContext
from hf_emopt.state.host_transfer import CopyStream, host_copy_of
from hf_emopt.state.keys import is_shaped


@dataclass
class ParamSlice:
    """A weight, its gradient and its state; or the same part of all three."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]


class FetchedSlices:
    """Copies of parameter slices on the device of the step, on their way from the moment they are made.

    Args:
        copy_stream: to the device.
        host: weights, gradients and states on the host.
        keys: of each slice's state, what is fetched; the rest is the same object here and there.
    """

    def __init__(self, copy_stream: CopyStream, host: Sequence[ParamSlice], keys: Sequence[Sequence[str]]) -> None:
        self._copy_stream, self._host, self._keys = copy_stream, host, keys
        tensors = [t for s, names in zip(host, keys, strict=True) for t in (s.grad, *_changed(s, names))]
        copies, self._arrived = copy_stream.copy_to_device(tensors)
        arriving = iter(copies)
        self._slices = []
        for s, names in zip(host, keys):
            grad, weight = next(arriving), next(arriving)
            self._slices.append(ParamSlice(weight, grad, {**s.state, **{name: next(arriving) for name in names}}))

    def wait(self) -> list[ParamSlice]:
        """The copies, to be computed with."""
        self._copy_stream.await_arrival(self._arrived)
        return self._slices

    def store(self) -> None:
        """Starts to copy weights and states back; called after the last write to them."""
        here = [t for s, names in zip(self._slices, self._keys) for t in _changed(s, names)]
        left = self._copy_stream.copy_to_host(
            here, [t for s, names in zip(self._host, self._keys) for t in _changed(s, names)]
        )
        self._copy_stream.release(left)


def fetch(
    context: StepContext, params: Sequence[Tensor], slices: list[ParamSlice], also: Sequence[str] = ()
) -> FetchedSlices:
    """Starts to copy slices of offloaded parameters to their compute device.

    Args:
        params: of one compute device.
        slices: of each.
        also: keys of state to fetch with the entries that are shaped like the parameter.
    """
    device = compute_device(params[0])
    keys = [[key for key in s.state if is_shaped(key) or key in also] for s in slices]
    for param, s, names in zip(params, slices, keys, strict=True):
        if isinstance(param, Partition) and param.pinned:
            for name in names:
                s.state[name] = context.store.state[param][name] = host_copy_of(s.state[name], device)
    return FetchedSlices(context.copy_stream(device), slices, keys)


def _changed(s: ParamSlice, keys: Sequence[str]) -> list[Tensor]:
    """What a step changes."""
    return [s.weight, *(s.state[key] for key in keys)]
