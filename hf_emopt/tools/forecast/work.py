"""Seconds that one rank's transforms take, by rule, shape and batch; bytes that its elementwise passes move."""

from __future__ import annotations

from dataclasses import dataclass

from hf_emopt.linalg.cost import sharded_cost
from hf_emopt.linalg.inverse_root_fp16 import SINGLE_EPSILON
from hf_emopt.rules.base import Group, MatrixRule
from hf_emopt.rules.kronecker import KroneckerRule
from hf_emopt.rules.muon import MuonRule, NorMuonRule
from hf_emopt.tools.forecast.amounts import Array, Kind
from hf_emopt.tools.forecast.hardware import (
    BASIS_CALL,
    BASIS_SIDE,
    EFFICIENCY,
    FACTOR_BYTES,
    FACTOR_BYTES_HALF,
    GPUS,
    HALF_CALL,
    HALF_SIDE,
    REFRESH_CALL,
    REFRESH_SIDE,
    SPLIT_SIDE,
    UNFUSED,
    Gpu,
)
from hf_emopt.tools.forecast.layouts import Layout
from hf_emopt.tools.forecast.products import has_kernels, newton_schulz_seconds, product_seconds


@dataclass(frozen=True)
class Work:
    """The work of one batch: seconds of products, and bytes and number of the all-reduces among a compute group."""

    seconds: float
    sums_bytes: float = 0.0
    sums: int = 0


@dataclass(frozen=True)
class Passes:
    """Bytes that elementwise passes read and write.

    Attributes:
        local, owned: for each element of a matrix that the rank holds, and that it transforms.
        checked: for each element of a gradient that is checked for numbers that are not finite.
        applied: the part of ``local`` that the apply stream moves: updates of other ranks, written to the weights.
    """

    local: float
    owned: float
    checked: float
    applied: float


def passes(rule: MatrixRule, group: Group, gpu: Gpu, layout: Layout, width: int) -> Passes:
    """Bytes that one step of the fused passes moves; an element that travels between ranks has ``width``."""
    sharded, travels = layout.is_sharded, layout.world_size > 1
    weight = group["params"][0].dtype.itemsize  # and of its gradient
    rule_owned, first = _rule_bytes(rule, group, gpu)
    momentum = weight + 8 if rule.momentum_form(group) is not None else weight
    room = width if sharded and travels and first == 2 else 4
    # The norm is taken as the matrix is cast, where kernels run.
    owned = (1 if has_kernels(gpu) else 2) * room + 2 + rule_owned if isinstance(rule, MuonRule) else rule_owned
    update = width if travels else 2
    apply = 2 * weight + update if weight >= 4 else APPLY_16_BITS
    applied = float(apply) if travels else 0.0
    if sharded:
        local = momentum + (width if travels else room) + apply
        owned += (2 * width + room + 2) if travels else 0.0  # unpacked on arrival, packed to go back
    else:
        owned += momentum + room + (width + 2 if travels else 0.0)
        local = float(apply)
        if weight < 4 and travels:  # owners step their weights, the others receive them
            owned, local, applied = owned + apply, 2 * weight, 2.0 * weight
    # What is counted for rules with factors was measured as it is.
    slow = 1.0 if has_kernels(gpu) or not isinstance(rule, MuonRule) else UNFUSED
    return Passes(slow * local, slow * owned, weight, slow * applied)


APPLY_16_BITS = 134.0
"""Bytes for each element of the last phase of 16-bit weights, which runs function by function: 46 to join the float32
weight from its halves, 34 to step it, 50 to split it again, 4 to unpack the update
(:mod:`hf_emopt.formats.master_weights`)."""


def _rule_bytes(rule: MatrixRule, group: Group, gpu: Gpu) -> tuple[float, int]:
    """Bytes for each owned element that a rule moves outside of products, and the width of the numbers that it reads."""
    if isinstance(rule, NorMuonRule):
        return 36.0, 4  # row norms, scale and the norm of the whole, in float32
    if isinstance(rule, MuonRule):
        return 0.0, 2 if rule.defers_scale(group) and has_kernels(gpu) else 4
    return FACTOR_BYTES_HALF if rule.name == "shampoo" and _in_half(gpu, group) else FACTOR_BYTES, 4


def transform_work(gpu: Gpu, rule: MatrixRule, group: Group, kind: Kind, count: int) -> Work:
    """One batch of ``count`` matrices of a kind."""
    (m, n), slicing = kind
    if isinstance(rule, KroneckerRule):  # in a step without refreshes
        flops = rule.block_flops(m, n, group, products=3 if rule.name == "soap" else 2, refresh_products=0)
        return Work(count * (flops / _rate(gpu, group)))
    if not isinstance(rule, MuonRule):
        raise ValueError(f"there is no model of the time of {rule.name}")
    if slicing is None or not slicing.compute_group:
        return Work(newton_schulz_seconds(gpu, count, m, n, group))
    parts = len(slicing.compute_group)
    cost = sharded_cost(*slicing.full_shape, parts, group["ns_steps"], group["ns_coefficients"], slicing.method)
    short, long = min(slicing.full_shape), max(slicing.full_shape)
    width = max(1, -(-long // parts))
    if slicing.method == "gram":  # every rank computes the whole Gram matrices, and the rest on its slice
        seconds = newton_schulz_seconds(gpu, count, short, width, group, "gram")
    else:
        one = product_seconds(gpu, count, short, width, short)
        seconds = cost.flops * count * one / (2 * count * short * short * width)
    return Work(seconds, count * cost.bytes, cost.messages)


def _in_half(gpu: Gpu, group: Group) -> bool:
    """Whether symmetric products of 16 bits are this package's."""
    return bool(group["matmul_precision"] == "fp16") and has_kernels(gpu)


def _rate(gpu: Gpu, group: Group) -> float:
    """Operations a second of products in the group's precision, symmetric ones counted in full."""
    if group["matmul_precision"] == "fp16":
        return gpu.bf16 * 1e12 * (EFFICIENCY.fp16 if has_kernels(gpu) else EFFICIENCY.tf32)
    return (gpu.fp32 if group["matmul_precision"] == "highest" else gpu.tf32) * 1e12 * EFFICIENCY.tf32


def refresh_seconds(gpu: Gpu, rule: MatrixRule, group: Group, sides: Array, calls: Array) -> Array:
    """Of a rank's refreshes in a step; see :class:`~hf_emopt.tools.forecast.refreshes.Refreshes`."""
    if rule.name == "shampoo" and _in_half(gpu, group):
        given = group["relative_epsilon"]
        side = HALF_SIDE if given is not None and given >= SINGLE_EPSILON else SPLIT_SIDE
        return GPUS["h200"].bf16 / gpu.bf16 * side * sides + HALF_CALL * calls
    if rule.name == "soap" and _in_half(gpu, group):
        return GPUS["h200"].bf16 / gpu.bf16 * BASIS_SIDE * sides + BASIS_CALL * calls
    slower = GPUS["h200"].tf32 / (gpu.fp32 if group["matmul_precision"] == "highest" else gpu.tf32)
    return slower * REFRESH_SIDE[rule.name] * sides + REFRESH_CALL[rule.name] * calls
