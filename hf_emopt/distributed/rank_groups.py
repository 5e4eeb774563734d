"""The ranks that share an optimizer's parameters: their process groups, and what they agree on in a step.

In a step there is one collective of a few hundred bytes, on the device. Its result says whether a gradient is not finite
anywhere, and which parameters have one. The host does not read it unless a gradient is missing on this rank.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_emopt.distributed.first_step_checks import control_device, verify_plan, verify_replicas, warm_up
from hf_emopt.distributed.layout import Grid, Partition, UnsupportedLayoutError, local_tensor, local_tensors
from hf_emopt.distributed.plan import Bucket, Plan
from hf_emopt.distributed.replica_gradients import Copies, GradientComparison
from hf_emopt.kernels.multi_tensor import all_finite, fits, kernels_run_on

logger = logging.getLogger("hf_emopt")

_device_of = attrgetter("device")
_is_sparse = attrgetter("is_sparse")

Reduction = Callable[[Tensor], Tensor]
"""Reduces a tensor over ranks, in place, and returns it."""


@dataclass(frozen=True)
class GradientCheck:
    """Which gradients there are, and whether they are finite.

    Attributes:
        present: names of the parameters that have a gradient.
        finite: scalar bool on a device: all numbers are finite; ``None`` when not checked, or without gradients.
    """

    present: frozenset[str]
    finite: Tensor | None


def check_gradients(groups: Sequence[dict[str, Any]], checks_finite: bool = True) -> GradientCheck:
    """Reads which parameters have a gradient and are not frozen, and begins to check the numbers on their devices.

    Args:
        groups: parameter groups of the optimizer.
        checks_finite: whether the numbers are checked.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    given = [
        (name, grad)
        for group in groups
        for name, param in zip(group["param_names"], group["params"])
        # A frozen parameter may have the zeros of zero_grad(set_to_none=False); a part of a flat tensor never requires one.
        if (grad := param.grad) is not None and (param.requires_grad or isinstance(param, Partition))
    ]
    present = frozenset([name for name, _ in given])
    grads = local_tensors([grad for _, grad in given])
    if any(map(_is_sparse, grads)):
        name = next(name for (name, _), grad in zip(given, grads) if grad.is_sparse)
        raise RuntimeError(f"{name} has a sparse gradient; use an embedding with sparse=False")
    if not checks_finite:
        return GradientCheck(present, None)
    if len(set(map(_device_of, grads))) == 1 and all(map(Tensor.numel, grads)):
        return GradientCheck(present, _all_finite(grads, grads[0].device))
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for grad in grads:
        if grad.numel():
            by_device[grad.device].append(grad)
    finite: Tensor | None = None
    for device, members in by_device.items():
        flag = _all_finite(members, device)
        finite = flag if finite is None else finite & flag.to(finite.device)
    return GradientCheck(present, finite)


def _all_finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalar bool on the device of all tensors: whether every number is finite."""
    kernels = device.type != "cpu" or "TRITON_INTERPRET" in os.environ
    if kernels and kernels_run_on(device) and fits(tensors, device):
        return all_finite(tensors)
    # The largest absolute value overflows only where a gradient itself has, unlike a sum of squares.
    largest = torch._foreach_norm(list(tensors), ord=float("inf"))
    return torch.isfinite(torch.stack([n.float() for n in largest])).all()


@dataclass(frozen=True)
class StepVerdict:
    """What the ranks agreed on in one step.

    Attributes:
        ok: scalar bool on the control device: the step counts. ``None`` where nothing can make it fail.
        present: names of the parameters that have a gradient.
    """

    ok: Tensor | None
    present: frozenset[str]
    _by_device: dict[torch.device, tuple[Tensor | None, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def on(self, device: torch.device) -> tuple[Tensor | None, Tensor]:
        """:attr:`ok` on a device, and what a step counter there grows by: a scalar, 1.0 where the step counts, else 0.0."""
        if device not in self._by_device:
            # A copy to the host must have arrived before it is read.
            ok = None if self.ok is None else self.ok.to(device, non_blocking=device.type != "cpu")
            self._by_device[device] = (
                ok,
                torch.ones((), dtype=torch.float32, device=device) if ok is None else ok.float(),
            )
        return self._by_device[device]

    def members(self, bucket: Bucket) -> tuple[int, ...]:
        """Indices of a bucket's parameters that take part in the step."""
        present = self.present
        return tuple([i for i, p in enumerate(bucket.parameters) if p.name in present])


