"""First and second moments, stored in fewer bits than they are computed in.

``bfloat16`` moments are rounded stochastically, so that a moving average goes on moving by less than a spacing. ``int8``
moments are codes of the dynamic map of T. Dettmers et al., arXiv:2110.02861, with a float32 scale for each block. A block is
a run of up to 256 elements inside a row, so that every layout cuts codes and scales as it cuts the parameter along its first
dimension. Of second moments, the root is coded: it has the range of a first moment, and is never rounded to zero, where an
update would explode. Small parameters, whose scales would take more than they save, keep float32 (:func:`is_coded`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hf_emopt.formats.master_weights import round_stochastically

State = dict[str, Tensor]

StateDtype = Literal["float32", "bfloat16", "int8", "8bit"]
STATE_DTYPES: tuple[str, ...] = ("float32", "bfloat16", "int8")
"""The values in groups; ``"8bit"`` is an alias of ``"int8"``."""

_FIRST = ("momentum_buffer", "exp_avg")
_SECOND = ("exp_avg_sq", "graft_second_moment")
_CODES, _SCALE = "_codes", "_scale"
_MIN_NUMEL, _MIN_ROW = 4096, 64
_BLOCKS = (256, 128, 64)


# ---------------------------------------------------------------------- names and shapes


def moment_of(key: str) -> str | None:
    """The name of the moment that a state entry belongs to, as itself, its codes or its scales; ``None`` for other entries.

    Entries are named ``moment``, or ``moment.more`` where a rule keeps several; codes and scales are
    ``moment_codes.more`` and ``moment_scale.more``.
    """
    head, dot, rest = key.partition(".")
    for suffix in (_CODES, _SCALE):
        head = head.removesuffix(suffix)
    return head + dot + rest if head in _FIRST + _SECOND else None


def is_moment(key: str) -> bool:
    """Whether a state entry is a moment in any form."""
    return moment_of(key) is not None


def is_scale(key: str) -> bool:
    """Whether a state entry is the scales of blocks."""
    return is_moment(key) and key.partition(".")[0].endswith(_SCALE)


def coded_names(name: str) -> tuple[str, str]:
    """The entries of a moment's codes and of its scales."""
    head, dot, rest = name.partition(".")
    return head + _CODES + dot + rest, head + _SCALE + dot + rest


def is_coded(shape: Sequence[int], lead: int = 1) -> bool:
    """Whether ``state_dtype="int8"`` stores moments of this shape in 8 bits.

    Args:
        shape: of a whole parameter, or of matrices ``(B, ...)``.
        lead: number of dimensions before those of a row.
    """
    row = math.prod(shape[lead:])
    return len(shape) > lead and row >= _MIN_ROW and math.prod(shape) >= _MIN_NUMEL


