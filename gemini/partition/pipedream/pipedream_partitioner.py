"""The partitioner `pipedream`: the best straight pipe is the answer, the best replicated one is told in its facts.

A partition has one worker a stage, so the answer is straight. What replication would give is found by the same
programme and told with its predicted time under `facts["replicated"]`.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

from gemini.errors import PartitionError
from gemini.partition.exact.device_order import seatings
from gemini.partition.local_search.initial import check_size
from gemini.partition.local_search.score import finish, judge
from gemini.partition.partition_problem import Problem
from gemini.partition.pipedream.merged_items import Row, row_of
from gemini.partition.pipedream.replicated import replicated
from gemini.partition.pipedream.straight import straight
from gemini.partition.registry import Assignment

_CUTS = 1000  # places where a straight pipe may be cut
_REPLICATED_CUTS = 64
_SEATINGS = 12


def partition_pipedream(problem: Problem) -> Assignment:
    """The best straight pipe; `chunks` stages a worker, in turns, where that is asked."""
    check_size(problem)
    chunks = problem.options.chunks if problem.options.mixed is not False else 1
    chunks = max(1, min(chunks, len(problem.items) // problem.nparts))
    row = row_of(problem, _CUTS // (2 if chunks > 1 else 1))
    tables = [tuple(seat.worker for seat in seats) * chunks for seats in islice(seatings(problem), _SEATINGS)]
    found = [(made, workers) for workers in tables if (made := straight(row, workers)) is not None]
    if not found:
        raise PartitionError(
            f"no {problem.nparts * chunks} consecutive stages fit the memory of the workers and the pins\n"
            "    → more parts, recompute=True, or mpipe, which is not bound to consecutive stages"
        )
    (_, ends), workers = min(found, key=lambda one: one[0][0])
    stage_of = [0] * row.size
    for stage, (begin, end) in enumerate(pairwise([0, *ends])):
        stage_of[begin:end] = [stage] * (end - begin)
    answer = judge(problem, [stage_of[cluster] for cluster in row.cluster_of], workers)
    return finish(problem, answer, replicated=_plan(problem))


def _plan(problem: Problem) -> dict[str, Any]:
    """The best replicated pipe: its time, and for each stage the first and last item and the workers."""
    row = row_of(problem, _REPLICATED_CUTS)
    ms, stages = replicated(row)
    members = _members(row)
    return {
        "ms": round(ms, 6),
        "speedup": round(sum(item.ms for item in problem.items) / ms, 3) if ms else 1.0,
        "stages": [
            {
                "items": len(items),
                "first": problem.items[items[0]].name,
                "last": problem.items[items[-1]].name,
                "workers": list(stage.workers),
            }
            for stage in stages
            if (items := [at for cluster in range(stage.begin, stage.end) for at in members[cluster]])
        ],
    }


def _members(row: Row) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(row.size)]
    for at, cluster in enumerate(row.cluster_of):
        found[cluster].append(at)
    return found
