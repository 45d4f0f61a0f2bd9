"""Partitioner `metis`: the best of several METIS attempts, each turned into stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.partition.local_search.initial import check_size, contiguous_candidates
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.merge_stages import reduce_stages
from gemini.partition.local_search.score import Candidate, evaluate, evaluate_state, select_within_slack, to_assignment
from gemini.partition.local_search.search_state import SearchState
from gemini.partition.local_search.stage_builder import build_stages
from gemini.partition.metis.acyclic_repair import fill_empty_parts, match_workers, repair_to_sequence
from gemini.partition.metis.metis_call import Metis
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_TRIES = ((1, False), (5, False), (20, False), (1, True), (10, True))  # imbalance in thousandths, bisection
_STAGED = 2  # attempts that are turned into stages


def partition_metis(problem: Problem) -> Assignment:
    """Return the best of several attempts."""
    best = select_within_slack(metis_candidates(problem), problem.options.slack)
    return to_assignment(problem, best, tries=len(_TRIES))


def metis_candidates(problem: Problem) -> list[Candidate]:
    """Return the candidates of the best attempts."""
    check_size(problem)
    engine = Metis(problem)
    rng = random.Random(problem.options.seed)
    tries: dict[tuple[int, ...], tuple[float, float]] = {}
    for imbalance, recursive in _TRIES:
        raw = engine.parts(rng.randrange(1, 1 << 30), imbalance, recursive)
        part_of = tuple(fill_empty_parts(problem, match_workers(problem, raw)))
        tries[part_of] = (max(problem.times(part_of)), problem.cut_mb(part_of))
    best = sorted(tries, key=lambda part_of: tries[part_of])[:_STAGED]
    found: list[Candidate] = []
    if problem.options.mixed is not False:
        found = [_mixed_candidate(problem, part_of, rng) for part_of in best]
        found += _recut_candidates(problem, found[0].stage_of)
        if any(not candidate.overflow_mb for candidate in found):
            return found
    try:
        # More stages save more for backward, so one stage per worker may fit where memory is short.
        tried = best[:1] if found else best
        found += [candidate for part_of in tried for candidate in _straight_candidates(problem, part_of, rng)]
    except PartitionError:  # pins that one stage per worker cannot satisfy
        if not found:
            raise
    return found


def _mixed_candidate(problem: Problem, part_of: Sequence[int], rng: random.Random) -> Candidate:
    """Return a candidate with as many stages per worker as its part needs."""
    state = SearchState(problem, *build_stages(problem, part_of))
    limit = state.bottleneck * (1 + problem.options.slack)
    refine(state, "advanced", rng, problem.options.slack, passes=1)
    return evaluate(problem, *reduce_stages(problem, state.workers(), limit), "METIS")


def _straight_candidates(problem: Problem, part_of: Sequence[int], rng: random.Random) -> list[Candidate]:
    """Return candidates with one stage per worker: repaired and rebalanced."""
    found = []
    for stage_of, worker_of in repair_to_sequence(problem, part_of):
        state = SearchState(problem, stage_of, worker_of)
        refine(state, "advanced", rng, problem.options.slack)
        found.append(evaluate_state(state, "METIS, repaired"))
    return [*found, *_recut_candidates(problem, found[0].stage_of)]


def _recut_candidates(problem: Problem, stage_of: Sequence[int]) -> list[Candidate]:
    """Cut the item order of the stages again at the best contiguous positions."""
    order = sorted(range(len(stage_of)), key=lambda at: (stage_of[at], at))
    found = contiguous_candidates(problem, {"METIS": tuple(order)})
    return [replace(candidate, origin="METIS, cut again") for candidate in found]
