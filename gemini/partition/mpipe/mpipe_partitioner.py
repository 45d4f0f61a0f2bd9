"""Partitioner `mpipe`: the best of mixed pipelines with several numbers of stages and of straight ones, refined.

Its candidates include equal layers, contiguous cuts and the results of `acyclic` and `metis` (where METIS is
installed), so it is never slower than those.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

from gemini.partition.local_search.initial import check_size
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.merge_stages import reduce_stages
from gemini.partition.local_search.portfolio import run_portfolio
from gemini.partition.local_search.score import Candidate, evaluate, select_within_slack, to_assignment
from gemini.partition.local_search.search_state import SearchState
from gemini.partition.mpipe.coarsen import CoarsenedProblem, coarsen
from gemini.partition.mpipe.lpt import assign_pieces
from gemini.partition.mpipe.seeds import cut_pieces
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_STAGES_PER_WORKER = (2, 3, 4)
_CLUSTERS_PER_STAGE = 6


def partition_mpipe(problem: Problem) -> Assignment:
    """Return the best of several mixed pipelines and of the portfolio."""
    check_size(problem)
    rng = random.Random(problem.options.seed)
    found, selected, faults = run_portfolio(problem)
    if problem.options.mixed is not False and problem.nparts > 1:
        found += _mixed_candidates(problem, rng)
    if not found:
        raise faults[0]
    best = min(found, key=lambda candidate: candidate.key)
    ceiling = min((candidate.time_ms for candidate in selected if candidate.key[:2] == best.key[:2]), default=inf)
    limit = max(best.time_ms, min(best.time_ms * (1 + problem.options.slack), ceiling))
    found += _polish(problem, best, limit, rng)
    chosen = select_within_slack(found, problem.options.slack, ceiling)
    return to_assignment(
        problem, chosen, tries=len(found), stage_counts=sorted({candidate.nstages for candidate in found})
    )


# ── mixed pipelines ──────────────────────────────────────────────────────────────────────────────────────────────────
def _mixed_candidates(problem: Problem, rng: random.Random) -> Iterator[Candidate]:
    """Yield a mixed pipeline for each number of stages."""
    counts = (problem.options.chunks,) if problem.options.chunks > 1 else _STAGES_PER_WORKER
    for per_worker in counts:
        stages = per_worker * problem.nparts
        levels = coarsen(problem, stages * _CLUSTERS_PER_STAGE)
        coarsest = levels[-1].problem if levels else problem
        piece_of = cut_pieces(coarsest, stages)
        yield _uncoarsen(problem, levels, piece_of, assign_pieces(coarsest, piece_of), rng)


def _uncoarsen(
    problem: Problem, levels: list[CoarsenedProblem], block_of: list[int], worker_of: list[int], rng: random.Random
) -> Candidate:
    """Project a coarse solution back to the items, refining on some levels and on the last."""
    finer = [problem, *(level.problem for level in levels)]
    for at in range(len(levels), -1, -1):
        if at == 0 or len(finer[at].items) <= len(finer[0].items) // 2:
            state = SearchState(finer[at], block_of, worker_of)
            refine(state, "advanced", rng, passes=2)
            block_of, worker_of = state.block_of, list(state.worker_of)
        if at:
            block_of = [block_of[cluster] for cluster in levels[at - 1].cluster_of]
    limit = state.bottleneck * (1 + problem.options.slack)
    stages = reduce_stages(problem, state.workers(), limit)
    return evaluate(problem, *stages, f"mixed pipeline of {len(worker_of)} pieces")


def _polish(problem: Problem, best: Candidate, limit: float, rng: random.Random) -> Iterator[Candidate]:
    """Refine the best candidate once more: for time alone, and for the cut within a limit."""
    for slack in (0.0, limit / best.time_ms - 1 if best.time_ms else 0.0):
        state = SearchState(problem, best.stage_of, best.worker_of)
        refine(state, "advanced", rng, slack)
        if problem.options.mixed is False:
            yield evaluate(problem, state.block_of, state.worker_of, f"{best.origin}, polished")
        else:
            stages = reduce_stages(problem, state.workers(), max(limit, state.bottleneck))
            yield evaluate(problem, *stages, f"{best.origin}, polished")
