"""Parameters of a model that its optimizer does not train, and of the optimizer that the model does not have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from hf_emopt.rules.base import Group

CHECK_EVERY = 10
"""Steps between two readings of all parameters of the model, which take a host a fifth of a millisecond or so."""


class UntrackedParameters:
    """Warns of parameters that were added to a model, unfrozen, replaced or taken out after its optimizer was built.

    The model is read when other parameters have gradients than in the step before, and every :data:`CHECK_EVERY` steps.

    Attributes:
        present: names of the parameters that had a gradient at the last check.
        steps: since the last check.
    """

    def __init__(self) -> None:
        self.present: frozenset[str] | None = None
        self.steps = CHECK_EVERY

    def check(self, model: nn.Module | None, groups: Sequence[Group], present: frozenset[str]) -> None:
        """Reads the model, if there is one; ``present`` are the names of the parameters with a gradient."""
        had, self.present, self.steps = self.present or (), present, 0
        known = {id(param): name for group in groups for name, param in zip(group["param_names"], group["params"])}
        params = [] if model is None else _parameters(model)
        new = {id(p) for p in params if id(p) not in known and p.requires_grad and p.grad is not None}
        gone = known.keys() - set(map(id, params)) if params else set()
        named = dict(model.named_parameters()) if model is not None and (new or gone) else {}
        found = {
            "had a gradient, and now none has": sorted(had) if model is None and not present else [],
            "have a gradient and are not the optimizer's": [name for name, param in named.items() if id(param) in new],
            # A wrapper may have other parameters under these names for a while.
            "are the optimizer's and not in the model any more": [known[i] for i in gone if known[i] not in named],
        }
        for what, names in found.items():
            if names:
                warnings.warn(
                    f"{len(names)} parameters {what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}. When modules "
                    "are added, replaced, merged or unfrozen, call optimizer.refresh_parameters() afterwards",
                    stacklevel=4,
                )


def _parameters(model: nn.Module) -> list[Tensor]:
    """As ``model.parameters()``, in a third of the time."""
    modules = {id(model): model}
    ahead = [model]
    while ahead:
        new = {
            id(child): child
            for child in ahead.pop()._modules.values()
            if child is not None and id(child) not in modules
        }
        modules |= new
        ahead.extend(new.values())
    return [param for module in modules.values() for param in module._parameters.values() if param is not None]
