"""Convex, non-contiguous stages agree with exhaustive search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import gemini.partition.exact.exact_partitioner as solve_module
from gemini.errors import PartitionError
from gemini.partition.exact.convex import find_convex, stage_domains
from gemini.partition.exact.device_order import slot_orders
from gemini.partition.exact.exact_partitioner import search
from gemini.partition.partition_options import Options
from gemini.partition.partition_problem import Edge, Item, Problem, Value
from tests.partition.small_problems import convex, fits, problems

pytest.importorskip("ortools")


@settings(max_examples=60, deadline=None)
@given(problems(most=6, slack=0.0))
def test_the_bottleneck_is_the_least_of_all_convex_stages(problem: Problem) -> None:
    tried = list(convex(problem))
    if not tried:
        return
    least, total = min(ms for ms, _ in tried), sum(max(problem.times([0] * len(problem.items))) for _ in (0,))
    found = [
        (seats, answer)
        for seats in slot_orders(problem)
        if (answer := find_convex(problem, seats, stage_domains(problem, (), (), 0), total * 8 + 100, 2.0)) is not None
    ]
    assert found
    best = min(answer.ms for _, answer in found)
    assert best == pytest.approx(least, abs=1e-3, rel=1e-3)
    assert all(answer.proven for _, answer in found)
    for seats, answer in found:
        stages = [[i for i, s in enumerate(answer.stage_of) if s == at] for at in range(problem.nparts)]
        assert all(stages)
        assert all(answer.stage_of[edge.source] <= answer.stage_of[edge.target] for edge in problem.edges)
        assert fits(problem, stages, [seat.worker for seat in seats])


@settings(max_examples=60, deadline=None)
@given(problems(most=7))
def test_the_answer_is_near_the_best_of_all_convex_stages(problem: Problem) -> None:
    tried = list(convex(problem))
    try:
        found = search(problem)
    except PartitionError:
        return
    ms = max(problem.times([found.worker_of[stage] for stage in found.stage_of]))
    assert ms <= min(ms for ms, _ in tried) * (1 + problem.options.slack) ** 2 * (1 + 1e-5)


def diamond() -> Problem:
    """Two branches, long and short in turn, that no order of items cuts evenly but convex stages do."""
    times = (1.0, 6.0, 5.0, 4.0, 5.0, 1.0)
    items = tuple(Item(f"i{at}", (at,), ms, ms / 2, ms / 2) for at, ms in enumerate(times))
    pairs = ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    return Problem(items, tuple(Edge(a, b, a) for a, b in pairs), (Value(1, 1),) * 5, 2, Options(slack=0.0))


def test_a_branching_graph_may_need_no_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = diamond()
    monkeypatch.setattr(solve_module, "item_orders", lambda _: {"execution": tuple(range(6))})
    found = search(problem)
    assert max(problem.loads(found.stage_of)) == 11.0
    assert found.facts["optimal"]


def test_without_the_solver_the_contiguous_answer_is_given_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve_module, "has_cpsat", lambda: False)
    monkeypatch.setattr(solve_module, "item_orders", lambda _: {"execution": tuple(range(6))})
    found = search(diamond())
    assert found.facts["method"] == "contiguous"
    assert "OR-tools is not installed" in found.facts["note"]
