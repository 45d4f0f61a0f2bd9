"""On the same costs, `exact` and `mpipe` are never slower than equal layers, `metis` or `acyclic`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gemini.partition.local_search.portfolio import equal_layer_candidates
from gemini.partition.partition_problem import Problem
from gemini.partition.registry import find_partitioner
from tests.partition.random_graphs import graphs
from tests.partition.shapes import MODELS, problem_of


def time_of(problem: Problem, name: str) -> float:
    found = find_partitioner(name)(problem)
    return max(problem.times([found.worker_of[stage] for stage in found.stage_of]))


def check(problem: Problem) -> None:
    rivals = {name: time_of(problem, name) for name in ("metis", "acyclic")}
    rivals["equal layers"] = min(
        (one.time_ms for one in equal_layer_candidates(problem) if not one.idle), default=float("inf")
    )
    for ours in ("exact", "mpipe"):
        mine = time_of(problem, ours)
        assert mine <= min(rivals.values()) * (1 + 1e-9), (ours, mine, rivals)


@pytest.mark.slow
@pytest.mark.parametrize("nparts", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_on_all_models(name: str, nparts: int) -> None:
    check(problem_of(name, nparts))


@pytest.mark.parametrize("name", ["u", "stack"])
def test_on_models(name: str) -> None:
    check(problem_of(name, 8))


@settings(max_examples=8, deadline=None)
@given(graphs(limited=False, pinned=False))
def test_on_random_graphs(problem: Problem) -> None:
    check(problem)
