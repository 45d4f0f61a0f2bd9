"""Rivals: `exact` is never slower than what equal layers, `acyclic` or `metis` answer.

Its straight pipes are optimal, but giving up a little balance for fewer bytes may cost more than a rival does, and a
mixed pipe may balance what no straight one can. So, in this order: the same search without giving anything up; several
chunks a worker; a mixed pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.partition.problem import Problem
from gemini.partition.registry import Assignment

_SAME = 1 + 1e-9
_CHUNKS = (2, 3)


def not_slower(problem: Problem, found: Assignment, search: Callable[[Problem], Assignment]) -> Assignment:
    """`found`, or the first answer of the list above that no rival beats."""
    from gemini.partition.search.others import others

    _, rivals, _ = others(problem)
    limit = min((one.time_ms for one in rivals if one.overflow_mb <= 1e-6 and not one.idle), default=float("inf"))
    if _time(problem, found) <= limit * _SAME:
        return found
    tried = [found]
    for answer in _answers(problem, search):
        if _time(problem, answer) <= limit * _SAME:
            return answer
        tried.append(answer)
    return min(tried, key=lambda one: _time(problem, one))


def _answers(problem: Problem, search: Callable[[Problem], Assignment]) -> Iterator[Assignment]:
    options = problem.options
    plain = options.chunks == 1 and not options.mixed
    asked = [replace(options, slack=0.0)]
    if plain and options.mixed is None:
        asked += [replace(options, slack=0.0, chunks=c) for c in _CHUNKS if c * problem.nparts <= len(problem.items)]
    for one in asked:
        try:
            yield search(replace(problem, options=one))
        except PartitionError:  # more chunks than memory or pins allow
            continue
    from gemini.partition.mpipe.solve import partition_mpipe

    answer = partition_mpipe(problem)
    yield replace(answer, facts={**answer.facts, "method": "mixed", "optimal": False})


def _time(problem: Problem, found: Assignment) -> float:
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))
