"""Shard groups: the workers of a pool that run stages together, and the memory through which they exchange values.

A group is made where a plan needs it. After a failed step its members may be at different collectives, so all groups
of the pool are made anew before the next one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.collectives.shared_memory_group import allocate_group
from gemini.runtime.pipelined.peer_mesh import connect
from gemini.runtime.pool.worker_handle import InternalFault, WorkerHandle
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Done
from gemini.runtime.step_messages import JoinGroup
from gemini.runtime.worker.stage_shards import ShardedStages
from gemini.step.worker_program import StepProgram
from gemini.tensor_parallel.layouts import Replicate

if TYPE_CHECKING:
    from gemini.tensor_parallel.shard_plan import ShardPlan

Members = tuple[int, ...]

_joined: weakref.WeakKeyDictionary[WorkerPool, set[Members]] = weakref.WeakKeyDictionary()


def join_groups(pool: WorkerPool, groups: Iterable[Members]) -> None:
    """Make workers members of groups that they are not in yet."""
    known = _joined.setdefault(pool, set())
    for members in sorted(set(groups) - known):
        connect(pool, [(members[0], other) for other in members[1:]])
        descriptor = allocate_group(len(members))
        try:
            for rank, place in enumerate(members):
                worker = pool.workers[place]
                reply = worker.ask(JoinGroup(worker.next_number(), members, rank), "join a group", (descriptor,))
                if not isinstance(reply, Done):
                    raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.300}")
        finally:
            os.close(descriptor)
        known.add(members)


def dissolve_groups(pool: WorkerPool) -> None:
    """Note that a step has failed: the groups must be made anew."""
    _joined.pop(pool, None)


def find_groups(program: StepProgram) -> set[Members]:
    """Return the groups of a program."""
    return {members for members in program.where.values() if len(members) > 1}


def sharded_stages(
    program: StepProgram, worker: WorkerHandle, stages: Sequence[nn.Module], plan: ShardPlan | None
) -> Any:
    """Return how a worker takes part in its stages; None where it runs all of them alone."""
    groups = {stage: found for stage, found in program.groups_of(worker.index).items() if len(found) > 1}
    if plan is None or not groups:
        return None
    layouts = {
        worker.link.shared_numbers[id(tensor)]: plan.tensor(name).layout
        for stage in groups
        for name, tensor in stages[stage].named_parameters(remove_duplicate=False)
        if not isinstance(plan.tensor(name).layout, Replicate)
    }
    written = {stage: program.written.get(stage, ()) for stage in groups}
    return ShardedStages(groups, layouts, written, {stage: program.collectives[stage] for stage in groups})
