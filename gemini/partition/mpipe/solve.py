"""The partitioner `mpipe`: mixed pipes of several numbers of stages, and plain ones, refined; the best is kept.

It begins with equal layers, contiguous cuts and the answers of `acyclic` and of `metis` (where METIS is installed)
among its own, so it is never slower than they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from gemini.errors import MissingEngineError, PartitionError
from gemini.partition.acyclic import acyclic_answers
from gemini.partition.metis.solve import metis_answers
from gemini.partition.mpipe.centres import cut_pieces
from gemini.partition.mpipe.coarsening import Coarse, coarsen
from gemini.partition.mpipe.packing import pack
from gemini.partition.multilevel import multilevel_answers
from gemini.partition.problem import Problem
from gemini.partition.registry import Assignment
from gemini.partition.search.hops import with_fewer_stages
from gemini.partition.search.judging import Answer, finish, judge, within_slack
from gemini.partition.search.layers import equal_layers
from gemini.partition.search.refinement import refine
from gemini.partition.search.starts import check_size
from gemini.partition.search.state import State

_STAGES_A_WORKER = (2, 3, 4)
_CLUSTERS_A_STAGE = 6


def partition_mpipe(problem: Problem) -> Assignment:
    """The best of several mixed pipes and of what the others answer."""
    check_size(problem)
    rng = random.Random(problem.options.seed)
    found, answers, faults = _others(problem)
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


# ── what the others answer ─────────────────────────────────────────────────────────────────────────────────────────
def _others(problem: Problem) -> tuple[list[Answer], list[Answer], list[PartitionError]]:
    """All that others look at, contiguous cuts among it; what they answer; and why where they do not."""
    found: list[Answer] = []
    chosen: list[Answer] = []
    faults: list[PartitionError] = []
    looks = [equal_layers, _acyclic, metis_answers]
    if problem.options.mixed is False:
        looks.append(multilevel_answers)
    for look in looks:
        try:
            answers = look(problem)
        except MissingEngineError:
            continue
        except PartitionError as fault:
            faults.append(fault)
            continue
        if answers:
            found += answers
            chosen.append(within_slack(answers, problem.options.slack))
    return found, chosen, faults


def _acyclic(problem: Problem) -> list[Answer]:
    plain = replace(problem, options=replace(problem.options, mixed=None))
    return acyclic_answers(plain, random.Random(problem.options.seed))


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
