"""The keys that each query sees, by the arguments of each of transformers' attention functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_emopt.linalg.attention_logits import Visible


def visible_of(
    implementation: str | None, module: nn.Module, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]
) -> Visible:
    """The keys that each query sees by the mask and keyword arguments of an attention function.

    Args:
        implementation: name that the function is registered under; ``None`` or ``"eager"`` for a model's own.
        query, key: ``(B, H, Q, D)``, ``(B, H_kv, K, D)``.
        mask: ``(B, H or 1, Q, K)`` for eager and SDPA; ``(B, K)`` bool for padding, for FlashAttention; a ``BlockMask`` of
            FlexAttention; ``None``.

    Raises:
        ValueError: a mask of another form, or packed sequences whose queries and keys differ in length.
    """
    if mask is not None and hasattr(mask, "mask_mod"):
        return Visible(function=mask.mask_mod)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return Visible(mask=mask[..., : key.shape[2]])
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        form = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"QK-clip: {implementation!r} attention got a mask of form {form}, which is not understood; use mode='bound', "
            "which reads no mask"
        )
    if implementation in (None, "eager"):  # a model's own function hides by its mask alone
        return Visible() if mask is None else _padded(mask, query, key)
    if implementation == "sdpa":
        # torch aligns the first query with the first key.
        return Visible(causal=_causal(module, kwargs) and query.shape[2] > 1)
    return _flash(module, query, key, mask, kwargs)


def _causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _padded(mask: Tensor, query: Tensor, key: Tensor) -> Visible:
    seen = mask[:, -key.shape[2] :].bool()
    return Visible(keys=seen, queries=seen[:, -query.shape[2] :])


def _flash(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Visible:
    """FlashAttention: padding by a mask ``(B, K)``, packed sequences by lengths or positions, windows by size."""
    queries, keys = query.shape[2], key.shape[2]
    size = kwargs.get("sliding_window")
    window = (size - 1, size - 1) if size is not None and keys > size else None
    options: dict[str, Any] = {"causal": _causal(module, kwargs), "window": window, "offset": keys - queries}
    if mask is not None:
        padded = _padded(mask, query, key)
        return Visible(**options, keys=padded.keys, queries=padded.queries)
    starts_q, starts_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if starts_q is not None and starts_k is not None:
        return _packed(starts_q, starts_k, query, key, options)
    positions = kwargs.get("position_ids")
    if positions is not None and query.shape[0] == 1 and queries == keys and positions.dim() == 2:
        starts = positions[:, :1].new_zeros(1, queries)
        starts[:, 1:] = (positions[:1, 1:] != positions[:1, :-1] + 1).to(starts.dtype)
        segments = starts.cumsum(-1)
        return Visible(**options, query_segments=segments, key_segments=segments)
    return Visible(**options)


def _packed(starts_q: Tensor, starts_k: Tensor, query: Tensor, key: Tensor, options: dict[str, Any]) -> Visible:
    """Concatenated sequences, all rows of the batch as one; queries and keys of a sequence are aligned at its end."""
    if not torch.equal(starts_q, starts_k) and (options["causal"] or options["window"]):
        raise ValueError(
            "QK-clip: packed sequences with other lengths of queries than of keys, causal or in windows, are not understood; "
            "use mode='bound', which reads no mask"
        )
    segments = []
    for starts, tensor in ((starts_q, query), (starts_k, key)):
        batch, length = tensor.shape[0], tensor.shape[2]
        index = torch.arange(batch * length, device=tensor.device)
        segments.append(torch.bucketize(index, starts.to(index)[1:-1], right=True).view(batch, length))
    return Visible(**{**options, "offset": 0}, query_segments=segments[0], key_segments=segments[1])
