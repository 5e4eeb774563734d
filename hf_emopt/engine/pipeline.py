"""All tasks of one step, and the pipeline that interleaves them so that each collective hides behind other buckets'
mathematics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hf_emopt.distributed.plan import Bucket
from hf_emopt.engine.adamw_step import local_adamw_tasks, step_adamw_bucket
from hf_emopt.engine.bucket_members import BucketMembers
from hf_emopt.engine.bucket_step import BucketStep
from hf_emopt.engine.context import Step, Task
from hf_emopt.engine.delayed_gather import DelayedUpdates
from hf_emopt.engine.lora_step import LoraPairsStep


def run_step(step: Step, refreshes_may_outlast: bool) -> None:
    """A step that ends with its last task.

    Args:
        step: the step.
        refreshes_may_outlast: what the rule computes for the next step may go on behind this one. Whoever asks for state
            waits for it (:meth:`StepContext.finish_pending`, ``MatrixRule.join``).
    """
    context = step.context
    if step.undisturbed and context.apply_stream is not None:
        context.apply_stream.open()
    others, matrices = _adamw_tasks(step), _matrix_tasks(step)
    names = step.verdict.present - context.shared_aux
    ended = False
    try:
        if context.store.offload is not None:
            # The first pieces that leave make room for others, and those of matrices are smaller than an embedding's: what
            # needs no exchange goes last.
            pipeline([*[task for task, _ in (*others, *matrices)], *local_adamw_tasks(step, names)])
        else:
            # Ranks need not have the same gradients in a bucket that exchanges nothing, and the order of other buckets'
            # collectives must not follow from it.
            alone = [task for task, bucket in matrices if bucket.communication_free]
            first = [task for task, bucket in matrices if not bucket.communication_free]
            pipeline(first, lambda: [*[task for task, _ in others], *local_adamw_tasks(step, names), *alone])
        ended = True
    finally:
        if context.apply_stream is not None:
            context.apply_stream.close()
        if context.rule.scheduled and not (ended and refreshes_may_outlast):
            context.rule.join()
    if context.store.offload is not None:
        context.store.offload.finish()
    # Parameters that were stepped on copies are back on the host when the step returns.
    for copy_stream in context.copy_streams.values():
        copy_stream.synchronize()


def begin_delayed(step: Step, delayed: DelayedUpdates) -> None:
    """A step whose updates arrive behind the next forward pass: every task runs to where it waits for bytes."""
    context = step.context
    pipeline(local_adamw_tasks(step, step.verdict.present - context.shared_aux))
    tasks = [
        *_adamw_tasks(step),
        *_matrix_tasks(step),
    ]  # the embedding, which a forward pass needs first, is not a matrix
    members = step.verdict.members
    delayed.begin((task, [context.parameter(b, i) for i in members(b)]) for task, b in tasks)
    if context.store.offload is not None:
        context.store.offload.finish()


def _matrix_tasks(step: Step) -> list[tuple[Task, Bucket]]:
    """The steps of the buckets of matrices in which something takes part."""
    context, tasks = step.context, []
    kept = context.members
    for index, bucket in enumerate(context.plan.buckets):
        present = step.verdict.members(bucket)
        if present:
            members = kept.get((id(bucket), present)) or BucketMembers.kept(context, index, bucket, present)
            bucket_step = (LoraPairsStep if bucket.paired else BucketStep)(step, members)
            tasks.append((bucket_step.run(), bucket))
    return tasks


def _adamw_tasks(step: Step) -> list[tuple[Task, Bucket]]:
    """The steps of the buckets of other parameters that ranks hold copies of."""
    context, tasks = step.context, []
    kept = context.members
    for index, bucket in enumerate(context.aux_plan.buckets):
        present = step.verdict.members(bucket)
        if present:
            members = kept.get((id(bucket), present)) or BucketMembers.kept(context, index, bucket, present)
            tasks.append((step_adamw_bucket(step, members), bucket))
    return tasks


_AHEAD = 2
"""Tasks that begin before fillers are made: the second's bytes are on their way when the first has its products queued."""


def pipeline(tasks: Sequence[Task], fillers: Callable[[], Sequence[Task]] = tuple) -> None:
    """Runs tasks so that each collective has the mathematics of other buckets to hide behind.

    A task begins, then those begun before it go on by one stage each, latest first: so the next bucket's bytes are on
    their way before this bucket's products are queued.

    Args:
        tasks: begin in this order.
        fillers: makes tasks that keep a host for longer than a GPU. They are made, and begin, as soon as the GPU has the
            products of a task to do, and bring forward no others, since a next task's bytes are to be on their way before.
            Then they go on after each task.
    """
    begun: deque[Task] = deque()
    waiting: deque[Task] = deque()
    for number, task in enumerate(tasks):
        begun.appendleft(task)
        _advance(begun)
        _advance(waiting)
        if number == _AHEAD - 1:
            waiting = _begun(fillers())
    if len(tasks) < _AHEAD:
        waiting = _begun(fillers())
    while begun or waiting:
        _advance(begun)
        _advance(waiting)


def _begun(tasks: Sequence[Task]) -> deque[Task]:
    begun = deque(tasks)
    _advance(begun)
    return begun


def _advance(begun: deque[Task]) -> None:
    for task in list(begun):
        if next(task, StopIteration) is StopIteration:
            begun.remove(task)
