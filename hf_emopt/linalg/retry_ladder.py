"""The retry ladder: where a decomposition fails, ever safer attempts, for the failed blocks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hf_emopt.linalg.symmetric_batches import check_batch, eye_like, finite_blocks, identity_where_not

# Relative to the mean eigenvalue. In float64 less than 1e-15 changes nothing; more than 1e-6 is another preconditioner.
_EPSILONS = (1e-15, 1e-12, 1e-9, 1e-6)

_LinAlgError: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]

ResultT = TypeVar("ResultT", bound="tuple[Tensor, ...]")


@dataclass(frozen=True)
class LadderReport:
    """Numbers of blocks by the rung of the retry ladder that solved them, of one or (added up) several calls.

    Attributes:
        float64, cpu, epsilon: solved on that rung: in float64, in float64 on the CPU, there with a growing epsilon.
        nonfinite: failed at once, since the input held a NaN or an infinity.
        failed: all failed blocks, the former included.
    """

    blocks: int = 0
    float64: int = 0
    cpu: int = 0
    epsilon: int = 0
    nonfinite: int = 0
    failed: int = 0

    @property
    def clean(self) -> bool:
        """Every block was solved at the first attempt."""
        return not (self.float64 or self.cpu or self.epsilon or self.failed)

    def __add__(self, other: LadderReport) -> LadderReport:
        return LadderReport(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class LadderResult(Generic[ResultT]):
    """Result of :func:`with_ladder`.

    Attributes:
        value: the function's result for all blocks. Failed blocks hold that of the first attempt, or NaN (zero in integer
            tensors) where it raised: keep the previous root or basis for these.
        failed: ``(N,)`` bool, on the device of the input; ``failed_blocks`` has the same as indices on the host.
    """

    value: ResultT
    failed: Tensor
    failed_blocks: tuple[int, ...]
    report: LadderReport


@torch.no_grad()
def with_ladder(
    fn: Callable[..., ResultT], a: Tensor, *aligned: Tensor, optimistic: Callable[..., ResultT] | None = None
) -> LadderResult[ResultT]:
    """``fn(a, *aligned)``, and for the blocks that it fails for, again in ever safer ways.

    A block fails when ``fn`` raises ``LinAlgError`` (then it is called for each block alone, to find which), when a
    floating-point result of it is not finite, or when ``fn`` reports so in a field ``failed`` of its result. It is tried
    again in float64, in float64 on the CPU, and there with ``1e-15, 1e-12, 1e-9, 1e-6`` times the mean eigenvalue added to
    the diagonal. A block of ``a`` that is not finite fails at once.

    Args:
        fn: takes blocks ``(K, d, d)`` of any ``K >= 1`` and the aligned tensors of the same blocks, all in one dtype and on
            one device, which may be float64 and the CPU. Returns a tuple, or named tuple, of tensors ``(K, ...)``.
        a: ``(N, d, d)`` symmetric, float32 or float64; not changed.
        aligned: tensors ``(N, ...)`` that ``fn`` needs as well, an old basis for example.
        optimistic: takes and returns what ``fn`` does, for all blocks and without reading the device. It reports blocks that
            are not finite, or not solved, in a field ``failed``, and ``fn`` gets these alone.

    Reads one ``(N,)`` tensor on the host. The path of a block depends on its data alone, so ranks that hold the same block
    decide alike.

    Raises:
        TypeError, ValueError: ``a`` is no batch of square matrices.
        torch.linalg.LinAlgError: ``fn`` raised for every block and for the identity as well.

    Example:
        >>> outcome = with_ladder(lambda a: inverse_root(a, 0.25), factors)
        >>> roots = torch.where(outcome.failed[:, None, None], roots, outcome.value.value)
    """
    check_batch(a, "a", "with_ladder")
    if optimistic is not None:
        return _optimistic(fn, optimistic, a, aligned)
    finite = finite_blocks(a)
    safe = identity_where_not(finite, a)
    value, raised = _first_attempt(fn, safe, aligned)

    state = torch.where(finite, _bad_blocks(value).to(torch.int8), 2).tolist()  # the one synchronisation
    counts = {"float64": 0, "cpu": 0, "epsilon": 0}
    lost = []
    for index, code in enumerate(state):
        if code == 0 and index not in raised:
            continue
        rung = None if code == 2 else _climb(fn, safe, aligned, index, value)
        if rung is None:
            lost.append(index)
        else:
            counts[rung] += 1
    failed = torch.zeros_like(finite)
    if lost:
        failed[torch.tensor(lost, device=a.device)] = True
        flag: Any = getattr(value, "failed", None)
        if flag is not None:
            flag |= failed
    report = LadderReport(len(state), nonfinite=state.count(2), failed=len(lost), **counts)
    return LadderResult(value, failed, tuple(lost), report)


def _optimistic(
    fn: Callable[..., ResultT], optimistic: Callable[..., ResultT], a: Tensor, aligned: Sequence[Tensor]
) -> LadderResult[ResultT]:
    value = optimistic(a, *aligned)
    failed: Tensor = value.failed  # type: ignore[attr-defined]
    open_blocks = [index for index, bad in enumerate(failed.tolist()) if bad]  # the one synchronisation
    if not open_blocks:
        return LadderResult(value, failed, (), LadderReport(a.shape[0]))
    rows = torch.tensor(open_blocks, device=a.device)
    outcome = with_ladder(fn, a[rows], *(x[rows] for x in aligned))
    solved = [field.index_copy(0, rows, part) for field, part in zip(value, outcome.value)]
    return LadderResult(
        _from_fields(value, solved),
        failed.index_copy(0, rows, outcome.failed),
        tuple(open_blocks[index] for index in outcome.failed_blocks),
        outcome.report + LadderReport(a.shape[0] - len(open_blocks)),
    )


def _first_attempt(fn: Callable[..., ResultT], a: Tensor, aligned: Sequence[Tensor]) -> tuple[ResultT, frozenset[int]]:
    """The result for all blocks, in tensors of its own, and the indices for which ``fn`` raised."""
    try:
        result = fn(a, *aligned)
        return _from_fields(result, [x.clone() for x in result]), frozenset()
    except RuntimeError as error:
        if not _is_solver_failure(error):
            raise
    parts: list[ResultT | None] = []
    for index in range(a.shape[0]):
        try:
            parts.append(fn(*_block(index, a, *aligned)))
        except RuntimeError as error:
            if not _is_solver_failure(error):
                raise
            parts.append(None)
    template = next((part for part in parts if part is not None), None)
    if template is None:
        template = fn(eye_like(a).unsqueeze(0), *_block(0, *aligned))
    blank = [torch.full_like(x, torch.nan if x.is_floating_point() else 0) for x in template]
    stacked = [torch.cat(fields) for fields in zip(*(blank if part is None else part for part in parts))]
    raised = frozenset(index for index, part in enumerate(parts) if part is None)
    return _from_fields(template, stacked), raised


def _climb(fn: Callable[..., ResultT], a: Tensor, aligned: Sequence[Tensor], index: int, value: ResultT) -> str | None:
    """Tries the rungs for one block, writes its result into ``value``, and returns the rung's name."""
    for rung, block in _rungs(a[index : index + 1]):
        others = [x.to(block.device, block.dtype if x.is_floating_point() else None) for x in _block(index, *aligned)]
        try:
            result = fn(block, *others)
        except RuntimeError as error:
            if not _is_solver_failure(error):
                raise
            continue
        # In the dtype in which it is kept, where a number that is finite in float64 need not be.
        result = _from_fields(result, [part.to(field.device, field.dtype) for field, part in zip(value, result)])
        if not bool(_bad_blocks(result)):
            for field, solved in zip(value, result):
                field[index] = solved[0]
            return rung
    return None


