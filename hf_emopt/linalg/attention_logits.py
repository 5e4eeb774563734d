"""The largest attention logit of every head, from query and key, without holding all logits at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_emopt.linalg.matmul_precision import plain_arithmetic

_BLOCK_NUMEL = 2**24  # 64 MiB of float32


@dataclass(frozen=True)
class Visible:
    """Which keys each query sees; a field at its default hides nothing.

    Attributes:
        mask: ``(B or 1, H or 1, Q, K)``: bool, true where a key is seen; or floating and added to the logits, where a number
            of at most half of the dtype's least hides a key. Other numbers do not count.
        queries, keys: ``(B, Q)`` and ``(B, K)`` bool, false for padding.
        causal: key ``j`` is seen by query ``i`` if ``j <= i + offset``.
        offset: position of the first query among the keys.
        window: ``(left, right)``: key ``j`` is seen by query ``i`` if ``-left <= j - i - offset <= right``; under ``causal``
            the right side does not count.
        query_segments, key_segments: ``(B or 1, Q)`` and ``(B or 1, K)`` numbers of packed sequences: only equal ones see
            each other. Causality and window count positions in the packed row.
        function: ``(batch, head, query, key) -> bool`` on index tensors, as FlexAttention's ``mask_mod``.
    """

    mask: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    causal: bool = False
    offset: int = 0
    window: tuple[int, int] | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None

    def columns(self, rows: slice, keys: int) -> slice:
        """The keys that any of the queries ``rows`` may see by position."""
        start, stop = 0, keys
        if self.causal:
            stop = min(stop, rows.stop + self.offset)
        if self.window is not None:
            start = max(start, rows.start + self.offset - self.window[0])
            stop = min(stop, rows.stop + self.offset + self.window[1])
        return slice(start, max(start, stop))

    def block(self, rows: slice, cols: slice, batch: int, heads: int, device: torch.device) -> Tensor | None:
        """Bool ``(B or 1, H or 1, q, k)`` for a block of logits, or ``None`` where all of it is seen."""
        seen: list[Tensor] = []
        if self.mask is not None:
            part = self.mask[:, :, rows, cols]
            seen.append(part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2)
        if self.queries is not None:
            seen.append(self.queries[:, None, rows, None])
        if self.keys is not None:
            seen.append(self.keys[:, None, None, cols])
        if self.query_segments is not None and self.key_segments is not None:
            seen.append(self.query_segments[:, None, rows, None] == self.key_segments[:, None, None, cols])
        i = torch.arange(rows.start, rows.stop, device=device)[:, None]
        j = torch.arange(cols.start, cols.stop, device=device)[None, :]
        distance = j - i - self.offset
        if self.causal:
            seen.append((distance <= 0)[None, None])
        if self.window is not None:
            seen.append(((distance >= -self.window[0]) & (distance <= self.window[1]))[None, None])
        if self.function is not None:
            b = torch.arange(batch, device=device)[:, None, None, None]
            h = torch.arange(heads, device=device)[None, :, None, None]
            seen.append(self.function(b, h, i[None, None], j[None, None]))
        return functools.reduce(torch.bitwise_and, seen) if seen else None


@plain_arithmetic()
def max_logit(query: Tensor, key: Tensor, scaling: float, visible: Visible, block_numel: int = _BLOCK_NUMEL) -> Tensor:
    """``max_ij scaling * q_i . k_j`` over the batch, for every head and the keys that each query sees.

    Computed in blocks of queries, in float32 (float64 for float64); products of 16-bit inputs are accumulated in float32.

    Args:
        query: ``(B, H, Q, D)``, after rotary embedding and norms.
        key: ``(B, H_kv, K, D)`` with ``H`` a multiple of ``H_kv``: query heads ``g * H / H_kv`` and on share key head ``g``.
        scaling: not negative.
        block_numel: logits that are held at once, at most; at least one row of queries is.

    Returns:
        ``(H,)`` float32 (float64 for float64), ``-inf`` for a head that sees no key.
    """
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    best = torch.full((heads,), -torch.inf, dtype=dtype, device=query.device)
    if not queries or not keys:
        return best
    length = max(1, block_numel // max(1, batch * heads * keys))
    for start in range(0, queries, length):
        rows = slice(start, min(start + length, queries))
        cols = visible.columns(rows, keys)
        if cols.start >= cols.stop:
            continue
        logits = _products(query[:, :, rows], key[:, :, cols], dtype)
        seen = visible.block(rows, cols, batch, heads, query.device)
        if seen is not None:
            logits = logits.masked_fill(~seen, -torch.inf)
        best = torch.maximum(best, logits.amax(dim=(0, 2, 3)))
    return best * scaling


def _products(query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """``(B, H, q, k)`` inner products; the query heads of a group are rows of one product with their key head."""
    batch, heads, rows, dim = query.shape
    groups, cols = key.shape[1], key.shape[2]
    left = query.reshape(batch * groups, heads // groups * rows, dim)
    right = key.reshape(batch * groups, cols, dim).transpose(1, 2)
    if query.dtype == dtype:
        product = torch.bmm(left, right)
    elif query.device.type == "cuda":
        product = torch.bmm(left, right.to(left.dtype), out_dtype=dtype)
    else:
        product = torch.bmm(left.to(dtype), right.to(dtype))
    return product.view(batch, heads, rows, cols)


@plain_arithmetic()
def logit_bound(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """``scaling * max_b (max_i |q_i| max_j |k_j|)``, which no logit of a head exceeds (Cauchy-Schwarz).

    Costs one pass over query and key. Masks are not read, so padding counts too. Arguments as for :func:`max_logit`; the
    result is ``(H,)``, not negative.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    longest_query = torch.linalg.vector_norm(query, dim=-1, dtype=dtype).amax(dim=2)
    longest_key = torch.linalg.vector_norm(key, dim=-1, dtype=dtype).amax(dim=2)
    groups = query.shape[1] // key.shape[1]
    return (longest_query * longest_key.repeat_interleave(groups, dim=1)).amax(dim=0) * scaling
