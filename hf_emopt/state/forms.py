"""State in the form in which it is kept: packed, laid out as its parameter, and at home on the host where it is offloaded.

:class:`Lender` hands it out in the form in which it is computed with, on the device of the mathematics, for as long as a
phase of a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hf_emopt.distributed.layout import Partition, UnsupportedLayoutError, local_tensor
from hf_emopt.formats.master_weights import WEIGHT_STATE, init_weight_state
from hf_emopt.formats.moments import is_coded, is_moment, is_scale, packed_like, scale_shape, unpacked, update_packed
from hf_emopt.routing.packing import unpack_matrix_views
from hf_emopt.rules.adamw import init_adamw_state
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.state.host_transfer import home_of
from hf_emopt.state.offload import StateOffload

__all__ = [
    "Lender",
    "OffloadState",
    "check_state_options",
    "describe_memory",
    "elementwise_state",
    "is_weight_state",
    "laid_out",
    "matrix_state",
    "moves",
    "shape_of_entry",
    "state_bytes",
]

State = dict[str, Tensor]

OffloadState = Literal["cpu"]


def check_state_options(rule: MatrixRule, groups: Sequence[Group], offload_state: str | None) -> None:
    """Refuses what a layout cannot keep.

    Raises:
        UnsupportedLayoutError: naming the parameter, the reason and what to use.
    """
    for group in groups:
        for name, param in zip(group["param_names"], group["params"]):
            if isinstance(param, Partition) and offload_state is not None:
                raise UnsupportedLayoutError(
                    f"offload_state={offload_state!r} is not for DeepSpeed's ZeRO, which offloads by itself: leave it out "
                    'and set "offload_optimizer": {"device": "cpu"} in the DeepSpeed configuration'
                )
            if group["state_dtype"] == "float32":
                continue
            if isinstance(param, Partition):
                raise UnsupportedLayoutError(
                    f"state_dtype={group['state_dtype']!r} needs parameters in their shape, and DeepSpeed's ZeRO has "
                    f"flattened {name}: use state_dtype='float32', or FSDP2 instead of ZeRO"
                )
            if group["state_dtype"] != "int8" or not isinstance(param, DTensor) or not is_coded(param.shape):
                continue
            meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
            has_moments = any(is_moment(key) for key in elementwise_state(rule, group, meta, meta.shape))
            rows = all(isinstance(p, Replicate) or (type(p) is Shard and p.dim == 0) for p in param.placements)
            if has_moments and not rows:
                raise UnsupportedLayoutError(
                    f"state_dtype='int8' has a scale for every run inside a row, and {name} is laid out as "
                    f"{param.placements} (tensor parallelism, or FSDP2 along another dimension than the first): use "
                    "state_dtype='bfloat16', or FSDP2 or HSDP along the first dimension"
                )


def elementwise_state(rule: MatrixRule, group: Group, like: Tensor, whole: Sequence[int]) -> State:
    """State with a parameter's shape, as it is before the first step, ``step`` apart.

    Args:
        like: the parameter, or the part of it that state is made for; a plain tensor.
        whole: shape of the whole parameter.
    """
    fresh = rule.init_state(like, group) if group["kind"] == "matrix" else init_adamw_state(like)
    return packed_like(fresh, group["state_dtype"], whole) | init_weight_state(like, group["low_precision_weights"])


def matrix_state(rule: MatrixRule, group: Group, shape: tuple[int, int, int], like: Tensor) -> State:
    """State of ``(B, m, n)`` whole matrices, as it is before the first step."""
    return packed_like(rule.init_matrix_state(shape, group, like), group["state_dtype"])


def state_bytes(rule: MatrixRule, group: Group, param: Tensor, shapes: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of all state of a parameter after its first step, counts included; of one process, without any memory.

    Args:
        shapes: ``(B, m, n)`` of its matrices; none for an auxiliary parameter.
    """
    meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
    total = 4 + sum(t.nbytes for t in elementwise_state(rule, group, meta, meta.shape).values())
    if group["kind"] == "matrix" and rule.scheduled:
        total += 8  # rounds
    return total + sum(t.nbytes for shape in shapes for t in matrix_state(rule, group, shape, meta).values())


def describe_memory(rule: MatrixRule, groups: Sequence[Group], offload_state: str | None) -> str:
    """One line on the bytes of all state, of all ranks together."""
    total = numel = 0
    kinds = sorted({str(group["state_dtype"]) for group in groups})
    for group in groups:
        for position, param in enumerate(group["params"]):
            matrix_views = unpack_matrix_views(group["units"][position]) if group["kind"] == "matrix" else ()
            if param.numel():
                total += state_bytes(rule, group, param, [matrix_view.shape for matrix_view in matrix_views])
                numel += param.numel()
    where = "" if offload_state is None else f", on the host ({offload_state}) between steps"
    each = f"{total / max(1, numel):.2f} bytes a parameter"
    return f"state: {total:,} bytes ({each}), moments in {' and '.join(kinds)}{where}"


