"""The plan of an optimizer: its parameters as the planner sees them, made from parameter groups and storage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hf_emopt.distributed.assignment import make_plan, planned_sizes
from hf_emopt.distributed.communication_dtype import communication_dtype
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
from hf_emopt.distributed.tensor_parallel import tensor_slices
from hf_emopt.distributed.tensor_parallel_choice import Choice, ModeOverrides, choose_modes, matrix_costs
from hf_emopt.routing.matrix_view import MatrixView
from hf_emopt.routing.packing import adapter_at, unpack_matrix_views
from hf_emopt.rules.base import Group, MatrixRule


def hyperparameters(groups: Sequence[Group]) -> list[Group]:
    """The current hyperparameters of each group, from which costs are computed."""
    plain = (bool, int, float, str, tuple, type(None))
    return [{key: value for key, value in group.items() if isinstance(value, plain)} for group in groups]


def as_first_planned(groups: Sequence[Group], first: Sequence[Group]) -> list[Group]:
    """Groups with the :func:`hyperparameters` of an earlier time where they had them.

    A schedule may change the cost of a matrix (``precondition_frequency``, ``ns_steps``). Owners must not change with it:
    they hold state, which a copy of the optimizer, or another plan for the same state, has to find there.
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
    """Every matrix parameter, and the modes that were chosen for those that tensor parallelism slices.

    Args:
        grids: the ranks of each parameter by name; ``None`` for one process.
        first: :func:`hyperparameters` that decide on costs and owners instead of the groups' own.

    Raises:
        UnsupportedLayoutError: when the storage of a parameter hides its matrices.
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
            costs = matrix_costs(rule, group, matrix_views)
            storage = storage_of(param, grids[name]) if grids else Storage.whole(param.shape)
            shard_cost = None
            together = grids is None or takes_all_ranks(grids[name])  # all ranks make a compute group's process group
            # 8-bit state has a scale for each whole row, which a slice by columns does not have.
            sliceable = group["state_dtype"] != "int8" or is_sharded(param) or param.shape[0] >= param.shape[-1]
            if together and sliceable and rule.can_shard(group) and _is_one_matrix(matrix_views, storage.shape):
                m, n = matrix_views[0].shape[1:]
                shard_cost = partial(rule.shard_cost, m, n, group=group)
            tag = f"{param.dtype} {param.device}"
            pair, scale = "", 1.0
            adapter = adapter_at(group, position)
            if adapter is not None and adapter.joint:
                pair, shard_cost = (name if adapter.side == "A" else adapter.partner), None
            elif adapter is not None:
                scale = rule.adapter_scale(*matrix_views[0].shape[1:], adapter, live[group_index])
            where = name, group_index, position
            planned.append(
                PlannedParameter(*where, matrix_views, costs, tag, storage, shard_cost, pair=pair, scale=scale)
            )
            params.append(param)
    _check_pairs(planned)
    if not grids or all(p.storage.shards == 1 for p in planned):
        return planned, []
    dtype = communication_dtype(params[0].dtype, params[0].device.type, transport_dtype)
    return choose_modes(planned, tensor_slices(planned, params, grids), rule, groups, modes, dtype.itemsize)


def _check_pairs(planned: Sequence[PlannedParameter]) -> None:
    """Refuses pairs of factors that no rank could have together in one step."""
    pairs: dict[str, list[PlannedParameter]] = {}
    for parameter in planned:
        if parameter.pair:
            pairs.setdefault(parameter.pair, []).append(parameter)
    for name, members in pairs.items():
        layouts = {(p.group, p.tag, p.storage.ranks, p.storage.shards) for p in members}
        if len(members) != 2 or len(layouts) != 1:
            apart = "lie on different ranks, devices or in different groups"
            what = apart if len(members) == 2 else "are not both here"
            raise UnsupportedLayoutError(
                f"lora='joint' steps both factors of an adapter together, and {name} and its partner {what}: shard both in "
                "one fully_shard call (or none), keep them in one dtype and on one device, or use lora='separate'"
            )


def planned_copies(groups: Sequence[Group], grids: dict[str, Grid]) -> list[PlannedParameter]:
    """The elementwise parameters of which ranks hold copies: the ranks share their steps and their state."""
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
    """The plan of an optimizer's matrices, in the model's order where updates wait for a forward pass (``overlaps``)."""
    return make_plan(matrices, planned_sizes(rule.scheduled, groups, offloads, ranks), forward_order=overlaps)


def _is_one_matrix(matrix_views: Sequence[MatrixView], shape: tuple[int, ...]) -> bool:
    """Whether a parameter is one matrix as it is stored (or its transpose), so that it can be sliced."""
    if len(matrix_views) != 1 or len(shape) != 2:
        return False
    return matrix_views[0].view == shape and matrix_views[0].dim is None and not matrix_views[0].batch