def scale_shape(shape: Sequence[int], lead: int = 1) -> tuple[int, ...]:
    """Shape of the scales for codes of this shape: a row of scales for each row of codes."""
    row = math.prod(shape[lead:])
    return (*shape[:lead], -(-row // _block(row)))


def _block(row: int) -> int:
    """Number of elements that share a scale: the largest that divides a row, so that no row is padded, else the largest."""
    return next((size for size in _BLOCKS if row % size == 0), _BLOCKS[0])


def _lead(name: str) -> int:
    """SOAP's moments are ``(matrices, blocks, ...)``, all others have one dimension before a row."""
    return 2 if "." in name else 1


# ---------------------------------------------------------------------- packed and unpacked


def packed_like(fresh: State, state_dtype: str, whole: Sequence[int] | None = None) -> State:
    """The stored form of a rule's initial state, whose moments are zero.

    Args:
        whole: shape of the whole parameter, for elementwise state; ``None`` for state of whole matrices.
    """
    if state_dtype == "float32":
        return fresh
    state: State = {}
    for name, value in fresh.items():
        if not is_moment(name):
            state[name] = value
        elif state_dtype == "bfloat16":
            state[name] = torch.zeros_like(value, dtype=torch.bfloat16)
        elif _coded(name, value.shape, whole):
            codes, scale = coded_names(name)
            state[codes] = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
            state[scale] = torch.zeros(scale_shape(value.shape, _lead(name)), dtype=torch.float32, device=value.device)
        else:
            state[name] = value
    return state


def _coded(name: str, shape: Sequence[int], whole: Sequence[int] | None) -> bool:
    return is_coded((1, *shape[1:]), _lead(name)) if whole is None else is_coded(whole)


def unpacked(state: State, wide: torch.dtype) -> State:
    """State with every moment as a writable tensor of dtype ``wide``; other entries are the same tensors."""
    result: State = {}
    for key, value in state.items():
        name = moment_of(key)
        if name is None:
            result[key] = value
        elif key == name:
            result[key] = value.to(wide) if value.dtype is torch.bfloat16 else value
        elif not is_scale(key):
            result[name] = _decoded(value, state[coded_names(name)[1]], name).to(wide)
    return result


def update_packed(
    state: State, wide: State, ok: Tensor | None, generator: torch.Generator | None, rows: Tensor | None = None
) -> None:
    """Packs the moments of :func:`unpacked` after they have changed, in place.

    Args:
        state: the stored form, changed in place.
        wide: the moments now.
        ok: scalar bool on the device. ``False`` leaves the stored form as it is, to the bit. (Rounding to bfloat16 does so by
            itself; encoding decoded codes again does not always.)
        generator: noise of the rounding to bfloat16; replicas must seed it alike.
        rows: index of the matrices that have changed, on the device; ``None`` for all. The others keep their bits.
    """
    for key in [key for key in state if not is_scale(key)]:
        name = moment_of(key)
        if name is None:
            continue
        new = wide[name] if rows is None else wide[name][rows]
        if key != name:
            scale = state[coded_names(name)[1]]
            codes, scales = _encoded(new, name)
            if ok is not None:
                codes = torch.where(ok, codes, state[key] if rows is None else state[key][rows])
                scales = torch.where(ok, scales, scale if rows is None else scale[rows])
            _put(state[key], codes, rows)
            _put(scale, scales, rows)
        elif state[key].dtype is torch.bfloat16:
            _put(state[key], round_stochastically(new.float(), torch.bfloat16, generator), rows)


def _put(target: Tensor, value: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        target.copy_(value)
    else:
        target[rows] = value


def converted(state: dict[str, Any], state_dtype: str, whole: Sequence[int], wide: torch.dtype) -> dict[str, Any]:
    """A parameter's state from a checkpoint in the form of another ``state_dtype``. Entries of that form stay as they are.

    Args:
        state: whole tensors; state of matrices is named ``name.index``, by matrix view.
        whole: shape of the parameter.
        wide: dtype of float moments.
    """
    result: dict[str, Any] = {}
    for key, value in state.items():
        name = moment_of(key)
        if name is None:
            result[key] = value
        if name is None or is_scale(key):  # scales come with their codes
            continue
        bare = name if "." not in name else name.rpartition(".")[0]  # without the unit
        coded = state_dtype == "int8" and _coded(bare, value.shape, whole if bare == name else None)
        codes, scale = coded_names(name)
        if coded and key == codes:
            result |= {codes: value, scale: state[scale]}
            continue
        narrow = state_dtype == "bfloat16"
        if not coded and key == name and (value.dtype is torch.bfloat16) == narrow:
            result[key] = value
            continue
        value = _whole(value)
        if key == codes:
            value = _decoded(value, _whole(state[scale]), bare)
        if coded:
            result[codes], result[scale] = _encoded(value, bare)
        else:
            result[name] = value.to(torch.bfloat16 if narrow else wide)
    return result


def _whole(value: Tensor) -> Tensor:
    """The whole of a DTensor; any other tensor unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---------------------------------------------------------------------- codes


def require_library() -> Any:
    """``bitsandbytes.functional``, whose blockwise quantization this module uses.

    Raises:
        ImportError: naming what to install.
    """
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise ImportError(
            "state_dtype='int8' needs bitsandbytes for its blockwise 8-bit format, and it cannot be imported "
            f"({error}): pip install 'hf-emopt[8bit]' or pip install 'bitsandbytes>=0.50'; or use state_dtype='bfloat16'"
        ) from error
    return functional


@functools.lru_cache(maxsize=64)
def _map(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of codes, ascending, in [-1, 1] or [0, 1]."""
    return require_library().create_dynamic_map(signed=signed).to(device)  # type: ignore[no-any-return]


def _is_second(name: str) -> bool:
    return name.partition(".")[0] in _SECOND


def _in_blocks(value: Tensor, lead: int) -> tuple[Tensor, int, int]:
    """A tensor as ``(rows, padded row)``, the length of a row without padding, and that of a block."""
    row = math.prod(value.shape[lead:])
    block = _block(row)
    rows = value.reshape(-1, row)
    return (torch.nn.functional.pad(rows, (0, -row % block)) if row % block else rows), row, block


def _encoded(value: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes, shaped as the moment, and scales."""
    lead = _lead(name)
    scale_size = scale_shape(value.shape, lead)
    if not value.numel():
        return value.to(torch.uint8), value.new_empty(scale_size, dtype=torch.float32)
    value = value.float()
    rows, row, block = _in_blocks(value.sqrt() if _is_second(name) else value, lead)
    codes, scales = _quantized(rows.contiguous(), _map(not _is_second(name), value.device), block)
    if _is_second(name):  # zero is the lowest code
        codes = torch.maximum(codes, (rows > 0).to(torch.uint8))
    return codes[:, :row].reshape(value.shape), scales.view(scale_size)


def _quantized(rows: Tensor, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The code of the value nearest to each element, relative to the largest of its block, and the largest of each block."""
    if rows.device.type != "cpu":
        codes, how = require_library().quantize_blockwise(rows, code=values, blocksize=block)
        return codes, how.absmax
    # The library's CPU kernel looks up in a coarser table: zero comes back as 2e-5 of the largest, which Adam would step by.
    blocks = rows.view(-1, block)
    scales = blocks.abs().amax(1)
    relative = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(relative, middles, out_int32=True).to(torch.uint8).view(rows.shape), scales


def _decoded(codes: Tensor, scale: Tensor, name: str) -> Tensor:
    """The inverse of :func:`_encoded`, float32."""
    if not codes.numel():
        return codes.float()
    rows, row, block = _in_blocks(codes, _lead(name))
    values: Tensor = require_library().dequantize_blockwise(
        rows.contiguous(), absmax=scale.reshape(-1), code=_map(not _is_second(name), codes.device), blocksize=block
    )
    values = values[:, :row].reshape(codes.shape)
    return values.square_() if _is_second(name) else values
