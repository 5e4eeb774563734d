"""What the planner needs to know of an optimizer's parameters, made from its groups and from where parameters lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hf_emopt.distributed.assignment import MAX_BUCKET_NUMEL, BucketSizes, bucket_sizes, make_plan
from hf_emopt.distributed.layout import (
    Grid,
    Storage,
    UnsupportedLayoutError,
    check_layout,
    is_sharded,
    storage_of,
    takes_all_ranks,
    whole_numel,
)
from hf_emopt.distributed.plan import Plan, PlannedParameter
from hf_emopt.distributed.tensor_parallel_choice import Choice, ModeOverrides, arrange
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.packing import adapter_at, unpack_matrix_views
from hf_emopt.rules.base import Group, MatrixRule

__all__ = [
    "as_first_planned",
    "hyperparameters",
    "plan_of",
    "planned_copies",
    "planned_matrices",
    "planned_sizes",
    "world_size",
]


def hyperparameters(groups: Sequence[Group]) -> list[Group]:
    """What costs are worked out from, of each group as it is now."""
    plain = (bool, int, float, str, tuple, type(None))
    return [{key: value for key, value in group.items() if isinstance(value, plain)} for group in groups]


def as_first_planned(groups: Sequence[Group], first: Sequence[Group]) -> list[Group]:
    """Groups with the :func:`hyperparameters` of an earlier time, as far as they were there.

    A schedule may change what a matrix costs (``precondition_frequency``, ``ns_steps``). Owners must not follow: state lies
    with them, and a copy of the optimizer, or another plan for the same state, has to find it there.
    """
    return [{**group, **then} for group, then in zip(groups, first)] + list(groups[len(first) :])


def planned_matrices(
    rule: MatrixRule,
    groups: Sequence[Group],
    grids: dict[str, Grid] | None,
    modes: ModeOverrides,
    transport_dtype: str | None,
    first: Sequence[Group] = (),
) -> tuple[list[PlannedParameter], list[Choice]]:
    """Every matrix parameter, and what was chosen for those that tensor parallelism cuts.

    Args:
        rule: whose costs are planned with.
        groups: parameter groups of the optimizer.
        grids: the ranks of each parameter by name; ``None`` for one process.
        modes: of tensor parallelism by parameter, over the groups' own.
        transport_dtype: of the wire by name, or ``None`` for the device's default.
        first: :func:`hyperparameters` that decide on costs and owners instead of the groups' own.

    Raises:
        UnsupportedLayoutError: when a wrapper has laid a parameter out so that its matrices cannot be had.
    """
    planned, params = [], []
    live, groups = groups, as_first_planned(groups, first)
    for group_index, group in enumerate(groups):
        if group["kind"] != "matrix":
            continue
        for position, (name, param) in enumerate(zip(group["param_names"], group["params"])):
            matrix_views = unpack_matrix_views(group["units"][position])
            check_layout(name, param, matrix_views)
            if whole_numel(param) == 0:
                continue
            costs = tuple(u.shape[0] * rule.cost(*u.shape[1:], group) for u in matrix_views)
            storage = storage_of(param, grids[name]) if grids else Storage.whole(param.shape)
            shard_cost = None
            together = grids is None or takes_all_ranks(grids[name])  # a compute group's group is made by all ranks
            # A slice by columns has no whole rows, for which 8-bit state has scales.
            sliceable = group["state_dtype"] != "int8" or is_sharded(param) or param.shape[0] >= param.shape[-1]
            if together and sliceable and rule.can_shard(group) and _is_one_matrix(matrix_views, storage.shape):
                shard_cost = partial(_shard_cost, rule, matrix_views[0].shape[1:], group)
            tag = f"{param.dtype} {param.device}"
            pair, scale = "", 1.0
            adapter = adapter_at(group, position)
            if adapter is not None and adapter.joint:
                pair, shard_cost = (name if adapter.side == "A" else adapter.partner), None
            elif adapter is not None:
                scale = rule.adapter_scale(*matrix_views[0].shape[1:], adapter, live[group_index])
            planned.append(
                PlannedParameter(
                    name, group_index, position, matrix_views, costs, tag, storage, shard_cost, pair=pair, scale=scale
                )
            )
            params.append(param)
    _check_pairs(planned)
    if not grids or all(p.storage.shards == 1 for p in planned):
        return planned, []
    return arrange(planned, params, grids, rule, groups, modes, _wire_bytes(transport_dtype, params))


def _check_pairs(planned: Sequence[PlannedParameter]) -> None:
    """Refuses factors that no rank could have both of in one step."""
    pairs: dict[str, list[PlannedParameter]] = {}
    for parameter in planned:
        if parameter.pair:
            pairs.setdefault(parameter.pair, []).append(parameter)
    for name, members in pairs.items():
        places = {(p.group, p.tag, p.storage.ranks, p.storage.shards) for p in members}
        if len(members) != 2 or len(places) != 1:
            what = (
                "lie on different ranks, devices or in different groups" if len(members) == 2 else "are not both here"
            )
            raise UnsupportedLayoutError(
                f"lora='joint' steps both factors of an adapter together, and {name} and its partner {what}: shard both in "
                "one fully_shard call (or none), keep them in one dtype and on one device, or use lora='separate'"
            )


def planned_copies(groups: Sequence[Group], grids: dict[str, Grid]) -> list[PlannedParameter]:
    """Of the other parameters those that ranks hold copies of: they share the elementwise work and its state."""
    planned = []
    for group_index, group in enumerate(groups):
        if group["kind"] != "aux":
            continue
        for position, (name, param) in enumerate(zip(group["param_names"], group["params"])):
            grid = grids[name]
            check_layout(name, param, ())
            if grid.replicas > 1 and grid.shards == 1 and not is_sharded(param) and param.numel():
                storage = Storage.copies(param.shape, grid)
                tag = f"{param.dtype} {param.device}"
                planned.append(PlannedParameter(name, group_index, position, (), (param.numel(),), tag, storage))
    return planned


def planned_sizes(scheduled: bool, groups: Sequence[Group], offloads: bool, world_size: int) -> BucketSizes:
    """How large an optimizer's buckets are.

    The matrices of a batch fill a GPU better the more they are, and the host is done sooner. In one process nothing has to
    travel beside the mathematics; and a bucket of a rule with factors takes the host longer than its exchange takes. Where
    something travels, buckets are large for the sake of even batches alone. They are small where state is copied to be used,
    which takes memory by the bucket's size.

    Args:
        scheduled: whether the rule has factors that are refreshed by a schedule.
        groups: parameter groups of the optimizer, or anything with their options.
    """
    kinds = {group.get(key, "float32") for group in groups for key in ("state_dtype", "factor_storage")}
    if offloads or kinds != {"float32"}:
        return bucket_sizes()
    large = 2 * MAX_BUCKET_NUMEL
    return bucket_sizes(large if world_size == 1 or scheduled else MAX_BUCKET_NUMEL, large)


def world_size(grids: dict[str, Grid]) -> int:
    """Ranks that share any parameter."""
    return max((grid.world_size for grid in grids.values()), default=1)


def plan_of(
    matrices: Sequence[PlannedParameter],
    rule: MatrixRule,
    groups: Sequence[Group],
    ranks: int,
    offloads: bool,
    overlaps: bool,
) -> Plan:
    """The plan of an optimizer's matrices.

    Args:
        matrices: what :func:`planned_matrices` says.
        ranks: that share any parameter.
        offloads: whether state lies on the host between steps.
        overlaps: whether updates are put off until a forward pass needs them: buckets then follow the model's order.
    """
    return make_plan(matrices, planned_sizes(rule.scheduled, groups, offloads, ranks), forward_order=overlaps)


def _shard_cost(rule: MatrixRule, shape: tuple[int, int], group: Group, k: int) -> int:
    return rule.shard_cost(*shape, k, group)


def _wire_bytes(transport_dtype: str | None, params: Sequence[Tensor]) -> int:
    """Of an element of the messages that carry matrices."""
    if transport_dtype is not None:
        return int(getattr(torch, transport_dtype).itemsize)
    return 4 if params[0].device.type == "cpu" else 2


def _is_one_matrix(matrix_views: Sequence[MatrixView], shape: tuple[int, ...]) -> bool:
    """Whether a parameter is one matrix as it is stored (or its transpose), so that it can be cut along a side."""
    return (
        len(matrix_views) == 1
        and len(shape) == 2
        and matrix_views[0].view == shape
        and matrix_views[0].dim is None
        and not matrix_views[0].batch
    )
