"""The form in which state is kept: its entries, their shapes and layouts, and the bytes they take."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hf_emopt.distributed.layout import Partition, UnsupportedLayoutError
from hf_emopt.distributed.plan import OwnedRegion
from hf_emopt.formats.master_weights import WEIGHT_STATE, init_weight_state
from hf_emopt.formats.moments import is_coded, is_moment, is_scale, packed_like, scale_shape
from hf_emopt.routing.packing import unpack_matrix_views
from hf_emopt.rules.adamw import init_adamw_state
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.state.keys import is_count

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


def is_foreign(rule: MatrixRule, group: Group, key: str) -> bool:
    """Whether an entry is another tool's (Lookahead, an average, SAM), which keeps it beside a parameter's own state."""
    if is_count(key) or is_moment(key) or is_weight_state(key) or key.rpartition(".")[2].isdigit():
        return False
    return group["kind"] != "matrix" or key not in rule.init_state(torch.empty(1, 1, device="meta"), group)


def copied(value: Any, device: torch.device) -> Any:
    """A copy of an entry, a tensor or whatever else a tool keeps, on a device."""
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def is_weight_state(key: str) -> bool:
    """Whether an entry keeps what a 16-bit weight cannot hold."""
    return key in WEIGHT_STATE


def is_offloadable(key: str) -> bool:
    """Whether an entry is offloaded: all but the few numbers that a step reads before anything else, on device or host."""
    return key not in ("step", "rounds")


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


def part_of(tensor: Tensor, owned: Sequence[OwnedRegion], key: str = "") -> Tensor | None:
    """The owned regions of a tensor as one, in order, or ``None`` when there are none.

    Args:
        key: of the state entry that the tensor is, if it is one. Scales have a row for each of the parameter's, and
            owned regions of parameters that have scales are rows.
    """
    if not owned:
        return None
    if is_scale(key):
        return torch.cat([tensor[slice(*owned_region.region[0])] for owned_region in owned])
    if owned[0].shape == tuple(tensor.shape):
        return tensor
    parts = [tensor[tuple(slice(a, b) for a, b in s.region)] for s in owned]
    return torch.cat(parts, dim=owned[0].dim) if len(parts) > 1 else parts[0].contiguous()
