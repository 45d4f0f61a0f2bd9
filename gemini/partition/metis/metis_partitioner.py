"""The partitioner `metis`: several tries of METIS, each made into stages, the best kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.partition.local_search.initial import check_size, contiguous_answers
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.merge_stages import with_fewer_stages
from gemini.partition.local_search.score import Answer, finish, judge, judge_state, within_slack
from gemini.partition.local_search.search_state import State
from gemini.partition.local_search.stage_builder import stages_of
from gemini.partition.metis.acyclic_repair import filled, in_sequence, on_workers
from gemini.partition.metis.metis_call import Metis
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_TRIES = ((1, False), (5, False), (20, False), (1, True), (10, True))  # imbalance in thousandths, bisection
_STAGED = 2  # tries that are made into stages


def partition_metis(problem: Problem) -> Assignment:
    """The best of several tries."""
    best = within_slack(metis_answers(problem), problem.options.slack)
    return finish(problem, best, tries=len(_TRIES))


def metis_answers(problem: Problem) -> list[Answer]:
    """The answers of the best tries."""
    check_size(problem)
    engine = Metis(problem)
    rng = random.Random(problem.options.seed)
    tries: dict[tuple[int, ...], tuple[float, float]] = {}
    for imbalance, recursive in _TRIES:
        raw = engine.parts(rng.randrange(1, 1 << 30), imbalance, recursive)
        part_of = tuple(filled(problem, on_workers(problem, raw)))
        tries[part_of] = (max(problem.times(part_of)), problem.cut_mb(part_of))
    best = sorted(tries, key=lambda part_of: tries[part_of])[:_STAGED]
    found: list[Answer] = []
    if problem.options.mixed is not False:
        found = [_mixed(problem, part_of, rng) for part_of in best]
        found += _recut(problem, found[0].stage_of)
        if any(not answer.overflow_mb for answer in found):
            return found
    try:
        # More stages keep more for backward, so where memory is short, one a worker may do.
        tried = best[:1] if found else best
        found += [answer for part_of in tried for answer in _one_a_worker(problem, part_of, rng)]
    except PartitionError:  # pins that one stage a worker cannot serve
        if not found:
            raise
    return found


def _mixed(problem: Problem, part_of: Sequence[int], rng: random.Random) -> Answer:
    """As many stages a worker as its part needs."""
    state = State(problem, *stages_of(problem, part_of))
    limit = state.bottleneck * (1 + problem.options.slack)
    refine(state, "advanced", rng, problem.options.slack, passes=1)
    return judge(problem, *with_fewer_stages(problem, state.workers(), limit), "METIS")


def _one_a_worker(problem: Problem, part_of: Sequence[int], rng: random.Random) -> list[Answer]:
    """One stage a worker: repaired and balanced again."""
    found = []
    for stage_of, worker_of in in_sequence(problem, part_of):
        state = State(problem, stage_of, worker_of)
        refine(state, "advanced", rng, problem.options.slack)
        found.append(judge_state(state, "METIS, repaired"))
    return [*found, *_recut(problem, found[0].stage_of)]


def _recut(problem: Problem, stage_of: Sequence[int]) -> list[Answer]:
    """The stages as an order of items, cut again where it is balanced best."""
    order = sorted(range(len(stage_of)), key=lambda at: (stage_of[at], at))
    found = contiguous_answers(problem, {"METIS": tuple(order)})
    return [replace(answer, origin="METIS, cut again") for answer in found]