class ConsensusGroup:
    """The ranks of an optimizer, and what they agree on in a step.

    Args:
        group: process group of all ranks that share any parameter; ``None`` for one process.
        names: parameters that are shared, in the same order on all ranks.
    """

    def __init__(self, group: Any, names: Sequence[str]) -> None:
        self.group = group
        self.names = tuple(names)
        self.device = torch.device("cpu") if group is None else control_device(group)
        self._nothing_missing: Tensor | None = None
        self._subsets: dict[frozenset[str], ConsensusGroup] = {}

    def subset(self, names: frozenset[str]) -> ConsensusGroup:
        """The same ranks, for steps of some of the parameters at a time."""
        if self.group is None:
            return self
        if names not in self._subsets:
            self._subsets[names] = ConsensusGroup(self.group, [name for name in self.names if name in names])
        return self._subsets[names]

    def agree(self, finite: Tensor | None, present: frozenset[str]) -> StepVerdict:
        """One small collective, or none where there is one process.

        Args:
            finite: scalar bool: this rank's gradients are finite; ``None`` when not checked.
            present: names of this rank's parameters with a gradient, shared or not.

        Returns:
            The step counts where all gradients are finite and no shared parameter has a gradient on some ranks only.
            A rank that misses some reads the device to find out which are missing everywhere. Parameters that only this
            rank misses are present by definition, since another rank has them.
        """
        if self.group is None:
            return StepVerdict(finite, present)
        missing = [name for name in self.names if name not in present]
        if missing or self._nothing_missing is None:
            flags = self._flags(frozenset(missing))
            if not missing:
                self._nothing_missing = flags.clone()
        else:
            flags = self._nothing_missing.clone()
        if finite is not None:
            flags[:, 0] = ~finite.to(self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        has, misses = flags
        ok = (has & misses).amax() == 0
        if not missing:
            return StepVerdict(ok, present)
        somewhere = has[1:].tolist()  # waits for the device, on ranks that miss something
        elsewhere = {name for name, there in zip(self.names, somewhere) if there} - (present & set(self.names))
        if elsewhere:
            logger.warning(
                "this step is skipped on all ranks: rank %d has no gradient of %s, and others have. Gradients must be "
                "synchronized (DistributedDataParallel with find_unused_parameters=True does it for unused branches)",
                dist.get_rank(), ", ".join(sorted(elsewhere)[:5]),
            )  # fmt: skip
        return StepVerdict(ok, present | elsewhere)

    def _flags(self, missing: frozenset[str]) -> Tensor:
        """Two rows, ``[not finite, has it (n)]`` and ``[not finite, misses it (n)]``, uint8.

        A gradient that one rank has and another misses is as bad as one that is not finite.
        """
        has = [name not in missing for name in self.names]
        rows = [[False, *has], [False, *(not h for h in has)]]
        return torch.tensor(rows, dtype=torch.uint8, device=self.device)


class RankGroups:
    """The ranks of one set of plans. In one process all methods return at once.

    Args:
        grids: the ranks of every parameter, by name.
        own_replica_groups: replicas get a process group that nobody else uses in place of the default one. DDP sends its
            buffers on the default group before a forward pass, and they must not queue behind updates that are put off.

    Attributes:
        grids: the same, with all process groups once :meth:`open` was called.
        world_size: ranks that share any parameter.
        consensus: what all of them agree on.
        copies: parameters that ranks hold copies of, once :meth:`open` was called.
        is_open: :meth:`open` has nothing left to do.
    """

    def __init__(self, grids: dict[str, Grid], own_replica_groups: bool = False) -> None:
        self.grids = grids
        self.world_size = max((grid.world_size for grid in grids.values()), default=1)
        self.consensus = ConsensusGroup(None, ())
        self.copies: Copies = ()
        self._steps, self._comparisons = 0, list[GradientComparison]()
        self._own_replica_groups = own_replica_groups
        self.is_open = self.world_size == 1
        self._compute_groups: dict[tuple[int, ...], Any] = {}

    def grid(self, bucket: Bucket) -> Grid:
        """The ranks of a bucket's parameters."""
        return self.grids[bucket.parameters[0].name]

    def open(self, plans: Sequence[Plan], named: Sequence[tuple[str, Tensor]]) -> None:
        """Does all that ranks do together before their first step, once and in the same order on all. Collective.

        Args:
            plans: of the matrices, and of the parameters that ranks hold copies of.
            named: all parameters by name.

        Raises:
            RuntimeError: ranks have different plans, or different values of what should be copies.
            UnsupportedLayoutError: no process group has all ranks that share parameters.
        """
        if self.is_open:
            return
        self.is_open = True
        atexit.unregister(_let_threads_finish)
        # In the order of parameters, so that all ranks make the same groups in the same order.
        grids = {id(grid): grid for grid in self.grids.values()}
        opened = {key: self._with_groups(grid) for key, grid in grids.items()}
        self.grids = {name: opened[id(grid)] for name, grid in self.grids.items()}
        # A gradient must be there on all ranks or on none, but where a step needs no collective.
        local = {p.name for b in plans[0].buckets if b.communication_free for p in b.parameters}
        shared = [name for name, _ in named if self.grids[name].world_size > 1 and name not in local]
        distinct = list(self.grids.values())
        self.consensus = ConsensusGroup(_group_of_all(distinct), shared)
        if self.consensus.device.type == "cpu":
            atexit.register(_let_threads_finish)
        warm_up(distinct, self.consensus.group)
        verify_plan([plan.digest() for plan in plans], self.consensus.group)
        replicas: dict[int, tuple[Any, list[tuple[str, Tensor]]]] = {}
        for name, param in named:
            group = self.grids[name].replica_group
            if group is not None:
                replicas.setdefault(id(group), (group, []))[1].append((name, param))
        for group, members in replicas.values():
            verify_replicas([(name, local_tensor(param)) for name, param in members], group)
        self.copies = list(replicas.values())
        # All ranks make the groups of all compute groups, in one order.
        wanted = {tuple(b.storage.rank(p) for p in members) for b in plans[0].buckets for members in b.compute_groups}
        for ranks in sorted(wanted):
            group = group_of(ranks)
            if dist.get_rank() in ranks:
                dist.all_reduce(torch.zeros(1, device=control_device(group)), group=group)
                self._compute_groups[ranks] = group

    def _with_groups(self, grid: Grid) -> Grid:
        """The grid with process groups for its shards and its replicas.

        All ranks make all groups in one order: a group that only its members make is found by a name that counts the groups
        made before, and ranks that count differently would wait for ever.

        Raises:
            UnsupportedLayoutError: the mesh has not all ranks of the job.
        """
        own = self._own_replica_groups
        if own and grid.replica_group is dist.group.WORLD:
            grid = replace(grid, replica_group=None)
        no_shard_group = grid.shards > 1 and grid.shard_group is None
        no_replica_group = grid.replicas > 1 and grid.replica_group is None
        if not (no_shard_group or no_replica_group):
            return grid
        if grid.world_size != dist.get_world_size():
            raise UnsupportedLayoutError(
                f"parameters are cut or copied over several mesh dimensions, on {grid.world_size} of the job's "
                f"{dist.get_world_size()} ranks; build the device mesh over all ranks"
            )
        if no_shard_group:
            groups = [group_of(row) for row in grid.ranks]
            grid = replace(grid, shard_group=groups[grid.replica])
        if no_replica_group:
            groups = [group_of([row[shard] for row in grid.ranks], own) for shard in range(grid.shards)]
            grid = replace(grid, replica_group=groups[grid.shard])
        return grid

    def compare_gradients(self, ok: Tensor) -> None:
        """Counts a step; compares the gradients of copies in steps 1, 10, 100 and every 1,000th. Collective.

        Args:
            ok: scalar bool: the step counts.

        Raises:
            RuntimeError: on all ranks, when ranks have other gradients.
        """
        self._steps += 1
        if self._steps in (1, 10, 100) or self._steps % 1000 == 0:
            self._comparisons = [GradientComparison(self._steps, *copies, ok) for copies in self.copies]
        if self._comparisons and self._steps >= self._comparisons[0].due:
            for comparison in self._comparisons:
                comparison.check()
            self._comparisons = []

    def reductions(self, bucket: Bucket, compute_group: tuple[int, ...]) -> tuple[Reduction, Reduction]:
        """Sum and maximum over the ranks of a compute group.

        Args:
            compute_group: positions of the ranks in the bucket's grid.
        """
        group = self._compute_groups[tuple(bucket.storage.rank(position) for position in compute_group)]
        return partial(_reduce, op=dist.ReduceOp.SUM, group=group), partial(_reduce, op=dist.ReduceOp.MAX, group=group)


def _reduce(tensor: Tensor, op: Any, group: Any) -> Tensor:
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _group_of_all(grids: Sequence[Grid]) -> Any:
    """The process group of all ranks that share any parameter."""
    ranks = sorted({rank for grid in grids for row in grid.ranks for rank in row})
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    for grid in grids:
        for group in (grid.shard_group, grid.replica_group):
            if group is not None and sorted(dist.get_process_group_ranks(group)) == ranks:
                return group
    raise UnsupportedLayoutError(
        f"no process group has all of the ranks {ranks} that share the optimizer's parameters; build the device mesh over "
        "all ranks of the job, or use one optimizer for the parameters of each mesh"
    )


def _let_threads_finish() -> None:
    """At exit, while threads still run Python: a thread of gloo drops the tensors of a collective a moment after its end, and
    one that does so while the interpreter is taken down aborts the process. ``destroy_process_group`` does not wait for
    threads of a group that anybody still has, such as DistributedDataParallel, and a step ends with a collective."""
    time.sleep(0.2)


_groups: dict[Any, dict[tuple[bool, tuple[int, ...]], Any]] = defaultdict(dict)


def group_of(ranks: Sequence[int], own: bool = False) -> Any:
    """The process group of some ranks, made once in a job. All ranks must call it, in one order.

    Args:
        own: not the default group, even of all ranks.
    """
    world = dist.group.WORLD
    if world not in _groups:  # groups of a world that was destroyed are gone with it
        _groups.clear()
    made, key = _groups[world], (own, tuple(ranks))
    if key not in made:
        everyone = not own and key[1] == tuple(range(dist.get_world_size()))
        made[key] = world if everyone else dist.new_group(list(ranks))
    return made[key]