def shape_of_entry(key: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of an entry of elementwise state of a parameter of this shape."""
    return scale_shape(shape) if is_scale(key) else tuple(shape)


def is_weight_state(key: str) -> bool:
    """Whether an entry keeps what a 16-bit weight cannot hold."""
    return key in WEIGHT_STATE


def moves(key: str) -> bool:
    """Whether an entry is offloaded: all but the few numbers that a step reads before anything else, on device or host."""
    return key != "step" and not key.startswith(("rounds", "pending"))


def laid_out(local: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """This rank's part of a tensor as a DTensor over the ranks of ``like``; the part itself where that is none.

    Args:
        local: on any device, also on the host where the mesh is one of accelerators (``DTensor.from_local`` would move it).
        shape: of the whole.
    """
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size(shape)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, like.stride() if shape == like.shape else stride, local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)


class Lender:
    """Hands out state in the form in which it is computed with.

    Args:
        offload: where state lies on the host between steps; ``None`` where it lies on the device.
    """

    def __init__(self, offload: StateOffload | None) -> None:
        self.offload = offload

    def home(self, key: str, value: Tensor, device: torch.device) -> Tensor:
        """An entry where it is to lie between steps.

        Args:
            device: on which it is computed with.
        """
        if self.offload is None or not moves(key):
            return value
        if not isinstance(value, DTensor):
            return home_of(value, device)
        local = local_tensor(value)
        home = home_of(local, device)
        return value if home is local else laid_out(home, value, value.shape)

    def lends_as_kept(self, group: Group, here_already: bool = False) -> bool:
        """Whether :meth:`lent` hands out the states themselves: neither packed nor offloaded."""
        return group["state_dtype"] == "float32" and (here_already or self.offload is None)

    def lent(
        self,
        name: Hashable,
        states: Sequence[State],
        device: torch.device,
        wanted: Callable[[str], bool],
        wide: torch.dtype,
        group: Group,
        ok: Tensor | None = None,
        noise: Callable[[], torch.Generator] | None = None,
        here_already: bool = False,
        rows: Tensor | None = None,
    ) -> AbstractContextManager[list[State]]:
        """States of which the wanted entries are on the device, moments in dtype ``wide``, and may be written to.

        What is in them is kept when the block ends, and gone from the dictionaries.

        Args:
            name: of the piece of work, the same in every step.
            states: plain tensors.
            device: of the mathematics.
            wanted: which entries.
            wide: dtype of moments.
            group: says in which form they are kept.
            ok: scalar bool on the device; ``False`` keeps moments as they were.
            noise: makes a generator on the device for the rounding of moments.
            here_already: they are copies on the device, brought with their parameters.
            rows: index on the device, of the matrices whose moments are kept; others stay as they were. ``None`` for all.
        """
        if self.lends_as_kept(group, here_already):
            return nullcontext(list(states))
        offload = None if here_already else self.offload
        return self._lent(offload, name, states, device, wanted, wide, group, ok, noise, rows)

    @contextmanager
    def _lent(
        self,
        offload: StateOffload | None,
        name: Hashable,
        states: Sequence[State],
        device: torch.device,
        wanted: Callable[[str], bool],
        wide: torch.dtype,
        group: Group,
        ok: Tensor | None,
        noise: Callable[[], torch.Generator] | None,
        rows: Tensor | None,
    ) -> Iterator[list[State]]:
        packed = group["state_dtype"] != "float32"
        here = [{k: v for k, v in s.items() if wanted(k) and moves(k)} for s in states]
        flat = [value for s in here for value in s.values()]
        offload = offload if flat else None
        if offload is not None:
            copies = offload.borrow(name, flat, device)
            here = [{k: copies.pop(0) for k in s} for s in here]
        lent = [
            {**{k: v for k, v in s.items() if k not in h}, **(unpacked(h, wide) if packed else h)}
            for s, h in zip(states, here)
        ]
        try:
            yield lent
            if packed:
                generator = noise() if noise is not None else None
                for h, s in zip(here, lent):
                    update_packed(h, s, ok, generator, rows)
        finally:
            for s in (*lent, *here):  # before what comes next is given their memory
                s.clear()
            if offload is not None:
                offload.give_back(name)
