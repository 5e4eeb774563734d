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

    An optimizer sees nothing of these. So the model is read when other parameters have gradients than in the step before, and
    every :data:`CHECK_EVERY` steps.

    Attributes:
        present: names of the parameters that had a gradient at the last check.
        steps: since the last check.
    """

    def __init__(self) -> None:
        self.present: frozenset[str] | None = None
        self.steps = CHECK_EVERY

    def check(self, model: nn.Module, groups: Sequence[Group], present: frozenset[str]) -> None:
        """Reads the model.

        Args:
            model: that the optimizer was built from.
            groups: the optimizer's.
            present: names of the parameters with a gradient.
        """
        self.present, self.steps = present, 0
        known = {id(param) for group in groups for param in group["params"]}
        untracked = [
            n for n, p in model.named_parameters() if p.requires_grad and p.grad is not None and id(p) not in known
        ]
        if untracked:
            warnings.warn(
                f"{len(untracked)} parameters have a gradient and are not the optimizer's, so it does not train them: "
                f"{', '.join(untracked[:3])}{' ...' if len(untracked) > 3 else ''}. They were added or unfrozen after it was "
                "built; optimizer.refresh_parameters() takes them in",
                stacklevel=4,
            )
