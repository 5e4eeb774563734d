"""Parameter groups out of whatever the user passed: a model, named parameters, parameters, or groups of them.

Groups keep plain values by name: wrappers replace Parameter objects and deep-copy groups, and a checkpoint must load without
our classes.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_emopt.routing.lora import LORA_MODES, pack_adapter, unpack_adapter
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.packing import STRUCTURAL_KEYS, pack_matrix_views, unpack_matrix_views
from hf_emopt.routing.route import route_named_parameters, route_parameters, route_parameters_list
from hf_emopt.routing.table import ParameterRoute, RouteTable
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.rules.options import option_names

ParamsArgument = nn.Module | Iterable[Any]

_CHOOSES = ("use_muon", "is_muon", "algorithm", "optimizer", "rule")  # by which other packages' groups choose a rule
_FREE = (*_CHOOSES, *STRUCTURAL_KEYS, "initial_lr", "lr_scale")  # near hyperparameters in name only


@dataclass(frozen=True)
class Derived:
    """A default that ``of`` makes from the other values of a group; picklable, as copies of an optimizer have it too."""

    of: Callable[[Group], Any]


def check_lora_options(rule: MatrixRule, lora: str, lora_lr_ratio: float) -> None:
    """Raises ``ValueError`` for options of adapters that are out of range, or that do not go together."""
    if lora not in LORA_MODES:
        raise ValueError(f"lora={lora!r} is not one of {', '.join(LORA_MODES)}")
    if not isinstance(lora_lr_ratio, (int, float)) or not 0.0 < lora_lr_ratio < math.inf:
        raise ValueError(f"lora_lr_ratio={lora_lr_ratio!r} must be a number above 0; 1 is one rate for both factors")
    if lora == "joint" and not rule.steps_pairs:
        raise ValueError(f"lora='joint' is a rule of Muon and NorMuon, {rule.name} has none: use lora='separate'")
    if lora == "joint" and lora_lr_ratio != 1.0:
        raise ValueError(
            f"lora='joint' gives both factors of an adapter the step that their product needs, and lora_lr_ratio="
            f"{lora_lr_ratio} would undo that: leave it out, or use lora='separate'"
        )


class GroupBuilder:
    """Turns the ``params`` argument into groups of one kind each.

    Args:
        kind_defaults: for ``"matrix"`` and ``"aux"``, the hyperparameters that a group of that kind has, with defaults, of
            which some may be :class:`Derived`.
        matrix_modules, aux_modules, per_head, lora: passed on to :func:`hf_emopt.route_parameters`.
        lora_lr_ratio: the B factors of LoRA adapters get groups of their own with the learning rate times this.
        lora_defaults: hyperparameters that adapter matrices have instead of the others' by rank: what it returns is put into
            groups of their own; ``None`` where they have the same.
    """

    def __init__(
        self,
        kind_defaults: dict[str, Group],
        matrix_modules: str | Sequence[str] | None = None,
        aux_modules: str | Sequence[str] | None = None,
        per_head: bool = False,
        lora: str = "separate",
        lora_lr_ratio: float = 1.0,
        lora_defaults: Callable[[int], Group] | None = None,
    ) -> None:
        self.kind_defaults = kind_defaults
        self.overrides = {"matrix_modules": matrix_modules, "aux_modules": aux_modules, "per_head": per_head}
        self.lora, self.lora_lr_ratio, self.lora_defaults = lora, lora_lr_ratio, lora_defaults
        self.unnamed = 0
        self.known: dict[int, ParameterRoute] = {}  # while groups are built of a model's parameters: routes by their id

    def build(self, params: ParamsArgument) -> tuple[list[Group], RouteTable]:
        """Groups in the order matrix, matrix without decay, auxiliary, auxiliary without decay; empty ones left out.

        The matrix group comes first because trainers log the learning rate of the first group. Groups that are given stay in
        their order, each as one group of every kind in it, or an empty one; ``"user_group"`` is the index of the given one.

        Raises:
            TypeError: when ``params`` is none of the accepted forms, or is a set.
            ValueError: when it is empty, or a tensor cannot be routed without its module.
        """
        if isinstance(params, nn.Module):
            named: dict[str, Tensor] = dict(params.named_parameters())
            table = route_parameters(params, **self.overrides, lora=self.lora)  # type: ignore[arg-type]
            if not len(table):
                raise ValueError("the model has no trainable parameter: every requires_grad is False")
            return self._by_route(table, named), table
        self.known = {}
        if isinstance(params, tuple) and len(params) == 2 and isinstance(params[0], nn.Module):
            model, params = params
            routed = {r.name: r for r in route_parameters(model, **self.overrides, lora=self.lora)}  # type: ignore[arg-type]
            self.known = {id(p): routed[name] for name, p in model.named_parameters() if name in routed}
        if isinstance(params, Tensor):
            raise TypeError("params is a single tensor; pass a list of parameters, named parameters, or the model")
        items = _in_order(params)
        if not items:
            raise ValueError("params is empty; pass the model, its named_parameters(), or parameter groups")
        if not self.known and any(v for v in self.overrides.values()):
            raise ValueError(
                "matrix_modules, aux_modules and per_head choose among a model's modules, and only parameters were "
                "given; pass the model itself, or groups with an explicit 'kind'"
            )
        if (self.lora != "separate" and not self.known) or self.lora_lr_ratio != 1.0:
            raise ValueError(
                "lora and lora_lr_ratio need to know which parameters are the factors of an adapter, and only parameters "
                "were given; pass the model itself, or for a rate of their own groups with their own 'lr'"
            )
        are_groups = all(isinstance(item, dict) for item in items)
        built = [self.from_group(item) for item in (items if are_groups else [{"params": items}])]
        self.known = {}
        groups = [{**group, "user_group": index} for index, (made, _) in enumerate(built) for group in made]
        return groups, RouteTable([r for _, routes in built for r in routes])

    def from_group(self, group: Group) -> tuple[list[Group], list[ParameterRoute]]:
        """A user's group as one group of each kind in it, or an empty one.

        ``group["kind"]`` (``"matrix"`` or ``"aux"``) decides for all its parameters; without it, modules that are known do,
        or else names and shapes.
        """
        # dtypes are kept by name, as all values in groups are plain.
        group = {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in group.items()}
        kind = self.kind_of(group)
        members = _in_order(group.pop("params"))
        names = group.pop("param_names", None)
        if names is not None:
            members = list(zip(names, members, strict=True))
        adapters, _ = group.pop("adapters", None), group.pop("kind", None)
        named, routes = self._route_members(members, kind, group.pop("units", None))
        if adapters is not None:
            by_name = {name: unpack_adapter(packed) for (name, _), packed in zip(members, adapters, strict=True)}
            routes = [replace(route, adapter=by_name[route.name]) for route in routes]
        alike: dict[tuple[bool, str], list[ParameterRoute]] = {}
        for route in routes:
            alike.setdefault((route.kind == "aux", self._part(route) if self.known else ""), []).append(route)
        made = [self._make("aux" if key[0] else "matrix", alike[key], named, group) for key in sorted(alike)]
        return made or [self._make(kind or "aux", [], named, group)], routes

    def kind_of(self, group: Group) -> str | None:
        """The kind that a group's keys say it is of, also in other packages' words; ``None`` where they say nothing.
        ``ValueError`` for a key that is a misspelt hyperparameter, is another rule's alone, or asks for another rule."""
        rule, kind = self.kind_defaults["matrix"]["rule"], group.get("kind")
        choices = {rule: "matrix", "adamw": "aux", "False": "aux"} | ({"True": "matrix"} if "muon" in rule else {})
        for key in [key for key in _CHOOSES if key in group]:
            chosen = choices.get(str(group[key]))
            if chosen is None or kind not in (None, chosen):
                what = "contradicts another key" if chosen else f"is none of {', '.join(choices)}"
                raise ValueError(f"group key {key}={group[key]!r} {what}: kind 'matrix' has {rule}, 'aux' has AdamW")
            kind = chosen
        known = {key for defaults in self.kind_defaults.values() for key in defaults}
        known |= {"momentum"} if "base_momentum" in group else set()  # of a scheduler
        for key in [key for key in group if key not in known and key not in _FREE]:
            if (own := key.removeprefix("aux_")) in known:
                raise ValueError(f"group key {key!r}: inside a group it is {own!r}, in a group of kind 'aux'")
            if key in option_names() or (key in ("maximize", "amsgrad") and group[key]):
                raise ValueError(f"group key {key!r} is no option of groups of {rule} and AdamW: leave it out")
            if close := difflib.get_close_matches(key, known, n=1, cutoff=0.85):
                raise ValueError(f"group key {key!r} is no hyperparameter; did you mean {close[0]!r}?")
        return kind

    def _route_members(
        self, members: list[Any], kind: str | None, matrix_views: list[Any] | None
    ) -> tuple[dict[str, Tensor], list[ParameterRoute]]:
        if kind not in (None, "matrix", "aux"):
            raise ValueError(f"group kind={kind!r} must be 'matrix' or 'aux'")
        are_named = bool(members) and isinstance(members[0], tuple)
        pairs: list[tuple[str, Tensor]] = []
        for item in members:
            if isinstance(item, tuple) != are_named or not isinstance(item[-1] if are_named else item, Tensor):
                found = type(item).__name__
                raise TypeError(f"expected parameters or (name, parameter) pairs throughout, found {found}")
            route = self.known.get(id(item))
            pairs.append(item if are_named else (route.name if route else f"param.{self.unnamed}", item))
            self.unnamed += not are_named
        _check_distinct(pairs)
        packed = matrix_views or [None] * len(pairs)
        given = {name: views for (name, _), views in zip(pairs, packed, strict=True)}
        pairs = [(name, p) for name, p in pairs if p.requires_grad]
        named = dict(pairs)
        by_module = {name: self.known[id(p)] for name, p in pairs if id(p) in self.known}
        own = {name: route for name, route in by_module.items() if kind in (None, route.kind)}
        rest = [(name, p) for name, p in pairs if name not in own]
        if kind is not None:
            own |= {name: _explicit(name, p, kind, given[name]) for name, p in rest}
        else:  # lists are routed by shape; the names given here are unique across groups
            table = route_named_parameters(rest) if are_named else route_parameters_list([p for _, p in rest])
            own |= {name: route for route, (name, _) in zip(table, rest, strict=True)}
        return named, [replace(own[name], name=name) for name, _ in pairs]

    def _by_route(self, table: RouteTable, named: dict[str, Tensor]) -> list[Group]:
        groups = []
        for kind in ("matrix", "aux"):
            for decay in (True, False):
                alike: dict[str, list[ParameterRoute]] = {}
                for route in table:
                    if (route.kind, route.decay) == (kind, decay):
                        alike.setdefault(self._part(route), []).append(route)
                for part in sorted(alike):  # what belongs to no adapter first
                    extra: Group = {} if decay else {"weight_decay": 0.0}
                    name = "_".join([kind, *([part] if part else []), *([] if decay else ["no_decay"])])
                    extra |= {"name": name} if name != kind else {}
                    if part == "lora_B":
                        extra["lr"] = self.kind_defaults[kind]["lr"] * self.lora_lr_ratio
                    groups.append(self._make(kind, alike[part], named, extra))
        return groups

    def _part(self, route: ParameterRoute) -> str:
        """Which group of its kind a parameter belongs to, by what is different for factors of adapters."""
        if route.adapter is None:
            return ""
        if self.lora_lr_ratio != 1.0 and route.adapter.side == "B":
            return "lora_B"
        return "lora" if self.lora_defaults is not None and route.kind == "matrix" else ""

    def _make(self, kind: str, routes: list[ParameterRoute], named: dict[str, Tensor], given: Group) -> Group:
        ranks = [r.adapter.rank for r in routes if r.adapter is not None and kind == "matrix"]
        of_adapters = self.lora_defaults(max(ranks)) if ranks and self.lora_defaults is not None else {}
        group = {**self.kind_defaults[kind], **of_adapters, **given}
        for key, value in self.kind_defaults[kind].items():
            if isinstance(value, Derived) and (group[key] is value or group[key] is None):
                group[key] = value.of(group)
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # one of its own: a scheduler that multiplies it would do so once a group
        group.setdefault("name", kind)
        group["kind"] = kind
        group["params"] = [(r.name, named[r.name]) for r in routes]
        if not routes:  # of which torch makes no names
            group["param_names"] = []
        if kind == "matrix":
            group["units"] = [pack_matrix_views(r.matrix_views) for r in routes]
        if any(r.adapter is not None for r in routes):
            group["adapters"] = [pack_adapter(r.adapter) for r in routes]
        return group


