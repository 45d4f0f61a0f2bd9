"""Partitioner `acyclic`: one stage per worker, cut from a topological order and improved by moves that stay acyclic.

Moreira, Popp and Schulz (Graph Partitioning with Acyclicity Constraints) distinguish three kinds of moves: *simple*
ones to the adjacent stage, *advanced* ones to any stage between those of an item's predecessors and successors, and
*global* ones to any stage that creates no cycle. All three run as Fiduccia–Mattheyses passes from several initial
candidates; the seed breaks ties.
"""

from __future__ import annotations

import random

from gemini.errors import PartitionError
from gemini.partition.local_search.acyclic_moves import rearrange
from gemini.partition.local_search.initial import initial_candidates
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.score import Candidate, evaluate_state, select_within_slack, to_assignment
from gemini.partition.local_search.search_state import SearchState
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_STARTS = (3, 12)  # initial candidates: at least, at most
_EFFORT = 6000  # items of all initial candidates together


def partition_acyclic(problem: Problem) -> Assignment:
    """Return the best result from several initial candidates."""
    rng = random.Random(problem.options.seed)
    found = acyclic_candidates(problem, rng)
    best = select_within_slack(found, problem.options.slack)
    return to_assignment(problem, best, tries=len(found))


def acyclic_candidates(problem: Problem, rng: random.Random, most: int = _STARTS[1]) -> list[Candidate]:
    """Return initial candidates and their improvements by each kind of moves."""
    if problem.options.mixed and problem.nparts > 1:
        raise PartitionError(
            "this partitioner has one stage per worker, and mixed=True requests several\n"
            "    → omit mixed, or use mpipe or metis"
        )
    count = max(_STARTS[0], min(most, _EFFORT // len(problem.items)))
    first = initial_candidates(problem, rng, drawn=count - 1)
    found = list(first)
    seen: set[tuple[int, ...]] = set()
    for start in first:
        if start.stage_of in seen:
            continue
        seen.add(start.stage_of)
        found.append(improve(problem, start, "simple", rng))
        found.append(improve(problem, start, "advanced", rng))
        found.append(improve(problem, found[-1], "global", rng))
        if len(seen) == count:
            break
    return found


def improve(problem: Problem, start: Candidate, moves: str, rng: random.Random) -> Candidate:
    """Improve a candidate by one kind of moves."""
    state = SearchState(problem, start.stage_of, start.worker_of)
    if moves == "global":
        rearrange(state, state.bottleneck, rng)
    refine(state, "advanced" if moves == "global" else moves, rng, problem.options.slack)
    return evaluate_state(state, f"{start.origin}, {moves} moves")
