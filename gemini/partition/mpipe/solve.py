"""The partitioner `mpipe`: mixed pipes of several numbers of stages, and plain ones, refined; the best is kept.

It begins with the answers of the contiguous cuts, of `acyclic` and of `metis` (where METIS is installed) among its own,
so it is never slower than they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from gemini.errors import MissingEngineError, PartitionError
from gemini.partition.acyclic import acyclic_answers
from gemini.partition.metis.solve import metis_answers
from gemini.partition.mpipe.centres import cut_pieces
from gemini.partition.mpipe.coarsening import Coarse, coarsen
from gemini.partition.mpipe.packing import pack
from gemini.partition.problem import Problem
from gemini.partition.registry import Assignment
from gemini.partition.search.judging import Answer, finish, judge
from gemini.partition.search.refinement import refine
from gemini.partition.search.staging import stages_of
from gemini.partition.search.starts import check_size
from gemini.partition.search.state import State

_STAGES_A_WORKER = (2, 3, 4)
_CLUSTERS_A_STAGE = 6
_WORTH = 0.02  # a further stage must save this share of what crosses


def partition_mpipe(problem: Problem) -> Assignment:
    """The best of several mixed pipes and of what the others answer."""
    check_size(problem)
    rng = random.Random(problem.options.seed)
    others, faults = _others(problem)
    found = [*others]
    if problem.options.mixed is not False and problem.nparts > 1:
        found += _pipes(problem, rng)
    if not found:
        raise faults[0]
    best = min(found, key=lambda answer: answer.key)
    found += _polished(problem, best, rng)
    chosen = _chosen(found, others, problem.options.slack)
    stages = sorted({answer.nstages for answer in found})
    return finish(problem, chosen, tries=len(found), stage_counts=stages)


def _chosen(found: list[Answer], others: list[Answer], slack: float) -> Answer:
    """What moves least, and in the fewest stages, of the answers close to the best, no slower than any other's."""
    best = min(found, key=lambda answer: answer.key)
    limit = best.time_ms * (1 + slack)
    feasible = [answer.time_ms for answer in others if answer.key[:2] == best.key[:2]]
    limit = max(best.time_ms, min([limit, *feasible]))
    close = [a for a in found if a.key[:2] == best.key[:2] and a.time_ms <= limit * (1 + 1e-12)]
    return min(close, key=lambda answer: (answer.cut * (1 + _WORTH * answer.nstages), answer.nstages, answer.key))


# ── what the others answer ─────────────────────────────────────────────────────────────────────────────────────────
def _others(problem: Problem) -> tuple[list[Answer], list[PartitionError]]:
    """Answers of `acyclic`, contiguous cuts among them, and of `metis`; and why there are none."""
    found: list[Answer] = []
    faults: list[PartitionError] = []
    plain = replace(problem, options=replace(problem.options, mixed=None))
    for answers in (acyclic_answers, metis_answers):
        try:
            if answers is acyclic_answers:
                found += acyclic_answers(plain, random.Random(problem.options.seed))
            else:
                found += metis_answers(problem)
        except MissingEngineError:
            continue
        except PartitionError as fault:
            faults.append(fault)
    return found, faults


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
    part_of = [worker_of[block] for block in block_of]
    return judge(problem, *stages_of(problem, part_of), f"mixed pipe of {len(worker_of)} pieces")


def _polished(problem: Problem, best: Answer, rng: random.Random) -> Iterator[Answer]:
    """The best answer, refined once more: for time alone, and for what crosses within the slack."""
    for slack in (0.0, problem.options.slack):
        state = State(problem, best.stage_of, best.worker_of)
        refine(state, "advanced", rng, slack)
        if problem.options.mixed is False:
            yield judge(problem, state.block_of, state.worker_of, f"{best.origin}, polished")
        else:
            yield judge(problem, *stages_of(problem, state.workers()), f"{best.origin}, polished")
