"""Shard groups: the workers of a pool that run stages together, and the memory through which they exchange values.

A group is made where a plan needs it. After a failed step its members may be at different collectives, so all groups
of the pool are made anew before the next one.
"""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.collectives.shared_memory_group import allocate_group, is_supported
from gemini.runtime.pipelined.broadcast import Broadcast
from gemini.runtime.pipelined.peer_mesh import connect
from gemini.runtime.pool.worker_handle import START_TIMEOUT, InternalFault, WorkerHandle
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Done, Forget
from gemini.runtime.step_messages import Joined, JoinGroup
from gemini.runtime.worker.stage_shards import ShardedStages
from gemini.step.worker_program import StepProgram
from gemini.tensor_parallel.layouts import Replicate

if TYPE_CHECKING:
    from gemini.tensor_parallel.shard_plan import ShardPlan

Members = tuple[int, ...]

_joined: weakref.WeakKeyDictionary[WorkerPool, set[Members]] = weakref.WeakKeyDictionary()


def join_groups(pool: WorkerPool, groups: Iterable[Members], *, of_shards: bool = True) -> None:
    """Make workers members of groups that they are not in yet.

    Shards on several hosts exchange values on their devices; replicas exchange gradients in memory of the hosts.
    """
    known = _joined.setdefault(pool, set())
    for members in sorted(set(groups) - known):
        workers = [pool.workers[place] for place in members]
        hosts = {worker.host for worker in workers}
        if len(hosts) > 1:
            _join_hosts(pool, members, workers, of_shards=of_shards)
        elif hosts == {""}:
            _join_here(pool, members, workers)
        else:
            _join_there(members, workers)
        known.add(members)


def _join_here(pool: WorkerPool, members: Members, workers: list[WorkerHandle]) -> None:
    """Make workers of this host a group: they get memory that this process allocates."""
    if not is_supported():
        raise InternalFault(f"shards exchange values through memory on x86 only, this is {platform.machine()}")
    connect(pool, [(members[0], other) for other in members[1:]])
    descriptor = allocate_group(len(members))
    try:
        for rank, worker in enumerate(workers):
            request = JoinGroup(worker.next_number(), members, rank)
            _check(worker, worker.ask(request, "join a group", (descriptor,)), Done)
    finally:
        os.close(descriptor)


def _join_there(members: Members, workers: list[WorkerHandle]) -> None:
    """Make workers of another host a group: the first allocates its memory."""
    first, *others = workers
    reply = first.ask(JoinGroup(first.next_number(), members, 0), "join a group")
    _check(first, reply, Joined)
    for rank, worker in enumerate(others, 1):
        request = JoinGroup(worker.next_number(), members, rank, reply.path)
        _check(worker, worker.ask(request, "join a group"), Done)


def _join_hosts(pool: WorkerPool, members: Members, workers: list[WorkerHandle], *, of_shards: bool) -> None:
    """Make workers of several hosts a group: all of them meet at once."""
    assert pool.cluster is not None
    (host, port, prefix), own = pool.cluster.meeting(), pool.cluster.host
    seconds = max(START_TIMEOUT, *(worker.timeout for worker in workers))
    requests = {
        worker: JoinGroup(
            worker.next_number(),
            members,
            rank,
            "",
            worker.host or own,
            (host, port, prefix),
            seconds,
            str(worker.device.where) if of_shards else "cpu",
        )
        for rank, worker in enumerate(workers)
    }
    replies = Broadcast(workers).ask(
        requests, "join a group", lambda reply: not isinstance(reply, Done), lambda number: Forget(number, [], []),
        START_TIMEOUT,
    )  # fmt: skip
    for worker, reply in replies.items():
        _check(worker, reply, Done)


def _check(worker: WorkerHandle, reply: Any, wanted: type) -> None:
    if not isinstance(reply, wanted):
        raise InternalFault(f"worker {worker.index}: {getattr(reply, 'reason', reply)!s:.300}")


def dissolve_groups(pool: WorkerPool) -> None:
    """Note that a step has failed: the groups must be made anew."""
    _joined.pop(pool, None)


def find_groups(program: StepProgram) -> set[Members]:
    """Return the groups of a program."""
    return {members for members in program.where.values() if len(members) > 1}


def sharded_stages(  # noqa: PLR0917
    program: StepProgram,
    worker: WorkerHandle,
    stages: Sequence[nn.Module],
    plan: ShardPlan | None,
    workers: Sequence[WorkerHandle],
    number: int,
) -> Any:
    """Return how a worker takes part in its stages of program `number`; None where it runs all of them alone."""
    groups = {stage: found for stage, found in program.groups_of(worker.index).items() if len(found) > 1}
    if plan is None or not groups:
        return None
    numbers = worker.stage_numbers(number)
    layouts = {
        numbers[id(tensor)]: plan.tensor(name).layout
        for stage in groups
        for name, tensor in stages[stage].named_parameters(remove_duplicate=False)
        if not isinstance(plan.tensor(name).layout, Replicate)
    }
    written = {stage: program.written.get(stage, ()) for stage in groups}
    collectives = {stage: program.collectives[stage] for stage in groups}
    are_remote = any(workers[place].is_remote for members in groups.values() for place in members)
    return ShardedStages(groups, layouts, written, collectives, are_remote)
