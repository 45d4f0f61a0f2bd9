"""Merge stages: reduce the number of stages by moving a small stage to the worker of an adjacent one.

    worker 0   ███ ──► ▏──► ██            worker 0   ███▏ ─────► ██
    worker 1        ███                    worker 1        ███

Every stage costs messages and idle time, so a stage moves if the bottleneck stays within a limit and the cut grows
little.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.partition.local_search.search_state import SearchState
from gemini.partition.local_search.stage_builder import StageGraph, build_stages
from gemini.partition.partition_problem import Problem

CUT_PER_STAGE = 0.02  # relative growth of the cut accepted for one stage less
_ROUNDS = 3


def reduce_stages(problem: Problem, part_of: Sequence[int], limit: float) -> tuple[list[int], list[int]]:
    """Return the stage of each item, in topological order, and the worker of each stage, with few stages."""
    stage_of, worker_of = build_stages(problem, part_of)
    for _ in range(_ROUNDS):
        if len(worker_of) <= problem.nparts:
            break
        state = SearchState(problem, stage_of, worker_of)
        if not _absorb_small_stages(state, limit):
            break
        after = build_stages(problem, state.workers())
        if len(after[1]) >= len(worker_of):
            break
        stage_of, worker_of = after
    return stage_of, worker_of


def _absorb_small_stages(state: SearchState, limit: float) -> bool:
    """Move small stages to workers of adjacent stages, the smallest first; return whether any moved."""
    problem = state.problem
    members: list[list[int]] = [[] for _ in state.worker_of]
    for at, stage in enumerate(state.block_of):
        members[stage].append(at)
    work = [sum(problem.items[at].ms for at in items) for items in members]
    graph = StageGraph(problem, state.block_of, len(members))
    moved = False
    for stage in sorted(range(len(members)), key=lambda stage: (work[stage], stage)):
        worker = state.worker_of[stage]
        if state.members[worker] == len(members[stage]):
            continue  # the only stage of its worker
        for other in graph.neighbours(stage):
            if state.worker_of[other] == worker or not members[other]:
                continue
            if not graph.creates_cycle(stage, other) and _try_move(state, members[stage], other, limit):
                graph.merge(other, stage)
                members[other] += members[stage]
                members[stage] = []
                moved = True
                break
    return moved


def _try_move(state: SearchState, items: Sequence[int], target: int, limit: float) -> bool:
    """Move items to a block if pins, memory, loads and the cut allow it; return whether they moved."""
    worker = state.worker_of[target]
    if any(state.problem.items[at].pin not in (None, worker) for at in items):
        return False
    if state.loads[worker] + sum(state.ms[at] for at in items) / state.speeds[worker] > limit:
        return False
    source, before = state.block_of[items[0]], state.cut
    excess = state.memory_excess()
    for at in items:
        state.move(at, target)
    has_work = state.working[state.worker_of[source]] > 0
    if (
        has_work
        and state.bottleneck <= limit
        and state.cut <= before * (1 + CUT_PER_STAGE)
        and state.memory_excess() <= excess
    ):
        return True
    for at in items:
        state.move(at, source)
    return False
