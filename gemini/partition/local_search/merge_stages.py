"""Hops: fewer stages, by giving a small stage as a whole to the worker of a stage next to it.

    worker 0   ███ ──► ▏──► ██            worker 0   ███▏ ─────► ██
    worker 1        ███                    worker 1        ███

Every stage costs messages and waiting, so a stage goes where the most loaded worker stays within a limit and not much
more is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.local_search.search_state import State
from gemini.partition.local_search.stage_builder import Merging, stages_of
from gemini.partition.partition_problem import Problem

WORTH = 0.02  # a stage less may add this share to what crosses
_ROUNDS = 3


def with_fewer_stages(problem: Problem, part_of: Sequence[int], limit: float) -> tuple[list[int], list[int]]:
    """The stage of each item, numbered in order, and the worker of each stage."""
    stage_of, worker_of = stages_of(problem, part_of)
    for _ in range(_ROUNDS):
        if len(worker_of) <= problem.nparts:
            break
        state = State(problem, stage_of, worker_of)
        if not _absorb(state, limit):
            break
        after = stages_of(problem, state.workers())
        if len(after[1]) >= len(worker_of):
            break
        stage_of, worker_of = after
    return stage_of, worker_of


def _absorb(state: State, limit: float) -> bool:
    """Give away stages, the smallest first; whether any was."""
    problem = state.problem
    members: list[list[int]] = [[] for _ in state.worker_of]
    for at, stage in enumerate(state.block_of):
        members[stage].append(at)
    work = [sum(problem.items[at].ms for at in items) for items in members]
    merging = Merging(problem, state.block_of, len(members))
    given = False
    for stage in sorted(range(len(members)), key=lambda stage: (work[stage], stage)):
        worker = state.worker_of[stage]
        if state.members[worker] == len(members[stage]):
            continue  # all that its worker has
        for other in merging.beside(stage):
            if state.worker_of[other] == worker or not members[other]:
                continue
            if not merging.closes_circle(stage, other) and _moved(state, members[stage], other, limit):
                merging.merge(other, stage)
                members[other] += members[stage]
                members[stage] = []
                given = True
                break
    return given


def _moved(state: State, items: Sequence[int], target: int, limit: float) -> bool:
    """Move items to a block, if pins, memory, loads and the cut allow it."""
    worker = state.worker_of[target]
    if any(state.problem.items[at].pin not in (None, worker) for at in items):
        return False
    if state.loads[worker] + sum(state.ms[at] for at in items) / state.speeds[worker] > limit:
        return False
    source, before = state.block_of[items[0]], state.cut
    excess = state.memory_excess()
    for at in items:
        state.move(at, target)
    kept_work = state.working[state.worker_of[source]] > 0
    if (
        kept_work
        and state.bottleneck <= limit
        and state.cut <= before * (1 + WORTH)
        and state.memory_excess() <= excess
    ):
        return True
    for at in items:
        state.move(at, source)
    return False
