"""Partitioner `multilevel`: one stage per worker, cut on a coarse graph and refined on the way back to the fine one.

    items ──merge──► clusters ──merge──► … ──► a few clusters
                                                     │ cut
    items ◄─refine── clusters ◄─refine── … ◄─────────┘

The graph of clusters is acyclic, so a cut of the coarsest graph is a cut of every finer one. Moving a cluster moves
many items at once, which escapes local optima of single-item moves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from gemini.partition.acyclic import acyclic_candidates, improve
from gemini.partition.local_search.clusters import Clusters, contract, match_pairs, match_siblings
from gemini.partition.local_search.initial import check_size
from gemini.partition.local_search.score import Candidate, evaluate, select_within_slack, to_assignment
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import Assignment

_TRIES = 2
_STARTS = 4  # initial candidates at the coarsest level
_CLUSTERS_PER_PART = 16
_LEAST_CLUSTERS = 48
_SHRINKS = 0.95  # a level must leave less than this share of clusters


@dataclass(frozen=True)
class CoarseLevel:
    """A coarser problem, and the cluster of each item of the finer one."""

    problem: Problem
    cluster_of: Clusters


def partition_multilevel(problem: Problem) -> Assignment:
    """Return the best result of several coarsenings."""
    found = multilevel_candidates(problem)
    return to_assignment(problem, select_within_slack(found, problem.options.slack), tries=len(found))


def multilevel_candidates(problem: Problem) -> list[Candidate]:
    """Return the candidates of several coarsenings."""
    check_size(problem)
    rng = random.Random(problem.options.seed)
    return [candidate for _ in range(_TRIES) for candidate in _refine_levels(problem, coarsen(problem, rng), rng)]


def coarsen(problem: Problem, rng: random.Random) -> list[CoarseLevel]:
    """Return ever coarser problems, until few clusters are left."""
    goal = max(_LEAST_CLUSTERS, _CLUSTERS_PER_PART * problem.nparts)
    most_ms = 2 * sum(item.ms for item in problem.items) / goal
    levels: list[CoarseLevel] = []
    fine = problem
    while len(fine.items) > goal:
        clusters = _match_pairs(fine, most_ms, rng)
        if len(set(clusters)) > _SHRINKS * len(fine.items):
            clusters = match_siblings(fine, most_ms)
        if len(set(clusters)) > _SHRINKS * len(fine.items):
            break
        fine, cluster_of = contract(fine, clusters)
        levels.append(CoarseLevel(fine, cluster_of))
    return levels


def _match_pairs(problem: Problem, most_ms: float, rng: random.Random) -> Clusters:
    """Match pairs across the largest values first; random weights make coarsenings differ."""
    produced = [0.0] * len(problem.items)
    for value, (producer, _) in zip(problem.values, problem.readers, strict=True):
        produced[producer] += value.mb
    return match_pairs(problem, lambda source, _: -(produced[source] + 1e-9) * (1 + 0.2 * rng.random()), most_ms)


def _refine_levels(problem: Problem, levels: list[CoarseLevel], rng: random.Random) -> list[Candidate]:
    """Cut the coarsest level and refine the candidates down to the items."""
    coarsest = levels[-1].problem if levels else problem
    candidates = sorted(acyclic_candidates(coarsest, rng, _STARTS), key=lambda candidate: candidate.key)
    chosen = dict.fromkeys((candidates[0], select_within_slack(candidates, problem.options.slack)))
    finer = [problem, *(level.problem for level in levels)]
    found = []
    for candidate in chosen:
        for at in range(len(levels) - 1, -1, -1):
            stage_of = [candidate.stage_of[cluster] for cluster in levels[at].cluster_of]
            start = evaluate(finer[at], stage_of, candidate.worker_of, "multilevel")
            candidate = improve(finer[at], start, "advanced", rng)
        found += [candidate, improve(problem, candidate, "global", rng)]
    return found
