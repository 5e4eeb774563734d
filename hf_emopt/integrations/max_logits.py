"""The largest attention logit of every head, measured while a transformers model runs, whatever computes its attention.

Attention modules of transformers ask ``AttentionInterface.get_interface`` for the function that computes them. While a
recorder is on, they get a function that measures query and key first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import AttentionInterface

from hf_emopt.integrations.visibility import visible_of
from hf_emopt.linalg.attention_logits import logit_bound, max_logit
from hf_emopt.routing.query_key import QueryKey, find_query_key

_recorders: weakref.WeakSet[MaxLogits] = weakref.WeakSet()
_original: Callable[..., Callable[..., Any]] = AttentionInterface.get_interface


class MaxLogits:
    """Records the largest logit ``scaling * q . k`` of every head, from the model's own forward passes.

    A context manager, which records while it is open::

        with hf_emopt.MaxLogits(model) as recorder:
            loss = model(**batch).loss
        hf_emopt.qk_clip(model, recorder.max_logits())

    The maximum is over all batches since the last :meth:`reset`, so over micro-batches too. A forward pass that gradient
    checkpointing repeats in the backward pass is not measured again. Logits are measured before a soft cap (Gemma 2) and
    without the terms of a mask or a position bias. Rows of padded queries count where the mask lets them see keys, as it does
    under eager and SDPA.

    Args:
        model: whose attention modules are recorded; wrapped or not.
        mode: ``"exact"``: the products of query and key computed once more, in blocks, masked as the model masks them;
            ``"bound"``: ``max |q| max |k|`` for every sequence, which no logit exceeds, from one pass over query and key.
        modules: regular expressions for whole components of attention modules' names (``"language_model"``,
            ``r"layers\\.[0-3]"``); the others are left out. Default: all that have a query and a key.
        training_only: leave out forward passes of modules in ``eval()`` mode.
        process_group: over whose ranks :meth:`max_logits` takes the maximum; ``None`` for all ranks, ``"self"`` for this one
            alone.

    Raises:
        ValueError: an unknown mode, no attention module with a query and a key, and see
            :func:`hf_emopt.routing.query_key.find_query_key`.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Literal["exact", "bound"] = "exact",
        *,
        modules: str | Sequence[str] | None = None,
        training_only: bool = False,
        process_group: dist.ProcessGroup | Literal["self"] | None = None,
    ) -> None:
        if mode not in ("exact", "bound"):
            raise ValueError(f"mode={mode!r} is not one of 'exact', 'bound'")
        self.mode, self.training_only, self.process_group = mode, training_only, process_group
        self.found: dict[str, QueryKey] = find_query_key(model, modules)
        if not self.found:
            raise ValueError(
                f"QK-clip: {type(model).__name__} has no attention module with a query and a key of a known name, so there "
                "are no logits to measure"
            )
        self._by_module = {id(query_key.module): query_key for query_key in self.found.values()}
        self._best: dict[str, Tensor] = {}
        self._ran: set[str] = set()
        self._hooks: list[Any] = []

    @property
    def recording(self) -> bool:
        return self in _recorders

    def start(self) -> None:
        """Records from now on."""
        if self.recording:
            return
        for query_key in self.found.values():
            hook = partial(self._note_ran, weakref.ref(self), query_key.name)
            self._hooks.append(query_key.module.register_forward_hook(hook))
        _recorders.add(self)
        AttentionInterface.get_interface = _get_interface  # type: ignore[method-assign]

    def stop(self) -> None:
        """Ends recording; the measured maxima stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _recorders.discard(self)
        if not _recorders:
            AttentionInterface.get_interface = _original  # type: ignore[method-assign]

    def reset(self) -> None:
        """Forgets the measured maxima."""
        self._best.clear()
        self._ran.clear()

    def leave_out(self, names: Iterable[str]) -> None:
        """Excludes these attention modules from measurement."""
        for name in names:
            self._by_module.pop(id(self.found.pop(name).module), None)
            self._best.pop(name, None)
            self._ran.discard(name)

    def __enter__(self) -> MaxLogits:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @staticmethod
    def _note_ran(reference: weakref.ref[MaxLogits], name: str, module: nn.Module, *_: Any) -> None:
        """A hook that notes that an attention module ran and had to be measured."""
        recorder = reference()
        if recorder is not None and (module.training or not recorder.training_only):
            recorder._ran.add(name)

    def _measure(self, implementation: str | None, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        query_key = self._by_module.get(id(module))
        # During a backward pass gradient checkpointing repeats forward passes.
        in_backward = torch._C._current_graph_task_id() != -1
        if query_key is None or (self.training_only and not module.training) or in_backward:
            return
        query, key = _local(args[0]), _local(args[1])
        if query.shape[2] == 0 or key.shape[2] == 0:
            return
        heads = self._heads_of(query_key, query, key)
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            if self.mode == "bound":
                found = logit_bound(query.detach(), key.detach(), scaling)
            else:
                mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
                visible = visible_of(implementation, module, query, key, mask, kwargs)
                found = max_logit(query.detach(), key.detach(), scaling, visible)
            best = self._best.get(query_key.name)
            if best is None:
                best = self._best[query_key.name] = found.new_full((query_key.heads,), -torch.inf)
            best[heads] = torch.maximum(best[heads], found)

    def _heads_of(self, query_key: QueryKey, query: Tensor, key: Tensor) -> slice:
        """The heads of this call: all, or this rank's under tensor parallelism."""
        count, dim = query.shape[1], query.shape[3]
        if dim != query_key.head_dim or query_key.heads % count or count % key.shape[1]:
            raise ValueError(
                f"QK-clip: {query_key.name} computes {count} query heads of {dim} with {key.shape[1]} key heads, but its "
                f"weights were read as {query_key.heads} of {query_key.head_dim} with {query_key.kv_heads}; leave it out "
                "with modules=..."
            )
        if count == query_key.heads:
            return slice(0, count)
        for name in ("q_proj", "q_b_proj", "q", "query", "q_norm"):
            weight = getattr(getattr(query_key.module, name, None), "weight", None)
            if isinstance(weight, DTensor):
                part = _tensor_parallel_rank(weight, query_key.heads // count)
                if part is not None:
                    return slice(part * count, (part + 1) * count)
        raise ValueError(
            f"QK-clip: {query_key.name} computes {count} of its {query_key.heads} heads on this rank, and its weights do not "
            "say which; use tensor parallelism of transformers, whose weights are DTensors, or leave it out with modules=..."
        )

    def max_logits(self) -> dict[str, Tensor]:
        """The maxima by the name of the attention module, ``(heads,)`` float32; ``-inf`` for what did not run.

        A collective, where a process group is initialized: the maximum over all ranks.

        Raises:
            ValueError: an attention module ran without asking transformers for the function that computes it.
        """
        silent = self._ran - set(self._best)
        if silent:
            name = sorted(silent)[0]
            raise ValueError(
                f"QK-clip: {name} ({type(self.found[name].module).__name__}) computes its attention itself and not through "
                "transformers' attention interface, so its logits cannot be measured; leave it out with modules=..."
            )
        weights = (part.parameter for found in self.found.values() for part in (*found.query, *found.key))
        device = next((tensor.device for tensor in (*self._best.values(), *weights)), torch.device("cpu"))
        unmeasured = {name: torch.full((found.heads,), -torch.inf, device=device) for name, found in self.found.items()}
        best = {**unmeasured, **self._best}
        flat = torch.cat([best[name].to(device, torch.float32) for name in self.found])
        if self.process_group != "self" and dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=self.process_group)
        sizes = [query_key.heads for query_key in self.found.values()]
        return dict(zip(self.found, flat.split(sizes)))


def _get_interface(
    self: AttentionInterface, attn_implementation: str, default: Callable[..., Any]
) -> Callable[..., Any]:
    return partial(_measured, _original(self, attn_implementation, default), attn_implementation)


def _measured(
    function: Callable[..., Any], implementation: str | None, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    _note(implementation, module, args, kwargs)
    return function(module, *args, **kwargs)


@torch.compiler.disable
def _note(implementation: str | None, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
    for recorder in list(_recorders):
        recorder._measure(implementation, module, args, kwargs)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensor_parallel_rank(weight: DTensor, parts: int) -> int | None:
    """This rank's index along the innermost mesh dimension that cuts the heads into ``parts``, or ``None``."""
    mesh = weight.device_mesh
    for d in reversed(range(mesh.ndim)):
        if mesh.size(d) == parts and getattr(weight.placements[d], "dim", None) == 0:
            return int(mesh.get_local_rank(d))
    return None
