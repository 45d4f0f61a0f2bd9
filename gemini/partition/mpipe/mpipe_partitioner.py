"""The partitioner `mpipe`: mixed pipes of several numbers of stages, and plain ones, refined; the best is kept.

It begins with equal layers, contiguous cuts and the answers of `acyclic` and of `metis` (where METIS is installed)
among its own, so it is never slower than they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

from gemini.partition.local_search.initial import check_size
from gemini.partition.local_search.item_moves import refine
from gemini.partition.local_search.merge_stages import with_fewer_stages
from gemini.partition.local_search.portfolio import others
from gemini.partition.local_search.score import Answer, finish, judge, within_slack
from gemini.partition.local_search.search_state import State
from gemini.partition.mpipe.coarsen import Coarse, coarsen
from gemini.partition.mpipe.lpt import pack
from gemini.partition.mpipe.seeds import cut_pieces
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_STAGES_A_WORKER = (2, 3, 4)
_CLUSTERS_A_STAGE = 6


def partition_mpipe(problem: Problem) -> Assignment:
    """The best of several mixed pipes and of what the others answer."""
    check_size(problem)
    rng = random.Random(problem.options.seed)
    found, answers, faults = others(problem)
    if problem.options.mixed is not False and problem.nparts > 1:
        found += _pipes(problem, rng)
    if not found:
        raise faults[0]
    best = min(found, key=lambda answer: answer.key)
    ceiling = min((answer.time_ms for answer in answers if answer.key[:2] == best.key[:2]), default=inf)
    limit = max(best.time_ms, min(best.time_ms * (1 + problem.options.slack), ceiling))
    found += _polished(problem, best, limit, rng)
    chosen = within_slack(found, problem.options.slack, ceiling)
    return finish(problem, chosen, tries=len(found), stage_counts=sorted({answer.nstages for answer in found}))


# ── mixed pipes ────────────────────────────────────────────────────────────────────────────────────────────────────
def _pipes(problem: Problem, rng: random.Random) -> Iterator[Answer]:
    """A mixed pipe for each number of stages."""
    counts = (problem.options.chunks,) if problem.options.chunks > 1 else _STAGES_A_WORKER
    for a_worker in counts:
        stages = a_worker * problem.nparts
        levels = coarsen(problem, stages * _CLUSTERS_A_STAGE)
        coarsest = levels[-1].problem if levels else problem
        piece_of = cut_pieces(coarsest, stages)
        yield _uncoarsened(problem, levels, piece_of, pack(coarsest, piece_of), rng)


def _uncoarsened(
    problem: Problem, levels: list[Coarse], block_of: list[int], worker_of: list[int], rng: random.Random
) -> Answer:
    """Back to the items level by level, refining on some of them and on the last."""
    finer = [problem, *(level.problem for level in levels)]
    for at in range(len(levels), -1, -1):
        if at == 0 or len(finer[at].items) <= len(finer[0].items) // 2:
            state = State(finer[at], block_of, worker_of)
            refine(state, "advanced", rng, passes=2)
            block_of, worker_of = state.block_of, list(state.worker_of)
        if at:
            block_of = [block_of[cluster] for cluster in levels[at - 1].cluster_of]
    limit = state.bottleneck * (1 + problem.options.slack)
    stages = with_fewer_stages(problem, state.workers(), limit)
    return judge(problem, *stages, f"mixed pipe of {len(worker_of)} pieces")


def _polished(problem: Problem, best: Answer, limit: float, rng: random.Random) -> Iterator[Answer]:
    """The best answer, refined once more: for time alone, and for what crosses within a limit."""
    for slack in (0.0, limit / best.time_ms - 1 if best.time_ms else 0.0):
        state = State(problem, best.stage_of, best.worker_of)
        refine(state, "advanced", rng, slack)
        if problem.options.mixed is False:
            yield judge(problem, state.block_of, state.worker_of, f"{best.origin}, polished")
        else:
            stages = with_fewer_stages(problem, state.workers(), max(limit, state.bottleneck))
            yield judge(problem, *stages, f"{best.origin}, polished")
