"""The step of a bucket of LoRA pairs: both factors of an adapter go to one owner, which makes one update for the two.

The update of one factor depends on the other factor, so the owner needs the weights and the momentum of both. Under DDP it
has them; shards (FSDP2, ZeRO) are sent. Adapters are small: only other buckets hide the collectives of a bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.distributed.exchange import Arrival
from hf_emopt.distributed.layout import local_tensor
from hf_emopt.distributed.plan import Bucket
from hf_emopt.engine.bucket_members import BucketMembers
from hf_emopt.engine.bucket_step import BucketStep
from hf_emopt.engine.context import Step
from hf_emopt.formats.moments import is_moment
from hf_emopt.formats.rounding_noise import moment_noise
from hf_emopt.routing.lora import Adapter
from hf_emopt.routing.packing import adapter_at
from hf_emopt.rules.base import state_dtype
from hf_emopt.rules.lora_pairs import Factor
from hf_emopt.state.store import SwapIn

State = dict[str, Tensor]


@dataclass(frozen=True)
class _Pair:
    """Indices of a pair among the owned regions: of the factor that starts nonzero, and of the one that starts at zero."""

    nonzero_init: int
    zero_init: int
    adapter: Adapter


class LoraPairsStep(BucketStep):
    """One step of a bucket whose parameters are pairs of factors.

    The group's weight decay is the product's, so each factor gets half.

    Raises:
        RuntimeError: one factor of a pair has a gradient and the other has none.
    """

    def __init__(self, step: Step, members: BucketMembers) -> None:
        super().__init__(step, members)
        _check_complete(members.bucket, members.present)
        self.apply_group = {**self.group, "weight_decay": self.group["weight_decay"] / 2}
        self._inputs: list[Tensor] = []
        self._weights: list[Tensor] = []

    def accumulate(self) -> tuple[Arrival, ...]:
        members, exchange = self.members, self.exchange
        with self._swapped_in_slices("moments", is_moment) as states:
            self.slices = self._slices(states)
            accumulated = self._own_memory(self._accumulated(), states)
            inputs = [x for x in accumulated if x is not None]
            if self.observer is not None:
                self.observer.accumulated(self)
        if exchange is not None and members.sharded and exchange.travels:
            weights = [s.weight for s in self.slices]
            return exchange.storage_to_compute(inputs), members.exact_exchange.storage_to_compute(weights)
        if members.sharded:  # over one rank
            rows = [members.row[s.parameter] for s in members.owned]
            inputs = [inputs[k].view(s.shape) for k, s in zip(rows, members.owned)]
            weights = [self.slices[k].weight.view(s.shape) for k, s in zip(rows, members.owned)]
        else:
            weights = [local_tensor(members.params[members.row[s.parameter]]) for s in members.owned]
        self._inputs = [x.to(members.device) for x in inputs]
        self._weights = [w.to(members.device, x.dtype) for w, x in zip(weights, self._inputs)]
        return ()

    def _transform(self, arrivals: tuple[Arrival, ...]) -> list[Tensor]:
        """Both updates of each pair."""
        members, exchange = self.members, self.exchange
        if arrivals:
            assert exchange is not None
            dtypes = [state_dtype(members.params[members.row[s.parameter]]) for s in members.owned]
            self._inputs, self._weights = (
                [torch.empty(s.shape, dtype=d, device=members.device) for s, d in zip(members.owned, dtypes)]
                for _ in arrivals
            )
            exchange.unpack("received", arrivals[0], self._inputs)
            members.exact_exchange.unpack("received", arrivals[1], self._weights)
        for b, batch in enumerate(members.batches):  # makes the state of whole factors
            self.context.store.of_batch((members.index, b), members.bucket, batch, self.group)
        updates: list[Tensor] = [torch.empty(0)] * len(members.owned)
        if not members.owned:
            return updates
        kept = {s.parameter: self._matrix_state(s.parameter) for s in members.owned}
        like = self._inputs[0]
        noise = moment_noise(members.index, self.group, like.device, 0, 1)
        request = SwapIn(("pairs", members.index), like.device, state_dtype(like), ok=self.ok, noise=noise)
        with self.context.store.swapped_in(list(kept.values()), self.group, request) as swapped:
            states = dict(zip(kept, swapped))
            for pairs in self._pairs_by_shape():
                self._transform_pairs(pairs, states, updates)
        return updates

    def _pairs_by_shape(self) -> list[list[_Pair]]:
        members = self.members
        index = {members.bucket.parameters[s.parameter].name: k for k, s in enumerate(members.owned)}
        alike: dict[tuple[object, ...], list[_Pair]] = defaultdict(list)
        for k in index.values():
            planned = members.bucket.parameters[members.owned[k].parameter]
            adapter = adapter_at(self.context.groups[members.bucket.group], planned.position)
            assert adapter is not None
            if adapter.zero_init:
                other = index[adapter.partner]
                shapes = [members.owned[i].matrix_views[0].shape[1:] for i in (k, other)]
                alike[(adapter.side, *shapes)].append(_Pair(other, k, adapter))
        return list(alike.values())

    def _transform_pairs(self, pairs: Sequence[_Pair], states: dict[int, State], updates: list[Tensor]) -> None:
        """Fills in the updates of pairs of one shape, from one call of the rule."""
        members, owned = self.members, self.members.owned
        counts = [owned[pair.zero_init].matrix_views[0].shape[0] for pair in pairs]
        sides = [pair.nonzero_init for pair in pairs], [pair.zero_init for pair in pairs]
        factors: list[Factor] = []
        for indices in sides:
            kept = [states[owned[k].parameter] for k in indices]
            state = {name: torch.cat([s[name] for s in kept]) for name in kept[0]}
            weight, x = (
                torch.cat([owned[k].matrix_views[0].extract(t[k]) for k in indices])
                for t in (self._weights, self._inputs)
            )
            factors.append(Factor(weight, x, state))
        # The scaling is kept, since a copy of new numbers to a device makes the host wait for it.
        key = (id(members), sides[1][0])
        scaling = self.context.members.get(key)
        if scaling is None:
            values = [pair.adapter.scaling for pair, count in zip(pairs, counts) for _ in range(count)]
            like = factors[1].weight
            scaling = torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]
            self.context.keep_members(key, scaling)
        shape = pairs[0].adapter.outputs, pairs[0].adapter.inputs
        nonzero_init, zero_init = factors
        results = self.rule.transform_pair(nonzero_init, zero_init, scaling, shape, self.group, self.ok)
        self.context.counts["transforms"] += sum(counts)
        for indices, result, factor in zip(sides, results, factors):
            for part, k in zip(result.split(counts), indices):
                updates[k] = torch.empty(owned[k].shape, dtype=part.dtype, device=part.device)
                owned[k].matrix_views[0].insert(updates[k], part)
            for name, value in factor.matrix_state.items():
                for row, k in zip(value.split(counts), indices):
                    states[owned[k].parameter][name].copy_(row)

    def _matrix_state(self, i: int) -> State:
        """State of the one matrix view of a parameter, as views of the tensors that keep it."""
        state: State = self.context.store.state[self.context.parameter(self.members.bucket, i)]
        return {name.removesuffix(".0"): value for name, value in state.items() if name.endswith(".0")}


def _check_complete(bucket: Bucket, present: Sequence[int]) -> None:
    here = {bucket.parameters[i].name for i in present}
    factors: dict[str, list[str]] = defaultdict(list)
    for parameter in bucket.parameters:
        factors[parameter.pair].append(parameter.name)
    for names in factors.values():
        missing = [name for name in names if name not in here]
        if missing and len(missing) < len(names):
            alone = next(name for name in names if name in here)
            raise RuntimeError(
                f"lora='joint' steps both factors of an adapter together, and in this step {alone} has a gradient and "
                f"{missing[0]} has none: train or freeze both, or use lora='separate'"
            )
