"""Parameters that lie on the host: brought to where they are computed, a bucket at a time, and stored back.

A bucket's gradients, weights and moments are fetched before its step begins, while the bucket before it is computed, and what
changed is stored while the next one is: a step's task fetches, yields, and goes on when the pipeline has begun the next task.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_emopt.engine.elementwise import Part
from hf_emopt.state.host_transfer import Channel

__all__ = ["Fetched", "InPlace"]


class InPlace:
    """Parts that are stepped where they are.

    Attributes:
        early: whether something is on its way that others can be computed beside.
    """

    early = False

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts

    def wait(self) -> list[Part]:
        """The parts, to be computed with."""
        return self.parts

    def store(self) -> None:
        """After the last write to them."""


class Fetched(InPlace):
    """Copies of parts on the device, on their way from the moment they are made.

    Args:
        channel: to the device.
        homes: weights, gradients and states on the host.
        keys: of each part's state, what is fetched; the rest is the same object here and there.
    """

    early = True

    def __init__(self, channel: Channel, homes: Sequence[Part], keys: Sequence[Sequence[str]]) -> None:
        self.channel, self._homes, self._keys = channel, homes, keys
        tensors = [t for home, names in zip(homes, keys, strict=True) for t in (home.grad, *_kept(home, names))]
        copies, self._arrived = channel.bring(tensors)
        there = iter(copies)
        parts = []
        for home, names in zip(homes, keys):
            grad, weight = next(there), next(there)
            parts.append(Part(weight, grad, {**home.state, **{name: next(there) for name in names}}))
        super().__init__(parts)

    def wait(self) -> list[Part]:
        self.channel.await_arrival(self._arrived)
        return self.parts

    def store(self) -> None:
        """Starts to bring weights and states back."""
        pairs = list(zip(self._homes, self.parts, self._keys))
        here = [t for _, part, names in pairs for t in _kept(part, names)]
        left = self.channel.take_away(here, [t for home, _, names in pairs for t in _kept(home, names)])
        self.channel.release(left)


def _kept(part: Part, keys: Sequence[str]) -> list[Tensor]:
    """What a step changes."""
    return [part.weight, *(part.state[key] for key in keys)]