def _rungs(block: Tensor) -> Iterator[tuple[str, Tensor]]:
    double = block.double()
    if block.dtype != torch.float64:
        yield "float64", double
    double = double.cpu()
    if block.device.type != "cpu":
        yield "cpu", double
    mean = double.diagonal(dim1=-2, dim2=-1).mean(-1).abs()
    for epsilon in _EPSILONS:
        yield "epsilon", double + epsilon * mean * eye_like(double)


def _is_solver_failure(error: RuntimeError) -> bool:
    # The libraries behind CUDA also fail with a plain RuntimeError that names them.
    if isinstance(error, _LinAlgError):
        return True
    return any(name in str(error).lower() for name in ("cusolver", "magma")) and "out of memory" not in str(error)


def _bad_blocks(result: tuple[Tensor, ...]) -> Tensor:
    bad = ~finite_blocks(*(x for x in result if x.is_floating_point()))
    failed: Any = getattr(result, "failed", None)
    return bad if failed is None else bad | failed


def _block(index: int, *tensors: Tensor) -> list[Tensor]:
    return [x[index : index + 1] for x in tensors]


def _from_fields(like: ResultT, fields: Sequence[Tensor]) -> ResultT:
    cls: Any = type(like)
    result: ResultT = cls._make(fields) if hasattr(cls, "_make") else cls(fields)
    return result
