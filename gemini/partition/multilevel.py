"""`multilevel`: one stage a worker, found on a coarse graph and refined on the way back to the fine one.

    items ──merge──► clusters ──merge──► … ──► a few clusters
                                                     │ cut
    items ◄─refine── clusters ◄─refine── … ◄─────────┘

Clusters never close a circle, so the cut of the coarsest graph is a cut of every finer one. Moves of clusters are moves
of many items at once, which leads past the local optima that single items are caught in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from gemini.partition.acyclic import acyclic_answers, improved
from gemini.partition.local_search.clusters import Clusters, contract, pairs, siblings
from gemini.partition.local_search.initial import check_size
from gemini.partition.local_search.score import Answer, finish, judge, within_slack
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_TRIES = 2
_STARTS = 4  # at the coarsest level
_CLUSTERS_A_PART = 16
_LEAST_CLUSTERS = 48
_SHRINKS = 0.95  # a level must leave fewer than this share


@dataclass(frozen=True)
class Level:
    """A coarser problem, and the cluster of each item of the finer one."""

    problem: Problem
    cluster_of: Clusters


def partition_multilevel(problem: Problem) -> Assignment:
    """The best answer of several coarsenings."""
    found = multilevel_answers(problem)
    return finish(problem, within_slack(found, problem.options.slack), tries=len(found))


def multilevel_answers(problem: Problem) -> list[Answer]:
    """The answers of several coarsenings."""
    check_size(problem)
    rng = random.Random(problem.options.seed)
    return [answer for _ in range(_TRIES) for answer in _refined(problem, coarsen(problem, rng), rng)]


def coarsen(problem: Problem, rng: random.Random) -> list[Level]:
    """Ever coarser problems, until few clusters are left."""
    goal = max(_LEAST_CLUSTERS, _CLUSTERS_A_PART * problem.nparts)
    most_ms = 2 * sum(item.ms for item in problem.items) / goal
    levels: list[Level] = []
    fine = problem
    while len(fine.items) > goal:
        clusters = _matched(fine, most_ms, rng)
        if len(set(clusters)) > _SHRINKS * len(fine.items):
            clusters = siblings(fine, most_ms)
        if len(set(clusters)) > _SHRINKS * len(fine.items):
            break
        fine, cluster_of = contract(fine, clusters)
        levels.append(Level(fine, cluster_of))
    return levels


def _matched(problem: Problem, most_ms: float, rng: random.Random) -> Clusters:
    """Pairs across the largest values first; a little chance makes coarsenings differ."""
    made = [0.0] * len(problem.items)
    for value, (producer, _) in zip(problem.values, problem.readers, strict=True):
        made[producer] += value.mb
    return pairs(problem, lambda source, _: -(made[source] + 1e-9) * (1 + 0.2 * rng.random()), most_ms)


def _refined(problem: Problem, levels: list[Level], rng: random.Random) -> list[Answer]:
    """The answers of the coarsest level, brought back to the items."""
    coarsest = levels[-1].problem if levels else problem
    answers = sorted(acyclic_answers(coarsest, rng, _STARTS), key=lambda answer: answer.key)
    chosen = dict.fromkeys((answers[0], within_slack(answers, problem.options.slack)))
    finer = [problem, *(level.problem for level in levels)]
    found = []
    for answer in chosen:
        for at in range(len(levels) - 1, -1, -1):
            stage_of = [answer.stage_of[cluster] for cluster in levels[at].cluster_of]
            start = judge(finer[at], stage_of, answer.worker_of, "multilevel")
            answer = improved(finer[at], start, "advanced", rng)
        found += [answer, improved(problem, answer, "global", rng)]
    return found
