"""The tasks of one step, and the pipeline that hides each collective behind the mathematics of other buckets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from hf_emopt.distributed.plan import Bucket, Plan
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
        refreshes_may_outlast: refreshes for the next step may still run when this function returns. Readers of state wait for
            them (:meth:`StepContext.finish_pending`, ``MatrixRule.join``).
    """
    context = step.context
    if step.undisturbed and context.apply_stream is not None:
        context.apply_stream.open()
    others, matrices = _adamw_tasks(step), _matrix_tasks(step)
    names = step.verdict.present - context.shared_aux
    ended = False
    try:
        if context.store.offload is not None:
            # Finished pieces free memory for the next ones, and those of matrices are smaller than an embedding's: tasks
            # without an exchange go last.
            pipeline([*[task for task, _ in (*others, *matrices)], *local_adamw_tasks(step, names)])
        else:
            # Ranks may differ in the gradients of a bucket without communication, and the order of collectives must not
            # depend on them.
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
    """A step whose updates arrive during the next forward pass: every task runs until its first wait for bytes."""
    context = step.context
    pipeline(local_adamw_tasks(step, step.verdict.present - context.shared_aux))
    tasks = [*_adamw_tasks(step), *_matrix_tasks(step)]  # a forward pass needs the embedding, not a matrix, first
    members = step.verdict.members
    delayed.begin((task, [context.parameter(b, i) for i in members(b)]) for task, b in tasks)
    if context.store.offload is not None:
        context.store.offload.finish()


def _matrix_tasks(step: Step) -> list[tuple[Task, Bucket]]:
    """The steps of the buckets of matrices."""
    members = _members(step, step.context.plan)
    return [((LoraPairsStep if m.bucket.paired else BucketStep)(step, m).run(), m.bucket) for m in members]


def _adamw_tasks(step: Step) -> list[tuple[Task, Bucket]]:
    """The steps of the buckets of other parameters that ranks hold copies of."""
    return [(step_adamw_bucket(step, m), m.bucket) for m in _members(step, step.context.aux_plan)]


def _members(step: Step, plan: Plan) -> Iterator[BucketMembers]:
    """The members of every bucket that has a gradient in this step."""
    context = step.context
    for index, bucket in enumerate(plan.buckets):
        if present := step.verdict.members(bucket):
            kept = context.members.get((id(bucket), present))
            yield kept or BucketMembers.kept(context, index, bucket, present)


_AHEAD = 2
"""Tasks that begin before fillers are made: the second's collective runs while the first queues its products."""


def pipeline(tasks: Sequence[Task], fillers: Callable[[], Sequence[Task]] = tuple) -> None:
    """Runs tasks so that each collective overlaps with the mathematics of other buckets.

    A task begins. Then each task that has begun goes on by one stage, the latest first. So the collective of the next bucket
    begins before this bucket's products are queued.

    Args:
        tasks: begin in this order.
        fillers: makes tasks that take a host longer than a GPU. They are made, and begin, when the GPU has the products of a
            task to do. Then they go on by one stage after each task.
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
