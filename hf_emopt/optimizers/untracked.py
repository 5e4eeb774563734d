"""Parameters of a model that have gradients and that its optimizer does not train."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from hf_emopt.rules.base import Group

CHECK_EVERY = 100
"""Steps between two readings of all parameters of the model, which take a host a millisecond or so."""


class UntrackedParameters:
    """Warns of parameters that were added to a model, or unfrozen, after its optimizer was built.

    The model is read when other parameters have gradients than in the step before, and every :data:`CHECK_EVERY` steps.

    Attributes:
        present: names of the parameters that had a gradient at the last check.
        steps: since the last check.
    """

    def __init__(self) -> None:
        self.present: frozenset[str] | None = None
        self.steps = CHECK_EVERY

    def check(self, model: nn.Module, groups: Sequence[Group], present: frozenset[str]) -> None:
        """Reads the model; ``present`` are the names of the parameters with a gradient."""
        self.present, self.steps = present, 0
        known = {id(param) for group in groups for param in group["params"]}
        trained = (item for item in model.named_parameters() if item[1].requires_grad and item[1].grad is not None)
        untracked = [name for name, param in trained if id(param) not in known]
        if untracked:
            warnings.warn(
                f"{len(untracked)} parameters have a gradient and are not the optimizer's, so it does not train them: "
                f"{', '.join(untracked[:3])}{' ...' if len(untracked) > 3 else ''}. They were added or unfrozen after it was "
                "built; optimizer.refresh_parameters() takes them in",
                stacklevel=4,
            )
