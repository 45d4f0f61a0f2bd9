"""Clusters stay acyclic, and a cut has the same cost on every level."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.partition.local_search.clusters import cluster_runs, contract, match_pairs, match_siblings
from gemini.partition.multilevel import coarsen, partition_multilevel
from gemini.partition.partition_problem import Problem
from tests.partition.random_graphs import chain, graphs, made
from tests.partition.shapes import problem_of

QUICK = settings(max_examples=50, deadline=None)
RULES = {
    "pairs": lambda problem: match_pairs(problem, lambda source, target: (source * 7 + target) % 5, float("inf")),
    "siblings": lambda problem: match_siblings(problem, float("inf")),
    "runs": lambda problem: cluster_runs(problem, lambda one, other: len(one.name) == len(other.name), 20.0),
}


@pytest.mark.parametrize("rule", RULES)
@QUICK
@given(problem=graphs(pinned=False), seed=st.integers(0, 9))
def test_clusters_close_no_circle_and_cost_the_same(rule: str, problem: Problem, seed: int) -> None:
    coarse, cluster_of = contract(problem, RULES[rule](problem))  # raises where clusters need each other
    assert all(edge.source < edge.target for edge in coarse.edges)
    rng = random.Random(seed)
    coarse_parts = [rng.randrange(problem.nparts) for _ in coarse.items]
    parts = [coarse_parts[cluster] for cluster in cluster_of]
    assert coarse.times(coarse_parts) == pytest.approx(problem.times(parts))
    assert coarse.cut_mb(coarse_parts) == pytest.approx(problem.cut_mb(parts))
    everything = range(len(coarse.items))
    assert coarse.memory_mb(everything, 2) == pytest.approx(problem.memory_mb(range(len(problem.items)), 2))


@given(problem=graphs())
@QUICK
def test_clusters_never_mix_pins(problem: Problem) -> None:
    for rule in RULES.values():
        _, cluster_of = contract(problem, rule(problem))
        for cluster in set(cluster_of):
            pins = {item.pin for item, own in zip(problem.items, cluster_of, strict=True) if own == cluster}
            assert len(pins - {None}) <= 1


def test_levels_shrink_to_few_clusters() -> None:
    levels = coarsen(problem_of("stack", 2), random.Random(0))
    sizes = [len(level.problem.items) for level in levels]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 120


def test_the_seed_decides() -> None:
    problem = made([1.0 + at % 3 for at in range(300)], chain(300), 4)
    assert partition_multilevel(problem) == partition_multilevel(problem)
