"""Updates that arrive behind the next forward pass: a module's parameters are waited for when the module is about to run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_emopt.distributed.layout import UnsupportedLayoutError, is_sharded
from hf_emopt.linalg.matmul_precision import plain_arithmetic

Task = Iterator[None]


def check_overlap(model: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
    """Refuses to put updates off where a forward pass would not wait for them.

    Raises:
        UnsupportedLayoutError: parameters of the groups are sharded, or the model is compiled as a whole.
    """
    if any(is_sharded(p) for group in groups for p in group["params"]):
        raise UnsupportedLayoutError(
            "overlap_param_gather=True puts off updates of parameters that every rank holds whole (DDP); sharded ones "
            "are gathered by FSDP before a forward hook of ours could finish them: leave it out under FSDP2 and HSDP"
        )
    if getattr(model, "_compiled_call_impl", None) is not None or type(model).__name__ == "OptimizedModule":
        raise UnsupportedLayoutError(
            "overlap_param_gather=True needs forward hooks, and a compiled model has none: leave it out, or compile the "
            "model's blocks one by one"
        )


class DelayedUpdates:
    """Tasks that have started their collective, and hooks that finish them before anything reads what they change.

    Hooks sit on the blocks of the model (the members of its ``nn.ModuleList`` s) and finish what a block's parameters wait
    for; on the model itself, for parameters outside of blocks; on every module that has parameters of its own, which may be
    called by itself; and on every module's ``state_dict`` and ``load_state_dict``. What reads or writes a parameter's data in
    another way, or in a compiled graph that was made before the first step, has to call ``synchronize()`` of the optimizer
    first.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Task, frozenset[int]]] = deque()
        self._hooks: list[Any] = []
        self._outside: frozenset[int] = frozenset()

    def attach(self, model: nn.Module | None, parameters: Iterable[Tensor] = ()) -> None:
        """Puts the hooks on a model, in place of those of an earlier call.

        Args:
            parameters: all that updates may change. Those that are not the model's (a loss with weights of its own) are read
                where no hook is, so nothing that changes them is put off.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._outside = frozenset()
        if model is None:
            return
        inside = {id(p) for p in model.parameters()}
        self._outside = frozenset(id(p) for p in parameters) - inside
        blocks = _outer_blocks(model)
        inside = {id(p) for block in blocks for p in block.parameters()}
        for block in blocks:
            self._before(block, frozenset(id(p) for p in block.parameters()))
        self._before(model, frozenset(id(p) for p in model.parameters() if id(p) not in inside))
        for module in model.modules():  # a part of the model may be called by itself
            own = frozenset(id(p) for p in module.parameters(recurse=False))
            if own:
                self._before(module, own)
        for module in model.modules():
            self._hooks.append(module.register_state_dict_pre_hook(_Finish(self, None)))
            # Else what is loaded would be changed by what is still to come.
            self._hooks.append(module.register_load_state_dict_pre_hook(_Finish(self, None)))

    def _before(self, module: nn.Module, parameters: frozenset[int]) -> None:
        self._hooks.append(module.register_forward_pre_hook(_Finish(self, parameters)))

    def begin(self, tasks: Iterable[tuple[Task, Iterable[Tensor]]]) -> None:
        """Runs each task to where it waits for bytes, and leaves it there, unless it changes what no hook is on.

        Args:
            tasks: with the parameters that each changes.
        """
        for task, params in tasks:
            if next(task, StopIteration) is not StopIteration:
                self._waiting.append((task, frozenset(id(p) for p in params)))
        if self._outside:
            self.finish(self._outside)

    @plain_arithmetic()
    def finish(self, parameters: frozenset[int] | None = None) -> None:
        """Finishes all tasks, or those that change one of the given parameters (by ``id``).

        In any order: under DDP, the only layout that puts updates off, nothing is sent after a task's first stage.
        """
        left: deque[tuple[Task, frozenset[int]]] = deque()
        while self._waiting:
            task, changed = self._waiting.popleft()
            if parameters is not None and not changed & parameters:
                left.append((task, changed))
                continue
            for _ in task:
                pass
        self._waiting = left

    def __len__(self) -> int:
        return len(self._waiting)

    def __getstate__(self) -> dict[str, Any]:
        """A copy waits for nothing; the original must be synchronized first."""
        return {"_waiting": deque(), "_hooks": [], "_outside": frozenset()}


@dataclass
class _Finish:
    """A hook that can be pickled with its module."""

    updates: DelayedUpdates
    parameters: frozenset[int] | None

    def __call__(self, *_: Any) -> None:
        self.updates.finish(self.parameters)


def _outer_blocks(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost module lists."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            blocks.extend(child.children())
        else:
            blocks.extend(_outer_blocks(child))
    return blocks
