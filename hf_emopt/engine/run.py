"""All tasks of one step, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_emopt.distributed.plan import Bucket, Plan
from hf_emopt.engine.engine import Engine
from hf_emopt.engine.lora_bucket import step_pair_bucket
from hf_emopt.engine.pipeline import Task, pipeline
from hf_emopt.rules.base import Group

if TYPE_CHECKING:
    pass


def _run(
    engine: Engine,
    matrices: list[tuple[Task, Bucket]],
    others: list[Task],
    own: Callable[[], list[Task]],
    may_go_on: bool,
) -> None:
    """All tasks of a step that ends at once.

    Args:
        others: what is stepped element by element and shared out; ``own`` makes what each rank steps for itself.
        may_go_on: refreshes beside the step may outlast it.
    """
    stay_open = False
    try:
        if engine.offload is not None:
            # The first pieces that leave make room for others, and those of matrices are smaller than an embedding's:
            # what needs no exchange goes last.
            pipeline([*others, *[task for task, _ in matrices], *own()])
        else:
            # Ranks need not have the same gradients in a bucket of which nothing travels, and the order of others'
            # collectives must not follow from it.
            alone = [task for task, bucket in matrices if bucket.communication_free]
            first = [task for task, bucket in matrices if not bucket.communication_free]
            pipeline(first, lambda: [*others, *own(), *alone])
        stay_open = may_go_on
    finally:
        engine.end_tasks(stay_open)


def _tasks(engine: Engine, plan: Plan, make: Callable[..., Task], groups: list[Group]) -> list[tuple[Task, Bucket]]:
    """The steps of a plan's buckets in which something takes part."""
    tasks = []
    for index, bucket in enumerate(plan.buckets):
        present = engine.present(bucket)
        if present:
            step = step_pair_bucket if bucket.paired else make
            tasks.append((step(engine, index, bucket, present, groups[bucket.group]), bucket))
    return tasks
