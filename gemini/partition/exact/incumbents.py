"""Incumbents: `exact` is never slower than equal layers, `acyclic` or `metis`.

Its straight pipelines are optimal, but trading balance for bytes may make them slower than an incumbent, and a mixed
pipeline may balance better than any straight one. So it tries, in this order: the same search without slack; the
incumbent itself, where it has one stage per worker; several chunks per worker; a mixed pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.partition.local_search.portfolio import run_portfolio
from gemini.partition.local_search.score import Candidate, to_assignment
from gemini.partition.mpipe.mpipe_partitioner import partition_mpipe
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_SAME = 1 + 1e-9
_CHUNKS = (2, 3)


def match_incumbents(problem: Problem, found: Assignment, search: Callable[[Problem], Assignment]) -> Assignment:
    """Return `found`, or the first of the alternatives above that no incumbent beats."""
    incumbents = [one for one in run_portfolio(problem)[1] if one.overflow_mb <= 1e-6 and not one.idle]
    limit = min((one.time_ms for one in incumbents), default=float("inf"))
    if _time(problem, found) <= limit * _SAME:
        return found
    tried = [found]
    straight = [one for one in incumbents if one.nstages == problem.nparts and one.time_ms <= limit * _SAME]
    for alternative in _alternatives(problem, search, straight):
        if _time(problem, alternative) <= limit * _SAME:
            return alternative
        tried.append(alternative)
    return min(tried, key=lambda one: _time(problem, one))


def _alternatives(
    problem: Problem, search: Callable[[Problem], Assignment], straight: list[Candidate]
) -> Iterator[Assignment]:
    options = problem.options
    yield search(replace(problem, options=replace(options, slack=0.0)))
    for incumbent in sorted(straight, key=lambda one: one.key):
        yield to_assignment(problem, incumbent, method="incumbent", optimal=False)
    if options.chunks == 1 and options.mixed is None:
        for chunks in _CHUNKS:
            if chunks * problem.nparts <= len(problem.items):
                # Memory or pins may not allow more chunks.
                with contextlib.suppress(PartitionError):
                    yield search(replace(problem, options=replace(options, slack=0.0, chunks=chunks)))
    alternative = partition_mpipe(problem)
    yield replace(alternative, facts={**alternative.facts, "method": "mixed", "optimal": False})


def _time(problem: Problem, found: Assignment) -> float:
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))
