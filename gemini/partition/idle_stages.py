"""Idle stages: a stage without measurable work joins a stage that it exchanges values with.

It would cost messages and idle time, and do nothing. Pins, memory limits and the order of stages hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_LEAST = 1e-3  # of the ideal time of a worker: less is not measurable


def absorb_idle_stages(problem: Problem, found: Assignment) -> Assignment:
    """Return the assignment with stages of no measurable work merged into neighbours, where more than parts exist."""
    least = _LEAST * problem.ideal_ms
    for _ in range(len(set(found.stage_of))):
        work: dict[int, float] = {}
        for item, stage in zip(problem.items, found.stage_of, strict=True):
            work[stage] = work.get(stage, 0.0) + item.ms
        if len(work) <= problem.nparts:
            break
        merged = (
            one
            for stage in sorted(work, key=lambda stage: work[stage])
            if work[stage] < least
            for one in _merges(problem, found, stage)
        )
        better = next(merged, None)
        if better is None:
            break
        found = better
    return found


def _merges(problem: Problem, found: Assignment, stage: int) -> Iterator[Assignment]:
    """Yield the valid ways to merge a stage into a neighbour."""
    ends = {(found.stage_of[edge.source], found.stage_of[edge.target]) for edge in problem.edges}
    neighbours = [source for source, target in ends if target == stage != source]
    neighbours += [target for source, target in ends if source == stage != target]
    items = [at for at, one in enumerate(found.stage_of) if one == stage]
    for into in dict.fromkeys(neighbours):
        worker = found.worker_of[into]
        if any(problem.items[at].pin not in (None, worker) for at in items):
            continue
        merged = replace(found, stage_of=tuple(into if one == stage else one for one in found.stage_of))
        if _is_acyclic(problem, merged) and _fits(problem, merged):
            yield merged


def _is_acyclic(problem: Problem, found: Assignment) -> bool:
    graph = nx.DiGraph((found.stage_of[edge.source], found.stage_of[edge.target]) for edge in problem.edges)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    return bool(nx.is_directed_acyclic_graph(graph))


def _fits(problem: Problem, found: Assignment) -> bool:
    limits = [worker.memory_mb for worker in problem.workers]
    if not problem.has_memory_limits:
        return True
    names = sorted(set(found.stage_of))
    stages = [[at for at, one in enumerate(found.stage_of) if one == name] for name in names]
    used = problem.worker_memory_mb(stages, [found.worker_of[name] for name in names])
    return all(limit is None or mb <= limit for mb, limit in zip(used, limits, strict=True))
