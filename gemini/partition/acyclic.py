"""`acyclic`: one stage a worker, cut from a topological order and improved by moves that keep the stages in an order.

Moreira, Popp and Schulz (Graph Partitioning with Acyclicity Constraints) tell three kinds of moves apart: *simple* ones
to the neighbouring stage, *advanced* ones to any stage between those of an item's predecessors and successors, and
*global* ones to any stage that closes no circle. All three are used, from several starts, as Fiduccia–Mattheyses
passes; the seed decides the ties.
"""

from __future__ import annotations

import random

from gemini.errors import PartitionError
from gemini.partition.local_search.acyclic_moves import rearrange
from gemini.partition.local_search.initial import starts
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.score import Answer, finish, judge_state, within_slack
from gemini.partition.local_search.search_state import State
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_STARTS = (3, 12)  # at least, at most
_EFFORT = 6000  # items, of all starts together


def partition_acyclic(problem: Problem) -> Assignment:
    """The best answer from several starts."""
    rng = random.Random(problem.options.seed)
    found = acyclic_answers(problem, rng)
    best = within_slack(found, problem.options.slack)
    return finish(problem, best, tries=len(found))


def acyclic_answers(problem: Problem, rng: random.Random, most: int = _STARTS[1]) -> list[Answer]:
    """Starts, and what the moves make of the best of them."""
    if problem.options.mixed and problem.nparts > 1:
        raise PartitionError(
            "the acyclic family has one stage a worker, and mixed=True asks for several\n"
            "    → leave mixed out, or use mpipe or metis"
        )
    count = max(_STARTS[0], min(most, _EFFORT // len(problem.items)))
    first = starts(problem, rng, drawn=count - 1)
    found = list(first)
    seen: set[tuple[int, ...]] = set()
    for start in first:
        if start.stage_of in seen:
            continue
        seen.add(start.stage_of)
        found.append(improved(problem, start, "simple", rng))
        found.append(improved(problem, start, "advanced", rng))
        found.append(improved(problem, found[-1], "global", rng))
        if len(seen) == count:
            break
    return found


def improved(problem: Problem, start: Answer, moves: str, rng: random.Random) -> Answer:
    """What a kind of moves makes of a start."""
    state = State(problem, start.stage_of, start.worker_of)
    if moves == "global":
        rearrange(state, state.bottleneck, rng)
    refine(state, "advanced" if moves == "global" else moves, rng, problem.options.slack)
    return judge_state(state, f"{start.origin}, {moves} moves")