def warn_of_unnamed(routes: Iterable[ParameterRoute], stacklevel: int) -> None:
    """Warns of nameless matrices with more outputs than inputs, where no other takes these outputs: of no hidden layer."""
    shapes = {r.name: r.shape for r in routes if r.reason.startswith("by name: two") and r.name.startswith("param.")}
    inputs, ratio = {shape[-1] for shape in shapes.values()}, 1 if len(shapes) > 1 else 8
    odd = [f"{name} {s}" for name, s in shapes.items() if s[0] > s[-1] * ratio and s[0] not in inputs]
    if odd:
        warnings.warn(
            f"{len(shapes)} parameters without names are trained as plain matrices, and {len(odd)} of them look like "
            f"embeddings, heads, fused projections or adapters: {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}. Pass "
            "the model, (model, groups) or model.named_parameters(); or groups with 'kind': 'matrix' or (AdamW) 'aux'",
            stacklevel=stacklevel,
        )


def with_model(params: ParamsArgument, models: Sequence[nn.Module]) -> ParamsArgument:
    """``(model, params)`` with the first of the models that has most of them; ``params`` where none has any."""
    if isinstance(params, (nn.Module, Tensor)):
        return params
    listed = [{**i, "params": _in_order(i["params"])} if isinstance(i, dict) else i for i in _in_order(params)]
    flat = [p for i in listed for p in (i["params"] if isinstance(i, dict) else [i])]
    ids = {id(p[-1] if isinstance(p, tuple) else p) for p in flat}
    shared = [sum(id(p) in ids for p in model.parameters()) for model in models]
    return (models[shared.index(max(shared))], listed) if any(shared) else listed


