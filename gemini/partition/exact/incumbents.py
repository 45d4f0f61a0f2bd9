"""Rivals: `exact` is never slower than what equal layers, `acyclic` or `metis` answer.

Its straight pipes are optimal, but giving up a little balance for fewer bytes may cost more than a rival does, and a
mixed pipe may balance what no straight one can. So, in this order: the same search without giving anything up; the
rival itself, where it has one stage a worker; several chunks a worker; a mixed pipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.partition.local_search.portfolio import others
from gemini.partition.local_search.score import Answer, finish
from gemini.partition.mpipe.mpipe_partitioner import partition_mpipe
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_SAME = 1 + 1e-9
_CHUNKS = (2, 3)


def not_slower(problem: Problem, found: Assignment, search: Callable[[Problem], Assignment]) -> Assignment:
    """`found`, or the first answer of the list above that no rival beats."""
    rivals = [one for one in others(problem)[1] if one.overflow_mb <= 1e-6 and not one.idle]
    limit = min((one.time_ms for one in rivals), default=float("inf"))
    if _time(problem, found) <= limit * _SAME:
        return found
    tried = [found]
    straight = [one for one in rivals if one.nstages == problem.nparts and one.time_ms <= limit * _SAME]
    for answer in _answers(problem, search, straight):
        if _time(problem, answer) <= limit * _SAME:
            return answer
        tried.append(answer)
    return min(tried, key=lambda one: _time(problem, one))


def _answers(problem: Problem, search: Callable[[Problem], Assignment], straight: list[Answer]) -> Iterator[Assignment]:
    options = problem.options
    yield search(replace(problem, options=replace(options, slack=0.0)))
    for rival in sorted(straight, key=lambda one: one.key):
        yield finish(problem, rival, method="rival", optimal=False)
    if options.chunks == 1 and options.mixed is None:
        for chunks in _CHUNKS:
            if chunks * problem.nparts <= len(problem.items):
                # More chunks may be more than memory or pins allow.
                with contextlib.suppress(PartitionError):
                    yield search(replace(problem, options=replace(options, slack=0.0, chunks=chunks)))
    answer = partition_mpipe(problem)
    yield replace(answer, facts={**answer.facts, "method": "mixed", "optimal": False})


def _time(problem: Problem, found: Assignment) -> float:
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))
