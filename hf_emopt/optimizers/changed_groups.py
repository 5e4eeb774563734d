"""Hyperparameters and parameters that somebody changes in ``param_groups`` of a running optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import count, zip_longest
from typing import Any

import torch
from torch import Tensor

from hf_emopt.distributed.layout import Partition, UnsupportedLayoutError
from hf_emopt.optimizers.param_groups import BY_PARAMETER
from hf_emopt.optimizers.validation import check_dtype, validate_group
from hf_emopt.routing.parameter import global_shape
from hf_emopt.rules.base import Group, MatrixRule, state_dtype
from hf_emopt.state.forms import elementwise_state, matrix_state

_FORMS = ("state_dtype", "factor_storage", "low_precision_weights")
"""They say in which form state is kept, which is made when a parameter is first stepped."""

_FREE = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "rounding_seed"})
"""What changes in most steps, and is no more than a number."""


_NUMBER = "_hf_emopt_number"
_numbers = count(1)


class ChangedGroups:
    """Checks groups as the constructor does, when they are not what they were.

    Args:
        rule: of the matrices.
        groups: the optimizer's own, which :meth:`check` reads.
        kind_of: checks the keys of a group.
        rates: the learning rates that groups were built with.
    """

    def __init__(self, rule: MatrixRule, groups: Sequence[Group], kind_of: Any, rates: Sequence[float]) -> None:
        self._rule, self._groups, self._kind_of = rule, groups, kind_of
        # Two of different rates stand for all, as what loses one ratio loses every ratio.
        other = next((index for index, (_, rate) in enumerate(zip(groups, rates)) if rate != rates[0]), None)
        self._pair = None if other is None else ((groups[0], rates[0]), (groups[other], rates[other]))
        self._known = [_values(group) for group in groups]
        self._sizes = [len(group) for group in groups]
        for group, known in zip(groups, self._known):  # changed before there were steps
            self._check(group, known)

    def check(self) -> None:
        """To be called before each step. Warns where different learning rates have become one.

        Raises:
            ValueError: a value is out of range, or asks for state that there is none of.
        """
        for index, (group, known) in enumerate(zip(self._groups, self._known)):
            # What was a plain value may have become a tensor, which is no longer compared.
            if any(group.get(key) != value for key, value in known.items()) or len(group) != self._sizes[index]:
                now = _values(group)
                if now != known:
                    self._check(group, known)
                    self._known[index] = now
                self._sizes[index] = len(group)
        if self._pair is not None:
            (one, rate), (other, other_rate) = self._pair
            now = one["lr"]
            if not (isinstance(now, Tensor) and now.device.type != "cpu") and now == other["lr"] and now > 0.0:
                self._pair = None
                warnings.warn(
                    f"the groups {one['name']!r} and {other['name']!r} were built with the learning rates {rate:g} and "
                    f"{other_rate:g}, and both have {float(now):g} now: one max_lr, base_lr or min_lr for all loses their "
                    "ratio. Give the scheduler a list, such as [g['lr'] for g in optimizer.param_groups]",
                    stacklevel=4,
                )

    def _check(self, group: Group, known: dict[str, Any]) -> None:
        try:
            if group["kind"] != known["kind"]:
                raise ValueError(f"kind from {known['kind']!r} to {group['kind']!r}, which it is for good")
            self._kind_of(group)
            validate_group({**group, "params": []}, self._rule, [], {"lr": None, "weight_decay": None})
        except ValueError as error:
            raise ValueError(f"the group {group['name']!r} was changed between steps: {error}") from None
        changed = [key for key in known if group.get(key) != known[key]]
        if changed == ["weight_decay"] or (changed == ["momentum"] and "base_momentum" in group):  # as schedules do
            return
        before = {**group, **known}
        more = self._names(group) - self._names(before)
        if not more and all(group.get(key) == known.get(key) for key in _FORMS):
            return
        what = ", ".join(f"{key} from {known[key]!r} to {group.get(key)!r}" for key in changed)
        raise ValueError(
            f"the group {group['name']!r} was changed between steps, {what}: that needs other state than there is. Build a "
            "new optimizer with it, which can load this one's state_dict() where only the form of state differs"
        )

    def _names(self, group: Group) -> set[str]:
        """Entries of state that its parameters have."""
        like = torch.empty(2, 2, device="meta")
        names = set(elementwise_state(self._rule, group, like, like.shape))
        return names | (set(matrix_state(self._rule, group, (1, 2, 2), like)) if group["kind"] == "matrix" else set())


class KnownParameters:
    """What plans and state are made for: the parameter of each name, its whole shape, and the dtype of its state."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def __getstate__(self) -> dict[str, Any]:  # a copy of an optimizer has other parameters
        return {"_known": {name: (0, *form) for name, (_, *form) in self._known.items()}}

    def note(self, groups: Sequence[Group]) -> None:
        """Takes the parameters of groups as they are."""
        pairs = [pair for group in groups for pair in zip(group["param_names"], group["params"])]
        self._known |= {name: (_number(param), *_form(param)) for name, param in pairs}

    def changed(self, groups: Sequence[Group], refused: str = "") -> set[str]:
        """Names of the parameters that state does not fit any more. A wrapper may put others in place, of the same shape.

        Args:
            refused: ``"all"`` changes are refused, or those of the shape of ``"matrices"``.

        Raises:
            UnsupportedLayoutError: lists of a group were edited, a gradient has another shape, or a change is refused.
            ValueError: a parameter has a dtype that cannot be stepped.
        """
        names, changed = {number: name for name, (number, *_) in self._known.items() if number}, set()
        for group in groups:
            sizes = {key: len(group[key]) for key in BY_PARAMETER if key in group}
            for name, p in zip_longest(group["param_names"], group["params"]):
                there = names.get(getattr(p, _NUMBER, 0), name)
                if len({*sizes.values()}) > 1 or there != name:
                    raise UnsupportedLayoutError(
                        f"the lists of group {group['name']!r} were edited in place ({sizes}, {there} at {name}): "
                        "use optimizer.add_param_group({'params': [(name, parameter)]}), or optimizer.refresh_parameters() "
                        "when the model has changed. If DeepSpeed did it, import hf_emopt before deepspeed.initialize"
                    )
                check_dtype(name, p)
                now, was = _form(p), self._known.get(name, (None, *_form(p)))[1:]
                resized = group["kind"] == "matrix" and was[0] != now[0]
                if was != now and (refused == "all" or (refused and resized)):
                    raise UnsupportedLayoutError(
                        f"{name} was {was[0]} with state in {was[1]} and is {now[0]} with {now[1]}: after such a change call "
                        "optimizer.refresh_parameters(), which starts its state anew and keeps all other, or build a new "
                        "optimizer. Where FSDP1 has flattened it, use FSDP2"
                    )
                if p.grad is not None and (p.grad.shape, p.grad.device) != (p.shape, p.device):
                    raise UnsupportedLayoutError(
                        f"{name} is {tuple(p.shape)} on {p.device}, its gradient {tuple(p.grad.shape)} on {p.grad.device}: "
                        "call zero_grad() when you have put another tensor into .data"
                    )
                changed |= {name} if was != now else set()
        return changed


def _number(param: Tensor) -> int:
    """The parameter's own number. A weak reference would keep ``swap_tensors`` from it, with which ``model.to()`` moves
    DTensors, and an ``id`` is given again once a wrapper has replaced the parameter."""
    if not hasattr(param, _NUMBER):
        setattr(param, _NUMBER, next(_numbers))
    return int(getattr(param, _NUMBER))


def _form(param: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return param.full_shape if isinstance(param, Partition) else global_shape(param), state_dtype(param)


def _values(group: Group) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple, type(None))
    return {key: value for key, value in group.items() if key not in _FREE and isinstance(value, plain)}