def _in_order(params: Any) -> list[Any]:
    """The members, of what has them in an order: without names, that says which parameters of two ranks are one."""
    if isinstance(params, set | frozenset):
        raise TypeError(
            "params is a set, whose order is another in every process and run, and the order of parameters says which of "
            "another rank or of a checkpoint is the same; pass a list of them, their names too, or the model"
        )
    return [params] if isinstance(params, Tensor) else list(params)


def _check_distinct(pairs: list[tuple[str, Tensor]]) -> None:
    first: dict[int, str] = {}
    for name, param in pairs:
        if id(param) in first:
            raise ValueError(
                f"{name} and {first[id(param)]} are one parameter; pass it once, as model.named_parameters() does"
            )
        first[id(param)] = name
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("two parameters have the same name; names identify state in checkpoints, so make them unique")


def _explicit(name: str, param: Tensor, kind: str, packed: list[Any] | None) -> ParameterRoute:
    shape = tuple(param.shape)
    if kind == "aux":
        return ParameterRoute(name, shape, "aux", (), True, "the group says so", "")
    if packed is None and len(shape) < 2:
        raise ValueError(f"{name} has shape {shape} and is in a group of kind 'matrix'; a matrix has two dimensions")
    if packed is None and len(shape) > 3:
        raise ValueError(
            f"{name} has shape {shape} and is in a group of kind 'matrix': without its module nobody knows whether it is a "
            "convolution (one matrix) or a stack of matrices. Pass the model, or put it into a group of kind 'aux'"
        )
    matrix_views = (MatrixView.whole(shape),) if packed is None else unpack_matrix_views(packed)
    return ParameterRoute(name, shape, "matrix", matrix_views, True, "the group says so", "")


