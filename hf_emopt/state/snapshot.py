"""State of parameters that are stepped together, kept from one step to the next as long as it is the same."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

__all__ = ["KeptStates"]

State = dict[str, Tensor]


class KeptStates:
    """States of parameters that are stepped together, as ``state`` has them and as this rank holds them.

    Attributes:
        params: the parameters.
        states: of each.
        local: of each by its key, an index in the bucket, without that of whole matrices.
        keys: of ``local``.
    """

    def __init__(self, params: list[Tensor], states: list[State], local: dict[int, State]) -> None:
        self.params, self.states, self.local = params, states, local
        self.keys = tuple(local)
        self._names = list(chain.from_iterable(states))
        # Kept, so that no other tensor gets their identity.
        self._entries = list(chain.from_iterable(map(dict.values, states)))

    def still(self, state: dict[Tensor, Any], params: list[Tensor] | None = None) -> bool:
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