def describe_torch_group(group: Group) -> str:
    """Name, size and learning rate of a group, for tables and messages."""
    count = sum(p.numel() for p in group["params"])
    size = f"{len(group['params'])} parameters, {count:,} elements"
    return f"{group['name']}: {size}, lr {float(group['lr']):g}, weight decay {group['weight_decay']:g}"


BY_PARAMETER = ("params", "param_names", "units", "adapters")
"""Keys of a group that have an entry for each parameter."""


def keep_parameters(groups: Sequence[Group], kept: set[int]) -> list[str]:
    """Drops all parameters but those with these ``id`` from groups, in place, and returns the names of the dropped ones."""
    dropped: list[str] = []
    for group in groups:
        stay = [index for index, param in enumerate(group["params"]) if id(param) in kept]
        dropped += [name for index, name in enumerate(group["param_names"]) if index not in stay]
        for key in BY_PARAMETER:
            if key in group:
                group[key] = [group[key][index] for index in stay]
    return dropped


def take_in(groups: Sequence[Group], built: Sequence[Group], known: set[int]) -> tuple[list[str], list[Group]]:
    """Adds parameters to the groups of their kind, in place.

    Args:
        built: groups of all parameters, as :meth:`GroupBuilder.build` makes them.
        known: of the parameters that groups have, by ``id``.

    Returns:
        Names of all parameters that are new, and groups of those of a kind that there was none of.
    """
    added: list[str] = []
    new_kinds: list[Group] = []
    live = {group["name"]: group for group in groups}
    for group in built:
        fresh = [index for index, (_, param) in enumerate(group["params"]) if id(param) not in known]
        if not fresh:
            continue
        added += [group["params"][index][0] for index in fresh]
        part = dict(group)
        for key in BY_PARAMETER:
            if key in part:
                part[key] = [part[key][index] for index in fresh]
        target = live.get(group["name"])
        if target is None:
            new_kinds.append(part)
            continue
        if ("adapters" in part) != ("adapters" in target):
            part.setdefault("adapters", [()] * len(fresh))
            target.setdefault("adapters", [()] * len(target["params"]))
        target["param_names"] += [name for name, _ in part["params"]]
        target["params"] += [param for _, param in part["params"]]
        for key in ("units", "adapters"):
            if key in part:
                target[key] += part[key]
    return added, new_kinds
